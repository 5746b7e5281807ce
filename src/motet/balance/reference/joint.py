"""Whole examples on ranks so that all phases are balanced at once, and no encoder output has to move.

The phases of a step run one after another, and in each of them all ranks wait for the slowest: the objective is the sum
over phases of the largest load. Past OrchMLLM (section 5), which balances every phase by itself and moves what the
encoders give; that move falls away where one placement of whole examples suffices.

1. Phase by phase (joint_phases.py): most examples lack most phases, and those that have only the backbone can level it
   after all others are placed. The search (joint_search.py) follows.
2. Where that ends farther than 2^-11 from the bounds: longest first by the worst phase, and the search.
3. Where that does too: longest first by the sum over phases, as it is.

The best of these is the result: never worse than LPT over vectors or LPT over sums, unless it is within 2^-11 (0.05 %)
of what no placement can undercut.
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
"""Of a phase's sum: shares add up to at most so much, within int32."""


def joint(costs: Int64Array, num_ranks: int, max_pairs: int) -> AssignmentFields:
    """Place examples of costs [num_examples, num_phases], >= 0, with a sum over all that fits int64.

    max_pairs: pairs of examples that the searches may compare, half of them each. Examples that cost nothing are dealt
    out in turn. Result: loads [num_ranks, num_phases], bound [num_phases], which a phase's largest load is never below.

    O(num_phases * num_examples log num_examples), then the search, O(num_phases * max_pairs); where vectors have to be
    placed longest first, O(num_phases * num_examples * num_ranks).
    """
    bound = np.array([packed_bound(column, num_ranks) for column in costs.T], dtype=np.int64)
    problem = JointProblem(costs, num_ranks, bound)
    state = _best_state(problem, max_pairs)
    ranks = np.full(len(costs), -1, dtype=np.int32)
    for rank, examples in enumerate(state.examples):
        ranks[examples] = rank
    free = np.flatnonzero(ranks < 0)
    ranks[free] = np.arange(len(free)) % num_ranks
    return placement(ranks, state.loads, bound)


def _best_state(problem: JointProblem, max_pairs: int) -> JointState:
    best = place_phase_by_phase(problem)
    search_swaps(problem, best, max_pairs // 2)
    if best.objective <= problem.goal:
        return best
    by_peak = _place_by_peak(problem)
    search_swaps(problem, by_peak, max_pairs // 2)
    if by_peak.objective < best.objective:
        best = by_peak
    if best.objective <= problem.goal:
        return best
    by_sum = _place_by_sum(problem)
    return by_sum if by_sum.objective < best.objective else best


def _place_by_peak(problem: JointProblem) -> JointState:
    """LPT over vectors: each to the rank whose worst phase, in shares of the phase's sum, stays lowest."""
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
    """LPT over the cost of all phases together. Of equally loaded ranks the one with fewer examples is next."""
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
