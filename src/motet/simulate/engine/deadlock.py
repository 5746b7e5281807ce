"""The circle of actions that wait for each other in a Program that cannot run."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from motet.core.arrays import BoolArray, Float64Array, Int32Array
from motet.simulate.engine.table import ActionTable

_NUM_SHOWN = 6
"""Number of actions of the circle that its sentence names."""


@dataclass(frozen=True, eq=False)
class Waiting:
    """What the actions of a run wait for, as the native engine is given it.

    stream, operation:     int32 [num_rows], of each. A row is an action, or a part of a pass that meets others.
    dependent, dependency: int32 [num_dependencies], the row that waits, and the operation that it waits for.
    action:                int32 [num_rows], of each, in the table of the first copy of the Program.
    """

    action: Int32Array
    stream: Int32Array
    operation: Int32Array
    dependent: Int32Array
    dependency: Int32Array


def deadlock(table: ActionTable, waiting: Waiting, end_s: Float64Array) -> str:
    """The circle as text. table: of the first copy of the Program. end_s: [num_rows], NaN for one that never ran."""
    stuck = np.isnan(end_s)
    path = [int(np.flatnonzero(stuck)[0])]
    while (row := _waits_for(waiting, stuck, path[-1])) not in path:
        path.append(row)
    circle = list(dict.fromkeys(table.action(int(waiting.action[one])) for one in path[path.index(row) :]))
    names = [str(action) for action in [*circle[:_NUM_SHOWN], circle[0]]]
    if len(circle) > _NUM_SHOWN:
        names.insert(-1, "...")
    return " waits for ".join(names)


def _waits_for(waiting: Waiting, stuck: BoolArray, row: int) -> int:
    """An action that never runs and that this one waits for: before it in its stream, needed, or in its operation."""
    before = np.flatnonzero((waiting.stream[:row] == waiting.stream[row]) & stuck[:row])
    if before.size:
        return int(before[0])
    needed = waiting.dependency[waiting.dependent == row]
    if stuck[needed].any():
        return int(needed[stuck[needed]][0])
    together = np.flatnonzero(waiting.operation == waiting.operation[row])
    return next(int(one) for one in together if _waits_for_others(waiting, stuck, int(one)))


def _waits_for_others(waiting: Waiting, stuck: BoolArray, row: int) -> bool:
    before = (waiting.stream[:row] == waiting.stream[row]) & stuck[:row]
    return bool(before.any() or stuck[waiting.dependency[waiting.dependent == row]].any())
