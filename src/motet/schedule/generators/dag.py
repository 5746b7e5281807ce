"""Schedules of stages that feed each other as any directed acyclic graph, each on a program rank of its own.

1F1B across modules (Cornstarch section 4.1, Figure 6c): a stage from which the longest way to an end of the graph takes
d stages runs d forward passes first, then takes turns. It cannot deadlock: F of microbatch i at time 2 i - d and B of
it at 2 i + 1 + d put every pass after all that it needs, as d falls by at least 1 along an edge. On a chain it is 1F1B.
"""

from __future__ import annotations

from collections.abc import Sequence

from motet.core.errors import ArgumentError
from motet.schedule.generators.one_f_one_b import alternate
from motet.schedule.program import Action, Program, Stage

Edges = Sequence[tuple[int, int]]


def dag_1f1b(
    stages: Sequence[Stage], edges: Edges, num_microbatches: int, has_backward: Sequence[bool] | None = None
) -> Program:
    """A Program without communication in which every stage runs 1F1B; stages are on ranks of their own.

    has_backward: per stage; a stage that has none (frozen, and nothing before it learns) runs its forward passes only.
    Raises ArgumentError for edges that form a circle, two stages on one rank, or a stage that owes a gradient to one
    before it and has no backward pass. O(edges + stages * microbatches).
    """
    backward = _checked(stages, edges, num_microbatches, has_backward)
    num_aheads = [min(distance, num_microbatches) for distance in distances(len(stages), edges)]
    return _program(stages, edges, num_microbatches, backward, num_aheads)


def dag_gpipe(
    stages: Sequence[Stage], edges: Edges, num_microbatches: int, has_backward: Sequence[bool] | None = None
) -> Program:
    """The same with all forward passes before all backward passes."""
    backward = _checked(stages, edges, num_microbatches, has_backward)
    return _program(stages, edges, num_microbatches, backward, [num_microbatches] * len(stages))


def distances(num_stages: int, edges: Edges) -> list[int]:
    """Per stage, the stages after it on the longest way to an end. Raises ArgumentError for a circle. O(edges)."""
    sources: list[list[int]] = [[] for _ in range(num_stages)]
    num_waiting = [0] * num_stages
    for source, sink in edges:
        if not (0 <= source < num_stages and 0 <= sink < num_stages):
            raise ArgumentError(f"edge ({source}, {sink}) names a stage that is none of the {num_stages}.")
        sources[sink].append(source)
        num_waiting[source] += 1
    found = [0] * num_stages
    ready = [stage for stage in range(num_stages) if num_waiting[stage] == 0]
    for sink in ready:
        for source in sources[sink]:
            found[source] = max(found[source], found[sink] + 1)
            num_waiting[source] -= 1
            if num_waiting[source] == 0:
                ready.append(source)
    if len(ready) < num_stages:
        circle = min(set(range(num_stages)) - set(ready))
        raise ArgumentError(f"stage {circle} feeds itself by way of its edges; edges must not form a circle.")
    return found


def _checked(stages: Sequence[Stage], edges: Edges, num_microbatches: int, flags: Sequence[bool] | None) -> list[bool]:
    if not stages:
        raise ArgumentError("there is no stage; a schedule needs at least one.")
    if num_microbatches < 1:
        raise ArgumentError(f"num_microbatches is {num_microbatches}; it must be at least 1.")
    if sorted(stage.rank for stage in stages) != list(range(len(stages))):
        raise ArgumentError(f"the ranks of {len(stages)} stages must be 0 to {len(stages) - 1}, one stage on each.")
    backward = [True] * len(stages) if flags is None else list(flags)
    if len(backward) != len(stages):
        raise ArgumentError(f"has_backward has {len(backward)} entries; there are {len(stages)} stages.")
    distances(len(stages), edges)
    for source, sink in edges:
        if backward[source] and not backward[sink]:
            raise ArgumentError(f"stage {sink} has no backward pass, but stage {source} before it needs its gradient.")
    return backward


def _program(
    stages: Sequence[Stage], edges: Edges, num_microbatches: int, backward: list[bool], num_aheads: list[int]
) -> Program:
    rows: list[tuple[Action, ...]] = [()] * len(stages)
    for number, stage in enumerate(stages):
        num_ahead = num_aheads[number] if backward[number] else num_microbatches
        rows[stage.rank] = tuple(alternate(number, num_ahead, num_microbatches, backward[number]))
    return Program(tuple(stages), tuple(edges), tuple(rows), num_microbatches)
