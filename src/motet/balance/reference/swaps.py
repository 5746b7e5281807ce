"""Swaps between heavy and light ranks, until the heaviest is at the bound: what follows LPT in packed.py.

1. In a round the heaviest rank swaps with the lightest, the next with the next, and so on: each gives an item and takes
   a lighter one, or none, so that the two loads come as close as they can. Where the heaviest finds no such swap, the
   next round pairs it with the next lighter rank.
2. Where it finds none at all, the same with two items at once.
3. Where that fails too, two other ranks trade items at random, neither reaching the heaviest, and it looks again.

No swap raises the largest load, so that more steps never end worse, and none ends worse than LPT. Only the lightest
items of a rank move: among them are the small differences that are looked for, and a swap costs the same on a rank
of a thousand items.
"""

from __future__ import annotations

from bisect import insort
from typing import NamedTuple

import numpy as np

_NUM_MOVABLE = 24
"""So many of a rank's items move, the lightest."""
NUM_PAIRABLE = 16
"""So many of these form pairs."""
NUM_PAIR_ROUNDS = 16
STEPS_PER_BUNDLE = 8
"""With pairs a bundle is made and sorted before it is looked at."""
STEPS_PER_SHAKE = 16


class Bundle(NamedTuple):
    """Items of one rank that move together: their summed weight and their places in the order of weights."""

    weight: int
    places: tuple[int, ...]


NO_BUNDLE = Bundle(0, ())


class Dice:
    """Numbers that look random and are the same everywhere: a linear congruential generator, its high bits."""

    def __init__(self) -> None:
        self._state = 0

    def below(self, limit: int) -> int:
        self._state = (self._state * 6364136223846793005 + 1442695040888963407) % 2**64
        return (self._state >> 33) % limit


class Swaps:
    """A placement while it is improved: `ranks` of each place in the order of weights, and `loads` of each rank."""

    def __init__(self, descending: list[int], ranks: list[int], num_ranks: int, equal_counts: bool) -> None:
        self.ranks = ranks
        self.loads = [0] * num_ranks
        self._weights = descending
        self._counts = [0] * num_ranks
        self._equal_counts = equal_counts
        self._dice = Dice()
        # Places of each rank that can move, lightest first, at most two of one weight: a third would add no swap.
        self._movable: list[list[int]] = [[] for _ in range(num_ranks)]
        for place, rank in reversed(list(enumerate(ranks))):
            self.loads[rank] += descending[place]
            self._counts[rank] += 1
            movable = self._movable[rank]
            third = len(movable) > 1 and descending[movable[-2]] == descending[place]
            if len(movable) < _NUM_MOVABLE and not third:
                movable.append(place)

    def run(self, bound: int, num_steps: int) -> None:
        """Swap until the heaviest rank is at the bound, to 8 parts in a million, or the steps are spent."""
        self._target = bound + (bound >> 17)
        self._steps_left = num_steps
        self._sort_ranks()
        while self._steps_left > 0 and self.loads[self._order[0]] > self._target:
            if not (self._swap_in_rounds(False) or self._swap_in_rounds(True) or self._shake()):
                return

    def _sort_ranks(self) -> None:
        """Heaviest first."""
        self._order = np.argsort(-np.array(self.loads, dtype=np.int64), kind="stable").tolist()
        self._steps_left -= len(self.loads)

    def _swap_in_rounds(self, with_pairs: bool) -> bool:
        """Rounds until the heaviest rank has swapped; False if it cannot."""
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
        """Swap at random among the others until the heaviest rank finds a swap; False once the steps are spent."""
        heaviest, *others = self._order
        while len(others) > 1 and self._steps_left > 0:
            self._steps_left -= STEPS_PER_SHAKE
            a, b = others[self._dice.below(len(others))], others[self._dice.below(len(others))]
            if a == b:
                continue
            self._swap_at_random(a, b)
            if any(self._swap(heaviest, light, with_pairs) for light in (a, b) for with_pairs in (False, True)):
                self._sort_ranks()
                return True
        return False

    def _swap_at_random(self, a: int, b: int) -> None:
        if not self._movable[a]:
            return
        weights, limit = self._weights, self.loads[self._order[0]]
        give = self._movable[a][self._dice.below(len(self._movable[a]))]
        room_a, room_b = limit - self.loads[a], limit - self.loads[b]
        takable = [take for take in self._movable[b] if -room_a < weights[give] - weights[take] < room_b]
        if takable:
            take = takable[self._dice.below(len(takable))]
            self._exchange(a, b, Bundle(weights[give], (give,)), Bundle(weights[take], (take,)))

    def _swap(self, heavy: int, light: int, with_pairs: bool) -> bool:
        """Bring two loads closer, if that makes the larger smaller."""
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
        """What the rank can move at once, lightest first. Where counts must be equal, a pair goes for a pair."""
        singles = [Bundle(self._weights[place], (place,)) for place in self._movable[rank]]
        if not with_pairs:
            return singles
        pairable = singles[:NUM_PAIRABLE]
        pairs = [Bundle(a.weight + b.weight, a.places + b.places) for i, a in enumerate(pairable) for b in pairable[:i]]
        return sorted(pairs if self._equal_counts else singles + pairs, key=lambda bundle: bundle.weight)

    def _exchange(self, a: int, b: int, from_a: Bundle, from_b: Bundle) -> None:
        # All is taken out before anything is put in, which can push the heaviest item out of what can move.
        for rank, bundle in ((a, from_a), (b, from_b)):
            self.loads[rank] -= bundle.weight
            self._counts[rank] -= len(bundle.places)
            for place in bundle.places:
                self._movable[rank].remove(place)
        for rank, bundle in ((a, from_b), (b, from_a)):
            self.loads[rank] += bundle.weight
            self._counts[rank] += len(bundle.places)
            for place in bundle.places:
                insort(self._movable[rank], place, key=lambda other: -other)
                del self._movable[rank][_NUM_MOVABLE:]
                self.ranks[place] = rank


def best_swap(heavy: list[Bundle], light: list[Bundle], room: int, enough: int) -> tuple[Bundle, Bundle] | None:
    """What to give and take so that two loads, `room` apart, come closest, or as close as `enough`.

    None where each swap leaves one of them as heavy as the heavier was. Bundles are lightest first.
    """
    smallest_miss = room
    best = None
    place = 0  # the lightest with which at most half the room moves; with the one before it, more moves
    for give in heavy:
        while place < len(light) and give.weight - light[place].weight > room // 2:
            place += 1
        for take in reversed(light[max(place - 1, 0) : place + 1]):
            change = give.weight - take.weight
            miss = abs(room - 2 * change)
            if 0 < change < room and miss < smallest_miss:
                smallest_miss = miss
                best = (give, take)
        if smallest_miss <= enough:
            break
    return best
