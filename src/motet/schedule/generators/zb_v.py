"""ZB-V: two chunks a rank, placed in a V, so that the rank that starts the model also ends it, and backward split into
I and W (Qi et al. 2024, "Zero Bubble Pipeline Parallelism", section 6, and "Pipeline Parallelism with Controllable
Memory", section 3): no bubble between a rank's first and last pass, with no more activations than 1F1B holds.
"""

from __future__ import annotations

from collections.abc import Iterator

from motet.schedule.generators.chain import chain_program, check_counts
from motet.schedule.program import Action, Kind, Program


def zb_v(num_ranks: int, num_microbatches: int) -> Program:
    """Stage s < num_ranks is on rank s, stage s >= num_ranks on rank 2 num_ranks - 1 - s; no communication yet.

    A rank holds at most 2 num_ranks activations of a stage, as much as 1F1B's first rank does with stages twice as
    large. If F, I and W of all stages take the same time and num_microbatches >= 2 num_ranks - 1, no rank idles between
    its first and last pass, and the makespan is (6 num_microbatches + num_ranks - 1) of that time.
    Raises ArgumentError for counts below 1. O(actions).
    """
    check_counts("zb_v", num_ranks=num_ranks, num_microbatches=num_microbatches)
    num_full = max(num_microbatches, 2 * num_ranks - 1)  # fewer do not fill the pipeline: the pattern without the rest
    rows = [
        [action for action in _row(rank, num_ranks, num_full) if action.microbatch < num_microbatches]
        for rank in range(num_ranks)
    ]
    return chain_program([*range(num_ranks), *reversed(range(num_ranks))], rows, num_microbatches)


def _row(rank: int, num_ranks: int, num_microbatches: int) -> Iterator[Action]:
    """Down passes the microbatches through the first chunks, up through the second ones; backward the other way."""
    down, up = rank, 2 * num_ranks - 1 - rank
    counts: dict[tuple[int, Kind], int] = {}

    def following(stage: int, *kinds: Kind) -> Iterator[Action]:
        """The next microbatch of each of these passes of a stage, if there is one more."""
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
