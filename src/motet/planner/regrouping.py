"""Plans whose modules form other units: an encoder leaves a chain for ranks of its own, or joins a chain or an encoder.

So encoders are colocated with each other, with the backbone, or with neither, whatever strategy a Plan began as. They
are neighbours (`neighbours.py`) whose cuts are even and whose degrees are those of the units that they come from.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from motet.core.plan import Plan, Unit
from motet.core.workload import BACKBONE
from motet.planner.job import Job
from motet.planner.neighbours import evenly_cut, on_first_ranks, with_microbatches
from motet.schedule.plan_units import backbone_unit, units_in_bubbles

_SCHEDULES_OF_UNITS = ("1f1b", "gpipe", "interleaved_1f1b")


def regrouped(job: Job, plan: Plan) -> Iterator[Plan]:
    """The Plans in which one encoder is elsewhere; none of data parallelism, and of encoders in bubbles."""
    if plan.schedule == "data_parallel" or units_in_bubbles(plan):
        return
    is_of_units = plan.schedule in _SCHEDULES_OF_UNITS
    chunks = len(backbone_unit(plan).stages) // backbone_unit(plan).pp if is_of_units else 1
    plan = replace(plan, schedule=plan.schedule if is_of_units else "1f1b", microbatch_caps={})
    for unit in plan.units:
        for name in unit.modules:
            if len(unit.modules) > 1 and name != BACKBONE:
                yield from _split(job, plan, unit, name, chunks)
        for other in plan.units:
            if other is not unit and BACKBONE not in other.modules:
                yield from _joined(job, plan, unit, other, chunks)


def _split(job: Job, plan: Plan, unit: Unit, name: str, chunks: int) -> Iterator[Plan]:
    """A module of a unit gets ranks of its own: a pipeline rank of it, some of its replicas, or ranks left over."""
    own = ({name: len(job.model.module(name).blocks)},)
    rest = tuple(other for other in unit.modules if other != name)
    left = plan.cluster.num_ranks - sum(other.num_ranks for other in plan.units)
    if most := left // (unit.tp * unit.cp):
        alone = Unit(name, own, dp=most, tp=unit.tp, cp=unit.cp)
        yield from _with(job, plan, [unit], [alone, _of(job, unit, rest)], chunks)
    if unit.pp > 1:
        alone = Unit(name, own, dp=unit.dp, tp=unit.tp, cp=unit.cp)
        yield from _with(job, plan, [unit], [alone, _of(job, replace(unit, pp=unit.pp - 1), rest)], chunks)
    for given in range(1, unit.dp):
        alone = Unit(name, own, dp=given * unit.pp, tp=unit.tp, cp=unit.cp)
        yield from _with(job, plan, [unit], [alone, _of(job, replace(unit, dp=unit.dp - given), rest)], chunks)


def _joined(job: Job, plan: Plan, unit: Unit, encoder: Unit, chunks: int) -> Iterator[Plan]:
    """An encoder's unit joins another one, in front of its modules: with its ranks as further pipeline ranks or
    replicas, or on the unit's own ranks alone."""
    modules = (*encoder.modules, *unit.modules)
    added = max(encoder.num_ranks // (unit.tp * unit.cp * unit.dp), 0)
    shapes = [replace(unit, pp=unit.pp + added), replace(unit, pp=unit.pp)]
    more = encoder.num_ranks // (unit.tp * unit.cp * unit.pp)
    if more:
        shapes.append(replace(unit, dp=unit.dp + more))
    for shape in shapes:
        yield from _with(job, plan, [unit, encoder], [_of(job, shape, modules)], chunks)


def _of(job: Job, unit: Unit, modules: tuple[str, ...]) -> Unit:
    """The unit with other modules, not cut yet."""
    whole = {name: len(job.model.module(name).blocks) for name in modules}
    return replace(unit, name="+".join(modules), stages=(whole,), recompute=())


def _with(job: Job, plan: Plan, old: list[Unit], new: list[Unit], chunks: int) -> Iterator[Plan]:
    """The Plan with other units, cut evenly and placed anew; none where a unit has too few blocks."""
    cut = [evenly_cut(job, unit, plan.microbatch_size, chunks if BACKBONE in unit.modules else 1) for unit in new]
    kept = [unit for unit in plan.units if all(unit is not other for other in old)]
    units = [unit for unit in cut if unit is not None]
    if len(units) == len(new):
        yield from with_microbatches(on_first_ranks(replace(plan, units=(*units, *kept))), plan)
