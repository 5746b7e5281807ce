"""The row of an ActionTable that holds an action: dense tables over stages, edges and microbatches, made once."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike

from motet.core.arrays import IndexArray, Int32Array, Int64Array
from motet.core.errors import ArgumentError
from motet.schedule.dependencies import COLLECTIVES, PARTNERS
from motet.schedule.program import EXCHANGES, FROM_SOURCE, WHOLE_RANK, AlikeItems, Kind
from motet.simulate.engine.table import PASSES, ActionTable

NONE = -1


@dataclass(frozen=True, eq=False)
class PassRows:
    """The rows of the parts of all passes of one kind. A whole pass is one part.

    at:          the rows, pass by pass; pass key = stage * num_microbatches + microbatch.
    offset:      [num_stages * num_microbatches + 1]: the parts of a pass are at[offset[key]:offset[key + 1]].
    first, last: [num_stages, num_microbatches], the first and last row of each pass; NONE without a pass.
    count:       [num_stages, num_microbatches], number of parts of each pass; 0 without a pass.
    """

    at: Int32Array
    offset: Int64Array
    first: Int32Array
    last: Int32Array
    count: Int64Array


class ActionIndex:
    """The rows of a table by stage, edge, microbatch and part.

    shape:     (num_stages, num_microbatches).
    sources, sinks: [num_edges], the stages of each edge.
    passes:    PassRows by kind, for kinds that the Program has.
    edge:      [num_actions], the edge of a SEND, RECV or EXCHANGE, else NONE.
    on_edge:   by kind of these, the row [num_edges, num_microbatches], or NONE.
    operation: [num_actions], the first row of the actions that take place together with an action.
    Raises ArgumentError for an action that occurs twice, for a pass with missing parts, and for a transfer or
    collective that lacks an end.
    """

    def __init__(self, table: ActionTable) -> None:
        self.table = table
        program = table.program
        self.shape = (program.num_stages, program.num_microbatches)
        self.sources = np.array([source for source, _ in program.edges], dtype=np.int32)
        self.sinks = np.array([sink for _, sink in program.edges], dtype=np.int32)
        self.passes = {kind: self._pass(kind) for kind in PASSES if table.rows(kind).size}
        self.edge = np.full(len(table), NONE, dtype=np.int32)
        self.on_edge = {kind: self._on_edge(kind) for kind in (*PARTNERS, *EXCHANGES) if table.rows(kind).size}
        self.operation = np.arange(len(table), dtype=np.int32)
        self._pair(Kind.SEND_F, Kind.RECV_F)
        self._pair(Kind.SEND_B, Kind.RECV_B)
        for kind in COLLECTIVES:
            if table.rows(kind).size:
                self._join(kind)
        for kind in WHOLE_RANK:
            rows = table.rows(kind)
            if len(twice := rows[np.bincount(table.rank[rows])[table.rank[rows]] > 1]):
                raise ArgumentError(f"{table.action(twice[0])} is not the only {kind} of rank {table.rank[twice[0]]}.")

    def part(self, kind: Kind, stage: ArrayLike, microbatch: ArrayLike, part: ArrayLike) -> Int64Array:
        """The row of a numbered part of a pass, or NONE."""
        stage, microbatch, part = (np.asarray(column, dtype=np.int64) for column in (stage, microbatch, part))
        passes = self.passes[kind]
        key = stage * self.shape[1] + np.maximum(microbatch, 0)
        exists = (microbatch >= 0) & (part >= 0) & (part < passes.offset[key + 1] - passes.offset[key])
        row = np.where(exists, passes.at[np.where(exists, passes.offset[key] + part, 0)], NONE)
        return np.where(exists & (self.table.part[row] == part), row, NONE)

    def _pass(self, kind: Kind) -> PassRows:
        """The rows of all passes of a kind. Raises ArgumentError for a pass whose parts are not 0, 1, ..."""
        table, rows = self.table, self.table.rows(kind)
        key = table.stage[rows].astype(np.int64) * self.shape[1] + table.microbatch[rows]
        count = np.bincount(key, minlength=self.shape[0] * self.shape[1])
        offset = np.concatenate([[0], np.cumsum(count)])
        part = np.maximum(table.part[rows], 0)
        at = np.full(len(rows), NONE, dtype=np.int32)
        in_range = part < count[key]
        at[(offset[key] + part)[in_range]] = rows[in_range]
        if (missing := np.flatnonzero(at == NONE)).size:
            bad_key = int(np.searchsorted(offset, missing[0], side="right")) - 1
            stage, microbatch = divmod(bad_key, self.shape[1])
            raise ArgumentError(f"{stage}{kind}{microbatch} must be there once, whole or in parts numbered from 0.")
        exists = count > 0
        first, last = (np.full(len(count), NONE, dtype=np.int32) for _ in range(2))
        first[exists] = at[offset[:-1][exists]]
        last[exists] = at[offset[1:][exists] - 1]
        return PassRows(at, offset, first.reshape(self.shape), last.reshape(self.shape), count.reshape(self.shape))

    def _on_edge(self, kind: Kind) -> Int32Array:
        """The rows of a kind's actions by edge and microbatch; also sets `edge` of these actions."""
        table, rows = self.table, self.table.rows(kind)
        stage, peer = table.stage[rows], table.peer[rows]
        source, sink = (stage, peer) if kind in FROM_SOURCE else (peer, stage)
        # 1. The edge of each action: binary search for its key among the sorted keys of edges.
        edge_keys = self.sources.astype(np.int64) * self.shape[0] + self.sinks
        order = np.argsort(edge_keys, kind="stable")
        action_keys = source.astype(np.int64) * self.shape[0] + sink
        index = np.searchsorted(edge_keys[order], action_keys)
        if (wrong := np.flatnonzero(np.append(edge_keys[order], NONE)[index] != action_keys)).size:
            raise ArgumentError(f"{table.action(rows[wrong[0]])} moves data where the program has no edge.")
        edge = order[index]
        self.edge[rows] = edge
        # 2. The rows, one for each edge and microbatch.
        on_edge = np.full((len(edge_keys), self.shape[1]), NONE, dtype=np.int32)
        on_edge[edge, table.microbatch[rows]] = rows
        if (twice := rows[on_edge[edge, table.microbatch[rows]] != rows]).size:
            raise ArgumentError(f"{table.action(twice[0])} is in the program twice.")
        return on_edge

    def _pair(self, send: Kind, receive: Kind) -> None:
        """Make one operation of each SEND and its RECV."""
        none = np.full((len(self.sources), self.shape[1]), NONE, dtype=np.int32)
        sends, receives = self.on_edge.get(send, none), self.on_edge.get(receive, none)
        alone = np.where((sends < 0) != (receives < 0), np.maximum(sends, receives), NONE)
        if (rows := alone[alone >= 0]).size:
            action = self.table.action(rows.min())
            raise ArgumentError(f"{action} has no {PARTNERS[action.kind]} of stage {action.peer} as its other end.")
        exists = sends >= 0
        for ends in (sends, receives):
            self.operation[ends[exists]] = np.minimum(sends, receives)[exists]

    @cached_property
    def _groups(self) -> Int64Array:
        """The group of each stage, [num_stages]. A stage without a group gets one of its own."""
        groups = np.array([stage.group for stage in self.table.program.stages], dtype=np.int64)
        return np.where(groups < 0, groups.max() + 1 + np.arange(len(groups)), groups)

    def _join(self, kind: Kind) -> None:
        """Make one operation of each collective: its actions on all stages of a group."""
        rows = self.table.rows(kind)
        key = self._collective_keys(kind, rows)
        first = np.full(int(key.max()) + 1, NONE, dtype=np.int32)
        first[key[::-1]] = rows[::-1]  # the lowest row of each key is written last, and stays
        self.operation[rows] = first[key]
        count, size = np.bincount(key)[key], self._num_entering(rows)
        if (wrong := np.flatnonzero(count != size)).size:
            bad = wrong[0]
            raise ArgumentError(
                f"{self.table.action(rows[bad])} is entered {count[bad]} times in a group of {size[bad]} stages; "
                "each stage must enter it once."
            )

    def _num_entering(self, rows: IndexArray) -> Int64Array:
        """How many stages enter the collective of each action: those of its group, and of a microbatch those that take
        it."""
        stage, microbatch = self.table.stage[rows], self.table.microbatch[rows]
        size = np.bincount(self._groups)[self._groups[stage]]
        stages = self.table.program.stages
        if isinstance(stages, AlikeItems) or not any(one.microbatches for one in stages):
            return size
        taking = np.zeros((int(self._groups.max()) + 1, self.shape[1]), dtype=np.int64)
        for number, one in enumerate(stages):
            taking[self._groups[number], list(one.microbatches) or slice(None)] += 1
        return np.where(microbatch < 0, size, taking[self._groups[stage], microbatch])

    def _collective_keys(self, kind: Kind, rows: IndexArray) -> Int64Array:
        """A number for each action, equal for actions of the same collective: those with the same group, microbatch and
        part, and, in an exchange, the same pair of groups.
        """
        table, groups = self.table, self._groups
        axes: list[Int64Array] = [
            groups[table.stage[rows]],
            _from_zero(table.microbatch[rows]),
            _from_zero(table.part[rows]),
        ]
        if kind in EXCHANGES:
            group_pair = groups[self.sources] * (int(groups.max()) + 1) + groups[self.sinks]
            axes.append(np.unique(group_pair, return_inverse=True)[1][self.edge[rows]])
        key = np.zeros(len(rows), dtype=np.int64)
        for axis in axes:
            key = key * (int(axis.max()) + 1) + axis
        return key


class SliceIndex:
    """The rows of GATHER or GATHER_B by stage, microbatch and slice of parameters. Microbatch and slice may be -1."""

    def __init__(self, table: ActionTable, kind: Kind) -> None:
        rows = table.rows(kind)
        columns = (table.stage[rows], table.microbatch[rows], table.part[rows])
        self.low = [0, *(int(column.min()) for column in columns[1:])]
        shape = [int(column.max()) - low + 1 for column, low in zip(columns, self.low)]
        self.row = np.full(shape, NONE, dtype=np.int32)
        self.row[tuple(column - low for column, low in zip(columns, self.low))] = rows

    def at(self, stage: Int32Array, microbatch: ArrayLike, part: ArrayLike) -> Int32Array:
        """The row for each stage, microbatch and slice, or NONE."""
        columns = np.broadcast_arrays(stage, microbatch, part)
        in_range = np.ones(len(stage), dtype=np.bool_)
        index = []
        for column, low, size in zip(columns, self.low, self.row.shape):
            in_range &= (column >= low) & (column < low + size)
            index.append(np.clip(column - low, 0, size - 1))
        row: Int32Array = np.where(in_range, self.row[tuple(index)], NONE)
        return row


def _from_zero(column: Int32Array) -> Int64Array:
    """The column, shifted to start at 0."""
    return column.astype(np.int64) - int(column.min())
