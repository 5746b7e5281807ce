"""Swaps between heavy and light ranks until the heaviest rank is at the bound. packed.py runs them after LPT.

1. In a round, the heaviest rank swaps with the lightest, the next heaviest with the next lightest, and so on. The heavy
   rank gives an item and takes a lighter one, or none, so that the two loads come as close as possible. If the
   heaviest rank has no such swap, the next round pairs it with the next lightest rank.
2. If it has none with any rank: do the same with two items at once.
3. If that fails too: swap items of two other ranks at random, without reaching the largest load, and try again.

No swap raises the largest load. So the result is never worse than LPT, and more steps never give a worse one. Only the
lightest items of a rank move: they have the small differences that are needed, and the cost of a swap does not
depend on the number of items.
"""

from __future__ import annotations

from bisect import insort
from typing import NamedTuple

import numpy as np

_NUM_MOVABLE = 24
"""The number of items of a rank that may move: its lightest."""

NUM_PAIRABLE = 16
"""The number of these that form pairs."""

NUM_PAIR_ROUNDS = 16
"""The most rounds with pairs."""

STEPS_PER_BUNDLE = 8
"""The steps that a bundle costs in a round with pairs, where bundles are built and sorted."""

STEPS_PER_SHAKE = 16
"""The steps that a random swap costs."""


class Bundle(NamedTuple):
    """Items of one rank that move together, and the sum of their weights. An item is its index by descending weight."""

    weight: int
    items: tuple[int, ...]


NO_BUNDLE = Bundle(0, ())


class RandomNumbers:
    """The high bits of a linear congruential generator: pseudo-random numbers, the same on every machine."""

    def __init__(self) -> None:
        self._state = 0

    def below(self, limit: int) -> int:
        """The next number, from 0 to limit - 1."""
        self._state = (self._state * 6364136223846793005 + 1442695040888963407) % 2**64
        return (self._state >> 33) % limit


class Swaps:
    """A placement that swaps improve. ranks: the rank of each item, by descending weight. loads: of each rank."""

    def __init__(self, descending: list[int], ranks: list[int], num_ranks: int, equal_counts: bool) -> None:
        self.ranks = ranks
        self.loads = [0] * num_ranks
        self._weights = descending
        self._counts = [0] * num_ranks
        self._equal_counts = equal_counts
        self._random = RandomNumbers()
        # The items of each rank that can move, lightest first, at most two of equal weight: a third adds no swap.
        self._movable: list[list[int]] = [[] for _ in range(num_ranks)]
        for item, rank in reversed(list(enumerate(ranks))):
            self.loads[rank] += descending[item]
            self._counts[rank] += 1
            movable = self._movable[rank]
            is_third = len(movable) > 1 and descending[movable[-2]] == descending[item]
            if len(movable) < _NUM_MOVABLE and not is_third:
                movable.append(item)

    def run(self, bound: int, num_steps: int) -> None:
        """Swap until the largest load is within 2^-17 (8 parts in a million) of the bound, or the steps are spent."""
        self._target = bound + (bound >> 17)
        self._steps_left = num_steps
        self._sort_ranks()
        while self._steps_left > 0 and self.loads[self._order[0]] > self._target:
            if not (self._swap_in_rounds(False) or self._swap_in_rounds(True) or self._shake()):
                return

    def _sort_ranks(self) -> None:
        """Order the ranks, heaviest first."""
        self._order = np.argsort(-np.array(self.loads, dtype=np.int64), kind="stable").tolist()
        self._steps_left -= len(self.loads)

    def _swap_in_rounds(self, with_pairs: bool) -> bool:
        """Do rounds until the heaviest rank has swapped; False if it cannot."""
        most_rounds = len(self.loads) - 1
        for shift in range(min(NUM_PAIR_ROUNDS, most_rounds) if with_pairs else most_rounds):
            if self._steps_left <= 0:
                return False
            swapped: list[bool] = []
            for heavy, light in zip(self._order, self._order[::-1][shift:]):
                if self.loads[heavy] <= self._target or 2 * len(swapped) >= most_rounds - shift:
                    break
                swapped.append(self._swap(heavy, light, with_pairs))
            if any(swapped):
                self._sort_ranks()
            if swapped[0]:
                return True
        return False

    def _shake(self) -> bool:
        """Swap at random among the other ranks until the heaviest has a swap; False when the steps are spent."""
        heaviest, *others = self._order
        while len(others) > 1 and self._steps_left > 0:
            self._steps_left -= STEPS_PER_SHAKE
            a, b = others[self._random.below(len(others))], others[self._random.below(len(others))]
            if a == b:
                continue
            self._swap_at_random(a, b)
            if any(self._swap(heaviest, light, with_pairs) for light in (a, b) for with_pairs in (False, True)):
                self._sort_ranks()
                return True
        return False

    def _swap_at_random(self, a: int, b: int) -> None:
        """Swap an item of each of two ranks, if both then stay below the largest load."""
        if not self._movable[a]:
            return
        weights, limit = self._weights, self.loads[self._order[0]]
        give = self._movable[a][self._random.below(len(self._movable[a]))]
        room_a, room_b = limit - self.loads[a], limit - self.loads[b]
        takable = [take for take in self._movable[b] if -room_a < weights[give] - weights[take] < room_b]
        if takable:
            take = takable[self._random.below(len(takable))]
            self._exchange(a, b, Bundle(weights[give], (give,)), Bundle(weights[take], (take,)))

    def _swap(self, heavy: int, light: int, with_pairs: bool) -> bool:
        """Make the swap that brings two loads closest; False if none lowers the larger load."""
        room = self.loads[heavy] - self.loads[light]
        if room < 2:
            return False
        givable, takable = self._bundles(heavy, with_pairs), self._bundles(light, with_pairs)
        if not self._equal_counts or (not with_pairs and self._counts[heavy] > self._counts[light]):
            takable = [NO_BUNDLE, *takable]
        self._steps_left -= (STEPS_PER_BUNDLE if with_pairs else 1) * (len(givable) + len(takable))
        enough = 2 * self._target - self.loads[heavy] - self.loads[light]
        swap = best_swap(givable, takable, room, max(enough, 1))
        if swap is None:
            return False
        self._exchange(heavy, light, *swap)
        return True

    def _bundles(self, rank: int, with_pairs: bool) -> list[Bundle]:
        """What the rank can move at once, lightest first. With equal counts, pairs are exchanged for pairs alone."""
        singles = [Bundle(self._weights[item], (item,)) for item in self._movable[rank]]
        if not with_pairs:
            return singles
        pairable = singles[:NUM_PAIRABLE]
        pairs = [Bundle(a.weight + b.weight, a.items + b.items) for i, a in enumerate(pairable) for b in pairable[:i]]
        return sorted(pairs if self._equal_counts else singles + pairs, key=lambda bundle: bundle.weight)

    def _exchange(self, a: int, b: int, from_a: Bundle, from_b: Bundle) -> None:
        """Move bundles between two ranks."""
        # Take out first: putting an item in can make the heaviest one unmovable.
        for rank, bundle in ((a, from_a), (b, from_b)):
            self.loads[rank] -= bundle.weight
            self._counts[rank] -= len(bundle.items)
            for item in bundle.items:
                self._movable[rank].remove(item)
        for rank, bundle in ((a, from_b), (b, from_a)):
            self.loads[rank] += bundle.weight
            self._counts[rank] += len(bundle.items)
            for item in bundle.items:
                insort(self._movable[rank], item, key=lambda other: -other)
                del self._movable[rank][_NUM_MOVABLE:]
                self.ranks[item] = rank


def best_swap(heavy: list[Bundle], light: list[Bundle], room: int, enough: int) -> tuple[Bundle, Bundle] | None:
    """The bundles to give and to take so that two loads, `room` apart, come closest, or at least as close as `enough`.

    None if every swap leaves one rank as heavy as the heavier was. Bundles are lightest first.
    """
    smallest_miss = room
    best = None
    index = 0  # of the lightest to take that changes the loads by at most room / 2; the one before changes more
    for give in heavy:
        while index < len(light) and give.weight - light[index].weight > room // 2:
            index += 1
        for take in reversed(light[max(index - 1, 0) : index + 1]):
            change = give.weight - take.weight
            miss = abs(room - 2 * change)
            if 0 < change < room and miss < smallest_miss:
                smallest_miss = miss
                best = (give, take)
        if smallest_miss <= enough:
            break
    return best
