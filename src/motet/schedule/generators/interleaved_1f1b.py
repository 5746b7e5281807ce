"""Interleaved 1F1B: every rank runs several chunks of the model in turn (Narayanan et al. 2021, "Efficient Large-Scale
Language Model Training on GPU Clusters", section 2.2.2). The order is Megatron-LM's: a group of num_ranks microbatches
goes through all chunks, then the next group.

The deferred warm-up (Optimus section 4.3, Figure 12, bottom) has fewer forward passes. The first chunk on rank 0 takes
in later microbatches later, which gives encoders before it more time and delays nothing else.
"""

from __future__ import annotations

from itertools import zip_longest

from motet.schedule.generators.chain import chain_program, check_counts
from motet.schedule.program import Action, Kind, Program


def interleaved_1f1b(
    num_ranks: int, num_chunks: int, num_microbatches: int, *, deferred_warmup: bool = False, num_after: int = 0
) -> Program:
    """A Program whose stage c * num_ranks + r is chunk c of rank r, without communication.

    deferred_warmup: a rank runs one more forward pass ahead than the next rank, instead of two. With equal stage times
                     and free messages this delays nothing, and one pass less on any rank would delay the step.
    num_after:       number of stages after the last one, on ranks of their own. The last stage waits for their
                     gradients, so every rank runs ahead by that many more microbatches.
    If num_microbatches is no multiple of num_ranks, groups have num_ranks or more microbatches, the larger groups
    first; fewer than num_ranks microbatches are one group. With equal stage times and a multiple of num_ranks,
    bubbles / compute = (num_ranks - 1) / (num_chunks * num_microbatches), deferred or not.
    Raises ArgumentError for counts below 1. O(actions).
    """
    check_counts("interleaved_1f1b", num_ranks=num_ranks, num_chunks=num_chunks, num_microbatches=num_microbatches)
    groups = _groups(num_ranks, num_microbatches)
    forward = [(chunk, microbatch) for group in groups for chunk in range(num_chunks) for microbatch in group]
    backward = [(num_chunks - 1 - chunk, microbatch) for chunk, microbatch in forward]
    num_waited = _passes_while_waiting(forward, num_ranks, num_chunks, num_after)
    rows = []
    for rank in range(num_ranks):
        num_after_rank = (num_ranks - 1 - rank) * (1 if deferred_warmup else 2)
        num_ahead = (num_chunks - 1) * len(groups[0]) + num_after_rank + num_waited
        row = [Action(chunk * num_ranks + rank, Kind.F, microbatch) for chunk, microbatch in forward[:num_ahead]]
        for next_forward, next_backward in zip_longest(forward[num_ahead:], backward):
            for kind, chunk_microbatch in ((Kind.F, next_forward), (Kind.B, next_backward)):
                if chunk_microbatch:
                    chunk, microbatch = chunk_microbatch
                    row.append(Action(chunk * num_ranks + rank, kind, microbatch))
        rows.append(row)
    return chain_program([stage % num_ranks for stage in range(num_ranks * num_chunks)], rows, num_microbatches)


def _passes_while_waiting(forward: list[tuple[int, int]], num_ranks: int, num_chunks: int, num_after: int) -> int:
    """Forward passes that a rank runs until the num_after stages behind the last one give a gradient: the larger of

    - the passes of num_after microbatches, plus (num_ranks - 1) (num_chunks - 1), because microbatches go out in groups
      and gradients come back one by one;
    - the passes between a microbatch that leaves the last chunk and the one num_after - 1 later, which the stages
      behind take in before they give a gradient back.
    """
    if not num_after:
        return 0
    last_chunk = [index for index, (chunk, _) in enumerate(forward) if chunk == num_chunks - 1]
    later = last_chunk[num_after - 1 :] + [last_chunk[-1]] * (num_after - 1)
    in_groups = (num_ranks - 1) * (num_chunks - 1)
    return max(num_after * num_chunks + in_groups, *(there - here for here, there in zip(last_chunk, later)))


def _groups(num_ranks: int, num_microbatches: int) -> list[range]:
    """Consecutive microbatches in groups of nearly equal size. Groups have num_ranks or more, if there are as many."""
    num_groups = max(num_microbatches // num_ranks, 1)
    size, num_larger = divmod(num_microbatches, num_groups)
    groups: list[range] = []
    start = 0
    for group in range(num_groups):
        stop = start + size + (group < num_larger)
        groups.append(range(start, stop))
        start = stop
    return groups
