"""Long items of a step, collected in few microbatches instead of cut.

A step takes the sum over its microbatches of the largest load. If every microbatch has a long item, all ranks wait in
each of them. If the long items share one microbatch, its other ranks take light items up to the same load, and the
other microbatches become shorter. For one microbatch after the other:

1. Set the limit of each phase: the longest item that is left, or the mean load that is left, whichever is larger.
2. Place items under these limits, without cuts (reference/splitting.py). The items that nearly reach a limit come
   first, because they need a rank of their own. The others follow by rarity of their phase, heaviest first. So the
   first microbatches hold the heavy items, filled up with light ones; the last microbatch gets the rest.
3. Place the items of the microbatch with `assign` or `assign_jointly`, and keep that placement if it is better.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from motet.balance.backend import Backend, algorithms
from motet.balance.checks import check_sum, checked_costs, checked_integers, checked_num_ranks
from motet.balance.joint import assign_jointly
from motet.balance.placement import assign
from motet.balance.scoring import scored
from motet.balance.splitting import turns_by_rarity
from motet.core.arrays import Int32Array, Int64Array
from motet.core.assignment import Assignment, max_sum
from motet.core.errors import ArgumentError

NEARLY_FULL = 0.9
"""Items above this share of a limit are placed first, while ranks are empty. With 0.75 or 0.95 the result is up to 1.2
times as long on mixed lengths and several phases; one phase does not depend on it."""

NUM_LEVELS = 6
"""Number of limits that are tried, each higher by 1/8 of the first; after them, only the capacity is a limit."""


@dataclass(frozen=True, eq=False)
class Deferral:
    """The microbatch and the rank of each item of a step.

    microbatch:  int32 [num_items].
    ranks:       int32 [num_items].
    assignments: one for each microbatch; its item i is `items_of(microbatch)[i]` of the step.

    Example:
        >>> deferral = defer([8, 4, 8, 4], num_ranks=2, num_microbatches=2)
        >>> deferral.microbatch.tolist(), deferral.max_sum  # 8 + 4; in the given order, 8 + 8
        ([0, 1, 0, 1], 12)
    """

    microbatch: Int32Array
    ranks: Int32Array
    assignments: tuple[Assignment, ...]

    def items_of(self, microbatch: int) -> Int64Array:
        """The items of one microbatch, int64, ascending."""
        return np.flatnonzero(self.microbatch == microbatch)

    @property
    def max_sum(self) -> int:
        """The largest load of each microbatch and phase, summed up, in the unit of the costs."""
        return sum(max_sum(assignment.loads) for assignment in self.assignments)


def defer(
    costs: ArrayLike,
    num_ranks: int,
    num_microbatches: int,
    *,
    capacity: int | None = None,
    sizes: ArrayLike | None = None,
    backend: Backend = "native",
) -> Deferral:
    """Give each item of a step a microbatch and a rank, so that `Deferral.max_sum` is small.

    costs: int [num_items], or [num_items, num_phases] in one unit.
    capacity: the most that a rank holds in a microbatch. An item above the capacity gets a rank alone.
    sizes: int [num_items], >= 0, what an item takes of the capacity, e.g. bytes of its activations; None: its cost,
        summed over phases.

    max_sum is never above that of microbatches of consecutive items, as many in each, each of them balanced by itself,
    unless these exceed the capacity.
    Raises ArgumentError for bad costs, sizes and counts, and where no placement within the capacity was found.
    O(num_microbatches * num_items * num_ranks * num_phases), plus the balancing of each microbatch.
    """
    found = find_deferral(costs, num_ranks, num_microbatches, capacity=capacity, sizes=sizes, backend=backend)
    if found is None:
        raise ArgumentError(
            f"capacity is {capacity}; no placement of the {len(checked_costs(costs))} items on {num_ranks} ranks "
            f"in {num_microbatches} microbatches was found that keeps to it."
        )
    return found


def find_deferral(
    costs: ArrayLike,
    num_ranks: int,
    num_microbatches: int,
    *,
    capacity: int | None = None,
    sizes: ArrayLike | None = None,
    backend: Backend = "native",
) -> Deferral | None:
    """As `defer`, but None where no placement within the capacity was found."""
    checked = checked_costs(costs)
    if num_microbatches < 1:
        raise ArgumentError(f"num_microbatches is {num_microbatches}; it must be at least 1.")
    if capacity is not None and capacity < 1:
        raise ArgumentError(f"capacity is {capacity}; it must be at least 1.")
    if sizes is not None and capacity is None:
        raise ArgumentError("sizes is given without capacity; it must go with the capacity that they are taken of.")
    check_sum(checked, "costs")
    held = _checked_sizes(sizes, checked)
    step = _Step(checked, checked_num_ranks(num_ranks), num_microbatches, capacity, held, backend)
    deferrals = [deferral for deferral in (_by_level(step), _spread_evenly(step)) if deferral is not None]
    return min(deferrals, key=lambda deferral: deferral.max_sum, default=None)


def _checked_sizes(sizes: ArrayLike | None, costs: Int64Array) -> Int64Array:
    """What each item takes of the capacity, int64 [num_items]."""
    if sizes is None:
        return costs if costs.ndim == 1 else costs.sum(axis=1)
    checked = checked_integers(sizes, "sizes")
    if len(checked) != len(costs):
        raise ArgumentError(f"sizes has {len(checked)} entries; it must have one for each of the {len(costs)} items.")
    check_sum(checked, "sizes")
    return checked


@dataclass(frozen=True, eq=False)
class _Step:
    """The arguments of `defer`, checked."""

    costs: Int64Array
    num_ranks: int
    num_microbatches: int
    capacity: int | None
    held: Int64Array
    backend: Backend

    @property
    def rows(self) -> Int64Array:
        """The costs, int64 [num_items, num_phases]."""
        return self.costs[:, None] if self.costs.ndim == 1 else self.costs

    def sizes(self, items: Int64Array) -> Int64Array:
        """What each of these items takes of the capacity, int64 [n]; at most the capacity."""
        sizes: Int64Array = self.held[items]
        return sizes if self.capacity is None else np.minimum(sizes, self.capacity)

    def keeps_capacity(self, items: Int64Array, ranks: Int32Array) -> bool:
        """Whether each rank stays within the capacity if it gets these items."""
        if self.capacity is None:
            return True
        held = np.zeros(self.num_ranks, dtype=np.int64)
        np.add.at(held, ranks, self.sizes(items))
        return int(held.max()) <= self.capacity

    def balanced(self, items: Int64Array) -> Assignment | None:
        """The items of one microbatch, placed by `assign` or `assign_jointly`; None if that exceeds the capacity."""
        balance = assign if self.costs.ndim == 1 else assign_jointly
        placed = balance(self.costs[items], self.num_ranks, backend=self.backend)
        return placed if self.keeps_capacity(items, placed.ranks) else None

    def deferral(self, microbatches: list[tuple[Int64Array, Assignment]]) -> Deferral:
        """The Deferral of microbatches (items, ascending; their Assignment)."""
        microbatch = np.zeros(len(self.costs), dtype=np.int32)
        ranks = np.zeros(len(self.costs), dtype=np.int32)
        for index, (items, placed) in enumerate(microbatches):
            microbatch[items] = index
            ranks[items] = placed.ranks
        return Deferral(microbatch, ranks, tuple(placed for _, placed in microbatches))


def _spread_evenly(step: _Step) -> Deferral | None:
    """Microbatches of consecutive items, as many in each; None if one of them exceeds the capacity."""
    microbatches = []
    for items in np.array_split(np.arange(len(step.costs)), step.num_microbatches):
        placed = step.balanced(items)
        if placed is None:
            return None
        microbatches.append((items, placed))
    return step.deferral(microbatches)


def _by_level(step: _Step) -> Deferral | None:
    """Microbatches filled under the lowest limits that suffice; None if the capacity does not suffice."""
    for raised in range(NUM_LEVELS):
        deferral = _filled(step, raised)
        if deferral is not None:
            return deferral
    return _filled(step, None)


def _filled(step: _Step, raised: int | None) -> Deferral | None:
    """One microbatch after another under limits raised by `raised` eighths; None: under the capacity alone.

    Returns None if items are left over.
    """
    left = np.arange(len(step.costs))
    microbatches = []
    for index in range(step.num_microbatches):
        is_last = index == step.num_microbatches - 1
        if is_last and (placed := step.balanced(left)) is not None:
            microbatches.append((left, placed))
            return step.deferral(microbatches)
        limits = _limits(step, left, None if is_last else raised, step.num_microbatches - index)
        items, ranks = _poured(step, left, limits)
        poured = scored(ranks, step.costs[items], step.num_ranks)
        balanced = step.balanced(items)
        better = balanced is not None and max_sum(balanced.loads) <= max_sum(poured.loads)
        microbatches.append((items, balanced if balanced is not None and better else poured))
        left = np.setdiff1d(left, items, assume_unique=True)
    return step.deferral(microbatches) if len(left) == 0 else None


def _limits(step: _Step, left: Int64Array, raised: int | None, num_microbatches: int) -> Int64Array:
    """The limit of each phase, int64 [num_phases], in the first of the `num_microbatches` that share the items left."""
    rows = step.rows[left]
    totals: Int64Array = rows.sum(axis=0)
    if raised is None:
        return totals
    means = -(-totals // (step.num_ranks * num_microbatches))
    limits: Int64Array = np.maximum(means, rows.max(axis=0, initial=0))
    limits += np.minimum(totals - limits, limits // 8 * raised)
    return limits


def _poured(step: _Step, left: Int64Array, limits: Int64Array) -> tuple[Int64Array, Int32Array]:
    """The items that fit under the limits and the capacity, int64, ascending, and their ranks, int32."""
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
    placed, _, _, ranks = algorithms(step.backend).pour(
        rows, np.zeros_like(rows), whole, whole, turns, phases, limits, step.num_ranks
    )
    return left[placed], ranks
