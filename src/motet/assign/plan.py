"""A Plan and the lengths of a step into the StepAssignment: the one road that simulator, planner and runtime take."""

from __future__ import annotations

from motet.assign.balancing import Balancing, by_operations
from motet.assign.data_parallel import assign_data_parallel
from motet.assign.ordering import StepSeconds, given_batching, ordered_batching
from motet.assign.pipeline import assign_batching
from motet.assign.step import StepAssignment
from motet.core.errors import ArgumentError
from motet.core.plan import Plan
from motet.core.workload import BatchLengths


def assign_step(
    plan: Plan, batch: BatchLengths, balancing: Balancing = by_operations, seconds: StepSeconds | None = None
) -> StepAssignment:
    """Assign a batch of `plan.batch_size` examples to a Plan that fits (`check_fit`); the same on every rank.

    balancing: by what colocated phases are balanced, under "data_parallel". seconds: from which a pipeline's examples
    are dealt out. Raises ArgumentError for a Plan that deals them out where `seconds` is missing.
    """
    if plan.schedule == "data_parallel":
        return assign_data_parallel(plan, batch, balancing)
    if plan.order == "given":
        return assign_batching(plan, batch, given_batching(plan, batch))
    if seconds is None:
        raise ArgumentError(
            f"the plan deals examples out (order {plan.order!r}), which is decided from their seconds; give them."
        )
    return assign_batching(plan, batch, ordered_batching(plan, batch, seconds))
