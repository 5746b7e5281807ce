"""Units with data-parallel sizes of their own, and the broker between them (MMScale section 4.1).

All units take the same number of microbatches. The replicas of a unit divide a microbatch of the job evenly, so a unit
with fewer replicas takes more examples at a time. Let g be the greatest common divisor of the units' dp. The job falls
into g *islands* that never communicate, each with dp_u / g replicas of unit u. (Between two units, g is the number of
brokers.) Islands are alike, so a Program holds one. Replica i of n has the part [i/n, (i+1)/n) of an island's
microbatch. If n does not divide the examples, a part begins or ends inside an example, whose items are then shared. An
edge joins two replicas whose parts touch the same example.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import gcd
from typing import NamedTuple

from motet.core.errors import ArgumentError
from motet.schedule.generators.dag import dag_1f1b
from motet.schedule.program import Program, Stage


@dataclass(frozen=True)
class Pipeline:
    """A unit as the generators see it.

    modules: a name for each stage, after the modules that it runs.
    dp:      number of replicas.

    Example:
        >>> from motet.schedule import disaggregated
        >>> encoder, backbone = Pipeline(("image",), dp=2), Pipeline(("backbone",), dp=1)
        >>> disaggregated([encoder, backbone], [UnitEdge(0, 1)], num_microbatches=4).edges
        ((0, 2), (1, 2))
    """

    modules: tuple[str, ...]
    dp: int = 1


class UnitEdge(NamedTuple):
    """One unit feeds another.

    source, sink: indices of the units.
    source_stage, sink_stage: the stages that the edge joins, by index in their units; by default the last and the
    first.

    Example:
        >>> from motet.schedule import disaggregated
        >>> units = [Pipeline(("image", "image")), Pipeline(("backbone", "backbone"))]
        >>> disaggregated(units, [UnitEdge(source=0, sink=1)], num_microbatches=4).edges
        ((0, 1), (2, 3), (1, 2))
    """

    source: int
    sink: int
    source_stage: int = -1
    sink_stage: int = 0


@dataclass(frozen=True)
class Island:
    """The stages and edges of one island.

    stages:       by unit, replica, and index in the unit.
    edges:        (source, sink): stages.
    num_replicas: per unit, in the island.
    """

    stages: tuple[Stage, ...]
    edges: tuple[tuple[int, int], ...]
    num_replicas: tuple[int, ...]


def disaggregated(
    units: Sequence[Pipeline],
    feeds: Sequence[UnitEdge],
    num_microbatches: int,
    has_backward: Sequence[Sequence[bool]] | None = None,
) -> Program:
    """The Program of one island of units that feed each other: 1F1B across units, without communication.

    has_backward: per unit and stage.
    Raises ArgumentError as `dag_1f1b` does, and for a unit without stages or with dp below 1.
    """
    joined = island(units, feeds)
    flags = None
    if has_backward is not None:
        flags = [flag for unit, number in zip(has_backward, joined.num_replicas) for flag in list(unit) * number]
    return dag_1f1b(joined.stages, joined.edges, num_microbatches, flags)


def touched(replica: int, num_replicas: int, num_examples: int) -> range:
    """The examples of a microbatch that a replica's equal part touches: all of an example's items, or some of them."""
    return range(replica * num_examples // num_replicas, -(-(replica + 1) * num_examples // num_replicas))


def broker(num_sources: int, num_sinks: int, num_examples: int = 0) -> list[tuple[int, int]]:
    """(source, sink) for each pair of replicas whose parts touch the same example. num_examples: 0 is any number that
    both divide.
    """
    num_examples = num_examples or num_sources * num_sinks
    sinks = [touched(sink, num_sinks, num_examples) for sink in range(num_sinks)]
    pairs = []
    for source in range(num_sources):
        part = touched(source, num_sources, num_examples)
        pairs += [(source, sink) for sink, of in enumerate(sinks) if of.start < part.stop and part.start < of.stop]
    return pairs


def island(
    units: Sequence[Pipeline],
    feeds: Sequence[UnitEdge],
    num_examples: int = 0,
    *,
    joins_all: bool = False,
    meeting: Collection[int] = (),
) -> Island:
    """The stages and edges of one island. Edges within the replicas of units come first, then edges between units.

    num_examples: of the island's microbatch, as of `broker`.
    joins_all:    edges join all replicas of two units, so that the job is one island: any replica may have any item.
    meeting:      the units whose replicas run each pass together (`Stage.meets`).
    Replicas of a stage form a group. Raises ArgumentError for a unit without stages or with dp below 1.
    """
    for unit in units:
        if unit.dp < 1 or not unit.modules:
            raise ArgumentError(f"a unit has {len(unit.modules)} stages and dp {unit.dp}; both must be at least 1.")
    num_islands = 1 if joins_all else gcd(*(unit.dp for unit in units))
    num_replicas = tuple(unit.dp // num_islands for unit in units)
    stages: list[Stage] = []
    numbers: list[list[range]] = []
    groups = 0
    for number, (unit, replicas) in enumerate(zip(units, num_replicas)):
        numbers.append([])
        for _ in range(replicas):
            first = len(stages)
            for index, module in enumerate(unit.modules):
                group, meets = (groups + index, number in meeting) if replicas > 1 else (-1, False)
                stages.append(Stage(len(stages), module, group, meets=meets))
            numbers[-1].append(range(first, len(stages)))
        groups += len(unit.modules) if replicas > 1 else 0
    edges = [(stage, stage + 1) for unit in numbers for one in unit for stage in one[:-1]]
    for feed in feeds:
        num_ends = num_replicas[feed.source], num_replicas[feed.sink]
        for source, sink in broker(*num_ends, 1 if joins_all else num_examples):
            ends = numbers[feed.source][source][feed.source_stage], numbers[feed.sink][sink][feed.sink_stage]
            edges.append(ends)
    return Island(tuple(stages), tuple(edges), num_replicas)
