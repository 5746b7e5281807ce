"""The fastest Plan of a search beside others, like for like.

Each is as fast as orders, groups, fills and balancing make it (`variants.py`). A gain on one batch may be that batch's;
so a predicted gain is the median of several batches, and its range is said.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import gcd

import numpy as np

from motet.core.arrays import Float64Array
from motet.core.plan import Plan
from motet.planner.candidate import candidate_step_s
from motet.planner.data_parallel.loads import sample_of
from motet.planner.degrees import divisors
from motet.planner.job import MAX_COMPARED, Job
from motet.planner.order import is_even
from motet.planner.search_result import SearchResult, SimulatedCandidate
from motet.schedule.plan_units import units_in_bubbles

NUM_COMPARED = 8
"""Batches that a predicted gain is the median of; the first is the job's own."""
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

    Simulates NUM_COMPARED - 1 steps of each of up to three Plans, unless they were measured. Of batches that are too
    large for that, as many parts: what a step of a part takes longer than that of the first part, the step does.
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
    if is_even(job.workload.examples):
        return np.array([simulated.prediction.step_s])
    candidate, numbers = simulated.candidate, range(1, NUM_COMPARED)
    if job.batch_size <= MAX_COMPARED:
        further = [candidate_step_s(job, candidate, number) for number in numbers]
        return np.array([simulated.prediction.step_s, *further])
    part = replace(candidate, plan=fewer_replicas(candidate.plan, MAX_COMPARED))
    of_part = replace(job, batch_size=max(part.plan.batch_size, MAX_COMPARED))
    first, *others = [candidate_step_s(of_part, part, number) for number in range(NUM_COMPARED)]
    return simulated.prediction.step_s * np.array([1.0, *(other / first for other in others)])


def fewer_replicas(plan: Plan, max_examples: int) -> Plan:
    """The Plan with fewer replicas of each unit, so that its batch has at most max_examples, as far as that goes.

    What a replica computes is the same, and so is the schedule; collectives are over fewer ranks.
    """
    if plan.schedule == "data_parallel":
        return sample_of(plan)
    shared = divisors(gcd(*(unit.dp for unit in plan.units)))
    by = next((by for by in shared if plan.batch_size <= by * max_examples), shared[-1])
    units = tuple(replace(unit, dp=unit.dp // by, shard_size=0) for unit in plan.units)
    # Over all replicas, encoders in bubbles have ZeRO 0 or 1.
    hosted = {unit.name for unit in units_in_bubbles(plan)}
    units = tuple(replace(unit, zero=min(unit.zero, 1)) if unit.name in hosted else unit for unit in units)
    return replace(plan, units=units, batch_size=plan.batch_size // by)
