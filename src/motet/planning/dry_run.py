"""`motet train --dry-run`: what each rank would hold at the most, by the memory model, before anything is built."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from motet.core.errors import UserError
from motet.core.files import check_output
from motet.core.plan import Plan
from motet.core.words import counted_words, size_words
from motet.planner.refinement import strategy_of
from motet.planning.at_hand import device_at_hand
from motet.planning.cluster import ClusterOptions
from motet.planning.fullest import fullest_steps
from motet.planning.job import JobOptions, check_job_learns
from motet.planning.plan_of_recipe import read_recipe_as_plan
from motet.planning.planned_recipe import check_counted
from motet.planning.too_long import without_too_long
from motet.planning.under_plan import job_under_plan
from motet.schedule import PlannedProgram, planned
from motet.schedule.coordinates import coordinates
from motet.simulate.predict.predict import assign_batch, predict_assigned
from motet.simulate.predict.prediction import Prediction
from motet.simulate.show.prediction_json import STDOUT, prediction_tables, write_prediction
from motet.simulate.show.report import out_of_memory
from motet.train.recipe.recipe import Recipe
from motet.train.recipe.recipe_file import load_recipe
from motet.train.world import World, join_world

_MAX_ROWS = 16
"""Ranks in the table: those that hold most."""


def show_memory(
    file: Path, overrides: Sequence[str], json_file: Path | None = None, plan_file: Path | None = None
) -> None:
    """Print the bytes of the ranks of `[cluster]`, else of the ranks at hand: this one, or those of torchrun.

    json_file: where to write the prediction as well; "-": what is printed is JSON alone.
    plan_file: the Plan to train under, by default `run.plan`; it says which ranks there are, and what each holds.
    Raises UserError for what is wrong with the recipe or the Plan, for types of numbers that the memory model does not
    count, and if a rank needs more than its device has.
    """
    with join_world("cpu") as world, world.together():
        if world.is_first:
            if json_file not in (None, STDOUT):
                check_output(json_file)
            recipe = load_recipe(file, overrides, trains=False)
            check_counted(file, recipe)
            if plan_file := plan_file or recipe.run.plan:
                plan, job, recipe = job_under_plan(recipe, file, overrides, plan_file)
            else:
                plan, job = read_recipe_as_plan(file, overrides, JobOptions(_cluster(file, recipe, world)))
            check_job_learns(file, job)
            if not recipe.data.weights and recipe.data.group is None:
                job = without_too_long(plan, job, recipe)
            steps, stages = fullest_steps(plan, job, recipe), planned(plan)
            assigned = (assign_batch(plan, batch, job.cost, job.balancing) for batch in steps.batches)
            predicted = (
                predict_assigned(
                    plan,
                    stages,
                    assignment,
                    job.cost,
                    recomputed=job.recomputes and job.recomputes(assignment),
                    exchange=job.exchange,
                )
                for assignment in assigned
            )
            prediction = max(predicted, key=lambda each: int(each.peak_bytes.max()))
            lacking = out_of_memory(plan, prediction)
            if json_file != STDOUT:
                _print(plan, stages, prediction, steps.words)
            if json_file is not None:
                write_prediction(prediction_tables(strategy_of(plan), prediction, lacking), json_file)
            if lacking:
                raise UserError(f"{file} does not fit: {lacking}")


def _cluster(file: Path, recipe: Recipe, world: World) -> ClusterOptions:
    """The ranks at hand, unless the recipe names a cluster."""
    if recipe.cluster is not None:
        return ClusterOptions()
    device = device_at_hand(recipe)
    if not device:
        raise UserError(f"{file}: this GPU is not in the catalogue, so [cluster] must name one and its memory.")
    return ClusterOptions(device, world.num_nodes, world.ranks_per_node)


def _print(plan: Plan, program: PlannedProgram, prediction: Prediction, of: str) -> None:
    """of: what the step is the fullest of, in words."""
    console, peaks = Console(), prediction.peak_bytes
    in_stages = plan.schedule != "data_parallel"
    scale, unit = (1e9, "GB") if peaks.max() >= 1e9 else (1e6, "MB")
    table = Table(
        "rank", *(("blocks",) if in_stages else ()), *prediction.memory_bytes, "all", title=f"Memory by rank, {unit}"
    )
    for row in sorted((-peaks).argsort(kind="stable")[:_MAX_ROWS].tolist()):
        parts = (*(held[row] for held in prediction.memory_bytes.values()), peaks[row])
        rank = int(prediction.ranks[row])
        blocks = (_blocks_of(program, rank),) if in_stages else ()
        table.add_row(str(rank), *blocks, *(f"{size / scale:,.3f}" for size in parts))
    console.print(table)
    among = f"the {_MAX_ROWS} that hold most of {len(peaks):,} ranks" if len(peaks) > _MAX_ROWS else "all ranks"
    capacity = size_words(prediction.capacity_bytes)
    of_all, each, device = plan.units[0], plan.microbatch_size, plan.cluster.device.name
    num_sharing = of_all.shard_size or (of_all.dp if of_all.zero else 1)
    whose = "" if of_all.tp == 1 else " of the part that a tensor-parallel rank computes with"
    if num_sharing > 1:
        copies = f"A copy{whose} is shared by {num_sharing:,} ranks"
    else:
        copies = f"Each rank holds a whole copy{whose}"
    if in_stages:
        copies = "Each rank holds the blocks of its stages, with what stands before and behind them"
    size = f"has {counted_words(each, 'example')}"
    if plan.microbatch_caps:
        caps = ", ".join(f"{cap:,} of {name}" for name, cap in plan.microbatch_caps.items())
        size = f"is a group of at most {caps}"
    console.print(
        f"Shown are {among}, in the fullest of {of}; the device of each, {device}, has {capacity}. {copies}; a rank's "
        f"microbatch {size}.",
        highlight=False,
        markup=False,
    )


def _blocks_of(program: PlannedProgram, rank: int) -> str:
    """The blocks that a rank holds, numbered from 0, in words: "image 0-2, backbone 0"."""
    numbers = program.stages_on(coordinates(program.layout, rank).program_rank)
    stages = [program.stages[number] for number in numbers]
    spans = [(name, first, stop - 1) for stage in stages for name, (first, stop) in stage.layers.items()]
    return ", ".join(f"{name} {first}-{last}" if first < last else f"{name} {first}" for name, first, last in spans)
