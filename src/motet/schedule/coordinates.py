"""Which part of a Plan's Program a rank of the cluster computes, and which ranks compute a part.

A Program describes one island (`core/plan.py`). A program rank stands for tp * cp ranks of the cluster in every island.
So a rank of the cluster has an island and a program rank. In its unit it has a coordinate for each axis: pipeline (p),
data (d), context (c) and tensor parallelism (t).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from motet.core.arrays import Int64Array
from motet.core.errors import ArgumentError
from motet.core.plan import Unit
from motet.core.workload import BACKBONE
from motet.schedule.layout import Layout, PlannedStage
from motet.schedule.plan_units import gathering_ranks, sharing_ranks

Shares = tuple[int, int]
"""Which of the ranks that share items, or sequences, has an edge's source, and which its sink: each has a share of the
rows. Of a source whose rows come together, which of the backbone's context-parallel ranks."""


class RankLink(NamedTuple):
    """Two ranks of the cluster, of which one sends to the other along an edge.

    shares: as of `Shares`.
    """

    sender: int
    receiver: int
    shares: Shares


class Coordinates(NamedTuple):
    """The coordinates of one rank of the cluster in one unit.

    island:       the island of the rank.
    program_rank: the rank of the Program that the rank is in its island.
    p, d, c, t:   coordinates in the unit, from 0 (`Unit.rank`). d counts over all islands.
    stages:       indices, among the stages of the unit, of those that the rank computes. Replicated modules run beside
                  each of them.
    """

    unit: Unit
    island: int
    program_rank: int
    p: int
    d: int
    c: int
    t: int
    stages: tuple[int, ...]


def coordinates(layout: Layout, rank: int, unit: Unit | None = None) -> Coordinates:
    """The coordinates of a rank of the cluster.

    unit: the unit in which they are given; by default the unit that owns the rank. It may also be a unit that runs in
          the bubbles of that one.
    Raises ArgumentError if the rank is not in the unit, or in no unit. O(units + stages of the unit).
    """
    host = next((one for one in layout.units if rank in one.ranks), None)
    if host is None or (unit is not None and host_of(layout, unit) != host):
        units = "; ".join(f"{one.name!r} is on {one.ranks.start} to {one.ranks.stop - 1}" for one in layout.units)
        name = "no unit of the plan is" if unit is None else f"unit {unit.name!r} is not"
        raise ArgumentError(f"{name} on rank {rank}: {units}.")
    p, d, _, _ = host.coordinates(rank)
    island, replica = divmod(d, layout.num_replicas(host))
    program_rank = layout.first_program_rank(host) + replica * host.pp + p
    unit = unit or host
    axes = unit.coordinates(rank)
    stages = (index for index in range(len(unit.stages)) if layout.pipeline_rank(unit, index) == axes[0])
    return Coordinates(unit, island, program_rank, *axes, tuple(stages))


def ranks_of(layout: Layout, program_rank: int, island: int) -> range:
    """The ranks of the cluster that a program rank stands for in an island. They share its work.

    Raises ArgumentError for a program rank or an island that does not exist.
    """
    for unit in layout.units:
        replica, p = divmod(program_rank - layout.first_program_rank(unit), unit.pp)
        if 0 <= replica < layout.num_replicas(unit) and 0 <= island < layout.num_islands:
            first = unit.rank(p, island * layout.num_replicas(unit) + replica)
            return range(first, first + unit.cp * unit.tp)
    raise ArgumentError(f"the plan's Program has no rank {program_rank} in an island {island} of {layout.num_islands}.")


def first_ranks(layout: Layout) -> Int64Array:
    """The first of the `ranks_of` every program rank in every island, int64 [num_islands, num_program_ranks]."""
    columns = []
    for unit in layout.units:
        first = layout.first_program_rank(unit)
        ranks = np.arange(first, first + layout.num_replicas(unit) * unit.pp)
        columns.append(_first_in_islands(layout, unit, ranks))
    return np.concatenate(columns, axis=1)


def _first_in_islands(layout: Layout, unit: Unit, program_rank: Int64Array | int) -> Int64Array:
    """`first_ranks` of some program ranks of a unit, int64 [num_islands, ...]; of one, int64 [num_islands]."""
    replica, p = np.divmod(np.asarray(program_rank) - layout.first_program_rank(unit), unit.pp)
    islands = np.arange(layout.num_islands).reshape(-1, *(1,) * replica.ndim)
    first: Int64Array = (
        unit.first_rank + (p * unit.dp + islands * layout.num_replicas(unit) + replica) * unit.cp * unit.tp
    )
    return first


def ranks_a_program_rank(layout: Layout) -> Int64Array:
    """How many ranks of the cluster each program rank stands for, int64 [num_program_ranks]."""
    units = layout.units
    return np.repeat([unit.cp * unit.tp for unit in units], [layout.num_replicas(unit) * unit.pp for unit in units])


def edge_links(
    layout: Layout, source: PlannedStage, sink: PlannedStage, island: int, *, backward: bool = False
) -> tuple[RankLink, ...]:
    """Who sends to whom along an edge of the Program in an island, by receiver. backward: gradients, to the source.

    On the ranks of one unit, each rank sends to the one with its own coordinates. Between units, each context-parallel
    rank sends to all of the other unit what they take of its rows. Tensor-parallel ranks have the same rows, so that a
    receiver takes them from one of these. Two stages of one rank send nothing.
    """
    ends = [(host_of(layout, stage.unit), ranks_of(layout, stage.rank, island)) for stage in (source, sink)]
    (unit, senders), (taker, receivers) = reversed(ends) if backward else ends
    if taker == unit:
        pairs = enumerate(zip(senders, receivers, strict=True))
        return tuple(RankLink(*pair, shares_here(layout, source, sink, i)) for i, pair in pairs if pair[0] != pair[1])
    links = []
    for index, receiver in enumerate(receivers):
        c, t = divmod(index, taker.tp)
        for from_c in range(unit.cp):
            sender = senders[from_c * unit.tp + t % unit.tp]
            links.append(RankLink(sender, receiver, (c, from_c) if backward else (from_c, c)))
    return tuple(links)


def farthest_ends(layout: Layout, source: PlannedStage, sink: PlannedStage) -> tuple[int, int]:
    """Two ranks of the cluster of which one sends to the other along an edge: on two nodes if any such ranks are, in
    any island, as islands are simulated alike. The same rank twice where nothing is sent.
    """
    first, last = ends = source.ranks[0], sink.ranks[0]
    cluster = layout.plan.cluster
    if first == last or cluster.num_nodes == 1:
        return ends
    unit, taker = (host_of(layout, stage.unit) for stage in (source, sink))
    sender = receiver = np.arange(unit.cp * unit.tp)
    if unit != taker:  # If any ranks of both are on two nodes, so are outer ones.
        sender = np.array([0, 0, 1, 1]) * (unit.cp * unit.tp - 1)
        receiver = np.array([0, 1, 0, 1]) * (taker.cp * taker.tp - 1)
    firsts = (_first_in_islands(layout, *end) for end in ((unit, source.rank), (taker, sink.rank)))
    senders, receivers = (first[:, None] + among for first, among in zip(firsts, (sender, receiver)))
    crosses = senders // cluster.ranks_per_node != receivers // cluster.ranks_per_node
    if not crosses.any():
        return ends
    at = np.unravel_index(int(crosses.argmax()), crosses.shape)
    return int(senders[at]), int(receivers[at])


def shares_here(layout: Layout, source: PlannedStage, sink: PlannedStage, index: int) -> Shares:
    """The shares at the ends of an edge that joins two stages on ranks of one unit, of the ranks with a number.

    index: the number of each, among those that a program rank stands for.
    """
    tp = layout.backbone.tp if comes_together(layout, source, sink) else source.unit.tp
    return index // tp, index // sink.unit.tp


def comes_together(layout: Layout, source: PlannedStage, sink: PlannedStage) -> bool:
    """Whether what goes along an edge has come together on several ranks (`plan_units.gathering_ranks`)."""
    return source.unit is not sink.unit and gathering_ranks(layout.plan, source.unit) > 1


def host_of(layout: Layout, unit: Unit) -> Unit:
    """The unit whose ranks a unit runs on: the backbone's unit if it runs in bubbles, else itself."""
    return layout.backbone if unit in layout.in_bubbles else unit


def replica_of(layout: Layout, stage: PlannedStage, island: int) -> int:
    """The replica whose items a stage computes in an island, counted over the whole job as in `assign/`.

    It is a replica of the stage's own unit. For a stage in bubbles it is the replica of the backbone on whose ranks the
    stage runs.
    """
    num_replicas, replica = _replicas_of(layout, stage)
    return island * num_replicas + replica


def replicas_of(layout: Layout, stage: PlannedStage, islands: Sequence[int]) -> Int64Array:
    """`replica_of` in each of some islands, int64 [len(islands)]."""
    num_replicas, replica = _replicas_of(layout, stage)
    replicas: Int64Array = np.asarray(islands, dtype=np.int64) * num_replicas + replica
    return replicas


def _replicas_of(layout: Layout, stage: PlannedStage) -> tuple[int, int]:
    """How many replicas an island has of the unit on whose ranks a stage runs, and which of them the stage is of."""
    host = host_of(layout, stage.unit)
    pipelines = 1 if host is stage.unit else host.pp // stage.unit.pp
    return layout.num_replicas(host), stage.replica // pipelines


def share_of(layout: Layout, module: str, stage: PlannedStage, island: int, c: int | None) -> int:
    """Whose items of a module a rank of a stage computes, as training numbers them.

    The ranks of a replica run the same sequences of the backbone, each some of their rows: it is the replica
    (`replica_of`). Items of encoders are dealt out whole: it is replica * `plan_units.sharing_ranks` + c, where c is
    the number among these. c: None numbers replicas alone.
    """
    replica = replica_of(layout, stage, island)
    return replica if module == BACKBONE or c is None else replica * sharing_ranks(layout.plan, stage.unit) + c


def sender_of(layout: Layout, module: str, source: PlannedStage, sink: PlannedStage, island: int, c: int | None) -> int:
    """Whose items of a module go along an edge: as `share_of` of the source, by the source's number of `Shares`.

    Where rows have come together (`comes_together`), it is replica * cp + c, of the backbone's cp.
    """
    if c is not None and comes_together(layout, source, sink):
        return replica_of(layout, source, island) * layout.backbone.cp + c
    return share_of(layout, module, source, island, c)
