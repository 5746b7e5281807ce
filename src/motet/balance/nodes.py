"""Which ranks compute which balanced batches: a renaming that keeps on the node what the node already holds."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from motet.balance.backend import Backend, algorithms
from motet.balance.checks import checked_integers, checked_ranks_per_node
from motet.core.arrays import Int64Array
from motet.core.errors import ArgumentError
from motet.core.limits import INT64_MAX


def place_on_nodes(
    volume: ArrayLike, ranks_per_node: int, *, exact: bool = False, backend: Backend = "native"
) -> Int64Array:
    """The rank on which each batch is computed, int64 [num_ranks]: a permutation of the batches.

    volume: int [num_ranks, num_ranks], >= 0; volume[s, b] is what source rank s holds of batch b, in any unit, bytes
    say. Node n has the ranks from n * ranks_per_node on; the last node is smaller if num_ranks is no multiple. Small
    is the maximum over sources of what a source sends to other nodes; the loads of a balanced placement do not
    change.

    exact: the smallest maximum there is, by integer programming (HiGHS), for small jobs and as a measure: seconds at
    128 ranks if it is lucky, hours if not. Without it the result is, at 128 ranks and 60 items a rank, within 1 % of
    the best known. O(num_ranks^2) and at most 1000 swaps. Raises ArgumentError for another shape, for negative or
    fractional volumes and where what a source holds does not fit int64. OrchMLLM Algorithm 3, corrected
    (reference/nodes.py).
    """
    checked = checked_integers(volume, "volume", 2)
    num_ranks = len(checked)
    if checked.shape != (num_ranks, num_ranks):
        raise ArgumentError(f"volume has shape {checked.shape}; it must be square: a source a row, a batch a column.")
    if num_ranks == 0:
        return np.zeros(0, dtype=np.int64)
    most = int(checked.max())
    if most * num_ranks > INT64_MAX:
        most = max(sum(row) for row in checked.tolist())
        if most > INT64_MAX:
            raise ArgumentError(f"volume adds up to {most} for a source, past 2^63 - 1.")
    size = checked_ranks_per_node(ranks_per_node, num_ranks)
    if exact:
        from motet.balance.reference.nodes import exactly_on_nodes

        return exactly_on_nodes(checked, size)
    ranks: Int64Array = algorithms(backend).place_on_nodes(checked, size)
    return ranks
