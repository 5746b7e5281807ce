"""Units that feed each other, one of which runs several chunks on each of its ranks (MMScale section 4: a virtual
pipeline, which fills sooner).

- The ranks of the unit with chunks, the backbone's, interleave them as a lone pipeline does (`interleaved_1f1b.py`).
- The other units run 1F1B. A stage before the backbone runs ahead by the microbatches that the backbone's first stage
  holds at most, and by one group more, because the backbone takes microbatches in groups.
- A stage after the backbone runs ahead as in plain 1F1B. The backbone's ranks wait for its gradients by more forward
  passes in their warm-up (`num_after` of `interleaved_1f1b`).
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
    island: Island,
    ranks: Sequence[int],
    chunked: Sequence[range],
    num_microbatches: int,
    has_backward: Sequence[bool] | None = None,
    *,
    deferred_warmup: bool = False,
) -> Program:
    """A Program without communication.

    ranks:        the program rank of each stage.
    chunked:      the stages of each replica of the unit that interleaves. Stage s of a replica is on its rank
                  s % (ranks of a replica). Every other stage is on a rank of its own.
    has_backward: per stage; None is all.
    Raises ArgumentError for edges that form a circle, and for counts below 1. O(actions).
    """
    backward = [True] * len(island.stages) if has_backward is None else list(has_backward)
    to_end = distances(len(island.stages), island.edges)
    num_ranks = len({ranks[stage] for stage in chunked[0]})  # of a replica
    rows: dict[int, tuple[Action, ...]] = {}
    # 1. The unit that interleaves.
    for stages in chunked:
        program = interleaved_1f1b(
            num_ranks,
            len(stages) // num_ranks,
            num_microbatches,
            deferred_warmup=deferred_warmup,
            num_after=to_end[stages[-1]],
        )
        for row, stage in zip(program.actions, stages):
            renumbered = (action._replace(stage=action.stage + stages.start) for action in row)
            rows[ranks[stage]] = tuple(a for a in renumbered if a.kind is Kind.F or backward[a.stage])
    # 2. The stages around it, in 1F1B.
    first = chunked[0].start
    num_held = _most_held(rows[ranks[first]], first)
    interleaved = {stage for stages in chunked for stage in stages}
    for stage in range(len(island.stages)):
        if stage in interleaved:
            continue
        distance = to_end[stage] - to_end[first]  # above 0: before the backbone
        num_ahead = num_held - 1 + distance + num_ranks - 1 if distance > 0 else to_end[stage]
        num_ahead = min(num_ahead, num_microbatches) if backward[stage] else num_microbatches
        rows[ranks[stage]] = tuple(alternate(stage, num_ahead, num_microbatches, backward[stage]))
    stages_on_ranks = tuple(replace(stage, rank=rank) for stage, rank in zip(island.stages, ranks, strict=True))
    return Program(stages_on_ranks, island.edges, tuple(rows[rank] for rank in range(len(rows))), num_microbatches)


def _most_held(row: Sequence[Action], stage: int) -> int:
    """The most microbatches of which a stage has run F and not yet B."""
    most = held = 0
    for action in row:
        held += (action.kind is Kind.F) - (action.kind is Kind.B) if action.stage == stage else 0
        most = max(most, held)
    return most
