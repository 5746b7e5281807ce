"""Which microbatches each encoder pipeline takes, so that the step is shortest: a local search (Optimus section 4.2).

1. Starts: the pipelines take microbatches in turn, for every partition of their number where these are few (as in the
   paper), else for the even one; and each microbatch goes to the pipeline that is through with it first, by the times
   of forward passes and by those of backward passes.
2. Moves from the best start: a critical pipeline, the one with the longest lead or the one that ends last, gives a
   microbatch to another one, or exchanges it for one of about its number. The first move that makes the step shorter is
   made, until there is none, or too many were tried.

Only the two pipelines of a move are timed anew (`fill_times.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise, product

from motet.planner.bubble_filling.fill_times import Direction, Ends, FilledStep, FillTimer, Pipelines, PipelineTimes
from motet.schedule.generators.bubble_filling import global_order

MAX_PARTITIONS = 64
"""Partitions of the number of microbatches among pipelines are all tried up to this number."""
MAX_MOVES, MAX_PASSES = 400, 50_000
"""The search tries at most so many moves, and stops once so many passes are placed."""


def fastest_step(timer: FillTimer, known: Sequence[Pipelines] = ()) -> FilledStep:
    """The best step that the search finds. known: assignments that it is no worse than. Deterministic."""
    best = min(map(timer.step, dict.fromkeys([*_starts(timer), *known])), key=lambda step: step.key)
    moves = _moves(best, timer.max_microbatches)
    for _ in range(MAX_MOVES):
        moved = next(moves, None) if timer.num_passes < MAX_PASSES else None
        if moved is None:
            break
        step = timer.step(moved)
        if step.key < best.key:
            best, moves = step, _moves(step, timer.max_microbatches)
    return best


def _starts(timer: FillTimer) -> Iterator[Pipelines]:
    num_microbatches = timer.backbone.num_microbatches
    for sizes in _partitions(num_microbatches, timer.num_pipelines):
        if max(sizes) <= timer.max_microbatches:
            yield global_order(sizes)
    yield _earliest_through(timer, timer.mirrored, range(num_microbatches - 1, -1, -1))
    if timer.encoders.has_backward:
        yield _earliest_through(timer, timer.backward, range(num_microbatches))


def _partitions(count: int, num_parts: int) -> Iterator[list[int]]:
    """All ways to write count as a sum of num_parts positive sizes, if they are few; else the even one."""
    if math.comb(count - 1, num_parts - 1) <= MAX_PARTITIONS:
        for cuts in combinations(range(1, count), num_parts - 1):
            yield [stop - start for start, stop in pairwise((0, *cuts, count))]
    else:
        cuts = tuple(part * count // num_parts for part in range(num_parts + 1))
        yield [stop - start for start, stop in pairwise(cuts)]


def _earliest_through(timer: FillTimer, direction: Direction, order: range) -> Pipelines:
    """Each microbatch, in this order, to the pipeline that is through with it first; every pipeline gets one."""
    free_s: list[Ends] = [(-math.inf,) * len(ranks) for ranks in direction.ranks]
    taken: list[list[int]] = [[] for _ in range(timer.num_pipelines)]
    for num_left, microbatch in zip(range(len(order), 0, -1), order):
        empty = [pipeline for pipeline, microbatches in enumerate(taken) if not microbatches]
        with_room = [pipeline for pipeline in range(len(taken)) if len(taken[pipeline]) < timer.max_microbatches]
        allowed = empty if len(empty) == num_left else with_room
        placed = {j: direction.through(j, direction.ready_s[microbatch : microbatch + 1], free_s[j]) for j in allowed}
        # Ties go to the first pipeline, in mirrored time to the last.
        first = min(allowed, key=lambda j: (placed[j][-1], j * order.step))
        free_s[first] = placed[first]
        taken[first].append(microbatch)
    return tuple(tuple(sorted(microbatches)) for microbatches in taken)


def _moves(step: FilledStep, max_microbatches: int) -> Iterator[Pipelines]:
    """What one move makes of the assignment of a step."""
    pipelines = step.pipelines
    for source in _critical(step.times):
        for moved, (sink, others) in product(pipelines[source], enumerate(pipelines)):
            if sink == source:
                continue
            if len(pipelines[source]) > 1 and len(others) < max_microbatches:
                yield _moved(pipelines, source, sink, moved)
            for returned in others:
                if abs(returned - moved) <= len(pipelines):
                    yield _moved(_moved(pipelines, source, sink, moved), sink, source, returned)


def _critical(times: Sequence[PipelineTimes]) -> list[int]:
    """The pipeline with the longest lead, and the one that ends last."""
    longest_lead = max(range(len(times)), key=lambda j: times[j].lead_s)
    last = max(range(len(times)), key=lambda j: max(times[j].end_s))
    return list(dict.fromkeys([longest_lead, last]))


def _moved(pipelines: Pipelines, source: int, sink: int, microbatch: int) -> Pipelines:
    changed = {
        source: tuple(each for each in pipelines[source] if each != microbatch),
        sink: tuple(sorted((*pipelines[sink], microbatch))),
    }
    return tuple(changed.get(number, microbatches) for number, microbatches in enumerate(pipelines))
