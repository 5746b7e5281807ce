"""Items on ranks so that the largest padded size, count times longest, is as small as can be: the optimum.

OrchMLLM Algorithm 2, corrected: the search begins at the *longest* length and ends at `longest * ceil(n / d)`, and the
partition at the final limit is returned, not the one probed last. Walked from the longest item down instead of
from the shortest up: the first item of a batch is then its longest, and the batch's size is one division.

Why this is optimal: under a limit, the batch that holds the longest item can hold limit // longest items; to fill it
with the next longest leaves the shortest for the others, and for them the same holds. All that this needs is that a
longer item has no smaller size: sizes may have a quadratic term (costs.Padded).
"""

from __future__ import annotations

import numpy as np

from motet.balance.reference.result import AssignmentFields, placement
from motet.core.arrays import Int64Array


def padded(lengths: Int64Array, num_ranks: int, linear: int, quadratic: int) -> AssignmentFields:
    """Balance count * (linear * longest + quadratic * longest^2) of lengths, int64 [num_items], >= 0.

    For all items at once it must fit int64. The bound is the optimum, so that the largest load equals it. Ranks may be
    left without items. O(num_items log num_items + num_ranks log(longest * num_items)).
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
    """The optimum itself: no placement has a smaller maximum."""
    return _optimum(_costs(np.sort(lengths)[::-1], linear, quadratic), num_ranks)


def _costs(lengths: Int64Array, linear: int, quadratic: int) -> list[int]:
    costs: list[int] = (lengths * (linear + quadratic * lengths)).tolist()
    return costs


def _optimum(descending: list[int], num_ranks: int) -> int:
    """The smallest limit under which all items find a place, by binary search."""
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
    """At most num_ranks batches (first, last), each as full as the limit allows; they may end before the items do."""
    batches: list[tuple[int, int]] = []
    first = 0
    while first < len(descending) and len(batches) < num_ranks:
        rest = len(descending) - first
        size = min(rest, limit // descending[first]) if descending[first] else rest
        batches.append((first, first + size))
        first += size
    return batches
