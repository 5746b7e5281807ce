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
- all-to-all, with k ranks in the fullest node: a rank that moves I bytes inside its node and C between nodes takes
  (k - 1) a + I / B  +  (m - 1) A + C / b, and the slowest one is the exchange (core/exchange.py)

Nothing is sent to nobody: 0 seconds for a group of one, and for 0 bytes. Sizes are one number or an array of any shape;
seconds have the same.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from motet.core import exchange
from motet.core.arrays import Float64Array
from motet.core.cluster import Cluster, Link
from motet.core.errors import ArgumentError
from motet.core.exchange import Moved

Amounts = Float64Array | float


class Group(NamedTuple):
    """The ranks of a collective, counted. fewest: ranks in the node that has the fewest."""

    num_ranks: int
    num_nodes: int
    fewest: int


def group_of(cluster: Cluster, ranks: Sequence[int]) -> Group:
    """Raises ArgumentError for no ranks, for one that is named twice, and for one that is not in the cluster."""
    counts = Counter(cluster.node_of(rank) for rank in _checked(cluster, ranks))
    return Group(len(ranks), len(counts), min(counts.values()))


def _checked(cluster: Cluster, ranks: Sequence[int]) -> Sequence[int]:
    if len(ranks) == 0 or min(ranks) < 0 or max(ranks) >= cluster.num_ranks or len(set(ranks)) < len(ranks):
        shown = f"{', '.join(map(str, ranks[:8]))}{', ...' if len(ranks) > 8 else ''}" if len(ranks) else "none"
        raise ArgumentError(f"ranks {shown}: they must be different ones of 0 to {cluster.num_ranks - 1}.")
    return ranks


def send_s(cluster: Cluster, size_bytes: Amounts, ranks: Sequence[int]) -> Float64Array:
    """A message from one of `ranks` to another, by the slowest link among them."""
    link = cluster.link(ranks)
    return _seconds(group_of(cluster, ranks), size_bytes, link.latency_s, 1 / link.bytes_per_s)


def gather_s(cluster: Cluster, size_bytes: Amounts, ranks: Sequence[int]) -> Float64Array:
    """All-gather after which each of `ranks` has size_bytes, or the reduce-scatter of size_bytes on each."""
    n, m, _ = group = group_of(cluster, ranks)
    latency_s = (m - 1) * cluster.inter_node.latency_s + (n - m) * cluster.intra_node.latency_s
    return _seconds(group, size_bytes, latency_s, (n - 1) / n / _ring_bytes_per_s(cluster, group))


def all_reduce_s(cluster: Cluster, size_bytes: Amounts, ranks: Sequence[int]) -> Float64Array:
    """Of size_bytes on each of `ranks`."""
    n, m, _ = group = group_of(cluster, ranks)
    latency_s = math.ceil(math.log2(m)) * cluster.inter_node.latency_s + (n / m - 1) * cluster.intra_node.latency_s
    tree_s = _seconds(group, size_bytes, 2 * latency_s, 2 / _ring_bytes_per_s(cluster, group))
    return np.minimum(tree_s, 2 * gather_s(cluster, size_bytes, ranks))


def all_to_all_s(cluster: Cluster, moved_bytes: Moved, ranks: Sequence[int]) -> Float64Array:
    """All-to-all among `ranks`, of what each of them moves."""
    nodes = Counter(cluster.node_of(rank) for rank in _checked(cluster, ranks))

    def inside_s(size_bytes: Float64Array) -> Float64Array:
        return _all_to_all_s(cluster.intra_node, max(nodes.values()), size_bytes)

    def crossing_s(size_bytes: Float64Array) -> Float64Array:
        return _all_to_all_s(cluster.inter_node, len(nodes), size_bytes)

    return exchange.exchange_s(moved_bytes, inside_s, crossing_s)


def _all_to_all_s(link: Link, num_ends: int, size_bytes: Float64Array) -> Float64Array:
    """num_ends - 1 messages, which share the bytes."""
    s_per_byte = (num_ends - 1) / link.bytes_per_s / max(num_ends - 1, 1)
    return np.where(size_bytes > 0, (num_ends - 1) * link.latency_s + size_bytes * s_per_byte, 0.0)


def _seconds(group: Group, size_bytes: Amounts, latency_s: float, s_per_byte: float) -> Float64Array:
    size = np.asarray(size_bytes, dtype=np.float64)
    return np.where((size > 0) & (group.num_ranks > 1), latency_s + size * s_per_byte, 0.0)


def _ring_bytes_per_s(cluster: Cluster, group: Group) -> float:
    """What a rank takes in from its neighbour in a ring, or from those below it in a tree."""
    inside, between = cluster.intra_node.bytes_per_s, cluster.inter_node.bytes_per_s
    if group.num_nodes == 1:
        return inside
    return between if group.num_nodes == group.num_ranks else min(inside, group.fewest * between)
