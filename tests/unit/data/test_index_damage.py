"""An index is a cache: damaged, foreign or outdated it is built anew, or refused in a sentence, and never believed."""

import os
import random
import resource
import shutil
import signal
import threading
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from motet.core.errors import UserError
from motet.data import index_build
from motet.data.index import DamagedIndex, Index
from motet.data.index_build import open_index
from motet.data.index_entries import EntryReader, HeaderCheck
from motet.data.index_lock import build_lock
from motet.data.manifest import Manifest
from unit.data.samples import a_record, write_clip, write_image, write_manifest


@pytest.fixture
def folder(tmp_path):
    write_image(tmp_path / "a.png", 24, 12)
    write_clip(tmp_path / "b.wav", 1600)
    return tmp_path


@pytest.fixture
def manifest(folder):
    records = [
        a_record("<image> and <audio>", image="a.png", audio="b.wav"),
        a_record("<image>", image="missing.png"),
        a_record(),
    ]
    return write_manifest(folder / "m.jsonl", records)


def contents(index: Index) -> tuple:
    lengths = index.lengths
    columns = [lengths.num_tokens, lengths.num_targets, lengths.item_offsets, lengths.modality, *lengths.raw]
    columns += lengths.turn
    rows = [(index.where(n), index.record(n), index.media_refs(n), index.tokens(n).tokens.tolist()) for n in range(3)]
    return [column.tolist() for column in columns], list(index.bad_examples()), rows, index.identity


def test_no_damage_of_the_lengths_is_believed(manifest, tokenizer):
    index = open_index(manifest, tokenizer)
    path, expected, data = index.path, contents(index), index.path.read_bytes()
    rng, num_damaged = random.Random(0), 0
    for _ in range(400):
        damaged = bytearray(data)
        damaged[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        # In a file of its own: the one that is open is mapped, and must not change under it.
        path.unlink()
        path.write_bytes(damaged)
        try:
            assert contents(Index(path, manifest.parent)) == expected, "the flipped bit is one of padding"
        except (DamagedIndex, OSError):
            num_damaged += 1
    assert num_damaged > 100
    assert contents(open_index(manifest, tokenizer)) == expected, "and it is built anew"


def test_a_damaged_row_is_named(manifest, tokenizer):
    index = open_index(manifest, tokenizer)
    (rows,) = index.path.parent.glob("*.rows")
    data = bytearray(rows.read_bytes())
    data[len(data) // 2] ^= 1
    rows.write_bytes(data)
    with pytest.raises(UserError, match=r"m\.jsonl\.motet-index is damaged .* delete it, and it is built anew"):
        contents(Index(index.path, manifest.parent))
    rows.write_bytes(data[:-1])
    with pytest.raises(DamagedIndex, match="does not fit its rows"):
        Index(index.path, manifest.parent)
    assert contents(open_index(manifest, tokenizer))[2][0][0] == f"{manifest}, line 1"
    (rows,) = index.path.parent.glob("*.rows")
    rows.unlink()
    os.mkfifo(rows)
    assert contents(open_index(manifest, tokenizer))[2][0][0] == f"{manifest}, line 1"


@pytest.mark.parametrize("kind", ["pipe", "directory", "foreign", "empty"])
@pytest.mark.parametrize("ending", [".arrow", ".lock"])
def test_what_else_stands_in_the_place_of_an_index(manifest, tokenizer, kind, ending):
    path = open_index(manifest, tokenizer).path
    shutil.rmtree(path.parent)
    path.parent.mkdir()
    place = path.with_suffix(ending)
    if kind == "pipe":
        os.mkfifo(place)
    elif kind == "directory":
        place.mkdir()
    else:
        place.write_bytes(b"{}" if kind == "foreign" else b"")
    (path.parent / f"{path.stem}-0.rows").mkdir()
    if kind == "directory" or (kind, ending) == ("pipe", ".lock"):
        with pytest.raises(UserError, match=r"the index of m\.jsonl cannot be written to .*; name a folder that can"):
            open_index(manifest, tokenizer)
    else:
        assert len(open_index(manifest, tokenizer)) == 3


def build_on_a_full_disk(manifest, tokenizer) -> str:
    """In a process that may write no more than some bytes to a file: what it says."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        said = "nothing"
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
            signal.alarm(60)
            open_index(manifest, tokenizer)
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        os.write(writing, said.encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as file:
        said = file.read().decode()
    os.waitpid(child, 0)
    return said


@pytest.mark.parametrize("num_records", [1, 100])
def test_a_full_disk_is_a_sentence_and_leaves_nothing_behind(folder, tokenizer, num_records):
    manifest = write_manifest(folder / "m.jsonl", [a_record(f"Question {n}") for n in range(num_records)])
    said = build_on_a_full_disk(manifest, tokenizer)
    assert said.startswith(
        f"UserError: the index of m.jsonl cannot be written to {folder}/m.jsonl.motet-index (File too"
    )
    assert [path.suffix for path in (folder / "m.jsonl.motet-index").iterdir()] == [".lock"]
    assert len(open_index(manifest, tokenizer)) == num_records


def test_a_file_that_was_mended_is_used(manifest, tokenizer):
    before = open_index(manifest, tokenizer)
    assert [bad.reason for bad in before.bad_examples()] == ["no such file"]
    assert open_index(manifest, tokenizer).about["rows"] == before.about["rows"], "it is as bad as before"
    (manifest.parent / "missing.png").write_bytes(b"no PNG at all")
    assert ["its header is damaged" in bad.reason for bad in open_index(manifest, tokenizer).bad_examples()] == [True]
    write_image(manifest.parent / "missing.png", 36, 48)
    after = open_index(manifest, tokenizer)
    assert list(after.bad_examples()) == []
    assert after.lengths.raw[0].tolist() == [24, 1600, 36]
    assert before.identity != after.identity


def test_what_is_said_of_a_moved_dataset_names_its_new_place(manifest, tokenizer):
    open_index(manifest, tokenizer)
    folder = manifest.parent.rename(manifest.parent.with_name("moved"))
    index = open_index(folder / "m.jsonl", tokenizer)
    assert [bad.path for bad in index.bad_examples()] == [str(folder / "missing.png")]
    assert index.where(1) == f"{folder}/m.jsonl, line 2"


def test_a_manifest_that_vanishes_or_changes_while_it_is_indexed(manifest, tokenizer, monkeypatch):
    entries = Manifest.entries

    def meanwhile(change):
        def changed(self):
            yield from entries(self)
            change()

        return changed

    def unreadable(self):
        raise OSError(5, "Input/output error", str(manifest))
        yield

    monkeypatch.setattr(Manifest, "entries", unreadable)
    with pytest.raises(UserError, match=r"m\.jsonl: cannot be read \(Input/output error"):
        open_index(manifest, tokenizer)
    monkeypatch.setattr(Manifest, "entries", meanwhile(lambda: write_manifest(manifest, [a_record("new")])))
    with pytest.raises(UserError, match=r"manifest m\.jsonl, .* changed while it was indexed; start again"):
        open_index(manifest, tokenizer)
    monkeypatch.setattr(Manifest, "entries", meanwhile(manifest.unlink))
    with pytest.raises(UserError, match=r"m\.jsonl: cannot be read \(No such file"):
        open_index(manifest, tokenizer)


def test_an_index_that_is_deleted_while_it_is_open_is_still_read(manifest, tokenizer):
    index = open_index(manifest, tokenizer)
    expected = contents(index)
    shutil.rmtree(index.path.parent)
    assert contents(index) == expected


def test_who_waits_for_another_process_says_how_far_that_one_is(folder, tokenizer):
    heard, arrived = [], threading.Event()

    def hear(num_examples, share):
        heard.append((num_examples, share))
        arrived.set()

    path = folder / "lock"
    with build_lock(path, None) as lock:
        tell = lock.share_progress(None)
        tell(512, 0.25)
        waiting = threading.Thread(target=lambda: build_lock(path, hear).__enter__())
        waiting.start()
        assert arrived.wait(20)
    waiting.join(20)
    assert set(heard) == {(512, 0.25)}
    assert not waiting.is_alive()


def test_an_index_of_many_examples_has_a_checksum_of_all(folder, tokenizer):
    manifest = write_manifest(folder / "m.jsonl", [a_record(f"Question {n}") for n in range(600)])
    path = open_index(manifest, tokenizer).path
    data = path.read_bytes()
    # One length of many, which nothing else would contradict.
    column = open_index(manifest, tokenizer).lengths.num_tokens
    at = data.index(np.ascontiguousarray(column).tobytes()) + 4 * 300
    path.unlink()
    path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
    with pytest.raises(DamagedIndex, match="does not have its checksum"):
        Index(path, folder)


class KilledByText:
    """A tokenizer that its process does not survive."""

    fingerprint = "killed by text"

    def encode(self, conversation, raws=()):
        os.kill(os.getpid(), signal.SIGSEGV)


@pytest.mark.slow
def test_a_worker_that_dies_while_it_indexes_is_a_sentence(folder):
    manifest = write_manifest(folder / "m.jsonl", [a_record(f"Question {n}") for n in range(600)])
    with pytest.raises(UserError, match=r"m\.jsonl, line 1: a worker process was killed by SIGSEGV while it read this"):
        open_index(manifest, KilledByText(), num_workers=1)
    assert [path.suffix for path in (folder / "m.jsonl.motet-index").iterdir()] == [".lock"]


class Fragile(EntryReader):
    """Does not survive one of the headers."""

    def __call__(self, task):
        entries, death = task
        if not death and any(b"deadly.png" in entry.text for entry in entries):
            os.kill(os.getpid(), signal.SIGSEGV)
        return super().__call__(task)


class FragileCheck(HeaderCheck):
    def __call__(self, refs):
        if any(ref.path.endswith("deadly.png") and Path(ref.path).read_bytes() == b"deadly" for ref in refs):
            os.kill(os.getpid(), signal.SIGSEGV)
        return super().__call__(refs)


def test_a_header_that_kills_its_reader_is_left_out_alone(folder, tokenizer, monkeypatch):
    monkeypatch.setattr(index_build, "EntryReader", Fragile)
    monkeypatch.setattr(index_build, "HeaderCheck", FragileCheck)
    monkeypatch.setattr(index_build, "_CHUNK_EXAMPLES", 4)
    (folder / "deadly.png").write_bytes(b"deadly")
    records = [a_record(f"Question {n}") for n in range(12)]
    records[5] = a_record("<image>", image="deadly.png")
    manifest = write_manifest(folder / "m.jsonl", records)
    index = open_index(manifest, tokenizer, num_workers=1)
    (bad,) = index.bad_examples()
    assert (bad.example, len(index)) == (5, 12)
    assert bad.path == str(folder / "deadly.png")
    assert bad.reason == "its header ends the process that reads it (was killed by SIGSEGV)"
    assert index.where(6).endswith("line 7")
    built = index.path.stat().st_mtime_ns
    # Looked at again at each start, in a process of its own; built anew once the file is mended.
    assert open_index(manifest, tokenizer).path.stat().st_mtime_ns == built
    Image.new("RGB", (8, 8)).save(folder / "deadly.png")
    monkeypatch.setattr(index_build, "EntryReader", EntryReader)
    assert not list(open_index(manifest, tokenizer).bad_examples())
