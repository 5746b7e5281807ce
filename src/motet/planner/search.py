"""The fastest Plan of a job: the candidates of all strategies, simulated as far as that can change the answer.

1. All strategies but `PruningStrategy` propose, and the candidates that can win are simulated (`evaluation.py`).
2. Each `PruningStrategy` learns the fastest step so far, and proposes only what may be faster.
3. The fastest Plan of each strategy gets the order of examples, the balancing and the fills that make it fastest
   (`variants.py`).
4. Smaller clusters are searched as well, unless a lower bound shows that they cannot be faster (`fewer_ranks.py`). So
   more nodes are never slower.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

from motet.core.errors import UserError
from motet.core.plan import Plan
from motet.core.workload import BACKBONE
from motet.planner.bound_seconds import ExampleRows
from motet.planner.candidate import Candidate, Pins, PruningStrategy, Strategy, is_faster
from motet.planner.evaluation import NO_QUOTA, CandidateEvaluation, Quota, SearchProgress
from motet.planner.fewer_ranks import on_cluster, smaller_jobs
from motet.planner.field_pins import pinned_plan
from motet.planner.job import Job
from motet.planner.module_pins import check_module_pins
from motet.planner.nearest_miss import nearest_miss, would_fit
from motet.planner.order import check_deal_pins
from motet.planner.refinement import REFINED_RANKS, strategy_of
from motet.planner.search_result import SearchResult, SimulatedCandidate
from motet.planner.step_bound import step_bound

MAX_SIMULATED = 12

NO_PINS = Pins()


def search(
    job: Job,
    strategies: Mapping[str, Strategy],
    pins: Pins = NO_PINS,
    *,
    max_simulated: int | None = MAX_SIMULATED,
    quota: Quota = NO_QUOTA,
    progress: SearchProgress | None = None,
    is_refined: bool = True,
) -> SearchResult:
    """The Plans for a job that were simulated, ranked by their step.

    strategies:    by name; of equally fast Plans, that of the earlier strategy is preferred. `pins.strategies` chooses
                   from them. A `PruningStrategy` that is not pinned comes last and learns the fastest step so far.
    max_simulated: the most candidates that are simulated; the best of each strategy and the quota are simulated in any
                   case. None: no limit, neither on candidates nor on Timelines, so that no candidate can be faster than
                   the first result.
    quota:         Plans that are simulated in addition to those that can be the fastest.
    is_refined:    whether the fastest Plans are refined by their neighbours (`refinement.py`).
    Raises UserError for a workload that lacks the lengths of a module, and for pins that no Plan has.
    """
    _check_lengths(job)
    check_module_pins(job, pins)
    check_deal_pins(pins)
    progress = progress or (lambda what, done, total: None)
    evaluation = CandidateEvaluation(job, pins, max_simulated, quota, progress, is_refined=is_refined)
    plan = pinned_plan(job, pins)
    if plan is not None:
        evaluation.is_refined = False
        strategies = {strategy_of(plan): lambda job, pins: iter([_as_pinned(job, plan)])}
    chosen = _search_whole(evaluation, strategies)
    if plan is None:
        _search_smaller(evaluation, strategies)
        evaluation.vary_compared()
    result = evaluation.result(chosen)
    if not result.results and (nearest := nearest_miss(result.ruled_out)):
        progress("looking for what would fit", 0, 1)
        quick = {
            name: strategy
            for name, strategy in strategies.items()
            if not isinstance(strategy, PruningStrategy) or name in pins.strategies
        }
        result = replace(result, remedies=would_fit(job, quick, pins, nearest))
    return result


def _search_whole(evaluation: CandidateEvaluation, strategies: Mapping[str, Strategy]) -> tuple[str, ...]:
    """The search on all of an evaluation's ranks. Returns the strategies that it chose, by name."""
    pins, max_simulated = evaluation.pins, evaluation.max_simulated
    chosen = {name: strategy for name, strategy in strategies.items() if name in (pins.strategies or strategies)}
    pruning = {
        name: strategy
        for name, strategy in chosen.items()
        if isinstance(strategy, PruningStrategy) and name not in pins.strategies
    }
    evaluation.consider({name: strategy for name, strategy in chosen.items() if name not in pruning})
    to_beat_s = evaluation.fastest_s if max_simulated is not None else math.inf
    evaluation.consider({name: strategy.to_beat(to_beat_s) for name, strategy in pruning.items()})
    evaluation.vary(chosen)
    return tuple(chosen)


def _search_smaller(evaluation: CandidateEvaluation, strategies: Mapping[str, Strategy]) -> None:
    """Add the best Plan of smaller clusters, and the best that the quota counts, each searched for itself, if it is
    faster.

    On few ranks that search is the very one which a job of that size has. On more, what cannot be faster by its own
    bound is left out of it, and so is no place from which refinement goes on.
    """
    quota, rows = evaluation.quota, ExampleRows(evaluation.job)
    kinds = [_is_any, *([quota.suitable] if quota.num_plans else [])]
    all_s = [_fastest_s(evaluation, kind) for kind in kinds]
    to_beat_s, best, is_varied = list(all_s), dict[int, SimulatedCandidate](), dict[int, bool]()
    for job in smaller_jobs(evaluation.job):
        slowest_s = max(to_beat_s)
        if step_bound(job, cuts=evaluation.pins.cuts, rows=rows, up_to_s=slowest_s).step_s >= slowest_s:
            continue
        fewer = CandidateEvaluation(
            job,
            evaluation.pins,
            evaluation.max_simulated,
            quota,
            evaluation.progress,
            is_refined=evaluation.is_refined,
            to_beat_s=math.inf if job.cluster.num_ranks <= REFINED_RANKS else slowest_s,
        )
        _search_whole(fewer, strategies)
        for number, kind in enumerate(kinds):
            if is_faster(_fastest_s(fewer, kind), to_beat_s[number]):
                of_kind = (one for one in fewer.results if kind(one.candidate.plan))
                best[number] = min(of_kind, key=lambda one: one.prediction.step_s)
                is_varied[number] = any(best[number] is one for one in fewer.varied)
                to_beat_s[number] = best[number].prediction.step_s
    for number, one in best.items():
        if number == 0 or one is not best.get(0):
            candidate = on_cluster(one.candidate, evaluation.job, all_s[number])
            evaluation.results.append(SimulatedCandidate(candidate, one.prediction))
            evaluation.varied += evaluation.results[-1:] if is_varied[number] else []


def _is_any(plan: Plan) -> bool:
    return True


def _fastest_s(evaluation: CandidateEvaluation, kind: Callable[[Plan], bool]) -> float:
    """Seconds of the fastest simulated step of a Plan of some kind; infinite where there is none."""
    steps = (one.prediction.step_s for one in evaluation.results if kind(one.candidate.plan))
    return min(steps, default=math.inf)


def _as_pinned(job: Job, plan: Plan) -> Candidate:
    """The candidate of a Plan that is pinned whole."""
    return Candidate(strategy_of(plan), "as pinned", plan, step_bound(job, cuts=plan.balance == "split").step_s or 1.0)


def _check_lengths(job: Job) -> None:
    columns = job.workload.examples.items
    for module in job.model.modules:
        if module.name != BACKBONE and (module.name not in columns or not columns[module.name].num_items):
            known = ", ".join(name for name, items in columns.items() if items.num_items) or "none"
            raise UserError(
                f"The model's module {module.name!r} needs lengths, but {job.workload.source} has no items of it; "
                f"those that it has items of: {known}."
            )
