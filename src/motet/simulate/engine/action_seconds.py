"""Seconds and stream of each action of a Program, from the StageTimes of its stages.

Actions take shares of what a few tables have (`ActionShares`). Of thousands of ranks that do the same, an action's
seconds are made when they are read: those of all actions would be hundreds of megabytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import NamedTuple

import numpy as np

from motet.core.arrays import BoolArray, Float64Array, IndexArray, Int32Array, Int64Array
from motet.core.errors import ArgumentError
from motet.schedule.dependencies import PARTNERS
from motet.schedule.program import EXCHANGES, Kind
from motet.simulate.engine.action_index import ActionIndex
from motet.simulate.engine.stage_times import Part, StageTimes
from motet.simulate.engine.streams import COMPUTE, STREAM_OF_KIND, TENSOR
from motet.simulate.engine.table import SLICED_KINDS

_OF_EDGE = ("send_s", "return_s", "exchange_s")
_OF_STAGE = ("gather_s", "reduce_s", "replicas_s")
_OF_RANK = ("norm_s", "step_s")


@dataclass(frozen=True, eq=False)
class ActionSeconds:
    """Seconds and streams of actions: stream int32 [num_actions], the others [num_actions, num_copies].

    stream:   index in STREAMS.
    held_s:   seconds of the action itself.
    tensor_s: seconds of tensor-parallel communication at its end, during which it keeps its stream.
    """

    stream: Int32Array
    held_s: Float64Array
    tensor_s: Float64Array


class _Piece(NamedTuple):
    """What some actions take: shares of rows of a table.

    rows: of the actions, int64 [n]. table: float64 [num_rows, num_copies]. at: a row of the table for each, int64 [n].
    shares: each float64 [n]; the product of the row with all of them, in their order, is what the action takes.
    """

    rows: IndexArray
    table: Float64Array
    at: Int64Array
    shares: tuple[Float64Array, ...] = ()

    def seconds(self) -> Float64Array:
        """Of all of them, [n, num_copies]. In the same memory: over all copies they are hundreds of megabytes."""
        seconds: Float64Array = self.table[self.at]
        for share in self.shares:
            seconds *= share[:, None]
        return seconds


class ActionShares:
    """Seconds and streams of actions, as shares of tables.

    stream: int32 [num_actions], index in STREAMS.
    factor: of jitter, float64 [num_actions, num_copies]; None is 1.
    """

    def __init__(self, stream: Int32Array, num_copies: int) -> None:
        self.stream, self.num_copies = stream, num_copies
        self.factor: Float64Array | None = None
        self._held: list[_Piece] = []
        self._tensor: list[_Piece] = []
        self._most: dict[tuple[int, int], float] = {}

    def hold(self, piece: _Piece) -> None:
        """Say what actions take themselves, in place of what was said of them before."""
        self._held.append(piece)

    def send(self, piece: _Piece) -> None:
        """Say what tensor-parallel communication takes at their end."""
        self._tensor.append(piece)

    def all(self) -> ActionSeconds:
        """The seconds of all actions."""
        held_s, tensor_s = np.zeros((2, len(self.stream), self.num_copies))
        for seconds, pieces in ((held_s, self._held), (tensor_s, self._tensor)):
            for piece in pieces:
                seconds[piece.rows] = piece.seconds()
        if self.factor is not None:
            held_s *= self.factor
        return ActionSeconds(self.stream, held_s, tensor_s)

    def held_s(self, action: int) -> Float64Array:
        """The seconds of an action itself, [num_copies]."""
        seconds = self._of_action(action, self._held, *self._places[0])
        return seconds if self.factor is None else seconds * self.factor[action]

    def total_s(self, action: int) -> Float64Array:
        """The seconds of an action with the communication at its end, [num_copies]."""
        held_s = self.held_s(action)
        return held_s + self._of_action(action, self._tensor, *self._places[1]) if self.sends[action] else held_s

    def most_s(self, action: int) -> float:
        """The largest of `total_s`."""
        piece, at = (places[action] for places in self._places[0])
        if self.factor is not None or self.sends[action] or piece < 0:
            return float(self.total_s(action).max())
        # Rounding keeps the order of what a share is taken of.
        key = id(self._held[piece].table), int(self._held[piece].at[at])
        if key not in self._most:
            self._most[key] = float(self._held[piece].table[key[1]].max())
        most = self._most[key]
        for share in self._held[piece].shares:
            most *= float(share[at])
        return most

    @cached_property
    def sends(self) -> BoolArray:
        """Whether an action has communication at its end, bool [num_actions]."""
        return self._places[1][0] >= 0

    def num_sending(self) -> int:
        """How many actions of all copies communicate at their end for some time."""
        num = 0
        for _, table, at, shares in self._tensor:
            of_rows = np.count_nonzero(table, axis=1)[at]
            num += int(of_rows[np.all(shares, axis=0)].sum())
        return num

    @cached_property
    def _places(self) -> tuple[tuple[Int64Array, Int64Array], tuple[Int64Array, Int64Array]]:
        """The piece that has each action, -1: none, and where in it; what is held, and what is sent."""
        return _places_of(self._held, len(self.stream)), _places_of(self._tensor, len(self.stream))

    def _of_action(self, action: int, pieces: list[_Piece], piece: Int64Array, place: Int64Array) -> Float64Array:
        if piece[action] < 0:
            return np.zeros(self.num_copies)
        _, table, at, shares = pieces[piece[action]]
        seconds: Float64Array = table[at[place[action]]]
        for share in shares:
            seconds = seconds * share[place[action]]
        return seconds


def _places_of(pieces: list[_Piece], num_actions: int) -> tuple[Int64Array, Int64Array]:
    number, place = np.full(num_actions, -1, dtype=np.int64), np.zeros(num_actions, dtype=np.int64)
    for index, piece in enumerate(pieces):
        number[piece.rows], place[piece.rows] = index, np.arange(len(piece.rows))
    return number, place


def action_seconds(
    lookup: ActionIndex, times: StageTimes, jitter: float = 0.0, seed: int = 0, num_copies: int = 1
) -> ActionSeconds:
    """Seconds and streams of all actions of a Program: `action_shares(...).all()`. O(actions * num_copies)."""
    return action_shares(lookup, times, jitter, seed, num_copies).all()


def action_shares(
    lookup: ActionIndex,
    times: StageTimes,
    jitter: float = 0.0,
    seed: int = 0,
    num_copies: int = 1,
    copies: Int64Array | None = None,
) -> ActionShares:
    """Seconds and streams of all actions of a Program, as shares. O(actions + stages * microbatches * num_copies).

    times:  of the stages of all copies, those of the first copy first.
    num_copies: how many ranks do what the Program says, each on stages of its own (`engine/alike.py`).
    copies: those that are asked for, ascending; None is all.
    jitter: sigma of a log-normal factor of mean 1 on the seconds of each action on the compute stream.
    seed:   of these factors.
    Raises ArgumentError for tables or parts that do not fit the Program.
    """
    num_asked = num_copies if copies is None else len(copies)
    spread = _Spread(lookup, _broadcast(lookup, times, num_copies, copies), num_asked)
    forward = _Shares("forward_parts", times.forward_parts, lookup.shape[0])
    spread.passes(forward, _Shares("backward_parts", times.backward_parts, lookup.shape[0]))
    spread.moves()
    spread.sliced_collectives(forward)
    spread.whole_ranks()
    if jitter:
        draw = np.random.default_rng(seed).standard_normal((num_copies, len(lookup.table))).T
        draw = draw if copies is None else draw[:, copies]
        computes = spread.stream == COMPUTE
        spread.shares.factor = np.where(computes[:, None], np.exp(jitter * draw - jitter**2 / 2), 1.0)
    return spread.shares


def _broadcast(
    lookup: ActionIndex, times: StageTimes, num_copies: int, copies: Int64Array | None
) -> Mapping[str, Float64Array]:
    """The tables of `times` by name, in the shapes that the Program needs, with an axis of copies at the end."""
    num_stages, num_edges = num_copies * lookup.shape[0], num_copies * len(lookup.sources)
    num_microbatches, num_ranks = lookup.shape[1], num_copies * lookup.table.program.num_ranks
    tables = {}
    for field in fields(times):
        table = getattr(times, field.name)
        if not isinstance(table, np.ndarray):
            continue
        axes, shape = "[num_stages, num_microbatches]", [num_stages, num_microbatches]
        if field.name in _OF_EDGE:
            axes, shape = "[num_edges, num_microbatches]", [num_edges, num_microbatches]
        elif field.name in _OF_STAGE:
            axes, shape = "[num_stages]", [num_stages]
        elif field.name in _OF_RANK:
            axes, shape = "[num_ranks]", [num_ranks]
        try:
            whole = np.broadcast_to(table, shape)
        except ValueError:
            raise ArgumentError(
                f"{field.name} has shape {list(table.shape)}; the program needs {axes} = {shape}, "
                "or what broadcasts to it."
            ) from None
        if table.size == 1:  # Most are 0 throughout.
            num_asked = num_copies if copies is None else len(copies)
            tables[field.name] = np.broadcast_to(table.ravel(), (shape[0] // num_copies, *shape[1:], num_asked))
            continue
        if num_copies == 1:  # The axis at the end is all there is to add.
            tables[field.name] = np.ascontiguousarray(whole)[..., None]
            continue
        by_copy = whole.reshape(num_copies, shape[0] // num_copies, *shape[1:])
        by_copy = by_copy if copies is None else by_copy[copies]
        tables[field.name] = np.ascontiguousarray(np.moveaxis(by_copy, 0, -1))
    return tables


class _Shares:
    """The shares of parts in the passes of stages, in flat arrays.

    first, count:     [num_stages]: the parts of a stage are first, ..., first + count - 1; count 0 is without shares.
    has_tensor:       [num_stages], whether tensor-parallel communication is in parts of its own.
    held_tensor:      [num_stages], the share of it that is in none: the other parts end with it.
    share, on_tensor: of each part.
    """

    def __init__(self, name: str, parts: Mapping[int, tuple[Part, ...]], num_stages: int) -> None:
        self.first, self.count = (np.zeros(num_stages, dtype=np.int64) for _ in range(2))
        self.has_tensor = np.zeros(num_stages, dtype=np.bool_)
        self.held_tensor = np.ones(num_stages)
        flat: list[Part] = []
        starts: dict[tuple[Part, ...], int] = {}
        on_tensor: dict[tuple[Part, ...], list[float]] = {}
        for stage, slices in parts.items():
            if not 0 <= stage < num_stages:
                raise ArgumentError(f"{name} has stage {stage}; there are {num_stages}, numbered from 0.")
            if slices not in starts:
                _check_shares(f"{name} of stage {stage}", slices)
                starts[slices] = len(flat)
                on_tensor[slices] = [part.share for part in slices if part.stream == "tensor"]
                flat += slices
            self.first[stage], self.count[stage] = starts[slices], len(slices)
            self.has_tensor[stage] = bool(on_tensor[slices])
            self.held_tensor[stage] = max(1.0 - sum(on_tensor[slices]), 0.0)
        self.share: Float64Array = np.array([part.share for part in flat] or [1.0])
        self.on_tensor = np.array([part.stream == "tensor" for part in flat] or [False])


def _check_shares(name: str, slices: tuple[Part, ...]) -> None:
    computed, sent = ([part.share for part in slices if part.stream == stream] for stream in ("compute", "tensor"))
    if not (abs(sum(computed) - 1) < 1e-6 and min(computed) >= 0):
        raise ArgumentError(f"{name}: the shares of compute are {computed}; they must be at least 0 and sum to 1.")
    if not (sum(sent) < 1 + 1e-6 and min(sent, default=0) >= 0):
        raise ArgumentError(f"{name}: the shares of tensor are {sent}; they must be at least 0, and at most 1 in sum.")


class _Spread:
    """The seconds of all actions, filled in kind by kind. times: tables of `_broadcast`."""

    def __init__(self, lookup: ActionIndex, times: Mapping[str, Float64Array], num_copies: int) -> None:
        self.lookup, self.table, self.times = lookup, lookup.table, times
        self.stream: Int32Array = STREAM_OF_KIND[self.table.kind]
        self.shares = ActionShares(self.stream, num_copies)

    def passes(self, forward: _Shares, backward: _Shares) -> None:
        """F, R, B, I and W. Recomputation is part of B or I, unless the Program has an R."""
        times, even = self.times, _Shares("", {}, self.lookup.shape[0])
        self._pass(Kind.F, times["forward_s"], times["forward_tensor_s"], forward)
        none, recompute_s = np.zeros_like(times["recompute_s"]), times["recompute_s"]
        self._pass(Kind.R, recompute_s, none, even)
        if Kind.R in self.lookup.passes:
            recompute_s = np.where(self.lookup.passes[Kind.R].count[:, :, None] > 0, 0.0, recompute_s)
        both = times["input_s"] + times["weight_s"] + recompute_s
        self._pass(Kind.B, both, times["backward_tensor_s"], backward)
        self._pass(Kind.I, times["input_s"] + recompute_s, times["backward_tensor_s"], backward)
        self._pass(Kind.W, times["weight_s"], none, even)

    def _pass(self, kind: Kind, held: Float64Array, tensor: Float64Array, shares: _Shares) -> None:
        """A part takes its share of the pass. The parts of a stage without shares take the same time."""
        if kind not in self.lookup.passes:
            return
        rows = self.table.rows(kind)
        stage, microbatch, part = self.table.stage[rows], self.table.microbatch[rows], self.table.part[rows]
        count = self.lookup.passes[kind].count[stage, microbatch]
        has_share = (part >= 0) & (shares.count[stage] > 0)
        if (wrong := np.flatnonzero(has_share & (count != shares.count[stage]))).size:
            bad, num_parts = self.table.action(rows[wrong[0]]), count[wrong[0]]
            num_shares = shares.count[bad.stage]
            raise ArgumentError(f"{bad} is one of {num_parts} parts; the times have {num_shares} of that pass.")
        index = np.where(has_share, shares.first[stage] + part, 0)
        share = np.where(has_share, shares.share[index], 1.0 / count)
        on_tensor = has_share & shares.on_tensor[index]
        at = stage * np.int64(self.lookup.shape[1]) + microbatch
        self._hold(rows, held, at, share)
        if tensor.any():
            self._hold(rows[on_tensor], tensor, at[on_tensor], share[on_tensor])
            beside = np.where(has_share, ~on_tensor * shares.held_tensor[stage], 1.0)
            self.shares.send(_Piece(rows, _rows_of(tensor), at, (share, beside)))
        else:
            self._hold(rows[on_tensor], np.zeros_like(tensor), at[on_tensor])
        self.stream[rows[on_tensor]] = TENSOR

    def moves(self) -> None:
        """Transfers and exchanges."""
        for kind in (*PARTNERS, *EXCHANGES):
            rows = self.table.rows(kind)
            name = "exchange_s" if kind in EXCHANGES else "send_s" if kind in (Kind.SEND_F, Kind.RECV_F) else "return_s"
            if rows.size:
                at = self.lookup.edge[rows] * np.int64(self.lookup.shape[1]) + self.table.microbatch[rows]
                self._hold(rows, self.times[name], at)

    def sliced_collectives(self, forward: _Shares) -> None:
        """GATHER, GATHER_B and REDUCE: a slice takes its share of the stage's collective."""
        for kind in SLICED_KINDS:
            rows = self.table.rows(kind)
            if rows.size:
                stage, part, microbatch = self.table.stage[rows], self.table.part[rows], self.table.microbatch[rows]
                shares = self._slice_shares(kind, stage, part, forward)
                self._hold(rows, *self._collective_s(kind, stage, microbatch), shares)

    def _slice_shares(self, kind: Kind, stage: Int32Array, part: Int32Array, forward: _Shares) -> Float64Array:
        """The share of each slice of parameters in its stage's collective; 1 for the whole."""
        num_stages, is_slice = self.lookup.shape[0], part >= 0
        # 1. The stages whose forward pass has a share for every slice.
        last_slice = np.full(num_stages, -1)
        np.maximum.at(last_slice, stage, part)
        has_shares = (forward.count > last_slice) & ~forward.has_tensor
        # 2. The weight of a slice: the share of the forward part with its number, else 1.
        weight = np.zeros((num_stages, max(int(part.max()), 0) + 1))
        index = np.where(has_shares[stage], forward.first[stage] + part, 0)
        weight[stage[is_slice], part[is_slice]] = np.where(has_shares[stage], forward.share[index], 1.0)[is_slice]
        # 3. Its share: weight / total. A REDUCE covers only the slices that occur, which are trainable; a GATHER covers
        # all slices, whose forward shares sum to 1.
        total = weight.sum(axis=1)[stage]
        if kind is not Kind.REDUCE:
            total = np.where(has_shares[stage], 1.0, total)
        return np.where(is_slice, weight[stage, part] / np.where(is_slice & (total > 0), total, 1.0), 1.0)

    def _collective_s(
        self, kind: Kind, stage: Int32Array, microbatch: Int32Array
    ) -> tuple[Float64Array, Int32Array | Int64Array]:
        """A table of seconds of whole collectives, and the row of each stage's. A REDUCE of no microbatch sums over
        copies if others have one.
        """
        if kind is not Kind.REDUCE:
            return self.times["gather_s"], stage
        in_microbatches = np.bincount(stage[microbatch >= 0], minlength=self.lookup.shape[0]) > 0
        over_copies = (microbatch < 0) & in_microbatches[stage]
        both = np.concatenate([self.times["reduce_s"], self.times["replicas_s"]])
        return both, stage + over_copies * self.lookup.shape[0]

    def whole_ranks(self) -> None:
        """NORM and STEP."""
        for kind, name in ((Kind.NORM, "norm_s"), (Kind.STEP, "step_s")):
            rows = self.table.rows(kind)
            self._hold(rows, self.times[name], self.table.rank[rows])

    def _hold(self, rows: IndexArray, table: Float64Array, at: Int32Array | Int64Array, *shares: Float64Array) -> None:
        self.shares.hold(_Piece(rows, _rows_of(table), at.astype(np.int64), shares))


def _rows_of(table: Float64Array) -> Float64Array:
    """A table of `_broadcast` as [num_rows, num_copies]."""
    return table.reshape(-1, table.shape[-1])
