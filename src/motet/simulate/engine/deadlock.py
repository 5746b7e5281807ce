"""The circle of actions that wait for each other in a Program that cannot run."""

from __future__ import annotations

import numpy as np

from motet.core.arrays import Float64Array, Int32Array
from motet.simulate.engine.action_index import ActionIndex
from motet.simulate.engine.lower import Waits

_NUM_SHOWN = 6
"""Number of actions of the circle that its sentence names."""


def deadlock(lookup: ActionIndex, waits: Waits, held: Int32Array, end_s: Float64Array) -> str:
    """The circle as text. held: the stream that each action occupies. end_s: NaN for an action that never ran."""
    table = lookup.table
    path = [int(np.flatnonzero(np.isnan(end_s))[0])]
    while (row := _waits_for(lookup, waits, held, end_s, path[-1])) not in path:
        path.append(row)
    circle = [table.action(one) for one in path[path.index(row) :]]
    names = [str(action) for action in [*circle[:_NUM_SHOWN], circle[0]]]
    if len(circle) > _NUM_SHOWN:
        names.insert(-1, "...")
    return " waits for ".join(names)


def _waits_for(lookup: ActionIndex, waits: Waits, held: Int32Array, end_s: Float64Array, row: int) -> int:
    """An action that never runs and that this one waits for: before it in its stream, needed, or in its operation."""
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
