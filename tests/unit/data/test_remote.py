"""Manifests, shards and media by URL: the same examples as from a disk, in a bounded folder of local copies."""

import json
import threading

import fsspec
import pyarrow as pa
import pyarrow.parquet
import pytest

import motet.data.remote
from motet.core.errors import UserError
from motet.data.config import FilesConfig
from motet.data.copies import Copies
from motet.data.headers import read_header
from motet.data.index_build import open_index
from motet.data.media import BadMedia, MediaRef, raise_bad_media
from motet.data.remote import below, folder_of, is_url
from unit.data.samples import a_record, write_clip, write_image, write_manifest
from unit.data.test_manifest import pack
from web import serving

RECORDS = [
    a_record("<image> What?", image="media/a b.png"),
    a_record("<audio> then <image>", images=["media/b.jpg"], audios=["media/c.flac"]),
    a_record("Only text"),
]
MEDIA = ("media/a b.png", "media/b.jpg", "media/c.flac")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(motet.data.remote, "FIRST_WAIT_S", 0.001)
    folder = tmp_path / "files"
    write_image(folder / "media/a b.png", 24, 12)
    write_image(folder / "media/b.jpg", 36, 24)
    write_clip(folder / "media/c.flac", 3200)
    write_manifest(folder / "train.jsonl", RECORDS)
    (folder / "train.json").write_text(json.dumps(RECORDS))
    fields = {name: [record.get(name) for record in RECORDS] for name in ("conversations", "image", "images", "audios")}
    pyarrow.parquet.write_table(pa.table(fields), folder / "train.parquet")
    for number, record in enumerate(RECORDS):
        names = [record["image"]] if "image" in record else [*record.get("images", ()), *record.get("audios", ())]
        members = {f"{number}.{name.rpartition('.')[2]}": (folder / name).read_bytes() for name in names}
        kept = {"conversations": record["conversations"]}
        pack(folder / f"shard-{number}.tar", [members | {f"{number}.json": json.dumps(kept).encode()}])
    return folder


@pytest.fixture
def web(folder):
    with serving(folder) as web:
        yield web


def copies(folder, max_bytes=1 << 20):
    return Copies(str(folder.parent / "copies"), max_bytes)


def contents(index):
    """What training reads of an index: tokens, sizes and bytes of every example."""
    found = []
    for number in range(len(index)):
        refs = index.media_refs(number)
        read = [(ref.modality, ref.raw, ref.open().read()) for ref in refs]
        found.append((index.tokens(number).tokens.tolist(), read))
    return found


@pytest.mark.parametrize("name", ["train.jsonl", "train.json", "train.parquet", "shard-{0..2}.tar"])
def test_examples_by_url_are_those_of_the_disk(folder, web, tokenizer, name):
    here = open_index(folder / name, tokenizer)
    there = open_index(f"{web.url}/{name}", tokenizer, copies=copies(folder))
    assert contents(there) == contents(here) and there.identity == here.identity
    assert there.where(1) == here.where(1).replace(str(folder), web.url)
    # What was copied is not asked for again, but for whether it changed.
    asked = {key: count for key, count in web.asked.items() if key[0] == "GET"}
    assert asked and set(asked.values()) == {1}
    again = open_index(f"{web.url}/{name}", tokenizer, copies=copies(folder))
    assert contents(again) == contents(here) and again.path == there.path
    assert {key: count for key, count in web.asked.items() if key[0] == "GET"} == asked


def test_stores_list_patterns_and_folders(folder, tokenizer):
    store = fsspec.filesystem("memory")
    for path in folder.glob("shard-*.tar"):
        store.pipe_file(f"/lists/{path.name}", path.read_bytes())
    same = contents(open_index(folder / "shard-*.tar", tokenizer))
    for number, spec in enumerate(("memory://lists/shard-*.tar", "memory://lists", "memory://lists/")):
        at = Copies(str(folder.parent / f"copies-{number}"), 1 << 20)
        assert contents(open_index(spec, tokenizer, copies=at)) == same
    store.rm("/lists", recursive=True)


def test_media_are_beside_the_file_that_names_them_where_a_url_names_folders(folder, tokenizer):
    (folder / "media").rename(folder / "one")
    for width, name in ((5, "one"), (7, "two")):
        write_image(folder / name / "a b.png", width, 6)
        write_manifest(folder / name / "train.jsonl", [a_record("<image>", image="a b.png")])
    with serving(folder) as web:
        index = open_index(f"{web.url}/{{one,two}}/train.jsonl", tokenizer, copies=copies(folder))
        assert [ref.raw for number in range(2) for ref in index.media_refs(number)] == [(5, 6), (7, 6)]
        assert contents(index) == contents(open_index(folder / "*" / "train.jsonl", tokenizer))


def test_a_manifest_of_the_disk_may_name_media_by_url(folder, web, tokenizer):
    named = [json.loads(json.dumps(record).replace("media/", f"{web.url}/media/")) for record in RECORDS]
    named[0]["image"] = named[0]["image"].replace(" ", "%20")
    manifest = write_manifest(folder / "urls.jsonl", named)
    here = open_index(folder / "train.jsonl", tokenizer)
    assert contents(open_index(manifest, tokenizer, copies=copies(folder))) == contents(here)


def test_parts_of_shards_are_read_where_the_whole_is_gone(folder, web, tokenizer):
    index = open_index(f"{web.url}/shard-{{0..2}}.tar", tokenizer, copies=copies(folder))
    same = contents(index)
    for path in (folder.parent / "copies").glob("??/*"):
        path.unlink()
    web.asked.clear()
    assert contents(index) == same
    # Three parts, of which the second shard has two.
    assert sum(web.asked.values()) == 3
    web.parts = False
    for path in (folder.parent / "copies").glob("??/*"):
        path.unlink()
    ref = index.media_refs(0)[0]
    with pytest.raises(BadMedia, match="its server sends whole files only"), raise_bad_media(ref):
        ref.open()


def test_what_changed_is_copied_anew(folder, web, tokenizer):
    spec, at = f"{web.url}/train.jsonl", copies(folder)
    open_index(spec, tokenizer, copies=at)
    # As large as before.
    write_manifest(folder / "train.jsonl", [*RECORDS[:2], a_record("Only TEXT")])
    write_image(folder / "media/a b.png", 36, 24)
    index = open_index(spec, tokenizer, copies=at)
    assert index.record(2)["conversations"][0]["value"] == "Only TEXT"
    assert index.media_refs(0)[0].raw == (36, 24)


def test_a_bad_file_is_looked_at_again(folder, web, tokenizer):
    good = (folder / "media/b.jpg").read_bytes()
    (folder / "media/b.jpg").write_bytes(b"no image")
    spec, at = f"{web.url}/train.jsonl", copies(folder)
    (bad,) = open_index(spec, tokenizer, copies=at).bad_examples()
    assert (bad.example, bad.path) == (1, f"{web.url}/media/b.jpg")
    (folder / "media/b.jpg").write_bytes(good)
    assert not list(open_index(spec, tokenizer, copies=at).bad_examples())


def test_what_fails_for_a_while_is_tried_again(folder, web, tokenizer):
    tries = motet.data.remote.ATTEMPTS
    web.failing.update(dict.fromkeys(("train.jsonl", *MEDIA), tries - 1))
    index = open_index(f"{web.url}/train.jsonl", tokenizer, copies=copies(folder))
    assert not list(index.bad_examples())
    web.failing["media/b.jpg"] = 10**6
    fresh = MediaRef("image", f"{web.url}/media/b.jpg", copies=copies(folder))
    web.asked.clear()
    with pytest.raises(UserError, match=rf"{web.url}/media/b.jpg cannot be reached, in {tries} attempts \(.*HTTP 503"):
        read_header(fresh)
    assert web.asked["GET", "media/b.jpg"] == tries


def test_a_file_that_is_not_there_is_asked_for_once_and_is_bad(folder, web, tokenizer):
    (folder / "media/b.jpg").unlink()
    (bad,) = open_index(f"{web.url}/train.jsonl", tokenizer, copies=copies(folder)).bad_examples()
    assert bad.reason == "no such file"
    web.asked.clear()
    with pytest.raises(BadMedia, match="no such file"):
        read_header(MediaRef("image", f"{web.url}/media/b.jpg", copies=copies(folder)))
    assert sum(web.asked.values()) == 1


def test_an_answer_that_is_cut_off_is_no_file(folder, web):
    web.cut = 1
    at = copies(folder)
    with pytest.raises(UserError, match=r"cannot be reached, in 5 attempts \(EOFError: .* bytes came"):
        at.open(f"{web.url}/media/b.jpg")
    with pytest.raises(UserError, match=r"EOFError: 19 bytes came"):
        at.open(f"{web.url}/shard-1.tar", 10, 20)
    assert at.used_bytes() == 0


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("none.jsonl", "there is no such file"),
        ("shard-{0..3}.tar", "shard-3.tar is missing (1 of 4 are)"),
        ("train.txt", "its ending '.txt' is unknown"),
        ("{train.jsonl,shard-0.tar}", "which are of two formats"),
    ],
)
def test_what_a_url_does_not_name_is_a_sentence(folder, web, tokenizer, spec, said):
    (folder / "train.txt").write_text("")
    with pytest.raises(UserError) as caught:
        open_index(f"{web.url}/{spec}", tokenizer, copies=copies(folder))
    assert said in str(caught.value) and web.url in str(caught.value)


@pytest.mark.parametrize("spec", ["ftp://x.org/a.jsonl", "ssh://x.org/a.jsonl"])
def test_other_protocols_are_refused(folder, tokenizer, spec):
    with pytest.raises(UserError, match=r"URLs of '(ftp|ssh)://' are not read; those are of s3, gs, "):
        open_index(spec, tokenizer, copies=copies(folder))


def test_without_a_folder_nothing_is_downloaded(folder, web, tokenizer):
    with pytest.raises(UserError, match=r"is a URL, and nothing is downloaded .*; set data\.cache_folder"):
        open_index(f"{web.url}/train.jsonl", tokenizer)
    with pytest.raises(ValueError, match="cache_bytes has no effect without cache_folder"):
        FilesConfig(train=["a.jsonl"], cache_bytes=1)
    assert not web.asked


def test_a_missing_package_is_named(folder, tokenizer, monkeypatch):
    def gone(*_, **__):
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(fsspec, "filesystem", gone)
    with pytest.raises(UserError, match=r'missing \(Install s3fs to access S3\); run pip install "motet\[remote\]"'):
        open_index("s3://bucket/train.jsonl", tokenizer, copies=copies(folder))


@pytest.mark.parametrize("name", ["/etc/hostname", "../../other.org/a.png"])
def test_a_remote_record_names_nothing_of_this_machine(folder, web, tokenizer, name):
    write_manifest(folder / "train.jsonl", [a_record("<image>", image=name)])
    with pytest.raises(UserError, match=r"train\.jsonl, line 1: image 1: '.*' is not in the store of its manifest"):
        open_index(f"{web.url}/train.jsonl", tokenizer, copies=copies(folder))


def test_names_of_files_by_url():
    assert below("s3://bucket/data", "../media/a.png") == "s3://bucket/media/a.png"
    assert folder_of("https://x.org/a/train.jsonl?version=/2") == "https://x.org/a"
    assert is_url("S3://bucket/a") and not is_url("file:///a") and not is_url("a://b"[:2])


def write_numbered(folder, count, size):
    for number in range(count):
        (folder / f"{number}.bin").write_bytes(bytes([number]) * size)


def test_copies_never_take_more_than_their_bound(folder, web):
    write_numbered(folder, 12, 1000)
    at = Copies(str(folder.parent / "copies"), 4500)
    for number in [*range(12), 11, 11, 3]:
        assert at.open(f"{web.url}/{number}.bin").read() == bytes([number]) * 1000
        assert at.used_bytes() <= 4500
    assert web.asked["GET", "11.bin"] == 1 and web.asked["GET", "3.bin"] == 2
    # A copy that is open stays readable when it has made room.
    kept = at.open(f"{web.url}/0.bin")
    for number in range(1, 9):
        at.open(f"{web.url}/{number}.bin").close()
    assert kept.read() == bytes(1000)
    (folder / "large.bin").write_bytes(bytes(5000))
    with pytest.raises(UserError, match=r"has 5,000 bytes, and data\.cache_bytes = 4,500 is less than one file"):
        at.open(f"{web.url}/large.bin")


def test_readers_at_once_share_one_copy_and_the_bound(folder, web):
    write_numbered(folder, 8, 1000)
    at, wrong, most = Copies(str(folder.parent / "copies"), 4500), [], []

    def read(first):
        for number in range(first, first + 24):
            if at.open(f"{web.url}/{number % 8}.bin").read() != bytes([number % 8]) * 1000:
                wrong.append(number)
            most.append(at.used_bytes())

    readers = [threading.Thread(target=read, args=(first,)) for first in (0, 0, 4, 4)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    assert not wrong and max(most) <= 4500


def test_what_a_killed_process_left_makes_room(folder, web):
    write_numbered(folder, 2, 1000)
    at = Copies(str(folder.parent / "copies"), 1500)
    at.open(f"{web.url}/0.bin").close()
    (copy,) = (folder.parent / "copies").glob("??/*")
    copy.rename(f"{copy}.part")
    assert at.open(f"{web.url}/1.bin").read() == bytes([1]) * 1000
    assert at.used_bytes() == 1000


def test_a_folder_that_cannot_hold_copies_is_named(folder, web):
    (folder / "taken").write_text("")
    with pytest.raises(UserError, match=r"data\.cache_folder: .*taken cannot hold copies \(Not a directory\)"):
        Copies(str(folder / "taken"), 100).open(f"{web.url}/media/b.jpg")
