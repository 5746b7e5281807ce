"""The rank that computes each batch of a balanced placement, so that most items stay on the node that holds them.

A batch is what a placement puts on one rank. Batches change ranks as a whole, so the loads stay as they are.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from motet.balance.backend import Backend, algorithms
from motet.balance.checks import checked_integers, checked_node_sizes
from motet.core.arrays import Int64Array
from motet.core.errors import ArgumentError
from motet.core.limits import INT64_MAX
from motet.core.nodes import RanksPerNode


def place_on_nodes(
    volume: ArrayLike, ranks_per_node: RanksPerNode, *, exact: bool = False, backend: Backend = "native"
) -> Int64Array:
    """The rank of each batch, int64 [num_ranks], a permutation: the largest volume sent to other nodes is small.

    volume: int [num_ranks, num_ranks], >= 0; volume[s, b] is what source rank s holds of batch b, in any unit (bytes).
    The objective is the maximum over sources of what a source sends to other nodes.
    ranks_per_node: 8, if each node has as many and the last what is left; or those of each node, such as (3, 8, 5).
    exact: find the smallest maximum by integer programming (HiGHS): for small jobs and for measurements. At 128 ranks
    it takes seconds to hours. Without it, the result is within 1 % of the best known at 128 ranks and 60 items a rank.

    O(num_ranks^2) and at most 1000 swaps. OrchMLLM Algorithm 3, corrected (reference/nodes.py).
    Raises ArgumentError for another shape, for negative or fractional volumes, where the sum of a row does not fit
    int64, and as `core.nodes.node_sizes`.
    """
    checked = checked_integers(volume, "volume", 2)
    num_ranks = len(checked)
    if checked.shape != (num_ranks, num_ranks):
        raise ArgumentError(
            f"volume has shape {checked.shape}; it must be square: a row for each source, a column for each batch."
        )
    if num_ranks == 0:
        return np.zeros(0, dtype=np.int64)
    most = int(checked.max())
    if most * num_ranks > INT64_MAX:
        most = max(sum(row) for row in checked.tolist())
        if most > INT64_MAX:
            raise ArgumentError(f"volume adds up to {most} in the row of a source, past 2^63 - 1.")
    sizes = checked_node_sizes(ranks_per_node, num_ranks)
    if exact:
        from motet.balance.reference.nodes import exactly_on_nodes

        return exactly_on_nodes(checked, sizes)
    sources, batches = np.nonzero(checked)
    ranks: Int64Array = algorithms(backend).place_on_nodes(
        sources.astype(np.int32), batches.astype(np.int32), checked[sources, batches], sizes
    )
    return ranks
