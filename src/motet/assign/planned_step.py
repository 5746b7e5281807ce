"""A step of a pipeline decided by its Plan, microbatch by microbatch, in the form in which training loads a step.

Ranks of the assignments are replicas of each module's unit. Of an encoder whose items several ranks deal out
(`plan_units.sharing_ranks`), they are these ranks, replica by replica (`coordinates.share_of`; `item_shares.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from motet.assign.dealt_items import dealt_items
from motet.assign.orchestrator import Decision, joined_decisions, with_cut_loads
from motet.assign.ordering import StepSeconds
from motet.assign.plan import assign_step
from motet.assign.step import ModuleAssignment, StepAssignment
from motet.assign.whole_step import DecidedMicrobatch, DecidedStep
from motet.balance import LengthWork, Packed, PhaseCosts, score
from motet.core.arrays import BoolArray, Int64Array
from motet.core.assignment import Assignment
from motet.core.cuts import ItemCuts
from motet.core.plan import Plan
from motet.core.spec import Module
from motet.core.workload import BACKBONE, BatchLengths
from motet.schedule import PlannedProgram
from motet.schedule.plan_units import sharing_ranks


def decide_planned_step(
    plan: Plan,
    lengths: BatchLengths,
    seconds: StepSeconds | None = None,
    program_of: Callable[[StepAssignment], PlannedProgram] | None = None,
) -> DecidedStep:
    """Decide a step of `plan.batch_size` examples; the same on all ranks. seconds: as of `assign_step`, and so errors.

    program_of: the Program of a step, where the Plan decides it by step.
    `assign.step.joined` puts the lengths and assignments of its microbatches together to the StepAssignment again.
    """
    start_s = time.perf_counter()
    step = assign_step(plan, lengths, seconds=seconds)
    parts = microbatches_of(plan, step, program_of(step) if program_of else None)
    return DecidedStep(parts, time.perf_counter() - start_s)


def microbatches_of(
    plan: Plan, step: StepAssignment, program: PlannedProgram | None = None
) -> tuple[DecidedMicrobatch, ...]:
    """What training loads of a step that `assign_step` has assigned."""
    microbatch, modules = step.modules[BACKBONE].microbatch, dict(step.modules)
    for name, items in step.modules.items():
        unit = plan.unit_of(name)
        if name != BACKBONE and (num_ranks := sharing_ranks(plan, unit)) > 1:
            modules[name] = _on_ranks(items, plan.model.module(name), num_ranks, unit.cp)
    step = replace(step, modules=modules)
    return tuple(
        _decided(plan, step, program, number, np.flatnonzero(microbatch == number))
        for number in range(step.num_microbatches)
    )


def decided_otherwise(
    plan: Plan, decided: DecidedStep, kept: Sequence[BoolArray], seconds: StepSeconds | None = None
) -> StepAssignment:
    """The assignment of a step as another Plan decides it, by replicas of units alone.

    decided: the step as it was decided. kept: of each of its microbatches, the examples that were not left out, bool
    [num_examples]: the others have no part in either. seconds: of the other Plan, as of `assign_step`, and so errors.
    """
    order = np.argsort(np.concatenate([part.examples for part in decided.microbatches]))
    is_kept = np.concatenate(kept)[order]
    lengths = BatchLengths.joined([part.lengths for part in decided.microbatches]).take(order)
    of_microbatches, decisions = [], []
    for part in decide_planned_step(plan, lengths, seconds).microbatches:
        kept_here = is_kept[part.examples]
        of_microbatches.append(part.lengths.keep(kept_here))
        decisions.append(part.decision.keep(kept_here, part.lengths))
    return by_replica(plan, joined_decisions(of_microbatches, decisions))


def by_replica(plan: Plan, step: StepAssignment) -> StepAssignment:
    """The StepAssignment of a decided step, put together again, by replicas of units alone."""
    modules = {
        name: items if name == BACKBONE else items.by_replica(sharing_ranks(plan, plan.unit_of(name)))
        for name, items in step.modules.items()
    }
    return replace(step, modules=modules)


def _on_ranks(items: ModuleAssignment, module: Module, num_ranks: int, cp: int) -> ModuleAssignment:
    """The items of an encoder by the ranks of its replicas, of which each has so many."""
    dealt = dealt_items(items, module, num_ranks, cp)
    replica, cuts = dealt.ranks.astype(np.int32), dealt.cuts(items.position)
    return replace(items, replica=replica, num_replicas=items.num_replicas * num_ranks, cuts=cuts)


def _decided(
    plan: Plan, step: StepAssignment, program: PlannedProgram | None, microbatch: int, examples: Int64Array
) -> DecidedMicrobatch:
    """One microbatch of a step, whose items are by rank. examples: int64 [n], its examples, ascending."""
    lengths = step.batch.take(examples)
    costs = PhaseCosts(dict.fromkeys(step.modules, Packed()), LengthWork())
    work = costs.work(lengths)
    assignments, sharing = {}, {}
    item_cuts: dict[str, ItemCuts] = {}
    for name, items in step.modules.items():
        unit = plan.unit_of(name)
        if name != BACKBONE and sharing_ranks(plan, unit) > 1:
            sharing[name] = unit.cp
        assignments[name], cuts = _assignment(items, microbatch, work[name])
        if cuts is not None:
            item_cuts[name] = cuts
    method = step.methods[microbatch] if step.methods else "off"
    decision = Decision(
        assignments,
        assignments,
        costs,
        work,
        0.0,
        method,
        program=program,
        cuts=item_cuts.pop(BACKBONE, None),
        item_cuts=item_cuts,
        sharing=sharing,
        cut_rows={module.name: module.cut_rows for module in plan.model.modules},
    )
    return DecidedMicrobatch(examples, lengths, decision)


def _assignment(items: ModuleAssignment, microbatch: int, work: Int64Array) -> tuple[Assignment, ItemCuts | None]:
    """Who computes the items of one microbatch, and which of them ranks share. work: int64 [its items]."""
    inside = np.flatnonzero(items.microbatch == microbatch)
    ranks = items.replica[inside].astype(np.int64)
    placed = score(ranks, work, items.num_replicas, Packed())
    placed = replace(placed, items=np.lexsort((items.position[inside], ranks)))
    cuts = items.cuts and items.cuts.keep(items.microbatch == microbatch)
    return placed if cuts is None else with_cut_loads(placed, cuts, work), cuts
