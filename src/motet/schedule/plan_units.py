"""The units of a Plan by the ranks that they run on: ranks of their own, or those of the backbone's unit."""

from __future__ import annotations

from motet.core.plan import Plan, Unit
from motet.core.workload import BACKBONE


def backbone_unit(plan: Plan) -> Unit:
    """The unit that runs the backbone."""
    return plan.unit_of(BACKBONE)


def units_in_bubbles(plan: Plan) -> tuple[Unit, ...]:
    """Encoder units that run on the ranks of the backbone's unit, in its bubbles (Optimus section 3.1)."""
    backbone = backbone_unit(plan)
    return tuple(unit for unit in plan.units if unit is not backbone and unit.first_rank == backbone.first_rank)


def pipelined_units(plan: Plan) -> tuple[Unit, ...]:
    """The units that have ranks of their own. The backbone's unit is one of them."""
    in_bubbles = units_in_bubbles(plan)
    return tuple(unit for unit in plan.units if unit not in in_bubbles)
