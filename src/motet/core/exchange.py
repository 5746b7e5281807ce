"""What an exchange takes: an all-to-all in which each rank has other bytes for each of the others.

Each rank moves bytes inside its node and bytes between nodes, one after the other; the exchange takes as long as the
slowest rank.
`balance.choose`, the simulator and the planner price an exchange by `exchange_s` alone; what differs is what they know
of the links: stated ones, a cluster's, or measured messages.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from motet.core.arrays import BoolArray, Float64Array, Int64Array
from motet.core.cluster import Link


@dataclass(frozen=True, eq=False)
class Moved:
    """What each rank sends and receives, bytes or rows, float64 [..., 2, num_ranks]: sent first, then received.

    inside: from or to other ranks of its node. crossing: ranks of other nodes. What a rank keeps is in neither.
    """

    inside: Float64Array
    crossing: Float64Array

    @property
    def whole(self) -> Float64Array:
        """Both, [..., 2, num_ranks]."""
        return self.inside + self.crossing

    @property
    def busiest(self) -> Float64Array:
        """What the rank that moves most sends or receives, [...]."""
        most: Float64Array = self.whole.max(axis=(-2, -1))
        return most

    def in_bytes(self, row_bytes: float, num_shares: int = 1) -> Moved:
        """Rows as bytes, of which each of `num_shares` tensor-parallel ranks moves one share."""
        return Moved(self.inside * row_bytes / num_shares, self.crossing * row_bytes / num_shares)


def moved(
    source: NDArray[np.integer],
    sink: NDArray[np.integer],
    amount: NDArray[np.integer],
    node: NDArray[np.integer],
    microbatch: NDArray[np.integer] | None = None,
    num_microbatches: int = 1,
) -> Moved:
    """What goes from rank `source` to rank `sink`, of each item: [num_items] all three, and `microbatch`.

    node: [num_ranks], where each rank sits. microbatch: whose exchange each item is part of; by default there is one.
    Returns [num_microbatches, 2, num_ranks]. Exact below 2^53. O(num_items + num_microbatches * num_ranks).
    """
    shape = num_microbatches, len(node)
    first = np.zeros(len(source), dtype=np.int64) if microbatch is None else microbatch.astype(np.int64) * len(node)
    crosses = node[source] != node[sink]

    def of(items: BoolArray) -> Float64Array:
        ends = [
            np.bincount(first[items] + rank[items], amount[items], num_microbatches * len(node)).reshape(shape)
            for rank in (source, sink)
        ]
        return np.stack(ends, axis=1)

    return Moved(of((source != sink) & ~crosses), of(crosses))


def exchange_s(
    moved_bytes: Moved,
    inside_s: Callable[[Float64Array], Float64Array],
    crossing_s: Callable[[Float64Array], Float64Array],
) -> Float64Array:
    """Seconds of the slowest rank, [...]. inside_s, crossing_s: of bytes that a rank moves inside its node, and between
    nodes, of any shape; 0 for none."""
    rank_s = inside_s(moved_bytes.inside) + crossing_s(moved_bytes.crossing)
    slowest: Float64Array = rank_s.max(axis=(-2, -1))
    return slowest


@dataclass(frozen=True)
class Network:
    """What ranks exchange by: two kinds of links, and how many ranks share a node.

    intra_node: of bytes that stay in their node. inter_node: of those that cross; where it equals intra_node, a rank
    moves all its bytes by one link. ranks_per_node: rank r sits in node r // ranks_per_node; None: all ranks share one.
    """

    intra_node: Link
    inter_node: Link
    ranks_per_node: int | None = None

    @classmethod
    def of(cls, link: Link | Network) -> Network:
        """A link alone is that of all ranks, which share a node."""
        return cls(link, link) if isinstance(link, Link) else link

    def nodes(self, num_ranks: int) -> Int64Array:
        """Of each rank, int64 [num_ranks]."""
        return np.arange(num_ranks) // (self.ranks_per_node or max(num_ranks, 1))

    def exchange_s(self, moved_bytes: Moved) -> Float64Array:
        """Seconds of the slowest rank, [...]."""
        if self.intra_node == self.inter_node:
            return self.intra_node.seconds(moved_bytes.busiest)
        return exchange_s(moved_bytes, self.intra_node.seconds, self.inter_node.seconds)
