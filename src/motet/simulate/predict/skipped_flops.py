"""Operations of backward passes that data parallelism leaves out: those of microbatches without items of what learns.

Stages run a backward pass of each microbatch, so they leave out none.
"""

from __future__ import annotations

import numpy as np

from motet.assign.step import ModuleAssignment, StepAssignment
from motet.core.arrays import Int64Array
from motet.core.plan import Plan
from motet.core.workload import BACKBONE
from motet.cost.flops import step_flops
from motet.schedule.plan_units import recomputed_in
from motet.simulate.predict.stage_pricing import Recomputed


def skipped_flops(plan: Plan, assignment: StepAssignment, recomputed: Recomputed) -> int:
    """The operations of a step that `Pricing.hardware_flops` counts and that are left out, over all ranks.

    recomputed: as of `Pricing`, in place of the Plan's numbers.
    """
    if plan.schedule != "data_parallel":
        return 0
    skipped = 0
    for name, items in assignment.modules.items():
        if not (learners := plan.model.learners_before(name)):
            continue
        is_left_out = ~assignment.has_any(learners)[items.microbatch]
        blocks = np.full(len(items.example), recomputed_in(plan).get(name, 0))
        if name in recomputed:
            blocks = recomputed[name][items.replica, items.microbatch]
        for number in np.unique(blocks[is_left_out]).tolist():
            chosen = np.flatnonzero(is_left_out & (blocks == number))
            skipped += _input_flops(plan, assignment, name, chosen, number)
    return skipped


def _input_flops(plan: Plan, assignment: StepAssignment, name: str, chosen: Int64Array, num_recomputed: int) -> int:
    """What a module computes on some items only for the gradient of its input, its first blocks again included."""
    items: ModuleAssignment = assignment.modules[name]
    with_gradient, without = (
        step_flops(
            plan.model.module(name),
            items.length[chosen],
            int(assignment.batch.num_targets[items.example[chosen]].sum()) if name == BACKBONE else None,
            reached=reached,
            recomputed=num_recomputed,
            segments=None if items.segments is None else items.segments.take(chosen),
            num_media=None if items.num_media is None else items.num_media[chosen],
            num_tokens=items.num_tokens[chosen],
        )
        for reached in (True, False)
    )
    return with_gradient - without
