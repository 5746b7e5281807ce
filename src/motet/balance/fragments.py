"""Fragments of cut items and their costs: the data that `split` takes (`Overhead`) and returns (`Split`)."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite

import numpy as np

from motet.core.arrays import Int64Array
from motet.core.assignment import Assignment
from motet.core.errors import ArgumentError

MILLION = 10**6


@dataclass(frozen=True)
class Overhead:
    """The extra cost of each fragment of a cut item: fixed + fraction * (cost of the whole item).

    It is added in each phase in which the item has a cost.

    fixed:    in the unit of the costs; what does not depend on the item (launches, synchronisation).
    fraction: share of the whole item's cost; what grows with the item (each rank of a context-parallel group receives
              the keys and values of the whole sequence). It is kept in millionths, and the cost is rounded down.

    Example:
        >>> Overhead(fixed=5, fraction=0.01).of(np.array([1000, 200, 0])).tolist()
        [15, 7, 0]
    """

    fixed: int = 0
    fraction: float = 0.0

    def __post_init__(self) -> None:
        if not isinstance(self.fixed, int) or self.fixed < 0:
            raise ArgumentError(f"Overhead(fixed={self.fixed!r}): it must be an integer of 0 or more.")
        if not isfinite(self.fraction) or not 0 <= self.fraction <= 1:
            raise ArgumentError(f"Overhead(fraction={self.fraction!r}): it must be from 0 to 1.")

    def of(self, costs: Int64Array) -> Int64Array:
        """The overhead of a fragment of each item, int64 in the shape of the costs."""
        millionths = round(self.fraction * MILLION)
        proportional = costs // MILLION * millionths + costs % MILLION * millionths // MILLION
        return np.where(costs > 0, proportional + self.fixed, 0)


@dataclass(frozen=True, eq=False)
class Split:
    """Fragments and the rank of each. A whole item is one fragment with num_parts 1.

    item:       int64 [num_fragments], ascending; the item of each fragment. Every item has at least one.
    part:       int64 [num_fragments], the index of the fragment among those of its item, from 0.
    num_parts:  int64 [num_fragments], the number of fragments of its item; they are on different ranks.
    begin, end: int64 [num_fragments]; the fragment holds the units begin .. end - 1 of its item. The fragments of an
                item hold all its units, in order.
    units:      int64 [num_items], the number of equal units between which each item can be cut.
    costs:      int64 [num_fragments] or [num_fragments, num_phases], in the shape of the given costs: the share
                cost * end // units - cost * begin // units, plus the overhead. The shares of an item add up exactly.
    assignment: fragments to ranks; its bound holds for these fragments.

    Example:
        >>> from motet.balance import split
        >>> cut = split([90, 20, 10], num_ranks=2, overhead=Overhead())
        >>> cut.num_cut, cut.item.tolist(), cut.costs.tolist()
        (1, [0, 0, 1, 2], [61, 29, 20, 10])
        >>> cut.assignment.loads.tolist()
        [61, 59]
    """

    item: Int64Array
    part: Int64Array
    num_parts: Int64Array
    begin: Int64Array
    end: Int64Array
    units: Int64Array
    costs: Int64Array
    assignment: Assignment

    @property
    def num_cut(self) -> int:
        """The number of items that are cut."""
        return int((self.part == 1).sum())


def fragment_costs(
    costs: Int64Array,
    overheads: Int64Array,
    units: Int64Array,
    item: Int64Array,
    begin: Int64Array,
    end: Int64Array,
) -> Int64Array:
    """Shares plus overhead, int64 [num_fragments, num_phases]; exact also where cost * units exceeds int64."""
    result = costs[item]
    for fragment in np.flatnonzero(end - begin < units[item]).tolist():
        whole = int(item[fragment])
        first, last, num_units = int(begin[fragment]), int(end[fragment]), int(units[whole])
        shares = [cost * last // num_units - cost * first // num_units for cost in costs[whole].tolist()]
        result[fragment] = shares + overheads[whole]
    return result
