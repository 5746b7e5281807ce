"""Seconds of a message and of collectives among ranks of a cluster: alpha-beta, a latency a hop and bytes a second.

n ranks are in m nodes, at least c of them in each. (a, B) are latency and bandwidth inside a node, (A, b) those of a
rank's own network card. If the ranks share a node, or each has its own node, there is one kind of link.

- all-gather to S bytes, and reduce-scatter: a ring (Thakur et al. 2005, section 4.1). A part passes n - 1 links, m - 1
  of them between nodes, and every rank receives S (n - 1) / n. As in NCCL, c rings, one for each network card, share
  the traffic between nodes, so that a rank's share flows at min(B, c b):
  (m - 1) A + (n - m) a + S (n - 1) / n / min(B, c b)
- all-reduce: the faster of two. One is a reduce-scatter and an all-gather. The other, faster for short messages, is
  NCCL's double binary tree (Sanders, Speck and Traeff 2009), up and down a tree of nodes with a chain of ranks in each:
  2 (ceil(log2 m) A + (n / m - 1) a) + 2 S / min(B, c b)
- all-to-all, with k ranks in the fullest node: a rank that moves I bytes inside its node and C between nodes takes
  (k - 1) a + I / B  +  (m - 1) A + C / b, and the exchange takes as long as the slowest rank (core/exchange.py)

A group of one rank takes 0 seconds, and so do 0 bytes. Sizes are a number or an array of any shape; seconds have the
same shape.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from motet.core import exchange
from motet.core.arrays import Float64Array
from motet.core.cluster import Cluster, Link
from motet.core.errors import ArgumentError
from motet.core.exchange import Moved

Amounts = Float64Array | float
_NUM_CACHED = 512


class Group(NamedTuple):
    """The size of a collective's group. fewest, most: the number of its ranks in the node that has fewest or most."""

    num_ranks: int
    num_nodes: int
    fewest: int
    most: int


def group_of(cluster: Cluster, ranks: Sequence[int]) -> Group:
    """Count ranks and nodes. Raises ArgumentError for no ranks, a rank named twice, or a rank outside the cluster."""
    return _group_of(cluster.num_ranks, cluster.ranks_per_node, ranks if isinstance(ranks, range) else tuple(ranks))


@lru_cache(_NUM_CACHED)
def _group_of(num_ranks: int, ranks_per_node: int, ranks: range | tuple[int, ...]) -> Group:
    """The group of the same ranks is asked for again and again: by each layer, and each size of a message."""
    if isinstance(ranks, range):
        numbers = np.sort(np.arange(ranks.start, ranks.stop, ranks.step))
    else:
        numbers = np.sort(np.array(ranks, dtype=np.int64))
    if not len(numbers) or numbers[0] < 0 or numbers[-1] >= num_ranks or not np.diff(numbers).all():
        shown = f"{', '.join(map(str, ranks[:8]))}{', ...' if len(ranks) > 8 else ''}" if len(ranks) else "none"
        raise ArgumentError(f"ranks {shown}: they must be different ones of 0 to {num_ranks - 1}.")
    first = np.flatnonzero(np.diff(numbers // ranks_per_node, prepend=-1))
    counts = np.diff(first, append=len(numbers))
    return Group(len(numbers), len(counts), int(counts.min()), int(counts.max()))


def send_s(cluster: Cluster, size_bytes: Amounts, ranks: Sequence[int]) -> Float64Array:
    """Seconds of a message from one of `ranks` to another, over the slowest link among them."""
    link = cluster.link(ranks)
    return _seconds(group_of(cluster, ranks), size_bytes, link.latency_s, 1 / link.bytes_per_s)


def gather_s(cluster: Cluster, size_bytes: Amounts, ranks: Sequence[int]) -> Float64Array:
    """Seconds of an all-gather after which each of `ranks` has size_bytes, or of a reduce-scatter of size_bytes."""
    n, m, *_ = group = group_of(cluster, ranks)
    latency_s = (m - 1) * cluster.inter_node.latency_s + (n - m) * cluster.intra_node.latency_s
    return _seconds(group, size_bytes, latency_s, (n - 1) / n / _ring_bytes_per_s(cluster, group))


def all_reduce_s(cluster: Cluster, size_bytes: Amounts, ranks: Sequence[int]) -> Float64Array:
    """Seconds of an all-reduce of size_bytes on each of `ranks`."""
    n, m, *_ = group = group_of(cluster, ranks)
    latency_s = math.ceil(math.log2(m)) * cluster.inter_node.latency_s + (n / m - 1) * cluster.intra_node.latency_s
    tree_s = _seconds(group, size_bytes, 2 * latency_s, 2 / _ring_bytes_per_s(cluster, group))
    return np.minimum(tree_s, 2 * gather_s(cluster, size_bytes, ranks))


def all_to_all_s(cluster: Cluster, moved_bytes: Moved, ranks: Sequence[int]) -> Float64Array:
    """Seconds of an all-to-all among `ranks`. moved_bytes: [..., 2, len(ranks)]; the result is float64 [...]."""
    group = group_of(cluster, ranks)

    def inside_s(size_bytes: Float64Array) -> Float64Array:
        return _all_to_all_s(cluster.intra_node, group.most, size_bytes)

    def crossing_s(size_bytes: Float64Array) -> Float64Array:
        return _all_to_all_s(cluster.inter_node, group.num_nodes, size_bytes)

    return exchange.exchange_s(moved_bytes, inside_s, crossing_s)


def _all_to_all_s(link: Link, num_ends: int, size_bytes: Float64Array) -> Float64Array:
    """Seconds of num_ends - 1 messages that share the bytes."""
    s_per_byte = (num_ends - 1) / link.bytes_per_s / max(num_ends - 1, 1)
    return np.where(size_bytes > 0, (num_ends - 1) * link.latency_s + size_bytes * s_per_byte, 0.0)


def _seconds(group: Group, size_bytes: Amounts, latency_s: float, s_per_byte: float) -> Float64Array:
    size = np.asarray(size_bytes, dtype=np.float64)
    seconds: Float64Array = (size * s_per_byte + latency_s) * ((size > 0) & (group.num_ranks > 1))
    return seconds


def _ring_bytes_per_s(cluster: Cluster, group: Group) -> float:
    """The bandwidth at which a rank receives from its neighbour in a ring, or from its children in a tree."""
    inside, between = cluster.intra_node.bytes_per_s, cluster.inter_node.bytes_per_s
    if group.num_nodes == 1:
        return inside
    return between if group.num_nodes == group.num_ranks else min(inside, group.fewest * between)
