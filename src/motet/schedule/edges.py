"""The modules whose outputs an edge of a Plan's Program carries from one stage to another."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from motet.core.workload import BACKBONE
from motet.schedule.coordinates import host_of
from motet.schedule.layout import Layout, PlannedStage


def edge_outputs(layout: Layout, source: PlannedStage, sink: PlannedStage) -> Iterator[tuple[str, int]]:
    """(module, number of its blocks that are computed) for each module whose output goes from source to sink.

    No block of a generator is computed where what it is given goes: the backbone's rows at the queries of its items.
    Under "data_parallel" a stage is a module, and the edge carries its output, or what a generator is given.
    """
    if layout.plan.schedule == "data_parallel":
        if BACKBONE in source.layers:
            yield from ((name, 0) for name in sink.layers)
        else:
            yield from ((name, stop) for name, (_, stop) in source.layers.items())
    elif set(source.modules) <= set(source.unit.replicated):
        yield from _beside_copies(layout, source, sink)
    elif sink.unit is source.unit:
        yield from _within_unit(layout, source)
    else:
        yield from _between_units(layout, source, sink)


def consumers_in(layout: Layout, name: str, sink: PlannedStage) -> list[str]:
    """The modules in a stage that take in the output of a module: before their first block there, or a later one."""
    model, spans = layout.plan.model, sink.layers
    return [
        consumer
        for consumer in model.sinks(name)
        if consumer in spans and any(block in range(*spans[consumer]) for block in model.entries(name, consumer))
    ]


def _beside_copies(layout: Layout, source: PlannedStage, sink: PlannedStage) -> Iterator[tuple[str, int]]:
    """The output of a replicated module where a module takes it in. The other stages need none."""
    for name, (_, stop) in source.layers.items():
        if consumers_in(layout, name, sink):
            yield name, stop


def _within_unit(layout: Layout, source: PlannedStage) -> Iterator[tuple[str, int]]:
    """Modules that have begun and not ended, and modules that have ended and feed one that is yet to take them in."""
    model, computed, in_bubbles = layout.plan.model, _computed_blocks(source), _is_in_bubbles(layout, source)
    for name, num_blocks in computed.items():
        if name in model.generators and not num_blocks and _has_ended(layout, BACKBONE, computed.get(BACKBONE, 0)):
            yield name, 0
        if name == BACKBONE and _has_ended(layout, name, num_blocks):
            continue  # What it gives goes by the names of generators.
        # A module of another unit: only the last stage in bubbles sends to the backbone, so outputs go on until there.
        taken_in = [
            computed[consumer] > model.entries(name, consumer)[-1] if consumer in computed else not in_bubbles
            for consumer in model.sinks(name)
        ]
        if num_blocks > 0 and not (_has_ended(layout, name, num_blocks) and all(taken_in)):
            yield name, num_blocks


def _between_units(layout: Layout, source: PlannedStage, sink: PlannedStage) -> Iterator[tuple[str, int]]:
    """Modules that end in the source and feed one in the sink. From bubbles, also those that ended before."""
    in_bubbles = _is_in_bubbles(layout, source)
    for name, num_blocks in _computed_blocks(source).items():
        is_here = in_bubbles or name in source.layers
        if is_here and _has_ended(layout, name, num_blocks):
            taking = consumers_in(layout, name, sink)
            if name == BACKBONE:
                yield from ((taker, 0) for taker in taking)
            elif taking:
                yield name, num_blocks


def _is_in_bubbles(layout: Layout, stage: PlannedStage) -> bool:
    return host_of(layout, stage.unit) is not stage.unit


def _has_ended(layout: Layout, name: str, num_blocks: int) -> bool:
    return num_blocks == len(layout.plan.model.module(name).blocks)


def _computed_blocks(stage: PlannedStage) -> Mapping[str, int]:
    """Number of blocks of each module of the unit that are computed after the stage, without replicated modules."""
    stages = stage.unit.stages[: stage.index + 1]
    return {
        name: sum(counts.get(name, 0) for counts in stages)
        for name in stage.unit.modules
        if name not in stage.unit.replicated
    }
