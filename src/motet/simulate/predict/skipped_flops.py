"""Operations of backward passes that data parallelism leaves out: those of microbatches without items of what learns.

Stages run a backward pass of each microbatch, so they leave out none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from motet.assign.step import ModuleAssignment
from motet.core.arrays import Int64Array
from motet.core.workload import BACKBONE
from motet.cost.flops import step_flops
from motet.schedule.plan_units import recomputed_in

if TYPE_CHECKING:
    from motet.simulate.predict.stage_pricing import Pricing


def skipped_flops(pricing: Pricing) -> int:
    """The operations that whole stages have in all microbatches and that are left out, over all ranks."""
    plan, assignment, recomputed = pricing.plan, pricing.assignment, pricing.recomputed
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
            skipped += _input_flops(pricing, name, chosen, number)
    return skipped


def _input_flops(pricing: Pricing, name: str, chosen: Int64Array, num_recomputed: int) -> int:
    """What a module computes on some items only for the gradient of its input, its first blocks again included."""
    assignment = pricing.assignment
    items: ModuleAssignment = assignment.modules[name]
    with_gradient, without = (
        step_flops(
            pricing.plan.model.module(name),
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
