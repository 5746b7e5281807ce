"""Data and order: how the examples of a step become a pipeline's microbatches, on whichever Plan has been found.

Beside examples as they come, as many in each microbatch:

- dealt out to replicas and microbatches that are even, microbatches in the best order, or both (MMScale sections 5.1
  and 5.2; decided in every step, `assign/ordering.py`);
- groups of examples under caps of vision and text (OmniBal section 4.1). The paper's caps are what the longest text
  takes, and say how many groups there are. Here the Plan says how many microbatches a step has, and the caps are the
  least, in the proportion of vision to text in the data, under which batches fall into so many groups at most.

A Plan is simulated with each, and keeps the one with the fastest step; as they come, if nothing is faster.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from motet.assign.groups import groups_under, total_lengths
from motet.assign.step import StepAssignment
from motet.core.plan import Order, Plan
from motet.core.workload import BACKBONE, BatchLengths
from motet.planner.candidate import Candidate, Pins, RuledOut
from motet.planner.job import Job
from motet.schedule import planned
from motet.schedule.plan_units import pipelined_units
from motet.simulate.predict.predict import assign_batch, predict_assigned
from motet.simulate.predict.prediction import Prediction

NUM_BATCHES = 4
"""Drawn batches that must fit under the caps, the job's own first."""
WIDENED = 1.02
"""By which caps are widened at a time."""
_ORDERS: tuple[Order, ...] = ("both", "intra", "inter")


def pinned(candidate: Candidate, pins: Pins) -> Candidate | RuledOut:
    """The candidate with the order that is pinned, if there is one."""
    if pins.order in (None, candidate.plan.order):
        return candidate
    if candidate.plan.schedule == "data_parallel":
        why = f"order is pinned to {pins.order!r}, which is of pipelines; balance deals examples out here."
        return RuledOut(candidate.strategy, candidate.what, why)
    return replace(candidate, plan=replace(candidate.plan, order=pins.order))


def reordered(job: Job, candidate: Candidate, given: Prediction, pins: Pins) -> tuple[Candidate, Prediction]:
    """The candidate with the order and caps with which its step is the fastest, and fits memory; or as it is.

    given: its step as it is. Simulates up to four times.
    """
    if pins.order is not None or candidate.plan.schedule == "data_parallel" or _is_even(job.batch):
        return candidate, given
    stages = planned(candidate.plan)
    before = assign_batch(candidate.plan, job.batch, job.cost)
    best, best_plan = given, candidate.plan
    for plan in _others(job, candidate.plan, pins):
        if best_plan.order == "both" and plan.order != "both":
            continue  # Half of what is faster already.
        assignment = assign_batch(plan, job.batch, job.cost)
        if not _alike(assignment, before):
            found = predict_assigned(plan, stages, assignment, job.cost)
            if found.step_s < best.step_s and found.peak_bytes.max() <= job.capacity_bytes:
                best, best_plan = found, plan
    if best_plan is candidate.plan:
        return candidate, given
    what = "grouping and order" if best_plan.microbatch_caps else "order"
    fact = f"By the {what} of its examples a step takes {1 - best.step_s / given.step_s:.1%} less than as they come."
    return replace(candidate, plan=best_plan, facts=(fact, *candidate.facts)), best


def caps_for(job: Job, plan: Plan) -> dict[str, int]:
    """The least caps under which a step's examples are at most as many groups as its microbatches; {} where groups make
    no sense: of single examples, without an encoder, or shared by several replicas of a unit."""
    encoders = [module.name for module in job.model.modules if module.name != BACKBONE]
    if plan.microbatch_size == 1 or not encoders or len({unit.dp for unit in pipelined_units(plan)}) > 1:
        return {}
    seconds = [float(job.microbatch_seconds(name, plan.microbatch_size).sum()) for name in encoders]
    vision = encoders[int(np.argmax(seconds))]
    batches = map(job.drawn, range(NUM_BATCHES))
    sizes = [{name: total_lengths(batch, name) for name in (vision, BACKBONE)} for batch in batches]
    most = plan.batch_size // plan.microbatch_size
    mean = {name: max(int(of[name].sum()) for of in sizes) / most for name in (vision, BACKBONE)}
    wide = 1.0
    while True:
        caps = {name: max(round(wide * length), 1) for name, length in mean.items()}
        if all(groups_under(caps, of, most) is not None for of in sizes):
            return caps
        wide *= WIDENED


def _others(job: Job, plan: Plan, pins: Pins) -> Iterator[Plan]:
    for order in _ORDERS:
        yield replace(plan, order=order)
    if pins.microbatch_size is None and (caps := caps_for(job, plan)):
        yield replace(plan, order="both", microbatch_caps=caps)


def _is_even(batch: BatchLengths) -> bool:
    """Whether all examples are as long as each other in every module, so that it is one which comes first."""
    columns = [batch.sequence, batch.num_targets]
    for items in batch.items.values():
        columns += [np.bincount(items.example, items.length**power, batch.num_examples) for power in (0, 1, 2)]
    return all((values == values[0]).all() for values in columns)


def _alike(one: StepAssignment, other: StepAssignment) -> bool:
    return all(
        np.array_equal(items.microbatch, other.modules[name].microbatch)
        and np.array_equal(items.replica, other.modules[name].replica)
        for name, items in one.modules.items()
    )
