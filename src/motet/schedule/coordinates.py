"""Which part of a Plan's Program a rank of the cluster computes: the first question of a runtime, and its inverse.

A Program is of one island (`core/plan.py`), and a program rank of it stands for tp * cp ranks of the cluster in every
island. So a rank has an island and a program rank, and, in its unit, one coordinate an axis: pipeline (p), data (d),
context (c) and tensor parallelism (t).
"""

from __future__ import annotations

from typing import NamedTuple

from motet.core.errors import ArgumentError
from motet.core.plan import Unit
from motet.schedule.layout import Layout, PlannedStage


class Coordinates(NamedTuple):
    """Of one rank, in one unit.

    island, program_rank: which of the job's islands, and which rank of the Program the rank is in it.
    p, d, c, t:           in the unit, each from 0 (`Unit.rank`). d counts over all islands.
    places:               of the unit's stages, those that the rank computes; what is replicated runs beside each.
    """

    unit: Unit
    island: int
    program_rank: int
    p: int
    d: int
    c: int
    t: int
    places: tuple[int, ...]


def coordinates(layout: Layout, rank: int, unit: Unit | None = None) -> Coordinates:
    """Of a rank of the cluster. unit: one that runs in the backbone's bubbles; by default the one that has the rank.

    Raises ArgumentError for a rank that the unit, or every one, is without. O(units + stages of the unit).
    """
    host = next((one for one in layout.units if rank in one.ranks), None)
    if host is None or (unit is not None and host_of(layout, unit) != host):
        units = "; ".join(f"{one.name!r} is on {one.ranks.start} to {one.ranks.stop - 1}" for one in layout.units)
        name = "no unit of the plan is" if unit is None else f"unit {unit.name!r} is not"
        raise ArgumentError(f"{name} on rank {rank}: {units}.")
    p, d, _, _ = host.coordinates(rank)
    island, replica = divmod(d, layout.num_replicas(host))
    program_rank = layout.first_program_rank(host) + replica * host.pp + p
    own = unit or host
    at = own.coordinates(rank)
    places = (place for place in range(len(own.stages)) if layout.pipeline_rank(own, place) == at[0])
    return Coordinates(own, island, program_rank, *at, tuple(places))


def ranks_of(layout: Layout, program_rank: int, island: int) -> range:
    """Of the cluster: those that a program rank stands for in an island, which share its work.

    Raises ArgumentError for a program rank or an island that there is not.
    """
    for unit in layout.units:
        replica, p = divmod(program_rank - layout.first_program_rank(unit), unit.pp)
        if 0 <= replica < layout.num_replicas(unit) and 0 <= island < layout.num_islands:
            first = unit.rank(p, island * layout.num_replicas(unit) + replica)
            return range(first, first + unit.cp * unit.tp)
    raise ArgumentError(f"the plan's Program has no rank {program_rank} in an island {island} of {layout.num_islands}.")


def host_of(layout: Layout, unit: Unit) -> Unit:
    """The unit on whose ranks a unit runs: itself, or, in bubbles, the backbone's."""
    return layout.backbone if unit in layout.colocated else unit


def replica_of(layout: Layout, stage: PlannedStage, island: int) -> int:
    """Whose items a stage computes in an island: its unit's replica, or, in bubbles, the backbone's on whose ranks it
    runs. Counted over the whole job, as an assignment's replicas are (`assign/`)."""
    host = host_of(layout, stage.unit)
    pipelines = 1 if host is stage.unit else host.pp // stage.unit.pp
    return island * layout.num_replicas(host) + stage.replica // pipelines
