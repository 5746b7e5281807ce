"""The steps of a recipe that hold most for backward: what memory is sized for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from motet.core.arrays import Float64Array, Int64Array
from motet.core.plan import Plan
from motet.core.words import counted_words
from motet.core.workload import BACKBONE, BatchLengths
from motet.cost.memory import held_elements
from motet.data.order import ListedOrder
from motet.planner.job import Job
from motet.planning.sources import training_order
from motet.schedule.plan_units import recomputed_in
from motet.train.recipe.recipe import Recipe

_NUM_STEPS = 8
"""Steps that are predicted, of those without groups."""


class FullestSteps(NamedTuple):
    """Steps, one of which holds most, and of what they are the fullest, in words."""

    batches: Sequence[BatchLengths]
    words: str


def fullest_steps(plan: Plan, job: Job, recipe: Recipe) -> FullestSteps:
    """The fullest steps of a job: of its first epoch, in the order of training.

    With groups, one step of the fullest of them. Without, the _NUM_STEPS in which a rank has most: without balancing by
    its own examples, else by its share of a microbatch, or by the longest example.
    """
    examples = job.workload.examples
    if examples.group is not None:
        held = _held(plan, examples, examples.group)
        most = np.argsort(-held, kind="stable")[: plan.batch_size // plan.microbatch_size]
        return FullestSteps([job.workload.groups(most)], f"the {counted_words(len(held), 'group')} of the first epoch")
    order = training_order(recipe, job.workload, is_own=True)
    assert not isinstance(order, ListedOrder), "groups are above"
    count = max(min(recipe.run.over(order).num_steps, examples.num_examples // plan.batch_size), 1)
    ids = np.concatenate([order.step(number * plan.batch_size, plan.batch_size).ids for number in range(count)])
    fullest = np.argsort(
        -_held_by_step(plan, _held(plan, examples, np.arange(examples.num_examples))[ids]), kind="stable"
    )
    steps = ids.reshape(count, plan.batch_size)[fullest[:_NUM_STEPS]]
    return FullestSteps(
        [examples.take(step) for step in steps], "the first step" if count == 1 else f"the first {count:,} steps"
    )


def _held_by_step(plan: Plan, held: Float64Array) -> Float64Array:
    """What the fullest rank of each step holds, about, from what the examples of all steps hold."""
    shares = held.reshape(len(held) // plan.batch_size, -1, plan.microbatch_size)
    if plan.balance == "off":
        return shares.sum(axis=2).max(axis=1)
    microbatches = held.reshape(len(shares), -1, plan.unit_of(BACKBONE).dp * plan.microbatch_size)
    return np.maximum(microbatches.mean(axis=2) * plan.microbatch_size, microbatches.max(axis=2)).max(axis=1)


def _held(plan: Plan, examples: BatchLengths, part: Int64Array) -> Float64Array:
    """Elements that forward keeps for each part of the examples if one rank computes it, padding included.

    part: int64 [num_examples], from 0.
    """
    held: Float64Array = np.zeros(int(part.max()) + 1)
    for name, elements in held_elements(plan.model, recomputed_in(plan)).items():
        items = examples.of(name)
        rows = np.bincount(part[items.example], items.length, len(held))
        if plan.model.module(name).padded:
            longest = np.zeros(len(held))
            np.maximum.at(longest, part[items.example], items.length)
            rows = longest * np.bincount(part[items.example], minlength=len(held))
        held += elements * rows
    return held
