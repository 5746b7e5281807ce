"""The fastest Plan of a search beside others, like for like.

Each is as fast as orders, groups, fills and balancing make it (`variants.py`). A gain on one batch may be that batch's;
so a predicted gain is the median of several batches, and its range is said.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from motet.core.arrays import Float64Array
from motet.planner.candidate import predict_candidate
from motet.planner.job import Job
from motet.planner.order import is_even
from motet.planner.search_result import SearchResult, SimulatedCandidate

NUM_COMPARED = 8
"""Batches that a predicted gain is the median of; the first is the job's own."""
_MIN_BATCHES, _MAX_EXAMPLES = 3, 1 << 16
"""Large batches differ less and take longer: no more than so many examples are simulated, but of at least 3 batches."""
MIN_DIFFERENCE = 0.02
"""The least share of a step that counts as a difference between two Plans."""


@dataclass(frozen=True, eq=False)
class Comparison:
    """The best Plan beside a rival.

    gains: float64 [num_batches], by how much more seconds the rival's step takes, as a share of the best one's. One
           batch where both were measured, and where all batches are alike.
    """

    rival: SimulatedCandidate
    gains: Float64Array

    @property
    def gain(self) -> float:
        """The median gain."""
        return float(np.median(self.gains))


def compare(result: SearchResult) -> list[Comparison]:
    """The best beside its rivals; a measured best beside measured ones.

    Simulates NUM_COMPARED - 1 steps of each of up to three Plans, unless they were measured.
    """
    best = result.best
    alike = [other for other in result.results if (other.measured_s is None) == (best.measured_s is None)]
    compared = list(rivals(alike))
    if best.measured_s is not None:
        return [Comparison(rival, np.array([rival.step_s / best.step_s - 1])) for rival in compared]
    if not compared:
        return []
    best_s = _steps(result.job, best)
    return [Comparison(rival, _steps(result.job, rival) / best_s - 1) for rival in compared]


def rivals(results: Sequence[SimulatedCandidate]) -> Iterator[SimulatedCandidate]:
    """The candidates that the first is compared with. results: fastest first, at least one.

    The fastest of another strategy and, if that is about as fast as the first, the fastest of the next strategy that is
    clearly slower. If no other strategy has a result, the second of all.
    """
    best, *others = results
    by_strategy: dict[str, SimulatedCandidate] = {}
    for other in others:
        if other.candidate.strategy != best.candidate.strategy:
            by_strategy.setdefault(other.candidate.strategy, other)
    leaders = list(by_strategy.values()) or others[:1]
    slower = [leader for leader in leaders if leader.step_s >= best.step_s * (1 + MIN_DIFFERENCE)]
    yield from dict.fromkeys([*leaders[:1], *slower[:1]])


def _steps(job: Job, simulated: SimulatedCandidate) -> Float64Array:
    """Seconds of a step of each batch, float64 [num_batches]."""
    further = (predict_candidate(job, simulated.candidate, number).step_s for number in range(1, _num_batches(job)))
    return np.array([simulated.prediction.step_s, *further])


def _num_batches(job: Job) -> int:
    if is_even(job.workload.examples):
        return 1
    return int(np.clip(_MAX_EXAMPLES // job.batch_size, _MIN_BATCHES, NUM_COMPARED))
