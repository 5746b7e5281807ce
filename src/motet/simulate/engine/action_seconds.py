"""How long each action of a Program takes, and on which stream: StageTimes spread over the actions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

import numpy as np

from motet.core.arrays import Float64Array, Int32Array
from motet.core.errors import ArgumentError
from motet.schedule.dependencies import PARTNERS
from motet.schedule.program import EXCHANGES, Kind
from motet.simulate.engine.action_index import Lookup
from motet.simulate.engine.stage_times import Part, StageTimes
from motet.simulate.engine.streams import COMPUTE, OF_KIND, TENSOR
from motet.simulate.engine.table import SLICED_KINDS

_OF_EDGE = ("send_s", "return_s", "exchange_s")
_OF_STAGE = ("gather_s", "reduce_s", "replicas_s")
_OF_RANK = ("norm_s", "step_s")


@dataclass(frozen=True, eq=False)
class ActionSeconds:
    """[num_actions] each. stream: a place in STREAMS.

    held_s: the action itself. tensor_s: tensor-parallel communication at its end, for which it keeps its stream too.
    """

    stream: Int32Array
    held_s: Float64Array
    tensor_s: Float64Array


def action_seconds(lookup: Lookup, times: StageTimes, jitter: float = 0.0, seed: int = 0) -> ActionSeconds:
    """Seconds and streams of all actions of a Program. O(actions).

    jitter: spread of the log-normal factor, of mean 1, that each action on the compute stream takes longer.
    Raises ArgumentError for tables or parts that do not fit the Program.
    """
    found = _Spread(lookup, _broadcast(lookup, times))
    forward = _Shares("forward_parts", times.forward_parts, lookup.shape[0])
    found.passes(forward, _Shares("backward_parts", times.backward_parts, lookup.shape[0]))
    found.moves()
    found.units(forward)
    for kind, name in ((Kind.NORM, "norm_s"), (Kind.STEP, "step_s")):
        rows = lookup.table.rows(kind)
        found.held_s[rows] = found.times[name][lookup.table.rank[rows]]
    if jitter:
        draw = np.random.default_rng(seed).standard_normal(len(lookup.table))
        found.held_s[found.stream == COMPUTE] *= np.exp(jitter * draw - jitter**2 / 2)[found.stream == COMPUTE]
    return ActionSeconds(found.stream, found.held_s, found.tensor_s)


def _broadcast(lookup: Lookup, times: StageTimes) -> Mapping[str, Float64Array]:
    (num_stages, num_microbatches), num_edges = lookup.shape, len(lookup.sources)
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
            axes, shape = "[num_ranks]", [lookup.table.program.num_ranks]
        try:
            tables[field.name] = np.broadcast_to(table, shape)
        except ValueError:
            raise ArgumentError(
                f"{field.name} has shape {list(table.shape)}; the program needs {axes} = {shape}, "
                "or what broadcasts to it."
            ) from None
    return tables


class _Shares:
    """What the parts of each stage's passes take: the times' parts, flat.

    first, count: of each stage, [num_stages]; count 0 is a stage of which nothing is said. share, on_tensor: of a part.
    has_tensor: [num_stages], whether tensor-parallel communication is in parts of its own.
    """

    def __init__(self, name: str, parts: Mapping[int, tuple[Part, ...]], num_stages: int) -> None:
        self.first, self.count = (np.zeros(num_stages, dtype=np.int64) for _ in range(2))
        self.has_tensor = np.zeros(num_stages, dtype=np.bool_)
        flat: list[Part] = []
        starts: dict[tuple[Part, ...], int] = {}
        streams: dict[tuple[Part, ...], set[str]] = {}
        for stage, slices in parts.items():
            if not 0 <= stage < num_stages:
                raise ArgumentError(f"{name} has stage {stage}; there are {num_stages}, numbered from 0.")
            if slices not in starts:
                _check_shares(f"{name} of stage {stage}", slices)
                starts[slices], streams[slices] = len(flat), {part.stream for part in slices}
                flat += slices
            self.first[stage], self.count[stage] = starts[slices], len(slices)
            self.has_tensor[stage] = "tensor" in streams[slices]
        self.share: Float64Array = np.array([part.share for part in flat] or [1.0])
        self.on_tensor = np.array([part.stream == "tensor" for part in flat] or [False])


def _check_shares(name: str, slices: tuple[Part, ...]) -> None:
    for stream in ("compute", "tensor"):
        shares = [part.share for part in slices if part.stream == stream]
        if (shares or stream == "compute") and not (abs(sum(shares) - 1) < 1e-6 and min(shares) >= 0):
            raise ArgumentError(f"{name}: the shares of {stream} are {shares}; they must be at least 0 and sum to 1.")


class _Spread:
    def __init__(self, lookup: Lookup, times: Mapping[str, Float64Array]) -> None:
        self.lookup, self.table, self.times = lookup, lookup.table, times
        self.stream: Int32Array = OF_KIND[self.table.kind]
        self.held_s: Float64Array = np.zeros(len(self.table))
        self.tensor_s: Float64Array = np.zeros(len(self.table))

    def passes(self, forward: _Shares, backward: _Shares) -> None:
        times, even = self.times, _Shares("", {}, self.lookup.shape[0])
        self._pass(Kind.F, times["forward_s"], times["forward_tensor_s"], forward)
        none, again = np.zeros_like(times["recompute_s"]), times["recompute_s"]
        self._pass(Kind.R, again, none, even)
        if Kind.R in self.lookup.passes:
            again = np.where(self.lookup.passes[Kind.R].count > 0, 0.0, again)
        both = times["input_s"] + times["weight_s"] + again
        self._pass(Kind.B, both, times["backward_tensor_s"], backward)
        self._pass(Kind.I, times["input_s"] + again, times["backward_tensor_s"], backward)
        self._pass(Kind.W, times["weight_s"], none, even)

    def _pass(self, kind: Kind, held: Float64Array, tensor: Float64Array, shares: _Shares) -> None:
        """A part takes the share that is said; parts of which nothing is said share alike."""
        if kind not in self.lookup.passes:
            return
        rows = self.table.rows(kind)
        stage, microbatch, part = self.table.stage[rows], self.table.microbatch[rows], self.table.part[rows]
        count = self.lookup.passes[kind].count[stage, microbatch]
        said = (part >= 0) & (shares.count[stage] > 0)
        if (wrong := np.flatnonzero(said & (count != shares.count[stage]))).size:
            bad, found = self.table.action(rows[wrong[0]]), count[wrong[0]]
            there = shares.count[bad.stage]
            raise ArgumentError(f"{bad} is one of {found} parts; the times have {there} of that pass.")
        place = np.where(said, shares.first[stage] + part, 0)
        share = np.where(said, shares.share[place], 1.0 / count)
        on_tensor = said & shares.on_tensor[place]
        tensor_s = tensor[stage, microbatch] * share
        self.held_s[rows] = np.where(on_tensor, tensor_s, held[stage, microbatch] * share)
        self.tensor_s[rows] = np.where(said & shares.has_tensor[stage], 0.0, tensor_s)
        self.stream[rows[on_tensor]] = TENSOR

    def moves(self) -> None:
        for kind in (*PARTNERS, *EXCHANGES):
            rows = self.table.rows(kind)
            name = "exchange_s" if kind in EXCHANGES else "send_s" if kind in (Kind.SEND_F, Kind.RECV_F) else "return_s"
            self.held_s[rows] = self.times[name][self.lookup.edge[rows], self.table.microbatch[rows]]

    def units(self, shares: _Shares) -> None:
        """Slices of parameters share as forward's parts of the same numbers do, else alike.

        What is reduced is gradients of the slices that learn, which share among themselves; parameters are all slices'.
        """
        for kind in SLICED_KINDS:
            rows = self.table.rows(kind)
            if not rows.size:
                continue
            stage, part = self.table.stage[rows], self.table.part[rows]
            weight = np.zeros((self.lookup.shape[0], max(int(part.max()), 0) + 1))
            last = np.full(self.lookup.shape[0], -1)
            np.maximum.at(last, stage, part)
            said = (shares.count > last) & ~shares.has_tensor
            sliced = part >= 0
            place = np.where(said[stage], shares.first[stage] + part, 0)
            weight[stage[sliced], part[sliced]] = np.where(said[stage], shares.share[place], 1.0)[sliced]
            total = weight.sum(axis=1)[stage]
            if kind is not Kind.REDUCE:
                total = np.where(said[stage], 1.0, total)
            share = np.where(sliced, weight[stage, part] / np.where(sliced & (total > 0), total, 1.0), 1.0)
            self.held_s[rows] = self._collective_s(kind, stage, self.table.microbatch[rows]) * share

    def _collective_s(self, kind: Kind, stage: Int32Array, microbatch: Int32Array) -> Float64Array:
        if kind is not Kind.REDUCE:
            return self.times["gather_s"][stage]
        each = np.bincount(stage[microbatch >= 0], minlength=self.lookup.shape[0]) > 0
        over_copies = (microbatch < 0) & each[stage]
        return np.where(over_copies, self.times["replicas_s"][stage], self.times["reduce_s"][stage])
