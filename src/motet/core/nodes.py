"""Which ranks of a job share a node: ranks that follow each other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from motet.core.arrays import Int64Array
from motet.core.errors import ArgumentError

RanksPerNode = int | Sequence[int]
"""One number: every node has so many ranks, and the last one what is left. Several: those of each node, in order. None,
where it may be: all ranks share one."""


def node_sizes(ranks_per_node: RanksPerNode | None, num_ranks: int) -> Int64Array:
    """How many ranks each node has, int64 [num_nodes]. Raises ArgumentError for a node without ranks, and for numbers
    of nodes that do not add up to num_ranks.

    Example:
        >>> node_sizes(4, num_ranks=10).tolist(), node_sizes((1, 4, 2), num_ranks=7).tolist()
        ([4, 4, 2], [1, 4, 2])
    """
    if ranks_per_node is None:
        ranks_per_node = max(num_ranks, 1)
    if not isinstance(ranks_per_node, Sequence):
        if ranks_per_node < 1:
            raise ArgumentError(f"ranks_per_node is {ranks_per_node}; it must be at least 1.")
        begins = np.arange(0, num_ranks, int(ranks_per_node))
        return np.diff(begins, append=num_ranks)
    if min(ranks_per_node, default=1) < 1 or sum(ranks_per_node) != num_ranks:
        raise ArgumentError(
            f"ranks_per_node is {tuple(ranks_per_node)}; it must be numbers of at least 1 that add up to num_ranks, "
            f"which is {num_ranks}."
        )
    return np.array(ranks_per_node, dtype=np.int64)


def node_of_ranks(ranks_per_node: RanksPerNode | None, num_ranks: int) -> Int64Array:
    """The node of each rank, int64 [num_ranks]. Raises as `node_sizes`."""
    sizes = node_sizes(ranks_per_node, num_ranks)
    return np.repeat(np.arange(len(sizes)), sizes)


def ranks_by_node(nodes: Iterable[int]) -> tuple[int, ...]:
    """`RanksPerNode` from the node of each rank. Nodes without ranks are not counted.

    Example:
        >>> ranks_by_node([1, 2, 2, 2, 5])
        (1, 3, 1)
    """
    return tuple(Counter(nodes).values())
