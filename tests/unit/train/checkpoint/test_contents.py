"""A checkpoint is told to be whole only if every byte of it is as it was written, and telling runs nothing of it."""

import json
import os
import pickle

import pytest

from motet.core.errors import UserError
from motet.train.checkpoint.contents import Damaged, read_tensors, verify
from unit.train.checkpoint import damages


def test_what_was_written_is_whole(newest):
    told = []
    state = verify(newest, show=told.append)
    assert (state.step, state.position, state.num_bad, state.seed, state.dataset) == (8, 48, 1, 7, "some data")
    assert sorted(path.name for path in newest.iterdir()) == sorted(damages.FILES)
    assert sum(told) == sum(path.stat().st_size for path in newest.iterdir() if path.name != "manifest.json")


def test_checksums_are_those_that_sha256sum_prints(newest):
    files = json.loads((newest / "manifest.json").read_text())["files"]
    lines = "".join(f"{file['sha256']}  {name}\n" for name, file in files.items())
    assert os.system(f"cd {newest} && echo '{lines}' | sha256sum --check --status") == 0


@pytest.mark.parametrize("file", damages.FILES)
@pytest.mark.parametrize("kind", damages.OF_A_FILE)
def test_a_damaged_file_is_named(newest, file, kind):
    damages.OF_A_FILE[kind](newest / file)
    with pytest.raises(Damaged, match=rf"^{file} (is|has) "):
        verify(newest)


@pytest.mark.parametrize("file", [name for name in damages.FILES if name.endswith("json")])
@pytest.mark.parametrize("kind", damages.OF_JSON)
def test_other_json_is_named(newest, file, kind):
    damages.write_json(newest / file, damages.OF_JSON[kind])
    with pytest.raises(Damaged, match=rf"^{file} (is|has) "):
        verify(newest)


@pytest.mark.parametrize("kind", damages.OF_THE_FOLDER)
def test_a_folder_that_is_no_such_checkpoint(newest, kind):
    damages.OF_THE_FOLDER[kind](newest)
    with pytest.raises(Damaged):
        verify(newest)


@pytest.mark.parametrize("kind", damages.OF_THE_STATE)
def test_a_state_that_cannot_be_is_found_even_if_its_checksum_is_right(newest, kind):
    damages.change_state(newest, damages.OF_THE_STATE[kind])
    with pytest.raises(Damaged, match=r"^state.json is "):
        verify(newest)


@pytest.mark.parametrize("place", [i / 60 for i in range(61)])
def test_any_bit_of_the_manifest_counts(newest, place):
    damages.flip(newest / "manifest.json", place)
    with pytest.raises(Damaged, match=r"^manifest.json is "):
        verify(newest)


def test_every_part_of_the_files_is_verified_by_someone(newest):
    damages.flip(newest / "rank-00000.safetensors", 0.9)
    found = 0
    for part in range(3):
        try:
            assert verify(newest, part, 3).step == 8
        except Damaged:
            found += 1
    assert found == 1


def test_a_checkpoint_of_a_later_motet_is_not_called_damaged(newest):
    damages.forge(newest, format=2, motet="9.9", parts=["what this version does not know"])
    with pytest.raises(
        UserError, match=r"was written by Motet 9.9 in the format 2, .* reads the format 1: update Motet"
    ):
        verify(newest)


def test_a_checkpoint_of_the_first_format_is_refused_and_not_opened(newest, bomb):
    for name in ("manifest.json", "tensors.json", "rank-00000.safetensors"):
        (newest / name).unlink()
    (newest / ".metadata").write_bytes(bomb.pickle)
    with pytest.raises(UserError, match="was written by an earlier version of Motet as a pickle"):
        verify(newest)
    assert not bomb.has_gone_off()


def test_a_broken_disk_is_told_from_one_that_is_away_or_closed(newest, monkeypatch):
    def fail(errno):
        def read(path):
            raise OSError(errno, os.strerror(errno))

        monkeypatch.setattr("motet.train.checkpoint.contents._read", read)

    fail(5)
    with pytest.raises(Damaged, match=r"cannot be read \(Input/output error\)"):
        verify(newest)
    for errno, said in ((116, "Stale file handle"), (13, "Permission denied")):
        fail(errno)
        with pytest.raises(UserError, match=f"cannot be read: {said}"):
            verify(newest)


def test_tensors_lie_in_files_of_the_manifest(newest):
    tensors = json.loads((newest / "tensors.json").read_text())
    assert read_tensors(newest)["model.1.weight"].shape == (3, 4)
    tensors["model.1.weight"]["shards"][0]["file"] = "../../elsewhere"
    (newest / "tensors.json").write_text(json.dumps(tensors))
    damages.forge(newest)
    with pytest.raises(Damaged, match=r"has 'model.1.weight' in ../../elsewhere, which manifest.json does not name"):
        read_tensors(newest)


@pytest.mark.parametrize(
    "shards",
    [
        [],
        [{"offsets": [0, 0], "shape": [1, 4]}],
        [{"offsets": [0, 0], "shape": [1, 1]}],
        [{"offsets": [-1, 0], "shape": [3, 4]}],
        [{"offsets": [10**9, 0], "shape": [3, 4]}],
        [{"offsets": [0], "shape": [12]}],
        [{"offsets": [0, 0], "shape": [2, 4]}] * 2,
    ],
)
def test_shards_that_do_not_make_up_their_tensor_are_found(newest, shards):
    tensors = json.loads((newest / "tensors.json").read_text())
    tensors["model.1.weight"]["shards"] = [{"file": "rank-00000.safetensors", **shard} for shard in shards]
    (newest / "tensors.json").write_text(json.dumps(tensors))
    damages.forge(newest)
    with pytest.raises(Damaged, match=r"'model.1.weight' in shards that do not make up its shape \(3, 4\)"):
        read_tensors(newest)


def test_shards_of_ranks_without_a_row_are_empty(newest):
    tensors = json.loads((newest / "tensors.json").read_text())
    empty = {"file": "rank-00000.safetensors", "offsets": [3, 0], "shape": [0, 4]}
    tensors["model.1.weight"]["shards"] += [empty, empty]
    (newest / "tensors.json").write_text(json.dumps(tensors))
    damages.forge(newest)
    assert len(read_tensors(newest)["model.1.weight"].shards) == 3


def test_a_checkpoint_whose_every_file_is_a_pickle_runs_nothing(newest, bomb):
    for name in [*damages.FILES, ".metadata"]:
        (newest / name).write_bytes(bomb.pickle)
    with pytest.raises(Damaged):
        verify(newest)
    assert not bomb.has_gone_off()
    pickle.loads(bomb.pickle)
    assert bomb.has_gone_off(), "it would have"
