"""A step of a pipeline decided by its Plan, microbatch by microbatch, in the form in which training loads a step.

Ranks of the assignments are replicas of each module's unit. Of an encoder whose unit has context-parallel ranks, they
are these ranks, replica by replica: its items are dealt out whole (`coordinates.share_of`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np

from motet.assign.orchestrator import Decision
from motet.assign.ordering import StepSeconds
from motet.assign.plan import assign_step
from motet.assign.rows import dealt_out
from motet.assign.step import ModuleAssignment, StepAssignment
from motet.assign.whole_step import DecidedMicrobatch, DecidedStep
from motet.balance import LengthWork, Packed, PhaseCosts, score
from motet.core.arrays import Int64Array
from motet.core.assignment import Assignment
from motet.core.plan import Plan
from motet.core.workload import BACKBONE, BatchLengths
from motet.schedule import PlannedProgram


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
    microbatch = step.modules[BACKBONE].microbatch
    program = program_of(step) if program_of else None
    cp = {name: 1 if name == BACKBONE else plan.unit_of(name).cp for name in step.modules}
    parts = tuple(
        _decided(step, program, number, np.flatnonzero(microbatch == number), cp)
        for number in range(step.num_microbatches)
    )
    return DecidedStep(parts, time.perf_counter() - start_s)


def by_replica(plan: Plan, step: StepAssignment) -> StepAssignment:
    """The StepAssignment of a decided step, put together again, by replicas of units alone."""
    modules = dict(step.modules)
    for name, items in modules.items():
        if name != BACKBONE and (cp := plan.unit_of(name).cp) > 1:
            modules[name] = replace(items, replica=items.replica // cp, num_replicas=items.num_replicas // cp)
    return replace(step, modules=modules)


def _decided(
    step: StepAssignment, program: PlannedProgram | None, microbatch: int, examples: Int64Array, cp: Mapping[str, int]
) -> DecidedMicrobatch:
    """One microbatch of a step.

    examples: int64 [n], its examples, ascending. cp: module -> ranks that share its items.
    """
    lengths = step.batch.take(examples)
    costs = PhaseCosts(dict.fromkeys(step.modules, Packed()), LengthWork())
    work = costs.work(lengths)
    assignments = {name: _assignment(items, microbatch, work[name], cp[name]) for name, items in step.modules.items()}
    method = step.methods[microbatch] if step.methods else "off"
    decision = Decision(assignments, assignments, costs, work, 0.0, method, program=program)
    return DecidedMicrobatch(examples, lengths, decision)


def _assignment(items: ModuleAssignment, microbatch: int, work: Int64Array, cp: int) -> Assignment:
    """Who computes the items of one microbatch. work: int64 [items of the microbatch]. cp: ranks that share items."""
    inside = np.flatnonzero(items.microbatch == microbatch)
    ranks = items.replica[inside].astype(np.int64) * cp
    for replica in np.unique(ranks).tolist() if cp > 1 else ():
        own = np.flatnonzero(ranks == replica)
        ranks[own] += dealt_out(work[own], cp)
    placed = score(ranks, work, items.num_replicas * cp, Packed())
    return replace(placed, items=np.lexsort((items.position[inside], ranks)))
