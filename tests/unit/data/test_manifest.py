import io
import json
import tarfile

import pyarrow as pa
import pyarrow.parquet
import pytest

from motet.core.errors import UserError
from motet.data.headers import read_header
from motet.data.index_build import open_index
from motet.data.listed_frames import frames_in
from motet.data.manifest import Manifest
from unit.data.samples import a_record, write_clip, write_image, write_manifest

IMAGE_TURN = {"from": "human", "value": "<image> What?"}
ANSWER = {"from": "gpt", "value": "A cat."}


def pack(shard, samples: list[dict]) -> None:
    """One dict a sample: member name -> bytes."""
    with tarfile.open(shard, "w") as tar:
        for sample in samples:
            for name, data in sample.items():
                member = tarfile.TarInfo(name)
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))


@pytest.fixture
def media(tmp_path):
    write_image(tmp_path / "imágenes/kätzchen 猫.png", 24, 12)
    write_image(tmp_path / "b.jpg", 36, 24)
    write_clip(tmp_path / "c.flac", 3200)
    return tmp_path


RECORDS = [
    a_record("<image> What?", image="imágenes/kätzchen 猫.png", id=7, task="image"),
    a_record("<audio> then <image>", images=["b.jpg"], audios=["c.flac"]),
    a_record("Only text"),
    a_record("<image><audio><image>", image=["b.jpg", "imágenes/kätzchen 猫.png"], audio="c.flac"),
]


def as_jsonl(folder):
    return write_manifest(folder / "train.jsonl", RECORDS)


def as_json(folder):
    path = folder / "train.json"
    path.write_text(json.dumps(RECORDS, indent=1))
    return path


def as_parquet(folder):
    path = folder / "train.parquet"
    columns = {
        "conversations": [record["conversations"] for record in RECORDS],
        "image": [["imágenes/kätzchen 猫.png"], ["b.jpg"], None, ["b.jpg", "imágenes/kätzchen 猫.png"]],
        "audio": [None, "c.flac", None, "c.flac"],
        "id": [7, None, None, None],
        "task": ["image", None, None, None],
    }
    pyarrow.parquet.write_table(pa.table(columns), path)
    return path


def as_shards(folder):
    files = {name: (folder / name).read_bytes() for name in ("imágenes/kätzchen 猫.png", "b.jpg", "c.flac")}
    samples = []
    for number, record in enumerate(RECORDS):
        names = {kind: record.get(kind, record.get(kind + "s")) or [] for kind in ("image", "audio")}
        names = {kind: [given] if isinstance(given, str) else given for kind, given in names.items()}
        # Members in order of their kind; the record of a sample need not name them.
        members = {
            f"d/{number:03d}.{place}.{name.rpartition('.')[2]}": files[name]
            for place, name in enumerate(names["image"] + names["audio"])
        }
        kept = {key: value for key, value in record.items() if key not in ("image", "images", "audio", "audios")}
        samples.append(members | {f"d/{number:03d}.json": json.dumps(kept).encode()})
    pack(folder / "train-00.tar", samples[:2])
    pack(folder / "train-01.tar", samples[2:])
    return folder / "train-{00..01}.tar"


@pytest.mark.parametrize("write", [as_jsonl, as_json, as_parquet, as_shards])
def test_all_formats_say_the_same(media, tokenizer, write):
    index = open_index(write(media), tokenizer)
    assert len(index) == 4
    expected = [[(24, 12)], [(3200, 16000), (36, 24)], [], [(36, 24), (3200, 16000), (24, 12)]]
    refs = [index.media_refs(example) for example in range(4)]
    assert [[ref.raw for ref in of_example] for of_example in refs] == expected
    assert [[read_header(ref) for ref in of_example] for of_example in refs] == expected
    kinds = [[ref.modality for ref in of_example] for of_example in refs]
    assert kinds == [["image"], ["audio", "image"], [], ["image", "audio", "image"]]
    assert not list(index.bad_examples())
    assert index.record(0)["id"] == 7
    assert index.record(0)["task"] == "image"
    assert index.tokens(3).media == ("image", "audio", "image")


def test_shards_by_folder_and_pattern(media, tokenizer):
    as_shards(media)
    (media / "folder").mkdir()
    for shard in media.glob("*.tar"):
        shard.rename(media / "folder" / shard.name)
    assert len(open_index(media / "folder", tokenizer)) == 4
    assert len(open_index(media / "folder" / "train-*.tar", tokenizer)) == 4
    assert len(open_index(media / "folder" / "train-{00,01}.tar", tokenizer)) == 4
    with pytest.raises(UserError, match=r"train-02\.tar is missing \(1 of 3 are\)"):
        open_index(media / "folder" / "train-{00..02}.tar", tokenizer)


@pytest.mark.parametrize("pattern", ["*/train.jsonl", "{a,b}/train.jsonl", "?/tra*.jsonl"])
def test_media_are_beside_the_file_that_names_them_where_a_pattern_names_folders(tmp_path, tokenizer, pattern):
    for width, name in ((5, "a"), (7, "b")):
        write_image(tmp_path / "all" / name / "0.png", width, 6)
        records = [a_record("<image>", image="0.png"), a_record("<video>", video=["0.png", "0.png"], fps=2)]
        write_manifest(tmp_path / "all" / name / "train.jsonl", records)
    open_index(tmp_path / "all" / pattern, tokenizer)
    # Names of folders in a pattern are none of folders that there are; and the index stays right where they move.
    assert sum(path.is_dir() for path in (tmp_path / "all").iterdir()) == 3
    (tmp_path / "all").rename(tmp_path / "moved")
    index = open_index(tmp_path / "moved" / pattern, tokenizer)
    assert not list(index.bad_examples())
    assert [index.media_refs(example)[0].raw for example in (0, 2)] == [(5, 6), (7, 6)]
    assert index.media_refs(2)[0].path == str(tmp_path / "moved/b/0.png")
    assert [ref.path for ref in frames_in(index.media_refs(3)[0])] == [str(tmp_path / "moved/b/0.png")] * 2


def test_shard_members_named_by_the_record(tmp_path, tokenizer):
    left, right = (
        write_image(tmp_path / name, *size).read_bytes() for name, size in (("l.png", (5, 6)), ("r.png", (7, 8)))
    )
    record = a_record("<image> against <image>", image=["right.png", "left.png"])
    pack(tmp_path / "a.tar", [{"0.left.png": left, "0.right.png": right, "0.json": json.dumps(record).encode()}])
    assert [ref.raw for ref in open_index(tmp_path / "a.tar", tokenizer).media_refs(0)] == [(7, 8), (5, 6)]


def test_blank_lines_and_a_byte_order_mark_are_no_records(tmp_path, tokenizer):
    text = json.dumps(a_record())
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + f"{text}\n\n  \n{text}".encode())
    assert len(open_index(tmp_path / "a.jsonl", tokenizer)) == 2


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{no json", r"line 2: is no JSON \(Expecting property name"),
        ("[1, 2]", "line 2: is a list, but each record must be an object"),
        ('{"id": 3}', "line 2: has no field 'conversations'; it must be a list"),
        ('{"conversations": "hi"}', "line 2: 'conversations' is the text 'hi', but must be a list"),
        ('{"conversations": []}', "line 2: 'conversations' is an empty list"),
        ('{"conversations": ["hi"]}', "line 2: turn 1: is the text 'hi', but must be an object"),
        ('{"conversations": [{"value": "hi"}]}', "line 2: turn 1: has no field 'from'"),
        (
            '{"conversations": [{"from": "human", "value": 3}]}',
            "line 2: turn 1: 'value' is the number 3, but must be text",
        ),
        (
            '{"conversations": [{"from": "bot", "value": "hi"}]}',
            "line 2: turn 1: 'from' is 'bot', but must be one of human",
        ),
        (json.dumps({"conversations": [IMAGE_TURN]}), "line 2: has no answer to learn"),
        (
            json.dumps({"conversations": [IMAGE_TURN, ANSWER]}),
            "line 2: has 1 <image> in its text, but 0 files in 'image'",
        ),
        (json.dumps(a_record(image="a.png")), "line 2: has 0 <image> in its text, but 1 file in 'image'"),
        (json.dumps(a_record("<audio>", audio=["a.wav", "b.wav"])), "line 2: has 1 <audio> in its text, but 2 files"),
        (json.dumps(a_record("<image>", image=3)), "line 2: 'image' is the number 3, but must be a file name"),
        (json.dumps(a_record("<image>", image=[None])), "line 2: 'image' is null, but must be a file name"),
        (json.dumps(a_record("<image>", image="a", images="b")), "line 2: has both 'image' and 'images'"),
    ],
)
def test_wrong_lines_are_named(tmp_path, tokenizer, line, message):
    path = tmp_path / "wrong.jsonl"
    path.write_text(json.dumps(a_record()) + "\n" + line + "\n")
    with pytest.raises(UserError, match=r"wrong\.jsonl, " + message):
        open_index(path, tokenizer)
    assert not list(tmp_path.glob("*/*.rows"))


def test_the_first_wrong_line_is_named_whoever_reads_it(tmp_path, tokenizer):
    lines = [json.dumps(a_record(f"Question {number}")) for number in range(1500)]
    lines[700] = lines[1300] = "{"
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    with pytest.raises(UserError, match="line 701: is no JSON"):
        open_index(tmp_path / "a.jsonl", tokenizer, num_workers=2)


def test_wrong_files(tmp_path, tokenizer):
    def message(name: str, data: bytes | None) -> str:
        if data is not None:
            (tmp_path / name).write_bytes(data)
        with pytest.raises(UserError) as error:
            open_index(tmp_path / name, tokenizer)
        return str(error.value)

    assert "there is no such file" in message("missing.jsonl", None)
    assert "ending '.txt' is unknown" in message("a.txt", b"")
    assert "holds no record" in message("a.jsonl", b"\n")
    assert "line 1: is not UTF-8" in message("b.jsonl", b'{"a": "\xff"}')
    assert "must hold a list of records" in message("a.json", b"{}")
    assert "a.json, record 1: is the number 1" in message("a.json", b"[1]")
    assert "line 2: is no JSON" in message("a.json", b"[\n{]")
    assert "a.json: holds a record a line; give its name the ending .jsonl" in message(
        "a.json", b'{"a": 1}\n{"a": 2}\n'
    )
    (tmp_path / "parts").mkdir()
    assert "is a folder without tar shards; name its files, as " in message("parts", None)
    assert "is no Parquet file" in message("a.parquet", b"PAR")
    assert "is no whole, uncompressed tar file" in message("a.tar", b"x" * 2000)


def test_wrong_shards(tmp_path, tokenizer):
    pack(tmp_path / "a.tar", [{"000.png": b"x"}])
    with pytest.raises(UserError, match=r"a\.tar, key 000: has 0 \.json files"):
        open_index(tmp_path / "a.tar", tokenizer)
    pack(tmp_path / "b.tar", [{"7.png": b"x", "7.json": json.dumps(a_record("<image>", image="other.png")).encode()}])
    with pytest.raises(UserError, match=r"b\.tar, key 7: names 'other\.png', but its sample holds only 7\.png"):
        open_index(tmp_path / "b.tar", tokenizer)


def test_a_found_manifest(tmp_path):
    path = write_manifest(tmp_path / "a.jsonl", [a_record(), a_record()])
    manifest = Manifest.find(str(path))
    assert [entry.where for entry in manifest.entries()] == [f"{path}, line 1", f"{path}, line 2"]
    assert [entry.progress for entry in manifest.entries()] == [0.5, 1.0]


def test_damaged_lines_and_files(tmp_path, tokenizer):
    def message(name: str, data: bytes) -> str:
        (tmp_path / name).write_bytes(data)
        with pytest.raises(UserError) as error:
            open_index(tmp_path / name, tokenizer)
        assert "\n" not in str(error.value)
        return str(error.value).replace(f"{tmp_path}/", "")

    good = json.dumps(a_record()).encode()
    for ending, place, form in ((".jsonl", ", line 2", b"%b\r\n%b\r\n"), (".json", "", b"[%b,%b]")):
        for record, said in (
            (b"[" * 100_000, "nests lists and tables more than 100 deep"),
            (b'{"id": ' + b"1" * 5000 + b"}", "has a number of more than 4,300 digits"),
            (good.replace(b"Hello", rb"\ud800"), r"has half of a character (\ud800 or the like"),
            (good.replace(b"Hello", b"\xed\xa0\x80"), "is not UTF-8 (byte "),
            (b'{"score": NaN, ' + good[1:], "has NaN, for which JSON has no word"),
            (b'{"score": 1e999, ' + good[1:], "has the number 1e999, which is too large"),
            (b'{"conversations": [], ' + good[1:], "has the key 'conversations' twice in one object"),
            (b"\x00", "is no JSON (Expecting value, column "),
        ):
            assert message("a" + ending, form % (good, record)).startswith(f"a{ending}{place}: {said}"), (
                ending,
                record[:20],
            )
    assert (
        message("b.jsonl", (good + b"\n").decode().encode("utf-16")) == "b.jsonl, line 1: is UTF-16; save it as UTF-8"
    )
    assert message("b.json", good.decode().encode("utf-16")) == "b.json: is UTF-16; save it as UTF-8"
    assert message("c.json", b"\x89PNG\r\n") == "c.json: is not UTF-8 (byte 0); save it as UTF-8"
    assert message("d.json", b"") == "d.json: is empty, but must be JSON"
    shard = {"0.json": b"[" * 100_000}
    pack(tmp_path / "a.tar", [shard])
    with pytest.raises(UserError, match=r"a\.tar, key 0: nests lists and tables"):
        open_index(tmp_path / "a.tar", tokenizer)


def test_a_byte_order_mark_and_carriage_returns(tmp_path, tokenizer):
    data = b"\xef\xbb\xbf[" + json.dumps(a_record()).encode() + b"\r\n]\r\n"
    (tmp_path / "a.json").write_bytes(data)
    assert len(open_index(tmp_path / "a.json", tokenizer)) == 1
    pack(tmp_path / "a.tar", [{"0.json": b"\xef\xbb\xbf" + json.dumps(a_record()).encode()}])
    assert open_index(tmp_path / "a.tar", tokenizer).record(0) == a_record()


def test_a_manifest_that_the_system_cannot_read(tmp_path, tokenizer):
    for name in ("a.jsonl", "a.json", "a.parquet"):
        (tmp_path / name).symlink_to("/proc/self/mem")
        with pytest.raises(UserError, match=rf"manifest .*{name}: cannot be read \(Input/output error\)"):
            open_index(tmp_path / name, tokenizer)


def write_parquet(path, columns: dict, **options):
    pyarrow.parquet.write_table(pa.table(columns), path, **options)
    return path


def test_parquet_with_odd_columns(tmp_path, tokenizer):
    """Metadata of any type is no hindrance; null stands for what a row does not have."""
    turns = [
        {"from": "human", "value": "Hello", "loss": None, "tool_calls": None},
        {"from": "gpt", "value": "A cat.", "loss": None, "tool_calls": None},
    ]
    columns = {
        "conversations": [turns, [turns[0], turns[1] | {"loss": True}]],
        "score": [float("nan"), 0.5],
        "task": pa.array(["a", "b"]).dictionary_encode(),
        "nested": [{"a": None, "b": [None, {"c": float("nan")}]}, None],
        "at": pa.array([1, 2], pa.timestamp("us")),
        "tools": [None, []],
        "counts": pa.array([[("a", float("nan"))], None], pa.map_(pa.string(), pa.float64())),
        "price": pa.array([1, 2], pa.decimal128(10)),
    }
    index = open_index(write_parquet(tmp_path / "a.parquet", columns), tokenizer)
    assert index.record(0)["score"] is None
    assert index.record(1)["score"] == 0.5
    assert index.record(0)["counts"] == [["a", None]]
    assert index.record(0)["nested"] == {"a": None, "b": [None, {"c": None}]}
    assert [index.record(row)["task"] for row in (0, 1)] == ["a", "b"]


def test_parquet_that_cannot_be_used(tmp_path, tokenizer):
    def message(path) -> str:
        with pytest.raises(UserError) as error:
            open_index(path, tokenizer)
        assert "\n" not in str(error.value)
        return str(error.value).replace(f"{tmp_path}/", "")

    turns = a_record()["conversations"]
    path = tmp_path / "a.parquet"
    assert message(write_parquet(path, {"conversations": ["x"]})).startswith(
        "a.parquet, row 1: 'conversations' is the t"
    )
    assert message(write_parquet(path, {"conversations": [[turns[0], None]]})) == (
        'a.parquet, row 1: turn 2: is null, but must be an object {"from": ..., "value": ...}'
    )
    assert "holds no record" in message(write_parquet(path, {"conversations": pa.array([], pa.list_(pa.string()))}))
    assert "'image' is the number 3" in message(write_parquet(path, {"conversations": [turns], "image": [3]}))
    twice = pa.table([pa.array([turns]), pa.array([1]), pa.array([2])], names=["conversations", "id", "id"])
    pyarrow.parquet.write_table(twice, path)
    assert message(path) == "a.parquet: has two columns 'id'; each must have a name of its own"
    far = {"conversations": [turns], "at": pa.array([2**62], pa.timestamp("ns"))}
    assert message(write_parquet(path, far)).startswith("a.parquet: is no Parquet file that can be read (")
    not_utf_8 = pa.Array.from_buffers(
        pa.string(), 1, [None, pa.array([0, 1], pa.int32()).buffers()[1], pa.py_buffer(b"\xff")]
    )
    columns = {"conversations": [turns], "task": not_utf_8}
    assert message(write_parquet(path, columns)).startswith("a.parquet: is no Parquet file that can be read (")


def test_parquet_that_is_damaged_in_the_middle(tmp_path, tokenizer):
    path = tmp_path / "a.parquet"
    columns = {"conversations": [a_record(f"Question {row}")["conversations"] for row in range(3000)]}
    write_parquet(path, columns, row_group_size=1500, compression="snappy", write_page_checksum=True)
    data = bytearray(path.read_bytes())
    data[len(data) * 3 // 4 : len(data) * 3 // 4 + 64] = b"\0" * 64
    path.write_bytes(data)
    with pytest.raises(UserError, match=r"a\.parquet, after row \d+: is no Parquet file that can be read \("):
        open_index(path, tokenizer)
    assert not list(tmp_path.glob("*/*.rows"))
