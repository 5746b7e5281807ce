"""The fastest Plans of a search, made faster step by step: from each to a neighbour that is faster; where none is, on
from the least slow one, as far as the budget reaches. Then the same within each shape of the backbone and within each
virtual pipeline, from the fastest Plan that was simulated, and from the fastest of all through all shapes once more.
Last, what lacks little memory, in other orders, and the fastest of each kind that was simulated, in groups under caps.

Estimates in closed form decide what is proposed and simulated. They are some per cent wrong, so a neighbour of a
proposed Plan, or one that was proposed and not given its best order of examples, may be the fastest. On few ranks,
where a simulation takes milliseconds, neighbours are simulated; a budget in spans of Timelines leaves large jobs as
they are proposed. It depends on the job alone, so the answer is the same every time.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import chain
from typing import NamedTuple

from motet.core.errors import UserError
from motet.core.plan import ORDERED_BALANCES, Order, Plan
from motet.core.workload import BACKBONE
from motet.planner.candidate import (
    BUBBLE_FILLING,
    CHAIN,
    DATA_PARALLEL,
    DISAGGREGATED,
    MODALITY_PARALLEL,
    Candidate,
    Pins,
    is_faster,
    predict_candidate,
)
from motet.planner.data_parallel.recomputation import least_recomputed
from motet.planner.degrees import plan_degrees, plan_words
from motet.planner.field_pins import unmet
from motet.planner.job import Job
from motet.planner.more_recomputed import all_recomputed, share_recomputed
from motet.planner.neighbours import as_pipelines, is_virtual, neighbours
from motet.planner.order import are_alike, can_win, under_caps
from motet.planner.quick_estimate import quick_estimate
from motet.planner.regrouping import regrouped
from motet.planner.search_result import SimulatedCandidate
from motet.planner.step_bound import step_bound
from motet.planner.variants import fastest_variant
from motet.schedule import check_fit
from motet.schedule.plan_units import recomputed_in, units_in_bubbles
from motet.simulate.predict.prediction import Prediction

BUDGET, SIMULATION = 120_000, 1_500
"""What the refinement of a strategy's or shape's Plans spends, so that it finds what it would find alone. A simulation
costs as many spans as its Timeline has, and SIMULATION more: what does not depend on spans takes about as long."""
_AS_CHAINS, _PASSED, _LAST, _IN_OTHER_ORDERS, _GROUPED = "as chains", "passed", "last", "in other orders", "grouped"
"""Purses beside those of strategies and shapes: of `Refinement._as_chains`, of all descents from Plans that others have
passed, of `Refinement._anywhere`, of `Refinement._in_other_orders`, and of `Refinement._under_caps`."""
_SHARE_PASSED = 0.5
"""What the second of these has of a budget."""
REFINED_RANKS = 8
"""On more ranks than this, the budget falls with the square of their number: closed forms are the better, and a search
takes the longer."""
NEAR, NEAR_LEADER = 1.15, 1.6
"""Plans within the first factor of the fastest are refined, and those within the second that lead a strategy."""
_NUM_VARIANTS = 9
"""Simulations of `fastest_variant`, at most."""
_NEAR_MEMORY = 1.1
"""What lacks less memory than this may fit in another order of its examples."""
_ORDERS: tuple[Order, ...] = ("intra", "given")
"""Orders by which other examples come together; "both" has the microbatches of "intra"."""
_SHARE = 0.6
"""The share of what is left that one Plan's descent may spend, so that other Plans of its strategy have theirs."""


class Refinement:
    """The refinement of one search.

    strategies: the names of those that are searched.
    suitable:   a Plan for which it holds is replaced only by Plans for which it holds too.
    to_beat_s:  seconds of a step that is known beside the results; what is too slow for it to be near is not refined.
    """

    def __init__(
        self,
        job: Job,
        pins: Pins,
        strategies: Collection[str],
        suitable: Callable[[Plan], bool],
        to_beat_s: float = math.inf,
    ) -> None:
        self.job, self.pins, self.strategies, self.suitable = job, pins, strategies, suitable
        self.to_beat_s = to_beat_s
        budget = BUDGET * min(1.0, REFINED_RANKS / job.cluster.num_ranks) ** 2
        self.left: dict[Hashable, float] = defaultdict(lambda: budget, {_PASSED: _SHARE_PASSED * budget})
        self.seen = set[str]()
        self._known: dict[str, SimulatedCandidate | None] = {}
        self._compared: dict[tuple[str, str], bool] = {}
        self._slower: list[SimulatedCandidate] = []
        self._kept: _Shape | _Pipeline | None = None

    @cached_property
    def _bound_s(self) -> float:
        """Below it is the step of no Plan of the job."""
        return step_bound(self.job, cuts=self.pins.cuts).step_s

    def refined(
        self, results: Sequence[SimulatedCandidate], varied: Sequence[SimulatedCandidate]
    ) -> list[SimulatedCandidate]:
        """The results, the fastest of them made faster. varied: those that have their best variants already."""
        if self.pins.recompute == "full" or not results:
            return list(results)
        # 1. Orders and ways of balancing.
        fastest_s = self._fastest_s(results)
        improved = sorted(results, key=lambda result: result.prediction.step_s)
        for index, one in enumerate(improved):
            if one.prediction.step_s > NEAR * fastest_s:
                continue
            if not can_win(self.job, one.candidate, self.pins, fastest_s):
                continue
            strategy = one.candidate.strategy
            if all(one is not other for other in varied) and self._spend(strategy, one.prediction, _NUM_VARIANTS):
                candidate, prediction = fastest_variant(self.job, one.candidate, one.prediction, self.pins)
                if self._may_replace(one.candidate.plan, candidate.plan):
                    improved[index] = SimulatedCandidate(candidate, prediction)
        # 2. Neighbours: of the fastest of each strategy, then of the others.
        improved.sort(key=lambda result: result.prediction.step_s)
        self.seen.update(_key(result.candidate.plan) for result in improved)
        leaders = {result.candidate.strategy: result for result in reversed(improved)}
        others = [one for one in improved if all(one is not leader for leader in leaders.values())]
        ranked = [*sorted(leaders.values(), key=lambda one: one.prediction.step_s), *others]
        for number, start in enumerate(ranked):
            limit = NEAR_LEADER if number < len(leaders) else NEAR
            fastest_s = self._fastest_s(improved)
            if start.prediction.step_s <= limit * fastest_s:
                improved = _ended(improved, start, self._descended(start, start.candidate.strategy))
        # 3. Neighbours of the same shape, then those of the same virtual pipeline.
        improved = self._within_shapes(improved)
        improved = self._within_virtual_pipelines(improved)
        improved = self._anywhere(improved)
        # 4. What would be faster and lacks some memory; and what groups under caps make the fastest.
        return self._under_caps(self._in_other_orders(improved))

    def _fastest_s(self, results: Sequence[SimulatedCandidate]) -> float:
        """Seconds of the fastest step that is known."""
        return min(self.to_beat_s, *(one.prediction.step_s for one in results), math.inf)

    def _within_shapes(self, improved: list[SimulatedCandidate]) -> list[SimulatedCandidate]:
        """The results with the fastest pipeline of each shape made faster by a descent that keeps to its shape.

        One that may go anywhere spends its budget beside the shapes that it passes, so that a pinned degree would find
        more: it begins a shape's descent with the fastest Plan that any descent passed. Data parallelism has few
        neighbours in its shape.
        """
        limit_s = NEAR * self._fastest_s(improved)
        chains = [one for one in self._as_chains(improved) if one.prediction.step_s <= limit_s]
        improved = [*improved, *chains]
        starts = sorted([*improved, *self._passed()], key=lambda one: one.prediction.step_s)
        for shape, start in {_Shape.of(one.candidate.plan): one for one in reversed(starts)}.items():
            if start.prediction.step_s <= limit_s and not shape.is_colocated:
                purse = shape if any(one is start for one in improved) else _PASSED
                improved = self._within(shape, start, purse, improved)
        return improved

    def _within_virtual_pipelines(self, improved: list[SimulatedCandidate]) -> list[SimulatedCandidate]:
        """The results with the fastest of each schedule of several stages a rank, by shape, made faster by more cuts.

        What is even for ranks with several stages may be many moves of a block away.
        """
        limit_s = NEAR * self._fastest_s(improved)
        starts = sorted([*improved, *self._passed()], key=lambda one: one.prediction.step_s)
        for kept, start in {_Pipeline.of(one.candidate.plan): one for one in reversed(starts)}.items():
            if start.prediction.step_s <= limit_s and is_virtual(start.candidate.plan.unit_of(BACKBONE)):
                improved = self._within(kept, start, _PASSED, improved)
        return improved

    def _within(
        self,
        kept: _Shape | _Pipeline | None,
        start: SimulatedCandidate,
        purse: Hashable,
        improved: list[SimulatedCandidate],
    ) -> list[SimulatedCandidate]:
        """The results with the end of a descent that finds something. kept: what it keeps to; None: goes anywhere."""
        self._kept, self.seen = kept, {_key(start.candidate.plan)}
        end = self._descended(start, purse)
        self._kept = None
        return _ended(improved, start, end) if end is not start else improved

    def _anywhere(self, improved: list[SimulatedCandidate]) -> list[SimulatedCandidate]:
        """The results with the fastest of them made faster by a descent through all shapes.

        Those within a shape may have found it, when the descents through all had spent their budget on slower ones.
        """
        start = min(improved, key=lambda one: one.prediction.step_s)
        return self._within(None, start, _LAST, improved)

    def _passed(self) -> list[SimulatedCandidate]:
        """All Plans that descents have simulated and that fit."""
        return [self._named(one) for one in self._known.values() if one is not None and self._fits(one)]

    def _as_chains(self, improved: Sequence[SimulatedCandidate]) -> list[SimulatedCandidate]:
        """Data-parallel results as replicas of one pipeline rank with their best variants, as far as they fit.

        No strategy proposes these beside its pipelines, whose estimates are less, or with as large microbatches.
        """
        chains = []
        limit_s = NEAR_LEADER * self._fastest_s(improved)
        for start in improved:
            is_colocated = start.candidate.plan.schedule == "data_parallel" and start.prediction.step_s <= limit_s
            for plan in as_pipelines(self.job, start.candidate.plan) if is_colocated else ():
                if not self._allows(plan) or not self._can_spend(_AS_CHAINS, start.prediction, 1 + _NUM_VARIANTS):
                    continue
                self._spend(_AS_CHAINS, start.prediction)
                one = self._predicted(start, plan)
                if one is None or one.prediction.step_s > limit_s:
                    continue
                if not self._spend(_AS_CHAINS, one.prediction, _NUM_VARIANTS):
                    continue
                words = _words(start.candidate, plan)
                candidate = replace(one.candidate, what=words, bound_s=self._bound_s, tell=tuple)
                one = SimulatedCandidate(*fastest_variant(self.job, candidate, one.prediction, self.pins))
                if self._allows(one.candidate.plan) and self._fits(one):
                    chains.append(one)
        return chains

    def _in_other_orders(self, improved: list[SimulatedCandidate]) -> list[SimulatedCandidate]:
        """The results with the fastest Plan that lacks some memory in one order of its examples and fits in another."""
        fastest_s, most = self._fastest_s(improved), _NEAR_MEMORY * self.job.capacity_bytes
        lacking = [
            one
            for one in self._known.values()
            if one is not None
            and is_faster(one.prediction.step_s, fastest_s)
            and self.job.capacity_bytes < one.prediction.peak_bytes.max() <= most
            and one.candidate.plan.schedule != "data_parallel"
            and one.candidate.plan.balance in ORDERED_BALANCES
        ]
        found: list[SimulatedCandidate] = []
        for one in sorted(lacking, key=lambda one: one.prediction.step_s):
            for order in _ORDERS:
                plan = replace(one.candidate.plan, order=order, microbatch_caps={})
                if not self._allows(plan) or not self._spend(_IN_OTHER_ORDERS, one.prediction):
                    continue
                if (other := self._faster(one, plan, fastest_s)) is not None:
                    found, fastest_s = [other], other.prediction.step_s
        return [*improved, *found]

    def _under_caps(self, improved: list[SimulatedCandidate]) -> list[SimulatedCandidate]:
        """The results with the fastest Plan that groups under caps make faster than all of them.

        Caps are of one number of microbatches, so that descents compare Plans without, and pass a microbatch size that
        gains more by them than others. The fastest Plan of each pipeline and size, of those passed, gets them here.
        """
        fastest_s, found, tried = self._fastest_s(improved), list[SimulatedCandidate](), set[Hashable]()
        for one in sorted(self._passed(), key=lambda one: one.prediction.step_s):
            if one.prediction.step_s > NEAR * fastest_s:
                break
            plan = one.candidate.plan
            kind = _Pipeline.of(plan), plan.microbatch_size
            grouped = under_caps(self.job, replace(plan, balance="off"), self.pins) if kind not in tried else None
            if grouped is None or not self._allows(grouped):
                continue
            tried.add(kind)
            if _key(grouped) not in self._known and not self._spend(_GROUPED, one.prediction):
                break
            if (other := self._faster(one, grouped, fastest_s)) is not None:
                found, fastest_s = [other], other.prediction.step_s
        return [*improved, *found]

    def _faster(self, one: SimulatedCandidate, plan: Plan, fastest_s: float) -> SimulatedCandidate | None:
        """A Plan that was made of another one, simulated; None if it is not faster than fastest_s, or does not fit."""
        other = self._predicted(one, plan)
        if other is None or not is_faster(other.prediction.step_s, fastest_s) or not self._fits(other):
            return None
        return self._named(other)

    def _named(self, one: SimulatedCandidate) -> SimulatedCandidate:
        """A Plan that was simulated on the way, by its own degrees."""
        candidate = replace(one.candidate, what=plan_words(one.candidate.plan), bound_s=self._bound_s, tell=tuple)
        return SimulatedCandidate(candidate, one.prediction)

    def _descended(self, start: SimulatedCandidate, purse: Hashable) -> SimulatedCandidate:
        """The fastest Plan that a descent passes, as far as the budget of a purse reaches."""
        found = here = start
        stop_at, self._slower = (1 - _SHARE) * self.left[purse], []
        while after := self._faster_neighbour(here, purse, stop_at) or self._least_slower(found, purse, stop_at):
            here = after
            found = here if is_faster(here.prediction.step_s, found.prediction.step_s) else found
        if found is start:
            return start
        gain = 1 - found.prediction.step_s / start.prediction.step_s
        fact = f"Refined by simulation from {start.candidate.what}: a step takes {gain:.1%} less."
        candidate = replace(
            found.candidate,
            what=_words(start.candidate, found.candidate.plan),
            estimate_s=found.prediction.step_s,
            bound_s=self._bound_s,
            tell=lambda: (fact,),
        )
        return SimulatedCandidate(candidate, found.prediction)

    def _least_slower(self, found: SimulatedCandidate, purse: Hashable, stop_at: float) -> SimulatedCandidate | None:
        """The fastest that fits, was simulated and not gone on from, if it is near the best and budget is left.

        So a descent leaves a Plan that has no faster neighbour.
        """
        self._slower.sort(key=lambda one: one.prediction.step_s)
        limit_s = NEAR * found.prediction.step_s
        while self.left[purse] > stop_at and self._slower and self._slower[0].prediction.step_s <= limit_s:
            if self._fits(one := self._slower.pop(0)):
                return one
        return None

    def _faster_neighbour(
        self, found: SimulatedCandidate, purse: Hashable, stop_at: float
    ) -> SimulatedCandidate | None:
        """The first neighbour that is faster; None if none is, or the budget is down to stop_at."""
        limit_s = found.prediction.step_s
        if self.left[purse] - self._cost(found.prediction) < stop_at:
            return None
        for other in self._new_neighbours(found):
            if self._is_alike(found.candidate.plan, other):
                self.seen.add(_key(other))
                continue
            is_known = _key(other) in self._known
            if self.left[purse] <= stop_at or not (is_known or self._spend(purse, found.prediction)):
                return None
            self.seen.add(_key(other))
            neighbour = self._predicted(found, other)
            if neighbour is None:
                continue
            if not is_faster(neighbour.prediction.step_s, limit_s):
                self._slower.append(neighbour)
                continue
            if not self._fits(neighbour) and (fitting := self._recomputed(neighbour, purse)) is not None:
                neighbour = fitting
            if is_faster(neighbour.prediction.step_s, limit_s) and self._fits(neighbour):
                return neighbour
        return None

    def _recomputed(self, lacking: SimulatedCandidate, purse: Hashable) -> SimulatedCandidate | None:
        """A Plan that lacks memory with recomputation by which it fits: the least that is known, or all. None if that
        was seen, is not allowed, or the budget is spent."""
        plan = lacking.candidate.plan
        if plan.schedule == "data_parallel":
            least = least_recomputed(self.job, plan)
            plans = () if least is None else (least, all_recomputed(plan))
            return next((one for more in plans if (one := self._fitting(lacking, more, purse)) is not None), None)
        whole = self._fitting(lacking, all_recomputed(plan), purse)
        if whole is None:
            return None
        share = share_recomputed(self.job, plan, lacking.prediction, whole.prediction)
        return self._fitting(lacking, share, purse) or whole

    def _fitting(self, lacking: SimulatedCandidate, more: Plan, purse: Hashable) -> SimulatedCandidate | None:
        """A Plan that recomputes more than one that lacks memory; None if it does not fit, was seen, ..."""
        if _key(more) in self.seen or not self._allows(more) or not self._spend(purse, lacking.prediction):
            return None
        self.seen.add(_key(more))
        found = self._predicted(lacking, more)
        return found if found is not None and self._fits(found) else None

    def _predicted(self, found: SimulatedCandidate, plan: Plan) -> SimulatedCandidate | None:
        """A neighbour's step; None if it cannot run on the cluster. Simulated once, whichever descents pass it."""
        key = _key(plan)
        if key not in self._known:
            candidate = replace(found.candidate, plan=plan, strategy=strategy_of(plan))
            try:
                self._known[key] = SimulatedCandidate(candidate, predict_candidate(self.job, candidate))
            except UserError:
                self._known[key] = None
        return self._known[key]

    def _fits(self, one: SimulatedCandidate) -> bool:
        return bool(one.prediction.peak_bytes.max() <= self.job.capacity_bytes)

    def _new_neighbours(self, found: SimulatedCandidate) -> list[Plan]:
        """The neighbours that were not seen, fit and are allowed, and may be faster: the least estimate first."""
        plan, ranked = found.candidate.plan, []
        near = neighbours(self.job, plan, is_recut=isinstance(self._kept, _Pipeline))
        for other in chain(near, regrouped(self.job, plan)):
            if _key(other) in self.seen:
                continue
            try:
                check_fit(other)
            except UserError:
                continue
            if not self._allows(other) or not self._may_replace(plan, other):
                continue
            estimate = quick_estimate(self.job, other)
            if estimate.busiest_s < found.prediction.step_s:
                ranked.append((estimate.estimate_s, other))
        return [other for _, other in sorted(ranked, key=lambda entry: entry[0])]

    def _is_alike(self, plan: Plan, other: Plan) -> bool:
        """Whether a pipeline's neighbour, which differs in its order or balance, has its examples where they are."""
        is_pipeline = plan.schedule != "data_parallel" and not plan.microbatch_caps
        if not is_pipeline or other.units is not plan.units or other.microbatch_size != plan.microbatch_size:
            return False
        if other.schedule != plan.schedule:
            return False
        pair = _key(plan), _key(other)
        if pair not in self._compared:
            try:
                self._compared[pair] = are_alike(self.job.assignment(plan), self.job.assignment(other))
            except UserError:  # `_predicted` leaves it out.
                self._compared[pair] = False
        return self._compared[pair]

    def _may_replace(self, plan: Plan, other: Plan) -> bool:
        return not self.suitable(plan) or self.suitable(other)

    def _allows(self, plan: Plan) -> bool:
        """Whether a Plan that fits is as pinned."""
        unit, pins = plan.unit_of(BACKBONE), self.pins
        if pins.recompute == "none" and any(recomputed_in(plan).values()):
            return False
        degrees = pins.allow(tp=unit.tp, pp=unit.pp, dp=unit.dp, microbatch_size=plan.microbatch_size)
        rest = pins.allow(schedule=plan.schedule, order=plan.order, balance=plan.balance)
        rest = rest and (self._kept is None or self._kept == type(self._kept).of(plan))
        return degrees and rest and strategy_of(plan) in self.strategies and not unmet(plan, pins)

    def _spend(self, purse: Hashable, like: Prediction, times: int = 1) -> bool:
        """Whether a budget has some simulations like this one left, which are then spent."""
        if not self._can_spend(purse, like, times):
            return False
        self.left[purse] -= times * self._cost(like)
        return True

    def _can_spend(self, purse: Hashable, like: Prediction, times: int) -> bool:
        return times * self._cost(like) <= self.left[purse]

    def _cost(self, like: Prediction) -> int:
        return len(like.timeline) + SIMULATION


def strategy_of(plan: Plan) -> str:
    """The name of the strategy that proposes such Plans."""
    if plan.schedule == "data_parallel":
        return DATA_PARALLEL
    if units_in_bubbles(plan):
        return BUBBLE_FILLING
    if len(plan.units) == 1:
        return CHAIN
    alike = {(unit.tp, unit.cp, unit.dp) for unit in plan.units}
    return MODALITY_PARALLEL if len(alike) == 1 and plan.schedule == "1f1b" else DISAGGREGATED


class _Shape(NamedTuple):
    """Degrees of a Plan's backbone, and whether it is colocated data parallelism, to which a descent may keep."""

    tp: int
    cp: int
    dp: int
    is_colocated: bool

    @classmethod
    def of(cls, plan: Plan) -> _Shape:
        unit = plan.unit_of(BACKBONE)
        return cls(unit.tp, unit.cp, unit.dp, plan.schedule == "data_parallel")


class _Pipeline(NamedTuple):
    """A shape with pipeline ranks and a schedule, to which a descent may keep."""

    shape: _Shape
    pp: int
    schedule: str

    @classmethod
    def of(cls, plan: Plan) -> _Pipeline:
        return cls(_Shape.of(plan), plan.unit_of(BACKBONE).pp, plan.schedule)


def _ended(
    results: list[SimulatedCandidate], start: SimulatedCandidate, end: SimulatedCandidate
) -> list[SimulatedCandidate]:
    """The results with the end of a descent. What became another strategy's Plan stands beside what it began as."""
    if any(end is one for one in results):
        return results
    kept = [one for one in results if one is not start or start.candidate.strategy != end.candidate.strategy]
    return [*kept, end]


def _key(plan: Plan) -> str:
    return repr((plan.units, plan.microbatch_size, plan.schedule, plan.balance, plan.order, plan.microbatch_caps))


def _words(start: Candidate, plan: Plan) -> str:
    """The degrees of a refined Plan: those of the Plan that it began with, if they are the same."""
    return start.what if plan_degrees(start.plan) == plan_degrees(plan) else plan_words(plan)
