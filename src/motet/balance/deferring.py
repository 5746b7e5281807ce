"""Items that dominate, with several microbatches a step: not cut, but put together into a microbatch of their level.

A step takes the sum over its microbatches of the largest load. Where every microbatch has a long item, all ranks wait
for each of them. If the long items share one microbatch, its other ranks can be filled up to the same level with work
that the other microbatches then have less of, and nobody waits. Microbatch after microbatch:

1. Its level in each phase is the longest item that is left, or the mean of what is left, if that is more.
2. What is left is poured under these limits (reference/splitting.py, with nothing cut): first the items that nearly
   reach a limit, which need a rank of their own; then by rarity of their phase, heaviest first. So the first
   microbatches take the heavy items and are filled up with light ones, and the last one gets the rest.
3. The balancers of whole items place the microbatch anew, where they do better.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from motet.balance.backend import Backend, algorithms
from motet.balance.checks import check_sum, checked_costs, checked_num_ranks
from motet.balance.joint import assign_jointly
from motet.balance.placement import assign
from motet.balance.scoring import scored
from motet.balance.splitting import turns_by_rarity
from motet.core.arrays import Int32Array, Int64Array
from motet.core.assignment import Assignment, max_sum
from motet.core.errors import ArgumentError

NEARLY_FULL = 0.9
"""An item that takes more than so much of a limit is placed while ranks are still empty. With 0.75 or 0.95 the sum over
phases is up to 1.2 times as large on mixed lengths; single phases do not depend on it."""

NUM_LEVELS = 6
"""How many levels are tried, each an eighth of the first higher, before microbatches are filled up to the capacity."""


@dataclass(frozen=True, eq=False)
class Deferral:
    """Which microbatch and which rank computes each item of a step.

    microbatch:  int32 [num_items].
    ranks:       int32 [num_items].
    assignments: one for each microbatch, of its items, which it numbers in the order of `items_of(microbatch)`.
    """

    microbatch: Int32Array
    ranks: Int32Array
    assignments: tuple[Assignment, ...]

    def items_of(self, microbatch: int) -> Int64Array:
        """The items of one microbatch, ascending."""
        return np.flatnonzero(self.microbatch == microbatch)

    @property
    def max_sum(self) -> int:
        """The largest loads, summed over microbatches and phases, in the unit of the costs."""
        return sum(max_sum(assignment.loads) for assignment in self.assignments)


def defer(
    costs: ArrayLike,
    num_ranks: int,
    num_microbatches: int,
    *,
    capacity: int | None = None,
    backend: Backend = "native",
) -> Deferral:
    """Give each item of a step a microbatch and a rank, so that the largest loads add up to little.

    costs: int [num_items], or [num_items, num_phases] in one unit.
    capacity: the most that a rank may hold in a microbatch, summed over phases; only an item that exceeds it by itself
        does, and has the rank for itself.

    The sum over microbatches and phases of the largest load is never above that of items spread evenly, in item order,
    over microbatches that are balanced each for itself, unless those exceed the capacity.
    Raises ArgumentError for bad costs and counts, and where no placement within the capacity was found.
    O(num_microbatches * num_items * num_ranks * num_phases), beside balancing each microbatch.
    """
    checked = checked_costs(costs)
    if num_microbatches < 1:
        raise ArgumentError(f"num_microbatches is {num_microbatches}; it must be at least 1.")
    if capacity is not None and capacity < 1:
        raise ArgumentError(f"capacity is {capacity}; it must be at least 1.")
    check_sum(checked, "costs")
    step = _Step(checked, checked_num_ranks(num_ranks), num_microbatches, capacity, backend)
    found = [deferral for deferral in (_by_level(step), _spread_evenly(step)) if deferral is not None]
    if not found:
        raise ArgumentError(
            f"capacity is {capacity}; no placement of the {len(checked)} items on {num_ranks} ranks "
            f"in {num_microbatches} microbatches was found that keeps to it."
        )
    return min(found, key=lambda deferral: deferral.max_sum)


@dataclass(frozen=True, eq=False)
class _Step:
    """What `defer` was given, clean."""

    costs: Int64Array
    num_ranks: int
    num_microbatches: int
    capacity: int | None
    backend: Backend

    @property
    def rows(self) -> Int64Array:
        """The costs, int64 [num_items, num_phases]."""
        return self.costs[:, None] if self.costs.ndim == 1 else self.costs

    def sizes(self, items: Int64Array) -> Int64Array:
        """What items take of the capacity, int64 [num_items]: all of it, if they are too large for it."""
        sizes: Int64Array = self.rows[items].sum(axis=1)
        return sizes if self.capacity is None else np.minimum(sizes, self.capacity)

    def keeps_capacity(self, items: Int64Array, ranks: Int32Array) -> bool:
        """Whether items on these ranks leave each rank within the capacity."""
        if self.capacity is None:
            return True
        held = np.zeros(self.num_ranks, dtype=np.int64)
        np.add.at(held, ranks, self.sizes(items))
        return int(held.max()) <= self.capacity

    def balanced(self, items: Int64Array) -> Assignment | None:
        """The items of one microbatch, placed by the balancers of whole items; None if that exceeds the capacity."""
        place = assign if self.costs.ndim == 1 else assign_jointly
        placed = place(self.costs[items], self.num_ranks, backend=self.backend)
        return placed if self.keeps_capacity(items, placed.ranks) else None

    def deferral(self, microbatches: list[tuple[Int64Array, Assignment]]) -> Deferral:
        """From the items, ascending, and the Assignment of each microbatch."""
        microbatch = np.zeros(len(self.costs), dtype=np.int32)
        ranks = np.zeros(len(self.costs), dtype=np.int32)
        for number, (items, placed) in enumerate(microbatches):
            microbatch[items] = number
            ranks[items] = placed.ranks
        return Deferral(microbatch, ranks, tuple(placed for _, placed in microbatches))


def _spread_evenly(step: _Step) -> Deferral | None:
    """As many items in each microbatch, in item order; None where one of them exceeds the capacity."""
    microbatches = []
    for items in np.array_split(np.arange(len(step.costs)), step.num_microbatches):
        placed = step.balanced(items)
        if placed is None:
            return None
        microbatches.append((items, placed))
    return step.deferral(microbatches)


def _by_level(step: _Step) -> Deferral | None:
    """Microbatches of falling level; None where not all items were placed within the capacity."""
    for raised in range(NUM_LEVELS):
        deferral = _filled(step, raised)
        if deferral is not None:
            return deferral
    return _filled(step, None)


def _filled(step: _Step, raised: int | None) -> Deferral | None:
    """One microbatch after another, its level raised by so many eighths; None stands for without levels."""
    left = np.arange(len(step.costs))
    microbatches = []
    for number in range(step.num_microbatches):
        is_last = number == step.num_microbatches - 1
        if is_last and (placed := step.balanced(left)) is not None:
            microbatches.append((left, placed))
            return step.deferral(microbatches)
        limits = _levels(step, left, None if is_last else raised, step.num_microbatches - number)
        items, ranks = _poured(step, left, limits)
        poured = scored(ranks, step.costs[items], step.num_ranks)
        balanced = step.balanced(items)
        better = balanced is not None and max_sum(balanced.loads) <= max_sum(poured.loads)
        microbatches.append((items, balanced if balanced is not None and better else poured))
        left = np.setdiff1d(left, items, assume_unique=True)
    return step.deferral(microbatches) if len(left) == 0 else None


def _levels(step: _Step, left: Int64Array, raised: int | None, num_microbatches: int) -> Int64Array:
    """The limit of each phase for the first of the microbatches that take the items that are left."""
    rows = step.rows[left]
    totals: Int64Array = rows.sum(axis=0)
    if raised is None:
        return totals
    means = -(-totals // (step.num_ranks * num_microbatches))
    levels: Int64Array = np.maximum(means, rows.max(axis=0, initial=0))
    levels += np.minimum(totals - levels, levels // 8 * raised)
    return levels


def _poured(step: _Step, left: Int64Array, limits: Int64Array) -> tuple[Int64Array, Int32Array]:
    """The items that fit under the limits and the capacity, ascending, and their ranks."""
    rows = step.rows[left]
    turns, phases = turns_by_rarity(rows)
    fullness = (rows / np.maximum(limits, 1)).max(axis=1)
    nearly_full = np.flatnonzero(fullness > NEARLY_FULL)
    turns += len(nearly_full)
    turns[nearly_full[np.argsort(-fullness[nearly_full], kind="stable")]] = np.arange(len(nearly_full))
    if step.capacity is not None:
        rows = np.column_stack([rows, step.sizes(left)])
        limits = np.append(limits, step.capacity)
    whole = np.ones(len(left), dtype=np.int64)
    place, _, _, ranks = algorithms(step.backend).pour(
        rows, np.zeros_like(rows), whole, whole, turns, phases, limits, step.num_ranks
    )
    return left[place], ranks
