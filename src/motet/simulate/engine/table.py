"""The actions of a Program as columns of integers, so that the simulator computes on all of them at once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from motet.core.arrays import BoolArray, IndexArray, Int32Array, Int64Array
from motet.core.errors import ArgumentError
from motet.schedule.dependencies import PARTNERS
from motet.schedule.program import EXCHANGES, Action, AlikeItems, AlikeRows, Kind, Program, Row
from motet.simulate.engine.backend import native_engine

KINDS = tuple(Kind)
CODES: Mapping[str, int] = {kind: code for code, kind in enumerate(KINDS)}
PASSES = (Kind.F, Kind.B, Kind.I, Kind.W, Kind.R)
SLICED_KINDS = (Kind.GATHER, Kind.GATHER_B, Kind.REDUCE)
"""Kinds whose parts are slices of the stage's parameters."""


@dataclass(frozen=True, eq=False)
class ActionTable:
    """The actions of a Program as columns, int32 [num_actions] each: rank by rank, in the order of the rows.

    kind: index in KINDS. The other columns are as in `Action`.
    """

    program: Program
    rank: Int32Array
    stage: Int32Array
    kind: Int32Array
    microbatch: Int32Array
    part: Int32Array
    peer: Int32Array

    def __len__(self) -> int:
        return len(self.rank)

    @cached_property
    def _rows(self) -> Mapping[Kind, IndexArray]:
        codes = np.flatnonzero(np.bincount(self.kind, minlength=len(KINDS)))
        return {KINDS[code]: np.flatnonzero(self.kind == code) for code in codes}

    def rows(self, kind: Kind) -> IndexArray:
        """The rows of a kind, ascending."""
        return self._rows.get(kind, np.empty(0, dtype=np.intp))

    def action(self, row: int) -> Action:
        """The action in a row."""
        columns = (self.microbatch, self.part, self.peer)
        microbatch, part, peer = (int(column[row]) for column in columns)
        return Action(int(self.stage[row]), KINDS[self.kind[row]], microbatch, part, peer)


def action_table(program: Program, ranks: Int64Array | None = None) -> ActionTable:
    """The ActionTable of a Program. Raises ArgumentError for a number that is out of range. O(actions).

    ranks: only their actions, ascending, in a Program of ranks that are alike; by default all.
    """
    rows = program.actions
    if isinstance(rows, AlikeRows):
        columns = _tiled(rows, np.arange(len(rows)) if ranks is None else ranks)
    else:
        columns = _columns(rows)
    table = ActionTable(program, *columns)
    _check(table)
    return table


def _tiled(rows: AlikeRows, ranks: Int64Array) -> tuple[Int32Array, ...]:
    _, *columns = _columns((rows.first,))
    stage, kind, microbatch, part, peer = (np.tile(column, len(ranks)) for column in columns)
    rank = np.repeat(ranks.astype(np.int32), len(rows.first))
    first = rank * rows.num_stages
    return rank, stage + first, kind, microbatch, part, np.where(peer >= 0, peer + first, peer)


def _columns(actions: tuple[Row, ...]) -> tuple[Int32Array, ...]:
    """rank, stage, kind, microbatch, part and peer."""
    engine = native_engine()
    try:
        if engine is not None:
            return tuple(engine.columns(actions, CODES))
        rows = [(rank, one.stage, CODES[one.kind], *one[2:]) for rank, row in enumerate(actions) for one in row]
        return tuple(np.array(rows, dtype=np.int32).reshape(-1, 6).T.copy())
    except (ValueError, OverflowError) as error:
        raise ArgumentError("an Action of the Program has a number that no int32 holds; they count from 0.") from error


def _check(table: ActionTable) -> None:
    program = table.program
    stage_ranks = _ranks_of(program)
    _check_range(table, "stage", table.stage, KINDS, program.num_stages)
    if (wrong := np.flatnonzero(stage_ranks[table.stage] != table.rank)).size:
        row = wrong[0]
        rank, right = table.rank[row], stage_ranks[table.stage[row]]
        raise ArgumentError(f"{table.action(row)} is in the list of rank {rank}; its stage is on rank {right}.")
    _check_range(table, "microbatch", table.microbatch, (*PASSES, *PARTNERS, *EXCHANGES), program.num_microbatches)
    _check_range(table, "peer", table.peer, (*PARTNERS, *EXCHANGES), program.num_stages)
    if (wrong := np.flatnonzero((table.peer >= 0) & ~_among((*PARTNERS, *EXCHANGES))[table.kind])).size:
        raise ArgumentError(f"{table.action(wrong[0])} has a peer; only sends, receives and exchanges have one.")
    if (wrong := np.flatnonzero((table.part >= 0) & ~_among((*PASSES, *SLICED_KINDS))[table.kind])).size:
        raise ArgumentError(f"{table.action(wrong[0])} is a part; only passes, gathers and reductions have parts.")


def _ranks_of(program: Program) -> Int32Array:
    """The rank of each stage, [num_stages]."""
    if isinstance(program.stages, AlikeItems):
        return np.repeat(np.arange(program.stages.num_ranks, dtype=np.int32), len(program.stages.first))
    return np.array([stage.rank for stage in program.stages], dtype=np.int32)


def _among(kinds: Iterable[Kind]) -> BoolArray:
    """Whether a kind is one of these, by code."""
    kinds = set(kinds)
    return np.array([kind in kinds for kind in KINDS])


def _check_range(table: ActionTable, name: str, column: Int32Array, needed_by: Iterable[Kind], stop: int) -> None:
    least = np.where(_among(needed_by), 0, -1)
    if (wrong := np.flatnonzero((column < least[table.kind]) | (column >= stop))).size:
        row = wrong[0]
        kind, rank = KINDS[table.kind[row]], table.rank[row]
        raise ArgumentError(f"{kind} on rank {rank} has {name} {column[row]}; there are {stop}, numbered from 0.")
