"""The order of microbatches in a 1F1B pipeline that makes bubbles short, if their lengths are uneven.

MMScale/DistTrain Algorithm 3, corrected: its loop runs past the last microbatch, so here it ends when none is left; it
does not define GETINTERVAL, so `PipelineClock` computes the interval from the schedule's recursion. Not in the paper:
the order with long microbatches early, and the swaps.

1. The smallest microbatch goes first, to start all stages. The num_stages - 1 next smallest go last, where nothing
   fills the gaps between backwards.
2. The first stage waits for the first backward. Fill this time with num_stages - 1 forwards, each closest to an equal
   part of what is left of it.
3. Fill the gap before each further backward with the forward closest to it; `PipelineClock` gives the gap.
4. Compare this order, the given order, and the smallest microbatch followed by the others from long to short. Take the
   best, and swap two microbatches while that shortens the step, up to a fixed number of visits to stages. With so many
   microbatches that swapping one of them with each other exceeds that number, there are no swaps.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from itertools import combinations

import numpy as np

from motet.core.arrays import Int64Array

NUM_VISITS = 1 << 18
"""Visits of a microbatch to a stage that the swaps simulate at most: about 1 ms in the native core."""


class PipelineClock:
    """The times of a 1F1B pipeline, computed as far as the microbatches in `order` allow.

    Stage s does num_stages - 1 - s forwards, then forwards and backwards in turn, then the remaining backwards.
    So `step` i is the forward of microbatch i on every stage, and the backward of microbatch i - (num_stages - 1 - s).
    """

    def __init__(self, forward: list[list[int]], backward: list[list[int]]) -> None:
        self.forward, self.backward = forward, backward  # [microbatch][stage]
        self.num_stages = len(forward[0])
        self.order: list[int] = []
        self.num_steps = 0
        self.free = [0] * self.num_stages  # [stage], when its last action ended
        self.gradient = [0] * (self.num_stages + 1)  # [stage], when its last backward ended; 0 after the last stage

    def step(self) -> None:
        """The next forward on every stage, if there is one, and the backward after it."""
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
        """Do all remaining steps; returns the makespan."""
        while self.num_steps < len(self.order) + self.num_stages - 1:
            self.step()
        return self.free[0]

    def interval(self) -> int:
        """The gap before the next backward of the first stage, for the next forward to fill."""
        return max(self.gradient[1] - self.free[0], 0)


def pipeline_makespan(forward: Int64Array, backward: Int64Array, order: Int64Array) -> int:
    """When the last backward ends. Durations: int64 [num_microbatches, num_stages]. O(their number)."""
    return _makespan(forward.tolist(), backward.tolist(), order.tolist())


def order_microbatches(forward: Int64Array, backward: Int64Array) -> Int64Array:
    """The order, a permutation int64 [num_microbatches]; never slower than the given order.

    forward, backward: int64 [num_microbatches, num_stages], >= 0; the sum of both must fit int64.
    O(num_microbatches (num_stages + num_microbatches) + NUM_VISITS).
    """
    fore, back = forward.tolist(), backward.tolist()
    given_order = list(range(len(fore)))
    if len(fore) < 2:
        return np.array(given_order, dtype=np.int64)
    ascending = sorted(given_order, key=lambda microbatch: (sum(fore[microbatch]) + sum(back[microbatch]), microbatch))
    longest_early = [ascending[0], *reversed(ascending[1:])]
    orders = [given_order, _filled(fore, back, ascending), longest_early]
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
    """The order of steps 1 to 3."""
    pipeline = PipelineClock(forward, backward)
    num_stages = pipeline.num_stages
    # 1. The smallest first, the next smallest last.
    first, last, middle = ascending[0], ascending[1:num_stages], ascending[num_stages:]
    waiting: list[tuple[int, int]] = []  # (forward on the first stage, microbatch), ascending
    for microbatch in middle:
        insort(waiting, (forward[microbatch][0], microbatch))
    pipeline.order.append(first)
    pipeline.step()
    # 2. The time until the first backward.
    gap = sum(forward[first][1:]) + sum(backward[first][1:])
    for missing in range(num_stages - 1, 0, -1):
        if waiting:
            microbatch = _closest(waiting, gap // missing)
            gap = max(gap - forward[microbatch][0], 0)
            pipeline.order.append(microbatch)
            pipeline.step()
    # 3. The gap before each further backward.
    while waiting:
        pipeline.order.append(_closest(waiting, pipeline.interval()))
        pipeline.step()
    return pipeline.order + last[::-1]


def _closest(waiting: list[tuple[int, int]], duration: int) -> int:
    """Take out the microbatch whose forward is closest to a duration. A tie: the shorter, then the lower number."""
    above = bisect_left(waiting, (duration, 0))
    if above == len(waiting):
        below_is_closer = True
    else:
        below_is_closer = above > 0 and duration - waiting[above - 1][0] <= waiting[above][0] - duration
    if below_is_closer:
        above = bisect_left(waiting, (waiting[above - 1][0], 0))
    return waiting.pop(above)[1]


def _swap(forward: list[list[int]], backward: list[list[int]], order: list[int]) -> None:
    """Swap two microbatches, in place, while a swap shortens the step and visits are left."""
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
