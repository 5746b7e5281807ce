"""The order and groups in which the examples of a step become a pipeline's microbatches, for a given Plan.

By default ("given"), examples are taken as they come, equally many in each microbatch. Beside that:

- examples are dealt out so that replicas and microbatches are even ("intra"), microbatches get the best order
  ("inter"), or both (MMScale sections 5.1 and 5.2; `assign/ordering.py` decides it in every step);
- examples are grouped under caps of vision and text (OmniBal section 4.1). In the paper, the longest text sets the
  caps, and the caps set the number of groups. Here the Plan sets the number of microbatches, and the caps are the least
  under which batches fall into at most so many groups; vision and text have the ratio that they have in the data.

A Plan is simulated with each of these and keeps the one with the fastest step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from motet.assign.groups import groups_under
from motet.assign.step import StepAssignment
from motet.core.arrays import Float64Array, Int64Array
from motet.core.errors import UserError
from motet.core.plan import ORDERED_BALANCES, Order, Plan, Unit
from motet.core.spec import Layer, Module
from motet.core.workload import BACKBONE, BatchLengths, total_lengths
from motet.cost.flops import work_of_items
from motet.cost.model import Work
from motet.planner.candidate import BUBBLE_FILLING, DATA_PARALLEL, Candidate, Pins, RuledOut, is_faster
from motet.planner.job import MAX_COMPARED, Job
from motet.schedule import check_fit
from motet.schedule.plan_units import pipelined_units, units_in_bubbles
from motet.simulate.predict.predict import predict_assigned
from motet.simulate.predict.prediction import Prediction

NUM_BATCHES = 4
"""The number of drawn batches that must fit under the caps; the first is the job's own."""
CAP_GROWTH = 1.02
"""The factor by which caps that are too small grow at a time."""
_ORDERS: tuple[Order, ...] = ("both", "intra", "inter")


def with_pinned_deal(candidate: Candidate, pins: Pins) -> Candidate | RuledOut:
    """The candidate with the pinned order and, if it is a pipeline, the pinned balance; as it is, if none is pinned."""
    plan = candidate.plan
    if plan.schedule != "data_parallel":
        dealt = replace(
            plan,
            order=pins.order or plan.order,
            balance=pins.balance or plan.balance,
            filling=pins.filling or plan.filling,
        )
        if dealt.balance == "split":
            try:
                check_fit(dealt)
            except UserError as error:
                return RuledOut(candidate.strategy, candidate.what, str(error))
        if dealt.filling == "by_step" and not can_fill_by_step(dealt):
            why = "filling is pinned to 'by_step', and no encoder runs in bubbles, or some run beside parts of passes."
            return RuledOut(candidate.strategy, candidate.what, why)
        if dealt.order != "given" and dealt.balance not in ORDERED_BALANCES:
            why = f"order {dealt.order!r} and balance {dealt.balance!r} are pinned, and both deal out microbatches."
            return RuledOut(candidate.strategy, candidate.what, why)
        return candidate if dealt == plan else replace(candidate, plan=dealt)
    if pins.filling == "by_step":
        why = "filling is pinned to 'by_step', and data parallelism has no bubbles of a pipeline to fill."
        return RuledOut(candidate.strategy, candidate.what, why)
    if pins.order not in (None, plan.order):
        why = f"order is pinned to {pins.order!r}, which is of pipelines; balance deals examples out here."
        return RuledOut(candidate.strategy, candidate.what, why)
    return candidate


def check_deal_pins(pins: Pins) -> None:
    """Raise UserError for pins of orders, balances and fillings that no Plan has together, whatever the job is."""
    is_ordered = pins.order not in (None, "given")
    if is_ordered and pins.balance is not None and pins.balance not in ORDERED_BALANCES:
        raise UserError(
            f"order is pinned to {pins.order!r} and balance to {pins.balance!r}, and both deal out microbatches; leave "
            "one of them out."
        )
    is_colocated = pins.schedule == "data_parallel" or pins.strategies == (DATA_PARALLEL,)
    if is_ordered and is_colocated:
        raise UserError(
            f"order is pinned to {pins.order!r}, which is of pipelines, and data parallelism is pinned too."
        )
    if pins.filling == "by_step" and (is_colocated or (pins.strategies and BUBBLE_FILLING not in pins.strategies)):
        raise UserError(
            f"filling is pinned to 'by_step', which is of {BUBBLE_FILLING}, and a pin leaves {BUBBLE_FILLING} out."
        )


def can_fill_by_step(plan: Plan) -> bool:
    """Whether a Plan's bubbles can be filled anew in each step: by encoders, between whole passes of the backbone."""
    return bool(units_in_bubbles(plan)) and not any("." in fill.before for fill in plan.fills)


def with_best_order(job: Job, candidate: Candidate, given: Prediction, pins: Pins) -> tuple[Candidate, Prediction]:
    """The candidate with the order and caps that make its step the fastest and fit memory, and that step.

    given: the candidate's step as it is; both are returned unchanged if nothing is faster. Simulates up to four times.
    """
    plan = candidate.plan
    if not _can_be_ordered(job, plan, pins):
        return candidate, given
    stages = job.planned(candidate.plan)
    assignment_given = job.assignment(candidate.plan)
    best, best_plan, best_assignment = given, candidate.plan, assignment_given
    for plan in _reordered_plans(job, candidate.plan, pins):
        if best_plan.order == "both" and plan.order != "both":
            continue  # "both" is faster already: its halves are not tried.
        assignment = job.assignment(plan)
        if not are_alike(assignment, assignment_given):
            prediction = predict_assigned(plan, stages, assignment, job.cost, exchange=job.exchange)
            if is_faster(prediction.step_s, best.step_s) and prediction.peak_bytes.max() <= job.capacity_bytes:
                best, best_plan, best_assignment = prediction, plan, assignment
    if best_plan is candidate.plan:
        return candidate, given
    what = "grouping and order" if best_plan.microbatch_caps else "order"
    fact = f"By the {what} of its examples a step takes {1 - best.step_s / given.step_s:.1%} less than as they come."
    bound_s = candidate.bound_s * share_left(job, best_plan, assignment_given, best_assignment)
    return replace(candidate, plan=best_plan, bound_s=bound_s, tell=candidate.telling(fact)), best


def can_win(job: Job, candidate: Candidate, pins: Pins, fastest_s: float) -> bool:
    """Whether a step of the candidate, in an order that `with_best_order` tries, may take less than `fastest_s`.

    Of more than MAX_COMPARED examples, which take long to order, by the bound of these as they come.
    """
    if candidate.bound_s < fastest_s or job.batch_size > MAX_COMPARED or not _can_be_ordered(job, candidate.plan, pins):
        return candidate.bound_s < fastest_s
    # Those by which other examples come together: "intra" brings together what "both" does.
    plans = (plan for plan in _reordered_plans(job, candidate.plan, pins) if plan.order == "both")
    given = job.assignment(candidate.plan)
    shares = (share_left(job, plan, given, job.assignment(plan)) for plan in plans)
    return any(candidate.bound_s * share < fastest_s for share in shares)


def share_left(job: Job, plan: Plan, given: StepAssignment, other: StepAssignment) -> float:
    """Which share of the seconds of passes is left, at least, if other examples come together: of the block that gains
    most.

    Groups under caps may be fewer than microbatches, so that weights are read less often; alike items are padded less.
    """
    if are_alike(given, other):
        return 1.0
    shares = [1.0]
    for module in job.model.modules:
        unit, layers = plan.unit_of(module.name), dict.fromkeys(module.layers)
        before, after = (
            {layer: _seconds(job, module, unit, layer, each) for layer in layers} for each in (given, other)
        )
        for block in module.blocks:
            old, new = (np.sum([of[module.layers[index]] for index in block], axis=0) for of in (before, after))
            shares += (new[old > 0] / old[old > 0]).tolist()
    return min(shares)


def _seconds(job: Job, module: Module, unit: Unit, layer: Layer, assignment: StepAssignment) -> Float64Array:
    """Forward, and backward for the input and for the weights, each with its messages, of all passes: [3]."""
    items, targets = assignment.modules[module.name], None
    cell = items.batch_index(assignment.num_microbatches)
    count = items.num_replicas * assignment.num_microbatches
    if module.name == BACKBONE:
        targets = np.bincount(cell, job.batch.num_targets, count).astype(np.int64)
    lengths = job.batch.of(module.name)
    work = work_of_items(layer, lengths, cell, count, padded=module.padded, num_targets=targets)
    work = Work(work.rows / unit.cp, work.pairs / unit.cp)
    seconds = job.cost.unwrapped().layer_seconds(module.name, layer, work, unit.tp)
    messages_s = job.cost.tensor_seconds(layer, work, range(unit.tp)).sum() if unit.tp > 1 else 0.0
    passes = seconds.forward_s, seconds.input_s, seconds.weight_s
    return np.array([each.sum() + messages_s for each in passes])


def caps_for(job: Job, plan: Plan) -> dict[str, int]:
    """The least caps under which the examples of a step fall into at most as many groups as it has microbatches.

    By module: the backbone, and the encoder that takes the most seconds. {} where groups make no sense: for
    microbatches of one example, without an encoder, and where units have different numbers of replicas.
    """
    encoders = [module.name for module in job.model.modules if module.name != BACKBONE]
    if plan.microbatch_size == 1 or not encoders or len({unit.dp for unit in pipelined_units(plan)}) > 1:
        return {}
    seconds = [float(job.microbatch_seconds(name, plan.microbatch_size).sum()) for name in encoders]
    key = "caps", encoders[int(np.argmax(seconds))], plan.batch_size // plan.microbatch_size
    if key not in job.of_any_cluster:
        job.of_any_cluster[key] = _caps_of(job, *key[1:])
    caps: dict[str, int] = job.of_any_cluster[key]
    return caps


def under_caps(job: Job, plan: Plan, pins: Pins) -> Plan | None:
    """The Plan with its examples in groups under `caps_for`, in the best order; None where they can have no others."""
    is_pinned = pins.microbatch_size is not None or any(stated.cap is not None for stated in pins.fields.values())
    if is_pinned or not _can_be_ordered(job, plan, pins) or not (caps := caps_for(job, plan)):
        return None
    return replace(plan, order="both", microbatch_caps=caps)


def _caps_of(job: Job, vision: str, max_groups: int) -> dict[str, int]:
    """`caps_for` of an encoder and the backbone, for so many microbatches of all replicas."""
    sizes = _sizes(job, (vision, BACKBONE))
    mean = {name: max(int(size[name].sum()) for size in sizes) / max_groups for name in (vision, BACKBONE)}
    factor = 1.0
    while True:
        caps = {name: max(round(factor * length), 1) for name, length in mean.items()}
        if all(groups_under(caps, size, max_groups) is not None for size in sizes):
            return caps
        factor *= CAP_GROWTH


def _sizes(job: Job, names: tuple[str, ...]) -> list[dict[str, Int64Array]]:
    """The summed lengths of each example, by module, of NUM_BATCHES batches. Of a job they are counted once."""
    key = "summed lengths", names
    if key not in job.of_any_cluster:
        batches = (job.drawn(0), *(job.drawn_once(number) for number in range(1, NUM_BATCHES)))
        job.of_any_cluster[key] = [{name: total_lengths(batch, name) for name in names} for batch in batches]
    sizes: list[dict[str, Int64Array]] = job.of_any_cluster[key]
    return sizes


def is_even(batch: BatchLengths) -> bool:
    """Whether all examples have equal lengths in every module, so that it does not matter which is where."""
    columns = [batch.sequence, batch.num_targets]
    for items in batch.items.values():
        for figure in (items.summed(np.ones_like), items.length, items.summed(np.square)):
            columns.append(np.bincount(items.example, figure, batch.num_examples))
    return all((values == values[0]).all() for values in columns)


def _can_be_ordered(job: Job, plan: Plan, pins: Pins) -> bool:
    is_pipeline = plan.schedule != "data_parallel" and plan.balance in ORDERED_BALANCES
    return pins.order is None and is_pipeline and not is_even(job.batch)


def _reordered_plans(job: Job, plan: Plan, pins: Pins) -> Iterator[Plan]:
    for order in _ORDERS:
        yield replace(plan, order=order)
    if (grouped := under_caps(job, plan, pins)) is not None:
        yield grouped


def are_alike(one: StepAssignment, other: StepAssignment) -> bool:
    """Whether both have the same items in the same microbatches and replicas."""
    return all(
        np.array_equal(items.microbatch, other.modules[name].microbatch)
        and np.array_equal(items.replica, other.modules[name].replica)
        for name, items in one.modules.items()
    )
