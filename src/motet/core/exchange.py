"""Seconds of an exchange, in which each rank has different bytes for each other rank.

A rank moves its bytes inside its node, then its bytes between nodes. The exchange takes as long as the slowest rank.
An exchange is an all-to-all, or for comparison a ring all-gather of all that ranks hold (OrchMLLM section 5.2.1).
`balance.choose`, the simulator and the planner price an exchange by `exchange_s`. They differ in the links that they
pass in: stated ones, a cluster's, or measured messages.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from motet.core.arrays import Float64Array, Int64Array
from motet.core.cluster import Link
from motet.core.nodes import RanksPerNode, node_of_ranks

NS_PER_S = 10**9
"""Seconds are compared in whole nanoseconds, so that all ranks choose alike."""

Communicator = Literal["all_to_all", "all_gather"]
"""How an exchange is executed. "all_to_all": each rank gets its part alone. "all_gather": each rank gets all, and takes
its part."""


@dataclass(frozen=True, eq=False)
class Moved:
    """The bytes or rows that each rank sends and receives, float64 [..., 2, num_ranks]: sent, then received.

    inside:   between ranks of one node.
    crossing: between ranks of different nodes.
    What a rank keeps is in neither.
    """

    inside: Float64Array
    crossing: Float64Array

    @property
    def whole(self) -> Float64Array:
        """inside + crossing, float64 [..., 2, num_ranks]."""
        return self.inside + self.crossing

    @property
    def busiest(self) -> Float64Array:
        """The most that one rank sends or receives, float64 [...]."""
        busiest: Float64Array = self.whole.max(axis=(-2, -1))
        return busiest

    def in_bytes(self, row_bytes: float, num_shares: int = 1) -> Moved:
        """Rows as bytes of one of `num_shares` tensor-parallel ranks, which divide the rows."""
        return Moved(self.inside * row_bytes / num_shares, self.crossing * row_bytes / num_shares)


def moved(
    source: NDArray[np.integer],
    sink: NDArray[np.integer],
    amount: NDArray[np.integer],
    node: NDArray[np.integer],
    microbatch: NDArray[np.integer] | None = None,
    num_microbatches: int = 1,
) -> Moved:
    """Sum what each rank sends and receives over items that move from rank `source` to rank `sink`.

    source, sink, amount: [num_items].
    node:                 [num_ranks], the node of each rank.
    microbatch:           [num_items], the microbatch of each item; by default there is one.
    Returns [num_microbatches, 2, num_ranks]. Exact below 2^53. O(num_items + num_microbatches * num_ranks).
    """
    # One table for bytes inside nodes, one for those between them. What stays counts 0 in the first.
    num_rows, leaves = num_microbatches * len(node), amount * (source != sink).astype(np.float64)
    first = (node[source] != node[sink]) * num_rows
    if microbatch is not None:
        first += microbatch.astype(np.int64) * len(node)
    ends = [np.bincount(first + rank, leaves, 2 * num_rows) for rank in (source, sink)]
    inside, crossing = np.stack([end.reshape(2, num_microbatches, len(node)) for end in ends], axis=2)
    return Moved(inside, crossing)


def hop_of_all_gather(holder: NDArray[np.integer], amount: NDArray[np.integer], node: NDArray[np.integer]) -> Moved:
    """What each rank sends and receives in one of the num_ranks - 1 hops of a ring all-gather, [1, 2, num_ranks].

    holder, amount: [num_items], the rank that holds each item, and the item's size.
    node:           [num_ranks], the node of each rank; ranks of a node have successive numbers.
    In a hop, each rank passes a share on to the next rank, and all shares are padded to the longest.
    """
    longest = np.bincount(holder, amount, len(node)).max()
    leaves_node = node != np.roll(node, -1)
    crosses = np.stack([leaves_node, np.roll(leaves_node, 1)])[None]
    return Moved(np.where(crosses, 0.0, longest), np.where(crosses, longest, 0.0))


def sent_in_all_gather(
    holder: NDArray[np.integer], amount: NDArray[np.integer], node: NDArray[np.integer]
) -> tuple[int, int]:
    """What all ranks send in a ring all-gather, and the part of it that crosses nodes. As in `hop_of_all_gather`."""
    hop, num_hops = hop_of_all_gather(holder, amount, node), len(node) - 1
    return num_hops * int(hop.whole[0, 0].sum()), num_hops * int(hop.crossing[0, 0].sum())


def starts_in_all_gather(
    order: NDArray[np.integer], holder: NDArray[np.integer], amount: NDArray[np.integer], num_ranks: int
) -> tuple[int, Int64Array]:
    """The size of the share that each rank gives, and where each item begins in all shares, int64 [num_items].

    order: [num_items], all items as ranks hold them: those of rank 0 first. holder, amount: as in `hop_of_all_gather`.
    """
    held = np.bincount(holder, amount, num_ranks).astype(np.int64)
    share = int(held.max())
    start = np.empty(len(order), dtype=np.int64)
    start[order] = np.cumsum(amount[order]) - amount[order]
    return share, start + (np.arange(num_ranks) * share - (np.cumsum(held) - held))[holder]


def exchange_s(
    moved_bytes: Moved,
    inside_s: Callable[[Float64Array], Float64Array],
    crossing_s: Callable[[Float64Array], Float64Array],
) -> Float64Array:
    """Seconds of the slowest rank, float64 [...].

    inside_s, crossing_s: seconds of the bytes that a rank moves inside its node and between nodes, of any shape; 0 s
    for 0 bytes.
    """
    rank_s = inside_s(moved_bytes.inside) + crossing_s(moved_bytes.crossing)
    slowest: Float64Array = rank_s.max(axis=(-2, -1))
    return slowest


@dataclass(frozen=True)
class Network:
    """The links of an exchange, and which ranks share a node.

    intra_node:     the link of bytes that stay in their node.
    inter_node:     the link of bytes that cross; if it equals intra_node, a rank moves all its bytes over one link.
    ranks_per_node: 8, if each node has as many ranks, or those of each node, as (3, 8, 5); None: all share one node.
    communicator:   how exchanges are executed.
    node_wise:      whether items are placed so that few leave their node.

    Example:
        >>> network = Network(Link(40e9, 0.0), Link(20e9, 0.0), ranks_per_node=2)
        >>> network.nodes(4).tolist()
        [0, 0, 1, 1]
        >>> sent = moved(np.array([0, 0]), np.array([1, 2]), np.array([40_000, 40_000]), network.nodes(4))
        >>> network.exchange_s(sent).tolist()  # 1 us inside the node, 2 us to the other
        [3e-06]
    """

    intra_node: Link
    inter_node: Link
    ranks_per_node: RanksPerNode | None = None
    communicator: Communicator = "all_to_all"
    node_wise: bool = True

    @classmethod
    def of(cls, link: Link | Network) -> Network:
        """The network itself, or one node whose ranks share the given link."""
        return cls(link, link) if isinstance(link, Link) else link

    def nodes(self, num_ranks: int) -> Int64Array:
        """The node of each rank, int64 [num_ranks]."""
        return node_of_ranks(self.ranks_per_node, num_ranks)

    @property
    def kept_within_nodes(self) -> RanksPerNode | None:
        """The nodes in which items are kept; None: they are placed as if all ranks shared a node."""
        return self.ranks_per_node if self.node_wise else None

    def exchange_s(self, moved_bytes: Moved) -> Float64Array:
        """Seconds of the slowest rank, float64 [...]."""
        if self.intra_node == self.inter_node:
            return self.intra_node.seconds(moved_bytes.busiest)
        return exchange_s(moved_bytes, self.intra_node.seconds, self.inter_node.seconds)
