"""What goes along an edge of a Plan's Program: the modules whose output leaves one stage for another."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from motet.schedule.coordinates import host_of
from motet.schedule.layout import Layout, PlannedStage


def under_way(layout: Layout, source: PlannedStage, sink: PlannedStage) -> Iterator[tuple[str, int]]:
    """The modules whose output leaves the source for the sink, and of how many of their blocks it is the output.

    To another unit: modules that end in the source and feed one there. Within a unit: those begun and not ended,
    and those ended that feed one which has not begun. Of a unit in bubbles the last stage alone sends to the
    backbone, and so all that has ended before it goes through it. Under "data_parallel" a stage is a module.
    """
    if layout.plan.schedule == "data_parallel":
        yield from ((name, stop) for name, (_, stop) in source.layers.items())
        return
    done, in_bubbles = _done(source), host_of(layout, source.unit) is not source.unit
    for name, stop in done.items():
        ended = stop == len(layout.plan.model.module(name).blocks)
        if sink.unit is source.unit:
            waiting = any(done.get(taker, 0 if in_bubbles else 1) == 0 for taker in layout.plan.model.sinks(name))
            leaves = stop > 0 and (waiting or not ended)
        else:
            here = in_bubbles or name in source.layers
            leaves = here and ended and bool(takers(layout, name, sink))
        if leaves:
            yield name, stop


def takers(layout: Layout, name: str, sink: PlannedStage) -> list[str]:
    """The modules in a stage that take in the output of the named one."""
    return [taker for taker in layout.plan.model.sinks(name) if taker in sink.layers]


def _done(stage: PlannedStage) -> Mapping[str, int]:
    """Blocks of each module of the unit (those replicated aside) that are over after the stage."""
    before = stage.unit.stages[: stage.place + 1]
    return {
        name: sum(counts.get(name, 0) for counts in before)
        for name in stage.unit.modules
        if name not in stage.unit.replicated
    }
