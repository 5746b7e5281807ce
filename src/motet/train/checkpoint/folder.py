"""The checkpoints of one run, in `checkpoints/` of its folder: their names, and what may happen to them.

    step-00000020               whole when it was written
    step-00000020.tmp           being written, or being removed; what a crash has left of either
    step-00000020.damaged       did not verify when it was to be used
    step-00000020.superseded    of a line of training that was left by `--resume PATH`

A checkpoint gets its first name by one rename, when all of it is on the disk, and loses it by one rename: so whenever a
run is killed, what has that name is whole. Only what `checkpoint.keep` leaves over, and `--resume never`, is removed.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from motet.train.checkpoint.contents import is_checkpoint, step_named, sync

_UNFINISHED = re.compile(r"step-\d+\.tmp")
_SET_ASIDE = re.compile(r"step-\d+\.(damaged|superseded)(-\d+)?")


def checkpoints(folder: Path) -> list[Path]:
    """What has the name of a checkpoint, the earliest step first; nothing is looked into."""
    found = [(step, path.name, path) for path in folder.glob("step-*") if (step := step_named(path)) is not None]
    return [path for _, _, path in sorted(found)]


def unfinished(folder: Path) -> list[Path]:
    """What a crash has left of writing or removing, or what is being written."""
    return sorted(path for path in folder.glob("step-*") if _UNFINISHED.fullmatch(path.name))


def those_set_aside(folder: Path) -> list[Path]:
    """Checkpoints that were called damaged or superseded."""
    return sorted(path for path in folder.glob("step-*") if _SET_ASIDE.fullmatch(path.name))


def set_aside(checkpoint: Path, why: str) -> Path:
    """Rename a checkpoint by `why`, "damaged" or "superseded"; its new path. Nothing is overwritten."""
    aside, number = checkpoint.with_name(f"{checkpoint.name}.{why}"), 1
    while aside.exists() or aside.is_symlink():
        number += 1
        aside = checkpoint.with_name(f"{checkpoint.name}.{why}-{number}")
    checkpoint.rename(aside)
    sync(checkpoint.parent)
    return aside


def remove(checkpoint: Path) -> None:
    """Remove a checkpoint; a folder that Motet has not written stays."""
    if is_checkpoint(checkpoint):
        dying = checkpoint.with_name(f"{checkpoint.name}.tmp")
        _delete(dying)
        checkpoint.rename(dying)
        _delete(dying)


def clear_unfinished(folder: Path) -> None:
    """Remove what crashes have left of writing or removing."""
    for path in unfinished(folder):
        _delete(path)


def publish_checkpoint(temporary: Path, line: Sequence[str], keep: int) -> list[str]:
    """Give what was written as `temporary` its name, and remove all but the last `keep` of its line; the line then.

    line: names of the checkpoints that led to this one, the earliest first. Others are of a line that was left, and
    make way: from now on, the newest name is that of the newest checkpoint.
    """
    for other in checkpoints(temporary.parent):
        if other.name not in line:
            set_aside(other, "superseded")
    final = temporary.with_suffix("")
    temporary.rename(final)
    sync(final.parent)
    line = [*line, final.name]
    for old in line[:-keep]:
        remove(temporary.parent / old)
    return line[-keep:]


def _delete(path: Path) -> None:
    """What cannot go at once, as something reads it over a network, is left to the next `clear_unfinished`."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
