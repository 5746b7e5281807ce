"""Units that feed each other, of which one runs several chunks on each of its ranks (MMScale section 4: a virtual
pipeline, which divides the time until the pipeline is full).

The backbone's ranks interleave their chunks as those of a lone pipeline do (`interleaved_1f1b.py`). The units around it
run 1F1B. What feeds the backbone is as many microbatches ahead as its first stage takes in before it gives a gradient
back, and by a group more, as it takes them in groups. What the backbone feeds has as much time to give one back as 1F1B
would leave it, and a group's: the backbone's ranks warm up by as many passes more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from motet.schedule.generators.dag import distances
from motet.schedule.generators.disaggregated import Island
from motet.schedule.generators.interleaved_1f1b import interleaved_1f1b
from motet.schedule.generators.one_f_one_b import alternate
from motet.schedule.program import Action, Kind, Program


def virtual_pipeline(
    whole: Island,
    ranks: Sequence[int],
    chunked: Sequence[range],
    num_microbatches: int,
    has_backward: Sequence[bool] | None = None,
    *,
    deferred_warmup: bool = False,
) -> Program:
    """A Program without communication.

    ranks:   the program rank of each stage. chunked: the stages of each replica of the unit that interleaves; stage s
             of them is on its rank s % ranks of a replica. The other stages are on ranks of their own.
    has_backward: per stage. Raises ArgumentError for edges that form a circle, and for counts below 1. O(actions).
    """
    learns = [True] * len(whole.stages) if has_backward is None else list(has_backward)
    to_end = distances(len(whole.stages), whole.edges)
    rows: dict[int, tuple[Action, ...]] = {}
    for stages in chunked:
        own = len({ranks[stage] for stage in stages})
        program = interleaved_1f1b(
            own,
            len(stages) // own,
            num_microbatches,
            deferred_warmup=deferred_warmup,
            num_after=to_end[stages[-1]],
        )
        for row, stage in zip(program.actions, stages):
            moved = (action._replace(stage=action.stage + stages.start) for action in row)
            rows[ranks[stage]] = tuple(action for action in moved if action.kind is Kind.F or learns[action.stage])
    first = chunked[0].start
    held = _held(rows[ranks[first]], first)
    inside = {stage for stages in chunked for stage in stages}
    for stage in range(len(whole.stages)):
        if stage in inside:
            continue
        before = to_end[stage] - to_end[first]
        num_ahead = held - 1 + before + len({ranks[stage] for stage in chunked[0]}) - 1 if before > 0 else to_end[stage]
        num_ahead = min(num_ahead, num_microbatches) if learns[stage] else num_microbatches
        rows[ranks[stage]] = tuple(alternate(stage, num_ahead, num_microbatches, learns[stage]))
    placed = tuple(replace(stage, rank=rank) for stage, rank in zip(whole.stages, ranks, strict=True))
    return Program(placed, whole.edges, tuple(rows[rank] for rank in range(len(rows))), num_microbatches)


def _held(row: Sequence[Action], stage: int) -> int:
    """The most microbatches that a stage has taken in and not given back."""
    most = held = 0
    for action in row:
        held += (action.kind is Kind.F) - (action.kind is Kind.B) if action.stage == stage else 0
        most = max(most, held)
    return most
