"""A step in a pipeline: microbatch by microbatch, and of each an equal part to every replica of a unit (MMScale section
4.2). Which examples make a microbatch is a `Batching`: as they come, or as `ordering.py` deals them out."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from motet.assign.step import ModuleAssignment, StepAssignment
from motet.core.arrays import Int64Array
from motet.core.plan import Plan
from motet.core.workload import BACKBONE, BatchLengths
from motet.schedule.check.fit import colocated_units
from motet.schedule.layout import num_microbatches


@dataclass(frozen=True, eq=False)
class Batching:
    """Which microbatch each example of a step is in: columns [num_examples].

    microbatch: int64. index: int64, among the dp * microbatch_size of the backbone's that are taken at a time, of which
    every replica of a unit takes an equal range; several examples may have one.
    """

    microbatch: Int64Array
    index: Int64Array


def batching_as_given(plan: Plan) -> Batching:
    """Examples in the order in which they come."""
    return Batching(*np.divmod(np.arange(plan.batch_size), plan.batch_size // num_microbatches(plan)))


def assign_batching(plan: Plan, batch: BatchLengths, batching: Batching) -> StepAssignment:
    """A pipeline's step: all items of an example in its microbatch, on the replica of their unit that takes its index.

    A replica computes them by index, then by example, then as they come in it. O(items log items).
    """
    count = num_microbatches(plan)
    num_taken = plan.batch_size // count
    backbone, in_bubbles = plan.unit_of(BACKBONE), colocated_units(plan)
    modules = {}
    for module in plan.model.modules:
        unit, items = plan.unit_of(module.name), batch.of(module.name)
        num_replicas = backbone.dp if unit in in_bubbles else unit.dp
        replica = (batching.index * num_replicas // num_taken)[items.example]
        microbatch = batching.microbatch[items.example]
        modules[module.name] = ModuleAssignment(
            items.example,
            items.length,
            items.num_tokens,
            replica.astype(np.int32),
            microbatch.astype(np.int32),
            _positions(replica * count + microbatch, batching.index[items.example]),
            num_replicas,
        )
    return StepAssignment(batch, count, modules)


def _positions(group: Int64Array, key: Int64Array) -> Int64Array:
    """Of each item its place in its group by key, then by number, int64 [num_items]."""
    order = np.lexsort((key, group))
    first = np.searchsorted(group[order], group[order])
    positions = np.empty_like(order)
    positions[order] = np.arange(len(order)) - first
    return positions
