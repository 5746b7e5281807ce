"""The assignment of a pipeline's step: the replicas of a unit share each microbatch equally (MMScale section 4.2).

A `Batching` says which examples make a microbatch: in the given order, or as `ordering.py` decides. A unit's replicas
need not divide a microbatch's examples: then they share *items*, so that an encoder with 8 replicas is busy beside a
backbone with one.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np

from motet.assign.step import ModuleAssignment, StepAssignment
from motet.core.arrays import Int64Array
from motet.core.plan import Plan
from motet.core.workload import BACKBONE, BatchLengths
from motet.schedule.layout import num_microbatches
from motet.schedule.plan_units import shares_items, units_in_bubbles


@dataclass(frozen=True, eq=False)
class Batching:
    """The microbatch and the index of each example of a step: columns [num_examples].

    microbatch: int64.
    index:      int64, position in the global microbatch of dp * microbatch_size examples (dp of the backbone). Every
                replica of a unit takes an equal range of indexes, which may begin or end inside an index: the items of
                that index are shared. Several examples may have one index.

    Example:
        Four examples in two microbatches; the backbone has two replicas and a microbatch_size of 1:
        >>> batching = Batching(microbatch=np.array([0, 1, 0, 1]), index=np.array([0, 0, 1, 1]))
        >>> np.flatnonzero(batching.microbatch == 0).tolist()
        [0, 2]
    """

    microbatch: Int64Array
    index: Int64Array


def batching_as_given(plan: Plan) -> Batching:
    """The batching that fills microbatch after microbatch, index after index, in the given order."""
    return Batching(*np.divmod(np.arange(plan.batch_size), plan.batch_size // num_microbatches(plan)))


def assign_batching(plan: Plan, batch: BatchLengths, batching: Batching) -> StepAssignment:
    """The assignment of a pipeline's step.

    All items of an example are in its microbatch. Item j of the m that a module has at index i of n stands at the point
    (i + j / m) / n of the microbatch; replica r of R takes the points from r / R to (r + 1) / R. A module that feeds
    another one of its unit stays with it: all items of index i stand at i / n. A replica orders its items by index,
    then by example, then as the example has them. O(items log items).
    """
    count = num_microbatches(plan)
    num_indexes = plan.batch_size // count
    backbone, in_bubbles = plan.unit_of(BACKBONE), units_in_bubbles(plan)
    modules = {}
    for module in plan.model.modules:
        unit, items = plan.unit_of(module.name), batch.of(module.name)
        num_replicas = backbone.dp if unit in in_bubbles else unit.dp
        index, microbatch = batching.index[items.example], batching.microbatch[items.example]
        replica = index * num_replicas // num_indexes
        if num_indexes % num_replicas and shares_items(plan, module.name):
            replica = _shared(microbatch * num_indexes + index, index, num_replicas, num_indexes)
        modules[module.name] = ModuleAssignment(
            items.example,
            items.length,
            items.num_tokens,
            replica.astype(np.int32),
            microbatch.astype(np.int32),
            partial(positions_in, replica * count + microbatch, index),
            num_replicas,
            items.segments,
            items.num_media,
        )
    return StepAssignment(batch, count, modules)


def _shared(group: Int64Array, index: Int64Array, num_replicas: int, num_indexes: int) -> Int64Array:
    """The replica of each item, int64 [num_items], by its point. group: a number for each microbatch and index."""
    size = np.unique(group, return_inverse=True, return_counts=True)
    num_here = size[2][size[1]]
    return (index * num_here + positions_in(group, index)) * num_replicas // (num_here * num_indexes)


def positions_in(group: Int64Array, key: Int64Array) -> Int64Array:
    """The position of each item in its group, ordered by key, then by item number, int64 [num_items]. Both >= 0."""
    # One key is sorted in half the time of two, and at once where items come in order.
    order = np.argsort(group.astype(np.int64) * (int(key.max(initial=0)) + 1) + key, kind="stable")
    in_order = group[order]
    starts = np.flatnonzero(np.diff(in_order, prepend=in_order[:1] - 1))
    first = np.repeat(starts, np.diff(starts, append=len(order)))
    positions = np.empty_like(order)
    positions[order] = np.arange(len(order)) - first
    return positions
