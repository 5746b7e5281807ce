"""ZB-V: backward split into I and W, and two chunks a rank, in a V: rank 0 has the first and the last chunk (Qi et al.
2024, "Zero Bubble Pipeline Parallelism", section 6, and "Pipeline Parallelism with Controllable Memory", section 3). A
rank has no bubble between its first and last pass, and holds no more activations than under 1F1B.
"""

from __future__ import annotations

from collections.abc import Iterator

from motet.schedule.generators.chain import chain_program, check_counts
from motet.schedule.program import Action, Kind, Program


def zb_v(num_ranks: int, num_microbatches: int) -> Program:
    """A Program without communication. Stage s < num_ranks is on rank s, stage s >= num_ranks on 2 num_ranks - 1 - s.

    A rank holds the activations of at most 2 num_ranks passes: as much as 1F1B's first rank, whose stages are twice as
    large. If F, I and W of all stages take the same time t and num_microbatches >= 2 num_ranks - 1, no rank idles
    between its first and last pass, and the makespan is (6 num_microbatches + num_ranks - 1) t.
    Raises ArgumentError for counts below 1. O(actions).
    """
    check_counts("zb_v", num_ranks=num_ranks, num_microbatches=num_microbatches)
    # Fewer microbatches do not fill the pipeline. They take the pattern of a full one, without the others' passes.
    num_full = max(num_microbatches, 2 * num_ranks - 1)
    rows = [
        [action for action in _row(rank, num_ranks, num_full) if action.microbatch < num_microbatches]
        for rank in range(num_ranks)
    ]
    return chain_program([*range(num_ranks), *reversed(range(num_ranks))], rows, num_microbatches)


def _row(rank: int, num_ranks: int, num_microbatches: int) -> Iterator[Action]:
    """The row of a rank. down, up: its stages in the first and the second arm of the V, in the order of forward."""
    down, up = rank, 2 * num_ranks - 1 - rank
    counts: dict[tuple[int, Kind], int] = {}

    def following(stage: int, *kinds: Kind) -> Iterator[Action]:
        """Passes of these kinds of a stage, each of its next microbatch, if any is left."""
        for kind in kinds:
            microbatch = counts.get((stage, kind), 0)
            if microbatch < num_microbatches:
                counts[stage, kind] = microbatch + 1
                yield Action(stage, kind, microbatch)

    for _ in range(2 * (num_ranks - rank) - 1):
        yield from following(down, Kind.F)
    for _ in range(rank):
        yield from following(up, Kind.F)
        yield from following(down, Kind.F)
    for _ in range(num_ranks - rank):
        yield from following(up, Kind.F, Kind.I, Kind.W)
    for _ in range(num_microbatches - num_ranks):
        yield from following(down, Kind.F, Kind.I, Kind.W)
        yield from following(up, Kind.F, Kind.I, Kind.W)
    for _ in range(rank):
        yield from following(down, Kind.I)
        yield from following(up, Kind.I)
    for _ in range(num_ranks - rank):
        yield from following(down, Kind.I, Kind.W)
    for stage in (up, down):
        for _ in range(num_microbatches):
            yield from following(stage, Kind.W)
