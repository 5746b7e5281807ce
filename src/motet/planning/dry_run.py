"""`motet train --dry-run`: what each rank would hold at the most, by the memory model, before anything is built."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from motet.core.errors import UserError
from motet.core.plan import Plan, Unit
from motet.planner.job import Job
from motet.planning.at_hand import device_at_hand
from motet.planning.cluster import ClusterOptions
from motet.planning.fullest import fullest_steps
from motet.planning.job import JobOptions, job_of_recipe
from motet.planning.plan_of_recipe import read_recipe_as_plan
from motet.schedule import planned
from motet.simulate.predict.predict import assign_batch, predict_assigned
from motet.simulate.predict.prediction import Prediction
from motet.simulate.show.report import out_of_memory
from motet.train.recipe.recipe import Recipe, load_recipe
from motet.train.recipe.toml_text import read_recipe
from motet.train.world import World, join_world

_MAX_ROWS = 16
"""Ranks in the table: those that hold most."""


def show_memory(file: Path, overrides: Sequence[str]) -> None:
    """Print the bytes of the ranks of `[cluster]`, else of the ranks at hand: this one, or those of torchrun.

    Raises UserError for what is wrong with the recipe, and if a rank needs more than its device has.
    """
    with join_world("cpu") as world, world.together():
        if world.is_first:
            has_data = "data" in read_recipe(file, overrides).tables
            recipe = load_recipe(file, overrides) if has_data else None
            plan, job = _plan(file, overrides, world, recipe)
            steps, stages = fullest_steps(plan, job, recipe), planned(plan)
            assigned = (assign_batch(plan, batch, job.cost, job.balancing) for batch in steps.batches)
            predicted = (predict_assigned(plan, stages, assignment, job.cost) for assignment in assigned)
            prediction = max(predicted, key=lambda each: int(each.peak_bytes.max()))
            _print(plan, prediction, steps.words)
            if lacking := out_of_memory(plan, prediction):
                raise UserError(f"{file} does not fit: {lacking}")


def _plan(file: Path, overrides: Sequence[str], world: World, recipe: Recipe | None) -> tuple[Plan, Job]:
    """What is run, on what. A recipe of shapes says nothing of how it trains: it is sharded over all ranks."""
    if recipe is not None:
        return read_recipe_as_plan(file, overrides, JobOptions(_cluster(file, recipe, world)))
    job = job_of_recipe(file, JobOptions(ClusterOptions()), overrides)
    num_ranks = job.cluster.num_ranks
    size, left = divmod(job.batch_size, num_ranks)
    if left or not size:
        raise UserError(f"{file}: run.batch_size = {job.batch_size} must be a multiple of the {num_ranks} ranks.")
    unit = Unit("all", (job.model.num_blocks,), dp=num_ranks, zero=3 if num_ranks > 1 else 0)
    plan = Plan(
        job.model, job.cluster, (unit,), job.batch_size, size, schedule="data_parallel", precision=job.precision
    )
    return plan, job


def _cluster(file: Path, recipe: Recipe, world: World) -> ClusterOptions:
    """The ranks at hand, unless the recipe names a cluster."""
    if recipe.cluster is not None:
        return ClusterOptions()
    device = device_at_hand(recipe)
    if not device:
        raise UserError(f"{file}: this GPU is not in the catalogue, so [cluster] must name one and its memory.")
    return ClusterOptions(device, world.num_ranks // world.ranks_per_node, world.ranks_per_node)


def _print(plan: Plan, prediction: Prediction, of: str) -> None:
    """of: what the step is the fullest of, in words."""
    console, peaks = Console(), prediction.peak_bytes
    table = Table("rank", *prediction.memory_bytes, "all", title="Memory by rank, GB")
    for row in sorted((-peaks).argsort(kind="stable")[:_MAX_ROWS].tolist()):
        parts = (*(held[row] for held in prediction.memory_bytes.values()), peaks[row])
        table.add_row(str(prediction.ranks[row]), *(f"{size / 1e9:,.3f}" for size in parts))
    console.print(table)
    among = f"the {_MAX_ROWS} that hold most of {len(peaks):,} ranks" if len(peaks) > _MAX_ROWS else "all ranks"
    capacity = f"{prediction.capacity_bytes / 1e9:,.1f} GB"
    unit, each, device = plan.units[0], plan.microbatch_size, plan.cluster.device.name
    num_sharing = unit.shard_size or (unit.dp if unit.zero else 1)
    copies = f"A copy is shared by {num_sharing:,} ranks" if num_sharing > 1 else "Each rank holds a whole copy"
    size = f"has {each:,} example{'s' if each > 1 else ''}"
    if plan.microbatch_caps:
        caps = ", ".join(f"{cap:,} of {name}" for name, cap in plan.microbatch_caps.items())
        size = f"is a group of at most {caps}"
    console.print(
        f"Shown are {among}, in the fullest of {of}; the device of each, {device}, has {capacity}. {copies}; a rank's "
        f"microbatch {size}.",
        highlight=False,
        markup=False,
    )
