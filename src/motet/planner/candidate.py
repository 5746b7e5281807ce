"""What a strategy proposes, what it rules out, and what a user fixes beforehand."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

from motet.core.errors import UserError
from motet.core.module_degrees import ANY_DEGREES, ModuleDegrees
from motet.core.plan import BalancingMethod, Fill, FillingMethod, Order, Plan, Zero
from motet.planner.job import Job
from motet.simulate.predict.predict import predict_assigned, step_s_of
from motet.simulate.predict.prediction import Prediction

CHAIN = "chain"
DATA_PARALLEL = "data parallel"
MODALITY_PARALLEL = "modality parallel"
DISAGGREGATED = "disaggregated"
BUBBLE_FILLING = "bubble filling"
"""These are the names of the strategies, as `motet plan --pin strategy=...` takes them."""
_ROUNDING = 1e-9
"""Steps that differ by a smaller share are equally long: seconds are sums, in an order of each Plan's own."""


@dataclass(frozen=True, eq=False)
class Candidate:
    """A Plan that fits its cluster: the number of ranks and their memory.

    strategy:   the name of the strategy that proposes it, e.g. "data parallel".
    what:       the degrees, e.g. "TP 8, PP 4, DP 10, 1F1B".
    estimate_s: seconds of a step in closed form; the search simulates the least first.
    bound_s:    lower bound of the simulated step; the search does not simulate what cannot win.
    tell:       gives `facts`. They are made when they are first read: of most candidates nobody reads them.
    """

    strategy: str
    what: str
    plan: Plan
    estimate_s: float
    bound_s: float = 0.0
    tell: Callable[[], Iterable[str]] = tuple

    @cached_property
    def facts(self) -> tuple[str, ...]:
        """Sentences that say what makes the Plan fast."""
        return tuple(self.tell())

    def telling(self, fact: str) -> Callable[[], Iterable[str]]:
        """`tell` of a candidate that has a fact before those of this one."""
        return lambda: (fact, *self.facts)


def is_faster(step_s: float, than_s: float) -> bool:
    """Whether a step is shorter than another by more than rounding."""
    return step_s < (1 - _ROUNDING) * than_s


def predict_candidate(job: Job, candidate: Candidate, number: int = 0) -> Prediction:
    """A simulated step of the candidate's Plan on a batch of the job's, by default the first."""
    plan = candidate.plan
    return predict_assigned(plan, job.planned(plan), job.assignment(plan, number), job.cost, exchange=job.exchange)


def prediction_that_fits(job: Job, candidate: Candidate) -> Prediction | None:
    """As `predict_candidate`; None if the cluster cannot run the Plan, or a rank lacks memory for it."""
    try:
        prediction = predict_candidate(job, candidate)
    except UserError:
        return None
    return prediction if prediction.peak_bytes.max() <= job.capacity_bytes else None


def candidate_step_s(job: Job, candidate: Candidate, number: int = 0) -> float:
    """`predict_candidate(job, candidate, number).step_s` alone, in less time."""
    plan = candidate.plan
    return step_s_of(plan, job.planned(plan), job.assignment(plan, number), job.cost, exchange=job.exchange)


@dataclass(frozen=True)
class RuledOut:
    """Degrees that a strategy considered and that cannot run.

    what:            the degrees; "" stands for all of the strategy's.
    why:             a sentence: how much memory which rank lacks, or what does not divide.
    shortfall_bytes: memory that the fullest rank lacks; 0 where memory is not the reason.
    remedies:        changes that make it fit, e.g. "ZeRO 3". Each was tried.
    batches:         batch sizes that do divide where the job's does not, which have not been tried.
    nearly_fits:     whether it fits memory, and all that it lacks is a pin, or that training can run it.
    """

    strategy: str
    what: str
    why: str
    shortfall_bytes: float = 0.0
    remedies: tuple[str, ...] = ()
    batches: tuple[int, ...] = ()
    nearly_fits: bool = False


@dataclass(frozen=True)
class FieldPins:
    """Pinned fields of one module and of its unit, beside its degrees (`core.plan.Unit`). None leaves a field to the
    search.

    unit:       a name; modules with the same one share a unit.
    blocks:     the module's blocks in each stage of its unit. recompute: those that are recomputed.
    replicated: whether every stage computes the module whole.
    cap:        of the module's lengths in a microbatch (`Plan.microbatch_caps`).

    Example:
        >>> FieldPins(blocks=(4, 2), zero=3).stated
        {'blocks': (4, 2), 'zero': 3}
    """

    unit: str | None = None
    blocks: tuple[int, ...] | None = None
    recompute: tuple[int, ...] | None = None
    zero: Zero | None = None
    shard_size: int | None = None
    first_rank: int | None = None
    replicated: bool | None = None
    cap: int | None = None

    @property
    def stated(self) -> dict[str, Any]:
        """The fields that are pinned, by name."""
        return {name: value for name, value in vars(self).items() if value is not None}


@dataclass(frozen=True)
class Pins:
    """What the search may not change. None leaves a field to the search.

    strategies: the strategies that are searched; () is all.
    tp, pp, dp: degrees of the backbone. recompute: the mode of all trainable modules.
    schedule:   one that a strategy can propose. GPipe is none: 1F1B takes as long, and holds less.
    modules:    degrees of single modules by name (`module_pins.py`). fields: their other fields (`field_pins.py`).
    fills:      all of them; () is none.

    Example:
        >>> pins = Pins(tp=8, schedule="1f1b")
        >>> pins.allow(tp=8, pp=4), pins.allow(tp=4)
        (True, False)
    """

    strategies: tuple[str, ...] = ()
    tp: int | None = None
    pp: int | None = None
    dp: int | None = None
    microbatch_size: int | None = None
    schedule: Literal["1f1b", "interleaved_1f1b", "zb_h1", "zb_v", "data_parallel"] | None = None
    recompute: Literal["none", "least", "full"] | None = None
    balance: BalancingMethod | None = None
    order: Order | None = None
    filling: FillingMethod | None = None
    modules: Mapping[str, ModuleDegrees] = field(default_factory=dict)
    fields: Mapping[str, FieldPins] = field(default_factory=dict)
    deferred_warmup: bool | None = None
    fills: tuple[Fill, ...] | None = None

    @property
    def cuts(self) -> bool:
        """Whether Plans may cut examples over replicas, which none does unasked."""
        return self.balance == "split"

    def allow(self, **chosen: object) -> bool:
        """Whether each chosen value is the pinned one, or its field is not pinned."""
        return all(getattr(self, name) in (None, value) for name, value in chosen.items())

    def of(self, module: str) -> ModuleDegrees:
        """The pinned degrees of one module."""
        return self.modules.get(module, ANY_DEGREES)

    def beside(self, modules: Mapping[str, ModuleDegrees]) -> Pins:
        """The pins, and degrees of single modules as far as these are not pinned."""
        names = dict.fromkeys([*modules, *self.modules])
        return replace(self, modules={name: self.of(name).or_else(modules.get(name, ANY_DEGREES)) for name in names})


Strategy = Callable[[Job, Pins], Iterator[Candidate | RuledOut]]
"""A strategy proposes Plans for a job, least estimate first as far as it knows. It is deterministic: it does not depend
on the order of dicts and sets."""


@dataclass(frozen=True)
class PruningStrategy:
    """A slow `Strategy` that leaves out what cannot beat the fastest step so far. The search calls it last.

    propose: (job, pins, seconds of the fastest step so far); it rules out what it leaves out, with the reason.
    """

    propose: Callable[[Job, Pins, float], Iterator[Candidate | RuledOut]]

    def __call__(self, job: Job, pins: Pins) -> Iterator[Candidate | RuledOut]:
        return self.propose(job, pins, math.inf)

    def to_beat(self, fastest_s: float) -> Strategy:
        """The strategy that proposes only what may be faster than fastest_s."""
        return lambda job, pins: self.propose(job, pins, fastest_s)


@dataclass(frozen=True)
class BoundedStrategy:
    """A `Strategy` that proposes nothing, in less time, where the lower bounds of all its candidates are too large.

    propose: (job, pins, seconds of a step to beat).
    """

    propose: Callable[[Job, Pins, float], Iterator[Candidate | RuledOut]]

    def __call__(self, job: Job, pins: Pins) -> Iterator[Candidate | RuledOut]:
        return self.propose(job, pins, math.inf)

    def to_beat(self, to_beat_s: float) -> Strategy:
        """The strategy where what does not beat a step does not matter."""
        return lambda job, pins: self.propose(job, pins, to_beat_s)
