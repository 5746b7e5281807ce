"""Simulates the candidates that can be the fastest, and passes over the others.

For each round of strategies (`CandidateEvaluation.consider`):

1. all strategies propose;
2. the candidate with the least estimate of each strategy is simulated;
3. simulated by estimated seconds of that candidate corrects the estimates of its strategy's other candidates;
4. the others follow in order of corrected estimates. A candidate is passed over if its lower bound is not below the
   fastest step so far, or if the limit on simulations is reached.

What is simulated depends on the job alone, not on clocks or threads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from motet.core.errors import UserError
from motet.core.plan import Plan
from motet.core.words import size_words
from motet.planner.candidate import BoundedStrategy, Candidate, Pins, RuledOut, Strategy, predict_candidate
from motet.planner.comparison import rivals
from motet.planner.field_pins import proposals_for
from motet.planner.infeasible import possible_tensor_degrees
from motet.planner.job import MAX_COMPARED, Job
from motet.planner.order import can_win
from motet.planner.refinement import Refinement
from motet.planner.search_result import PassedOver, SearchResult, SimulatedCandidate, ranked_by_step
from motet.planner.variants import fastest_variant
from motet.simulate.predict.beyond_profile import guesses
from motet.simulate.predict.prediction import Prediction

MAX_SPANS = 2_000_000
"""The most spans of all Timelines together; 10^5 to 10^6 a second are simulated and drawn. This limits the number of
Plans with thousands of program ranks."""

_NEAR = 1.02
"""A Plan within this factor of the fastest may be the fastest by its variant: one gains one to four per cent."""

SearchProgress = Callable[[str, int, int], None]
"""(what is being done, how much of it is done, out of how much)"""


@dataclass(frozen=True)
class Quota:
    """The `num_plans` fastest of the suitable Plans are simulated, even where they cannot be the fastest of all."""

    num_plans: int
    suitable: Callable[[Plan], bool]


NO_QUOTA = Quota(0, lambda plan: False)
"""Only candidates that can be the fastest are simulated."""


class CandidateEvaluation:
    """The candidates of a job so far: simulated, passed over, ruled out.

    max_simulated, quota, is_refined: as in `search`.
    to_beat_s: seconds of a known step; what cannot be faster does not matter.

    Attribute varied: those of the results that have their fastest variants.
    """

    def __init__(
        self,
        job: Job,
        pins: Pins,
        max_simulated: int | None,
        quota: Quota,
        progress: SearchProgress,
        *,
        is_refined: bool = True,
        to_beat_s: float = math.inf,
    ) -> None:
        self.job, self.pins, self.max_simulated, self.quota, self.progress = job, pins, max_simulated, quota, progress
        self.is_refined, self.to_beat_s = is_refined, to_beat_s
        self.candidates: list[Candidate] = []
        self.results: list[SimulatedCandidate] = []
        self.varied: list[SimulatedCandidate] = []
        self.passed_over: list[PassedOver] = []
        self.ruled_out: list[RuledOut] = _unpriced(job, pins)
        self.num_simulated, self.num_spans = 0, 0

    @property
    def fastest_s(self) -> float:
        """Seconds of the fastest simulated step, or of the one to beat; infinite where there is none."""
        return min(self.to_beat_s, *(result.prediction.step_s for result in self.results), math.inf)

    def consider(self, strategies: Mapping[str, Strategy]) -> None:
        """Simulate the best candidate of each strategy, and of the others those that can win, as far as the limit
        allows."""
        new = []
        for candidate in self._propose(strategies):
            if candidate.bound_s < self.to_beat_s:
                new.append(candidate)
            else:
                self.passed_over.append(PassedOver(candidate, "bound"))
        leaders = _leaders(new)
        correction = self._simulate_leaders(leaders)
        others = [candidate for candidate in new if all(candidate is not leader for leader in leaders)]
        for candidate in sorted(others, key=lambda other: other.estimate_s * correction[other.strategy]):
            if (why := self._why_not(candidate)) is None:
                self.progress(f"simulating {candidate.strategy}: {candidate.what}", self.num_simulated, self._total)
                self._simulate(candidate)
            else:
                self.passed_over.append(PassedOver(candidate, why))

    def _propose(self, strategies: Mapping[str, Strategy]) -> list[Candidate]:
        """Candidates with Plans that were not proposed before, least estimate first."""
        new: list[Candidate] = []
        self.progress(f"considering {', '.join(strategies)}", 0, len(strategies))
        for name, strategy in strategies.items():
            # Other fields that are pinned change what is proposed, and its bound with it.
            if isinstance(strategy, BoundedStrategy) and not (self.pins.modules or self.pins.fields):
                strategy = strategy.to_beat(self.to_beat_s)
            for proposed in _proposals(name, strategy, self.job, self.pins):
                if isinstance(proposed, RuledOut):
                    self.ruled_out.append(proposed)
                elif all(proposed.plan != known.plan for known in (*self.candidates, *new)):
                    new.append(proposed)
        new.sort(key=lambda candidate: candidate.estimate_s)  # Stable: equal estimates stay as they were proposed.
        self.candidates += new
        return new

    def _simulate_leaders(self, leaders: Sequence[Candidate]) -> dict[str, float]:
        """Simulated by estimated seconds of each strategy's best candidate."""
        self.progress(f"simulating the best of {', '.join(leader.strategy for leader in leaders)}", 0, self._total)
        return {leader.strategy: self._simulate(leader) / leader.estimate_s for leader in leaders}

    def _why_not(self, candidate: Candidate) -> Literal["bound", "estimate"] | None:
        """Why a candidate is passed over; None if it is simulated."""
        suitable_s = self._suitable_s() if self.quota.suitable(candidate.plan) else None
        if suitable_s is not None and len(suitable_s) < self.quota.num_plans:
            return None
        limit_s = suitable_s[self.quota.num_plans - 1] if suitable_s and self.quota.num_plans else self.fastest_s
        if candidate.bound_s >= limit_s:
            return "bound"
        if self.max_simulated is None or (self.num_simulated < self.max_simulated and self.num_spans < MAX_SPANS):
            return None
        return "estimate"

    def _suitable_s(self) -> list[float]:
        """Simulated steps of the Plans that count for the quota, fastest first."""
        suitable = (result for result in self.results if self.quota.suitable(result.candidate.plan))
        return sorted(result.prediction.step_s for result in suitable)

    @property
    def _total(self) -> int:
        return min(len(self.candidates), self.max_simulated or len(self.candidates))

    def _simulate(self, candidate: Candidate) -> float:
        """Seconds of a step; infinite if the Plan cannot run on the cluster. It is a result if it fits memory."""
        self.num_simulated += 1
        try:
            prediction = predict_candidate(self.job, candidate)
        except UserError as error:
            self.ruled_out.append(RuledOut(candidate.strategy, candidate.what, str(error)))
            return math.inf
        self.num_spans += len(prediction.timeline)
        if guess := guesses(prediction.beyond):
            self.ruled_out.append(RuledOut(candidate.strategy, candidate.what, guess))
            return prediction.step_s
        shortfall_bytes = float(prediction.peak_bytes.max()) - self.job.capacity_bytes
        if shortfall_bytes > 0:
            self.ruled_out.append(_too_large(candidate, prediction, shortfall_bytes))
        else:
            self.results.append(SimulatedCandidate(candidate, prediction))
        return prediction.step_s

    def vary(self, strategies: Collection[str]) -> None:
        """Give the fastest Plan of each strategy that may win, and what the best is compared with, the variant that is
        fastest (`variants.py`); all Plans where nothing limits the simulations. Nothing is compared where there is a
        step to beat. Then refine the fastest (`refinement.py`), and vary those of them that lack their variants.

        strategies: the names of those that are searched.
        """
        if self.job.batch_size > MAX_COMPARED:
            self.job.forget_microbatches()
        self.progress("ordering and balancing the examples of the fastest", self.num_simulated, self.num_simulated)
        self._vary(self._to_vary)
        if self.is_refined:
            self.progress("refining the fastest", self.num_simulated, self.num_simulated)
            refinement = Refinement(self.job, self.pins, strategies, self.quota.suitable, self.to_beat_s)
            self.results = refinement.refined(self.results, self.varied)
            self._vary(self._to_vary)

    def vary_compared(self) -> None:
        """Give the best and what it is compared with the variants that are fastest, if they do not have them yet."""
        self._vary(self._compared)

    def _vary(self, chosen: Callable[[], list[int]]) -> None:
        """chosen: indices in `results`. A variant may be faster than what it was to be compared with: then that is
        another one.
        """
        while indices := [index for index in chosen() if all(self.results[index] is not one for one in self.varied)]:
            for index in indices:
                given = self.results[index]
                varied = fastest_variant(self.job, given.candidate, given.prediction, self.pins)
                self.results[index] = SimulatedCandidate(*varied)
                self.varied.append(self.results[index])

    def _to_vary(self) -> list[int]:
        """Indices in `results`, which are sorted first."""
        self.results.sort(key=lambda result: result.prediction.step_s)
        if self.max_simulated is None or not self.results:
            return list(range(len(self.results)))
        first = {result.candidate.strategy: index for index, result in reversed(list(enumerate(self.results)))}
        # No variant computes less than the bound.
        fastest_s = self.fastest_s
        near = (index for index, one in enumerate(self.results) if one.prediction.step_s < _NEAR * fastest_s)
        faster = [
            index
            for index in {*first.values(), *near}
            if can_win(self.job, self.results[index].candidate, self.pins, fastest_s)
        ]
        return sorted({*faster, *(self._compared() if self.to_beat_s == math.inf else ())})

    def _compared(self) -> list[int]:
        """Indices in `results`, which are sorted first, of the best and its rivals."""
        self.results.sort(key=lambda result: result.prediction.step_s)
        return [0, *map(self.results.index, rivals(self.results))] if self.results else []

    def result(self, strategies: Sequence[str]) -> SearchResult:
        """All that was evaluated. Equally fast Plans are in the order of `strategies`."""
        self.results = ranked_by_step(self.results, strategies)
        return SearchResult(self.job, self.pins, tuple(self.results), tuple(self.passed_over), tuple(self.ruled_out))


def _leaders(candidates: Sequence[Candidate]) -> list[Candidate]:
    """The first candidate of each strategy."""
    first = {candidate.strategy: candidate for candidate in reversed(candidates)}
    return list(reversed(first.values()))


def _proposals(name: str, strategy: Strategy, job: Job, pins: Pins) -> Iterator[Candidate | RuledOut]:
    try:
        yield from proposals_for(strategy, job, pins)
    except UserError as error:
        # A profile may lack what one strategy needs (tensor-parallel layers, say); the others are still searched.
        yield RuledOut(name, "", str(error))


def _unpriced(job: Job, pins: Pins) -> list[RuledOut]:
    """Tensor-parallel degrees without times. No strategy considers them, unless the degree is pinned."""
    degrees = possible_tensor_degrees(job.cluster)[1:] if pins.tp is None else []
    ruled_out = [RuledOut("tensor parallelism", f"TP {tp}", job.why_unpriced(tp)) for tp in degrees]
    return [ruled for ruled in ruled_out if ruled.why]


def _too_large(candidate: Candidate, prediction: Prediction, shortfall_bytes: float) -> RuledOut:
    fullest = prediction.ranks[prediction.peak_bytes.argmax()]
    why = f"in simulation it lacks {size_words(shortfall_bytes)} on rank {fullest}"
    return RuledOut(candidate.strategy, candidate.what, why, shortfall_bytes)
