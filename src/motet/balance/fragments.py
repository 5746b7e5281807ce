"""What a fragment of a cut item is, and what it costs: the data that `split` takes and gives."""

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
    """What each fragment of a cut item costs on top of its share, in each phase that the item has cost in.

    fixed:    in the unit of the costs, for what a fragment takes however long it is (launches, synchronisation).
    fraction: of the whole item's cost, for what grows with the item (a rank of a context-parallel group receives the
              keys and values of the whole sequence); kept in millionths, and the cost is rounded down.
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
    """Fragments and whole items, and where each is computed. A whole item is a fragment with num_parts 1.

    item:       int64 [num_fragments], ascending; every item has at least one fragment.
    part:       int64 [num_fragments], the fragment's place among those of its item, from 0.
    num_parts:  int64 [num_fragments], how many fragments the item has, all on different ranks.
    begin, end: int64 [num_fragments], the units of the item that the fragment holds; its parts hold all, in order.
    units:      int64 [num_items], the equal units between which each item can be cut.
    costs:      int64 [num_fragments] or [num_fragments, num_phases], as the given costs are, with the overhead. Without
                it a fragment costs cost * end // units - cost * begin // units: shares add up to the item exactly.
    assignment: of fragments to ranks; its bound holds for these fragments.
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
        """How many items are cut."""
        return int((self.part == 1).sum())


def fragment_costs(
    costs: Int64Array,
    overheads: Int64Array,
    units: Int64Array,
    item: Int64Array,
    begin: Int64Array,
    end: Int64Array,
) -> Int64Array:
    """Shares with overhead, int64 [num_fragments, num_phases]; exact, also where cost * units is beyond int64."""
    result = costs[item]
    for fragment in np.flatnonzero(end - begin < units[item]).tolist():
        owner = int(item[fragment])
        first, last, num_units = int(begin[fragment]), int(end[fragment]), int(units[owner])
        shares = [cost * last // num_units - cost * first // num_units for cost in costs[owner].tolist()]
        result[fragment] = shares + overheads[owner]
    return result
