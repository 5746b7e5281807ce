"""Whole examples on ranks: one placement balances all phases, and no encoder output moves.

Objective: the sum over phases of the largest load. The phases of a microbatch run one after another, and in each of
them all ranks wait for the slowest. Not in the papers: OrchMLLM (section 5) balances every phase by itself and moves
the outputs of encoders.

1. Place phase by phase (joint_phases.py), then search (joint_search.py). This works because most examples lack most
   phases, and those with the backbone alone balance it last.
2. If the objective is above the goal: place longest first by the worst phase, then search. It looks at each rank for
   each example, so it is left out where examples times ranks are more than 2^29. For OrchMLLM-84B on 10,240 ranks, with
   30 examples each, it took two thirds of the time, and ended 4 % above step 1, which is 0.8 % above the bound. It is
   left out as well where nothing is searched.
3. If it still is: place longest first by the sum over phases, without a search.

The goal is 2^-11 (0.05 %) above the sum of the bounds. The result is the best of these placements. So it is never worse
than LPT over sums, nor than LPT over vectors where step 2 is taken, unless it reaches the goal.
"""

from __future__ import annotations

import heapq

import numpy as np

from motet.balance.reference.bound import packed_bound
from motet.balance.reference.joint_phases import place_phase_by_phase
from motet.balance.reference.joint_search import search_swaps
from motet.balance.reference.joint_state import JointProblem, JointState
from motet.balance.reference.result import AssignmentFields, placement
from motet.core.arrays import Int64Array

SHARE_UNIT = 2**30
"""A phase's sum in shares, the integers that _place_by_peak compares; sums of shares fit int32."""

MAX_PEAKS = 2**29
"""The most examples times ranks of step 2."""


def joint(costs: Int64Array, num_ranks: int, max_pairs: int) -> AssignmentFields:
    """Place examples of costs [num_examples, num_phases], >= 0; the sum of all must fit int64.

    max_pairs: pairs of examples that the two searches compare, half of them each.
    Result: loads [num_ranks, num_phases] and bound [num_phases]. Examples without cost go to the ranks in turn.

    O(num_phases * num_examples log num_examples), plus O(num_phases * max_pairs) for the searches. Step 2 takes
    O(num_phases * num_examples * num_ranks).
    """
    bound = np.array([packed_bound(column, num_ranks) for column in costs.T], dtype=np.int64)
    problem = JointProblem(costs, num_ranks, bound)
    state = _best_state(problem, max_pairs)
    ranks = np.full(len(costs), -1, dtype=np.int32)
    for rank, examples in enumerate(state.examples):
        ranks[examples] = rank
    without_cost = np.flatnonzero(ranks < 0)
    ranks[without_cost] = np.arange(len(without_cost)) % num_ranks
    return placement(ranks, state.loads, bound)


def _best_state(problem: JointProblem, max_pairs: int) -> JointState:
    """The best placement of steps 1 to 3."""
    best = place_phase_by_phase(problem)
    search_swaps(problem, best, max_pairs // 2)
    if best.objective <= problem.goal:
        return best
    if len(problem.costs) * problem.num_ranks <= MAX_PEAKS and max_pairs:
        by_peak = _place_by_peak(problem)
        search_swaps(problem, by_peak, max_pairs // 2)
        if by_peak.objective < best.objective:
            best = by_peak
        if best.objective <= problem.goal:
            return best
    by_sum = _place_by_sum(problem)
    return by_sum if by_sum.objective < best.objective else best


def _place_by_peak(problem: JointProblem) -> JointState:
    """LPT over vectors: each example to the rank whose worst phase, in shares of the phase's sum, stays lowest."""
    costs = problem.costs
    # One division and one truncation, both exact to the bit: integers from here on.
    shares = (costs / np.maximum(costs.sum(axis=0), 1) * SHARE_UNIT).astype(np.int64)
    loads = np.zeros((problem.num_ranks, costs.shape[1]), dtype=np.int64)
    state = JointState(problem)
    for example in np.argsort(-shares.max(axis=1), kind="stable").tolist():
        rank = int((loads + shares[example]).max(axis=1).argmin())
        loads[rank] += shares[example]
        if costs[example].any():
            state.add(rank, example)
    return state


def _place_by_sum(problem: JointProblem) -> JointState:
    """LPT over the sum of costs over phases. A tie goes to the rank with fewer examples."""
    sums = problem.costs.sum(axis=1)
    queue = [(0, 0, rank) for rank in range(problem.num_ranks)]
    state = JointState(problem)
    for example in np.argsort(-sums, kind="stable").tolist():
        if sums[example] == 0:
            break
        load, count, rank = queue[0]
        state.add(rank, example)
        heapq.heapreplace(queue, (load + int(sums[example]), count + 1, rank))
    return state
