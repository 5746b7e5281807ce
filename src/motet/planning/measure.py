"""`motet plan --measure`: the fastest plans by simulation run real steps on the ranks at hand, and the fastest wins.

The first rank searches. Of what it found, in order, the plans that training can run are run by all ranks, each in fresh
processes (`trial.py`): the recipe with the plan's settings, on the very batch that was simulated. A step lasts from a
barrier to the end of its slowest rank; of some, the median counts. Nothing of the recipe's own run is touched.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from motet.core.arrays import Int64Array
from motet.core.cluster import Cluster
from motet.core.errors import JointUserError, UserError
from motet.cost.catalogue import device_called
from motet.cost.profile import PROFILE_FILE
from motet.data.order import ListedOrder
from motet.dispatch import RankBatch
from motet.planner.candidate import Pins
from motet.planner.command import PlanOutputs, find_plans, write_outputs
from motet.planner.evaluation import Quota
from motet.planner.job import Job
from motet.planner.search_result import SearchResult
from motet.planning.cluster import GivenCluster, cluster_of
from motet.planning.job import JobOptions, job_of_recipe
from motet.planning.plan_of_recipe import obstacle, recipe_of_plan
from motet.planning.planned_recipe import read_job_recipe
from motet.planning.trial import OutOfMemory, Trials, open_trials
from motet.train.input.feed import Feed, StepRange
from motet.train.job import build_job
from motet.train.recipe.recipe import Recipe, load_recipe
from motet.train.world import Meeting, World, join_world

WARM_UP, REPEATS = 2, 5
"""Steps of a plan that are not counted, and that are."""


@dataclass(frozen=True, eq=False)
class Steps:
    """What a rank runs. examples: those of the batch, int64 [batch_size]."""

    recipe: Recipe
    examples: Int64Array


@dataclass(frozen=True, eq=False)
class Chosen:
    """What all ranks are told. places: in the results of the search, of the plans that can be run, as `recipes`."""

    places: Sequence[int]
    names: Sequence[str]
    recipes: Sequence[Recipe]
    examples: Int64Array


@dataclass(frozen=True)
class Asked:
    """The command line of `motet plan --measure num_plans`."""

    recipe: Path
    overrides: Sequence[str]
    given: JobOptions
    pins: Pins
    num_plans: int


def plan_measured(asked: Asked, outputs: PlanOutputs) -> None:
    """Search, measure, print and write, on every rank under torchrun or on this one alone.

    Raises UserError where the recipe cannot be trained, where it is planned for other ranks than those at hand, and
    where nothing fits or can be run.
    """
    with join_world("cpu") as world, tempfile.TemporaryDirectory() as folder:
        found, chosen = None, None
        obstacles: dict[int, str] = {}
        with world.together():
            if world.is_first:
                job, recipe = _job(asked, world), load_recipe(asked.recipe, asked.overrides)
                found = find_plans(job, asked.pins, Quota(asked.num_plans, lambda plan: not obstacle(plan, recipe)))
                plans = [each.candidate.plan for each in (found.best, *found.results[1:])]
                obstacles = {place: obstacle(plan, recipe) for place, plan in enumerate(plans)}
                chosen = _choose(found, obstacles, recipe)
        measured = _measure(world.gather(chosen)[0], asked.num_plans, world, folder)
        with world.together():
            if found is not None:
                write_outputs(found.with_measured(measured, obstacles), outputs)


def run_steps(meeting: Meeting, steps: Steps) -> list[float]:
    """Seconds of real steps of one batch on this rank, warm-up left out: a `trial.Task`."""
    recipe = steps.recipe
    with join_world(recipe.run.device, meeting) as world, ExitStack() as cleanup:
        job = build_job(recipe, world, "never", lambda _: None, cleanup)
        job.model.train()
        schedule = StepRange(0, 1, recipe.run.batch_size, recipe.run.microbatches, 0, 0)
        pin = RankBatch.pin_memory if world.device.type == "cuda" else None
        order = ListedOrder(steps.examples)
        with Feed(order, job.loading, job.mesh.host_group, schedule, recipe.data, prepare=pin) as feed:
            loaded = feed.next_step().batches
        seconds = []
        for _ in range(WARM_UP + REPEATS):
            world.barrier()
            start_s = time.perf_counter()
            # It ends when the device has: its spans are read.
            job.step.run([batch.to(world.device, non_blocking=True) for batch in loaded])
            seconds.append(time.perf_counter() - start_s)
        return seconds[WARM_UP:]


def _measure(chosen: Chosen, num_plans: int, world: World, folder: str) -> dict[int, float | None]:
    """By place in the results: the median of the slowest rank's seconds; None for lack of memory."""
    measured: dict[int, float | None] = {}
    with open_trials(world, __name__) as trials, _progress(world, min(num_plans, len(chosen.places))) as show:
        for place, name, recipe in zip(chosen.places, chosen.names, chosen.recipes, strict=True):
            done = sum(step_s is not None for step_s in measured.values())
            if done == num_plans:
                break
            show(name, done)
            measured[place] = _step_s(trials, Steps(_apart(recipe, folder), chosen.examples))
    if all(step_s is None for step_s in measured.values()):
        raise JointUserError(
            f"--measure: of the {len(measured)} plans that fit by prediction and that training can run, each ran out "
            "of memory in a real step; --set cluster.memory_gbytes=... plans for less memory."
        )
    return measured


def _step_s(trials: Trials, steps: Steps) -> float | None:
    try:
        return float(np.median(np.max(trials.run(run_steps, steps), axis=0)))
    except OutOfMemory:
        return None


def _apart(recipe: Recipe, folder: str) -> Recipe:
    """Without what is beside training, in a folder of its own: that of the run has checkpoints, which are to stay."""
    update: dict[str, object] = {
        "run": recipe.run.model_copy(update={"dir": Path(folder)}),
        "data": recipe.data.model_copy(update={"heldout": ()}),
    }
    if recipe.balance.cost == "profile":
        profile = recipe.balance.profile or recipe.run.dir / PROFILE_FILE
        update["balance"] = recipe.balance.model_copy(update={"profile": profile})
    return recipe.model_copy(update=update)


def _job(asked: Asked, world: World) -> Job:
    """The job on the ranks at hand, by default on what they are."""
    stated = read_job_recipe(asked.recipe, asked.overrides)
    if not stated.has_data:
        raise UserError(f"--measure runs real steps, and {asked.recipe} has no [data] to train on; leave it out.")
    if asked.given.workload is not None:
        raise UserError("--measure runs steps of the recipe's own data, so --workload cannot say other lengths.")
    device, given = _device(load_recipe(asked.recipe, asked.overrides)), asked.given.cluster
    if stated.cluster is None and given.num_nodes is None and given.ranks_per_node is None:
        given = GivenCluster(given.device, world.num_ranks // world.ranks_per_node, world.ranks_per_node)
    _check_at_hand(cluster_of(asked.recipe, stated.cluster, given, device or None), device, world)
    if stated.cluster is None and given.device is None:
        given = replace(given, device=device)
    return job_of_recipe(asked.recipe, replace(asked.given, cluster=given), asked.overrides)


def _device(recipe: Recipe) -> str:
    """What a rank runs on, by its name in the catalogue; "" for a GPU that is not in it."""
    if recipe.run.device == "cpu" or not torch.cuda.is_available():
        return "cpu"
    found = device_called(torch.cuda.get_device_name(int(os.environ.get("LOCAL_RANK", "0"))))
    return "" if found is None else found.name


def _check_at_hand(cluster: Cluster, device: str, world: World) -> None:
    named, num_ranks = cluster.device.name, cluster.num_ranks
    if num_ranks != world.num_ranks or (named != device and "cpu" in (named, device)):
        at_hand = f"{world.num_ranks} rank{'s' if world.num_ranks > 1 else ''} of {device or 'a GPU'}"
        raise UserError(
            f"--measure runs on what is at hand, {at_hand}, and the job is to be planned for {num_ranks} of {named}: "
            "make --cluster, --nodes and --ranks-per-node, or the ranks that torchrun starts, the same."
        )


def _choose(found: SearchResult, obstacles: Mapping[int, str], recipe: Recipe) -> Chosen:
    """Raises UserError if nothing can be run."""
    job, candidates = found.job, [result.candidate for result in found.results]
    places = [place for place, what in obstacles.items() if not what]
    if not places:
        raise UserError(
            f"--measure: training can run none of the {len(candidates)} plans that were simulated, the fastest because "
            f"of {obstacles[0]}; --pin strategy=data-parallel finds such as it can."
        )
    return Chosen(
        places,
        [candidates[place].what for place in places],
        [recipe_of_plan(candidates[place].plan, recipe) for place in places],
        job.workload.choose(job.batch_size, np.random.default_rng(job.seed)),
    )


@contextmanager
def _progress(world: World, total: int) -> Iterator[Callable[[str, int], None]]:
    """A bar on the first rank."""
    if not world.is_first:
        yield lambda name, done: None
        return
    columns = TextColumn("measuring {task.description}"), BarColumn(), MofNCompleteColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task("", total=total)
        yield lambda name, done: bars.update(task, description=name, completed=done)
