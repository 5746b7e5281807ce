"""A start of the joint assignment: one phase after the other, the rarest first.

In a mixture of text, images and speech, every example has tokens for the backbone; some have patches, others frames.
Place the examples with patches by patches, then the other examples with frames by frames, then the rest by tokens. The
examples placed in a phase have no cost in the phases before it, so they do not unbalance them: the problem becomes one
balancing problem of one phase after the other. In each phase, LPT adds examples to the loads so far, and swaps between
heavy and light ranks follow.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right, insort

import numpy as np

from motet.balance.reference.joint_state import JointProblem, JointState

LEVEL_BITS = 12
"""A phase is balanced if its largest load is within 2^-12 of its bound."""

MAX_ROUNDS = 64

Entries = list[tuple[int, int]]
"""The examples placed on a rank in this phase: (-weight, example), ascending, so the heaviest first."""


def place_phase_by_phase(problem: JointProblem) -> JointState:
    """Place all examples with a cost. O(num_phases * num_examples log num_examples), plus swaps of O(items a rank)."""
    state = JointState(problem)
    placed = np.zeros(len(problem.costs), dtype=bool)
    for phase in np.argsort((problem.costs > 0).sum(axis=0), kind="stable").tolist():
        weights = problem.costs[:, phase]
        examples = np.flatnonzero((weights > 0) & ~placed)
        placed[examples] = True
        longest_first = examples[np.argsort(-weights[examples], kind="stable")].tolist()
        entries = _place_longest_first(state, phase, longest_first)
        bound = int(problem.bound[phase])
        for _ in range(MAX_ROUNDS):
            if not _swap_round(state, phase, entries, bound + (bound >> LEVEL_BITS)):
                break
        for rank, on_rank in enumerate(entries):
            state.examples[rank] += [example for _, example in on_rank]
    return state


def _place_longest_first(state: JointState, phase: int, examples: list[int]) -> list[Entries]:
    """LPT on top of the loads so far. A tie goes to the rank with fewer of these examples."""
    entries: list[Entries] = [[] for _ in state.examples]
    queue = [(load, 0, rank) for rank, load in enumerate(state.loads[:, phase].tolist())]
    heapq.heapify(queue)
    for example in examples:
        load, count, rank = queue[0]
        weight = int(state.costs[example, phase])
        heapq.heapreplace(queue, (load + weight, count + 1, rank))
        entries[rank].append((-weight, example))
        state.loads[rank] += state.costs[example]
    return entries


def _swap_round(state: JointState, phase: int, entries: list[Entries], goal: int) -> bool:
    """Swap each heavy rank, heaviest first, with the lightest possible partner; each light rank once at most.

    Stops at the first rank that is at the goal, is a partner already, or has no swap. False if this is the heaviest.
    """
    loads = state.loads[:, phase].tolist()
    order = sorted(range(len(loads)), key=lambda rank: (loads[rank], rank))
    moved: set[int] = set()
    for index in reversed(range(len(order))):
        heavy = order[index]
        if heavy in moved or loads[heavy] <= goal:
            return index + 1 < len(order)
        for light in order[:index]:
            if light not in moved and _swap(state, phase, entries, (heavy, light), goal):
                moved.add(light)
                break
        else:
            return index + 1 < len(order)
    return True


def _swap(state: JointState, phase: int, entries: list[Entries], ranks: tuple[int, int], goal: int) -> bool:
    """Swap (or move) the examples that bring both ranks to the goal, or else closest to each other.

    False if every swap leaves one of them as heavy as the heavy one is.
    """
    heavy, light = ranks
    heavy_load, light_load = int(state.loads[heavy, phase]), int(state.loads[light, phase])
    enough = 2 * goal - heavy_load - light_load  # the miss at which both are at the goal
    best = _best_swap(entries[heavy], entries[light], heavy_load - light_load, enough)
    if best is None:
        return False
    give, take = best
    given = entries[heavy].pop(give)
    change = state.costs[given[1]].copy()
    if take < len(entries[light]):
        taken = entries[light].pop(take)
        insort(entries[heavy], taken)
        change -= state.costs[taken[1]]
    insort(entries[light], given)
    state.loads[heavy] -= change
    state.loads[light] += change
    return True


def _best_swap(heavy: Entries, light: Entries, room: int, enough: int) -> tuple[int, int] | None:
    """Indices of the entries to give and to take; len(light) stands for taking nothing."""
    negated = [weight for weight, _ in light] + [0]
    smallest_miss = room
    best = None
    for give, (negated_weight, _) in enumerate(heavy):
        # A change of room / 2 is best. Try the lightest to take that changes at most that, and the next lighter one.
        below = bisect_right(negated, room // 2 + negated_weight)
        for take in range(max(below - 1, 0), min(below, len(light)) + 1):
            change = negated[take] - negated_weight
            miss = abs(room - 2 * change)
            if 0 < change < room and miss < smallest_miss:
                smallest_miss = miss
                best = (give, take)
        if smallest_miss <= enough:
            break
    return best
