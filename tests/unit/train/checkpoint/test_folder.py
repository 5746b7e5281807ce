"""Of a run's checkpoints the latest stay, all of one line; what is set aside stays, and so does what is not its own."""

import shutil

import pytest

from motet.train.checkpoint.folder import (
    checkpoints,
    checkpoints_set_aside,
    clear_unfinished,
    publish_checkpoint,
    remove,
    set_aside,
)
from unit.train.checkpoint.small_run import write_checkpoints

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_the_latest_stay(tmp_path):
    write_checkpoints(tmp_path, (2, 4, 6, 8), keep=3)
    assert names(tmp_path) == ["step-00000004", "step-00000006", "step-00000008"]


def test_steps_are_in_the_order_of_their_numbers(tmp_path):
    for name in ("step-99999999", "step-100000000", "step-7", "step-00000008", "step-x", "steps-1", "step-1.tmp"):
        (tmp_path / name).mkdir()
    assert [path.name for path in checkpoints(tmp_path)] == [
        "step-7",
        "step-00000008",
        "step-99999999",
        "step-100000000",
    ]


def test_setting_aside_overwrites_nothing(run):
    for expected in ("step-00000008.damaged", "step-00000008.damaged-2", "step-00000008.damaged-3"):
        shutil.copytree(run / "step-00000004", run / "step-00000008", dirs_exist_ok=True)
        assert set_aside(run / "step-00000008", "damaged").name == expected
    assert [path.name for path in checkpoints(run)] == ["step-00000004"]
    assert len(checkpoints_set_aside(run)) == 3


def written(run, step):
    """What publishing finds: a checkpoint that is complete but for its name."""
    return shutil.copytree(checkpoints(run)[0], run / f"step-{step:08d}.tmp")


def test_the_first_of_a_new_line_supersedes_the_later_ones_of_the_old(run):
    line = publish_checkpoint(written(run, 6), ["step-00000004"], keep=2)
    assert line == ["step-00000004", "step-00000006"]
    assert names(run) == [*line, "step-00000008.superseded"]
    line = publish_checkpoint(written(run, 8), line, keep=2)
    assert line == ["step-00000006", "step-00000008"]
    assert names(run) == [*line, "step-00000008.superseded"]


def test_a_line_that_begins_elsewhere_supersedes_all(run):
    assert publish_checkpoint(written(run, 8), [], keep=2) == ["step-00000008"]
    assert names(run) == ["step-00000004.superseded", "step-00000008", "step-00000008.superseded"]


def test_one_of_the_same_step_is_replaced(run):
    anew = written(run, 8)
    (anew / "of the second").touch()
    assert publish_checkpoint(anew, ["step-00000004", "step-00000008"], keep=2) == ["step-00000004", "step-00000008"]
    assert names(run) == ["step-00000004", "step-00000008"] and (run / "step-00000008" / "of the second").exists()


def test_only_checkpoints_are_removed(run):
    (run / "step-00000005").mkdir()
    (run / "step-00000005" / "notes.txt").write_text("mine")
    elsewhere = (run / "step-00000008").rename(run.parent / "elsewhere")
    (run / "step-00000008").symlink_to(elsewhere)
    for path in checkpoints(run):
        remove(path)
    assert names(run) == ["step-00000005"]
    assert len(names(elsewhere)) == 4, "a link goes, not what it leads to"


def test_what_a_crash_left_is_cleared(run):
    for name in ("step-00000009.tmp", "mine.tmp", "step-x.tmp"):
        (run / name).mkdir()
    (run / "step-00000010.tmp").write_text("")
    set_aside(run / "step-00000004", "damaged")
    clear_unfinished(run)
    assert names(run) == ["mine.tmp", "step-00000004.damaged", "step-00000008", "step-x.tmp"]
