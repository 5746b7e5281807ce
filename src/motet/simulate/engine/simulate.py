"""A Program and the times of its stages into a Timeline of one step.

streams.py has the streams, motet.schedule.dependencies what an action waits for, reference.py the rules of execution.
The same arguments give the same Timeline, to the bit, on every machine.
"""

from __future__ import annotations

import numpy as np

from motet.balance.backend import Backend
from motet.core.arrays import Float64Array, Int32Array
from motet.core.errors import ArgumentError
from motet.core.timeline import Timeline
from motet.schedule.dependencies import PARTNERS
from motet.schedule.passes import add_communication
from motet.schedule.program import EXCHANGES, Program
from motet.simulate.engine import reference
from motet.simulate.engine.action_index import ActionIndex
from motet.simulate.engine.action_seconds import action_seconds
from motet.simulate.engine.backend import engine
from motet.simulate.engine.deadlock import deadlock
from motet.simulate.engine.lower import Waits, waits
from motet.simulate.engine.spans import timeline_of
from motet.simulate.engine.stage_times import StageTimes
from motet.simulate.engine.streams import COMPUTE, STREAMS, TENSOR
from motet.simulate.engine.table import ActionTable, action_table

MAX_JITTER = 2.0
"""Largest sigma. With a larger one nearly all factors are nearly 0, so some thousands of them miss the mean of 1."""


class Prepared:
    """A Program to be simulated often. All that does not depend on times is computed once. O(actions)."""

    def __init__(self, program: Program) -> None:
        self.lookup = ActionIndex(action_table(program))
        self._waits: tuple[Int32Array, bool, Waits] | None = None

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
    if _lacks_communication(prepared.lookup.table, times):
        prepared = Prepared(add_communication(prepared.lookup.table.program, holds_up=not overlap))
    lookup, table = prepared.lookup, prepared.lookup.table
    seconds = action_seconds(lookup, times, jitter, seed)
    held = seconds.stream if overlap else np.where(seconds.stream == TENSOR, np.int32(COMPUTE), seconds.stream)
    total_s = seconds.held_s + seconds.tensor_s
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


def _lacks_communication(table: ActionTable, times: StageTimes) -> bool:
    stages = table.program.stages
    crosses = any(stages[source].rank != stages[sink].rank for source, sink in table.program.edges)
    takes_time = bool(times.send_s.any() or times.return_s.any())
    return crosses and takes_time and not any(table.rows(kind).size for kind in (*PARTNERS, *EXCHANGES))
