"""Which rank computes which item of one phase, and in which order.

An `Assignment` is the rearrangement Pi of OrchMLLM (section 5.1): it maps every item to a slot, that is to a rank and a
position on it. Slots of rank 0 come first, then those of rank 1, and so on, so that an Assignment is a permutation
of items cut into ranks. Two of them compose (Pi_M o Pi_E^-1, section 6): the slot that an item leaves and the slot that
it goes to are `first.slots[item]` and `second.slots[item]`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from motet.core.arrays import Float64Array, Int32Array, Int64Array


@dataclass(frozen=True, eq=False)
class Assignment:
    """Item -> (rank, position), for one phase or for several jointly, with the load that each rank gets.

    ranks:   int32 [num_items], the rank that computes each item.
    items:   int64 [num_items], item numbers grouped by rank, in the order in which the rank computes them (CSR values).
    offsets: int64 [num_ranks + 1]; rank r computes items[offsets[r]:offsets[r + 1]] (CSR offsets).
    loads:   int64 [num_ranks], the cost of each rank, in the unit of the cost that was balanced; of a joint assignment
             int64 [num_ranks, num_phases].
    bound:   no placement of whole items has a smaller maximum load; int64 [num_phases] of a joint assignment.
    """

    ranks: Int32Array
    items: Int64Array
    offsets: Int64Array
    loads: Int64Array
    bound: int | Int64Array

    @property
    def num_items(self) -> int:
        return len(self.ranks)

    @property
    def num_ranks(self) -> int:
        return len(self.offsets) - 1

    @property
    def counts(self) -> Int64Array:
        """Items of each rank, int64 [num_ranks]."""
        return np.diff(self.offsets)

    @property
    def imbalance(self) -> float | Float64Array:
        """Maximum load over the lower bound; 1 is perfect, also where there is nothing to do.

        A float, or float64 [num_phases] of a joint assignment.
        """
        bound = np.asarray(self.bound)
        ratio = np.where(bound > 0, self.loads.max(axis=0) / np.maximum(bound, 1), 1.0)
        return ratio if ratio.ndim else float(ratio)

    @cached_property
    def slots(self) -> Int64Array:
        """The inverse of `items`: the slot of each item, int64 [num_items]."""
        slots = np.empty_like(self.items)
        slots[self.items] = np.arange(len(self.items))
        return slots

    @property
    def positions(self) -> Int64Array:
        """Of each item its place among those of its rank, from 0, int64 [num_items]."""
        return self.slots - self.offsets[self.ranks]

    def moves_to(self, other: Assignment) -> Int64Array:
        """Composition Pi_other o Pi_self^-1: the slot in `other` of the item in each slot of this one.

        int64 [num_items]. `before.moves_to(after)` says where everything goes that lies as `before` has it.
        """
        return other.slots[self.items]

    def phase(self, number: int) -> Assignment:
        """One phase of a joint assignment: the same placement, with the loads and the bound of that phase alone."""
        bounds = np.atleast_1d(self.bound)
        loads = self.loads.reshape(self.num_ranks, len(bounds))
        return replace(self, loads=loads[:, number], bound=int(bounds[number]))

    def on_rank(self, rank: int) -> Int64Array:
        """The items of one rank in the order in which it computes them."""
        return self.items[self.offsets[rank] : self.offsets[rank + 1]]

    def follow(self, owner: Int64Array) -> tuple[Int32Array, Int64Array]:
        """Ranks and slot order of other items that go where their owners go: parts of an example, say.

        owner: int64 [num_parts], the item of this Assignment that each part belongs to.
        Returns the rank of each part, int32 [num_parts], and the parts in slot order, int64 [num_parts]: by rank, then
        by the owner's position, then by part number. Complexity O(num_parts log num_parts).
        """
        return self.ranks[owner], np.argsort(self.slots[owner], kind="stable")


def max_sum(loads: Int64Array) -> int:
    """The largest load of each phase, summed over phases: what a step takes whose phases wait for all ranks.

    loads: int64 [num_ranks] or [num_ranks, num_phases].
    """
    return sum(np.atleast_1d(loads.max(axis=0)).tolist())


def csr_from_ranks(ranks: Int32Array, num_ranks: int) -> tuple[Int64Array, Int64Array]:
    """Items grouped by rank, in item order, int64 [num_items], and the offsets of the groups, int64 [num_ranks + 1]."""
    offsets = np.zeros(num_ranks + 1, dtype=np.int64)
    np.cumsum(np.bincount(ranks, minlength=num_ranks), out=offsets[1:])
    short = ranks.astype(np.min_scalar_type(num_ranks))  # numpy sorts types of 16 bits some ten times faster
    return np.argsort(short, kind="stable").astype(np.int64), offsets
