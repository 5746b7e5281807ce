"""Units with data-parallel sizes of their own, and the broker between them (MMScale section 4.1).

All units take the same number of microbatches; one microbatch of a job is divided evenly over the replicas of a unit,
so that a unit with fewer replicas takes more examples at a time. With g the greatest common divisor of the units' sizes
the job falls into g *islands* that never speak to each other (between two units alone, their gcd is the number of
brokers): unit u has dp_u / g replicas in each. Islands are alike, so a Program holds one. Replica i of n has the
examples in [i/n, (i+1)/n) of an island's microbatch, and where the shares of two replicas overlap an edge joins them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import gcd
from typing import NamedTuple

from motet.core.errors import ArgumentError
from motet.schedule.generators.dag import dag_1f1b
from motet.schedule.program import Program, Stage


@dataclass(frozen=True)
class Pipeline:
    """The stages of a unit, named by the modules that they run, one after the other, and how many replicas it has."""

    modules: tuple[str, ...]
    dp: int = 1


class UnitEdge(NamedTuple):
    """One unit feeds another: from the replicas of a stage of it to those of a stage of the other."""

    source: int
    sink: int
    source_stage: int = -1
    sink_stage: int = 0


@dataclass(frozen=True)
class Island:
    """The smallest part of a job that is told apart: stages by unit, replica and place; edges, and what each carries.

    shares: per edge, the share of its source's output that it carries.
    """

    stages: tuple[Stage, ...]
    edges: tuple[tuple[int, int], ...]
    shares: tuple[Fraction, ...]
    num_replicas: tuple[int, ...]


def disaggregated(
    units: Sequence[Pipeline],
    feeds: Sequence[UnitEdge],
    num_microbatches: int,
    has_backward: Sequence[Sequence[bool]] | None = None,
) -> Program:
    """One island of units that feed each other, in 1F1B across units, without communication.

    feeds: pairs of units, by place; the last stages of the one feed the first of the other, or those that are named.
    has_backward: per unit and stage. Raises ArgumentError as `dag_1f1b` does, or for a size below 1.
    """
    whole = island(units, feeds)
    flags = None
    if has_backward is not None:
        flags = [flag for unit, number in zip(has_backward, whole.num_replicas) for flag in list(unit) * number]
    return dag_1f1b(whole.stages, whole.edges, num_microbatches, flags)


def broker(num_sources: int, num_sinks: int) -> list[tuple[int, int, Fraction]]:
    """(source, sink, share of the source's output) for all replicas that share examples; O(sources + sinks) of them."""
    found = []
    for source in range(num_sources):
        first = source * num_sinks // num_sources
        last = ((source + 1) * num_sinks - 1) // num_sources
        for sink in range(first, last + 1):
            begin = max(Fraction(source, num_sources), Fraction(sink, num_sinks))
            end = min(Fraction(source + 1, num_sources), Fraction(sink + 1, num_sinks))
            found.append((source, sink, (end - begin) * num_sources))
    return found


def island(units: Sequence[Pipeline], feeds: Sequence[UnitEdge]) -> Island:
    """The stages of one island and its edges: those within the replicas of each unit, then those between units.

    Replicas of a stage form a group. Raises ArgumentError for a unit without stages, or a dp below 1.
    """
    for unit in units:
        if unit.dp < 1 or not unit.modules:
            raise ArgumentError(f"a unit has {len(unit.modules)} stages and dp {unit.dp}; both must be at least 1.")
    num_islands = gcd(*(unit.dp for unit in units))
    num_replicas = tuple(unit.dp // num_islands for unit in units)
    stages: list[Stage] = []
    numbers: list[list[range]] = []
    groups = 0
    for unit, replicas in zip(units, num_replicas):
        numbers.append([])
        for _ in range(replicas):
            first = len(stages)
            for place, module in enumerate(unit.modules):
                stages.append(Stage(len(stages), module, groups + place if replicas > 1 else -1))
            numbers[-1].append(range(first, len(stages)))
        groups += len(unit.modules) if replicas > 1 else 0
    joined = [(stage, stage + 1, Fraction(1)) for unit in numbers for one in unit for stage in one[:-1]]
    for feed in feeds:
        for source, sink, share in broker(num_replicas[feed.source], num_replicas[feed.sink]):
            ends = numbers[feed.source][source][feed.source_stage], numbers[feed.sink][sink][feed.sink_stage]
            joined.append((*ends, share))
    return Island(
        tuple(stages),
        tuple((source, sink) for source, sink, _ in joined),
        tuple(share for _, _, share in joined),
        num_replicas,
    )
