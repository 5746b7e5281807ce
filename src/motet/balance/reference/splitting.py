"""Items on ranks under a limit, cut only where nothing else helps: fit, or fill and carry on with the rest.

McNaughton's wrap-around rule (1959) fills one rank after another and cuts the item at each boundary: perfect balance
with at most num_ranks - 1 cuts, however many of them were needless. Here an item is cut only when no rank has room for
the whole of it. Heaviest first, of the items and of what is left of cut ones:

1. If it fits, it goes whole to the rank with the least room that holds it, which keeps wide rooms for heavy items.
2. If not, the rank that can take the largest part of it is filled up, and the rest waits for its turn by its new size.
3. Where no rank has room for any of it, or it is in too many parts already, the rest is left out.

With one phase and no overhead every item finds its place under any limit from the mean on: what does not fit fills
rooms completely. The parts of an item are on different ranks. With several phases an item is cut by the same share in
all of them. Then the rarest phase goes first: phases are ordered by the number of items that have cost in them, and
an item is placed with the first of its phases, so that items with cost in the commonest phase only come last and fill
what the others have left there.
"""

from __future__ import annotations

import heapq

import numpy as np
from numpy.typing import NDArray

Pieces = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.int32]]
"""item, begin, end, rank of each fragment: the units begin .. end of an item; by item, then by begin."""


def pour(
    costs: NDArray[np.int64],
    overheads: NDArray[np.int64],
    units: NDArray[np.int64],
    parts: NDArray[np.int64],
    limits: NDArray[np.int64],
    num_ranks: int,
) -> Pieces:
    """Place items so that no load exceeds limits, int64 [num_phases]; what finds no room is left out.

    costs, overheads: int64 [num_items, num_phases], the latter for each fragment of a cut item.
    units, parts: int64 [num_items], >= 1, the equal units between which an item can be cut, and into how many parts at
    most. The first `end` units of an item cost costs * end // units.
    O(num_fragments * num_ranks * num_phases).
    """
    rooms = np.tile(limits, (num_ranks, 1))
    phases = _first_phases(costs)
    begins = [0] * len(costs)
    ranks_of: list[list[int]] = [[] for _ in costs]
    pieces: list[tuple[int, int, int, int]] = []
    waiting = [(order, -int(costs[item, phase]), item) for item, (order, phase) in enumerate(phases)]
    heapq.heapify(waiting)
    while waiting:
        order, _, item = heapq.heappop(waiting)
        cost, num_units, begin, phase = costs[item].tolist(), int(units[item]), begins[item], phases[item][1]
        before = [whole * begin // num_units for whole in cost]
        rest = np.array([whole - part for whole, part in zip(cost, before, strict=True)])
        free = np.ones(num_ranks, dtype=bool)
        free[ranks_of[item]] = False
        fits = np.flatnonzero(free & (rooms >= rest + overheads[item] * (begin > 0)).all(axis=1))
        if len(fits):
            rank, end = int(fits[rooms[fits, phase].argmin()]), num_units
        elif len(ranks_of[item]) + 1 >= parts[item]:
            continue
        else:
            ends = [_reach(row, cost, before, num_units) for row in (rooms - overheads[item]).tolist()]
            rank = max(np.flatnonzero(free).tolist(), key=lambda r: (ends[r], -r))
            end = ends[rank]
            if end <= begin:
                continue
        rooms[rank] -= _cost_of(cost, begin, end, num_units) + overheads[item] * (end - begin < num_units)
        pieces.append((item, begin, end, rank))
        ranks_of[item].append(rank)
        begins[item] = end
        if end < num_units:
            left = cost[phase] - cost[phase] * end // num_units
            heapq.heappush(waiting, (order, -left, item))
    return _arrays(sorted(pieces))


def _first_phases(costs: NDArray[np.int64]) -> list[tuple[int, int]]:
    """Of each item the rarest phase that it has cost in, as (place in the order of rarity, phase)."""
    rarest_first = np.argsort((costs > 0).sum(axis=0), kind="stable")
    orders = (costs[:, rarest_first] > 0).argmax(axis=1)
    return list(zip(orders.tolist(), rarest_first[orders].tolist(), strict=True))


def _reach(room: list[int], cost: list[int], before: list[int], num_units: int) -> int:
    """The largest `end` such that the units up to it, without those `before`, cost at most `room` in each phase."""
    end = num_units
    for space, whole, part in zip(room, cost, before, strict=True):
        if space + part < whole:
            end = min(end, ((space + part + 1) * num_units - 1) // whole)
    return end


def _cost_of(cost: list[int], begin: int, end: int, num_units: int) -> NDArray[np.int64]:
    return np.array([whole * end // num_units - whole * begin // num_units for whole in cost], dtype=np.int64)


def _arrays(pieces: list[tuple[int, int, int, int]]) -> Pieces:
    table = np.array(pieces, dtype=np.int64).reshape(-1, 4)
    item, begin, end = (np.ascontiguousarray(column) for column in table[:, :3].T)
    return item, begin, end, table[:, 3].astype(np.int32)
