"""Why a Program cannot run: the circle of actions that wait for each other."""

from __future__ import annotations

import numpy as np

from motet.core.arrays import Float64Array, Int32Array
from motet.simulate.engine.action_index import Lookup
from motet.simulate.engine.lower import Waits

_SHOWN = 6


def deadlock(lookup: Lookup, waits: Waits, held: Int32Array, end_s: Float64Array) -> str:
    """The circle in words. end_s: NaN where an action never ran; held: the stream that each holds."""
    table = lookup.table
    way = [int(np.flatnonzero(np.isnan(end_s))[0])]
    while (row := _waits_for(lookup, waits, held, end_s, way[-1])) not in way:
        way.append(row)
    circle = [table.action(one) for one in way[way.index(row) :]]
    shown = [str(action) for action in [*circle[:_SHOWN], circle[0]]]
    if len(circle) > _SHOWN:
        shown.insert(-1, "...")
    return " waits for ".join(shown)


def _waits_for(lookup: Lookup, waits: Waits, held: Int32Array, end_s: Float64Array, row: int) -> int:
    """An action that never runs, and for that reason this one: before it in its stream, needed, or its other end."""
    table = lookup.table
    stuck = np.isnan(end_s)
    before = np.flatnonzero((table.rank[:row] == table.rank[row]) & (held[:row] == held[row]) & stuck[:row])
    if before.size:
        return int(before[0])
    needed = waits.dependency[waits.dependent == row]
    if stuck[needed].any():
        return int(needed[stuck[needed]][0])
    together = np.flatnonzero(lookup.operation == lookup.operation[row])
    ready = (_waits_for_others(table.rank, held, waits, stuck, int(one)) for one in together)
    return next(int(one) for one, blocked in zip(together, ready) if blocked)


def _waits_for_others(rank: Int32Array, held: Int32Array, waits: Waits, stuck: np.ndarray, row: int) -> bool:
    before = (rank[:row] == rank[row]) & (held[:row] == held[row]) & stuck[:row]
    return bool(before.any() or stuck[waits.dependency[waits.dependent == row]].any())
