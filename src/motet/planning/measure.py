"""`motet plan --measure`: the fastest plans by simulation run real steps on the ranks at hand, and the fastest wins.

1. The first rank searches.
2. All ranks run the plans that training can run, in the order of the search, each in fresh processes (`trial.py`): the
   recipe with the plan's settings, on the same batch that was simulated.
3. A step lasts from a barrier to the end of its slowest rank. The median of several steps counts.
4. A plan that runs out of memory is run with more recomputation, as measured bytes say (`measured_memory.py`).

The recipe's own run is not touched.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from motet.core.arrays import Int64Array
from motet.core.cluster import Cluster
from motet.core.errors import JointUserError, UserError
from motet.core.plan import Plan
from motet.core.words import counted_words, size_words
from motet.cost.profile import PROFILE_FILE
from motet.data.order import ListedOrder
from motet.dispatch import BalanceConfig
from motet.planner.candidate import Pins, predict_candidate
from motet.planner.command import PlanOutputs, find_plans, write_outputs
from motet.planner.evaluation import Quota
from motet.planner.job import Job
from motet.planner.search_result import SearchResult, SimulatedCandidate
from motet.planning.at_hand import device_at_hand
from motet.planning.cluster import ClusterOptions, cluster_of
from motet.planning.job import JobOptions, job_of_recipe
from motet.planning.measured_memory import BlockFigures, Refitted, recompute_more
from motet.planning.plan_of_recipe import recipe_of_plan
from motet.planning.planned_recipe import read_job_recipe
from motet.planning.trainable import obstacle_in
from motet.planning.trial import OutOfMemory, Trials, TrialTask, open_trials
from motet.train.input.feed import Feed, StepRange
from motet.train.job import build_job
from motet.train.planned_job import ChosenPlan
from motet.train.recipe.recipe import Recipe
from motet.train.recipe.recipe_file import load_recipe
from motet.train.recompute import with_numbers
from motet.train.report.metrics import peak_memory_bytes
from motet.train.world import Meeting, World, join_world

WARM_UP, REPEATS = 2, 5
"""Steps of a plan that are run first and not counted, and steps that are counted."""


@dataclass(frozen=True, eq=False)
class Steps:
    """What a rank runs. examples: indices of the batch's examples, int64 [batch_size].

    plan: with stages, to train under; None: the recipe says how it trains. used: the ranks that run, ascending; None:
    all of them.
    """

    recipe: Recipe
    examples: Int64Array
    plan: Plan | None = None
    used: tuple[int, ...] | None = None


@dataclass(frozen=True, eq=False)
class RunnablePlans:
    """The plans that training can run, which the first rank sends to all.

    indices: of the plans in the results of the search. names, recipes, plans, used, figures: of the same plans.
    plans:   those with stages, or with ranks that share products; None for others, which recipes say. Figures are of
             the latter.
    examples: of their batch.
    """

    indices: Sequence[int]
    names: Sequence[str]
    recipes: Sequence[Recipe]
    plans: Sequence[Plan | None]
    used: Sequence[tuple[int, ...]]
    figures: Sequence[BlockFigures | None]
    examples: Int64Array


@dataclass(frozen=True)
class MeasuredSteps:
    """Steps of a plan, or of one rank: their seconds, and the peak bytes of the fullest rank, or of the one rank.

    On a CPU, bytes are those by which the process has grown since before the model was built.
    """

    seconds: Sequence[float]
    peak_bytes: int


@dataclass(frozen=True)
class MeasuredPlan:
    """A plan that ran. step_s: the median of its steps. refitted: if it recomputes more than was planned."""

    step_s: float
    peak_bytes: int
    refitted: Refitted | None = None


@dataclass(frozen=True)
class MeasureRequest:
    """The command line of `motet plan --measure NUM_PLANS`."""

    recipe: Path
    overrides: Sequence[str]
    options: JobOptions
    pins: Pins
    num_plans: int


def plan_measured(request: MeasureRequest, outputs: PlanOutputs) -> None:
    """Search, measure, print and write, on every rank under torchrun or on this one alone.

    Raises UserError if the recipe cannot be trained, if it is planned for other ranks than those at hand, and if
    nothing fits or can be run.
    """
    with join_world("cpu") as world, tempfile.TemporaryDirectory() as folder:
        found, runnable = None, None
        obstacles: dict[int, str] = {}
        with world.together():
            if world.is_first:
                job, recipe = _job(request, world), load_recipe(request.recipe, request.overrides, trains=False)
                recipe.check_weights()
                obstacle = obstacle_in(recipe)
                found = find_plans(job, request.pins, Quota(request.num_plans, lambda plan: not obstacle(plan)))
                plans = [each.candidate.plan for each in (found.best, *found.results[1:])]
                obstacles = {index: obstacle(plan) for index, plan in enumerate(plans)}
                runnable = _runnable(found, obstacles, recipe)
        measured = _measure(world.gather(runnable)[0], request.num_plans, world, folder)
        with world.together():
            if found is not None:
                write_outputs(_with_measured(found, measured, obstacles), outputs)


def _with_measured(
    found: SearchResult, measured: Mapping[int, MeasuredPlan | None], obstacles: Mapping[int, str]
) -> SearchResult:
    """The result of the search with what was measured; a plan that recomputes more than planned is simulated anew."""
    results = list(found.results)
    for index, plan in measured.items():
        if plan is not None:
            results[index] = _measured_candidate(found.job, results[index], plan)
    steps_s = {index: None if plan is None else plan.step_s for index, plan in measured.items()}
    return replace(found, results=tuple(results)).with_measured(steps_s, obstacles)


def _measured_candidate(job: Job, simulated: SimulatedCandidate, measured: MeasuredPlan) -> SimulatedCandidate:
    candidate, prediction = simulated.candidate, simulated.prediction
    if measured.refitted is not None:
        (unit,) = candidate.plan.units
        numbers = {name: count for name, count in measured.refitted.recompute.items() if count}
        plan = replace(candidate.plan, units=(replace(unit, recompute=(numbers,)),))
        candidate = replace(candidate, plan=plan, tell=tuple)  # What was told is of the recomputation that was planned.
        prediction = predict_candidate(job, candidate)
        fact = str(measured.refitted)
    else:
        fact = f"Measured, the fullest rank held {size_words(measured.peak_bytes)} at its peak."
    fact += f" The memory model has {size_words(float(prediction.peak_bytes.max()))}."
    return replace(simulated, candidate=replace(candidate, tell=candidate.telling(fact)), prediction=prediction)


def run_steps(meeting: Meeting, steps: Steps) -> MeasuredSteps:
    """Real steps of one batch on this rank; seconds are without those of warm-up: a `TrialTask`."""
    recipe = steps.recipe
    with join_world(recipe.run.device, meeting, used=steps.used) as world, ExitStack() as cleanup:
        before_bytes = peak_memory_bytes(world.device)
        chosen = None if steps.plan is None else ChosenPlan(steps.plan, Path("The plan"), lambda _: "motet plan")
        job = build_job(recipe, world, "never", lambda _: None, cleanup, chosen)
        job.model.train()
        schedule = StepRange(0, 1, recipe.run.batch_size, job.num_microbatches, 0, 0)
        order = ListedOrder(steps.examples)
        with Feed(order, job.loading, job.mesh.host_everyone, schedule, recipe.data, prepare=job.prepared) as feed:
            loaded = job.drawn(0, feed.next_step())
        seconds = []
        for _ in range(WARM_UP + REPEATS):
            world.barrier()
            start_s = time.perf_counter()
            # The step reads the spans of the device, so it ends when the device has.
            job.step.run([batch.to(world.device, non_blocking=True) for batch in loaded])
            seconds.append(time.perf_counter() - start_s)
        return MeasuredSteps(seconds[WARM_UP:], peak_memory_bytes(world.device) - before_bytes)


def _measure(runnable: RunnablePlans, num_plans: int, world: World, folder: str) -> dict[int, MeasuredPlan | None]:
    """The plans that ran, by index in the results; None if a rank ran out of memory with everything recomputed."""
    measured: dict[int, MeasuredPlan | None] = {}
    columns = runnable.indices, runnable.names, runnable.recipes, runnable.plans, runnable.used, runnable.figures
    with open_trials(world, __name__) as trials, _progress(world, min(num_plans, len(runnable.indices))) as show:
        for index, name, recipe, plan, used, figures in zip(*columns, strict=True):
            done = sum(each is not None for each in measured.values())
            if done == num_plans:
                break
            show(name, done)
            steps = Steps(_apart(recipe, folder), runnable.examples, plan, used)
            measured[index] = measure_plan(trials, steps, figures)
    if all(plan is None for plan in measured.values()):
        raise JointUserError(
            f"--measure: of {counted_words(len(measured), 'plan')} that training can run each ran out of memory in a "
            "real step, with everything recomputed too, though by prediction it fits; --set cluster.memory_gbytes=... "
            "plans for less memory."
        )
    return measured


def measure_plan(
    trials: Trials, steps: Steps, figures: BlockFigures | None, task: TrialTask = run_steps
) -> MeasuredPlan | None:
    """Run a plan's steps; if it runs out of memory, with more recomputation. None: there is no more. A collective.

    figures: None for a plan that no recipe says, which is not run with more.
    Every rank learns how a trial ended on all, and decides alike what runs next.
    """
    ran: dict[tuple[tuple[str, int], ...], MeasuredPlan] = {}

    def run(recipe: Recipe) -> int | None:
        try:
            of_ranks = trials.run(task, replace(steps, recipe=recipe), steps.used)
        except OutOfMemory:
            return None
        step_s = float(np.median(np.max([rank.seconds for rank in of_ranks], axis=0)))
        peak_bytes = max(rank.peak_bytes for rank in of_ranks)
        ran[key_of(recipe)] = MeasuredPlan(step_s, peak_bytes)
        return peak_bytes

    def key_of(recipe: Recipe) -> tuple[tuple[str, int], ...]:
        return () if figures is None else tuple(sorted(recipe.fsdp.recomputed(figures.num_blocks).items()))

    def run_with(numbers: Mapping[str, int]) -> int | None:
        return run(with_numbers(steps.recipe, numbers))

    if run(steps.recipe) is not None:
        return ran[key_of(steps.recipe)]
    if figures is None:
        return None
    stated = steps.recipe.fsdp.recomputed(figures.num_blocks)
    if all(stated.get(name, 0) >= count for name, count in figures.every.items()):
        return None
    refitted = recompute_more(run_with, figures, stated)
    if refitted is None:
        return None
    return replace(ran[key_of(with_numbers(steps.recipe, refitted.recompute))], refitted=refitted)


def _apart(recipe: Recipe, folder: str) -> Recipe:
    """The recipe without evaluation or a service, in another folder: the checkpoints in the run's own must stay."""
    update: dict[str, object] = {
        "run": recipe.run.model_copy(update={"dir": Path(folder)}),
    }
    # What is timed are steps, not their input.
    local: dict[str, object] = {"service": "local", "ray_address": None}
    update["data"] = recipe.data.model_copy(update=local | ({"heldout": ()} if recipe.data.heldout else {}))
    if recipe.balance.cost == "profile":
        profile = recipe.balance.profile or recipe.run.dir / PROFILE_FILE
        update["balance"] = recipe.balance.model_copy(update={"profile": profile})
    return recipe.model_copy(update=update)


def _job(request: MeasureRequest, world: World) -> Job:
    """The job on the ranks at hand; options outweigh what these are."""
    stated = read_job_recipe(request.recipe, request.overrides)
    if stated.workload is None and not stated.trains:
        raise UserError(
            f"--measure runs real steps, and {request.recipe} has neither [data] nor [workload] to train on."
        )
    if request.options.workload is not None:
        raise UserError("--measure runs steps of the recipe's own data, so --workload cannot say other lengths.")
    device, cluster = (
        device_at_hand(load_recipe(request.recipe, request.overrides, trains=False)),
        request.options.cluster,
    )
    if stated.cluster is None and cluster.num_nodes is None and cluster.ranks_per_node is None:
        cluster = ClusterOptions(cluster.device, world.num_nodes, world.ranks_per_node)
    asked = cluster_of(request.recipe, stated.cluster, cluster, device or None, request.overrides)
    _check_at_hand(asked, device, world)
    if stated.cluster is None and cluster.device is None:
        cluster = replace(cluster, device=device)
    return job_of_recipe(request.recipe, replace(request.options, cluster=cluster), request.overrides, as_trained=True)


def _check_at_hand(cluster: Cluster, device: str, world: World) -> None:
    """Raises UserError unless the cluster is what is at hand."""
    named, num_ranks = cluster.device.name, cluster.num_ranks
    if num_ranks != world.num_ranks or (named != device and "cpu" in (named, device)):
        at_hand = f"{counted_words(world.num_ranks, 'rank')} of {device or 'a GPU'}"
        raise UserError(
            f"--measure runs on what is at hand, {at_hand}, and the job is to be planned for {num_ranks} of {named}: "
            "make --cluster, --nodes and --ranks-per-node, or the ranks that torchrun starts, the same."
        )


def _runnable(found: SearchResult, obstacles: Mapping[int, str], recipe: Recipe) -> RunnablePlans:
    """The plans that training can run. Raises UserError if there is none."""
    job, candidates = found.job, [result.candidate for result in found.results]
    indices = [index for index, what in obstacles.items() if not what]
    if not indices:
        raise UserError(
            f"--measure: training can run none of {counted_words(len(candidates), 'simulated plan')}, the fastest "
            f"because of {obstacles[0]}; --pin strategy=data-parallel finds plans that it can."
        )
    plans = [candidates[index].plan for index in indices]
    in_stages = [plan.schedule != "data_parallel" for plan in plans]
    said = [not own and all(unit.tp == 1 for unit in plan.units) for plan, own in zip(plans, in_stages)]
    return RunnablePlans(
        indices,
        [candidates[index].what for index in indices],
        [_undecided(recipe) if own else recipe_of_plan(plan, recipe) for plan, own in zip(plans, in_stages)],
        [None if is_said else plan for plan, is_said in zip(plans, said)],
        [tuple(sorted(plan.ranks)) for plan in plans],
        [BlockFigures.of(job, plan) if is_said else None for plan, is_said in zip(plans, said)],
        job.workload.choose(job.batch_size, np.random.default_rng(job.seed)),
    )


def _undecided(recipe: Recipe) -> Recipe:
    """The recipe without what a Plan with stages decides, which it may say for training without one."""
    update = {
        "data": recipe.data.model_copy(update={"group": None}),
        "run": recipe.run.model_copy(update={"microbatches": 1}),
        "balance": BalanceConfig(),
    }
    return recipe.model_copy(update=update)


@contextmanager
def _progress(world: World, total: int) -> Iterator[Callable[[str, int], None]]:
    """A progress bar on the first rank. Yields a function of a plan's name and the number of plans that are done."""
    if not world.is_first:
        yield lambda name, done: None
        return
    columns = TextColumn("measuring {task.description}"), BarColumn(), MofNCompleteColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task("", total=total)
        yield lambda name, done: bars.update(task, description=name, completed=done)
