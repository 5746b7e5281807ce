"""A Program into arrays for the native engine: streams, operations, and what waits for what.

The rules are those of motet.schedule.dependencies, said once more over whole columns; tests hold both to each other.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from motet.core.arrays import IndexArray, Int32Array
from motet.core.errors import ArgumentError
from motet.schedule.dependencies import GRADIENTS, PREFETCH_DEPTH
from motet.schedule.program import Action, Kind
from motet.simulate.engine.action_index import NONE, Lookup, SlicedActions
from motet.simulate.engine.streams import COMPUTE, TENSOR, holds_compute

BACKWARD = (Kind.B, Kind.I)
WEIGHT_KINDS = (Kind.B, Kind.W)
"""Kinds that add to the gradients of weights."""


@dataclass(frozen=True, eq=False)
class Waits:
    """Action dependent[i] waits for all of operation dependency[i]; int32 [num_dependencies]."""

    dependent: Int32Array
    dependency: Int32Array


def waits(lookup: Lookup, stream: Int32Array, overlap: bool) -> Waits:
    """What every action waits for beside its stream, as Dependencies.of says it.

    overlap: False adds what makes communication hold the compute stream: it begins when the compute before it in its
             rank's list has ended, and the compute after it begins when it has ended.

    Tensor-parallel communication that is in parts of its own waits for the part of its rank before it, whichever pass
    that belongs to: a rank does not communicate ahead for the next pass.
    """
    found = _Waits(lookup)
    found.forward()
    found.backward()
    found.moves()
    found.gathers()
    found.reductions()
    found.whole_ranks()
    found.in_turn(stream)
    if not overlap:
        found.blocking(stream)
    return Waits(np.concatenate(found.dependents), lookup.operation[np.concatenate(found.dependencies)])


class _Waits:
    def __init__(self, lookup: Lookup) -> None:
        self.lookup, self.table = lookup, lookup.table
        self.dependents: list[Int32Array] = [np.empty(0, dtype=np.int32)]
        self.dependencies: list[Int32Array] = [np.empty(0, dtype=np.int32)]

    def add(self, dependent: ArrayLike, dependency: ArrayLike) -> None:
        """Pairs, but for those of which either is NONE."""
        after, before = np.asarray(dependent, dtype=np.int32), np.asarray(dependency, dtype=np.int32)
        there = (after >= 0) & (before >= 0)
        self.dependents.append(after[there])
        self.dependencies.append(before[there])

    def first(self, kind: Kind) -> Int32Array:
        return self.lookup.passes[kind].first if kind in self.lookup.passes else self._none()

    def last(self, kind: Kind) -> Int32Array:
        return self.lookup.passes[kind].last if kind in self.lookup.passes else self._none()

    def _none(self) -> Int32Array:
        return np.full(self.lookup.shape, NONE, dtype=np.int32)

    def after_last(self, rows: IndexArray, stage: Int32Array, *kinds: Kind) -> None:
        """Rows wait for the ends of passes of these kinds, of their own microbatches."""
        for kind in kinds:
            if kind in self.lookup.passes:
                self.add(rows, self.last(kind)[stage[rows], self.table.microbatch[rows]])

    def parts(self, kind: Kind) -> None:
        """A part waits for the part before it."""
        found = self.lookup.passes[kind]
        later = np.flatnonzero(self.table.part[found.at] > 0)
        self.add(found.at[later], found.at[later - 1])

    def across(self, first: Int32Array, last: list[Int32Array], moved: tuple[Kind, Kind]) -> None:
        """Passes wait for what crosses their edges: received, exchanged or, failing both, the other stage's pass.

        first, last: by edge and microbatch.
        """
        by_receipt, by_exchange = (self.lookup.on_edge.get(kind) for kind in moved)
        told = np.full(first.shape, NONE, dtype=np.int32)
        for rows in (by_exchange, by_receipt):
            if rows is not None:
                told = np.where(rows >= 0, rows, told)
        self.add(first, told)
        for rows in last:
            self.add(first, np.where(told >= 0, NONE, rows))

    def forward(self) -> None:
        if Kind.F in self.lookup.passes:
            inputs = self.first(Kind.F)[self.lookup.sinks], [self.last(Kind.F)[self.lookup.sources]]
            self.across(*inputs, (Kind.RECV_F, Kind.EXCHANGE_F))
            self.parts(Kind.F)
        if Kind.R in self.lookup.passes:
            self.add(self.first(Kind.R), self.last(Kind.F))
            self.parts(Kind.R)

    def backward(self) -> None:
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
        rows, stage, peer = self.table.rows, self.table.stage, self.table.peer
        self.after_last(rows(Kind.SEND_F), stage, Kind.F)
        self.after_last(rows(Kind.SEND_B), stage, *BACKWARD)
        self.after_last(rows(Kind.EXCHANGE_F), stage, Kind.F)
        self.after_last(rows(Kind.EXCHANGE_B), peer, *BACKWARD)

    def gathers(self) -> None:
        """Passes wait for parameters, and gathers ahead for room."""
        for gather, kind in ((Kind.GATHER, Kind.F), *((Kind.GATHER_B, kind) for kind in BACKWARD)):
            if not self.table.rows(gather).size or kind not in self.lookup.passes:
                continue
            rows = self.table.rows(kind)
            stage, microbatch, part = (column[rows] for column in self._columns())
            if kind in BACKWARD:
                part = np.where(part >= 0, self.lookup.passes[kind].count[stage, microbatch] - 1 - part, -1)
            unit = SlicedActions(self.table, gather)
            for of_microbatch in (microbatch, -1):
                for of_part in (part, -1):
                    self.add(rows, unit.at(stage, of_microbatch, of_part))
            self._ahead(gather, kind)

    def _ahead(self, gather: Kind, kind: Kind) -> None:
        rows = self.table.rows(gather)
        rows = rows[(self.table.part[rows] >= 0) & (self.table.microbatch[rows] >= 0)]
        stage, microbatch, part = (column[rows] for column in self._columns())
        if kind in BACKWARD:
            part = (self.lookup.passes[kind].count[stage, microbatch] - 1 - part).astype(np.int32)
        self.add(rows, self.lookup.part(kind, stage, microbatch, part - 1 - PREFETCH_DEPTH))

    def _columns(self) -> tuple[Int32Array, Int32Array, Int32Array]:
        return self.table.stage, self.table.microbatch, self.table.part

    def reductions(self) -> None:
        """A slice of the gradients is whole when all passes that add to it are over."""
        rows = self.table.rows(Kind.REDUCE)
        if not rows.size:
            return
        num_microbatches = self.lookup.shape[1]
        step = self.table.microbatch[rows] < 0
        every = np.concatenate([rows[~step], np.repeat(rows[step], num_microbatches)])
        of = np.tile(np.arange(num_microbatches), int(step.sum()))
        microbatch = np.concatenate([self.table.microbatch[rows[~step]], of])
        stage, part = self.table.stage[every], self.table.part[every]
        for kind in WEIGHT_KINDS:
            if kind not in self.lookup.passes:
                continue
            found = self.lookup.passes[kind]
            last, count = found.last[stage, microbatch], found.count[stage, microbatch]
            sliced = (part >= 0) & (last >= 0) & (self.table.part[last] >= 0)
            slices = self.lookup.part(kind, stage, microbatch, count - 1 - part)
            if (wrong := np.flatnonzero(sliced & (slices < 0))).size:
                bad = wrong[0]
                absent = Action(int(stage[bad]), kind, int(microbatch[bad]), int(count[bad] - 1 - part[bad]))
                raise ArgumentError(f"{self.table.action(every[bad])} has more slices than {absent._replace(part=-1)}.")
            self.add(every, np.where(sliced, slices, last))

    def whole_ranks(self) -> None:
        """The norm waits for the rank's loss and gradients, the optimizer for gradients and norm."""
        for kind, needed in ((Kind.NORM, (Kind.F, *GRADIENTS)), (Kind.STEP, (*GRADIENTS, Kind.NORM))):
            of_rank = np.full(self.table.program.num_ranks, NONE, dtype=np.int32)
            rows = self.table.rows(kind)
            of_rank[self.table.rank[rows]] = rows
            for before in needed:
                rows = self.table.rows(before)
                self.add(of_rank[self.table.rank[rows]], rows)

    def in_turn(self, stream: Int32Array) -> None:
        communicates = np.flatnonzero(stream == TENSOR)
        if not communicates.size:
            return
        parted = np.zeros(self.lookup.shape[0], dtype=np.bool_)
        parted[self.table.stage[communicates]] = True
        passes = np.flatnonzero(parted[self.table.stage] & np.isin(stream, (COMPUTE, TENSOR)))
        before = np.full(len(self.table), NONE, dtype=np.int32)
        before[passes[1:]] = np.where(self.table.rank[passes[1:]] == self.table.rank[passes[:-1]], passes[:-1], NONE)
        self.add(communicates, before[communicates])

    def blocking(self, stream: Int32Array) -> None:
        rank, row = self.table.rank, np.arange(len(self.table), dtype=np.int32)
        computes = holds_compute(stream)
        before = np.maximum.accumulate(np.where(computes, row, NONE))
        after = np.minimum.accumulate(np.where(computes, row, len(row))[::-1])[::-1]
        communicates = row[~computes]
        for dependent, dependency in ((communicates, before[communicates]), (after[communicates], communicates)):
            there = (dependent < len(row)) & (dependency >= 0)
            dependent, dependency = dependent[there], dependency[there]
            alike = rank[dependent] == rank[dependency]
            self.add(dependent[alike], dependency[alike])
