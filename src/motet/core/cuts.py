"""Which ranks share which items of a phase of a microbatch, and which of their rows each of them has.

A sequence of the backbone is cut into fragments, each of two runs of rows: one from its front half, and its mirror
image from its back half (zigzag, as in ring attention of Llama 3). A causal row sees all rows before it, so a row and
its mirror image together see as many rows as any other such pair. A fragment's share of rows, of memory and of work is
the same. Where rows see other keys than all those before them, one run is longer than the other instead. Rows of an
encoder's item see all of its rows, so its fragments are single runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np

from motet.core.arrays import BoolArray, Int32Array, Int64Array, rows_of_runs
from motet.core.errors import ArgumentError


def rows_behind(num_rows: int, num_before: int) -> Int64Array:
    """How many rows of a tensor before them go with each row that an item becomes, int64 [num_rows]: equally many, or
    about, in their order.

    num_rows: that the item becomes. num_before: of the tensor.

    Example:
        >>> rows_behind(3, 6).tolist(), rows_behind(3, 7).tolist()
        ([2, 2, 2], [2, 2, 3])
    """
    stops: Int64Array = np.arange(num_rows + 1) * num_before // max(num_rows, 1)
    return np.diff(stops)


@dataclass(frozen=True)
class CutRows:
    """Between which rows ranks can share the items of a module.

    read_by: the length of an item that makes one of the rows that queries read; 0: none do.
    parts:   of each row that an item becomes, if rows stand side by side in it, which ranks can have some of.

    Example:
        Of images that become 8 rows, which are made of 40 patches and of 12; and one that becomes a row of 5 rows:
        >>> CutRows(read_by=2).num_rows(np.array([8, 8]), np.array([40, 12])).tolist()
        [8, 1]
        >>> CutRows(parts=5).num_rows(np.array([1]), np.array([20])).tolist()
        [5]
    """

    read_by: int = 0
    parts: int = 1

    def num_rows(self, num_tokens: Int64Array, lengths: Int64Array) -> Int64Array:
        """How many rows each item has between which ranks can share it, int64 [num_items]: those that it becomes.

        One where queries read fewer rows than it becomes: a rank could have some of its queries, and none of its rows.
        num_tokens, lengths: int64 [num_items].
        """
        if self.read_by:
            return np.where(lengths // self.read_by >= num_tokens, num_tokens, 1)
        return num_tokens * self.parts

    def read(self, lengths: Int64Array) -> Int64Array | None:
        """How many rows of each item queries read, int64 [num_items]; None: none do."""
        return lengths // self.read_by if self.read_by else None


def shares_between(amounts: Int64Array, begin: Int64Array, end: Int64Array, units: Int64Array) -> Int64Array:
    """What fragments have of amounts of their whole items, int64 [num_fragments], as all of these columns.

    Example:
        >>> shares_between(*(np.array(column) for column in ([7, 7], [0, 1], [1, 4], [4, 4]))).tolist()
        [1, 6]
    """
    largest = int(np.abs(amounts).max(initial=0)) * int(end.max(initial=0))
    whole = amounts.astype(np.int64 if largest < 2**63 else object)  # Amounts times units may not fit.
    shares: Int64Array = (whole * end // units - whole * begin // units).astype(np.int64)
    return shares


def rows_of_fragments(num_rows: Int64Array, begin: Int64Array, end: Int64Array, units: Int64Array) -> Int64Array:
    """The rows of fragments of sequences of so many rows, int64 [num_fragments], as all of these columns.

    Example:
        >>> rows_of_fragments(*(np.array(column) for column in ([7, 7], [0, 1], [1, 4], [4, 4]))).tolist()
        [2, 5]
    """
    half = -(-num_rows // 2)
    first, stop = half * begin // units, half * end // units
    rows: Int64Array = stop - first + np.minimum(stop, num_rows - half) - np.minimum(first, num_rows - half)
    return rows


@dataclass(frozen=True, eq=False)
class ItemCuts:
    """The fragments of those items of a phase that several ranks share; all others are whole.

    item:       int64 [num_fragments], the item of each fragment (of the backbone: the example); at least two of an
                item, one after the other. Ranks have the items in this order: ascending, or under a Plan by position.
    rank:       int32 [num_fragments], on different ranks.
    begin, end: int64 [num_fragments]; of its item a fragment has the units begin .. end - 1, in order.
    units:      int64 [num_fragments], units of the whole item; of a sequence, some rows and their mirror images each.

    Example:
        Ranks 2 and 0 share a sequence of 7 rows: rank 2 has a quarter of it.
        >>> cuts = ItemCuts(*(np.array(x) for x in ([4, 4], [2, 0], [0, 1], [1, 4], [4, 4])))
        >>> cuts.owner(4, num_rows=7).tolist(), cuts.degrees
        ([2, 0, 0, 0, 0, 0, 2], {4: 2})
    """

    item: Int64Array
    rank: Int32Array
    begin: Int64Array
    end: Int64Array
    units: Int64Array
    columns: ClassVar[tuple[str, ...]] = ("item", "rank", "begin", "end", "units")

    def __post_init__(self) -> None:
        of_items: dict[int, list[tuple[int, ...]]] = {}
        for item, *fragment in zip(*(getattr(self, name).tolist() for name in self.columns), strict=True):
            of_items.setdefault(item, []).append(tuple(fragment))
        for item in sorted(of_items):
            ranks, begins, ends, units = zip(*of_items[item], strict=True)
            if len(set(ranks)) != len(ranks) or len(ranks) < 2 or (*begins, units[-1]) != (0, *ends):
                raise ArgumentError(
                    f"the fragments of item {item} must have all of its units, in order, on two or more ranks."
                )

    @cached_property
    def items(self) -> Int64Array:
        """The items that are cut, ascending, int64 [num_cut]."""
        return np.unique(self.item)

    @property
    def degrees(self) -> dict[int, int]:
        """Item -> the number of ranks that share it."""
        return dict(zip(*(each.tolist() for each in np.unique(self.item, return_counts=True)), strict=True))

    def whole_among(self, items: Int64Array) -> Int64Array:
        """Those of some items that are not cut, in their order, int64 [n]. items: int64 [num_items]."""
        return items[~np.isin(items, self.items)]

    def is_across(self, num_ranks: int) -> BoolArray:
        """Whether the item of each fragment is on ranks of several groups of so many, one after the other, bool.

        Example:
            >>> cuts = ItemCuts(*(np.array(x) for x in ([4, 4], [2, 3], [0, 1], [1, 4], [4, 4])))
            >>> cuts.is_across(1).tolist(), cuts.is_across(2).tolist()
            ([True, True], [False, False])
        """
        group, begins = self.rank // num_ranks, np.flatnonzero(self.begin == 0)
        is_same = np.logical_and.reduceat(group == np.repeat(group[begins], np.diff(begins, append=len(group))), begins)
        return np.repeat(~is_same, np.diff(begins, append=len(group)))

    def on_rank(self, rank: int) -> Int64Array:
        """The items of which a rank has a fragment, in their order, int64 [n]."""
        own: Int64Array = self.item[self.rank == rank]
        return own

    def run_owner(self, item: int, num_rows: int) -> Int32Array:
        """The rank of each row of a cut item whose fragments are single runs, int32 [num_rows]."""
        own = self.item == item
        return np.repeat(self.rank[own], np.diff(num_rows * self.end[own] // self.units[own], prepend=0))

    def owner(self, item: int, num_rows: int, pairs: Int64Array | None = None) -> Int32Array:
        """The rank of each row of a cut sequence, int32 [num_rows].

        pairs: int64 [num_rows], how many keys each row sees; None: those before it, and itself. A fragment has its
               share of them, too: its run in the front is as much longer than that in the back as it takes.
        """
        if pairs is not None:
            return self._owner_by(item, pairs)
        half = -(-num_rows // 2)
        front = self.run_owner(item, half)
        owner: Int32Array = np.concatenate([front, front[: num_rows - half][::-1]])
        return owner

    def _owner_by(self, item: int, pairs: Int64Array) -> Int32Array:
        """As `owner`. Of the rows that are left, a fragment has a run at both ends, with as many pairs a row as all."""
        own = np.flatnonzero(self.item == item)
        num_rows = np.full(len(own), len(pairs))
        counts = rows_of_fragments(num_rows, self.begin[own], self.end[own], self.units[own]).tolist()
        before = np.concatenate([[0], np.cumsum(pairs)])
        owner = np.empty(len(pairs), dtype=np.int32)
        first, stop = 0, len(pairs)
        for rank, count in zip(self.rank[own].tolist(), counts, strict=True):
            fair = count * int(before[stop] - before[first]) // max(stop - first, 1)
            in_front = np.arange(first, first + count + 1)  # Where the run in the front may end.
            taken = before[in_front] - before[first] + before[stop] - before[in_front + (stop - first - count)]
            end = first + int(np.argmin(np.abs(taken - fair)))
            begin = end + (stop - first - count)
            owner[first:end], owner[begin:stop] = rank, rank
            first, stop = end, begin
        return owner

    def over(self, num_ranks: int) -> ItemCuts:
        """The same where each rank stands for so many, rank * num_ranks + number, which share its fragments evenly.

        Example:
            >>> cuts = ItemCuts(*(np.array(x) for x in ([4, 4], [2, 0], [0, 1], [1, 4], [4, 4])))
            >>> cuts.over(2).rank.tolist(), cuts.over(2).begin.tolist()
            ([4, 5, 0, 1], [0, 1, 2, 5])
        """
        if num_ranks == 1:
            return self
        number = np.tile(np.arange(num_ranks), len(self.item))
        item, rank, begin, end, units = (np.repeat(getattr(self, name), num_ranks) for name in self.columns)
        first = begin * num_ranks + number * (end - begin)
        return ItemCuts(
            item, (rank * num_ranks + number).astype(np.int32), first, first + end - begin, units * num_ranks
        )

    def share_of(self, amounts: Int64Array) -> Int64Array:
        """What each fragment has of amounts of whole items, int64 [num_fragments]. amounts: int64 [num_items].

        The fragments of an item have all of its amount.
        """
        return shares_between(amounts[self.item], self.begin, self.end, self.units)

    def shares_of(self, fragment: Int64Array, amounts: Int64Array) -> Int64Array:
        """What some fragments have of an amount of their whole items each, int64 [n]. Both arguments: int64 [n]."""
        return shares_between(amounts, self.begin[fragment], self.end[fragment], self.units[fragment])

    def fragments_of(self, items: Int64Array) -> tuple[Int64Array, Int64Array]:
        """(which of some items, which of its fragments), int64 [n] each: all pairs of those that are cut.

        items: int64 [num_items], which may have one several times.

        Example:
            >>> cuts = ItemCuts(*(np.array(x) for x in ([4, 4], [2, 0], [0, 1], [1, 4], [4, 4])))
            >>> [column.tolist() for column in cuts.fragments_of(np.array([3, 4, 4]))]
            [[1, 1, 2, 2], [0, 1, 0, 1]]
        """
        order = np.argsort(self.item, kind="stable")
        first, last = (np.searchsorted(self.item[order], items, side=side) for side in ("left", "right"))
        counts = last - first
        return np.repeat(np.arange(len(items)), counts), order[rows_of_runs(first, counts)]

    def in_order_of_ranks(self) -> ItemCuts:
        """The same sizes of fragments on the same ranks, of which each item's lower ones have the earlier rows.

        Example:
            >>> cuts = ItemCuts(*(np.array(x) for x in ([4, 4], [2, 0], [0, 1], [1, 4], [4, 4])))
            >>> cuts.in_order_of_ranks().rank.tolist(), cuts.in_order_of_ranks().begin.tolist()
            ([0, 2], [0, 3])
        """
        order = np.lexsort((self.rank, self.item))
        item, size = self.item[order], (self.end - self.begin)[order]
        before = np.cumsum(size) - size
        begin = before - before[np.searchsorted(item, item)]
        return ItemCuts(item, self.rank[order], begin, begin + size, self.units[order])

    def joined(self, num_ranks: int) -> ItemCuts | None:
        """The same where so many ranks, one after the other, are one: rank // num_ranks. None if all items are whole.

        Fragments are in the order of their ranks, so that those of one are a single run.

        Example:
            >>> cuts = ItemCuts(*(np.array(x) for x in ([4, 4, 4], [0, 1, 2], [0, 1, 2], [1, 2, 4], [4, 4, 4])))
            >>> cuts.joined(2).rank.tolist(), cuts.joined(2).end.tolist(), cuts.joined(3)
            ([0, 1], [2, 4], None)
        """
        if num_ranks == 1:
            return self
        rank = self.rank // num_ranks
        first = np.flatnonzero((np.diff(self.item, prepend=-1) != 0) | (np.diff(rank, prepend=-1) != 0))
        last = np.append(first[1:], len(rank)) - 1
        item = self.item[first]
        is_cut = np.isin(item, item[1:][np.diff(item) == 0])
        if not is_cut.any():
            return None
        first, last = first[is_cut], last[is_cut]
        return ItemCuts(self.item[first], rank[first], self.begin[first], self.end[last], self.units[first])

    def keep(self, kept: BoolArray) -> ItemCuts | None:
        """Without items that are left out; None if no other is cut. kept: bool [num_items]."""
        own = kept[self.item]
        if not own.any():
            return None
        renumbered = np.cumsum(kept) - 1
        item, *columns = (getattr(self, name)[own] for name in self.columns)
        return ItemCuts(renumbered[item], *columns)
