"""Examples that training would leave out of a planned job, as they need more memory than a rank of the Plan has."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from motet.core.plan import Plan
from motet.core.workload import BACKBONE
from motet.planner.job import Job

if TYPE_CHECKING:
    from motet.train.recipe.recipe import Recipe
    from motet.train.too_long import TooLong


def without_too_long(plan: Plan, job: Job, recipe: Recipe) -> Job:
    """The job without the examples that training under the Plan leaves out; says on standard error which these are.

    recipe: whose own training data the workload is, which is not in groups. Raises UserError as training does.
    """
    from motet.train.too_long import check_too_long

    if not len((found := _too_long(plan, job)).ids):
        return job
    examples = job.workload.examples
    _say(found, job, recipe)
    check_too_long(found, recipe.data.max_bad_fraction, examples.num_examples, _where(job, recipe, found))
    kept = np.ones(examples.num_examples, dtype=bool)
    kept[found.ids] = False
    weight = None if job.workload.weight is None else job.workload.weight[kept]
    return replace(job, workload=replace(job.workload, examples=examples.keep(kept), weight=weight))


def say_too_long(plan: Plan, job: Job, recipe: Recipe | None) -> None:
    """Say on standard error which examples of a job's workload need more memory than a rank of the Plan has, if any do.

    recipe: whose training data the workload is; None: it is of another file.
    """
    if len((found := _too_long(plan, job)).ids):
        _say(found, job, recipe)


def _too_long(plan: Plan, job: Job) -> TooLong:
    from motet.train.too_long import too_long

    examples = job.workload.examples
    names = [module.name for module in job.model.modules if module.name != BACKBONE]
    # A workload may have lengths of modalities that the model lacks.
    own = replace(examples, items={name: examples.items[name] for name in names}, group=None)
    return too_long(plan, examples.num_examples, own.take, exchange=job.exchange)


def _say(found: TooLong, job: Job, recipe: Recipe | None) -> None:
    of_all = f"{len(found.ids):,} of {job.workload.examples.num_examples:,} examples of {job.workload.source}"
    one = len(found.ids) == 1
    print(
        f"{of_all} {'needs' if one else 'need'} more memory than a rank has, and training leaves "
        f"{'it' if one else 'them'} out; the largest: "
        f"{_where(job, recipe, found)}: {found.reason(0)}.",
        file=sys.stderr,
    )


def _where(job: Job, recipe: Recipe | None, found: TooLong) -> str:
    """The example that needs most: its line, where the workload is a recipe's data as it stands there."""
    from motet.planning.sources import training_data

    first = int(found.ids[0])
    if recipe is None or job.workload.examples.group is not None:
        return f"example {first + 1:,}"
    return training_data(recipe)[0].where(first)
