"""Items on ranks, padded in attention alone: a load is linear * (sum of lengths) + quadratic * count * longest^2.

OrchMLLM Algorithm 5 fills each rank, longest item first, while count * first <= b, then places the rest by sums.
Corrected: `b` is the largest sum that LPT reaches; there are d batches, not d + 1; an item that does not fit stays in
the rest. But its limit ignores the quadratic term, and the rest pads without a limit.

Here the limit is one of the true cost, and is searched. Under a limit, a rank takes the longest item left, which sets
the attention cost of each of its items, and then again and again the longest item that still fits. So the items of a
rank are similar in length and need little padding, and short items fill what is left of the limit. If the linear term
dominates, this is first fit decreasing; if the quadratic term dominates, it is the optimum of reference/padded.py.

1. Group equal lengths into classes. Try limits upwards, from max(mean cost, cost of the longest item) on.
2. Halve the gap between the highest limit that fails and the lowest that suffices.
3. Prove a lower bound (reference/padded_attention_bound.py).
4. With few items, or far above the bound, try the paper's batches too, and take them if they are better.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left

import numpy as np

from motet.balance.reference.padded_attention_bound import Classes, padded_attention_bound
from motet.balance.reference.result import AssignmentFields, placement
from motet.core.arrays import Int32Array, Int64Array
from motet.core.limits import INT64_MAX

MAX_ITEMS_FOR_PAPER = 1 << 14
"""With more items, the paper's batches are tried only if the largest load is more than 1/64 above the bound."""

Take = tuple[int, int, int]
"""(rank, class, count): the rank takes the next `count` items of the class, by item number."""


def padded_attention(lengths: Int64Array, num_ranks: int, linear: int, quadratic: int) -> AssignmentFields:
    """Balance lengths, int64 [num_items], >= 0, for linear, quadratic >= 1.

    The load of all items on one rank must fit int64. The result is within 2 % of the bound from 64 ranks and about 60
    items a rank on. Ranks may get no items. O(num_items + 20 (num_classes + num_ranks log num_classes)) after the sort.
    """
    classes = Classes.of(lengths)
    takes, low = _search(classes, num_ranks, linear, quadratic)
    order = np.argsort(-lengths, kind="stable")
    ranks = np.empty(len(lengths), dtype=np.int32)
    next_position = list(classes.starts)
    for rank, length_class, count in takes:
        first = next_position[length_class]
        next_position[length_class] += count
        ranks[order[first : first + count]] = rank
    loads = loads_of(ranks, lengths, num_ranks, linear, quadratic)
    bound = padded_attention_bound(classes, num_ranks, linear, quadratic, low, int(loads.max(initial=0)))
    if len(lengths) <= MAX_ITEMS_FOR_PAPER or int(loads.max()) > bound + bound // 64:
        paper_ranks = np.empty(len(lengths), dtype=np.int32)
        paper_ranks[order] = _paper(lengths[order].tolist(), num_ranks)
        paper_loads = loads_of(paper_ranks, lengths, num_ranks, linear, quadratic)
        if paper_loads.max() < loads.max():
            ranks, loads = paper_ranks, paper_loads
    return placement(ranks, loads, bound)


def loads_of(ranks: Int32Array, lengths: Int64Array, num_ranks: int, linear: int, quadratic: int) -> Int64Array:
    """The load of each rank, int64 [num_ranks], in any placement."""
    sums = np.zeros(num_ranks, dtype=np.int64)
    np.add.at(sums, ranks, lengths)
    longest = np.zeros(num_ranks, dtype=np.int64)
    np.maximum.at(longest, ranks, lengths)
    return linear * sums + quadratic * np.bincount(ranks, minlength=num_ranks) * longest**2


def _search(classes: Classes, num_ranks: int, linear: int, quadratic: int) -> tuple[list[Take], int]:
    """The takes under the smallest limit that suffices, and a simple lower bound: max(mean, longest)."""
    if not classes.lengths:
        return [], 0
    longest = classes.lengths[0]
    alone = sum(
        (end - start) * length * (linear + quadratic * length)
        for length, start, end in zip(classes.lengths, classes.starts, classes.starts[1:], strict=False)
    )
    low = max(-(-alone // num_ranks), longest * (linear + quadratic * longest))
    first_step = low >> 6 or 1
    failed, limit = low - 1, low
    while (filled := _fill(classes, num_ranks, linear, quadratic, limit)) is None:
        failed, limit = limit, min(2 * limit - low + first_step, INT64_MAX)  # twice as far from low
    takes, high = filled
    while high - failed > max(low >> 10, 1):
        middle = failed + (high - failed) // 2
        filled = _fill(classes, num_ranks, linear, quadratic, middle)
        if filled is None:
            failed = middle
        else:
            takes, high = filled
    return takes, low


def _fill(classes: Classes, num_ranks: int, linear: int, quadratic: int, limit: int) -> tuple[list[Take], int] | None:
    """The takes and the largest load under the limit; None if items are left over."""
    lengths = classes.lengths
    num_classes = len(lengths)
    ascending = [-length for length in lengths]
    left = [end - start for start, end in zip(classes.starts, classes.starts[1:], strict=False)]
    skip = list(range(num_classes + 1))  # skip[c] >= c; a chain of skips ends at the first class with items left
    takes = []
    largest = top = 0
    for rank in range(num_ranks):
        index = top = _next_left(skip, top)
        if top == num_classes:
            break
        attention = quadratic * lengths[top] ** 2
        room = limit
        while index < num_classes:
            cost = attention + linear * lengths[index]
            count = left[index] if left[index] * cost <= room else room // cost
            takes.append((rank, index, count))
            room -= count * cost
            left[index] -= count
            if left[index] == 0:
                skip[index] = index + 1
            if room < attention:
                break
            fitting = bisect_left(ascending, -((room - attention) // linear), lo=index + 1)
            index = _next_left(skip, fitting)
        largest = max(largest, limit - room)
    return (takes, largest) if _next_left(skip, top) == num_classes else None


def _next_left(skip: list[int], index: int) -> int:
    """The first class from `index` on that has items left; it halves the chain of skips that it follows."""
    while skip[index] != index:
        skip[index] = skip[skip[index]]
        index = skip[index]
    return index


def _paper(descending: list[int], num_ranks: int) -> list[int]:
    """OrchMLLM Algorithm 5, corrected as above: the rank of each item of `descending`."""
    sums = [0] * num_ranks
    for length in descending:
        heapq.heapreplace(sums, sums[0] + length)
    limit = max(sums)
    ranks: list[int] = []
    batches: list[tuple[int, int]] = []  # (sum, rank)
    while len(batches) < num_ranks and len(ranks) < len(descending):
        first = descending[len(ranks)]
        rest = len(descending) - len(ranks)
        count = min(rest, limit // first) if first else rest
        batches.append((sum(descending[len(ranks) : len(ranks) + count]), len(batches)))
        ranks += [batches[-1][1]] * count
    heapq.heapify(batches)
    for length in descending[len(ranks) :]:
        total, rank = batches[0]
        ranks.append(rank)
        heapq.heapreplace(batches, (total + length, rank))
    return ranks
