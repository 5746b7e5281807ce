"""Passes that replicas run together, each on a rank of its own: from where they wait for each other, one operation.

The replicas are stages of one Program, or of several islands, which are copies of it: then the copies are one run, of
as many times as many actions. Such a pass is three rows of the run: what a rank runs before it waits for others, what
it runs with them, and what it runs behind that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from motet.core.arrays import Float64Array, Int32Array, Int64Array
from motet.schedule.program import MEETING_KINDS, Kind
from motet.simulate.engine.action_index import ActionIndex
from motet.simulate.engine.lower import Waits
from motet.simulate.engine.table import CODES, KINDS, ActionTable


@dataclass(frozen=True, eq=False)
class MetPasses:
    """Which passes are run together, in copies of a Program; [num_copies, num_stages, num_microbatches] each.

    number: int64; passes of one kind, microbatch and part are run together on stages with the same number. -1: a stage
            runs the passes of a microbatch alone.
    own:    by kind, the shares of a pass that a rank runs before it waits for others, and behind what it runs with
            them; of none without them, and of none of a part of a pass.
    """

    number: Int64Array
    own: Mapping[Kind, tuple[Float64Array, Float64Array]]

    def in_order(self, groups: Int64Array) -> MetPasses:
        """The same with microbatches in another order.

        groups: int64 [num_copies, num_microbatches], at each position of a copy one of the microbatches, copy by copy.
                Those that all replicas run together are at the same positions in all copies.
        """
        num = groups.shape[1]
        copy, microbatch = np.divmod(groups, num)
        own = {
            kind: (before[copy, :, microbatch].swapaxes(1, 2), behind[copy, :, microbatch].swapaxes(1, 2))
            for kind, (before, behind) in self.own.items()
        }
        return MetPasses(self.number[:, :, groups[0] % num], own)

    def own_s(self, table: ActionTable, totals_s: Float64Array) -> tuple[Float64Array, Float64Array]:
        """Seconds of each action before and behind the meeting, [num_copies, num_actions] each. totals_s: of all."""
        before_s, behind_s = np.zeros((2, *totals_s.shape))
        for kind, shares in self.own.items():
            rows = table.rows(kind)
            rows = rows[table.part[rows] < 0]
            stage, microbatch = table.stage[rows], table.microbatch[rows]
            for seconds, share in zip((before_s, behind_s), shares, strict=True):
                seconds[:, rows] = totals_s[:, rows] * share[:, stage, microbatch]
        return before_s, behind_s


@dataclass(frozen=True, eq=False)
class MetRows:
    """The rows of a run of copies of which some passes are three. Rows of a copy follow each other.

    action:      int32 [num_rows_of_a_copy], of each row of a copy.
    first, last: int32 [num_actions], its first and last row in a copy.
    middle:      int32 [num_met], the row of each met pass that is run together.
    operation:   int32 [num_copies, num_rows_of_a_copy], the first row of those that take place together.
    """

    action: Int32Array
    first: Int32Array
    last: Int32Array
    middle: Int32Array
    operation: Int32Array

    @staticmethod
    def of(lookup: ActionIndex, number: Int64Array) -> MetRows:
        """number: as of `MetPasses`."""
        table = lookup.table
        passes = np.flatnonzero(np.isin(table.kind, [CODES[kind] for kind in MEETING_KINDS]))
        numbers = number[:, table.stage[passes], table.microbatch[passes]]
        met, numbers = passes[(numbers >= 0).any(axis=0)], numbers[:, (numbers >= 0).any(axis=0)]
        count = np.ones(len(table), dtype=np.int32)
        count[met] = 3
        last = (np.cumsum(count) - 1).astype(np.int32)
        first, action = last - count + 1, np.repeat(np.arange(len(table), dtype=np.int32), count)
        operation = np.where(count[action] > 1, np.arange(len(action)), first[lookup.operation[action]])
        operation = operation + len(action) * np.arange(len(number))[:, None]
        middle = first[met] + 1
        part = table.part[met].astype(np.int64) + 1
        key = (numbers * len(KINDS) + table.kind[met]) * lookup.shape[1] + table.microbatch[met]
        key = key * (int(part.max(initial=0)) + 1) + part
        copy, index = np.nonzero(numbers >= 0)  # The first copy first, and in it the first row.
        _, begun, which = np.unique(key[copy, index], return_index=True, return_inverse=True)
        operation[copy, middle[index]] = (copy * len(action) + middle[index])[begun][which]
        return MetRows(action, first, last, middle, operation.astype(np.int32))

    def waits(self, needs: Waits) -> tuple[Int32Array, Int32Array]:
        """What rows wait for, as the native engine takes it. needs: of the actions of one copy."""
        starts = np.int32(len(self.action)) * np.arange(len(self.operation), dtype=np.int32)[:, None]
        dependents, dependencies = self.first[needs.dependent], self.operation[:, self.last[needs.dependency]]
        return (dependents + starts).ravel(), dependencies.ravel()

    def seconds(self, totals_s: Float64Array, own_s: tuple[Float64Array, Float64Array]) -> Float64Array:
        """Of each row, [num_copies, num_rows_of_a_copy]. totals_s, own_s: of each action."""
        seconds, met = totals_s[:, self.action], self.action[self.middle]
        before_s, behind_s = (each[:, met] for each in own_s)
        seconds[:, self.middle - 1], seconds[:, self.middle + 1] = before_s, behind_s
        seconds[:, self.middle] -= before_s + behind_s
        return seconds
