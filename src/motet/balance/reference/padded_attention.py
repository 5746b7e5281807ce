"""Items on ranks where only attention pads: linear * (sum of lengths) + quadratic * count * longest^2, at its largest.

OrchMLLM Algorithm 5 fills ranks longest item first while count times first stays within the largest sum that LPT
reaches, then hands the rest out by sums. Corrected: `b` is that sum; it stops at d batches, not d + 1; the item
that did not fit stays among the rest. But its limit knows nothing of the quadratic term, and the rest pads as it falls.

Instead, the limit here is one of the true cost, found by search. Under a limit a rank takes the longest item that is
left, which sets what its attention costs an item, and then always the longest that still fits. Ranks so hold neighbours
in length, which pad little, and what is left of the limit is filled with short items. Where the linear term dominates
this is bin packing by first fit decreasing; where the quadratic one does, the optimum of reference/padded.py.

1. Group equal lengths into classes; from the largest of the mean cost and the longest item on, try higher limits.
2. Halve the gap between the limits that fail and that do not.
3. Prove a lower bound (reference/padded_attention_bound.py).
4. On few items, or far from the bound, take the paper's batches where they are better.
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
"""With more items the paper's batches are tried only where these end more than a 64th above the bound."""

Take = tuple[int, int, int]
"""The rank, the class, and how many of the class the rank takes: those that come next by item number."""


def padded_attention(lengths: Int64Array, num_ranks: int, linear: int, quadratic: int) -> AssignmentFields:
    """Balance lengths, int64 [num_items], >= 0; linear, quadratic >= 1; all items on one rank must fit int64.

    O(num_items + 20 (num_classes + num_ranks log num_classes)) after the sort; within 2 % of the bound from 64 ranks
    and some 60 items a rank on. Ranks may be left without items.
    """
    classes = Classes.of(lengths)
    takes, low = _search(classes, num_ranks, linear, quadratic)
    order = np.argsort(-lengths, kind="stable")
    ranks = np.empty(len(lengths), dtype=np.int32)
    next_position = list(classes.starts)
    for rank, place, count in takes:
        first = next_position[place]
        next_position[place] += count
        ranks[order[first : first + count]] = rank
    loads = loads_of(ranks, lengths, num_ranks, linear, quadratic)
    bound = padded_attention_bound(classes, num_ranks, linear, quadratic, low, int(loads.max(initial=0)))
    if len(lengths) <= MAX_ITEMS_FOR_PAPER or int(loads.max()) > bound + bound // 64:
        by_paper = np.empty(len(lengths), dtype=np.int32)
        by_paper[order] = _paper(lengths[order].tolist(), num_ranks)
        its_loads = loads_of(by_paper, lengths, num_ranks, linear, quadratic)
        if its_loads.max() < loads.max():
            ranks, loads = by_paper, its_loads
    return placement(ranks, loads, bound)


def loads_of(ranks: Int32Array, lengths: Int64Array, num_ranks: int, linear: int, quadratic: int) -> Int64Array:
    """The cost of each rank, int64 [num_ranks], of any placement."""
    sums = np.zeros(num_ranks, dtype=np.int64)
    np.add.at(sums, ranks, lengths)
    longest = np.zeros(num_ranks, dtype=np.int64)
    np.maximum.at(longest, ranks, lengths)
    return linear * sums + quadratic * np.bincount(ranks, minlength=num_ranks) * longest**2


def _search(classes: Classes, num_ranks: int, linear: int, quadratic: int) -> tuple[list[Take], int]:
    """The takes under the smallest limit that was found to suffice, and a plain lower bound."""
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
    while (found := _fill(classes, num_ranks, linear, quadratic, limit)) is None:
        failed, limit = limit, min(2 * limit - low + first_step, INT64_MAX)  # twice as far from low
    takes, high = found
    while high - failed > max(low >> 10, 1):
        middle = failed + (high - failed) // 2
        found = _fill(classes, num_ranks, linear, quadratic, middle)
        if found is None:
            failed = middle
        else:
            takes, high = found
    return takes, low


def _fill(classes: Classes, num_ranks: int, linear: int, quadratic: int, limit: int) -> tuple[list[Take], int] | None:
    """The takes and the largest load if all items find a place under the limit."""
    lengths = classes.lengths
    num_classes = len(lengths)
    ascending = [-length for length in lengths]
    left = [end - start for start, end in zip(classes.starts, classes.starts[1:], strict=False)]
    skip = list(range(num_classes + 1))  # to a class at or after this one; chains end at one with items left
    takes = []
    largest = top = 0
    for rank in range(num_ranks):
        place = top = _next_left(skip, top)
        if top == num_classes:
            break
        attention = quadratic * lengths[top] ** 2
        room = limit
        while place < num_classes:
            price = attention + linear * lengths[place]
            count = left[place] if left[place] * price <= room else room // price
            takes.append((rank, place, count))
            room -= count * price
            left[place] -= count
            if left[place] == 0:
                skip[place] = place + 1
            if room < attention:
                break
            fitting = bisect_left(ascending, -((room - attention) // linear), lo=place + 1)
            place = _next_left(skip, fitting)
        largest = max(largest, limit - room)
    return (takes, largest) if _next_left(skip, top) == num_classes else None


def _next_left(skip: list[int], place: int) -> int:
    """The first class at or after `place` that has items left; halves the chain on its way."""
    while skip[place] != place:
        skip[place] = skip[skip[place]]
        place = skip[place]
    return place


def _paper(descending: list[int], num_ranks: int) -> list[int]:
    """OrchMLLM Algorithm 5, corrected as above: the rank of each position."""
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
