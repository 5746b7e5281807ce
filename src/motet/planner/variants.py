"""What a Plan leaves open once its degrees are set: fills, order and groups of examples, and balancing.

A strategy proposes Plans with one choice of each. The leaders of a search are simulated with the other choices too, and
keep what is fastest. So two of them differ by what they are, not by what was tried for them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from motet.core.plan import MOVES_ITEMS, PROPOSED_BALANCES, BalancingMethod, Plan
from motet.planner.candidate import Candidate, Pins, is_faster, predict_candidate
from motet.planner.data_parallel.search import sampled_s
from motet.planner.job import Job
from motet.planner.order import can_fill_by_step, is_even, with_best_order
from motet.schedule.plan_units import backbone_unit, pipelined_units, shares_items
from motet.simulate.predict.predict import MAX_ISLANDS
from motet.simulate.predict.prediction import Prediction

_MAX_ALL_SIMULATED = 4096
"""The most examples of a batch of which all ways of balancing are simulated."""
_ABOUT_EQUAL = 1.005
"""The factor by which estimates of two ways of balancing may be wrong against each other."""
MAX_JOINED_STAGES = 64
"""The most stages, over all replicas of all units, of a Program that joins all replicas."""

MAX_FILLED_BY_STEP = 4_000
"""The most fills, over all islands that are simulated, of a Plan whose bubbles are tried to be filled by step."""


def fastest_variant(job: Job, candidate: Candidate, given: Prediction, pins: Pins) -> tuple[Candidate, Prediction]:
    """The variant of a candidate whose step is the fastest and fits memory, and that step.

    given: the candidate's step as it is; both are returned unchanged if nothing is faster. Simulates up to 18 times.
    """
    start = _as_it_comes(candidate, pins)
    if start is candidate:
        best = with_best_order(job, candidate, given, pins)
    else:  # Refinement has dealt out its examples.
        best = candidate, given
    others = (
        *((start,) if start is not candidate else ()),
        *_otherwise_balanced(job, start, pins),
        *_without_fills(start, pins),
        *_by_step(job, start, pins),
    )
    for variant in others:
        variant, prediction = with_best_order(job, variant, predict_candidate(job, variant), pins)
        if is_faster(prediction.step_s, best[1].step_s) and prediction.peak_bytes.max() <= job.capacity_bytes:
            best = variant, prediction
    found, prediction = best
    if found.plan.balance != candidate.plan.balance:
        gain = 1 - prediction.step_s / given.step_s
        fact = f'Balanced so, a step takes {gain:.1%} less than with balance = "{candidate.plan.balance}".'
        return replace(found, tell=found.telling(fact)), prediction
    if found.plan.filling != candidate.plan.filling:
        gain, fact = 1 - prediction.step_s / given.step_s, "Each step fills bubbles by its own lengths"
        fact += f": it takes {gain:.1%} less." if found.plan.order == candidate.plan.order else "."
        return replace(found, tell=found.telling(fact)), prediction
    return best


def _as_it_comes(candidate: Candidate, pins: Pins) -> Candidate:
    """The candidate with a pipeline's examples as they come, as far as nothing else is pinned; itself, if they do."""
    plan = candidate.plan
    if plan.schedule == "data_parallel":
        return candidate
    if pins.order is None and all(stated.cap is None for stated in pins.fields.values()):
        plan = replace(plan, order="given", microbatch_caps={})
    if pins.balance is None:
        plan = replace(plan, balance="off")
    return candidate if plan == candidate.plan else replace(candidate, plan=plan)


def _otherwise_balanced(job: Job, candidate: Candidate, pins: Pins) -> Iterator[Candidate]:
    """The other ways of balancing. Of colocated phases, "auto" weighs microbatches, without the gathers beside them."""
    plan = candidate.plan
    if pins.balance is not None or is_even(job.batch):
        return
    if plan.schedule == "data_parallel":
        for method in PROPOSED_BALANCES if plan.units[0].dp > 1 else ():
            variant = replace(candidate, plan=replace(plan, balance=method, policy=job.policy_under(method)))
            if method != plan.balance and not _is_alike(job, plan, method) and _may_be_faster(job, variant, candidate):
                yield variant
    elif plan.order == "given":
        for method in _in_pipelines(plan):
            yield replace(candidate, plan=replace(plan, balance=method))


def _is_alike(job: Job, plan: Plan, method: BalancingMethod) -> bool:
    """Whether a way of balancing decides as "auto" does: it is that one which "auto" takes in every microbatch, of the
    examples as they come. Both then have the same exchanges, too."""
    if plan.balance != "auto" or method not in MOVES_ITEMS:
        return False
    assignment = job.assignment(plan)
    as_it_comes = np.array_equal(assignment.batch.sequence, job.batch.sequence)
    return as_it_comes and set(assignment.methods) == {method}


def _may_be_faster(job: Job, variant: Candidate, candidate: Candidate) -> bool:
    """Whether a variant of colocated phases may be faster, by a sample of the batch; True where the batch is small."""
    if candidate.plan.batch_size <= _MAX_ALL_SIMULATED:
        return True
    return sampled_s(job, variant.plan) < _ABOUT_EQUAL * sampled_s(job, candidate.plan)


def _in_pipelines(plan: Plan) -> Iterator[BalancingMethod]:
    """The ways of balancing that can change a pipeline's step.

    Items over all replicas of a unit make one Program of the whole job: it is simulated up to MAX_JOINED_STAGES.
    """
    shared = [
        unit for unit in pipelined_units(plan) if unit.dp > 1 and any(shares_items(plan, n) for n in unit.modules)
    ]
    if shared and sum(unit.dp * len(unit.stages) for unit in pipelined_units(plan)) <= MAX_JOINED_STAGES:
        yield "per_phase"
    if backbone_unit(plan).dp > 1:
        yield "joint"


def _without_fills(candidate: Candidate, pins: Pins) -> Iterator[Candidate]:
    """Passes of encoders stay whole, before and after the backbone's."""
    if candidate.plan.fills and pins.fills is None:
        plan = replace(candidate.plan, fills=())
        yield replace(candidate, plan=plan, what=f"{candidate.what}, no fills", tell=tuple)


def _by_step(job: Job, candidate: Candidate, pins: Pins) -> Iterator[Candidate]:
    """Each step fills bubbles by its own lengths: with passes in the parts of the candidate's fills, and whole ones."""
    num_fills = len(candidate.plan.fills) * min(backbone_unit(candidate.plan).dp, MAX_ISLANDS)
    if pins.filling is not None or is_even(job.batch) or num_fills > MAX_FILLED_BY_STEP:
        return
    whole = (replace(candidate.plan, fills=()),) if candidate.plan.fills and pins.fills is None else ()
    for plan in (candidate.plan, *whole):
        if can_fill_by_step(plan):
            what = f"{candidate.what}, filled by step"
            yield replace(candidate, plan=replace(plan, filling="by_step"), what=what)
