"""Seconds of exchanges in which all ranks give as much: all-gathers, and rows that lie evenly on ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from motet.core.arrays import Float64Array, Int64Array
from motet.core.cluster import Cluster
from motet.core.exchange import Moved
from motet.core.workload import BACKBONE
from motet.cost.model import CostModel

if TYPE_CHECKING:
    from motet.simulate.predict.stage_pricing import Pricing


def gathers_s(cost: CostModel, size_bytes: Float64Array, groups: Sequence[Sequence[int]]) -> Float64Array:
    """Seconds of all-gathers in the slowest of some groups of ranks, [n]. size_bytes: [n]; 0: none. Of many items few
    are of lengths that differ.
    """
    sizes, of_size = np.unique(size_bytes, return_inverse=True)
    seconds = [max(cost.gather_seconds(size, ranks) for ranks in groups) if size else 0.0 for size in sizes.tolist()]
    return np.array(seconds, dtype=np.float64)[of_size]


def even_exchanges_s(cost: CostModel, cluster: Cluster, to_each: Float64Array, ranks: Sequence[int]) -> Float64Array:
    """Seconds of exchanges in which each rank gives each other one as many bytes, [n]. to_each: these, [n]."""
    nodes = [cluster.node_of(rank) for rank in ranks]
    here = np.array([nodes.count(node) - 1 for node in nodes])
    inside, crossing = (
        np.repeat((to_each[:, None] * num)[:, None, :], 2, axis=1) for num in (here, len(ranks) - 1 - here)
    )
    return cost.exchange_seconds(Moved(inside, crossing), ranks)


def evenly_moved_s(pricing: Pricing, rows: Int64Array, row_bytes: int) -> Float64Array:
    """Seconds in which the ranks that share sequences exchange rows that lie evenly on them, by replica of the
    backbone and microbatch. Replicas that share some of a microbatch exchange those of all.

    rows: int64 [num_replicas, num_microbatches].
    """
    moved_bytes, unit, cost, cluster = rows * row_bytes, pricing.backbone, pricing.cost, pricing.plan.cluster
    seconds, cp, sequences = np.zeros(moved_bytes.shape), unit.cp, pricing.assignment.modules[BACKBONE]
    if cp > 1:
        to_each = moved_bytes.ravel() / cp**2
        kinds = [
            even_exchanges_s(cost, cluster, to_each, ranks) for ranks in cluster.unlike(unit.ranks, cp, apart=unit.tp)
        ]
        seconds += np.max(kinds, axis=0).reshape(seconds.shape)
    if (cuts := sequences.cuts) is not None:
        together = [unit.rank(0, d, c) for d in range(unit.dp) for c in range(cp)]
        shared = np.unique(sequences.microbatch[cuts.items])
        to_each = moved_bytes.sum(axis=0)[shared] / len(together) ** 2
        seconds[:, shared] = even_exchanges_s(cost, cluster, to_each, together)
    return seconds
