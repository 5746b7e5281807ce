"""Which Plan is the fastest: the candidates of all strategies, simulated as far as that can change the answer.

Of each strategy, the candidate with the best estimate is simulated. How far its simulated step is from its estimate
corrects the estimates of its strategy's others, which are then taken in order of what they are expected to take. One
whose lower bound is not below the fastest step so far cannot win, and is passed over; so are those that are left when
`max_simulated` have been simulated. The best pipeline of each strategy then gets the order of examples that makes it
faster (`order.py`). What is simulated on the way depends on the job alone, and so does the answer.

Twice the devices are never slower: half of them are searched too, unless the computation that a step needs shows that
they cannot be faster (`fewer_ranks.py`).
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import chain
from typing import Literal, NamedTuple, TypeVar

from motet.core.errors import UserError
from motet.core.plan import Plan
from motet.core.workload import BACKBONE
from motet.planner.candidate import Candidate, Informed, Pins, RuledOut, Strategy, predict_candidate
from motet.planner.fewer_ranks import half_of, least_step_s, on_cluster
from motet.planner.infeasible import TENSOR
from motet.planner.job import Job
from motet.planner.nearest_miss import nearest_miss, would_fit
from motet.planner.order import pinned, reordered
from motet.simulate.predict.prediction import Prediction

MAX_SIMULATED = 12
MAX_SPANS = 2_000_000
"""Of Timelines, simulated and pictured at some 10^5 to 10^6 a second: plans of thousands of program ranks are few."""

FREE = Pins()
"""Nothing is pinned."""

Given = TypeVar("Given")
Made = TypeVar("Made")

SearchProgress = Callable[[str, int, int], None]
"""(what is being done, how much of it is done, of how much)"""


@dataclass(frozen=True, eq=False)
class Result:
    """A candidate, and what simulating it gave.

    measured_s: of a real step, where it was run. obstacle: what of it training cannot run yet, where that was asked.
    """

    candidate: Candidate
    prediction: Prediction
    measured_s: float | None = None
    obstacle: str = ""

    @property
    def step_s(self) -> float:
        """Measured, or else predicted."""
        return self.prediction.step_s if self.measured_s is None else self.measured_s


@dataclass(frozen=True)
class Wanted:
    """Of the plans that are suitable, the `count` fastest are simulated, not only what can be the fastest of all."""

    count: int
    suitable: Callable[[Plan], bool]


NOTHING_MORE = Wanted(0, lambda plan: False)
"""Than the fastest."""


class PassedOver(NamedTuple):
    """A candidate that was not simulated. why: its bound is above the fastest step, or as many as may be were done."""

    candidate: Candidate
    why: Literal["bound", "estimate"]


@dataclass(frozen=True, eq=False)
class Found:
    """results: fastest first; before all others, those that were measured. mends: if there are none, each of what would
    make the nearest miss fit, tried.
    """

    job: Job
    pins: Pins
    results: tuple[Result, ...]
    passed_over: tuple[PassedOver, ...]
    ruled_out: tuple[RuledOut, ...]
    mends: tuple[str, ...] = ()

    @property
    def best(self) -> Result:
        """Raises UserError, which names the nearest miss, if nothing fits."""
        if not self.results:
            raise UserError(nothing_fits(self))
        return self.results[0]

    def with_measured(self, measured: Mapping[int, float | None], obstacles: Mapping[int, str]) -> Found:
        """Real steps beside predicted ones, by place in results: their seconds; None where a rank lacked memory, which
        rules the candidate out. obstacles: what of others training cannot run yet.
        """
        results, ruled_out = [], []
        for place, result in enumerate(self.results):
            if measured.get(place, 0.0) is None:
                own = result.candidate
                ruled_out.append(RuledOut(own.strategy, own.what, "in a real step, a rank ran out of memory"))
            else:
                results.append(replace(result, measured_s=measured.get(place), obstacle=obstacles.get(place, "")))
        results.sort(key=lambda result: (result.measured_s is None, result.step_s))
        return replace(self, results=tuple(results), ruled_out=(*self.ruled_out, *ruled_out))


def search(
    job: Job,
    strategies: Mapping[str, Strategy],
    pins: Pins = FREE,
    *,
    max_simulated: int | None = MAX_SIMULATED,
    wanted: Wanted = NOTHING_MORE,
    progress: SearchProgress | None = None,
) -> Found:
    """The Plans for a job, those that were simulated ranked by their step.

    strategies:    by name, in the order in which equally fast Plans are preferred; `pins.strategies` chooses from them.
                   Those that are `Informed` are asked last, and told what they have to beat unless they are pinned.
    max_simulated: at most as many, but the best estimate of each strategy, and as many as are wanted, in any case;
                   None: no bound, and none on the Timelines' sizes either, so that no candidate can be faster than the
                   first result.
    wanted:        which are simulated beside those that can be the fastest.
    Raises UserError for a workload that lacks the lengths of a module.
    """
    _check_lengths(job)
    say = progress or (lambda what, done, total: None)
    found = _searched(_Run(job, pins, max_simulated, wanted, say), strategies)
    if not found.results and (nearest := nearest_miss(found.ruled_out)):
        say("looking for what would fit", 0, 1)
        quick = {
            name: own for name, own in strategies.items() if not isinstance(own, Informed) or name in pins.strategies
        }
        found = replace(found, mends=would_fit(job, quick, pins, nearest))
    return found


def _searched(run: _Run, strategies: Mapping[str, Strategy]) -> Found:
    job, pins, max_simulated = run.job, run.pins, run.max_simulated
    chosen = {name: strategy for name, strategy in strategies.items() if name in (pins.strategies or strategies)}
    informed = {name: own for name, own in chosen.items() if isinstance(own, Informed) and name not in pins.strategies}
    run.ruled_out += _unpriced(job, pins)
    run.consider({name: strategy for name, strategy in chosen.items() if name not in informed})
    to_beat_s = run.fastest_s if max_simulated is not None else math.inf
    run.consider({name: own.to_beat(to_beat_s) for name, own in informed.items()})
    run.reorder()
    half = half_of(job)
    if half is not None and least_step_s(half) < run.fastest_s:
        fewer = _searched(_Run(half, pins, max_simulated, NOTHING_MORE, run.say), strategies)
        if fewer.results and fewer.best.prediction.step_s < run.fastest_s:
            run.results.append(Result(on_cluster(fewer.best.candidate, job, run.fastest_s), fewer.best.prediction))
    return run.found(tuple(chosen))


class _Run:
    """A search as far as it has come."""

    def __init__(self, job: Job, pins: Pins, max_simulated: int | None, wanted: Wanted, say: SearchProgress) -> None:
        self.job, self.pins, self.max_simulated, self.wanted, self.say = job, pins, max_simulated, wanted, say
        self.candidates: list[Candidate] = []
        self.results: list[Result] = []
        self.passed_over: list[PassedOver] = []
        self.ruled_out: list[RuledOut] = []
        self.num_simulated, self.num_spans = 0, 0

    @property
    def fastest_s(self) -> float:
        return min((result.prediction.step_s for result in self.results), default=math.inf)

    def lacks(self, candidate: Candidate) -> bool:
        """Whether fewer plans such as it are simulated than are wanted."""
        return self.wanted.suitable(candidate.plan) and len(self._suitable_s()) < self.wanted.count

    def limit_s(self, candidate: Candidate) -> float:
        """What is not faster need not be simulated, unless it lacks."""
        steps = self._suitable_s() if self.wanted.suitable(candidate.plan) else []
        return steps[self.wanted.count - 1] if len(steps) >= self.wanted.count > 0 else self.fastest_s

    def _suitable_s(self) -> list[float]:
        suitable = (each for each in self.results if self.wanted.suitable(each.candidate.plan))
        return sorted(each.prediction.step_s for each in suitable)

    def consider(self, strategies: Mapping[str, Strategy]) -> None:
        """Simulate the best of each strategy's candidates, and of the others what can win and may be."""

        def proposed_by(strategy: tuple[str, Strategy]) -> list[Candidate | RuledOut]:
            return list(_proposed(*strategy, self.job, self.pins))

        new: list[Candidate] = []
        self.say(f"considering {', '.join(strategies)}", 0, len(strategies))
        for proposed in chain.from_iterable(_side_by_side(proposed_by, strategies.items())):
            if isinstance(proposed, RuledOut):
                self.ruled_out.append(proposed)
            elif all(proposed.plan != known.plan for known in (*self.candidates, *new)):
                new.append(proposed)
        new.sort(key=lambda candidate: candidate.estimate_s)  # Stable: equal estimates stay as they were proposed.
        self.candidates += new
        leaders = list({candidate.strategy: candidate for candidate in reversed(new)}.values())
        leaders.reverse()
        self.say(f"simulating the best of {', '.join(leader.strategy for leader in leaders)}", 0, self._total)
        seconds = map(self._take, leaders, _side_by_side(self._predicted, leaders))
        ratio = {leader.strategy: step_s / leader.estimate_s for leader, step_s in zip(leaders, seconds)}
        others = [candidate for candidate in new if all(candidate is not leader for leader in leaders)]
        for candidate in sorted(others, key=lambda other: other.estimate_s * ratio[other.strategy]):
            if self.lacks(candidate):
                self._simulate(candidate)
            elif candidate.bound_s >= self.limit_s(candidate):
                self.passed_over.append(PassedOver(candidate, "bound"))
            elif self.max_simulated is not None and (
                self.num_simulated >= self.max_simulated or self.num_spans >= MAX_SPANS
            ):
                self.passed_over.append(PassedOver(candidate, "estimate"))
            else:
                self._simulate(candidate)

    def reorder(self) -> None:
        """The fastest pipeline of each strategy, or all of them, with examples in the order that makes it faster."""
        self.results.sort(key=lambda each: each.prediction.step_s)
        leaders = {given.candidate.strategy: place for place, given in reversed(list(enumerate(self.results)))}
        places = list(range(len(self.results))) if self.max_simulated is None else sorted(leaders.values())
        self.say("ordering examples of the fastest pipelines", self.num_simulated, self.num_simulated)

        def best(place: int) -> Result:
            given = self.results[place]
            return Result(*reordered(self.job, given.candidate, given.prediction, self.pins))

        for place, result in zip(places, _side_by_side(best, places)):
            self.results[place] = result

    @property
    def _total(self) -> int:
        return min(len(self.candidates), self.max_simulated or len(self.candidates))

    def _simulate(self, candidate: Candidate) -> None:
        self.say(f"simulating {candidate.strategy}: {candidate.what}", self.num_simulated, self._total)
        self._take(candidate, self._predicted(candidate))

    def _predicted(self, candidate: Candidate) -> Prediction | UserError:
        """The error where it cannot run on the cluster."""
        try:
            return predict_candidate(self.job, candidate)
        except UserError as error:
            return error

    def _take(self, candidate: Candidate, prediction: Prediction | UserError) -> float:
        """Seconds of a step; it is a result if it fits memory. Without end if it cannot run on the cluster."""
        self.num_simulated += 1
        if isinstance(prediction, UserError):
            self.ruled_out.append(RuledOut(candidate.strategy, candidate.what, str(prediction)))
            return math.inf
        self.num_spans += len(prediction.timeline)
        shortfall_bytes = float(prediction.peak_bytes.max()) - self.job.capacity_bytes
        if shortfall_bytes > 0:
            self.ruled_out.append(_too_large(candidate, prediction, shortfall_bytes))
        else:
            self.results.append(Result(candidate, prediction))
        return prediction.step_s

    def found(self, order: Sequence[str]) -> Found:
        place = {name: number for number, name in enumerate(order)}
        last = len(place)
        self.results.sort(key=lambda each: (each.prediction.step_s, place.get(each.candidate.strategy, last)))
        return Found(self.job, self.pins, tuple(self.results), tuple(self.passed_over), tuple(self.ruled_out))


def _side_by_side(work: Callable[[Given], Made], each: Iterable[Given]) -> list[Made]:
    """Of each, in their order. Threads do array arithmetic at the same time, but little else."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(work, each))


def _proposed(name: str, strategy: Strategy, job: Job, pins: Pins) -> Iterator[Candidate | RuledOut]:
    try:
        for one in strategy(job, pins):
            yield one if isinstance(one, RuledOut) else pinned(one, pins)
    except UserError as error:
        # A profile that lacks what a strategy asks for (tensor-parallel layers, say) leaves the others their way.
        yield RuledOut(name, "", str(error))


def _unpriced(job: Job, pins: Pins) -> list[RuledOut]:
    """What no strategy considers, unless it is pinned."""
    degrees = [tp for tp in TENSOR[1:] if job.cluster.ranks_per_node % tp == 0 and pins.tp is None]
    found = [RuledOut("tensor parallelism", f"TP {tp}", job.why_unpriced(tp)) for tp in degrees]
    return [ruled for ruled in found if ruled.why]


def _too_large(candidate: Candidate, prediction: Prediction, shortfall_bytes: float) -> RuledOut:
    worst = prediction.ranks[prediction.peak_bytes.argmax()]
    why = f"in simulation it lacks {shortfall_bytes / 1e9:.1f} GB on rank {worst}"
    return RuledOut(candidate.strategy, candidate.what, why, shortfall_bytes)


def nothing_fits(found: Found) -> str:
    """One sentence: what comes nearest, what it lacks, and what would mend it."""
    job, pins = found.job, found.pins
    where = f"{job.model.name} in batches of {job.batch_size:,} on {job.cluster.num_ranks:,} {job.cluster.device.name}"
    pinned = f" with {told}" if (told := pins_in_words(pins)) else ""
    nearest = nearest_miss(found.ruled_out)
    if nearest is None:
        return f"No strategy has a plan for {where}{pinned}; unpin something, or change batch_size or the ranks."
    what = f"{nearest.strategy}, {nearest.what}" if nearest.what else nearest.strategy
    mends = f"; fits with {' or '.join(found.mends)}" if found.mends else ""
    return f"Nothing fits for {where}{pinned}. Nearest is {what}: {nearest.why.rstrip('.')}{mends}."


def pins_in_words(pins: Pins) -> str:
    """`tp = 8, schedule = 1f1b`; "" where nothing is pinned."""
    given = {name: getattr(pins, name) for name in Pins.__dataclass_fields__ if getattr(pins, name) not in (None, ())}
    return ", ".join(
        f"{'strategy' if name == 'strategies' else name} = {' or '.join(value) if isinstance(value, tuple) else value}"
        for name, value in given.items()
    )


def _check_lengths(job: Job) -> None:
    columns = job.workload.examples.items
    for module in job.model.modules:
        if module.name != BACKBONE and (module.name not in columns or not columns[module.name].num_items):
            known = ", ".join(name for name, items in columns.items() if items.num_items) or "none"
            raise UserError(
                f"The model's module {module.name!r} needs lengths, but {job.workload.source} has no items of it; "
                f"those that it has items of: {known}."
            )
