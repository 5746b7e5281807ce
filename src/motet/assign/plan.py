"""From a Plan and the lengths of a step to its StepAssignment: simulator, planner and runtime call `assign_step`."""

from __future__ import annotations

from motet.assign.balancing import Balancing, by_operations
from motet.assign.data_parallel import assign_data_parallel
from motet.assign.ordering import StepSeconds, assign_ordered, given_batching
from motet.assign.pipeline import assign_batching
from motet.assign.pipeline_balance import assign_balanced
from motet.assign.step import StepAssignment
from motet.core.errors import ArgumentError
from motet.core.plan import Plan
from motet.core.workload import BatchLengths


def assign_step(
    plan: Plan, batch: BatchLengths, balancing: Balancing = by_operations, seconds: StepSeconds | None = None
) -> StepAssignment:
    """Assign the items of `plan.batch_size` examples, the same on every rank. The Plan must pass `check_fit`.

    batch:     the lengths of the step.
    balancing: gives the costs that balance colocated phases, under "data_parallel". Pipelines count operations.
    seconds:   prices examples and passes, for a pipeline whose `order` is not "given".
    Raises ArgumentError if the Plan's `order` needs `seconds` and there are none.
    """
    if plan.schedule == "data_parallel":
        return assign_data_parallel(plan, batch, balancing)
    if plan.order == "given":
        given = given_batching(plan, batch)
        assign = assign_batching if plan.balance == "off" else assign_balanced
        return assign(plan, batch, given)
    if seconds is None:
        raise ArgumentError(
            f"the plan has order {plan.order!r}, which is decided from the seconds of examples; pass `seconds`."
        )
    return assign_ordered(plan, batch, seconds)
