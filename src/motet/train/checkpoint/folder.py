"""The checkpoints of one run, in `checkpoints/` of its folder: their names, and what may happen to them.

    step-00000020               whole when it was written
    step-00000020.tmp           being written or removed, or left by a crash meanwhile
    step-00000020.damaged       failed verification when a run was to resume from it
    step-00000020.superseded    later than the checkpoint to which `--resume PATH` went back

A checkpoint gets its name by one rename, after all of it is on the disk, and loses it by one rename. So whenever a run
is killed, a folder with such a name is whole. Checkpoints are removed only by `checkpoint.keep` and `--resume never`.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from motet.core.errors import UserError
from motet.core.files import sync
from motet.train.checkpoint.contents import CHECKPOINTS, is_checkpoint, step_named

_UNFINISHED = re.compile(r"step-\d+\.tmp")
_SET_ASIDE = re.compile(r"step-\d+\.(damaged|superseded)(-\d+)?")


def folder_of_checkpoints(path: Path) -> Path:
    """Where checkpoints are, of the folder of a run, or of theirs."""
    inner = path / CHECKPOINTS
    return inner if inner.is_dir() else path


def checkpoints(folder: Path) -> list[Path]:
    """Folders with the name of a checkpoint, the earliest step first. Their contents are not read."""
    named = [(step, path.name, path) for path in folder.glob("step-*") if (step := step_named(path)) is not None]
    return [path for _, _, path in sorted(named)]


def unfinished(folder: Path) -> list[Path]:
    """Checkpoints that are being written or removed, or that a crash has left so."""
    return sorted(path for path in folder.glob("step-*") if _UNFINISHED.fullmatch(path.name))


def checkpoints_set_aside(folder: Path) -> list[Path]:
    """Checkpoints that were renamed as damaged or superseded."""
    return sorted(path for path in folder.glob("step-*") if _SET_ASIDE.fullmatch(path.name))


def set_aside(checkpoint: Path, why: str) -> Path:
    """Rename a checkpoint as `why`, "damaged" or "superseded"; returns its new path. Overwrites nothing."""
    aside, number = checkpoint.with_name(f"{checkpoint.name}.{why}"), 1
    while aside.exists() or aside.is_symlink():
        number += 1
        aside = checkpoint.with_name(f"{checkpoint.name}.{why}-{number}")
    checkpoint.rename(aside)
    sync(checkpoint.parent)
    return aside


def remove(checkpoint: Path) -> None:
    """Remove a checkpoint. A folder that is no checkpoint of Motet stays."""
    if is_checkpoint(checkpoint):
        dying = checkpoint.with_name(f"{checkpoint.name}.tmp")
        _delete(dying)
        checkpoint.rename(dying)
        _delete(dying)


def clear_unfinished(folder: Path) -> None:
    """Remove unfinished checkpoints."""
    for path in unfinished(folder):
        _delete(path)


def publish_checkpoint(temporary: Path, line: Sequence[str], keep: int) -> list[str]:
    """Give the checkpoint written as `temporary` its name. Keep the last `keep` of its line, and return their names.

    line: names of the checkpoints that led to this one, the earliest first. Other checkpoints are renamed as
    superseded, so that the newest name is that of the newest checkpoint. One of the same step is replaced.
    """
    final = temporary.with_suffix("")
    for other in checkpoints(temporary.parent):
        if other.name not in line:
            set_aside(other, "superseded")
    replaced = set_aside(final, "superseded") if final.exists() else None
    temporary.rename(final)
    sync(final.parent)
    if replaced is not None:
        _delete(replaced)
    line = [*(name for name in line if name != final.name), final.name]
    for old in line[:-keep]:
        remove(temporary.parent / old)
    return line[-keep:]


def _delete(path: Path) -> None:
    """Delete a file or folder. A file that is in use over a network stays until the next `clear_unfinished`."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def check_checkpoint(path: Path) -> None:
    """Raise UserError for what is no checkpoint; of a run, the sentence names its newest one."""
    if is_checkpoint(path):
        return
    if there := checkpoints(folder_of_checkpoints(path)):
        raise UserError(f"{path} holds {len(there)} checkpoints; name one of them, such as {there[-1]}.")
    raise UserError(f"{path} is no checkpoint; name one that motet checkpoints RUN_DIR lists.")
