"""Padded items on ranks: the smallest possible largest load, where a load is count * (cost of the longest item).

OrchMLLM Algorithm 2, corrected: the search begins at the *longest* length and ends at `longest * ceil(n / d)`, and the
result is the partition at the final limit, not the one that was tried last. Items are taken from the longest down, not
from the shortest up: the first item of a batch (the items of a rank) is then its longest, and one division gives the
size of the batch.

Proof of optimality: under a limit, the batch with the longest item holds at most limit // longest items. Filling it
with the next longest items leaves the shortest ones for the other batches, where the same argument holds. It needs only
that the cost does not fall with the length, so costs may have a quadratic term (costs.Padded).
"""

from __future__ import annotations

import numpy as np

from motet.balance.reference.result import AssignmentFields, placement
from motet.core.arrays import Int64Array


def padded(lengths: Int64Array, num_ranks: int, linear: int, quadratic: int) -> AssignmentFields:
    """Balance count * (linear * longest + quadratic * longest^2) of lengths, int64 [num_items], >= 0.

    The load of all items on one rank must fit int64. The bound is the optimum, and the largest load equals it. Ranks
    may get no items. O(num_items log num_items + num_ranks log(longest * num_items)).
    """
    order = np.argsort(-lengths, kind="stable")
    descending = _costs(lengths[order], linear, quadratic)
    limit = _optimum(descending, num_ranks)
    ranks = np.empty(len(lengths), dtype=np.int32)
    loads = np.zeros(num_ranks, dtype=np.int64)
    for rank, (first, last) in enumerate(_batches(descending, num_ranks, limit)):
        ranks[order[first:last]] = rank
        loads[rank] = (last - first) * descending[first]
    return placement(ranks, loads, limit)


def padded_bound(lengths: Int64Array, num_ranks: int, linear: int, quadratic: int) -> int:
    """The optimum: no placement has a smaller largest load. Lengths: int64 [num_items]."""
    return _optimum(_costs(np.sort(lengths)[::-1], linear, quadratic), num_ranks)


def _costs(lengths: Int64Array, linear: int, quadratic: int) -> list[int]:
    """The cost of each item alone."""
    costs: list[int] = (lengths * (linear + quadratic * lengths)).tolist()
    return costs


def _optimum(descending: list[int], num_ranks: int) -> int:
    """The smallest limit under which all items fit, by binary search."""
    if not descending:
        return 0
    low = descending[0]  # the longest item alone
    high = descending[0] * -(-len(descending) // num_ranks)  # equal counts, all as long as the longest
    while low < high:
        middle = (low + high) // 2
        if _batches(descending, num_ranks, middle)[-1][1] == len(descending):
            high = middle
        else:
            low = middle + 1
    return high


def _batches(descending: list[int], num_ranks: int, limit: int) -> list[tuple[int, int]]:
    """At most num_ranks batches first:last, each as full as the limit allows; items may be left over."""
    batches: list[tuple[int, int]] = []
    first = 0
    while first < len(descending) and len(batches) < num_ranks:
        rest = len(descending) - first
        size = min(rest, limit // descending[first]) if descending[first] else rest
        batches.append((first, first + size))
        first += size
    return batches
