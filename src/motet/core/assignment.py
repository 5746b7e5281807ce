"""The rank that computes each item of one phase, and the order of the items on a rank.

An `Assignment` is the rearrangement Pi of OrchMLLM (section 5.1). It maps every item to a slot: one number for a rank
and a position on it. The slots of rank 0 come first, then those of rank 1, and so on. So an Assignment is a permutation
of items, cut into ranks. Two Assignments compose (Pi_M o Pi_E^-1, section 6): an item moves from `first.slots[item]` to
`second.slots[item]`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from motet.core.arrays import Float64Array, Int32Array, Int64Array


@dataclass(frozen=True, eq=False)
class Assignment:
    """Item -> (rank, position), for one phase or for several jointly, with the load of each rank.

    ranks:   int32 [num_items], the rank that computes each item.
    items:   int64 [num_items], item numbers grouped by rank, in the order in which the rank computes them (CSR values).
    offsets: int64 [num_ranks + 1]; rank r computes items[offsets[r]:offsets[r + 1]] (CSR offsets).
    loads:   int64 [num_ranks], the load of each rank in the unit of the balanced cost; int64 [num_ranks, num_phases]
             in a joint assignment.
    bound:   a lower bound of the maximum load over all placements of whole items; int64 [num_phases] in a joint
             assignment.

    Example:
        >>> from motet.balance import Packed, assign
        >>> assignment = assign(np.array([6, 5, 1, 2]), num_ranks=2, cost=Packed())
        >>> [assignment.on_rank(rank).tolist() for rank in (0, 1)], assignment.loads.tolist(), assignment.bound
        ([[0, 2], [1, 3]], [7, 7], 7)
    """

    ranks: Int32Array
    items: Int64Array
    offsets: Int64Array
    loads: Int64Array
    bound: int | Int64Array

    @property
    def num_items(self) -> int:
        """The number of items over all ranks."""
        return len(self.ranks)

    @property
    def num_ranks(self) -> int:
        """The number of ranks, with those that have no item."""
        return len(self.offsets) - 1

    @property
    def counts(self) -> Int64Array:
        """The number of items of each rank, int64 [num_ranks]."""
        return np.diff(self.offsets)

    @property
    def imbalance(self) -> float | Float64Array:
        """Maximum load / bound: 1 is perfect. It is 1 if the bound is 0.

        A float, or float64 [num_phases] in a joint assignment.
        """
        bound = np.asarray(self.bound)
        ratio = np.where(bound > 0, self.loads.max(axis=0) / np.maximum(bound, 1), 1.0)
        return ratio if ratio.ndim else float(ratio)

    @cached_property
    def slots(self) -> Int64Array:
        """The slot of each item, int64 [num_items]: the inverse of `items`."""
        slots = np.empty_like(self.items)
        slots[self.items] = np.arange(len(self.items))
        return slots

    @property
    def positions(self) -> Int64Array:
        """The position of each item among those of its rank, from 0, int64 [num_items]."""
        return self.slots - self.offsets[self.ranks]

    def moves_to(self, other: Assignment) -> Int64Array:
        """The slot in `other` of the item in each slot of this Assignment, int64 [num_items]: Pi_other o Pi_self^-1.

        `before.moves_to(after)[slot]` is the new slot of the item that was in `slot`.
        """
        return other.slots[self.items]

    def phase(self, number: int) -> Assignment:
        """One phase of a joint assignment: the same placement, with the loads and the bound of this phase."""
        bounds = np.atleast_1d(self.bound)
        loads = self.loads.reshape(self.num_ranks, len(bounds))
        return replace(self, loads=loads[:, number], bound=int(bounds[number]))

    def on_rank(self, rank: int) -> Int64Array:
        """The items of one rank, in the order in which it computes them, int64 [n]."""
        return self.items[self.offsets[rank] : self.offsets[rank + 1]]

    def follow(self, owner: Int64Array) -> tuple[Int32Array, Int64Array]:
        """Place parts of the items, such as the images of an example, on the ranks of their owners.

        owner: int64 [num_parts], the item of this Assignment that each part belongs to.
        Returns the rank of each part, int32 [num_parts], and the parts in slot order, int64 [num_parts]: by rank, then
        by the owner's position, then by part number. O(num_parts log num_parts).
        """
        return self.ranks[owner], _stable_order(self.slots[owner], len(self.items))


def max_sum(loads: Int64Array) -> int:
    """The largest load of each phase, summed over phases: the duration of a step if every phase waits for all ranks.

    loads: int64 [num_ranks] or [num_ranks, num_phases].
    """
    return sum(np.atleast_1d(loads.max(axis=0)).tolist())


def csr_from_ranks(ranks: Int32Array, num_ranks: int) -> tuple[Int64Array, Int64Array]:
    """`items` and `offsets` of an Assignment from the rank of each item; a rank's items are in ascending order.

    ranks: int32 [num_items]. Returns int64 [num_items] and int64 [num_ranks + 1]. O(num_items).
    """
    offsets = np.zeros(num_ranks + 1, dtype=np.int64)
    np.cumsum(np.bincount(ranks, minlength=num_ranks), out=offsets[1:])
    return _stable_order(ranks, num_ranks), offsets


def _stable_order(values: NDArray[np.integer], limit: int) -> Int64Array:
    """The places of values from 0 to below `limit`, lowest value first, equal ones in order, int64 [len(values)]."""
    short = values.astype(np.min_scalar_type(limit))  # numpy sorts types of 16 bits some ten times faster
    return np.argsort(short, kind="stable").astype(np.int64, copy=False)
