"""Where a run begins: at its first step, with weights of another run, or behind one of its own checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from motet.core.errors import JointUserError, UserError
from motet.core.text_files import parse_toml, read_text
from motet.models.mllm import MLLM
from motet.train.checkpoint.choice import Say, Start, choose_checkpoint, newest_whole, remove_all, verified_start
from motet.train.checkpoint.contents import (
    CHECKPOINTS,
    MANIFEST,
    Progress,
    digest_of,
    is_checkpoint,
    name_of,
    read_state,
)
from motet.train.checkpoint.folder import checkpoints
from motet.train.checkpoint.remote import RemoteCheckpoints, checkpoint_at, digest_at, is_stored
from motet.train.checkpoint.restoring import load, load_weights
from motet.train.checkpoint.same_run import changed_files, check_beside, check_same_run
from motet.train.checkpoint.state import store_frozen
from motet.train.input.own_splits import check_same_splits
from motet.train.recipe.recipe import Recipe
from motet.train.run_folder import REPORT
from motet.train.world import World

_START = "start"
"""The folder in that of a run with a copy of the checkpoint that it begins with, where `run.start` is a URL."""


def resume_run(
    recipe: Recipe,
    world: World,
    resume: str,
    model: MLLM,
    optimizer: torch.optim.Optimizer,
    start: Progress,
    say: Say,
) -> tuple[Progress, list[str]]:
    """Restore the checkpoint that `resume` ("auto", "never" or a path) selects, if any. A collective.

    start: the Progress before the first step.
    Returns the Progress from which the run goes on, and the names of the checkpoints that led there.
    """
    folder = recipe.run.dir / CHECKPOINTS
    chosen = choose_checkpoint(_fetched(resume, recipe, world, say), folder, world, say)
    with world.together():
        if chosen is not None:
            if recipe.data.is_split and chosen.state.dataset != start.dataset:
                check_same_splits(chosen, recipe, world)
            check_same_run(chosen, start, recipe.run.num_steps)
            _check_same_start(chosen, _start_of(recipe))
        elif resume == "never":
            _check_start_stays(recipe)
    if chosen is None:
        begun = _begun(recipe, world, model, start, say)
        with world.together():
            if resume == "never" and world.is_first:
                # Only now: a start that cannot be read costs nothing.
                remove_all(folder, recipe.checkpoint.url, is_restarted=world.is_restarted)
        return begun, []
    store_frozen(model, (start.beside or {}).keys() - (chosen.state.beside or {}).keys())
    progress = load(chosen.path, model, optimizer, world.control, world.together)
    # Later checkpoints are written with what is there now, of which an older one may know nothing.
    progress = replace(progress, stated=start.stated, own_files=start.own_files)
    is_done = progress.step == recipe.run.num_steps
    say(f"Resuming after step {progress.step} from {chosen.path}{', which is the last step' if is_done else ''}.")
    if changed := changed_files(chosen.state, start.own_files or {}):
        say(changed)
    return progress, chosen.line


def has_ended(recipe: Recipe) -> bool:
    """Whether the checkpoint of the last step is there. Its bytes are verified when something begins with it.

    False of epochs, as the examples alone say which step that is.
    """
    return recipe.run.epochs is None and is_checkpoint(recipe.run.dir / CHECKPOINTS / name_of(recipe.run.num_steps))


def phase_has_ended(recipe: Recipe, later: Sequence[Path], world: World, say: Say) -> bool:
    """Whether a training phase has ended, or a phase behind it has begun. A collective.

    It has not if what comes behind its last checkpoint (evaluation, export, report) was cut short, nor if that
    checkpoint is damaged: it is renamed, so that the phase goes on from the newest whole one. Its checkpoints may be
    gone once the next phase has its own.
    later: the folders of the runs of the phases behind it.
    Raises JointUserError if it has steps left to take, as the phases that have begun would not go on behind them.
    """
    folder = recipe.run.dir / CHECKPOINTS
    with world.together():
        last = folder / name_of(recipe.run.num_steps) if has_ended(recipe) else None
        begun = next((each / CHECKPOINTS for each in later if checkpoints(each / CHECKPOINTS)), None)
        seen = last, begun, bool(checkpoints(folder)), last is not None and _is_reported(last, recipe.run.dir)
    last, begun, has_own, is_reported = world.gather(seen)[0]
    if begun is None:
        return last is not None and is_reported and newest_whole([last], [last], world, say) is not None
    if last is None and has_own and recipe.run.epochs is None:
        raise JointUserError(
            f"{folder} has no checkpoint of step {recipe.run.num_steps}, the last one of its training phase, and "
            f"{begun} has some of a phase behind it, which began with other weights than this one would end with: "
            f"remove {begun} to train that phase anew, or state the steps that this one had."
        )
    return last is not None or not has_own


def _is_reported(checkpoint: Path, run_dir: Path) -> bool:
    """Whether the report, which a run writes last, is none from before a checkpoint."""
    report, manifest = run_dir / REPORT, checkpoint / MANIFEST
    return report.is_file() and manifest.is_file() and report.stat().st_mtime_ns >= manifest.stat().st_mtime_ns


def _fetched(resume: str, recipe: Recipe, world: World, say: Say) -> str:
    """What to resume from once it is here: a checkpoint that is named by URL, or the newest one of `checkpoint.url`.

    A collective.
    """
    folder, found = recipe.run.dir / CHECKPOINTS, resume
    with world.together():
        if world.is_first:
            if is_stored(resume):
                remote, name = checkpoint_at(resume)
                say(f"Fetching {resume} to {folder}.")
                found = str(remote.fetch(name, folder))
            elif resume == "auto" and recipe.checkpoint.url is not None:
                remote = RemoteCheckpoints(recipe.checkpoint.url)
                if name := remote.newer_than(folder):
                    say(f"Fetching {remote.url}/{name} to {folder}.")
                    remote.fetch(name, folder)
    return str(world.gather(found)[0])


def _begun(recipe: Recipe, world: World, model: MLLM, start: Progress, say: Say) -> Progress:
    """The Progress of a run that begins, with the weights of `run.start` if there is one. A collective."""
    with world.together():
        named = _start_of(recipe)
    if named is None:
        return start
    path = _start_here(named, recipe.run.dir, world, say)
    digest = verified_start(path, world)
    with world.together():
        then = read_state(path)
        check_beside(path, then, start)
    store_frozen(model, (start.beside or {}).keys() - (then.beside or {}).keys())
    load_weights(path, model, world.control, world.together, may_lack_adapters=True)
    say(f"Beginning with the weights of {named}.")
    beside = {name: weights for name, weights in (start.beside or {}).items() if name in (then.beside or {})}
    return replace(start, start=digest, beside=beside or None)


def _start_of(recipe: Recipe) -> str | None:
    """The checkpoint of `run.start`: of the folder of a run that of its last step, as the run has counted it."""
    named = recipe.run.start
    if named is None or is_stored(named) or not (stated := Path(named, "recipe.toml")).is_file():
        return named
    steps = parse_toml(read_text(stated, "the recipe"), str(stated)).get("run", {}).get("steps")
    if not isinstance(steps, int):
        raise UserError(f"run.start = {named} is the folder of a run, but {stated} states no steps; name a checkpoint.")
    return str(Path(named, CHECKPOINTS, name_of(steps)))


def _start_here(named: str, run_dir: Path, world: World, say: Say) -> Path:
    """The checkpoint that a run begins with, once it is here: one that is named by URL is copied. A collective."""
    if not is_stored(named):
        return Path(named)
    folder = run_dir / _START
    with world.together():
        remote, name = checkpoint_at(named)
        if world.is_first:
            say(f"Fetching {named} to {folder}.")
            remote.fetch(name, folder)
    return folder / name


def _check_start_stays(recipe: Recipe) -> None:
    """Raise UserError for a `run.start` that is one of the checkpoints which a run that starts anew removes."""
    named, url = _start_of(recipe), recipe.checkpoint.url
    if named is None:
        return
    is_own = named.rstrip("/").rpartition("/")[0] == url
    if not is_stored(named):
        is_own = Path(named).resolve().is_relative_to((recipe.run.dir / CHECKPOINTS).resolve())
    if is_own:
        raise UserError(
            f"run.start = {named} is one of the checkpoints that --resume never removes: set another run.dir, and "
            "another checkpoint.url if there is one, or begin with a copy of it that lies elsewhere."
        )


def _check_same_start(chosen: Start, now: str | None) -> None:
    """Raise UserError if the run of a checkpoint began with other weights than those of `run.start` now."""
    begun, digest = chosen.state.start, ""
    if now is not None and is_stored(now):
        digest = digest_at(now) or ""
    elif now is not None and is_checkpoint(Path(now)):
        digest = digest_of(Path(now))
    if now is not None and begun and not digest:
        return  # Who goes on may have removed the checkpoint that the run began with.
    if begun == digest and (now is None or digest):
        return
    whose = "the weights of another checkpoint" if begun else "weights of its own"
    wanted = ", and there is no run.start now" if now is None else f", not with those of run.start = {now}"
    raise UserError(
        f"The run of the checkpoint {chosen.path} began with {whose}{wanted}: set run.start back, or start anew with "
        "--resume never."
    )
