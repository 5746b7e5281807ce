"""The passes of a Program in one order in which they can run, whatever they take.

A tick is the unit of time here: whole numbers, so that all ranks that see the same lengths decide the same.
"""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import numpy as np

from motet.core.arrays import Int64Array
from motet.schedule.check.dry_run import dry_run
from motet.schedule.dependencies import Dependencies
from motet.schedule.passes.part_runs import joined_parts
from motet.schedule.program import Action, Kind, Program
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

    def ends(self, ticks: Int64Array) -> tuple[list[int], list[int]]:
        """Start and end of each action. ticks: int64 [len(PASSES), num_stages, num_microbatches], of whole passes.

        The parts of a pass take equally long, rounded up. O(actions + dependencies).
        """
        starts, ends = list[int](), list[int]()
        for before, taken in zip(self.before, (-(-ticks[self._cell] // self._num_parts) * self._num).tolist()):
            start = max([ends[each] for each in before], default=0)
            starts.append(start)
            ends.append(start + taken)
        return starts, ends
