"""A Program into arrays for the native engine: what every action waits for.

The rules are those of motet.schedule.dependencies, here on whole columns. Tests hold the two to each other.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from motet.core.arrays import IndexArray, Int32Array, Int64Array
from motet.core.errors import ArgumentError
from motet.schedule.dependencies import GRADIENTS, PREFETCH_DEPTH
from motet.schedule.program import Action, Kind
from motet.simulate.engine.action_index import NONE, ActionIndex, SliceIndex
from motet.simulate.engine.streams import COLLECTIVE, COMPUTE, TENSOR, holds_compute

BACKWARD = (Kind.B, Kind.I)
WEIGHT_KINDS = (Kind.B, Kind.W)
"""Kinds that add to the gradients of weights."""


@dataclass(frozen=True, eq=False)
class Waits:
    """Action dependent[i] waits for all actions of operation dependency[i]; int32 [num_dependencies] each."""

    dependent: Int32Array
    dependency: Int32Array


def waits(lookup: ActionIndex, stream: Int32Array, overlap: bool) -> Waits:
    """What every action waits for besides its stream, by the rules of `Dependencies.of`.

    stream:  of each action.
    overlap: False lets collectives hold the compute stream: one starts after the compute before it in its rank's row,
             and the compute after it starts once it has ended.

    Tensor-parallel communication in parts of its own waits for the part before it on its rank, whatever pass that part
    belongs to, of those that begin with such a part: a rank does not communicate ahead for its next pass.
    """
    pairs = _Waits(lookup)
    pairs.forward()
    pairs.backward()
    pairs.moves()
    pairs.gathers()
    pairs.reductions()
    pairs.whole_ranks()
    pairs.in_turn(stream)
    if not overlap:
        pairs.blocking(stream)
    return Waits(np.concatenate(pairs.dependents), lookup.operation[np.concatenate(pairs.dependencies)])


class _Waits:
    """Pairs of rows: dependents wait for dependencies."""

    def __init__(self, lookup: ActionIndex) -> None:
        self.lookup, self.table = lookup, lookup.table
        self.dependents: list[Int32Array] = [np.empty(0, dtype=np.int32)]
        self.dependencies: list[Int32Array] = [np.empty(0, dtype=np.int32)]

    def add(self, dependent: ArrayLike, dependency: ArrayLike) -> None:
        """Add pairs. A pair with NONE is left out."""
        after, before = np.asarray(dependent, dtype=np.int32), np.asarray(dependency, dtype=np.int32)
        is_pair = (after >= 0) & (before >= 0)
        self.dependents.append(after[is_pair])
        self.dependencies.append(before[is_pair])

    def first(self, kind: Kind) -> Int32Array:
        """The first row of each pass, [num_stages, num_microbatches], or NONE."""
        return self.lookup.passes[kind].first if kind in self.lookup.passes else self._none()

    def last(self, kind: Kind) -> Int32Array:
        """The last row of each pass, [num_stages, num_microbatches], or NONE."""
        return self.lookup.passes[kind].last if kind in self.lookup.passes else self._none()

    def _none(self) -> Int32Array:
        return np.full(self.lookup.shape, NONE, dtype=np.int32)

    def after_last(self, rows: IndexArray, stage: Int32Array, *kinds: Kind) -> None:
        """Rows wait for the ends of a stage's passes of these kinds, each of its own microbatch."""
        for kind in kinds:
            if kind in self.lookup.passes:
                self.add(rows, self.last(kind)[stage[rows], self.table.microbatch[rows]])

    def parts(self, kind: Kind) -> None:
        """A part waits for the part before it."""
        rows = self.lookup.passes[kind].at
        later = np.flatnonzero(self.table.part[rows] > 0)
        self.add(rows[later], rows[later - 1])

    def across(self, first: Int32Array, last: list[Int32Array], kinds: tuple[Kind, Kind]) -> None:
        """Passes wait for what crosses an edge: its RECV, else its EXCHANGE, else the pass at its other end.

        first: [num_edges, num_microbatches], the passes that wait. last: the same of passes at the other end.
        kinds: of RECV and EXCHANGE.
        """
        received, exchanged = (self.lookup.on_edge.get(kind) for kind in kinds)
        moved = np.full(first.shape, NONE, dtype=np.int32)
        for rows in (exchanged, received):
            if rows is not None:
                moved = np.where(rows >= 0, rows, moved)
        self.add(first, moved)
        for rows in last:
            self.add(first, np.where(moved >= 0, NONE, rows))

    def forward(self) -> None:
        """F waits for its inputs, R for F."""
        if Kind.F in self.lookup.passes:
            inputs = self.first(Kind.F)[self.lookup.sinks], [self.last(Kind.F)[self.lookup.sources]]
            self.across(*inputs, (Kind.RECV_F, Kind.EXCHANGE_F))
            self.parts(Kind.F)
        if Kind.R in self.lookup.passes:
            self.add(self.first(Kind.R), self.last(Kind.F))
            self.parts(Kind.R)

    def backward(self) -> None:
        """B and I wait for F, R and the gradients of their output, W for I."""
        gradients = [self.last(kind)[self.lookup.sinks] for kind in BACKWARD if kind in self.lookup.passes]
        for kind in BACKWARD:
            if kind in self.lookup.passes:
                self.add(self.first(kind), self.last(Kind.F))
                self.add(self.first(kind), self.last(Kind.R))
                self.across(self.first(kind)[self.lookup.sources], gradients, (Kind.RECV_B, Kind.EXCHANGE_B))
                self.parts(kind)
        if Kind.W in self.lookup.passes:
            self.after_last(self.table.rows(Kind.W), self.table.stage, Kind.I)
            self.parts(Kind.W)

    def moves(self) -> None:
        """A SEND or EXCHANGE waits for the pass whose result it moves."""
        rows, stage, peer = self.table.rows, self.table.stage, self.table.peer
        self.after_last(rows(Kind.SEND_F), stage, Kind.F)
        self.after_last(rows(Kind.SEND_B), stage, *BACKWARD)
        self.after_last(rows(Kind.EXCHANGE_F), stage, Kind.F)
        self.after_last(rows(Kind.EXCHANGE_B), peer, *BACKWARD)

    def gathers(self) -> None:
        """Passes wait for gathers of their parameters. A gather ahead waits for the part that frees its memory."""
        for gather, kind in ((Kind.GATHER, Kind.F), *((Kind.GATHER_B, kind) for kind in BACKWARD)):
            if not self.table.rows(gather).size or kind not in self.lookup.passes:
                continue
            rows = self.table.rows(kind)
            stage, microbatch, part = (column[rows] for column in self._columns())
            if kind in BACKWARD:
                part = np.where(part >= 0, self.lookup.passes[kind].count[stage, microbatch] - 1 - part, -1)
            slices = SliceIndex(self.table, gather)
            for gathered_microbatch in (microbatch, -1):
                for gathered_slice in (part, -1):
                    self.add(rows, slices.at(stage, gathered_microbatch, gathered_slice))
            self._prefetch(gather, kind)

    def _prefetch(self, gather: Kind, kind: Kind) -> None:
        """A gather of a slice waits for the part PREFETCH_DEPTH + 1 before the one that needs it."""
        rows = self.table.rows(gather)
        rows = rows[(self.table.part[rows] >= 0) & (self.table.microbatch[rows] >= 0)]
        stage, microbatch, part = (column[rows] for column in self._columns())
        if kind in BACKWARD:
            part = (self.lookup.passes[kind].count[stage, microbatch] - 1 - part).astype(np.int32)
        self.add(rows, self.lookup.part(kind, stage, microbatch, part - 1 - PREFETCH_DEPTH))

    def _columns(self) -> tuple[Int32Array, Int32Array, Int32Array]:
        return self.table.stage, self.table.microbatch, self.table.part

    def reductions(self) -> None:
        """A reduction waits for all passes that add to its gradients."""
        rows = self.table.rows(Kind.REDUCE)
        if not rows.size:
            return
        rows, microbatch = self._reduced_microbatches(rows)
        for kind in WEIGHT_KINDS:
            if kind in self.lookup.passes:
                self.add(rows, self._reduced_parts(kind, rows, microbatch))

    def _reduced_microbatches(self, rows: IndexArray) -> tuple[IndexArray, Int64Array]:
        """Each REDUCE with each microbatch whose gradients it takes: its own, or all if it is of the whole step."""
        num_microbatches = self.lookup.shape[1]
        is_whole = self.table.microbatch[rows] < 0
        all_microbatches = np.tile(np.arange(num_microbatches), int(is_whole.sum()))
        return (
            np.concatenate([rows[~is_whole], np.repeat(rows[is_whole], num_microbatches)]),
            np.concatenate([self.table.microbatch[rows[~is_whole]], all_microbatches]),
        )

    def _reduced_parts(self, kind: Kind, rows: IndexArray, microbatch: Int64Array) -> Int64Array:
        """The last row of kind that adds to each reduction's gradients, or NONE.

        Backward runs through the slices in reverse: part count - 1 - s makes the gradients of slice s. For a REDUCE of
        the whole stage, or after a whole pass, it is the last part. Raises ArgumentError for a slice without such part.
        """
        stage, slice_ = self.table.stage[rows], self.table.part[rows]
        passes = self.lookup.passes[kind]
        last, count = passes.last[stage, microbatch], passes.count[stage, microbatch]
        is_sliced = (slice_ >= 0) & (last >= 0) & (self.table.part[last] >= 0)
        part = self.lookup.part(kind, stage, microbatch, count - 1 - slice_)
        if (wrong := np.flatnonzero(is_sliced & (part < 0))).size:
            bad = wrong[0]
            whole = Action(int(stage[bad]), kind, int(microbatch[bad]))
            raise ArgumentError(f"{self.table.action(rows[bad])} has more slices than {whole}.")
        return np.where(is_sliced, part, last)

    def whole_ranks(self) -> None:
        """NORM waits for the rank's loss and gradients, STEP for its gradients and NORM."""
        for kind, needed in ((Kind.NORM, (Kind.F, *GRADIENTS)), (Kind.STEP, (*GRADIENTS, Kind.NORM))):
            of_rank = np.full(self.table.program.num_ranks, NONE, dtype=np.int32)
            rows = self.table.rows(kind)
            of_rank[self.table.rank[rows]] = rows
            for before in needed:
                rows = self.table.rows(before)
                self.add(of_rank[self.table.rank[rows]], rows)

    def in_turn(self, stream: Int32Array) -> None:
        """Tensor-parallel parts of passes that begin with one wait for the part before them on their rank."""
        communicates = np.flatnonzero(stream == TENSOR)
        begins = communicates[self.table.part[communicates] == 0]
        if not begins.size:
            return
        begins_with_one = np.zeros(self.lookup.shape[0], dtype=np.bool_)
        begins_with_one[self.table.stage[begins]] = True
        passes = np.flatnonzero(begins_with_one[self.table.stage] & np.isin(stream, (COMPUTE, TENSOR)))
        before = np.full(len(self.table), NONE, dtype=np.int32)
        before[passes[1:]] = np.where(self.table.rank[passes[1:]] == self.table.rank[passes[:-1]], passes[:-1], NONE)
        self.add(communicates, before[communicates])

    def blocking(self, stream: Int32Array) -> None:
        """A collective waits for the compute before it in its rank's row, and the compute after waits for it."""
        rank, row = self.table.rank, np.arange(len(self.table), dtype=np.int32)
        computes = holds_compute(stream)
        before = np.maximum.accumulate(np.where(computes, row, NONE))
        after = np.minimum.accumulate(np.where(computes, row, len(row))[::-1])[::-1]
        communicates = row[stream == COLLECTIVE]
        for dependent, dependency in ((communicates, before[communicates]), (after[communicates], communicates)):
            exists = (dependent < len(row)) & (dependency >= 0)
            dependent, dependency = dependent[exists], dependency[exists]
            on_one_rank = rank[dependent] == rank[dependency]
            self.add(dependent[on_one_rank], dependency[on_one_rank])
