"""Which checkpoint a run goes on from: the newest whole one, agreed upon by all ranks; nothing is lost by choosing."""

import dataclasses
import shutil
from pathlib import Path

import pytest

from motet.core.errors import UserError
from motet.train.checkpoint import choice
from motet.train.checkpoint.choice import choose_checkpoint, remove_all
from motet.train.checkpoint.contents import verify
from motet.train.world import join_world
from ranks import run_ranks
from unit.train.checkpoint import damages
from unit.train.checkpoint.small_run import write_checkpoints

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("written")
    write_checkpoints(folder, (2, 4, 6, 8))
    return folder


@pytest.fixture
def run(written, tmp_path):
    return shutil.copytree(written, tmp_path / "checkpoints")


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def choose_rank(rank, num_ranks, asked, folder, launch, attempt):
    """What was chosen, the line that led there, and what was said; or the sentence that was raised."""
    said = []
    with join_world("cpu") as world:
        world = dataclasses.replace(world, launch=launch, is_restarted=attempt > 0)
        try:
            start = choose_checkpoint(str(asked), folder, world, said.append)
        except UserError as error:
            return str(error)
        if start is None:
            return None
        return start.path.name, start.state.step, [int(name[5:]) for name in start.line], said


def choose_on(num_ranks, asked, folder, launch="", attempt=0):
    told = run_ranks(choose_rank, num_ranks, asked, folder, launch, attempt)
    assert all(other[:3] == told[0][:3] if isinstance(other, tuple) else other == told[0] for other in told)
    return told[0]


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_damaged_ones_are_passed_over_and_kept(run, num_ranks):
    (run / "step-00000008" / "tensors.json").unlink()
    damages.flip(run / "step-00000006" / "rank-00000.safetensors", 0.5)
    name, step, line, said = choose_on(num_ranks, "auto", run)
    assert (name, step, line) == ("step-00000004", 4, [2, 4])
    assert said == [
        f"{run}/step-00000008 is damaged: tensors.json is missing. It is kept as step-00000008.damaged.",
        f"{run}/step-00000006 is damaged: rank-00000.safetensors is not as it was written, by its checksum. "
        "It is kept as step-00000006.damaged.",
    ]
    assert names(run) == ["step-00000002", "step-00000004", "step-00000006.damaged", "step-00000008.damaged"]


EVERY = [
    *((f"{file}: {kind}", lambda path, f=file, k=kind: damages.OF_A_FILE[k](path / f))
      for file in damages.FILES for kind in damages.OF_A_FILE),
    *((kind, damages.OF_THE_FOLDER[kind]) for kind in ("empty folder", "file")),
    *((kind, lambda path, k=kind: damages.change_state(path, damages.OF_THE_STATE[k]))
      for kind in damages.OF_THE_STATE),
    ("of another step", lambda path: (shutil.rmtree(path), shutil.copytree(path.with_name("step-00000004"), path))),
]  # fmt: skip


def choose_after_every_damage(rank, num_ranks, written, folder):
    """Under which name of EVERY the newest but one was not chosen, or anything was lost."""
    failed = []
    with join_world("cpu") as world:
        for what, damage in EVERY:
            if rank == 0:
                shutil.copytree(written, folder)
                damage(folder / "step-00000008")
            world.barrier()
            start = choose_checkpoint("auto", folder, world, lambda sentence: None)
            kept = [*(f"step-0000000{step}" for step in (2, 4, 6)), "step-00000008.damaged"]
            if start is None or start.path.name != "step-00000006" or names(folder) != kept:
                failed.append(what)
            world.barrier()
            if rank == 0:
                shutil.rmtree(folder)
    return failed


def test_whatever_is_wrong_with_the_newest_the_one_before_it_is_used(written, tmp_path):
    assert len(EVERY) > 60
    assert run_ranks(choose_after_every_damage, 2, written, tmp_path / "run") == [[], []]


def test_a_run_with_checkpoints_of_which_none_is_whole_does_not_start_anew(run):
    for path in run.iterdir():
        (path / "state.json").write_text("")
    for _attempt in range(2):
        said = choose_on(2, "auto", run)
        assert said.startswith(f"{run} holds no whole checkpoint to go on from")
        assert "--resume never" in said
    assert names(run) == [f"step-0000000{step}.damaged" for step in (2, 4, 6, 8)]
    assert choose_on(1, "never", run) is None


def test_an_empty_run_starts_anew(tmp_path):
    assert choose_on(2, "auto", tmp_path / "run" / "checkpoints") is None


def test_one_that_cannot_be_judged_is_neither_passed_over_nor_renamed(run):
    damages.forge(run / "step-00000008", format=3)
    assert "in the format 3" in choose_on(2, "auto", run)
    assert len(names(run)) == 4


def test_a_path_is_taken_or_refused_and_nothing_is_changed(run, tmp_path):
    assert choose_on(2, run / "step-00000004", run)[:3] == ("step-00000004", 4, [2, 4])
    elsewhere = shutil.copytree(run / "step-00000006", tmp_path / "best")
    assert choose_on(2, elsewhere, run)[:3] == ("best", 6, []), "of another line than all in the folder"
    damages.flip(run / "step-00000004" / "state.json", 0.3)
    (elsewhere / "rank-00000.safetensors").unlink()
    before = names(run)
    for path, wrong in (
        (run / "step-00000004", "state.json is not as it was written, by its checksum"),
        (elsewhere, "rank-00000.safetensors is missing"),
        (tmp_path / "absent", "there is no such folder"),
        (run, "manifest.json is missing"),
    ):
        assert choose_on(2, path, run) == f"{path} is no complete Motet checkpoint: {wrong}."
    assert names(run) == before


def test_an_attempt_after_a_crash_goes_on_from_what_its_own_launch_has_saved(run, tmp_path):
    elsewhere = shutil.copytree(run / "step-00000008", tmp_path / "step-00000008")
    asked = {elsewhere: ("step-00000008", 8, []), "never": None}
    for path, begun in asked.items():
        found = choose_on(1, path, run, launch="mine", attempt=1)
        assert (found and found[:3]) == begun, "all that is there is of others"
    damages.change_state(run / "step-00000004", {"launch": "mine"})
    for path, begun in asked.items():
        for launch, attempt, chosen in (
            ("mine", 1, ("step-00000004", 4, [2, 4])),
            ("other", 1, begun),
            ("mine", 0, begun),
        ):
            found = choose_on(1, path, run, launch=launch, attempt=attempt)
            assert (found and found[:3]) == chosen
    assert len(names(run)) == 4


def test_never_removes_the_runs_own_and_after_a_crash_nothing(run):
    damages.flip(run / "step-00000002" / "manifest.json", 0.5)
    shutil.copytree(run / "step-00000004", run / "step-00000004.superseded")
    remove_all(run, is_restarted=True)
    assert names(run) == [
        "step-00000002.superseded",
        "step-00000004.superseded",
        "step-00000004.superseded-2",
        "step-00000006.superseded",
        "step-00000008.superseded",
    ]
    shutil.copytree(run / "step-00000008.superseded", run / "step-00000008")
    remove_all(run)
    assert len(names(run)) == 5 and "step-00000008" not in names(run)


def choose_without_seeing(rank, num_ranks, folder):
    if rank == 2:
        choice.verify = lambda path, *parts: verify(path.with_name("absent"), *parts)
        is_dir = Path.is_dir
        Path.is_dir = lambda path: False if path.name.startswith("step-") else is_dir(path)
    return choose_rank(rank, num_ranks, "auto", folder, "", 0)


def test_a_rank_on_another_disk_renames_nothing(run):
    said = run_ranks(choose_without_seeing, 3, run)
    assert set(said) == {
        f"Rank 0 sees {run}/step-00000008 and rank 2 does not: run.dir must be on a disk that all ranks share."
    }
    assert len(names(run)) == 4


def test_what_cannot_be_renamed_is_said_by_all(run, monkeypatch):
    (run / "step-00000008" / "state.json").unlink()
    assert (
        run_ranks(choose_where_nothing_can_be_renamed, 2, run)
        == [f"{run}/step-00000008 is damaged and cannot be renamed: Read-only file system."] * 2
    )


def choose_where_nothing_can_be_renamed(rank, num_ranks, folder):
    def fail(path, why):
        raise OSError(30, "Read-only file system")

    choice.set_aside = fail
    return choose_rank(rank, num_ranks, "auto", folder, "", 0)
