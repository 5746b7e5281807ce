"""Which checkpoint a run goes on from: decided by all ranks alike, and verified by all, each a part of its files.

    auto     the newest whole one of the run; newer ones that are damaged are renamed. Anew only if there is none at all
    PATH     that one or, if it is damaged, nothing
    never    none

An attempt after a crash, under one torchrun, goes on from what an earlier attempt has saved, whichever was asked for.

A run that goes back by PATH leaves the later checkpoints of its folder as they are until it has one of its own; then
they make way as `superseded` (`folder.publish`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from motet.core.errors import JointUserError, UserError
from motet.train.checkpoint.contents import Damaged, RunState, read_state, step_named, verify
from motet.train.checkpoint.folder import checkpoints, remove, set_aside, those_set_aside
from motet.train.world import World

Say = Callable[[str], None]


@dataclass(frozen=True)
class Start:
    """A whole checkpoint to go on from. line: names of those of the run's folder that led there, the earliest first."""

    path: Path
    state: RunState
    line: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class _Folder:
    """What rank 0 finds in the run's folder. saved: what an earlier attempt of this launch has saved."""

    checkpoints: list[Path]
    set_aside: list[Path]
    saved: list[Path]


def choose_checkpoint(asked: str, folder: Path, world: World, say: Say) -> Start | None:
    """What `asked`, "auto", "never" or a path, means for a run with its checkpoints in `folder`; None to start anew.

    A collective, with one result on all ranks. say: told of what is damaged and set aside.
    Raises UserError if a path is not whole, or if there are checkpoints and none is.
    """
    with world.together():
        found = _look(folder, world) if world.is_first else None
    found = world.gather(found)[0]
    assert found is not None
    if asked != "auto" and (start := _newest_whole(found.saved, found.checkpoints, world, say)):
        return start
    if asked == "never":
        return None
    if asked != "auto":
        return _named(Path(asked), folder, found.checkpoints, world)
    if start := _newest_whole(found.checkpoints, found.checkpoints, world, say):
        return start
    if found.checkpoints or found.set_aside:
        raise JointUserError(
            f"{folder} holds no whole checkpoint to go on from, only others, which motet checkpoints {folder} lists; "
            "name one with --resume PATH, or start anew with --resume never."
        )
    return None


def remove_all(folder: Path) -> None:
    """Remove the checkpoints of a run that starts anew; an attempt after a crash renames what it has not saved itself.

    Raises UserError.
    """
    try:
        for checkpoint in checkpoints(folder):
            if _is_restarted():
                set_aside(checkpoint, "superseded")
            else:
                remove(checkpoint)
    except OSError as error:
        raise UserError(f"The checkpoints in {folder} cannot be removed: {error.strerror}.") from error


def _is_restarted() -> bool:
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


def _look(folder: Path, world: World) -> _Folder:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        found = checkpoints(folder)
        saved = [path for path in found if _is_restarted() and _launch_of(path) == world.launch != ""]
        return _Folder(found, those_set_aside(folder), saved)
    except OSError as error:
        raise UserError(f"The run's checkpoints cannot be in {folder}: {error.strerror}.") from error


def _launch_of(checkpoint: Path) -> str | None:
    try:
        return read_state(checkpoint).launch
    except Damaged:
        return None


def _newest_whole(candidates: Sequence[Path], there: Sequence[Path], world: World, say: Say) -> Start | None:
    for path in reversed(candidates):
        verified = _verified(path, world)
        if isinstance(verified, RunState):
            return Start(path, verified, [before.name for before in there[: there.index(path) + 1]])
        with world.together():
            if world.is_first:
                say(f"{path} is damaged: {verified}. It is kept as {_set_aside_damaged(path).name}.")
    return None


def _named(path: Path, folder: Path, there: Sequence[Path], world: World) -> Start:
    verified = _verified(path, world)
    if not isinstance(verified, RunState):
        raise JointUserError(f"{path} is no complete Motet checkpoint: {verified}.")
    step = step_named(path.resolve())
    if step is None or path.resolve().parent != folder.resolve():
        return Start(path, verified)
    return Start(path, verified, [before.name for before in there if (step_named(before) or 0) <= step])


def _verified(path: Path, world: World) -> RunState | str:
    """Its state, or what is wrong with it; the same on all ranks."""
    verified: RunState | str
    with world.together():
        try:
            verified = verify(path, world.rank, world.num_ranks)
        except Damaged as damage:
            verified = str(damage)
    told = world.gather((path.is_dir(), verified))
    seen = [is_there for is_there, _ in told]
    if seen[0] and not all(seen):
        raise JointUserError(
            f"Rank 0 sees {path} and rank {seen.index(False)} does not: run.dir must be on a disk that all ranks share."
        )
    return next((found for _, found in told if isinstance(found, str)), verified)


def _set_aside_damaged(path: Path) -> Path:
    try:
        return set_aside(path, "damaged")
    except OSError as error:
        raise UserError(f"{path} is damaged and cannot be renamed: {error.strerror}.") from error
