import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import threading

import numpy as np
import pytest

import motet.data.index_build
import motet.data.media
from motet.core.errors import UserError
from motet.data.index import Index
from motet.data.index_build import open_index, publish_index
from motet.data.index_entries import PackedColumns
from motet.data.text import ChatTokenizer
from unit.data.samples import TEMPLATE, a_record, write_clip, write_image, write_manifest
from work import num_calls


@pytest.fixture
def folder(tmp_path):
    write_image(tmp_path / "a.png", 24, 12)
    write_clip(tmp_path / "b.wav", 1600)
    return tmp_path


def was_built(monkeypatch, manifest, tokenizer, **options) -> bool:
    built = []
    build = motet.data.index_build._build
    with monkeypatch.context() as patch:
        patch.setattr(motet.data.index_build, "_build", lambda *a: built.append(1) or build(*a))
        open_index(manifest, tokenizer, **options)
    return bool(built)


def test_it_is_built_when_something_changed_and_only_then(folder, tokenizer, backend, monkeypatch):
    manifest = write_manifest(folder / "m.jsonl", [a_record("<image>", image="a.png"), a_record()])
    assert was_built(monkeypatch, manifest, tokenizer)
    assert not was_built(monkeypatch, manifest, tokenizer)
    os.utime(manifest, (1, 1))
    assert not was_built(monkeypatch, manifest, tokenizer), "touched, but the content is the same"
    manifest.write_text(manifest.read_text().replace("cat", "dog"))
    assert was_built(monkeypatch, manifest, tokenizer), "as long as before, but another content"
    other = ChatTokenizer(backend, TEMPLATE + "\n", {"bos_token": "<bos>", "eos_token": "<eos>"})
    assert was_built(monkeypatch, manifest, other)
    assert not was_built(monkeypatch, manifest, tokenizer), "indexes of two tokenizers stand side by side"
    monkeypatch.setattr(motet.data.index, "FORMAT_VERSION", 99)
    monkeypatch.setattr(motet.data.index_build, "FORMAT_VERSION", 99)
    assert was_built(monkeypatch, manifest, tokenizer)
    files = sorted(path.suffix for path in (folder / "m.jsonl.motet-index").iterdir())
    assert files == [".arrow", ".arrow", ".lock", ".lock", ".rows", ".rows"], "nothing outdated is left behind"


def test_an_index_from_before_other_endings_were_media_is_built_anew(folder, tokenizer, monkeypatch):
    write_image(folder / "0.avif", format="AVIF")
    (folder / "0.json").write_text(json.dumps(a_record()))
    with tarfile.open(folder / "a.tar", "w") as tar:
        for name in ("0.avif", "0.json"):
            tar.add(folder / name, name)
    with monkeypatch.context() as before:
        before.setattr(motet.data.media, "_IMAGE_SUFFIXES", (".png", ".jpg"))
        for module in (motet.data.index, motet.data.index_build):
            before.setattr(module, "FORMAT_VERSION", 9)
        assert not open_index(folder / "a.tar", tokenizer).media_refs(0)
    with pytest.raises(UserError, match="has 0 <image> in its text, but 1 file in 'image'"):
        open_index(folder / "a.tar", tokenizer)


def test_identities(folder, tokenizer):
    records = [a_record("<image>", image="a.png"), a_record()]
    first = open_index(write_manifest(folder / "m.jsonl", records), tokenizer)
    same = open_index(write_manifest(folder / "n.jsonl", records), tokenizer)
    other = open_index(write_manifest(folder / "o.jsonl", records[::-1]), tokenizer)
    assert first.identity == same.identity != other.identity


def test_a_moved_dataset_keeps_its_index(folder, tokenizer, monkeypatch):
    (folder / "old").mkdir()
    shutil.copy(folder / "a.png", folder / "old/a.png")
    write_manifest(folder / "old/m.jsonl", [a_record("<image>", image="a.png")])
    open_index(folder / "old/m.jsonl", tokenizer)
    (folder / "old").rename(folder / "new")
    assert not was_built(monkeypatch, folder / "new/m.jsonl", tokenizer)
    index = open_index(folder / "new/m.jsonl", tokenizer)
    assert index.media_refs(0)[0].path == str(folder / "new/a.png")


def test_media_outside_of_a_folder_that_is_a_link(folder, tokenizer):
    """Behind a link, `..` is the folder of what the link leads to."""
    (folder / "disk/deep").mkdir(parents=True)
    (folder / "link").symlink_to(folder / "disk/deep")
    absolute, beside = a_record("<image>", image=str(folder / "a.png")), a_record("<image>", image="../a.png")
    shutil.copy(folder / "a.png", folder / "disk/a.png")
    index = open_index(write_manifest(folder / "link/m.jsonl", [absolute, beside]), tokenizer)
    found = [index.media_refs(example)[0].path for example in range(2)]
    assert found == [str(folder / "a.png"), str(folder / "link/../a.png")]


def test_a_damaged_index_is_built_anew(folder, tokenizer, monkeypatch):
    manifest = write_manifest(folder / "m.jsonl", [a_record()])
    path = open_index(manifest, tokenizer).path
    path.write_bytes(path.read_bytes()[:100])
    assert was_built(monkeypatch, manifest, tokenizer)
    next(path.parent.glob("*.rows")).unlink()
    assert was_built(monkeypatch, manifest, tokenizer)
    assert open_index(manifest, tokenizer).record(0) == a_record()


def test_bad_files_mark_their_example(folder, tokenizer):
    (folder / "damaged.png").write_bytes(b"no PNG at all")
    (folder / "text.wav").write_bytes(b"RIFF, or is it?")
    (folder / "fine ü.png").write_bytes((folder / "a.png").read_bytes())
    (folder / "folder.png").mkdir()
    names = ["damaged.png", "missing.png", "fine ü.png", "folder.png"]
    records = [a_record("<image>", image=name) for name in names]
    records.append(a_record("<image><audio>", image="a.png", audio="text.wav"))
    index = open_index(write_manifest(folder / "m.jsonl", records), tokenizer)
    bad = {found.example: (found.path, found.reason) for found in index.bad_examples()}
    assert sorted(bad) == [0, 1, 3, 4]
    assert bad[1] == (str(folder / "missing.png"), "no such file")
    assert "header is damaged" in bad[0][1]
    assert "is a directory" in bad[3][1]
    assert bad[4][0] == str(folder / "text.wav")
    assert index.lengths.raw[0].tolist() == [0, 0, 24, 0, 24, 0]


def test_names_that_are_no_utf8(folder, tokenizer):
    image = (folder / "a.png").read_bytes()
    # As Python writes a byte that is no UTF-8.
    elsewhere = folder / "\udcff"
    elsewhere.mkdir()
    index = open_index(write_manifest(elsewhere / "m.jsonl", [a_record("<image>", image="missing.png")]), tokenizer)
    assert [bad.path for bad in index.bad_examples()] == [f"{folder}/?/missing.png"]
    assert index.where(0) == f"{folder}/?/m.jsonl, line 1"
    assert index.media_refs(0)[0].path == f"{elsewhere}/missing.png"
    with tarfile.open(folder / "s.tar", "w") as tar:
        for name, data in (("\udcff.png", image), ("\udcff.json", json.dumps(a_record("<image>")).encode())):
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    index = open_index(folder / "s.tar", tokenizer)
    assert index.media_refs(0)[0].member == "\udcff.png"
    assert index.where(0) == f"{folder}/s.tar, key ?"


def test_workers_build_what_one_process_builds(folder, tokenizer):
    records = [a_record("<image> " + "x" * (n % 50), "y" * (n % 7), image="a.png", id=n) for n in range(1200)]
    manifest = write_manifest(folder / "m.jsonl", records)
    seen = []
    index = open_index(manifest, tokenizer, num_workers=2, progress=lambda n, share: seen.append((n, share)))
    assert [count for count, _ in seen] == [256, 512, 768, 1024, 1200]
    assert seen[-1][1] == 1.0
    shutil.copytree(folder, folder / "copy", ignore=shutil.ignore_patterns("*.motet-index", "copy"))
    alone = open_index(folder / "copy/m.jsonl", tokenizer)
    assert index.identity == alone.identity
    for example in (0, 255, 256, 1199):
        assert index.record(example) == records[example]
        ours, theirs = index.tokens(example), alone.tokens(example)
        expected = tokenizer.encode(motet.data.conversation.parse_conversation(records[example], ""))
        for sequence in (ours, theirs):
            np.testing.assert_array_equal(sequence.tokens, expected.tokens)
            np.testing.assert_array_equal(sequence.targets, expected.targets)
            np.testing.assert_array_equal(sequence.media_positions, expected.media_positions)


def test_an_index_folder_that_cannot_be_written(folder, tokenizer):
    manifest = write_manifest(folder / "m.jsonl", [a_record()])
    # A file in its place: permissions would not stop a test that runs as root.
    (folder / "m.jsonl.motet-index").write_text("in the way")
    with pytest.raises(UserError, match=r"cannot be written to .* by index_folder"):
        open_index(manifest, tokenizer)
    index = open_index(manifest, tokenizer, index_folder=folder / "elsewhere")
    assert len(index) == 1
    assert index.path.is_relative_to(folder / "elsewhere")


def test_processes_that_start_together(folder, tokenizer):
    manifest = write_manifest(folder / "m.jsonl", [a_record(f"Question {n}") for n in range(300)])
    code = (
        "import sys, pickle\n"
        "from motet.data.index_build import open_index\n"
        "index = open_index(sys.argv[1], pickle.load(sys.stdin.buffer))\n"
        "print(index.path, index.identity, index.record(299)['conversations'][0]['value'])"
    )
    import pickle

    processes = [
        subprocess.Popen([sys.executable, "-c", code, manifest], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        for _ in range(3)
    ]
    for process in processes:
        process.stdin.write(pickle.dumps(tokenizer))
        process.stdin.close()
    answers = {process.stdout.read() for process in processes}
    assert [process.wait() for process in processes] == [0, 0, 0]
    assert len(answers) == 1
    assert answers.pop().endswith(b"Question 299\n")
    assert len(list((folder / "m.jsonl.motet-index").glob("*.rows"))) == 1


def test_an_open_index_outlives_a_new_one(folder, tokenizer):
    manifest = write_manifest(folder / "m.jsonl", [a_record("old")])
    index = open_index(manifest, tokenizer)
    write_manifest(manifest, [a_record("new"), a_record("new")])
    assert len(open_index(manifest, tokenizer)) == 2
    assert len(index) == 1
    assert index.record(0) == a_record("old")


def test_many_examples_open_at_once(folder, tokenizer):
    """Of 100 000 examples no more is done than of one (how long it takes for a million: benchmarks/index.py)."""
    line = json.dumps(a_record("<image> Hi", "ok", image="a.png")) + "\n"
    (folder / "m.jsonl").write_text(line)
    small = open_index(folder / "m.jsonl", tokenizer)
    large = folder / "large.arrow"
    _repeat(small, large, 100_000)
    index = Index(large, folder)
    lengths = index.lengths
    assert int(lengths.num_tokens.sum()) == 100_000 * len(small.tokens(0).tokens)
    assert num_calls(lambda: Index(large, folder).lengths) == num_calls(lambda: Index(small.path, folder).lengths)
    assert index.media_refs(99_999) == small.media_refs(0)
    # The columns are views of the file, not copies.
    for array in (lengths.num_tokens, lengths.item_offsets, lengths.modality, *lengths.raw):
        assert not array.flags.owndata and not array.flags.writeable


def _repeat(small: Index, path, count: int) -> None:
    """An index of `count` copies of the one example of `small`."""
    lengths = small.lengths
    num_bytes = (small.path.parent / small.about["rows"]).stat().st_size
    one = np.array([[num_bytes], [lengths.num_tokens[0]], [lengths.num_targets[0]], [1], [0]], dtype=np.int32)
    raw, turn = np.stack(lengths.raw, axis=1), np.zeros((count, 3), dtype=np.int32)
    columns = PackedColumns(
        np.repeat(one, count, axis=1), np.repeat(lengths.modality, count), np.repeat(raw, count, axis=0), turn, [], b""
    )
    rows = path.with_suffix(".rows")
    rows.write_bytes((small.path.parent / small.about["rows"]).read_bytes() * count)
    publish_index(path, small.about | {"rows": rows.name}, [columns])


def test_threads_read_one_index(folder, tokenizer):
    records = [a_record("x" * n) for n in range(50)]
    index = open_index(write_manifest(folder / "m.jsonl", records), tokenizer)
    wrong = []

    def read(seed: int) -> None:
        for example in np.random.default_rng(seed).integers(0, 50, 200).tolist():
            if index.record(example) != records[example]:
                wrong.append(example)

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(4)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert not wrong
