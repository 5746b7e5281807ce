"""A start for the joint assignment: one phase after the other, the scarcest first.

In a mixture of text, images and speech, every example has tokens for the backbone, some have patches and others frames.
Whoever places the examples with patches by patches, those with frames by frames, and only then the rest by tokens,
levels each phase with examples that burden no phase that is already level: three balancing problems of one phase each,
whatever the lengths. A phase's examples are placed by LPT on top of the loads that others brought, then swapped between
heavy and light ranks.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right, insort

import numpy as np

from motet.balance.reference.joint_state import JointProblem, JointState

LEVEL_BITS = 13
"""A phase is level within 2^-13 of its bound."""

MAX_ROUNDS = 64

Entries = list[tuple[int, int]]
"""The examples of a rank that this phase placed, as (-weight, example), ascending: heaviest first, then by number."""


def place_phase_by_phase(problem: JointProblem) -> JointState:
    """All examples that cost something. O(num_phases * num_examples log num_examples), and swaps of O(items a rank)."""
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
    """LPT on top of the loads so far. Of equally loaded ranks the one with fewer of these examples is next."""
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
    """The heaviest ranks swap, each with the lightest that has a swap to offer, and each rank once at most.

    False where the heaviest is level or finds nothing.
    """
    loads = state.loads[:, phase].tolist()
    order = sorted(range(len(loads)), key=lambda rank: (loads[rank], rank))
    moved: set[int] = set()
    for place in reversed(range(len(order))):
        heavy = order[place]
        if heavy in moved or loads[heavy] <= goal:
            return place + 1 < len(order)
        for light in order[:place]:
            if light not in moved and _swap(state, phase, entries, heavy, light):
                moved.add(light)
                break
        else:
            return place + 1 < len(order)
    return True


def _swap(state: JointState, phase: int, entries: list[Entries], heavy: int, light: int) -> bool:
    """The swap, or move, that brings the two loads closest; False where all leave one of them as heavy."""
    room = int(state.loads[heavy, phase] - state.loads[light, phase])
    best = _best_swap(entries[heavy], entries[light], room)
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


def _best_swap(heavy: Entries, light: Entries, room: int) -> tuple[int, int] | None:
    """Places of what to give and take; the place after the light rank's last stands for nothing."""
    negated = [weight for weight, _ in light] + [0]
    smallest_miss = room
    best = None
    for give, (negated_weight, _) in enumerate(heavy):
        # Half the room is best: the lightest that moves at most half, and the next lighter one, which moves more.
        below = bisect_right(negated, room // 2 + negated_weight)
        for take in range(max(below - 1, 0), min(below, len(light)) + 1):
            change = negated[take] - negated_weight
            miss = abs(room - 2 * change)
            if 0 < change < room and miss < smallest_miss:
                smallest_miss = miss
                best = (give, take)
    return best
