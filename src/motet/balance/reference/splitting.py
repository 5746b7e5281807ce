"""Items on ranks under a limit, cut only where nothing else helps: fit, or fill and carry on with the rest.

McNaughton's wrap-around rule (1959) fills one rank after another and cuts the item at each boundary: perfect balance
with at most num_ranks - 1 cuts, however many of them were needless. Here an item is cut only when no rank has room for
the whole of it. Of the items and of what is left of cut ones, the next is the heaviest:

1. If it fits, it goes whole to the rank with the least room that holds it, which keeps wide rooms for heavy items.
2. If not, the rank that can take the largest part of it is filled up, and the rest waits for its turn by its new size.
3. Where no rank has room for any of it, or it is in too many parts already, the rest is left out.

The parts of an item are on different ranks. With one phase and no overhead, items that can be cut anywhere all find a
place under any limit from the mean on, because what does not fit fills rooms completely, and again with at most
num_ranks - 1 cuts. With several phases an item is cut by the same share in all of them.
"""

from __future__ import annotations

import heapq

import numpy as np

from motet.core.arrays import BoolArray, Int32Array, Int64Array

Pieces = tuple[Int64Array, Int64Array, Int64Array, Int32Array]
"""item, begin, end, rank of each fragment: the units begin .. end of an item; by item, then by begin."""


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
    """Place items so that no load exceeds limits, int64 [num_phases]; what finds no room is left out.

    costs, overheads: int64 [num_items, num_phases], the latter for each fragment of a cut item.
    units, parts: int64 [num_items], >= 1, the equal units between which an item can be cut, and into how many parts at
    most. The first `end` units of an item cost costs * end // units.
    turns, phases: int64 [num_items]. A lower turn goes first; sizes and rooms are compared in an item's own phase.
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
        free = np.ones(num_ranks, dtype=bool)
        free[ranks_of[item]] = False
        fits = np.flatnonzero(free & (rooms >= rest).all(axis=1))
        if len(fits):
            rank, end = int(fits[rooms[fits, phase].argmin()]), num_units
        elif len(ranks_of[item]) + 1 >= parts[item]:
            continue
        else:
            rank, end = _widest_reach(rooms - overheads[item], free, cost, before, num_units)
            if end <= begin:
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


def _widest_reach(
    rooms: Int64Array, free: BoolArray, cost: list[int], before: list[int], num_units: int
) -> tuple[int, int]:
    """The rank that can take the most of an item whose units `before` are placed, and up to which unit."""
    best = (0, -1)
    for rank in np.flatnonzero(free).tolist():
        end = num_units
        for room, whole, part in zip(rooms[rank].tolist(), cost, before, strict=True):
            if room + part < whole:
                end = min(end, ((room + part + 1) * num_units - 1) // whole)
        if end > best[1]:
            best = (rank, end)
    return best


def _arrays(pieces: list[tuple[int, int, int, int]]) -> Pieces:
    table = np.array(pieces, dtype=np.int64).reshape(-1, 4)
    item, begin, end = (np.ascontiguousarray(column) for column in table[:, :3].T)
    return item, begin, end, table[:, 3].astype(np.int32)
