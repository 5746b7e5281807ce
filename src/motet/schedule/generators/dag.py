"""Schedules of stages that form a directed acyclic graph, each on a program rank of its own.

1F1B across modules (Cornstarch section 4.1, Figure 6c): let d be the number of stages after a stage on the longest path
to an end of the graph. The stage runs d forward passes, then one forward and one backward pass in turn. On a chain this
is 1F1B. It cannot deadlock: if F of microbatch i runs at time 2 i - d and B at 2 i + 1 + d, every pass runs after all
that it needs, because d falls by at least 1 along an edge.
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
    """A Program without communication in which every stage runs 1F1B on a rank of its own.

    has_backward: per stage. A stage without it (it is frozen, and so is all before it) runs forward passes only.
    Raises ArgumentError for edges that form a circle, for two stages on one rank, and for a stage without a backward
    pass if a stage that feeds it has one. O(edges + stages * microbatches).
    """
    backward = _checked(stages, edges, num_microbatches, has_backward)
    num_aheads = [min(distance, num_microbatches) for distance in distances(len(stages), edges)]
    return _program(stages, edges, num_microbatches, backward, num_aheads)


def dag_gpipe(
    stages: Sequence[Stage], edges: Edges, num_microbatches: int, has_backward: Sequence[bool] | None = None
) -> Program:
    """As `dag_1f1b`, but every stage runs all forward passes before all backward passes."""
    backward = _checked(stages, edges, num_microbatches, has_backward)
    return _program(stages, edges, num_microbatches, backward, [num_microbatches] * len(stages))


def distances(num_stages: int, edges: Edges) -> list[int]:
    """Per stage, the number of stages after it on the longest path to an end of the graph.

    Raises ArgumentError for edges that form a circle. O(edges).
    """
    sources: list[list[int]] = [[] for _ in range(num_stages)]
    num_waiting = [0] * num_stages
    for source, sink in edges:
        if not (0 <= source < num_stages and 0 <= sink < num_stages):
            raise ArgumentError(f"edge ({source}, {sink}) names a stage that is none of the {num_stages}.")
        sources[sink].append(source)
        num_waiting[source] += 1
    distance = [0] * num_stages
    ready = [stage for stage in range(num_stages) if num_waiting[stage] == 0]
    for sink in ready:  # grows while it is walked
        for source in sources[sink]:
            distance[source] = max(distance[source], distance[sink] + 1)
            num_waiting[source] -= 1
            if num_waiting[source] == 0:
                ready.append(source)
    if len(ready) < num_stages:
        circle = min(set(range(num_stages)) - set(ready))
        raise ArgumentError(f"stage {circle} feeds itself by way of its edges; edges must not form a circle.")
    return distance


def _checked(stages: Sequence[Stage], edges: Edges, num_microbatches: int, flags: Sequence[bool] | None) -> list[bool]:
    """has_backward of each stage, once all arguments are checked."""
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
