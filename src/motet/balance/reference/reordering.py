"""The order of microbatches in a 1F1B pipeline, so that those of uneven length leave short bubbles.

MMScale/DistTrain Algorithm 3, corrected: its loop runs past the last microbatch, so it runs here while any remain; and
GETINTERVAL, which it leaves open, is read off the schedule's own recursion (`PipelineClock`). Two things are ours: the
order with the longest microbatches early, and swaps of two microbatches as long as they shorten the step.

1. The smallest microbatch goes first, to start all stages; the num_stages - 1 smallest of the rest go last, where
   nothing fills the gaps between backwards.
2. The first stage waits for the first backward: num_stages - 1 microbatches whose forwards, summed, come closest to it.
3. Before each further backward: the one whose forward comes closest to the gap that the recursion says is there.
4. Of this order, the given one, and the smallest first, then the longest to the shortest: the best. Swap two while that
   helps, up to a fixed number of stage visits; with too many microbatches for one swap of each, not at all.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from itertools import combinations

import numpy as np

from motet.core.arrays import Int64Array

NUM_VISITS = 1 << 18
"""Visits of a microbatch to a stage that the swaps may simulate: about a millisecond in the native core."""


class PipelineClock:
    """1F1B, microbatch after microbatch: what is known once each stage has done all that the ones so far allow.

    Stage s does num_stages - 1 - s forwards, then a forward and a backward in turn, then the backwards that are left.
    So step i is the forward of microbatch i on every stage, and the backward of microbatch i - (num_stages - 1 - s).
    """

    def __init__(self, forward: list[list[int]], backward: list[list[int]]) -> None:
        self.forward, self.backward = forward, backward  # [microbatch][stage]
        self.num_stages = len(forward[0])
        self.order: list[int] = []
        self.num_steps = 0
        self.free = [0] * self.num_stages  # when each stage has done its last action
        self.gradient = [0] * (self.num_stages + 1)  # when the last backward of each stage was done; of none at the end

    def step(self) -> None:
        """The next forward, if the order has one, then the backward that it makes room for, on every stage."""
        now = 0
        if self.num_steps < len(self.order):
            for stage, duration in enumerate(self.forward[self.order[self.num_steps]]):
                now = self.free[stage] = max(now, self.free[stage]) + duration
        for stage in range(self.num_stages):
            microbatch = self.num_steps - (self.num_stages - 1 - stage)
            if 0 <= microbatch < len(self.order):
                start = max(self.free[stage], self.gradient[stage + 1])
                self.free[stage] = start + self.backward[self.order[microbatch]][stage]
                self.gradient[stage] = self.free[stage]
        self.num_steps += 1

    def finish(self) -> int:
        """All that is left; the makespan."""
        while self.num_steps < len(self.order) + self.num_stages - 1:
            self.step()
        return self.free[0]

    def interval(self) -> int:
        """The gap before the first stage's next backward, which the next forward is to fill."""
        return max(self.gradient[1] - self.free[0], 0)


def pipeline_makespan(forward: Int64Array, backward: Int64Array, order: Int64Array) -> int:
    """When the last backward ends, for durations int64 [num_microbatches, num_stages]. O(size)."""
    return _makespan(forward.tolist(), backward.tolist(), order.tolist())


def order_microbatches(forward: Int64Array, backward: Int64Array) -> Int64Array:
    """A permutation, int64 [num_microbatches], no slower than the given order.

    forward, backward: int64 [num_microbatches, num_stages], >= 0, with a sum that fits int64.
    O(num_microbatches (num_stages + num_microbatches)) and NUM_VISITS.
    """
    fore, back = forward.tolist(), backward.tolist()
    given = list(range(len(fore)))
    if len(fore) < 2:
        return np.array(given, dtype=np.int64)
    ascending = sorted(given, key=lambda microbatch: (sum(fore[microbatch]) + sum(back[microbatch]), microbatch))
    longest_early = [ascending[0], *reversed(ascending[1:])]
    orders = [given, _filled(fore, back, ascending), longest_early]
    best = min(orders, key=lambda order: _makespan(fore, back, order))
    _swap(fore, back, best)
    return np.array(best, dtype=np.int64)


def _makespan(forward: list[list[int]], backward: list[list[int]], order: list[int]) -> int:
    if not order:
        return 0
    pipeline = PipelineClock(forward, backward)
    pipeline.order = order
    return pipeline.finish()


def _filled(forward: list[list[int]], backward: list[list[int]], ascending: list[int]) -> list[int]:
    """Steps 1 to 3: the intervals of the first stage, filled one after the other."""
    pipeline = PipelineClock(forward, backward)
    num_stages = pipeline.num_stages
    first, last, middle = ascending[0], ascending[1:num_stages], ascending[num_stages:]
    waiting: list[tuple[int, int]] = []  # (forward on the first stage, microbatch), ascending
    for microbatch in middle:
        insort(waiting, (forward[microbatch][0], microbatch))
    pipeline.order.append(first)
    pipeline.step()
    gap = sum(forward[first][1:]) + sum(backward[first][1:])
    for missing in range(num_stages - 1, 0, -1):
        if waiting:
            microbatch = _closest(waiting, gap // missing)
            gap = max(gap - forward[microbatch][0], 0)
            pipeline.order.append(microbatch)
            pipeline.step()
    while waiting:
        pipeline.order.append(_closest(waiting, pipeline.interval()))
        pipeline.step()
    return pipeline.order + last[::-1]


def _closest(waiting: list[tuple[int, int]], duration: int) -> int:
    """Take out the microbatch whose forward is closest to a duration; the shorter, then the lower number, of two."""
    above = bisect_left(waiting, (duration, 0))
    if above == len(waiting):
        below_is_closer = True
    else:
        below_is_closer = above > 0 and duration - waiting[above - 1][0] <= waiting[above][0] - duration
    if below_is_closer:
        above = bisect_left(waiting, (waiting[above - 1][0], 0))
    return waiting.pop(above)[1]


def _swap(forward: list[list[int]], backward: list[list[int]], order: list[int]) -> None:
    """Swap two microbatches, in place, wherever that shortens the step, until none does or the visits are used up."""
    visits_left = NUM_VISITS
    visits = (len(order) + len(forward[0]) - 1) * len(forward[0])
    if visits * len(order) > NUM_VISITS:
        return
    shortest = _makespan(forward, backward, order)
    improved = True
    while improved:
        improved = False
        for i, j in combinations(range(len(order)), 2):
            visits_left -= visits
            if visits_left < 0:
                return
            order[i], order[j] = order[j], order[i]
            makespan = _makespan(forward, backward, order)
            if makespan < shortest:
                shortest, improved = makespan, True
            else:
                order[i], order[j] = order[j], order[i]
