"""How long each action of a Program takes, and on which stream: StageTimes spread over the actions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from motet.core.errors import ArgumentError
from motet.schedule.dependencies import PARTNERS
from motet.schedule.program import Kind
from motet.simulate.lookup import Lookup
from motet.simulate.streams import COMPUTE, OF_KIND, TENSOR
from motet.simulate.table import EXCHANGES, UNITS, Ints, Rows
from motet.simulate.times import Part, StageTimes, Table

Seconds = NDArray[np.float64]
_OF_EDGE = ("send_s", "return_s", "exchange_s")
_OF_STAGE = ("gather_s", "reduce_s")


@dataclass(frozen=True, eq=False)
class ActionSeconds:
    """[num_actions] each. stream: a place in STREAMS.

    held_s: the action itself. tensor_s: tensor-parallel communication at its end, for which it keeps its stream too.
    """

    stream: Ints
    held_s: Seconds
    tensor_s: Seconds


def action_seconds(lookup: Lookup, times: StageTimes, jitter: float = 0.0, seed: int = 0) -> ActionSeconds:
    """Seconds and streams of all actions of a Program. O(actions).

    jitter: spread of the log-normal factor, of mean 1, that each action on the compute stream takes longer.
    Raises ArgumentError for tables or parts that do not fit the Program.
    """
    found = _Spread(lookup, _broadcast(lookup, times))
    found.passes(times)
    found.moves()
    found.units(times.forward_parts)
    rows = lookup.table.rows(Kind.STEP)
    found.held_s[rows] = found.times["step_s"][lookup.table.rank[rows]]
    if jitter:
        draw = np.random.default_rng(seed).standard_normal(len(lookup.table))
        found.held_s[found.stream == COMPUTE] *= np.exp(jitter * draw - jitter**2 / 2)[found.stream == COMPUTE]
    return ActionSeconds(found.stream, found.held_s, found.tensor_s)


def _broadcast(lookup: Lookup, times: StageTimes) -> Mapping[str, Table]:
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
        elif field.name == "step_s":
            axes, shape = "[num_ranks]", [lookup.table.program.num_ranks]
        try:
            tables[field.name] = np.broadcast_to(table, shape)
        except ValueError:
            raise ArgumentError(
                f"{field.name} has shape {list(table.shape)}; the program needs {axes} = {shape}, "
                "or what broadcasts to it."
            ) from None
    return tables


class _Spread:
    def __init__(self, lookup: Lookup, times: Mapping[str, Table]) -> None:
        self.lookup, self.table, self.times = lookup, lookup.table, times
        self.stream: Ints = OF_KIND[self.table.kind]
        self.held_s: Seconds = np.zeros(len(self.table))
        self.tensor_s: Seconds = np.zeros(len(self.table))

    def passes(self, times: StageTimes) -> None:
        table = self.times
        self._pass(Kind.F, table["forward_s"], table["forward_tensor_s"], times.forward_parts)
        again = table["recompute_s"]
        self._pass(Kind.R, again, None, {})
        if Kind.R in self.lookup.passes:
            again = np.where(self.lookup.passes[Kind.R].count > 0, 0.0, again)
        backward_tensor = table["backward_tensor_s"]
        both = table["input_s"] + table["weight_s"] + again
        self._pass(Kind.B, both, backward_tensor, times.backward_parts)
        self._pass(Kind.I, table["input_s"] + again, backward_tensor, times.backward_parts)
        self._pass(Kind.W, table["weight_s"], None, {})

    def _pass(self, kind: Kind, held: Table, tensor: Table | None, parts: Mapping[int, tuple[Part, ...]]) -> None:
        """A part takes the share that is said; parts of which nothing is said share alike."""
        if kind not in self.lookup.passes:
            return
        rows = self.table.rows(kind)
        pass_ = self.table.stage[rows], self.table.microbatch[rows]
        part, count = self.table.part[rows], self.lookup.passes[kind].count[pass_]
        share = 1.0 / count
        on_tensor = np.zeros(len(rows), dtype=np.bool_)
        said = np.zeros(len(rows), dtype=np.bool_)
        for stage, slices in parts.items():
            of_stage = np.flatnonzero((pass_[0] == stage) & (part >= 0))
            if not of_stage.size:
                continue
            if (wrong := np.flatnonzero(count[of_stage] != len(slices))).size:
                action, found = self.table.action(rows[of_stage[wrong[0]]]), count[of_stage[wrong[0]]]
                raise ArgumentError(f"{action} is one of {found} parts; the times have {len(slices)} of that pass.")
            share[of_stage] = np.array([slice_.share for slice_ in slices])[part[of_stage]]
            on_tensor[of_stage] = np.array([slice_.stream == "tensor" for slice_ in slices])[part[of_stage]]
            said[of_stage] = True
        seconds = held[pass_]
        if tensor is not None:
            self.tensor_s[rows] = np.where(said, 0.0, tensor[pass_] * share)
            seconds = np.where(on_tensor, tensor[pass_], seconds)
        self.held_s[rows] = seconds * share
        self.stream[rows[on_tensor]] = TENSOR

    def moves(self) -> None:
        for kind in (*PARTNERS, *EXCHANGES):
            rows = self.table.rows(kind)
            name = "exchange_s" if kind in EXCHANGES else "send_s" if kind in (Kind.SEND_F, Kind.RECV_F) else "return_s"
            self.held_s[rows] = self.times[name][self.lookup.edge[rows], self.table.microbatch[rows]]

    def units(self, parts: Mapping[int, tuple[Part, ...]]) -> None:
        """A slice of parameters takes the share of forward's part of the same number."""
        for kind in UNITS:
            rows = self.table.rows(kind)
            seconds = self.times["reduce_s" if kind is Kind.REDUCE else "gather_s"]
            self.held_s[rows] = seconds[self.table.stage[rows]] * self._share_of_unit(rows, parts)

    def _share_of_unit(self, rows: Rows, parts: Mapping[int, tuple[Part, ...]]) -> Seconds:
        stage, part = self.table.stage[rows], self.table.part[rows]
        count = np.ones(self.lookup.shape[0], dtype=np.int32)
        np.maximum.at(count, stage, part + 1)
        share = np.where(part >= 0, 1.0 / count[stage], 1.0)
        for of, slices in parts.items():
            of_stage = np.flatnonzero((stage == of) & (part >= 0))
            if of_stage.size and count[of] == len(slices) and all(slice_.stream == "compute" for slice_ in slices):
                share[of_stage] = np.array([slice_.share for slice_ in slices])[part[of_stage]]
        return share
