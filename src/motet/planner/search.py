"""Which Plan is the fastest: the candidates of all strategies, simulated as far as that can change the answer.

Of each strategy, the candidate with the best estimate is simulated. How far its simulated step is from its estimate
corrects the estimates of its strategy's others, which are then taken in order of what they are expected to take. One
whose lower bound is not below the fastest step so far cannot win, and is passed over; so are those that are left when
`max_simulated` have been simulated. What is simulated on the way depends on the job alone, and so does the answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from motet.core.errors import UserError
from motet.core.workload import BACKBONE
from motet.planner.candidate import Candidate, Pins, RuledOut, Strategy
from motet.planner.job import Job
from motet.schedule import planned
from motet.simulate.predict import place_batch, predict_placed
from motet.simulate.prediction import Prediction

MAX_SIMULATED = 12
MAX_SPANS = 2_000_000
"""Of Timelines, simulated and pictured at some 10^5 to 10^6 a second: plans of thousands of program ranks are few."""

FREE = Pins()
"""Nothing is pinned."""

Progress = Callable[[str, int, int], None]
"""(what is being done, how much of it is done, of how much)"""


@dataclass(frozen=True, eq=False)
class Result:
    """A candidate, and what simulating it gave."""

    candidate: Candidate
    prediction: Prediction


class PassedOver(NamedTuple):
    """A candidate that was not simulated. why: its bound is above the fastest step, or as many as may be were done."""

    candidate: Candidate
    why: Literal["bound", "estimate"]


@dataclass(frozen=True, eq=False)
class Found:
    """results: fastest first."""

    job: Job
    pins: Pins
    results: tuple[Result, ...]
    passed_over: tuple[PassedOver, ...]
    ruled_out: tuple[RuledOut, ...]

    @property
    def best(self) -> Result:
        """Raises UserError, which names the nearest miss, if nothing fits."""
        if not self.results:
            raise UserError(nothing_fits(self))
        return self.results[0]


def search(
    job: Job,
    strategies: Mapping[str, Strategy],
    pins: Pins = FREE,
    *,
    max_simulated: int | None = MAX_SIMULATED,
    progress: Progress | None = None,
) -> Found:
    """The Plans for a job, those that were simulated ranked by their step.

    strategies:    by name, in the order in which equally fast Plans are preferred; `pins.strategies` chooses from them.
    max_simulated: at most as many, but the best estimate of each strategy in any case; None: no bound, and none on the
                   Timelines' sizes either, so that no candidate can be faster than the first result.
    Raises UserError for a workload that lacks the lengths of a module.
    """
    _check_lengths(job)
    say = progress or (lambda what, done, total: None)
    chosen = {name: strategy for name, strategy in strategies.items() if name in (pins.strategies or strategies)}
    candidates: list[Candidate] = []
    ruled_out: list[RuledOut] = []
    for number, (name, strategy) in enumerate(chosen.items()):
        say(f"considering {name}", number, len(chosen))
        for proposed in _proposed(name, strategy, job, pins):
            if isinstance(proposed, RuledOut):
                ruled_out.append(proposed)
            elif all(proposed.plan != known.plan for known in candidates):
                candidates.append(proposed)
    return _simulated(job, pins, candidates, ruled_out, max_simulated, say)


def _proposed(name: str, strategy: Strategy, job: Job, pins: Pins) -> Iterator[Candidate | RuledOut]:
    try:
        yield from strategy(job, pins)
    except UserError as error:
        # A profile that lacks what a strategy asks for (tensor-parallel layers, say) leaves the others their way.
        yield RuledOut(name, "", str(error))


def _simulated(
    job: Job,
    pins: Pins,
    candidates: list[Candidate],
    ruled_out: list[RuledOut],
    max_simulated: int | None,
    say: Progress,
) -> Found:
    candidates.sort(key=lambda candidate: candidate.estimate_s)  # Stable: equal estimates stay as they were proposed.
    leaders = list({candidate.strategy: candidate for candidate in reversed(candidates)}.values())[::-1]
    leaders.sort(key=lambda leader: leader.estimate_s)
    results: list[Result] = []
    passed_over: list[PassedOver] = []
    fastest_s, num_simulated, num_spans = float("inf"), 0, 0
    ratio: dict[str, float] = {}
    total = len(candidates) if max_simulated is None else min(len(candidates), max(max_simulated, len(leaders)))

    def simulate(candidate: Candidate) -> None:
        nonlocal fastest_s, num_simulated, num_spans
        say(f"simulating {candidate.strategy}: {candidate.what}", num_simulated, total)
        prediction = predict_candidate(job, candidate)
        num_simulated += 1
        num_spans += len(prediction.timeline)
        ratio.setdefault(candidate.strategy, prediction.step_s / candidate.estimate_s)
        lacks_bytes = float(prediction.peak_bytes.max()) - job.capacity_bytes
        if lacks_bytes > 0:
            ruled_out.append(_too_large(candidate, prediction, lacks_bytes))
            return
        results.append(Result(candidate, prediction))
        fastest_s = min(fastest_s, prediction.step_s)

    for leader in leaders:
        simulate(leader)
    led = {id(leader) for leader in leaders}
    others = [candidate for candidate in candidates if id(candidate) not in led]
    for candidate in sorted(others, key=lambda other: other.estimate_s * ratio[other.strategy]):
        if candidate.bound_s >= fastest_s:
            passed_over.append(PassedOver(candidate, "bound"))
        elif max_simulated is not None and (num_simulated >= max_simulated or num_spans >= MAX_SPANS):
            passed_over.append(PassedOver(candidate, "estimate"))
        else:
            simulate(candidate)
    results.sort(key=lambda result: result.prediction.step_s)
    return Found(job, pins, tuple(results), tuple(passed_over), tuple(ruled_out))


def predict_candidate(job: Job, candidate: Candidate) -> Prediction:
    """A step of the candidate's Plan on the job's batch."""
    plan = candidate.plan
    return predict_placed(plan, planned(plan), place_batch(plan, job.batch, job.cost), job.cost)


def _too_large(candidate: Candidate, prediction: Prediction, lacks_bytes: float) -> RuledOut:
    worst = int(prediction.peak_bytes.argmax())
    why = f"in simulation it lacks {lacks_bytes / 1e9:.1f} GB on rank {worst}"
    return RuledOut(candidate.strategy, candidate.what, why, lacks_bytes)


def nothing_fits(found: Found) -> str:
    """One sentence: what comes nearest, what it lacks, and what would mend it."""
    job, pins = found.job, found.pins
    where = f"{job.model.name} in batches of {job.batch_size:,} on {job.cluster.num_ranks:,} {job.cluster.device.name}"
    pinned = f" with {told}" if (told := pins_in_words(pins)) else ""
    if not found.ruled_out:
        return f"No strategy has a plan for {where}{pinned}; unpin something, or change batch_size or the ranks."
    lacking = [ruled for ruled in found.ruled_out if ruled.lacks_bytes > 0]
    nearest = min(lacking, key=lambda ruled: ruled.lacks_bytes) if lacking else found.ruled_out[0]
    what = f"{nearest.strategy}, {nearest.what}" if nearest.what else nearest.strategy
    mends = f"; fits with {' or '.join(nearest.mends)}" if nearest.mends else ""
    return f"Nothing fits for {where}{pinned}. Nearest is {what}: {nearest.why.rstrip('.')}{mends}."


def pins_in_words(pins: Pins) -> str:
    """`tp = 8, schedule = 1f1b`; "" where nothing is pinned."""
    given = {name: getattr(pins, name) for name in Pins.__dataclass_fields__ if getattr(pins, name) not in (None, ())}
    return ", ".join(
        f"{name} = {' or '.join(value) if isinstance(value, tuple) else value}" for name, value in given.items()
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
