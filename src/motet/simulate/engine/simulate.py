"""A Program and the times of its stages into a Timeline of one step.

streams.py has the streams, motet.schedule.dependencies what an action waits for, reference.py the rules of execution.
The same arguments give the same Timeline, to the bit, on every machine.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from motet.balance.backend import Backend
from motet.core.arrays import Float64Array, Int32Array, Int64Array
from motet.core.errors import ArgumentError
from motet.core.timeline import Timeline
from motet.schedule.dependencies import PARTNERS
from motet.schedule.passes import add_communication
from motet.schedule.program import COMPUTE_KINDS, EXCHANGES, Program
from motet.simulate.engine import reference
from motet.simulate.engine.action_index import ActionIndex
from motet.simulate.engine.action_seconds import ActionSeconds, action_seconds
from motet.simulate.engine.alike import AlikeTimeline, have_like_parts, of_first_rank, one_rank, run_alike
from motet.simulate.engine.backend import engine
from motet.simulate.engine.deadlock import deadlock
from motet.simulate.engine.lower import Waits, waits
from motet.simulate.engine.spans import timeline_of
from motet.simulate.engine.stage_times import StageTimes
from motet.simulate.engine.streams import COMPUTE, STREAMS, TENSOR
from motet.simulate.engine.table import CODES, ActionTable, action_table

MAX_JITTER = 2.0
"""Largest sigma. With a larger one nearly all factors are nearly 0, so some thousands of them miss the mean of 1."""


class Prepared:
    """A Program to be simulated often. All that does not depend on times is computed once. O(actions).

    Of ranks that are alike, the actions of one are enough (`engine/alike.py`).
    """

    def __init__(self, program: Program, *, whole: bool = False) -> None:
        alone = None if whole else one_rank(program)
        self.program, self.num_copies = program, 1 if alone is None else program.num_ranks
        self.lookup = ActionIndex(action_table(program if alone is None else alone))
        self._waits: tuple[Int32Array, bool, Waits] | None = None

    @cached_property
    def whole(self) -> Prepared:
        """The same Program with the actions of all ranks."""
        return self if self.num_copies == 1 else Prepared(self.program, whole=True)

    def waits(self, stream: Int32Array, overlap: bool) -> Waits:
        """The result of `lower.waits`. The last one is kept."""
        if self._waits is None or self._waits[1] != overlap or not np.array_equal(self._waits[0], stream):
            self._waits = stream, overlap, waits(self.lookup, stream, overlap)
        return self._waits[2]


def simulate(
    program: Program | Prepared,
    times: StageTimes,
    *,
    overlap: bool = True,
    jitter: float = 0.0,
    seed: int = 0,
    backend: Backend = "native",
) -> Timeline:
    """The Timeline of one step. It starts at 0; its ranks are program ranks. O(actions + dependencies).

    program: if it has no communication and sending takes time, it gets SEND and RECV first. This takes far longer than
             the simulation: for a Program that is simulated often, call add_communication and `Prepared` once.
    overlap: whether compute runs beside collectives. If False, they occupy the compute stream: all of them between two
             compute actions of a row are posted together and waited for. A SEND is never waited for by its sender.
    jitter:  sigma of a log-normal factor of mean 1 on each compute action (stragglers), drawn from `seed`.
    Raises ArgumentError for times that do not fit the Program, for a Program with missing actions, and for one that
    cannot run; the error names the actions that wait for each other.
    """
    if not 0 <= jitter <= MAX_JITTER:
        raise ArgumentError(f"jitter is {jitter}; it is the sigma of a log-normal distribution, 0 to {MAX_JITTER:g}.")
    native = engine(backend)
    prepared = program if isinstance(program, Prepared) else Prepared(program)
    if prepared.num_copies > 1:
        if native is not None and have_like_parts(times, prepared.lookup.shape[0]):
            alike = _Alike(prepared, times, overlap, jitter, seed)
            if (timeline := alike.timeline()) is not None:
                return timeline
        prepared = prepared.whole
    if _lacks_communication(prepared.lookup.table, times):
        prepared = Prepared(add_communication(prepared.program, holds_up=not overlap), whole=True)
    lookup, table = prepared.lookup, prepared.lookup.table
    seconds = action_seconds(lookup, times, jitter, seed)
    held, total_s = _held(seconds, overlap), (seconds.held_s + seconds.tensor_s)[:, 0]
    start_s: Float64Array
    end_s: Float64Array
    if native is None:
        columns = reference.run(table.program, seconds.stream.tolist(), total_s.tolist(), overlap)
        start_s, end_s = (np.array(column) for column in columns)
    else:
        needs = prepared.waits(seconds.stream, overlap)
        rank_stream: Int32Array = table.rank * len(STREAMS) + held
        start_s, end_s = native.run(rank_stream, lookup.operation, total_s, needs.dependent, needs.dependency)
    if np.isnan(end_s).any():
        circle = deadlock(lookup, prepared.waits(seconds.stream, overlap), held, end_s)
        hint = (
            "" if overlap else " without overlap; add_communication(..., holds_up=True) puts moves in an order that can"
        )
        raise ArgumentError(f"The program cannot run{hint}: {circle}.")
    return timeline_of(table, seconds, start_s, end_s)


def makespans(program: Prepared, times: StageTimes, num_islands: int, overlap: bool = True) -> Float64Array:
    """Seconds of a step of each of several islands that run the same Program, [num_islands].

    times: of the stages, edges and ranks of all islands, one after the other; parts are those of the first.
    As `simulate` finds for each, without jitter. Raises as it does.
    """
    prepared = program.whole
    if _lacks_communication(prepared.lookup.table, times):
        prepared = Prepared(add_communication(prepared.program, holds_up=not overlap), whole=True)
    lookup, table, native = prepared.lookup, prepared.lookup.table, engine("native")
    seconds = action_seconds(lookup, times, num_copies=num_islands)
    needs = prepared.waits(seconds.stream, overlap)
    rank_stream: Int32Array = table.rank * len(STREAMS) + _held(seconds, overlap)

    def makespan_s(total_s: Float64Array) -> float:
        if native is None:
            return max(reference.run(table.program, seconds.stream.tolist(), total_s.tolist(), overlap)[1], default=0.0)
        _, end_s = native.run(rank_stream, lookup.operation, total_s, needs.dependent, needs.dependency)
        return float(end_s.max(initial=0.0))

    return np.array(list(map(makespan_s, np.ascontiguousarray((seconds.held_s + seconds.tensor_s).T))))


@dataclass(frozen=True)
class _Alike:
    """A simulation of ranks that are alike. Arguments: as of `simulate`."""

    prepared: Prepared
    times: StageTimes
    overlap: bool
    jitter: float
    seed: int

    def timeline(self) -> AlikeTimeline | None:
        """The Timeline; None where actions wait for each other."""
        seconds = self._seconds()
        num_tails = int(np.count_nonzero(seconds.tensor_s)) if seconds.tensor_s.any() else 0
        num_spans, num_ranks = seconds.held_s.size + num_tails, self.prepared.num_copies
        end_s = self._ends(seconds)
        if end_s is None:
            return None
        return AlikeTimeline(num_ranks, num_spans, float(end_s.max()), self._expand, self._computing)

    def _seconds(self) -> ActionSeconds:
        lookup, times = self.prepared.lookup, of_first_rank(self.times, self.prepared.lookup.shape[0])
        return action_seconds(lookup, times, self.jitter, self.seed, self.prepared.num_copies)

    def _ends(self, seconds: ActionSeconds, start_s: Float64Array | None = None) -> Float64Array | None:
        """The end of each action on each rank, [num_actions, num_ranks], in place of `seconds.held_s`."""
        needs = self.prepared.waits(seconds.stream, self.overlap)
        total_s = seconds.held_s
        total_s += seconds.tensor_s
        runs = run_alike(self.prepared.lookup.table, _held(seconds, self.overlap), total_s, needs, start_s)
        return total_s if runs else None

    def _computing(self) -> tuple[Float64Array, Float64Array]:
        """What ranks compute, [num_ranks], and the seconds of their actions, [num_actions, num_ranks]."""
        seconds = self._seconds()
        kinds = [CODES[kind] for kind in COMPUTE_KINDS]
        computes = (seconds.stream == COMPUTE) & np.isin(self.prepared.lookup.table.kind, kinds)
        busy_s, total_s = np.zeros(self.prepared.num_copies), seconds.held_s
        for action in np.flatnonzero(computes).tolist():  # Without a copy of all of them.
            busy_s += total_s[action]
        total_s += seconds.tensor_s
        return busy_s, total_s

    def _expand(self, ranks: Int64Array) -> Timeline:
        """The spans of some ranks. Simulating twice takes less than keeping what a search hardly reads."""
        seconds = self._seconds()
        start_s = np.empty_like(seconds.held_s)
        end_s = self._ends(replace(seconds, held_s=seconds.held_s.copy()), start_s)
        assert end_s is not None, "what was simulated once runs"
        columns = (column[:, ranks].T for column in (seconds.held_s, seconds.tensor_s, start_s, end_s))
        held_s, tensor_s, starts_s, ends_s = (np.ascontiguousarray(column).reshape(-1, 1) for column in columns)
        tiled = ActionSeconds(np.tile(seconds.stream, len(ranks)), held_s, tensor_s)
        return timeline_of(action_table(self.prepared.program, ranks), tiled, starts_s[:, 0], ends_s[:, 0])


def _held(seconds: ActionSeconds, overlap: bool) -> Int32Array:
    """The stream that each action occupies."""
    return seconds.stream if overlap else np.where(seconds.stream == TENSOR, np.int32(COMPUTE), seconds.stream)


def _lacks_communication(table: ActionTable, times: StageTimes) -> bool:
    stages = table.program.stages
    crosses = any(stages[source].rank != stages[sink].rank for source, sink in table.program.edges)
    takes_time = bool(times.send_s.any() or times.return_s.any())
    return crosses and takes_time and not any(table.rows(kind).size for kind in (*PARTNERS, *EXCHANGES))
