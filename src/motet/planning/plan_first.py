"""`motet train` of a recipe with `[parallel.NAME]` and without a plan: the first rank plans, then all ranks train.

The first rank finds the fastest Plan with the stated degrees that training can run on the ranks at hand, and writes it
into the run's folder. The other ranks get it from the first, so that all have the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from motet.core.errors import UserError
from motet.core.plan import Plan
from motet.core.plan_file import write_plan
from motet.core.words import counted_words
from motet.planner.candidate import Pins
from motet.planner.command import find_plans
from motet.planner.evaluation import Quota
from motet.planner.job import Job
from motet.planning.at_hand import device_at_hand
from motet.planning.cluster import ClusterOptions
from motet.planning.job import JobOptions, job_of_recipe
from motet.planning.trainable import obstacle_in, on_all_ranks, plan_line
from motet.planning.under_plan import agreed
from motet.train.checkpoint.choice import Say
from motet.train.planned_job import ChosenPlan
from motet.train.recipe.recipe import Recipe
from motet.train.world import World

PLAN_FILE = "plan.json"
"""The Plan in the run's folder."""


def plan_first(
    recipe: Recipe, recipe_file: Path, overrides: Sequence[str], world: World, say: Say
) -> tuple[Recipe, ChosenPlan]:
    """The recipe as it trains under the Plan that is found, and the Plan. A collective.

    Raises UserError on all ranks if no Plan has the stated degrees, and as `agreed` does.
    """
    file, found = recipe.run.dir / PLAN_FILE, None
    with world.together():
        if world.is_first:
            job = _job_at_hand(recipe, recipe_file, overrides, world)
            found = fastest_plan(job, obstacle_in(recipe))
            write_plan(found, file)
            say(f"Planned for {counted_words(world.num_ranks, 'rank')}, as [parallel] says; the plan is {file}.")
    plan = world.gather(found)[0]
    with world.together():
        return agreed(recipe, recipe_file, ChosenPlan(plan, file, partial(plan_line, recipe_file, file, overrides)))


def _job_at_hand(recipe: Recipe, recipe_file: Path, overrides: Sequence[str], world: World) -> Job:
    """The job on the ranks at hand. Its device is that of `[cluster]`, or else what is at hand."""
    device = None if recipe.cluster is not None else device_at_hand(recipe)
    if device == "":
        raise UserError(
            f"{recipe_file} states [parallel], so it is planned before it trains, and no figures of this GPU are known:"
            " name a similar one in [cluster] device, or train under a plan with --plan."
        )
    cluster = ClusterOptions(device, world.num_nodes, world.ranks_per_node)
    return job_of_recipe(recipe_file, JobOptions(cluster), overrides, as_trained=True)


def fastest_plan(job: Job, obstacle_of: Callable[[Plan], str]) -> Plan:
    """The fastest Plan that training can run on all ranks, by `obstacle_of`. Raises UserError if there is none."""
    obstacle_of = on_all_ranks(obstacle_of)
    found = find_plans(job, Pins(order="given"), Quota(1, lambda plan: not obstacle_of(plan)))
    return found.with_obstacles(obstacle_of, is_trainable=True).best.candidate.plan
