"""The assignment of a step under "data_parallel": microbatches and ranks are decided as in training.

The Plan has one unit; each phase of a microbatch is placed over its ranks.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np

from motet.assign.balancing import Balancing, cutting, recomputed_blocks
from motet.assign.groups import grouped
from motet.assign.orchestrator import Orchestrator, joined_decisions
from motet.assign.step import StepAssignment
from motet.assign.whole_step import decide_step
from motet.balance import METHODS, Method, Packed
from motet.core.plan import Plan
from motet.core.workload import BACKBONE, BatchLengths, home_ranks
from motet.cost.memory import plan_precision
from motet.schedule.layout import num_microbatches


def assign_data_parallel(plan: Plan, batch: BatchLengths, balancing: Balancing) -> StepAssignment:
    """Assign the items of `plan.batch_size` examples to microbatches and ranks, as training does.

    batch:     if the Plan has microbatch_caps, its groups count, else it is grouped by itself.
    balancing: gives the costs that are balanced. Examples of the result are in the order of their microbatches.
    """
    unit, count = plan.unit_of(BACKBONE), num_microbatches(plan)
    if plan.microbatch_caps:
        if batch.group is None:
            batch = replace(batch, group=grouped(batch, plan.microbatch_caps, unit.dp * count))
    else:
        home = np.tile(home_ranks(batch.num_examples // count, unit.dp), count)
        batch = replace(batch, home=home)
    names = [module.name for module in plan.model.modules]
    # A workload may have lengths of modalities that the model lacks.
    items = {name: items for name, items in batch.items.items() if name in names}
    # Threads run in parallel here: the balance core releases Python's lock.
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        step = decide_step(orchestrator_of(plan, balancing), replace(batch, items=items), count, run=pool.map)
    decisions = [part.decision for part in step.microbatches]
    methods = () if plan.balance == "off" else tuple(decision.method for decision in decisions)
    return joined_decisions([part.lengths for part in step.microbatches], decisions, names, methods)


def orchestrator_of(plan: Plan, balancing: Balancing) -> Orchestrator:
    """The Orchestrator that training under the Plan decides with."""
    unit, names = plan.unit_of(BACKBONE), [module.name for module in plan.model.modules]
    if plan.balance == "off":
        return Orchestrator(dict.fromkeys(names, Packed()), unit.dp, ())
    costs = balancing(plan)
    # Tensor-parallel ranks divide the work of one rank.
    times = costs.times.shared_by(unit.tp)
    methods: tuple[Method, ...] = METHODS
    if plan.balance == "split":
        cut = cutting(times, plan.model, recomputed_blocks(plan), plan_precision(plan).compute)
        times, methods = replace(cut, waits=unit.waits), (*METHODS, "split")
    elif plan.balance != "auto":
        methods = (plan.balance,)
    return Orchestrator(costs.costs, unit.dp, names, work=costs.work, times=times, methods=methods, defers=costs.defers)
