"""Records as other trainers and hubs write them: the same tokens, lengths and media whichever way they are written."""

import base64
import bz2
import gzip
import io
import json
import lzma
import tarfile

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from motet.core.errors import UserError
from motet.core.example import Media
from motet.data.audio import AudioTransform
from motet.data.compressed import open_decompressed
from motet.data.conversation import parse_conversation
from motet.data.dataset import Dataset
from motet.data.decode import Decoder
from motet.data.images import ImageTransform
from motet.data.index_build import open_index
from motet.data.media import BadMedia
from motet.data.modality import Modality
from unit.data.samples import a_record, write_clip, write_image, write_manifest

MODALITIES = {
    "vision": Modality(ImageTransform(6, 2), lambda sizes: sizes.prod(axis=1) // 4, lambda sizes: sizes.prod(axis=1)),
    "audio": Modality(AudioTransform(num_mels=8), lambda sizes: -(-sizes[:, 0] // 4), lambda sizes: sizes[:, 0]),
}
PLAIN = a_record("<image>What? <audio>", image="a.png", audio="a.wav")


@pytest.fixture
def folder(tmp_path):
    write_image(tmp_path / "a.png", 36, 24)
    write_image(tmp_path / "b.png", 12, 24)
    write_clip(tmp_path / "a.wav", 1000)
    return tmp_path


def opened(manifest, tokenizer):
    return Dataset.open([manifest], tokenizer, MODALITIES)


def contents(dataset):
    """Of each example its tokens, targets and lengths, and the rows of its media."""
    found = []
    lengths = dataset.batch_lengths(np.arange(dataset.num_examples), 1)
    with Decoder(dataset.transforms) as decoder:
        for example in range(dataset.num_examples):
            tokens, refs = dataset.tokens(example), dataset.media_refs(example)
            media = decoder.load(refs, [dataset.readers_of(ref) for ref in refs])
            assert all(isinstance(item, Media) for item in media), media
            rows = [item.values.tobytes() for item in media]
            sequence, num_targets = int(lengths.sequence[example]), int(lengths.num_targets[example])
            assert num_targets == tokens.targets[1:].sum()
            found.append((tokens.tokens.tolist(), tokens.targets.tolist(), tokens.media, sequence, rows))
    return found


def url(path, kind="image/png"):
    return f"data:{kind};base64,{base64.b64encode(path.read_bytes()).decode()}"


def message(*parts):
    return {"messages": [{"role": "user", "content": list(parts)}, {"role": "assistant", "content": "A cat."}]}


TEXT = {"type": "text", "text": "What? "}


def test_parts_of_every_spelling_say_the_same(folder, tokenizer):
    image, clip = folder / "a.png", folder / "a.wav"
    data = base64.b64encode(clip.read_bytes()).decode()
    records = [
        PLAIN,
        message({"type": "image", "image": "a.png"}, TEXT, {"type": "audio", "audio": "a.wav"}),
        message({"type": "image"}, TEXT, {"type": "audio"}) | {"images": ["a.png"], "audios": ["a.wav"]},
        message({"type": "image"}, TEXT, {"type": "audio", "path": "a.wav"}) | {"images": ["a.png"]},
        message({"image": f"file://{image}"}, TEXT, {"type": "audio_url", "audio_url": {"url": str(clip)}}),
        message(
            {"type": "image_url", "image_url": {"url": url(image), "detail": "auto"}},
            TEXT,
            {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}},
        ),
        message(
            {"type": "image", "base64": base64.b64encode(image.read_bytes()).decode(), "url": None},
            TEXT,
            {"type": "audio", "url": url(clip, "audio/wav")},
        ),
        PLAIN | {"image": url(image), "audio": [url(clip, "audio/wav")]},
    ]
    found = contents(opened(write_manifest(folder / "train.jsonl", records), tokenizer))
    assert found[0][3] > 10
    for number, other in enumerate(found):
        assert other == found[0], number


@pytest.mark.parametrize(
    ("part", "said"),
    [
        ({"type": "image", "image": ["a.png", "b.png"]}, "part 1: 'image' is a list, but must be a file name"),
        ({"type": "video", "video": ["a.png"], "max_frames": 2}, "part 1: has a field 'max_frames', which is not"),
        ({"type": "video", "video": ["a.png"], "fps": 0}, "'fps' is the number 0, but must be the frames a second"),
        ({"type": "video", "video": "a.mp4", "fps": 2}, "part 1: has a field 'fps', which is not understood in a part"),
        ({"type": "file"}, "part 1: its type is the text 'file', but must be one of text, image, image_url"),
        ("text", "part 1: is the text 'text', but must be an object with a 'type'"),
        ({"type": "text", "text": 3}, "part 1: 'text' is the number 3, but must be text"),
        ({"type": "image", "max_pixels": 3}, "part 1: has a field 'max_pixels', which is not understood in a part"),
        ({"type": "image", "path": "a.png", "url": "b.png"}, "part 1: has both 'path' and 'url'; give one of them"),
        ({"type": "image_url", "image_url": {"url": "a.png", "detail": "low"}}, "'image_url' has a field 'detail'"),
        (
            {"type": "image", "url": "https://x.org/a.png"},
            "image 1 is the URL 'https://x.org/a.png', and nothing is downloaded without a folder for local copies",
        ),
        ({"type": "image", "image": {"bytes": None, "path": None}}, "'image' has neither bytes nor a path"),
        ({"type": "image", "url": "data:image/png;base64,AAA"}, "image 1 is a data URL whose base64 is damaged"),
        ({"type": "image", "url": "data:image/png;base64,"}, "image 1 is a data URL without a byte"),
        ({"type": "text", "text": "<image>"}, "a text among parts holds '<image>'; there each item is a part"),
        ({"type": "image"}, "has 1 <image> in its text, but 0 files in 'image'"),
    ],
)
def test_a_part_that_is_not_understood_is_refused_by_its_line(folder, tokenizer, part, said):
    manifest = write_manifest(folder / "train.jsonl", [PLAIN, message(part, TEXT)])
    with pytest.raises(UserError) as caught:
        opened(manifest, tokenizer)
    assert "train.jsonl, line 2" in str(caught.value) and said in str(caught.value)


def test_bytes_that_are_no_image_leave_their_example_out(folder, tokenizer):
    records = [PLAIN, message({"type": "image", "url": "data:image/png;base64,AAAA"}, TEXT)]
    manifest = write_manifest(folder / "train.jsonl", records)
    for _ in range(2):  # The second time the index is there, and what was bad is looked at again.
        dataset = opened(manifest, tokenizer)
        (bad,) = dataset.left_out.named
        assert (bad.where, bad.file) == (f"{folder}/train.jsonl, line 2", "image 1, held by the record")
        assert bad.reason == "is no image that Pillow knows, or its header is damaged"


def test_records_are_kept_without_the_bytes_that_they_hold(folder, tokenizer):
    record = PLAIN | {"image": url(folder / "a.png"), "task": "naming"}
    index = open_index(write_manifest(folder / "train.jsonl", [record, PLAIN]), tokenizer)
    assert index.record(0) == PLAIN | {"image": "data:image/png;base64,", "task": "naming"}
    ref = index.media_refs(0)[0]
    assert ref.open().read() == (folder / "a.png").read_bytes()
    assert index.media_refs(1)[0].path == str(folder / "a.png")
    # An index that has lost what it held is noticed where that is decoded.
    rows = index.path.with_name(index.about["rows"])
    data = rows.read_bytes()
    rows.write_bytes(bytes(ref.num_bytes) + data[ref.num_bytes :])
    with Decoder(opened(folder / "train.jsonl", tokenizer).transforms) as decoder:
        (item,) = decoder.load([ref], [("vision",)])
    assert isinstance(item, BadMedia) and item.path == "image 1, held by the record"


def compressed(opener, text):
    if opener is None:
        return pa.Codec("zstd").compress(text, asbytes=True)
    held = io.BytesIO()
    with opener(held, "wb") as file:
        file.write(text)
    return held.getvalue()


def test_frames_of_zstd_that_follow_each_other_are_one_file(folder, tokenizer):
    plain = write_manifest(folder / "train.jsonl", [PLAIN, a_record("Hi")])
    path, lines = folder / "train.jsonl.zst", plain.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(pa.Codec("zstd").compress(line, asbytes=True) for line in lines))
    assert contents(opened(path, tokenizer)) == contents(opened(plain, tokenizer))


@pytest.mark.parametrize(("ending", "opener"), [("gz", gzip.open), ("bz2", bz2.open), ("xz", lzma.open), ("zst", None)])
def test_compressed_lines_are_lines(folder, tokenizer, ending, opener):
    plain = write_manifest(folder / "train.jsonl", [PLAIN, a_record("Hi")])
    path = folder / f"train.jsonl.{ending}"
    path.write_bytes(compressed(opener, plain.read_bytes()))
    assert contents(opened(path, tokenizer)) == contents(opened(plain, tokenizer))
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(UserError, match=rf"train\.jsonl\.{ending}: is damaged or cut off, and cannot be decompressed"):
        opened(path, tokenizer)


@pytest.mark.parametrize(("ending", "module"), [("gz", gzip), ("bz2", bz2), ("xz", lzma)])
def test_streams_that_follow_each_other_are_one_file_and_a_damaged_one_is_no_end(folder, tokenizer, ending, module):
    """Parallel compressors write many streams. Python's readers end where a later one of bzip2 or xz begins wrongly."""
    records = [a_record("Hi", "word " * number) for number in range(3)]
    plain, path = write_manifest(folder / "train.jsonl", records), folder / f"train.jsonl.{ending}"
    streams = [module.compress(line) for line in plain.read_bytes().splitlines(keepends=True)]
    padding = bytes(4)
    path.write_bytes(streams[0] + padding + streams[1] + streams[2] + padding)
    assert contents(opened(path, tokenizer)) == contents(opened(plain, tokenizer))
    for damaged in (b"XX" + streams[1][2:] + streams[2], b"behind"):
        path.write_bytes(streams[0] + damaged)
        with pytest.raises(UserError, match=rf"train\.jsonl\.{ending}: is damaged or cut off"):
            opened(path, tokenizer)


@pytest.mark.parametrize(("ending", "module"), [("bz2", bz2), ("xz", lzma)])
def test_a_compressed_file_is_read_from_any_place(tmp_path, ending, module):
    data = np.random.default_rng(0).integers(0, 9, 300_000, dtype=np.uint8).tobytes()
    path = tmp_path / f"a.{ending}"
    path.write_bytes(b"".join(module.compress(data[start : start + 70_000]) for start in range(0, len(data), 70_000)))
    with open_decompressed(path) as file:
        for place in (0, 200_000, 69_990, 299_999, 300_000, 5):
            file.seek(place)
            assert file.read(80_000) == data[place : place + 80_000]


def write_tar(path, mode, members):
    with tarfile.open(path, mode) as tar:
        for name, data in members.items():
            about = tarfile.TarInfo(name)
            about.size = len(data)
            tar.addfile(about, io.BytesIO(data))
    return path


def sample(folder, key, record):
    return {
        f"{key}.json": json.dumps(record).encode(),
        f"{key}.png": (folder / "a.png").read_bytes(),
        f"{key}.wav": (folder / "a.wav").read_bytes(),
    }


@pytest.mark.parametrize("ending", ["tar.gz", "tgz", "tar.bz2", "tar.xz", "tar.zst"])
def test_compressed_shards_are_shards(folder, tokenizer, ending):
    record = {"conversations": PLAIN["conversations"]}
    members = sample(folder, "0", record) | sample(folder, "1", record | {"image": "1.png"})
    plain = write_tar(folder / "a.tar", "w", members)
    if ending == "tar.zst":
        packed = folder / "b.tar.zst"
        packed.write_bytes(compressed(None, plain.read_bytes()))
    else:
        packed = write_tar(folder / f"b.{ending}", f"w:{ending[-3:].strip('.').replace('tgz', 'gz')}", members)
    assert contents(opened(packed, tokenizer)) == contents(opened(plain, tokenizer))
    packed.write_bytes(packed.read_bytes()[:-12])
    with pytest.raises(UserError, match=rf"b\.{ending}: is (no whole, compressed tar file|cut off)"):
        opened(packed, tokenizer)


def test_pairs_of_img2dataset_are_documents(folder, tokenizer):
    about = {"caption": "not read", "url": "https://x.org/a.jpg", "key": "00", "status": "success", "width": 36}
    image = (folder / "a.png").read_bytes()
    members = {"00.png": image, "00.txt": b"A cat.\n", "00.json": json.dumps(about).encode(), "01.png": image}
    members["01.txt"] = b"A dog."
    for ending, mode in (("tar", "w"), ("tar.gz", "w:gz")):
        dataset = opened(write_tar(folder / f"pairs.{ending}", mode, members), tokenizer)
        assert dataset.record(0)["metadata"] == about
        same = [{"texts": [None, text], "images": ["a.png", None]} for text in ("A cat.", "A dog.")]
        assert contents(dataset) == contents(opened(write_manifest(folder / "same.jsonl", same), tokenizer))
    for name, data, said in (
        ("01.txt", b" ", "key 01: its .txt is empty"),
        ("01.txt", b"\xff", "key 01: its .txt is not UTF-8"),
        ("01.jpg", image, "key 01: has 2 media files and 1 .txt, but a pair is one of each"),
    ):
        with pytest.raises(UserError, match=said):
            opened(write_tar(folder / "wrong.tar", "w", members | {name: data}), tokenizer)


@pytest.mark.parametrize(
    "record",
    [
        {"instruction": "<image> What?", "output": "A cat."},
        {"query": "<image> What?", "response": "A cat."},
        {"texts": ["A cat.", None], "images": [None, "png"]},
    ],
)
def test_a_caption_beside_a_record_is_not_learned(folder, tokenizer, record):
    members = {"0.png": (folder / "a.png").read_bytes(), "0.json": json.dumps(record).encode(), "0.txt": b"A dog."}
    assert opened(write_tar(folder / "beside.tar", "w", members), tokenizer).record(0) == record


def test_all_text_of_a_document_is_learned(folder, tokenizer):
    records = [
        {"text": "A cat and a dog."},
        {"texts": ["A cat ", None, "and a dog."], "images": [None, "a.png", None], "metadata": "[]"},
        {"text": "A cat <image>and a dog.", "image": "a.png"},
        {"document": [{"type": "image", "path": "a.png"}, {"type": "image", "path": "b.png"}, TEXT]},
    ]
    dataset = opened(write_manifest(folder / "train.jsonl", records), tokenizer)
    found = contents(dataset)
    assert found[1] == found[2]
    for number, text in enumerate(["A cat and a dog.", "A cat and a dog.", "A cat and a dog.", "What? "]):
        tokens = dataset.tokens(number)
        learned = tokens.tokens[tokens.targets]
        assert learned[-1] == tokenizer.end_token
        # The first token of all is predicted by nothing.
        starts_with_text = not (len(tokens.media) and tokens.media_positions[0] == 0)
        assert text.endswith(tokenizer.decode(learned)) and len(tokenizer.decode(learned)) > len(text) - 4
        assert (
            tokens.targets.sum() == len(tokens.tokens) - len(tokens.media) - starts_with_text
        ) and not dataset.has_answer(number)


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ({"texts": ["a"], "images": ["a.png"]}, "has both of a text and an image at place 1 of 'texts' and 'images'"),
        ({"texts": [None], "images": [None]}, "has neither of a text and an image at place 1"),
        ({"texts": ["a", None], "images": [None]}, "'texts' and 'images' must be lists of one length"),
        ({"texts": [None], "images": ["a.png"]}, "'texts' has no text to learn"),
        ({"texts": "abc"}, "'texts' and 'images' must be lists"),
        ({"texts": [3], "images": [None]}, "place 1 of 'texts' is the number 3, but must be text or null"),
        (
            {"texts": [None, "a"], "images": ["ftp://x.org/a.png", None]},
            "place 1 of 'images' is the URL 'ftp://x.org/a.png': URLs of 'ftp://' are not read; those are of s3, gs",
        ),
        ({"texts": ["a"], "text": "b"}, "has both 'texts' and 'text', each a document; give one of them"),
        ({"text": 3}, "'text' is the number 3, but must be the text of a document"),
        ({"text": "a", "system": "b"}, "has a field 'system', which is of conversations"),
        ({"text": "a <eos> b"}, "the text of the document holds '<eos>'"),
        ({"text": "a", "image": "a.png"}, "has 0 <image> in its text, but 1 file in 'image'"),
        ({"document": "a"}, "'document' is the text 'a', but must be a list of typed parts"),
        ({"label": 1, "text": "a"}, "has a field 'label'"),
    ],
)
def test_a_document_that_is_not_understood_is_refused_by_its_line(folder, tokenizer, record, said):
    with pytest.raises(UserError) as caught:
        opened(write_manifest(folder / "train.jsonl", [PLAIN, record]), tokenizer)
    assert "train.jsonl, line 2" in str(caught.value) and said in str(caught.value)


def columns(folder):
    """Rows as HF datasets keep them: bytes with the names that they had, null where a row has none."""
    image, clip = ({"bytes": (folder / name).read_bytes(), "path": name} for name in ("a.png", "a.wav"))
    return {
        "conversations": [PLAIN["conversations"], a_record("Hi")["conversations"], PLAIN["conversations"]],
        "image": [image, None, {"bytes": None, "path": "a.png"}],
        "audio": [clip, None, clip],
    }


def test_bytes_in_parquet(folder, tokenizer):
    pyarrow.parquet.write_table(pa.table(columns(folder)), folder / "a.parquet")
    plain = write_manifest(folder / "train.jsonl", [PLAIN, a_record("Hi"), PLAIN])
    assert contents(opened(folder / "a.parquet", tokenizer)) == contents(opened(plain, tokenizer))
    for number in range(2):
        pyarrow.parquet.write_table(pa.table(columns(folder)), folder / f"part-{number}.parquet")
    assert contents(opened(folder / "part-*.parquet", tokenizer)) == 2 * contents(opened(plain, tokenizer))
    with pytest.raises(UserError, match=r"names a\.parquet and train\.jsonl, which are of two formats"):
        opened(folder / "{a.parquet,train.jsonl}", tokenizer)


def test_a_column_of_bytes_is_no_text(folder, tokenizer):
    pyarrow.parquet.write_table(pa.table({"text": [b"A cat."]}), folder / "a.parquet")
    with pytest.raises(UserError, match="row 1: holds bytes in place of text; write the column as text"):
        opened(folder / "a.parquet", tokenizer)


def save(folder, tables):
    """What `Dataset.save_to_disk` of HF datasets writes."""
    folder.mkdir(parents=True)
    names = [f"data-{number:05d}-of-{len(tables):05d}.arrow" for number in range(len(tables))]
    for name, table in zip(names, tables):
        with pa.OSFile(str(folder / name), "wb") as file, pa.ipc.new_stream(file, table.schema) as stream:
            stream.write_table(table)
    state = {"_data_files": [{"filename": name} for name in names], "_fingerprint": "1", "_split": "train"}
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text("{}")


def test_datasets_on_disk(folder, tokenizer):
    table = pa.table(columns(folder))
    save(folder / "saved/train", [table.slice(0, 1), table.slice(1)])
    (folder / "saved/dataset_dict.json").write_text('{"splits": ["train"]}')
    write_image(folder / "saved/a.png", 36, 24)
    plain = write_manifest(folder / "train.jsonl", [PLAIN, a_record("Hi"), PLAIN])
    dataset = opened(folder / "saved/train", tokenizer)
    assert contents(dataset) == contents(opened(plain, tokenizer))
    assert dataset.where(2) == f"{folder}/saved/train/data-00001-of-00002.arrow, row 2"
    with pytest.raises(UserError, match=r"saved: holds several splits .*; name one of them, as .*saved/train"):
        opened(folder / "saved", tokenizer)
    arrow = folder / "saved/train/data-00001-of-00002.arrow"
    arrow.write_bytes(arrow.read_bytes()[:300])
    with pytest.raises(UserError, match=r"00001-of-00002\.arrow.*: is no Arrow stream that can be read"):
        opened(folder / "saved/train", tokenizer)
    arrow.unlink()
    with pytest.raises(UserError, match=r"its file data-00001-of-00002\.arrow is missing"):
        opened(folder / "saved/train", tokenizer)


def test_instructions_of_alpaca_are_turns(folder, tokenizer):
    turns = [("Hi", "Hello"), ("<image>What? <audio>\nSay it.", "A cat.")]
    written = [
        {"from": name, "value": text} for pair in turns for name, text in zip(("human", "gpt"), pair, strict=True)
    ]
    media = {"image": "a.png", "audio": "a.wav", "system": "Be brief."}
    records = [
        {"conversations": written} | media,
        {
            "instruction": "<image>What? <audio>",
            "input": "Say it.",
            "output": "A cat.",
            "history": [["Hi", "Hello"]],
        }
        | media,
    ]
    records.append(
        {"query": "<image>What? <audio>\nSay it.", "response": "A cat.", "history": [["Hi", "Hello"]]} | media
    )
    first, second, third = contents(opened(write_manifest(folder / "train.jsonl", records), tokenizer))
    assert first == second == third
    alone = [a_record("Hi"), {"instruction": "Hi", "input": "", "output": a_record("Hi")["conversations"][1]["value"]}]
    first, second = contents(opened(write_manifest(folder / "alone.jsonl", alone), tokenizer))
    assert first == second


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"text": "### Instruction: Add."}, "has both 'text', which would be learned whole, and 'instruction'"),
        ({"query": "Add."}, "has both 'query' and 'instruction' with 'output'"),
        (
            {"instruction": None, "query": "Add.", "response": "7", "input": "4"},
            "has both 'input' and 'query' with 'resp",
        ),
        ({"output": None}, "'output' is null, but must be text"),
        ({"input": 3}, "'input' is the number 3, but must be text"),
        ({"history": [["Hi"]]}, "'history' must be pairs of a question and an answer, but number 1 is not"),
        ({"history": "Hi"}, "'history' is the text 'Hi', but must be a list of pairs"),
    ],
)
def test_an_instruction_that_is_not_understood_is_refused_by_its_line(folder, tokenizer, fields, said):
    record = {"instruction": "Add.", "output": "7"} | fields
    with pytest.raises(UserError, match=rf"line 1: {said}"):
        opened(write_manifest(folder / "train.jsonl", [record]), tokenizer)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"history": [["Hi", "Hello"]]}, "has both 'conversations' and 'history', which would be left out"),
        (
            {"query": "Subtract.", "response": "7"},
            "has both 'conversations' and 'query' with 'response', which are not",
        ),
        ({"instruction": "Add.", "output": "8"}, "has both 'conversations' and 'instruction' with 'output', which are"),
        ({"instruction": "Add.", "output": "7", "query": "Subtract.", "history": []}, ""),
    ],
)
def test_other_turns_beside_turns_are_refused_unless_they_are_among_them(fields, said):
    turns = [{"from": "human", "value": "Add."}, {"from": "gpt", "value": "7"}]
    record = {"conversations": turns} | fields
    if not said:
        assert parse_conversation(record, "line 1") == parse_conversation({"conversations": turns}, "line 1")
        return
    with pytest.raises(UserError, match=rf"line 1: {said}"):
        parse_conversation(record, "line 1")
