"""A search for the joint assignment: swaps of whole examples that help in all phases at once.

A rank's excess in a phase is its load above the phase's bound, in a unit that makes 1 % count for more in a phase that
costs more, but less than in proportion (the square root: the objective comes first, no phase is given up). Its pain is
the sum of its squared excesses; what is below the bound neither hurts nor helps.

1. The worst rank is the one with the largest excess of all phases.
2. Its partners are those with which perfect halves would lessen the pain of both most.
3. Over all pairs of an example, or none, of each, the one swap that leaves both in least pain is made. Where none
   lessens it, the phase is stuck, and the worst rank of another is next.
4. The search ends when all phases are stuck, the objective is near the bounds or the pairs are spent; the swaps after
   the lowest objective are taken back.

float32, one operation at a time and in a stated order: IEEE 754 makes that exact to the bit on every machine.
"""

from __future__ import annotations

import numpy as np

from motet.balance.reference.joint_state import JointProblem, JointState
from motet.core.arrays import Float32Array

MAX_SLOTS = 128
"""Of a rank with more examples, so many spread over its list are tried."""

PAIRS_A_STEP = 2**15
"""Pairs compared before a swap is chosen: they set the number of partners, which is at least 4."""

SMALLEST_GAIN = np.float32(2.0**-13)
"""Of the worst rank's pain."""


def search_swaps(problem: JointProblem, state: JointState, max_pairs: int) -> None:
    """Swap in place; the objective never rises. O(num_phases * max_pairs)."""
    search = _Search(problem, state)
    lowest, num_kept = state.objective, 0
    stuck = np.zeros(problem.costs.shape[1], dtype=bool)
    while search.num_pairs < max_pairs and lowest > problem.goal:
        excess = np.where(stuck[:, None], np.float32(0), search.excess)
        phase, heavy = divmod(int(excess.argmax()), problem.num_ranks)
        if excess[phase, heavy] <= 0:
            break
        if not search.step(heavy):
            stuck[phase] = True
            continue
        stuck[:] = False
        if state.objective < lowest:
            lowest, num_kept = state.objective, len(search.swaps)
    for giver, taker, give, take in reversed(search.swaps[num_kept:]):
        search.exchange(giver, taker, take, give)


class _Search:
    """excess float32 [num_phases, num_ranks]; pain float32 [num_ranks]; swaps (heavy, light, give, take) so far."""

    def __init__(self, problem: JointProblem, state: JointState) -> None:
        self.problem, self.state = problem, state
        sums = problem.costs.sum(axis=0).astype(np.float64)
        total = 0.0
        for phase_sum in sums:
            total += phase_sum
        root = np.sqrt(sums * total)
        self.scale = np.divide(problem.num_ranks, root, out=np.zeros_like(root), where=sums > 0).astype(np.float32)
        self.excess = np.zeros((len(sums), problem.num_ranks), dtype=np.float32)
        self.pain = np.zeros(problem.num_ranks, dtype=np.float32)
        self.swaps: list[tuple[int, int, int | None, int | None]] = []
        self.num_pairs = 0
        for rank in range(problem.num_ranks):
            self._refresh(rank)

    def step(self, heavy: int) -> bool:
        """The best swap of the heavy rank with its partners; False where none lessens their pain."""
        given, giveable = self._slots(heavy)
        best = None
        most = SMALLEST_GAIN * self.pain[heavy]
        for light in self._partners(heavy, len(giveable)):
            taken, takeable = self._slots(light)
            pain, give, take = _least_pain(given, taken, self.excess[:, heavy], self.excess[:, light])
            self.num_pairs += len(giveable) * len(takeable)
            gain = (self.pain[heavy] + self.pain[light]) - pain
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
        self._replace(heavy, give, take)
        self._replace(light, take, give)

    def _replace(self, rank: int, leaving: int | None, entering: int | None) -> None:
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

    def _partners(self, heavy: int, num_slots: int) -> list[int]:
        self.num_pairs += self.problem.num_ranks
        half = _pain((self.excess[:, [heavy]] + self.excess) * np.float32(0.5))
        gain = (self.pain[heavy] + self.pain) - 2 * half
        gain[heavy] = 0
        order = np.argsort(-gain, kind="stable")[: max(4, PAIRS_A_STEP // num_slots**2)]
        return [int(rank) for rank in order if gain[rank] > 0]

    def _slots(self, rank: int) -> tuple[Float32Array, list[int | None]]:
        """What the rank can give: weights [num_phases, num_slots], and the examples. The last slot is nothing."""
        examples = self.state.examples[rank]
        num_examples = min(len(examples), MAX_SLOTS)
        tried = [examples[slot * len(examples) // num_examples] for slot in range(num_examples)]
        weights = np.zeros((len(self.scale), num_examples + 1), dtype=np.float32)
        weights[:, :-1] = self.problem.costs[tried].T.astype(np.float32) * self.scale[:, None]
        return weights, [*tried, None]

    def _refresh(self, rank: int) -> None:
        above = self.state.loads[rank] - self.problem.bound
        self.excess[:, rank] = above.astype(np.float32) * self.scale
        self.pain[rank] = _pain(self.excess[:, [rank]])[0]


def _pain(excess: Float32Array) -> Float32Array:
    """The sum over phases, the first axis, of squared excesses above 0; phase after phase."""
    pain = np.zeros(excess.shape[1:], dtype=np.float32)
    for of_phase in np.maximum(excess, np.float32(0)):
        pain += of_phase * of_phase
    return pain


def _least_pain(
    given: Float32Array, taken: Float32Array, heavy: Float32Array, light: Float32Array
) -> tuple[np.float32, int, int]:
    """The pain after the best swap, and its slots. Of equal ones the first of the light rank, then of the heavy one."""
    pain = np.zeros((given.shape[1], taken.shape[1]), dtype=np.float32)
    for phase in range(len(given)):
        heavy_after = np.maximum((heavy[phase] - given[phase])[:, None] + taken[phase], np.float32(0))
        light_after = np.maximum((light[phase] + given[phase])[:, None] - taken[phase], np.float32(0))
        pain += heavy_after * heavy_after + light_after * light_after
    give = pain.argmin(axis=0)
    least = pain[give, np.arange(pain.shape[1])]
    take = int(least.argmin())
    return least[take], int(give[take]), take
