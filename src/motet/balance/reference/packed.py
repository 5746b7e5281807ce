"""Items on ranks so that the largest sum of weights is small: LPT, then swaps.

The greedy of OrchMLLM Algorithm 1 (longest item first, to the rank with the smallest sum; its `top().push` is to be
read as pop, add and push) is the LPT rule, within 4/3 - 1/(3 num_ranks) of the optimum. What it leaves, some part of an
item a rank, the second half removes: the heaviest rank gives an item to a lighter one and takes a lighter item, or
none, in return; where no such swap helps, the same is tried with two items at once. From some twenty items a rank on,
this ends at the bound itself.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right, insort
from itertools import combinations
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from motet.balance.reference.bound import packed_bound
from motet.balance.reference.result import Placement, placement

MAX_ITEMS_FOR_PAIRS = 64
"""Pairs are tried on ranks of up to so many items; with more, single items always find a swap."""


class Bundle(NamedTuple):
    """Items of one rank that move together: their summed weight and their places on the rank, ascending."""

    weight: int
    places: tuple[int, ...]


NOTHING = Bundle(0, ())

RankItems = list[tuple[int, int]]
"""The items of a rank as (-weight, item number), ascending: heaviest first, then by number."""


def packed(weights: NDArray[np.int64], num_ranks: int) -> Placement:
    """Balance sums of weights, int64 [num_items], >= 0 and with a sum that fits int64. Ties go to the lower number.

    O(num_items log num_items), then at most 100 + 20 num_ranks swaps of O(num_items) each, of which at most num_ranks
    with pairs, O(num_items^2 / num_ranks).
    """
    bound = packed_bound(weights, num_ranks)
    items, loads = _longest_first(weights.tolist(), num_ranks)
    _swap_items(items, loads, bound)
    ranks = np.empty(len(weights), dtype=np.int32)
    for rank, on_rank in enumerate(items):
        ranks[[item for _, item in on_rank]] = rank
    return placement(ranks, np.array(loads, dtype=np.int64), bound)


def _longest_first(weights: list[int], num_ranks: int) -> tuple[list[RankItems], list[int]]:
    """LPT: the items and the load of each rank. Of equally loaded ranks the one with fewer items is next."""
    items: list[RankItems] = [[] for _ in range(num_ranks)]
    loads = [0] * num_ranks
    queue = [(0, 0, rank) for rank in range(num_ranks)]
    for negated, item in sorted((-weight, item) for item, weight in enumerate(weights)):
        _, count, rank = queue[0]
        items[rank].append((negated, item))
        loads[rank] -= negated
        heapq.heapreplace(queue, (loads[rank], count + 1, rank))
    return items, loads


def _swap_items(items: list[RankItems], loads: list[int], bound: int) -> None:
    """Swap until the heaviest rank is at the bound, to 8 parts in a million, or no swap makes it lighter."""
    pair_swaps_left = len(loads)
    for _ in range(100 + 20 * len(loads)):
        lightest_first = sorted(range(len(loads)), key=lambda rank: (loads[rank], rank))
        if loads[lightest_first[-1]] - bound <= bound >> 17:
            return
        if _swap_once(items, loads, lightest_first, with_pairs=False):
            continue
        if pair_swaps_left == 0 or not _swap_once(items, loads, lightest_first, with_pairs=True):
            return
        pair_swaps_left -= 1


def _swap_once(items: list[RankItems], loads: list[int], lightest_first: list[int], with_pairs: bool) -> bool:
    """Swap between the heaviest rank and the lightest that has a swap to offer; False where none has."""
    heavy = lightest_first[-1]
    for light in lightest_first:
        room = loads[heavy] - loads[light]
        swap = _best_swap(_bundles(items[heavy], with_pairs), _bundles(items[light], with_pairs), room)
        if swap is None:
            continue
        give, take = swap
        given = [items[heavy].pop(place) for place in reversed(give.places)]
        taken = [items[light].pop(place) for place in reversed(take.places)]
        for item in taken:
            insort(items[heavy], item)
        for item in given:
            insort(items[light], item)
        loads[heavy] -= give.weight - take.weight
        loads[light] += give.weight - take.weight
        return True
    return False


def _bundles(items: RankItems, with_pairs: bool) -> list[Bundle]:
    """All that the rank can move at once, heaviest first."""
    bundles = [Bundle(-negated, (place,)) for place, (negated, _) in enumerate(items)]
    if with_pairs and len(items) <= MAX_ITEMS_FOR_PAIRS:
        bundles += [Bundle(a.weight + b.weight, a.places + b.places) for a, b in combinations(bundles, 2)]
    return sorted(bundles, key=lambda bundle: -bundle.weight)


def _best_swap(heavy: list[Bundle], light: list[Bundle], room: int) -> tuple[Bundle, Bundle] | None:
    """What to give and take so that two loads, `room` apart, come closest; None where both ways leave one as heavy."""
    takable = [*light, NOTHING]
    negated = [-bundle.weight for bundle in takable]
    smallest_miss = room
    best = None
    for give in heavy:
        # Half the room is best: the lightest that moves at most half, and the next lighter one, which moves more.
        below = bisect_right(negated, room // 2 - give.weight)
        for take in takable[max(below - 1, 0) : below + 1]:
            change = give.weight - take.weight
            miss = abs(room - 2 * change)
            if 0 < change < room and miss < smallest_miss:
                smallest_miss = miss
                best = (give, take)
        if smallest_miss <= 1:
            break
    return best
