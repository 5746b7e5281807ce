"""Which row of an ActionTable holds an action: dense tables over stages, edges and microbatches, made once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from motet.core.arrays import Int32Array, Int64Array
from motet.core.errors import ArgumentError
from motet.schedule.dependencies import COLLECTIVES, PARTNERS
from motet.schedule.program import EXCHANGES, FROM_SOURCE, WHOLE_RANK, Kind
from motet.simulate.engine.table import PASSES, ActionTable

NONE = -1


@dataclass(frozen=True, eq=False)
class Pass:
    """The rows of the parts of all passes of one kind; a whole pass is one part.

    offset: [num_stages * num_microbatches + 1]; pass (stage, microbatch) has parts at[offset[key]:offset[key + 1]].
    first, last, count: of each pass, [num_stages, num_microbatches]; NONE, NONE and 0 where there is none.
    """

    at: Int32Array
    offset: Int64Array
    first: Int32Array
    last: Int32Array
    count: Int64Array


class Lookup:
    """Rows by what they do; raises ArgumentError for an action that is there twice, or that lacks what belongs to it.

    passes:    by kind, those that the Program has. edge: of a SEND, RECV or EXCHANGE, else NONE; [num_actions].
    on_edge:   by kind of these, the row [num_edges, num_microbatches]; NONE where there is none.
    operation: the first row of those that take place together, of each action; [num_actions].
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
        """The row of a numbered part of a pass; NONE where there is none."""
        stage, microbatch, part = (np.asarray(column, dtype=np.int64) for column in (stage, microbatch, part))
        found = self.passes[kind]
        key = stage * self.shape[1] + np.maximum(microbatch, 0)
        there = (microbatch >= 0) & (part >= 0) & (part < found.offset[key + 1] - found.offset[key])
        row = np.where(there, found.at[np.where(there, found.offset[key] + part, 0)], NONE)
        return np.where(there & (self.table.part[row] == part), row, NONE)

    def _pass(self, kind: Kind) -> Pass:
        table, rows = self.table, self.table.rows(kind)
        key = table.stage[rows].astype(np.int64) * self.shape[1] + table.microbatch[rows]
        count = np.bincount(key, minlength=self.shape[0] * self.shape[1])
        offset = np.concatenate([[0], np.cumsum(count)])
        part = np.maximum(table.part[rows], 0)
        at = np.full(len(rows), NONE, dtype=np.int32)
        fits = part < count[key]
        at[(offset[key] + part)[fits]] = rows[fits]
        if (missing := np.flatnonzero(at == NONE)).size:
            bad = int(np.searchsorted(offset, missing[0], side="right")) - 1
            stage, microbatch = divmod(bad, self.shape[1])
            raise ArgumentError(f"{stage}{kind}{microbatch} must be there once, whole or in parts numbered from 0.")
        there = count > 0
        first, last = (np.full(len(count), NONE, dtype=np.int32) for _ in range(2))
        first[there] = at[offset[:-1][there]]
        last[there] = at[offset[1:][there] - 1]
        return Pass(at, offset, first.reshape(self.shape), last.reshape(self.shape), count.reshape(self.shape))

    def _on_edge(self, kind: Kind) -> Int32Array:
        """Finds the edges of a kind's actions, and the other way round."""
        table, rows = self.table, self.table.rows(kind)
        stage, peer = table.stage[rows], table.peer[rows]
        source, sink = (stage, peer) if kind in FROM_SOURCE else (peer, stage)
        names = self.sources.astype(np.int64) * self.shape[0] + self.sinks
        order = np.argsort(names, kind="stable")
        wanted = source.astype(np.int64) * self.shape[0] + sink
        place = np.searchsorted(names[order], wanted)
        if (wrong := np.flatnonzero(np.append(names[order], NONE)[place] != wanted)).size:
            raise ArgumentError(f"{table.action(rows[wrong[0]])} moves data where the program has no edge.")
        edge = order[place]
        self.edge[rows] = edge
        found = np.full((len(names), self.shape[1]), NONE, dtype=np.int32)
        found[edge, table.microbatch[rows]] = rows
        if (twice := rows[found[edge, table.microbatch[rows]] != rows]).size:
            raise ArgumentError(f"{table.action(twice[0])} is in the program twice.")
        return found

    def _pair(self, send: Kind, receive: Kind) -> None:
        none = np.full((len(self.sources), self.shape[1]), NONE, dtype=np.int32)
        sends, receives = self.on_edge.get(send, none), self.on_edge.get(receive, none)
        alone = np.where((sends < 0) != (receives < 0), np.maximum(sends, receives), NONE)
        if (rows := alone[alone >= 0]).size:
            action = self.table.action(rows.min())
            raise ArgumentError(f"{action} has no {PARTNERS[action.kind]} of stage {action.peer} as its other end.")
        there = sends >= 0
        for ends in (sends, receives):
            self.operation[ends[there]] = np.minimum(sends, receives)[there]

    def _join(self, kind: Kind) -> None:
        """One operation of what all stages of a group do; a stage without group is a group of its own."""
        table, rows = self.table, self.table.rows(kind)
        groups = np.array([stage.group for stage in table.program.stages], dtype=np.int64)
        groups = np.where(groups < 0, groups.max() + 1 + np.arange(len(groups)), groups)
        group = groups[table.stage[rows]]
        box: list[Int64Array] = [group, _from_zero(table.microbatch[rows]), _from_zero(table.part[rows])]
        if kind in EXCHANGES:
            between = groups[self.sources] * (int(groups.max()) + 1) + groups[self.sinks]
            box.append(np.unique(between, return_inverse=True)[1][self.edge[rows]])
        key = np.zeros(len(rows), dtype=np.int64)
        for axis in box:
            key = key * (int(axis.max()) + 1) + axis
        first = np.full(int(key.max()) + 1, NONE, dtype=np.int32)
        first[key[::-1]] = rows[::-1]
        self.operation[rows] = first[key]
        count, size = np.bincount(key)[key], np.bincount(groups)[group]
        if (wrong := np.flatnonzero(count != size)).size:
            bad = wrong[0]
            raise ArgumentError(
                f"{table.action(rows[bad])} is entered {count[bad]} times in a group of {size[bad]} stages; "
                "each stage must enter it once."
            )


class SlicedActions:
    """The rows of GATHER or GATHER_B by stage, microbatch and slice of parameters, each of which may be -1, all."""

    def __init__(self, table: ActionTable, kind: Kind) -> None:
        rows = table.rows(kind)
        columns = (table.stage[rows], table.microbatch[rows], table.part[rows])
        self.low = [0, *(int(column.min()) for column in columns[1:])]
        shape = [int(column.max()) - low + 1 for column, low in zip(columns, self.low)]
        self.row = np.full(shape, NONE, dtype=np.int32)
        self.row[tuple(column - low for column, low in zip(columns, self.low))] = rows

    def at(self, stage: Int32Array, microbatch: ArrayLike, part: ArrayLike) -> Int32Array:
        """NONE where there is none."""
        box = np.broadcast_arrays(stage, microbatch, part)
        there = np.ones(len(stage), dtype=np.bool_)
        index = []
        for column, low, size in zip(box, self.low, self.row.shape):
            there &= (column >= low) & (column < low + size)
            index.append(np.clip(column - low, 0, size - 1))
        found: Int32Array = np.where(there, self.row[tuple(index)], NONE)
        return found


def _from_zero(column: Int32Array) -> Int64Array:
    return column.astype(np.int64) - int(column.min())
