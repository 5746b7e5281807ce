"""Seconds of a message and of collectives among ranks of a cluster: alpha-beta, a latency a hop and bytes a second.

n ranks sit in m nodes, at least c of them in each; (a, B) are latency and bandwidth inside a node, (A, b) those of a
rank's own network card. Where the ranks share a node, or each has a node of its own, there is one kind of link.

- all-gather to S bytes, and reduce-scatter, its mirror image: a ring (Thakur et al. 2005, section 4.1).
  A part goes round n - 1 links, m - 1 of them between nodes, and every rank takes in (n - 1) / n of S. As NCCL does, c
  rings, one for each card, share the traffic between nodes, so that a rank's share of it flows at min(B, c b):
  (m - 1) A + (n - m) a + S (n - 1) / n / min(B, c b)
- all-reduce: a reduce-scatter and an all-gather, or, where that is faster, as for short messages, NCCL's double binary
  tree (Sanders, Speck and Traeff 2009): up and down a tree of nodes, in each of which ranks form a chain:
  2 (ceil(log2 m) A + (n / m - 1) a) + 2 S / min(B, c b)
- all-to-all of S bytes that the busiest rank sends, in even shares to the n - 1 others, in two levels: inside nodes to
  the rank that has the same place there as the one that it is for, then between ranks of the same place (k = n / m):
  (k - 1) a + S (k - 1) m / (n - 1) / B  +  (m - 1) A + S (m - 1) k / (n - 1) / b

Nothing is sent to nobody: 0 seconds for a group of one, and for 0 bytes. Sizes are one number or an array of any shape;
seconds have the same.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from motet.core.cluster import Cluster
from motet.core.errors import ArgumentError

FloatArray = NDArray[np.float64]
Sizes = FloatArray | float


class Placement(NamedTuple):
    """Of a group of ranks. fewest: ranks in the node that has the fewest."""

    num_ranks: int
    num_nodes: int
    fewest: int


def placement(cluster: Cluster, ranks: Sequence[int]) -> Placement:
    """Raises ArgumentError for no ranks, for one that is named twice, and for one that is not in the cluster."""
    if len(ranks) == 0 or min(ranks) < 0 or max(ranks) >= cluster.num_ranks or len(set(ranks)) < len(ranks):
        shown = f"{', '.join(map(str, ranks[:8]))}{', ...' if len(ranks) > 8 else ''}" if len(ranks) else "none"
        raise ArgumentError(f"ranks {shown}: they must be different ones of 0 to {cluster.num_ranks - 1}.")
    counts = Counter(rank // cluster.ranks_per_node for rank in ranks)
    return Placement(len(ranks), len(counts), min(counts.values()))


def send_s(cluster: Cluster, size_bytes: Sizes, ranks: Sequence[int]) -> FloatArray:
    """A message from one of `ranks` to another, by the slowest link among them."""
    link = cluster.link(ranks)
    return _seconds(placement(cluster, ranks), size_bytes, link.latency_s, 1 / link.bytes_per_s)


def gather_s(cluster: Cluster, size_bytes: Sizes, ranks: Sequence[int]) -> FloatArray:
    """All-gather after which each of `ranks` has size_bytes, or the reduce-scatter of size_bytes on each."""
    n, m, _ = place = placement(cluster, ranks)
    latency_s = (m - 1) * cluster.inter_node.latency_s + (n - m) * cluster.intra_node.latency_s
    return _seconds(place, size_bytes, latency_s, (n - 1) / n / _ring_bytes_per_s(cluster, place))


def all_reduce_s(cluster: Cluster, size_bytes: Sizes, ranks: Sequence[int]) -> FloatArray:
    """Of size_bytes on each of `ranks`."""
    n, m, _ = place = placement(cluster, ranks)
    latency_s = math.ceil(math.log2(m)) * cluster.inter_node.latency_s + (n / m - 1) * cluster.intra_node.latency_s
    tree_s = _seconds(place, size_bytes, 2 * latency_s, 2 / _ring_bytes_per_s(cluster, place))
    return np.minimum(tree_s, 2 * gather_s(cluster, size_bytes, ranks))


def exchange_s(cluster: Cluster, size_bytes: Sizes, ranks: Sequence[int]) -> FloatArray:
    """All-to-all in which the busiest rank sends or receives size_bytes."""
    n, m, _ = place = placement(cluster, ranks)
    k, inside, between = n / m, cluster.intra_node, cluster.inter_node
    latency_s = (k - 1) * inside.latency_s + (m - 1) * between.latency_s
    s_per_byte = ((k - 1) * m / inside.bytes_per_s + (m - 1) * k / between.bytes_per_s) / max(n - 1, 1)
    return _seconds(place, size_bytes, latency_s, s_per_byte)


def _seconds(place: Placement, size_bytes: Sizes, latency_s: float, s_per_byte: float) -> FloatArray:
    size = np.asarray(size_bytes, dtype=np.float64)
    return np.where((size > 0) & (place.num_ranks > 1), latency_s + size * s_per_byte, 0.0)


def _ring_bytes_per_s(cluster: Cluster, place: Placement) -> float:
    """What a rank takes in from its neighbour in a ring, or from those below it in a tree."""
    inside, between = cluster.intra_node.bytes_per_s, cluster.inter_node.bytes_per_s
    if place.num_nodes == 1:
        return inside
    return between if place.num_nodes == place.num_ranks else min(inside, place.fewest * between)
