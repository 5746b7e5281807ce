"""What a strategy proposes, what it rules out, and what a user has decided beforehand."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from motet.core.plan import Order, Plan
from motet.planner.job import Job
from motet.schedule import planned
from motet.simulate.predict.predict import predict_assigned
from motet.simulate.predict.prediction import Prediction

CHAIN = "chain"
DATA_PARALLEL = "data parallel"
MODALITY_PARALLEL = "modality parallel"
DISAGGREGATED = "disaggregated"
BUBBLE_FILLING = "bubble filling"
"""The names of the strategies, as `motet plan --pin strategy=...` takes them."""


@dataclass(frozen=True, eq=False)
class Candidate:
    """A Plan that fits its cluster, by number of ranks and by memory.

    strategy:   which one proposes it, e.g. "data parallel". what: the degrees, e.g. "TP 8, PP 4, DP 10, 1F1B".
    estimate_s: of a step, in closed form: candidates are simulated in this order.
    bound_s:    no simulation of it can be faster; what cannot win is not simulated.
    facts:      sentences: what it gains from.
    """

    strategy: str
    what: str
    plan: Plan
    estimate_s: float
    bound_s: float = 0.0
    facts: tuple[str, ...] = ()


def predict_candidate(job: Job, candidate: Candidate) -> Prediction:
    """A step of the candidate's Plan on the job's batch."""
    plan = candidate.plan
    return predict_assigned(plan, planned(plan), job.assignment(plan), job.cost)


@dataclass(frozen=True)
class RuledOut:
    """What was considered and cannot be.

    what:        the degrees; "" is whatever they are.
    why:         a sentence: the memory that lacks and where, or what does not divide.
    shortfall_bytes: on the fullest rank; 0 where memory is not the reason. mends: what makes it fit, and was tried.
    """

    strategy: str
    what: str
    why: str
    shortfall_bytes: float = 0.0
    mends: tuple[str, ...] = ()


def size_words(size_bytes: float) -> str:
    """As a sentence has it."""
    return f"{size_bytes / 1e9:.1f} GB" if size_bytes >= 1e9 else f"{size_bytes / 1e6:.3g} MB"


@dataclass(frozen=True)
class Pins:
    """What the search may not change; None is free. tp, pp, dp: of the backbone. recompute: of all that learns.

    schedule: of those that a strategy can propose. GPipe is not among them: 1F1B takes as long, and holds less.
    """

    strategies: tuple[str, ...] = ()
    tp: int | None = None
    pp: int | None = None
    dp: int | None = None
    microbatch_size: int | None = None
    schedule: Literal["1f1b", "interleaved_1f1b", "zb_h1", "zb_v", "data_parallel"] | None = None
    recompute: Literal["none", "least", "full"] | None = None
    balance: Literal["off", "joint", "per_phase", "auto"] | None = None
    order: Order | None = None

    def allow(self, **chosen: object) -> bool:
        """Whether nothing that was chosen, by the names above, goes against what is pinned."""
        return all(getattr(self, name) in (None, value) for name, value in chosen.items())


Strategy = Callable[[Job, Pins], Iterator[Candidate | RuledOut]]
"""Proposes, best estimate first as far as it knows; deterministic, whatever the order of dicts and sets."""


@dataclass(frozen=True)
class Informed:
    """A `Strategy` that takes seconds, and less where it is told what is to be beaten: it is asked after the others.

    propose: (job, pins, seconds of the fastest step so far); it may leave out what cannot be faster, and says so.
    """

    propose: Callable[[Job, Pins, float], Iterator[Candidate | RuledOut]]

    def __call__(self, job: Job, pins: Pins) -> Iterator[Candidate | RuledOut]:
        return self.propose(job, pins, math.inf)

    def to_beat(self, fastest_s: float) -> Strategy:
        """That proposes only what may be faster."""
        return lambda job, pins: self.propose(job, pins, fastest_s)
