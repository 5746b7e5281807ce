"""The arguments of `split`, checked, and the limits under which it places items."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import isfinite

import numpy as np
from numpy.typing import ArrayLike

from motet.balance.backend import Backend
from motet.balance.checks import checked_costs, checked_integers, checked_num_ranks
from motet.balance.fragments import MILLION, Overhead
from motet.core.arrays import Int64Array
from motet.core.errors import ArgumentError
from motet.core.limits import INT64_MAX


@dataclass(frozen=True, eq=False)
class SplitProblem:
    """The arguments of `split`.

    costs, overheads: int64 [num_items, num_phases]; an overhead is that of one fragment.
    units:            int64 [num_items], the equal units between which an item can be cut.
    max_parts:        int64 [num_items], the most fragments of an item.
    target:           millionths of the ideal.
    one_phase:        whether the given costs had no axis of phases.
    """

    costs: Int64Array
    overheads: Int64Array
    units: Int64Array
    max_parts: Int64Array
    num_ranks: int
    target: int
    one_phase: bool
    backend: Backend

    @classmethod
    def of(
        cls,
        costs: ArrayLike,
        num_ranks: int,
        overhead: Overhead,
        divisible: ArrayLike | None,
        max_parts: int | None,
        target: float,
        backend: Backend,
    ) -> SplitProblem:
        """The problem of these arguments of `split`; raises ArgumentError for wrong ones."""
        checked = checked_costs(costs)
        one_phase = checked.ndim == 1
        rows = checked[:, None] if one_phase else checked
        num_ranks = checked_num_ranks(num_ranks)
        if max_parts is not None and max_parts < 1:
            raise ArgumentError(f"max_parts is {max_parts}; it must be at least 1.")
        if not isfinite(target) or not 1 <= target <= 1000:
            raise ArgumentError(f"target is {target}; it must be from 1 to 1000 times the ideal.")
        units = _checked_units(divisible, rows)
        most_parts = np.minimum(units, min(num_ranks, max_parts or num_ranks))
        overheads = overhead.of(rows)
        _check_fits(rows, overheads * (most_parts > 1)[:, None], most_parts)
        return cls(rows, overheads, units, most_parts, num_ranks, round(target * MILLION), one_phase, backend)

    @cached_property
    def totals(self) -> list[int]:
        """The cost of all items in each phase."""
        return [int(total) for total in self.costs.sum(axis=0)]

    @property
    def allowed(self) -> int:
        """The most that the largest loads may add up to: the target, rounded up to whole units of cost."""
        target = sum(self.totals) * self.target // (self.num_ranks * MILLION)
        rounded: int = sum(self.limits(0).tolist())
        return max(target, rounded)

    def limits(self, relaxation: int, equal_quarters: int = 4) -> Int64Array:
        """The limit of a load in each phase, int64 [num_phases]: the mean load, plus a part of the slack.

        The slack is what the target allows above the ideal, summed over phases.

        relaxation: millionths of the ideal that are added to the slack.
        equal_quarters: quarters of the slack that are shared equally between phases; the rest is shared in proportion
            to their costs. Equal shares need the fewest cuts, because small phases get wide limits. But overhead is in
            proportion to the costs, and may exceed the equal share of a large phase.
        """
        num_phases = max(sum(total > 0 for total in self.totals), 1)
        scale = 4 * num_phases * MILLION
        slack = self.target - MILLION + relaxation
        limits = self.unavoidable.copy()
        for phase, total in enumerate(self.totals):
            share = equal_quarters * sum(self.totals) + (4 - equal_quarters) * num_phases * total
            mean_and_share = (total * scale + slack * share) // (self.num_ranks * scale)
            limits[phase] = max(int(limits[phase]), -(-total // self.num_ranks), min(total, mean_and_share))
        return limits

    @cached_property
    def unavoidable(self) -> Int64Array:
        """A load of each phase that some rank has, however the items are cut, int64 [num_phases]."""
        least = np.zeros(self.costs.shape[1], dtype=np.int64)
        above_mean = np.flatnonzero((self.costs > self.costs.sum(axis=0) // self.num_ranks).any(axis=1))
        for item in above_mean.tolist():
            smallest_part = self.heaviest_part(item, int(self.max_parts[item]))
            least = np.maximum(least, np.minimum(self.costs[item], smallest_part))
        return least

    def heaviest_part(self, item: int, num_parts: int) -> Int64Array:
        """The cost of the heaviest of `num_parts` equal parts of an item, with overhead, int64 [num_phases]."""
        most_units = -(-int(self.units[item]) // num_parts)
        heaviest = [-(-cost * most_units // int(self.units[item])) for cost in self.costs[item].tolist()]
        with_overhead: Int64Array = heaviest + self.overheads[item] * (num_parts > 1)
        return with_overhead


def _checked_units(divisible: ArrayLike | None, costs: Int64Array) -> Int64Array:
    """The units of each item, int64 [num_items]; an item that can be cut anywhere has its largest cost in units."""
    anywhere: Int64Array = np.maximum(costs.max(axis=1, initial=0), 1)
    if divisible is None:
        return anywhere
    array = np.asarray(divisible)
    if array.shape != (len(costs),):
        raise ArgumentError(f"divisible has shape {array.shape}; it must be one value for each of {len(costs)} items.")
    if array.dtype == np.bool_:
        anywhere[~array] = 1
        return anywhere
    units = checked_integers(array, "divisible")
    if (units == 0).any():
        item = int((units == 0).argmax())
        raise ArgumentError(f"divisible[{item}] is 0; an item has at least 1 unit (it then stays whole).")
    return units


def _check_fits(costs: Int64Array, overheads: Int64Array, max_parts: Int64Array) -> None:
    """Raises ArgumentError where the costs of a phase, with the overhead of all parts, may not fit int64."""
    estimate = (costs.astype(float) + overheads.astype(float) * max_parts[:, None]).sum()
    if estimate < INT64_MAX / 2:
        return
    counts = [int(count) for count in max_parts]
    for phase in range(costs.shape[1]):
        rows = zip(costs[:, phase].tolist(), overheads[:, phase].tolist(), counts, strict=True)
        exact = sum(cost + overhead * count for cost, overhead, count in rows)
        if exact > INT64_MAX:
            raise ArgumentError(
                f"costs add up to {exact} in phase {phase} with the overhead of all parts, past 2^63 - 1."
            )
