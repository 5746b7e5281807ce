"""Interleaved 1F1B: every rank runs several chunks of the model, in turn (Narayanan et al. 2021, "Efficient Large-Scale
Language Model Training on GPU Clusters", section 2.2.2), in the order of Megatron-LM: microbatches go in groups of
num_ranks, a group through all chunks before the next one.

The deferred warm-up is Optimus' (section 4.3, Figure 12, bottom): with fewer forward passes in the warm-up, the first
chunk on rank 0 takes in the later microbatches later, so that what feeds it has more time, and nothing else is delayed.
"""

from __future__ import annotations

from itertools import zip_longest

from motet.schedule.generators.chain import chain_program, check_counts
from motet.schedule.program import Action, Kind, Program


def interleaved_1f1b(
    num_ranks: int, num_chunks: int, num_microbatches: int, *, deferred_warmup: bool = False, num_after: int = 0
) -> Program:
    """Stage c * num_ranks + r is chunk c of rank r; no communication yet.

    deferred_warmup: a rank is one forward pass ahead for each rank behind it, instead of two. With equal stage times
                     and messages that take none nothing is delayed, and one pass less on any rank would delay the step.
    num_after:       stages after the last one, on ranks of their own, whose gradients it waits for: every rank is that
                     many microbatches further ahead.
    Microbatches that are no multiple of num_ranks go in groups of num_ranks and more, the larger ones first; fewer than
    num_ranks are one group. With equal stage times and a multiple of num_ranks, bubbles are a share of
    (num_ranks - 1) / (num_chunks * num_microbatches) of the time that is computed, deferred or not.
    Raises ArgumentError for counts below 1. O(actions).
    """
    check_counts("interleaved_1f1b", num_ranks=num_ranks, num_chunks=num_chunks, num_microbatches=num_microbatches)
    groups = _groups(num_ranks, num_microbatches)
    forward = [(chunk, microbatch) for group in groups for chunk in range(num_chunks) for microbatch in group]
    backward = [(num_chunks - 1 - chunk, microbatch) for chunk, microbatch in forward]
    waited = _waited(forward, num_ranks, num_chunks, num_after)
    rows = []
    for rank in range(num_ranks):
        num_ahead = (num_chunks - 1) * len(groups[0]) + (num_ranks - 1 - rank) * (1 if deferred_warmup else 2) + waited
        ahead, rest = forward[:num_ahead], forward[num_ahead:]
        row = [Action(chunk * num_ranks + rank, Kind.F, microbatch) for chunk, microbatch in ahead]
        for done, upcoming in zip_longest(backward, rest):
            for kind, passed in ((Kind.F, upcoming), (Kind.B, done)):
                if passed:
                    row.append(Action(passed[0] * num_ranks + rank, kind, passed[1]))
        rows.append(row)
    return chain_program([stage % num_ranks for stage in range(num_ranks * num_chunks)], rows, num_microbatches)


def _waited(forward: list[tuple[int, int]], num_ranks: int, num_chunks: int, num_after: int) -> int:
    """Passes that a rank does while num_after stages give a gradient back: those of as many microbatches, and at least
    those after which the last stage has given them the microbatches that they take in before.
    """
    if not num_after:
        return 0
    given = [place for place, (chunk, _) in enumerate(forward) if chunk == num_chunks - 1]
    later = given[num_after - 1 :] + [given[-1]] * (num_after - 1)
    in_groups = (num_ranks - 1) * (num_chunks - 1)  # given in groups, got back one by one
    return max(num_after * num_chunks + in_groups, *(there - here for here, there in zip(given, later)))


def _groups(num_ranks: int, num_microbatches: int) -> list[range]:
    """Consecutive microbatches, in groups of nearly equal size, at least num_ranks each where there are as many."""
    num_groups = max(num_microbatches // num_ranks, 1)
    size, num_larger = divmod(num_microbatches, num_groups)
    groups: list[range] = []
    start = 0
    for group in range(num_groups):
        stop = start + size + (group < num_larger)
        groups.append(range(start, stop))
        start = stop
    return groups
