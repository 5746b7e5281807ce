"""Plans of a paper's job: what the planner finds, what the paper runs, and what it compares with. Used by planner.py.

Everything is predicted alike: by the planner's own simulation of the job's batch, on the catalogue's devices.
"""

from __future__ import annotations

import time
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from motet.core.errors import ArgumentError, UserError
from motet.core.plan import Plan
from motet.cost.source import cost_model
from motet.planner.candidate import Candidate, Pins, predict_candidate
from motet.planner.job import Job
from motet.planner.search import search
from motet.planner.search_result import SearchResult
from motet.planner.strategies import STRATEGIES
from motet.planning.planned_recipe import PlanRecipe
from motet.simulate.predict.prediction import Prediction

RECIPES = Path(__file__).parents[1] / "recipes"


@dataclass(frozen=True)
class Outcome:
    """What a Plan is predicted to do, or why there is none.

    what: its degrees. rate: samples a second and GPU. why: it is no Plan that fits; steps of what lacks memory are
    given all the same.
    """

    what: str = ""
    step_s: float | None = None
    rate: float = 0.0
    mfu: float = 0.0
    hfu: float = 0.0
    peak_gbytes: float = 0.0
    num_ranks: int = 0
    why: str = ""

    def over(self, other: Outcome) -> float | None:
        """How much faster it is, in samples a second and GPU; None if there is no Plan of either."""
        return self.rate / other.rate if self.rate and other.rate else None

    def times(self, other: Outcome) -> float:
        """As `over`. Raises RuntimeError with the reason if there is no Plan of either."""
        for one in (self, other):
            if not one.rate:
                raise RuntimeError(f"there is no Plan: {one.why}")
        return self.rate / other.rate


@dataclass(frozen=True)
class Planned:
    """A full search: what it took and its best Plan. strategies: the best of each, where it is searched alone."""

    took_s: float
    strategy: str
    best: Outcome
    strategies: Mapping[str, Outcome]


@dataclass(frozen=True)
class Subject:
    """A job, of whose examples each is so many of the paper's samples."""

    job: Job
    samples: float = 1.0

    def planned(self) -> Planned:
        started = time.process_time()
        found = self._found(Pins())
        took_s = time.process_time() - started
        best = found.best
        alone = {name: self.searched(Pins(strategies=(name,))) for name in STRATEGIES}
        own = self._outcome(best.candidate.what, best.prediction)
        return Planned(took_s, best.candidate.strategy, own, alone)

    def searched(self, pins: Pins) -> Outcome:
        """What the planner finds where something is pinned."""
        found = self._found(pins)
        if not found.results:
            return Outcome(why=_why(found))
        return self._outcome(found.best.candidate.what, found.best.prediction)

    def fastest(self, plans: Callable[[], Iterable[tuple[str, Plan]]]) -> Outcome:
        """Of the Plans, each with its degrees in words, that fit; of all, if none does."""
        try:
            found = [self._outcome(what, predict_candidate(self.job, _only(plan))) for what, plan in plans()]
        except (ArgumentError, UserError) as error:
            return Outcome(why=str(error))
        return min(found, key=lambda one: (bool(one.why), -one.rate), default=Outcome(why="there is none."))

    def _found(self, pins: Pins) -> SearchResult:
        return search(self.job, STRATEGIES, pins)

    def _outcome(self, what: str, prediction: Prediction) -> Outcome:
        peak_bytes = float(prediction.peak_bytes.max())
        shortfall_bytes = peak_bytes - self.job.capacity_bytes
        return Outcome(
            what,
            prediction.step_s,
            self.samples * prediction.examples_per_s / prediction.num_ranks,
            prediction.mfu,
            prediction.hfu,
            peak_bytes / 1e9,
            prediction.num_ranks,
            f"lacks {shortfall_bytes / 1e9:.1f} GB." if shortfall_bytes > 0 else "",
        )


class Baseline(NamedTuple):
    """What the paper compares its method with.

    published: by how much the method is faster; lowest and highest, where the paper has one range for several jobs.
    published_s: what a step of it took.
    """

    name: str
    attempt: Callable[[], Outcome]
    published: tuple[float, ...] = ()
    published_s: float | None = None
    note: str = ""


@dataclass(frozen=True)
class Case:
    """A job of a paper. method: the paper's own. fitted: of the job, what was not given but found."""

    paper: str
    name: str
    subject: Subject
    method: str
    attempt: Callable[[], Outcome]
    baselines: tuple[Baseline, ...]
    published_s: float | None = None
    fitted: str = ""


@dataclass(frozen=True)
class Tried:
    """A case, run."""

    case: Case
    planned: Planned
    method: Outcome
    baselines: tuple[Outcome, ...] = field(default=())

    @classmethod
    def of(cls, case: Case, say: Callable[[str], None]) -> Tried:
        say(f"{case.name}: all strategies")
        planned = case.subject.planned()
        say(f"{case.name}: {case.method}")
        method = case.attempt()
        baselines = []
        for baseline in case.baselines:
            say(f"{case.name}: {baseline.name}")
            baselines.append(baseline.attempt())
        return cls(case, planned, method, tuple(baselines))

    def record(self) -> dict[str, Any]:
        """For JSON, figures to four digits."""
        case = self.case
        best = self.planned.best
        return {
            "paper": case.paper,
            "job": case.name,
            "fitted": case.fitted,
            "num_gpus": case.subject.job.cluster.num_ranks,
            "planner": {"strategy": self.planned.strategy, **_record(best)},
            "strategies": {name: _record(one) for name, one in self.planned.strategies.items()},
            "method": {
                "name": case.method,
                "published_s": _digits(case.published_s),
                **_record(self.method),
                "gain_of_planner": _digits(best.over(self.method)),
            },
            "baselines": [
                {
                    "name": baseline.name,
                    "published_s": _digits(baseline.published_s),
                    **_record(outcome),
                    "gain": _digits(self.method.over(outcome)),
                    "gain_of_planner": _digits(best.over(outcome)),
                    "published_gain": [_digits(number) for number in baseline.published],
                    "note": baseline.note,
                }
                for baseline, outcome in zip(case.baselines, self.baselines)
            ],
        }


def job_of(recipe: str, changes: Mapping[str, Any] | None = None, name: str = "") -> Job:
    """Of a recipe in `recipes/`, with tables merged into it; what is None is left out."""
    tables = tomllib.loads((RECIPES / f"{recipe}.toml").read_text(encoding="utf-8"))
    _merge(tables, changes or {})
    read = PlanRecipe.model_validate(tables)
    assert read.cluster is not None
    assert read.workload is not None
    cluster = read.cluster.cluster()
    model, lengths = read.model.spec(name or recipe), read.workload.workload()
    return Job(model, cluster, lengths, read.run.batch_size, cost_model(cluster, read.precision), read.precision)


def with_any_tp(job: Job) -> Job:
    """The job with unknown numbers of heads, so that every TP divides them, as it does in the papers' own runs.

    InternViT has 25 heads, on 2, 4 and 8 ranks. Operations and bytes stay the same.
    """
    modules = []
    for module in job.model.modules:
        stacks = tuple(
            replace(stack, layer=replace(stack.layer, attention=replace(stack.layer.attention, **_ANY)))
            if stack.layer.attention
            else stack
            for stack in module.stacks
        )
        modules.append(replace(module, stacks=stacks))
    return replace(job, model=replace(job.model, modules=tuple(modules)))


_ANY = {"num_heads": 0, "num_kv_heads": 0}


def _merge(tables: dict[str, Any], changes: Mapping[str, Any]) -> None:
    for key, value in changes.items():
        if value is None:
            tables.pop(key, None)
        elif isinstance(value, Mapping) and isinstance(tables.get(key), dict):
            _merge(tables[key], value)
        else:
            tables[key] = value


def _only(plan: Plan) -> Candidate:
    return Candidate("", "", plan, 0.0)


def _why(found: SearchResult) -> str:
    """What comes nearest where there is no Plan, and what it lacks."""
    nearest = min(found.ruled_out, key=lambda one: (one.shortfall_bytes == 0, one.shortfall_bytes), default=None)
    if nearest is None:
        return "there is no Plan."
    return f"{nearest.what}: {nearest.why}" if nearest.what else nearest.why


def _record(outcome: Outcome) -> dict[str, Any]:
    return {key: _digits(value) if isinstance(value, float) else value for key, value in asdict(outcome).items()}


def _digits(number: float | None) -> float | None:
    return None if number is None else float(f"{number:.4g}")
