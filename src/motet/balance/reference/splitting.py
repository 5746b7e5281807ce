"""Items on ranks under a limit; an item is cut only if no rank has room for the whole of it.

McNaughton's wrap-around rule (1959) fills one rank after another and cuts the item at each boundary. It balances
perfectly with at most num_ranks - 1 cuts, but many of them are not needed. Here, take the heaviest of the items and of
the rests of cut items:

1. If it fits on some rank, put it whole on the one with the least room, so that large rooms are kept for heavy items.
2. If not, put the largest possible part on one rank. The rest is taken again later, by its new size.
3. If no rank has room for any part, or the item has its most parts already, leave the rest out.

The parts of an item are on different ranks. An item is cut by the same share in all phases. With one phase, no overhead
and items that can be cut anywhere, all items are placed under any limit from the mean on, with at most num_ranks - 1
cuts: each cut fills a rank completely.
"""

from __future__ import annotations

import heapq

import numpy as np

from motet.core.arrays import BoolArray, Int32Array, Int64Array

Pieces = tuple[Int64Array, Int64Array, Int64Array, Int32Array]
"""(item, begin, end, rank), an array each: the units begin .. end - 1 of an item; ordered by item, then by begin."""


def pour(
    costs: Int64Array,
    overheads: Int64Array,
    units: Int64Array,
    parts: Int64Array,
    turns: Int64Array,
    phases: Int64Array,
    limits: Int64Array,
    num_ranks: int,
) -> Pieces:
    """Place items so that no load exceeds limits, int64 [num_phases]; items without room are left out.

    costs, overheads: int64 [num_items, num_phases]; an overhead is that of each fragment of a cut item.
    units: int64 [num_items], >= 1, the equal units between which an item can be cut. The first `end` units of an item
        cost costs * end // units.
    parts: int64 [num_items], >= 1, the most parts of an item.
    turns: int64 [num_items]; items with a lower turn are placed first.
    phases: int64 [num_items], the phase in which sizes and rooms are compared for an item.
    O(num_fragments * num_ranks * num_phases).
    """
    rooms = np.tile(limits, (num_ranks, 1))
    begins = [0] * len(costs)
    ranks_of: list[list[int]] = [[] for _ in costs]
    pieces: list[tuple[int, int, int, int]] = []
    waiting = [(int(turns[item]), -int(costs[item, phase]), item) for item, phase in enumerate(phases.tolist())]
    heapq.heapify(waiting)
    while waiting:
        turn, _, item = heapq.heappop(waiting)
        cost, num_units, begin, phase = costs[item].tolist(), int(units[item]), begins[item], int(phases[item])
        before = [whole * begin // num_units for whole in cost]
        rest = np.subtract(cost, before) + overheads[item] * (begin > 0)
        has_no_part = np.ones(num_ranks, dtype=bool)
        has_no_part[ranks_of[item]] = False
        fits = np.flatnonzero(has_no_part & (rooms >= rest).all(axis=1))
        if len(fits):  # 1.
            rank, end = int(fits[rooms[fits, phase].argmin()]), num_units
        elif len(ranks_of[item]) + 1 >= parts[item]:  # 3.
            continue
        else:  # 2.
            rank, end = _largest_part(rooms - overheads[item], has_no_part, cost, before, num_units)
            if end <= begin:  # 3.
                continue
        shares = [whole * end // num_units - part for whole, part in zip(cost, before, strict=True)]
        rooms[rank] -= shares + overheads[item] * (end - begin < num_units)
        pieces.append((item, begin, end, rank))
        ranks_of[item].append(rank)
        begins[item] = end
        if end < num_units:
            left = cost[phase] - cost[phase] * end // num_units
            heapq.heappush(waiting, (turn, -left, item))
    return _arrays(sorted(pieces))


def _largest_part(
    rooms: Int64Array, has_no_part: BoolArray, cost: list[int], before: list[int], num_units: int
) -> tuple[int, int]:
    """The rank that can take the largest part of an item, and the unit where this part ends.

    before: the cost of the units that are placed already, by phase.
    """
    best = (0, -1)
    for rank in np.flatnonzero(has_no_part).tolist():
        end = num_units
        for room, whole, part in zip(rooms[rank].tolist(), cost, before, strict=True):
            if room + part < whole:
                end = min(end, ((room + part + 1) * num_units - 1) // whole)
        if end > best[1]:
            best = (rank, end)
    return best


def _arrays(pieces: list[tuple[int, int, int, int]]) -> Pieces:
    """Pieces as arrays, one for each column."""
    table = np.array(pieces, dtype=np.int64).reshape(-1, 4)
    item, begin, end = (np.ascontiguousarray(column) for column in table[:, :3].T)
    return item, begin, end, table[:, 3].astype(np.int32)
