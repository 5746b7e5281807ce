"""The assignment of a pipeline's step: the replicas of a unit share each microbatch equally (MMScale section 4.2).

A `Batching` says which examples make a microbatch: in the given order, or as `ordering.py` decides.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from motet.assign.step import ModuleAssignment, StepAssignment
from motet.core.arrays import Int64Array
from motet.core.plan import Plan
from motet.core.workload import BACKBONE, BatchLengths
from motet.schedule.layout import num_microbatches
from motet.schedule.plan_units import units_in_bubbles


@dataclass(frozen=True, eq=False)
class Batching:
    """The microbatch and the index of each example of a step: columns [num_examples].

    microbatch: int64.
    index:      int64, position in the global microbatch of dp * microbatch_size examples (dp of the backbone). Every
                replica of a unit takes an equal range of indexes. Several examples may have one index.

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

    All items of an example are in its microbatch. The replica of their unit that takes the example's index computes
    them. A replica orders its items by index, then by example, then as the example has them. O(items log items).
    """
    count = num_microbatches(plan)
    num_indexes = plan.batch_size // count
    backbone, in_bubbles = plan.unit_of(BACKBONE), units_in_bubbles(plan)
    modules = {}
    for module in plan.model.modules:
        unit, items = plan.unit_of(module.name), batch.of(module.name)
        num_replicas = backbone.dp if unit in in_bubbles else unit.dp
        replica = (batching.index * num_replicas // num_indexes)[items.example]
        microbatch = batching.microbatch[items.example]
        modules[module.name] = ModuleAssignment(
            items.example,
            items.length,
            items.num_tokens,
            replica.astype(np.int32),
            microbatch.astype(np.int32),
            _positions(replica * count + microbatch, batching.index[items.example]),
            num_replicas,
            items.segments,
        )
    return StepAssignment(batch, count, modules)


def _positions(group: Int64Array, key: Int64Array) -> Int64Array:
    """The position of each item in its group, ordered by key, then by item number, int64 [num_items]."""
    order = np.lexsort((key, group))
    first = np.searchsorted(group[order], group[order])
    positions = np.empty_like(order)
    positions[order] = np.arange(len(order)) - first
    return positions
