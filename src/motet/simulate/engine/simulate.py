"""When everything in a step happens: a Program and the times of its stages into a Timeline.

Streams and what they hold are in streams.py; what waits for what, in motet.schedule.dependencies; how operations follow
from both, in reference.py. The same arguments give the same Timeline, to the bit, on every machine.
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
from motet.simulate.engine.action_index import Lookup
from motet.simulate.engine.action_seconds import action_seconds
from motet.simulate.engine.backend import engine
from motet.simulate.engine.deadlock import deadlock
from motet.simulate.engine.lower import Waits, waits
from motet.simulate.engine.spans import timeline_of
from motet.simulate.engine.stage_times import StageTimes
from motet.simulate.engine.streams import COMPUTE, STREAMS, TENSOR
from motet.simulate.engine.table import ActionTable, action_table

MAX_JITTER = 2.0
"""With a larger sigma nearly all factors are nearly 0, and a step of some thousands has nothing of the mean of 1."""


class Prepared:
    """A Program to be simulated often: what does not depend on how long its stages take is made once. O(actions)."""

    def __init__(self, program: Program) -> None:
        self.lookup = Lookup(action_table(program))
        self._waits: tuple[Int32Array, bool, Waits] | None = None

    def waits(self, stream: Int32Array, overlap: bool) -> Waits:
        """As `lower.waits` has them; kept for the streams that were asked for last."""
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
    """The Timeline of one step; it starts at 0, and its ranks are the Program's. O(actions + dependencies).

    program: with communication, or, if it has none and sending takes time, given SEND and RECV first, which takes far
             longer than to simulate it: call add_communication, and `Prepared`, once for a Program that is simulated
             often.
    overlap: whether compute goes on beside communication. If not, a rank's communication holds its compute stream: what
             stands in its list between two actions of compute is posted together, and waited for.
    jitter:  sigma of the log-normal factor, of mean 1, on each action of compute (stragglers); drawn from seed.
    Raises ArgumentError for times that do not fit the Program, for a Program that is not whole, and for one that cannot
    run, with the actions that wait for each other.
    """
    if not 0 <= jitter <= MAX_JITTER:
        raise ArgumentError(f"jitter is {jitter}; it is the sigma of a log-normal distribution, 0 to {MAX_JITTER:g}.")
    native = engine(backend)
    prepared = program if isinstance(program, Prepared) else Prepared(program)
    if _lacks_communication(prepared.lookup.table, times):
        prepared = Prepared(add_communication(prepared.lookup.table.program, blocking=not overlap))
    lookup, table = prepared.lookup, prepared.lookup.table
    seconds = action_seconds(lookup, times, jitter, seed)
    held = seconds.stream if overlap else np.where(seconds.stream == TENSOR, np.int32(COMPUTE), seconds.stream)
    took = seconds.held_s + seconds.tensor_s
    start_s: Float64Array
    end_s: Float64Array
    if native is None:
        found = reference.run(table.program, seconds.stream.tolist(), took.tolist(), overlap)
        start_s, end_s = (np.array(column) for column in found)
    else:
        needs = prepared.waits(seconds.stream, overlap)
        of_rank: Int32Array = table.rank * len(STREAMS) + held
        start_s, end_s = native.run(of_rank, lookup.operation, took, needs.dependent, needs.dependency)
    if np.isnan(end_s).any():
        circle = deadlock(lookup, prepared.waits(seconds.stream, overlap), held, end_s)
        hint = (
            "" if overlap else " without overlap; add_communication(..., blocking=True) puts moves in an order that can"
        )
        raise ArgumentError(f"The program cannot run{hint}: {circle}.")
    return timeline_of(table, seconds, start_s, end_s)


def _lacks_communication(table: ActionTable, times: StageTimes) -> bool:
    stages = table.program.stages
    crosses = any(stages[source].rank != stages[sink].rank for source, sink in table.program.edges)
    takes_time = bool(times.send_s.any() or times.return_s.any())
    return crosses and takes_time and not any(table.rows(kind).size for kind in (*PARTNERS, *EXCHANGES))
