"""Selects the checkpoint from which a run resumes. All ranks select the same; each verifies a part of its files.

    auto     the newest whole checkpoint of the run; newer ones are damaged and renamed. Without any checkpoint: none
    PATH     this checkpoint; an error if it is damaged
    never    none

After a crash under torchrun, the next attempt resumes from what an earlier attempt has saved, whichever of the three
the user gave.

A run that goes back by PATH leaves the later checkpoints in its folder as they are until it has saved one itself. Then
they are renamed to `superseded` (`publish_checkpoint`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from motet.core.errors import JointUserError, UserError
from motet.train.checkpoint.contents import Damaged, RunState, digest_of, read_state, step_named, verify
from motet.train.checkpoint.folder import checkpoints, checkpoints_set_aside, remove, set_aside
from motet.train.checkpoint.remote import RemoteCheckpoints
from motet.train.world import World

Say = Callable[[str], None]


@dataclass(frozen=True)
class Start:
    """A whole checkpoint to resume from. line: names of the run's checkpoints that led to it, the earliest first."""

    path: Path
    state: RunState
    line: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class _Folder:
    """The checkpoints in a run's folder, as rank 0 sees them. saved: those of earlier attempts of this launch."""

    checkpoints: list[Path]
    set_aside: list[Path]
    saved: list[Path]


def choose_checkpoint(resume: str, folder: Path, world: World, say: Say) -> Start | None:
    """The checkpoint that `resume` ("auto", "never" or a path) selects; None to start anew. A collective.

    folder: of the run's checkpoints. say: called with a sentence for each damaged checkpoint that is renamed.
    Raises UserError if a path is not whole, or with "auto" if there are checkpoints and none is whole.
    """
    with world.together():
        seen = _look(folder, world) if world.is_first else None
    there = world.gather(seen)[0]
    assert there is not None
    if resume != "auto" and (start := newest_whole(there.saved, there.checkpoints, world, say)):
        return start
    if resume == "never":
        return None
    if resume != "auto":
        return _named(Path(resume), folder, there.checkpoints, world)
    if start := newest_whole(there.checkpoints, there.checkpoints, world, say):
        return start
    if there.checkpoints or there.set_aside:
        raise JointUserError(
            f"{folder} holds no whole checkpoint to go on from, only others, which motet checkpoints {folder} lists; "
            "name one with --resume PATH, or start anew with --resume never."
        )
    return None


def verified_start(path: Path, world: World) -> str:
    """The digest of a checkpoint that another run is to begin with. A collective.

    Raises JointUserError if it is not whole.
    """
    verified = _verified(path, world)
    if not isinstance(verified, RunState):
        raise JointUserError(f"run.start: {path} is no complete Motet checkpoint: {verified}.")
    with world.together():
        return digest_of(path)


def remove_all(folder: Path, url: str | None = None, *, is_restarted: bool = False) -> None:
    """Remove the checkpoints of a run that starts anew; after a crash under torchrun, rename them instead.

    url: `checkpoint.url`, where the first attempt removes them, too. is_restarted: as in `World`.
    Raises UserError if they cannot be removed.
    """
    if url is not None and not is_restarted:
        RemoteCheckpoints(url).remove_all()
    try:
        for checkpoint in checkpoints(folder):
            if is_restarted:
                set_aside(checkpoint, "superseded")
            else:
                remove(checkpoint)
    except OSError as error:
        raise UserError(f"The checkpoints in {folder} cannot be removed: {error.strerror}.") from error


def _look(folder: Path, world: World) -> _Folder:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        named = checkpoints(folder)
        saved = [path for path in named if world.is_restarted and _launch_of(path) == world.launch != ""]
        return _Folder(named, checkpoints_set_aside(folder), saved)
    except OSError as error:
        raise UserError(f"The run's checkpoints cannot be in {folder}: {error.strerror}.") from error


def _launch_of(checkpoint: Path) -> str | None:
    try:
        return read_state(checkpoint).launch
    except Damaged:
        return None


def newest_whole(candidates: Sequence[Path], there: Sequence[Path], world: World, say: Say) -> Start | None:
    """The newest whole of the candidates; newer ones are renamed. there: all checkpoints of the run. A collective."""
    for path in reversed(candidates):
        verified = _verified(path, world)
        if isinstance(verified, RunState):
            return Start(path, verified, [before.name for before in there[: there.index(path) + 1]])
        with world.together():
            if world.is_first:
                say(f"{path} is damaged: {verified}. It is kept as {_set_aside_damaged(path).name}.")
    return None


def _named(path: Path, folder: Path, there: Sequence[Path], world: World) -> Start:
    """The checkpoint at a path. Raises JointUserError if it is not whole. A collective."""
    verified = _verified(path, world)
    if not isinstance(verified, RunState):
        raise JointUserError(f"{path} is no complete Motet checkpoint: {verified}.")
    step = step_named(path.resolve())
    if step is None or path.resolve().parent != folder.resolve():
        return Start(path, verified)
    return Start(path, verified, [before.name for before in there if (step_named(before) or 0) <= step])


def _verified(path: Path, world: World) -> RunState | str:
    """The state of a checkpoint, or what is wrong with it; the same on all ranks. A collective."""
    verified: RunState | str
    with world.together():
        try:
            verified = verify(path, world.rank, world.num_ranks)
        except Damaged as damage:
            verified = str(damage)
    by_rank = world.gather((path.is_dir(), verified))
    seen = [is_there for is_there, _ in by_rank]
    if seen[0] and not all(seen):
        raise JointUserError(
            f"Rank 0 sees {path} and rank {seen.index(False)} does not: run.dir must be on a disk that all ranks share."
        )
    return next((problem for _, problem in by_rank if isinstance(problem, str)), verified)


def _set_aside_damaged(path: Path) -> Path:
    try:
        return set_aside(path, "damaged")
    except OSError as error:
        raise UserError(f"{path} is damaged and cannot be renamed: {error.strerror}.") from error
