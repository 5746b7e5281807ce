"""A search for the joint assignment: swaps of whole examples between two ranks, judged in all phases at once.

excess[phase, rank] = (load - bound of the phase) * num_ranks / sqrt(sum of the phase * sum of all phases)
penalty[rank]       = sum over phases of max(0, excess)^2

By the square root, 1 % of a phase counts for more in a phase that costs more, but less than in proportion: the
objective comes first, yet no phase is neglected.

1. Take the heavy rank: the one with the largest excess in any phase.
2. Take its partners: the ranks for which the penalty of both would fall most if the two had equal excesses.
3. Compare all swaps of an example (or none) of the heavy rank with one (or none) of a partner. Make the swap that
   lowers the penalty of both most. If no swap lowers it, the phase is stuck; continue with another phase.
4. Stop if all phases are stuck, the objective is at the goal, or the pairs are spent. Undo the swaps after the lowest
   objective.

All numbers are float32, with one operation at a time in a stated order, so results are equal to the bit on every
machine (IEEE 754).
"""

from __future__ import annotations

import numpy as np

from motet.balance.reference.joint_state import JointProblem, JointState
from motet.core.arrays import Float32Array

MAX_CANDIDATES = 128
"""The most examples of a rank that a swap considers; of a longer list, evenly spread ones."""

PAIRS_PER_SWAP = 2**15
"""Pairs of examples compared for one swap. They set the number of partners, which is at least 4."""

SMALLEST_GAIN = np.float32(2.0**-13)
"""The smallest gain of a swap, as a share of the heavy rank's penalty."""


def search_swaps(problem: JointProblem, state: JointState, max_pairs: int) -> None:
    """Swap in place; the objective never rises. O(num_phases * max_pairs)."""
    search = _Search(problem, state)
    lowest, num_kept = state.objective, 0
    stuck = np.zeros(problem.costs.shape[1], dtype=bool)
    while search.num_pairs < max_pairs and lowest > problem.goal:
        excess = np.where(stuck[:, None], np.float32(0), search.excess)  # of the phases that are not stuck
        phase, heavy = divmod(int(excess.argmax()), problem.num_ranks)
        if excess[phase, heavy] <= 0:
            break
        if not search.swap(heavy):
            stuck[phase] = True
            continue
        stuck[:] = False
        if state.objective < lowest:
            lowest, num_kept = state.objective, len(search.swaps)
    for giver, taker, give, take in reversed(search.swaps[num_kept:]):
        search.exchange(giver, taker, take, give)


class _Search:
    """excess: float32 [num_phases, num_ranks]. penalty: float32 [num_ranks]. swaps: (heavy, light, give, take)."""

    def __init__(self, problem: JointProblem, state: JointState) -> None:
        self.problem, self.state = problem, state
        sums = problem.costs.sum(axis=0).astype(np.float64)
        total = 0.0
        for phase_sum in sums:
            total += phase_sum
        root = np.sqrt(sums * total)
        self.scale = np.divide(problem.num_ranks, root, out=np.zeros_like(root), where=sums > 0).astype(np.float32)
        self.excess = np.zeros((len(sums), problem.num_ranks), dtype=np.float32)
        self.penalty = np.zeros(problem.num_ranks, dtype=np.float32)
        self.swaps: list[tuple[int, int, int | None, int | None]] = []
        self.num_pairs = 0
        for rank in range(problem.num_ranks):
            self._refresh(rank)

    def swap(self, heavy: int) -> bool:
        """Make the best swap of the heavy rank with a partner; False if none lowers their penalty."""
        given, giveable = self._candidates(heavy)
        best = None
        most = SMALLEST_GAIN * self.penalty[heavy]
        for light in self._partners(heavy, len(giveable)):
            taken, takeable = self._candidates(light)
            penalty, give, take = _lowest_penalty(given, taken, self.excess[:, heavy], self.excess[:, light])
            self.num_pairs += len(giveable) * len(takeable)
            gain = (self.penalty[heavy] + self.penalty[light]) - penalty
            if gain > most:
                most = gain
                best = (heavy, light, giveable[give], takeable[take])
        if best is None:
            return False
        self.exchange(*best)
        self._refresh(heavy)
        self._refresh(best[1])
        self.swaps.append(best)
        return True

    def exchange(self, heavy: int, light: int, give: int | None, take: int | None) -> None:
        """Move example `give` from heavy to light, and `take` from light to heavy; None stands for none."""
        self._replace(heavy, give, take)
        self._replace(light, take, give)

    def _replace(self, rank: int, leaving: int | None, entering: int | None) -> None:
        """Replace an example of a rank by another one; None stands for none."""
        examples, loads = self.state.examples[rank], self.state.loads[rank]
        if entering is not None:
            loads += self.problem.costs[entering]
        if leaving is None:
            examples += [entering] if entering is not None else []
            return
        loads -= self.problem.costs[leaving]
        last = examples.pop() if entering is None else entering
        if leaving in examples:
            examples[examples.index(leaving)] = last

    def _partners(self, heavy: int, num_candidates: int) -> list[int]:
        """The ranks whose penalty, with that of the heavy rank, falls most if both get the mean of their excesses."""
        self.num_pairs += self.problem.num_ranks
        mean_penalty = _penalty((self.excess[:, [heavy]] + self.excess) * np.float32(0.5))
        gain = (self.penalty[heavy] + self.penalty) - 2 * mean_penalty
        gain[heavy] = 0
        order = np.argsort(-gain, kind="stable")[: max(4, PAIRS_PER_SWAP // num_candidates**2)]
        return [int(rank) for rank in order if gain[rank] > 0]

    def _candidates(self, rank: int) -> tuple[Float32Array, list[int | None]]:
        """What the rank can give: weights [num_phases, num_candidates], and the examples. The last one is None."""
        examples = self.state.examples[rank]
        num_examples = min(len(examples), MAX_CANDIDATES)
        tried = [examples[index * len(examples) // num_examples] for index in range(num_examples)]
        weights = np.zeros((len(self.scale), num_examples + 1), dtype=np.float32)
        weights[:, :-1] = self.problem.costs[tried].T.astype(np.float32) * self.scale[:, None]
        return weights, [*tried, None]

    def _refresh(self, rank: int) -> None:
        """Compute the excess and the penalty of a rank from its loads."""
        above = self.state.loads[rank] - self.problem.bound
        self.excess[:, rank] = above.astype(np.float32) * self.scale
        self.penalty[rank] = _penalty(self.excess[:, [rank]])[0]


def _penalty(excess: Float32Array) -> Float32Array:
    """The sum of max(0, excess)^2 over phases, the first axis, one phase after the other."""
    penalty = np.zeros(excess.shape[1:], dtype=np.float32)
    for of_phase in np.maximum(excess, np.float32(0)):
        penalty += of_phase * of_phase
    return penalty


def _lowest_penalty(
    given: Float32Array, taken: Float32Array, heavy: Float32Array, light: Float32Array
) -> tuple[np.float32, int, int]:
    """The penalty of both ranks after the best swap, and the indices (give, take) of its candidates.

    given, taken: weights of the candidates, [num_phases, num_candidates]. heavy, light: excesses, [num_phases].
    A tie goes to the first candidate of the light rank, then of the heavy one.
    """
    penalty = np.zeros((given.shape[1], taken.shape[1]), dtype=np.float32)
    for phase in range(len(given)):
        heavy_after = np.maximum((heavy[phase] - given[phase])[:, None] + taken[phase], np.float32(0))
        light_after = np.maximum((light[phase] + given[phase])[:, None] - taken[phase], np.float32(0))
        penalty += heavy_after * heavy_after + light_after * light_after
    give = penalty.argmin(axis=0)
    lowest = penalty[give, np.arange(penalty.shape[1])]
    take = int(lowest.argmin())
    return lowest[take], int(give[take]), take
