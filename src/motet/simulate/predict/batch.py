"""The examples of a predicted step, drawn from a workload."""

from __future__ import annotations

import numpy as np

from motet.core.errors import UserError
from motet.core.plan import Plan
from motet.core.workload import BACKBONE, BatchLengths, Workload


def draw_batch(plan: Plan, workload: Workload, rng: np.random.Generator) -> BatchLengths:
    """`plan.batch_size` examples, or as many groups as a step takes, if the Plan and the workload have groups.

    Raises UserError for a workload without lengths of a module.
    """
    columns = workload.examples.items
    for module in plan.model.modules:
        if module.name == BACKBONE:
            continue
        if module.name not in columns or not columns[module.name].num_items:
            known = [name for name, items in columns.items() if items.num_items]
            raise UserError(
                f"The model's module {module.name!r} needs lengths, but {workload.source} has none of it; "
                f"it has {', '.join([*known, BACKBONE])}."
            )
    if plan.schedule == "data_parallel" and plan.microbatch_caps and workload.examples.group is not None:
        return workload.draw_groups(plan.batch_size // plan.microbatch_size, rng)
    return workload.draw(plan.batch_size, rng)
