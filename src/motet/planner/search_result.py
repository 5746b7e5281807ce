"""The answer of a search: candidates that were simulated, passed over and ruled out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, NamedTuple

from motet.core.errors import UserError
from motet.core.plan import Plan
from motet.planner.candidate import Candidate, Pins, RuledOut, is_faster
from motet.planner.job import Job
from motet.planner.nearest_miss import nearest_miss
from motet.planner.pins import pins_in_words
from motet.planner.step_bound import StepBound, step_bound
from motet.simulate.predict.prediction import Prediction


@dataclass(frozen=True, eq=False)
class SimulatedCandidate:
    """A candidate and its simulated step.

    measured_s: seconds of a real step; None where none was run.
    obstacle:   why training cannot run the Plan yet; "" where it can, or where nobody asked.
    """

    candidate: Candidate
    prediction: Prediction
    measured_s: float | None = None
    obstacle: str = ""

    @property
    def step_s(self) -> float:
        """Seconds of a step: measured, or else predicted."""
        return self.prediction.step_s if self.measured_s is None else self.measured_s


def ranked_by_step(results: Sequence[SimulatedCandidate], strategies: Sequence[str]) -> list[SimulatedCandidate]:
    """The results, fastest first. Those that differ from the first of them by rounding alone are in the order of
    `strategies`, and then as they come.
    """
    rank = {name: number for number, name in enumerate(strategies)}
    left, ranked = sorted(results, key=lambda one: one.step_s), list[SimulatedCandidate]()
    while left:
        alike = [one for one in left if not is_faster(left[0].step_s, one.step_s)]
        ranked += sorted(alike, key=lambda one: rank.get(one.candidate.strategy, len(rank)))
        left = left[len(alike) :]
    return ranked


class PassedOver(NamedTuple):
    """A candidate that was not simulated.

    why: "bound": its lower bound is not below the fastest step; "estimate": the limit on simulations was reached first.
    """

    candidate: Candidate
    why: Literal["bound", "estimate"]


@dataclass(frozen=True, eq=False)
class SearchResult:
    """What `search` answers.

    results:  simulated candidates, fastest first; measured ones come before all others.
    remedies: where there are no results, changes that make the nearest miss fit. Each was tried.
    what_if:  sentences about what would change the best Plan (`what_if.py`).
    """

    job: Job
    pins: Pins
    results: tuple[SimulatedCandidate, ...]
    passed_over: tuple[PassedOver, ...]
    ruled_out: tuple[RuledOut, ...]
    remedies: tuple[str, ...] = ()
    what_if: tuple[str, ...] = ()

    @property
    def best(self) -> SimulatedCandidate:
        """The first result. Raises UserError, which names the nearest miss, if there is none."""
        if not self.results:
            raise UserError(nothing_fits(self))
        return self.results[0]

    @cached_property
    def bound(self) -> StepBound:
        """A lower bound of the predicted step of every Plan of the job, searched or not, that cuts examples over
        replicas only if that is pinned.
        """
        return step_bound(self.job, cuts=self.pins.cuts)

    def with_obstacles(self, obstacle: Callable[[Plan], str], *, is_trainable: bool) -> SearchResult:
        """The result with what training cannot run yet marked; if `is_trainable`, ruled out.

        obstacle: as of `plan_command`.
        """
        marked = [replace(result, obstacle=obstacle(result.candidate.plan)) for result in self.results]
        if not is_trainable:
            return replace(self, results=tuple(marked))
        ruled_out = [
            RuledOut(
                one.candidate.strategy,
                one.candidate.what,
                f"training cannot run {one.obstacle} yet",
                nearly_fits=True,
            )
            for one in marked
            if one.obstacle
        ]
        results = tuple(one for one in marked if not one.obstacle)
        # First: they are as pinned and fit, so that none is nearer.
        return replace(self, results=results, ruled_out=(*ruled_out, *self.ruled_out))

    def with_measured(self, measured: Mapping[int, float | None], obstacles: Mapping[int, str]) -> SearchResult:
        """The result with real steps beside predicted ones.

        measured:  seconds of a real step by index in `results`. None rules the candidate out: a rank lacked memory.
        obstacles: why training cannot run a candidate yet, by index in `results`.
        """
        results, ruled_out = [], []
        for index, result in enumerate(self.results):
            if measured.get(index, 0.0) is None:
                candidate = result.candidate
                why = "in a real step, a rank ran out of memory"
                ruled_out.append(RuledOut(candidate.strategy, candidate.what, why))
            else:
                results.append(replace(result, measured_s=measured.get(index), obstacle=obstacles.get(index, "")))
        results.sort(key=lambda result: (result.measured_s is None, result.step_s))
        return replace(self, results=tuple(results), ruled_out=(*self.ruled_out, *ruled_out))


def nothing_fits(result: SearchResult) -> str:
    """One sentence: the nearest miss, the memory it lacks, and what would make it fit."""
    job, pins = result.job, result.pins
    where = f"{job.model.name} in batches of {job.batch_size:,} on {job.cluster.num_ranks:,} {job.cluster.device.name}"
    pinned = f" with {words}" if (words := pins_in_words(pins)) else ""
    nearest = nearest_miss(result.ruled_out)
    if nearest is None:
        return f"No strategy has a plan for {where}{pinned}; unpin something, or change batch_size or the ranks."
    what = f"{nearest.strategy}, {nearest.what}" if nearest.what else nearest.strategy
    remedies = f"; fits with {' or '.join(result.remedies)}" if result.remedies else ""
    return f"Nothing fits for {where}{pinned}. Nearest is {what}: {nearest.why.rstrip('.')}{remedies}."
