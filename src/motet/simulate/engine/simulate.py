"""A Program and the times of its stages into a Timeline of one step.

streams.py has the streams, motet.schedule.dependencies what an action waits for, reference.py the rules of execution.
The same arguments give the same Timeline, to the bit, on every machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial

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
from motet.simulate.engine.action_seconds import ActionSeconds, ActionShares, action_seconds, action_shares
from motet.simulate.engine.alike import AlikeTimeline, have_like_parts, of_first_rank, one_rank, run_alike
from motet.simulate.engine.backend import engine
from motet.simulate.engine.deadlock import Waiting, deadlock
from motet.simulate.engine.lower import Waits, waits
from motet.simulate.engine.meetings import MetPasses, MetRows
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
    return simulate_together(prepared, [times], None, overlap=overlap, jitter=jitter, seeds=[seed], backend=backend)[0]


def simulate_together(
    program: Prepared,
    times: Sequence[StageTimes],
    meeting: MetPasses | None,
    *,
    overlap: bool = True,
    jitter: float = 0.0,
    seeds: Sequence[int] = (),
    backend: Backend = "native",
) -> list[Timeline]:
    """The Timelines of several islands that run the same Program, and some passes together.

    times, seeds: of each island; without seeds they count from 0.
    meeting:      which passes; None is none.
    Other arguments, and what it raises: as of `simulate`.
    """
    prepared = _communicating(program.whole, times, overlap)
    table = prepared.lookup.table
    seconds = [
        action_seconds(prepared.lookup, each, jitter, seed) for each, seed in zip(times, seeds or range(len(times)))
    ]
    totals_s = np.stack([(each.held_s + each.tensor_s)[:, 0] for each in seconds])
    start_s, end_s = run_copies(prepared, seconds[0].stream, totals_s, overlap, meeting, backend)
    return [timeline_of(table, *of_island) for of_island in zip(seconds, start_s, end_s)]


def makespans(
    program: Prepared, times: StageTimes, num_islands: int, overlap: bool = True, meeting: MetPasses | None = None
) -> Float64Array:
    """Seconds of a step of each of several islands that run the same Program, [num_islands].

    times:   of the stages, edges and ranks of all islands, one after the other; parts are those of the first.
    meeting: as of `simulate_together`.
    As `simulate` finds for each, without jitter. Raises as it does.
    """
    prepared = _communicating(program.whole, [times], overlap)
    seconds = action_seconds(prepared.lookup, times, num_copies=num_islands)
    totals_s = np.ascontiguousarray((seconds.held_s + seconds.tensor_s).T)
    _, ends_s = run_copies(prepared, seconds.stream, totals_s, overlap, meeting)
    makespans_s: Float64Array = ends_s.max(axis=1, initial=0.0)
    return makespans_s


def run_copies(
    prepared: Prepared,
    stream: Int32Array,
    totals_s: Float64Array,
    overlap: bool,
    meeting: MetPasses | None = None,
    backend: Backend = "native",
) -> tuple[Float64Array, Float64Array]:
    """Start and end of each action in each copy of a Program, [num_copies, num_actions] each.

    prepared: with the actions of all ranks.
    stream:   int32 [num_actions], as of `ActionSeconds`. totals_s: of each action, [num_copies, num_actions].
    meeting:  as of `simulate_together`; None: each copy runs by itself. Raises ArgumentError if it cannot run.
    """
    lookup, native, shape = prepared.lookup, engine(backend), totals_s.shape
    met = None if meeting is None else MetRows.of(lookup, meeting.number)
    own_s = None if meeting is None else meeting.own_s(lookup.table, totals_s)
    if native is None and meeting is not None and own_s is not None:
        of_sides = own_s[0].ravel().tolist(), own_s[1].ravel().tolist()
        given = stream.tolist() * shape[0], totals_s.ravel().tolist(), overlap, meeting.number.tolist(), of_sides
        columns = [reference.run(lookup.table.program, *given)]
    elif native is None:
        columns = [reference.run(lookup.table.program, stream.tolist(), each.tolist(), overlap) for each in totals_s]
    else:
        waiting = _waiting(prepared, stream, overlap, met)
        of_rows = totals_s if met is None or own_s is None else met.seconds(totals_s, own_s).reshape(1, -1)
        of_streams, needs = (waiting.stream, waiting.operation), (waiting.dependent, waiting.dependency)
        columns = [native.run(*of_streams, each, *needs) for each in of_rows]
    starts_s, ends_s = (np.array(each) for each in zip(*columns))
    if np.isnan(ends_s).any():
        ended_s = next(each for each in ends_s if np.isnan(each).any())
        circle = deadlock(lookup.table, _waiting(prepared, stream, overlap, met), ended_s)
        hint = (
            "" if overlap else " without overlap; add_communication(..., holds_up=True) puts moves in an order that can"
        )
        raise ArgumentError(f"The program cannot run{hint}: {circle}.")
    if met is not None:
        starts_s = starts_s.reshape(shape[0], -1)[:, met.first]
        ends_s = ends_s.reshape(shape[0], -1)[:, met.last]
    return starts_s.reshape(shape), ends_s.reshape(shape)


def _waiting(prepared: Prepared, stream: Int32Array, overlap: bool, met: MetRows | None) -> Waiting:
    """What the rows of one copy, or of those that meet, wait for."""
    lookup, needs = prepared.lookup, prepared.waits(stream, overlap)
    held: Int32Array = lookup.table.rank * np.int32(len(STREAMS)) + _held(stream, overlap)
    if met is None:
        every = np.arange(len(lookup.table), dtype=np.int32)
        return Waiting(every, held, lookup.operation, needs.dependent, needs.dependency)
    copies = np.arange(len(met.operation), dtype=np.int32)[:, None]
    of_rows = held[met.action] + copies * np.int32(len(STREAMS) * lookup.table.program.num_ranks)
    action = np.tile(met.action, len(copies))
    return Waiting(action, of_rows.ravel(), met.operation.ravel(), *met.waits(needs))


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
        shares, num_ranks = self._shares(), self.prepared.num_copies
        found = self._run(shares)
        if found is None:
            return None
        meetings, makespan_s = found
        num_spans = len(shares.stream) * num_ranks + shares.num_sending()
        return AlikeTimeline(num_ranks, num_spans, makespan_s, partial(self._expand, meetings), self._computing)

    def _shares(self, ranks: Int64Array | None = None) -> ActionShares:
        lookup, times = self.prepared.lookup, of_first_rank(self.times, self.prepared.lookup.shape[0])
        return action_shares(lookup, times, self.jitter, self.seed, self.prepared.num_copies, ranks)

    def _run(
        self,
        shares: ActionShares,
        meetings: Float64Array | None = None,
        kept: tuple[Float64Array, Float64Array] | None = None,
    ) -> tuple[Float64Array, float] | None:
        """`run_alike`."""
        needs, stream = self.prepared.waits(shares.stream, self.overlap), _held(shares.stream, self.overlap)
        return run_alike(self.prepared.lookup.table, stream, shares, needs, meetings, kept)

    def _computing(self) -> Float64Array:
        """What ranks compute, the sum of all that their actions take, and another sum of it, [3, num_ranks]."""
        shares, kinds = self._shares(), [CODES[kind] for kind in COMPUTE_KINDS]
        computes = (shares.stream == COMPUTE) & np.isin(self.prepared.lookup.table.kind, kinds)
        told = np.zeros((3, self.prepared.num_copies))
        weights = np.linspace(0.0, 1.0, len(computes)).tolist()
        for action, (weight, is_computing) in enumerate(zip(weights, computes.tolist())):
            total_s = shares.total_s(action)
            if is_computing:
                told[0] += shares.held_s(action)
            told[1] += total_s
            told[2] += weight * total_s
        return told

    def _expand(self, meetings: Float64Array, ranks: Int64Array) -> Timeline:
        """The spans of some ranks, which meet the others as they did. Simulating these anew takes less than keeping
        what a search hardly reads."""
        shares = self._shares(ranks)
        seconds = shares.all()
        start_s, end_s = np.empty((2, *seconds.held_s.shape))
        self._run(shares, meetings, (start_s, end_s))
        columns = (column.T for column in (seconds.held_s, seconds.tensor_s, start_s, end_s))
        held_s, tensor_s, starts_s, ends_s = (np.ascontiguousarray(column).reshape(-1, 1) for column in columns)
        tiled = ActionSeconds(np.tile(seconds.stream, len(ranks)), held_s, tensor_s)
        return timeline_of(action_table(self.prepared.program, ranks), tiled, starts_s[:, 0], ends_s[:, 0])


def _held(stream: Int32Array, overlap: bool) -> Int32Array:
    """The stream that each action occupies. stream: as of `ActionSeconds`."""
    return stream if overlap else np.where(stream == TENSOR, np.int32(COMPUTE), stream)


def _communicating(prepared: Prepared, times: Sequence[StageTimes], overlap: bool) -> Prepared:
    """The Program, with SEND and RECV if it lacks them and sending takes time in any of the islands."""
    if not any(_lacks_communication(prepared.lookup.table, each) for each in times):
        return prepared
    return Prepared(add_communication(prepared.program, holds_up=not overlap), whole=True)


def _lacks_communication(table: ActionTable, times: StageTimes) -> bool:
    stages = table.program.stages
    crosses = any(stages[source].rank != stages[sink].rank for source, sink in table.program.edges)
    takes_time = bool(times.send_s.any() or times.return_s.any())
    return crosses and takes_time and not any(table.rows(kind).size for kind in (*PARTNERS, *EXCHANGES))
