"""The passes of a Program in one order in which they can run, whatever they take.

A tick is the unit of time here: whole numbers, so that all ranks that see the same lengths decide the same.
"""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import numpy as np

from motet.balance.backend import Backend
from motet.core.arrays import Int64Array
from motet.schedule.check.dry_run import dry_run
from motet.schedule.dependencies import Dependencies
from motet.schedule.passes.part_runs import joined_parts
from motet.schedule.program import Action, Kind, Program
from motet.simulate.engine.backend import engine
from motet.simulate.engine.table import PASSES

_INDEX = {kind: index for index, kind in enumerate(PASSES)}


class PassOrder:
    """A Program without communication, made once, and timed for the ticks of each step. Messages take no time.

    actions: all passes, and runs of neighbouring parts of passes, each behind those that it waits for.
    before:  for each action the numbers of those that it waits for: in its row, and for what they give.
    """

    def __init__(self, program: Program) -> None:
        program, parts = joined_parts(program)
        self.actions: tuple[Action, ...] = tuple(dry_run(program).start)
        number = {action: index for index, action in enumerate(self.actions)}
        dependencies = Dependencies(program)
        before = [{number[needed] for needed in dependencies.of(action)} for action in self.actions]
        self.rows = tuple(tuple(number[action] for action in row) for row in program.actions)
        for row in self.rows:
            for first, second in pairwise(row):
                before[second].add(first)
        self.before = tuple(tuple(sorted(each)) for each in before)
        self._num = np.array([len(parts[action]) for action in self.actions])
        counts = Counter[tuple[int, Kind, int]]()
        for action in self.actions:
            counts[action[:3]] += len(parts[action])
        self._cell = (
            np.array([_INDEX[action.kind] for action in self.actions]),
            np.array([action.stage for action in self.actions]),
            np.array([action.microbatch for action in self.actions]),
        )
        self._num_parts = np.array([counts[action[:3]] for action in self.actions])
        streams = {action: rank for rank, row in enumerate(program.actions) for action in row}
        needs = [(index, needed) for index, before in enumerate(self.before) for needed in before]
        self._streams = np.array([streams[action] for action in self.actions], dtype=np.int32)
        self._operations = np.arange(len(self.actions), dtype=np.int32)
        self._needs = np.array(needs, dtype=np.int32).reshape(-1, 2).T.copy()

    def ends(self, ticks: Int64Array, backend: Backend = "native") -> tuple[list[int], list[int]]:
        """Start and end of each action. ticks: int64 [len(PASSES), num_stages, num_microbatches], of whole passes.

        The parts of a pass take equally long, rounded up. O(actions + dependencies). The native engine adds up whole
        numbers below 2^53, and is exact.
        """
        taken = -(-ticks[self._cell] // self._num_parts) * self._num
        if (native := engine(backend)) is not None:
            columns = native.run(self._streams, self._operations, taken.astype(np.float64), *self._needs)
            starts, ends = (column.astype(np.int64).tolist() for column in columns)
            return starts, ends
        return self._reference(taken.tolist())

    def _reference(self, taken: list[int]) -> tuple[list[int], list[int]]:
        starts, ends = list[int](), list[int]()
        for before, own in zip(self.before, taken):
            start = max([ends[each] for each in before], default=0)
            starts.append(start)
            ends.append(start + own)
        return starts, ends
