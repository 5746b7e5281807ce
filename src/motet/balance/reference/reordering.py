"""The order of microbatches that makes a pipeline's step short, if their lengths are uneven; in any schedule.

MMScale/DistTrain section 5.2 and Algorithm 3, corrected: its loop runs past the last microbatch, so here it ends when
none is left; it does not define GETINTERVAL, so the interval is computed on the graph of the step. The paper fills the
intervals of an interleaved pipeline with as many forward passes of one microbatch as a rank has chunks; here the first
of them stands for all. Not in the paper: the other orders of step 2, and the swaps.

1. The slowest island first: compare the orders of step 2 with the given one. Other islands follow, slowest first; each
   takes the first order that makes it faster than the slowest before it, and else its best. The order that was taken
   last is tried first. An island that is faster as it is keeps its order, and so do all that follow.
2. Orders:
   - filled: the smallest microbatch goes first, to start all stages. The next smallest go last, where nothing fills the
     gaps between backwards. The others fill the gap before each backward of the first rank: the forward closest to an
     equal part of it, if several forwards stand before that backward. What is not chosen yet takes no time.
   - long ones early: the smallest, then the others from long to short.
   - small ends: the smallest of those that enter before the first backward, then the others from long to short.
     In an interleaved pipeline, microbatches enter in groups.
   - hill: every second one from small to long, then the others from long to small.
3. Swap two microbatches of the slowest island while that shortens it, until another island is slower or visits to
   operations are spent. With so many microbatches that swapping one of them with each other would take an eighth of the
   visits, there are no swaps.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable
from itertools import combinations

import numpy as np

from motet.balance.step_graph import StepGraph
from motet.core.arrays import Int32Array, Int64Array


class Clock:
    """The ends of a step's operations, for one island.

    durations: int64 [num_microbatches, num_rows], of the island's groups.
    An order is a list of these groups by position, and the first group at its end, for what serves the whole step. It
    may hold `unknown`, a group that takes no time.
    """

    def __init__(self, graph: StepGraph, durations: Int64Array) -> None:
        self.unknown = graph.num_microbatches
        self.table = [*durations.tolist(), [0] * durations.shape[1]]
        self.row, self.position, self.needs = graph.row.tolist(), graph.position.tolist(), graph.needs.tolist()
        self.offsets = graph.offsets.tolist()
        self.ends = [0] * len(self.row)

    def start(self, operation: int) -> int:
        """When all that an operation waits for has ended."""
        needs = self.needs[self.offsets[operation] : self.offsets[operation + 1]]
        return max((self.ends[need] for need in needs), default=0)

    def run(self, order: list[int], first: int, stop: int) -> None:
        """Compute the ends of operations first ... stop - 1."""
        for operation in range(first, stop):
            taken = self.table[order[self.position[operation]]][self.row[operation]]
            self.ends[operation] = self.start(operation) + taken

    def makespan(self, order: list[int]) -> int:
        """When the last operation ends."""
        self.run(order, 0, len(self.row))
        return max(self.ends, default=0)


def island_makespans(
    row: Int32Array,
    position: Int32Array,
    offsets: Int32Array,
    needs: Int32Array,
    gaps: Int32Array,
    durations: Int64Array,
    groups: Int64Array,
) -> Int64Array:
    """The makespan of each island, int64 [num_islands]. O(num_islands * num_needs).

    row, position, offsets, needs, gaps: of a StepGraph.
    durations: int64 [num_groups, num_rows], >= 0; their sums must fit int64. What serves the whole step takes the same
               in all groups.
    groups:    int64 [num_islands, num_microbatches], the group at each position.
    """
    graph = StepGraph(row, position, offsets, needs, gaps)
    given = [*range(graph.num_microbatches), 0]
    return np.array([Clock(graph, durations[of_island]).makespan(given) for of_island in groups], dtype=np.int64)


def order_islands(
    row: Int32Array,
    position: Int32Array,
    offsets: Int32Array,
    needs: Int32Array,
    gaps: Int32Array,
    num_last: int,
    durations: Int64Array,
    groups: Int64Array,
    given: Int64Array,
    limit: int,
    num_visits: int,
) -> tuple[Int64Array, Int64Array]:
    """The groups of the islands in a better order, one island after the other, int64 [num_islands * num_microbatches],
    and their makespans.

    given:      the makespans in the given order, int64 [num_islands].
    limit:      stop as soon as an island that is ordered is not below it.
    num_visits: operations that the swaps may compute, over all islands.
    Other arguments as above. O(num_islands (num_needs + num_microbatches^2) + num_visits), plus the operations inside
    gaps.
    """
    graph = StepGraph(row, position, offsets, needs, gaps, num_last)
    count, clocks = graph.num_microbatches, [Clock(graph, durations[of_island]) for of_island in groups]
    orders = [[*range(count), 0] for _ in clocks]
    makespans, slowest, ways = given.tolist(), 0, list(WAYS)
    for island in sorted(range(len(clocks)), key=lambda island: -makespans[island]):
        if makespans[island] <= slowest or slowest >= limit or count < 2:
            break
        makespans[island] = _take_fastest(graph, clocks[island], ways, slowest, orders[island], makespans[island])
        slowest = max(slowest, makespans[island])
    if slowest < limit and 8 * len(row) * count <= num_visits:
        _swap(graph, clocks, orders, makespans, num_visits)
    joined = [of_island[order[:count]] for of_island, order in zip(groups, orders)]
    return np.concatenate([np.empty(0, dtype=np.int64), *joined]), np.array(makespans, dtype=np.int64)


def _take_fastest(graph: StepGraph, clock: Clock, ways: list[Way], target: int, order: list[int], makespan: int) -> int:
    """Make `order`, which takes `makespan`, the first order that is no slower than the target, or else the fastest;
    returns its makespan. The way that it was made goes to the front of `ways`.
    """
    sizes = [sum(row) for row in clock.table[: clock.unknown]]
    ascending = sorted(range(len(sizes)), key=lambda microbatch: (sizes[microbatch], microbatch))
    taken = None
    for way in ways:
        if makespan <= target:
            break
        found = way(graph, clock, ascending)
        if (found_makespan := clock.makespan(found)) < makespan:
            order[:], makespan, taken = found, found_makespan, way
    if taken is not None:
        ways.insert(0, ways.pop(ways.index(taken)))
    return makespan


def _filled(graph: StepGraph, clock: Clock, ascending: list[int]) -> list[int]:
    count, gaps = len(ascending), graph.gaps.tolist()
    order = [ascending[0], *[clock.unknown] * (count - 1), 0]
    num_last = min(graph.num_last, count - 1)
    first_of = _first_operations(graph)
    entry = clock.row[gaps[0][0]]
    waiting: list[tuple[int, int]] = []  # (forward of the entry, microbatch), ascending
    for microbatch in ascending[1 + num_last :]:
        insort(waiting, (clock.table[microbatch][entry], microbatch))
    for position in range(1, count - num_last):
        _, before, backward, num_forwards = gaps[position]
        clock.run(order, first_of[position - 1], max(backward, before) + 1)
        gap = clock.start(backward) - (clock.ends[before] if before >= 0 else 0) if backward >= 0 else 0
        order[position] = _closest(waiting, max(gap, 0) // num_forwards)
    order[count - num_last : count] = ascending[num_last:0:-1]
    return order


def _long_ones_early(graph: StepGraph, clock: Clock, ascending: list[int]) -> list[int]:
    return [ascending[0], *ascending[:0:-1], 0]


def _small_ends(graph: StepGraph, clock: Clock, ascending: list[int]) -> list[int]:
    num_first = int((graph.gaps[:, 2] == graph.gaps[0, 2]).sum())
    return [*ascending[:num_first], *ascending[: num_first - 1 : -1], 0]


def _hill(graph: StepGraph, clock: Clock, ascending: list[int]) -> list[int]:
    return [*ascending[::2], *ascending[1::2][::-1], 0]


Way = Callable[[StepGraph, Clock, list[int]], list[int]]
WAYS: tuple[Way, ...] = (_small_ends, _filled, _long_ones_early, _hill)


def _first_operations(graph: StepGraph) -> list[int]:
    """For each position, the first operation of it or of a later one."""
    positions, first = np.unique(graph.position, return_index=True)
    found: list[int] = np.minimum.accumulate(first[positions < graph.num_microbatches][::-1])[::-1].tolist()
    return found


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


def _swap(
    graph: StepGraph, clocks: list[Clock], orders: list[list[int]], makespans: list[int], num_visits: int
) -> None:
    """Swap two microbatches of the slowest island, in place, while a swap shortens it and visits are left."""
    num_operations, first_of = len(graph.row), _first_operations(graph)
    pairs = list(combinations(range(graph.num_microbatches), 2))
    next_pair, num_tried = [0] * len(clocks), [0] * len(clocks)  # of each island; tried since the last swap that stayed
    while makespans:
        island = makespans.index(max(makespans))
        next_slowest = max((other for number, other in enumerate(makespans) if number != island), default=0)
        clock, order = clocks[island], orders[island]
        clock.makespan(order)
        while num_tried[island] < len(pairs) and makespans[island] >= next_slowest:
            i, j = pairs[next_pair[island]]
            next_pair[island] = (next_pair[island] + 1) % len(pairs)
            num_tried[island] += 1
            num_visits -= num_operations - first_of[i]
            if num_visits < 0:
                return
            kept = clock.ends[first_of[i] :]
            order[i], order[j] = order[j], order[i]
            clock.run(order, first_of[i], num_operations)
            if (makespan := max(clock.ends)) < makespans[island]:
                makespans[island], num_tried[island] = makespan, 0
            else:
                order[i], order[j] = order[j], order[i]
                clock.ends[first_of[i] :] = kept
        if num_tried[island] == len(pairs):
            return
