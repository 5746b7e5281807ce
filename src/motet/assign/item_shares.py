"""Which rank of those that share items of a microbatch computes which, and which rows of items that are cut.

They are items of an encoder on the ranks of a replica, or sequences on the replicas of the backbone. Items are dealt
out over groups of context-parallel ranks, of which there are several in bubbles alone. In a group they stay whole, and
are dealt out by their lengths, unless one alone is more than a rank's share of all of them. Such items are cut, each
over as many ranks as bring it under that share, and the whole ones fill up the others. The same on all ranks that know
the lengths, and in predictions.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from motet.assign.orchestrator import cuts_in
from motet.balance import Overhead, assign, split
from motet.balance.cutting import TARGETS, largest_fragments, units_of
from motet.core.arrays import Int64Array, rows_of_runs
from motet.core.cuts import ItemCuts

FULLEST = TARGETS[0]
"""The most that the fullest rank has, as a multiple of its share, before an item that is longer than that is cut."""
_MAX_KNOWN = 4
"""The most items of a cell whose shares are kept: with more, no other has the same."""


@dataclass(frozen=True, eq=False)
class ItemShares:
    """Items on the ranks that share those of a microbatch.

    ranks: int64 [num_items], of each item, or of the largest fragment of one that is cut.
    cuts:  the items that are cut; None: all are whole.

    Example:
        An item of 12 rows is more than the 8 of a rank's share:
        >>> shares = item_shares(np.array([2, 12, 2]), np.array([2, 12, 2]), num_ranks=2, can_cut=True)
        >>> shares.cuts.degrees, shares.ranks.tolist()
        ({1: 2}, [0, 0, 1])
    """

    ranks: Int64Array
    cuts: ItemCuts | None


def item_shares(
    lengths: Int64Array, rows: Int64Array, num_ranks: int, *, can_cut: bool, tile_rows: int = 0, num_groups: int = 1
) -> ItemShares:
    """Items dealt out over the ranks that share them.

    lengths: int64 [num_items], or any cost of them. rows: int64 [num_items], between which an item is cut.
    num_ranks: the ranks of a group (`Unit.cp`; of sequences `Unit.dp`). num_groups: groups, one after the other.
    can_cut: whether ranks of a group can share an item (`Module.shareable`). tile_rows: as of `Module`.
    """
    if num_groups == 1:
        return _in_group(lengths, rows, num_ranks, can_cut, tile_rows)
    ranks, parts = assign(lengths, num_groups).ranks.astype(np.int64) * num_ranks, []
    for first in np.unique(ranks).tolist() if num_ranks > 1 else ():
        own = np.flatnonzero(ranks == first)
        shares = _in_group(lengths[own], rows[own], num_ranks, can_cut, tile_rows)
        ranks[own] += shares.ranks
        if shares.cuts is not None:
            parts.append((shares.cuts, own, first))
    return ItemShares(ranks, joined_cuts(parts, np.arange(len(lengths))))


def _in_group(lengths: Int64Array, rows: Int64Array, num_ranks: int, can_cut: bool, tile_rows: int) -> ItemShares:
    if can_cut and lengths.max(initial=0) * num_ranks > FULLEST * lengths.sum():
        return _cut(tuple(lengths.tolist()), tuple(rows.tolist()), num_ranks, tile_rows)
    return ItemShares(assign(lengths, num_ranks).ranks.astype(np.int64), None)


@lru_cache(maxsize=1024)
def _cut(lengths: tuple[int, ...], rows: tuple[int, ...], num_ranks: int, tile_rows: int) -> ItemShares:
    of_items = np.array(lengths, dtype=np.int64)
    units = units_of(np.array(rows, dtype=np.int64), num_ranks, tile_rows)
    units[of_items * num_ranks <= of_items.sum()] = 1  # Items under a rank's share fit whole.
    found = split(of_items, num_ranks, Overhead(), divisible=units, target=FULLEST)
    cuts = cuts_in(found)
    # So that ranks whose rows come together have a single run (`ItemCuts.joined`).
    return ItemShares(largest_fragments(found).astype(np.int64), cuts and cuts.in_order_of_ranks())


@dataclass(frozen=True, eq=False)
class CellShares:
    """`ItemShares` of many cells, of which each deals its items out over ranks of its own.

    ranks:      int64 [num_items], among the ranks of the item's cell.
    item, rank, begin, end, units: int64 [num_fragments], as of `ItemCuts`. Those of a cell follow each other.
    """

    ranks: Int64Array
    item: Int64Array
    rank: Int64Array
    begin: Int64Array
    end: Int64Array
    units: Int64Array


def shares_of_cells(
    cell: Int64Array,
    lengths: Int64Array,
    rows: Int64Array,
    num_ranks: int,
    *,
    can_cut: bool,
    tile_rows: int = 0,
    num_groups: int = 1,
) -> CellShares:
    """The items of each cell, such as a microbatch of a replica, dealt out by `item_shares`; others: as there.

    cell: int64 [num_items]. Cells with the same lengths and rows are dealt out once: a step has thousands of them with
    one item or two. O(num_items), and `item_shares` for each cell that differs.
    """
    in_order = np.argsort(cell, kind="stable")
    first = np.flatnonzero(np.diff(cell[in_order], prepend=-1))
    counts = np.diff(first, append=len(cell))
    ranks, cut = np.zeros(len(cell), dtype=np.int64), [np.zeros((len(ItemCuts.columns), 0), dtype=np.int64)]
    for count in np.unique(counts).tolist():
        items = in_order[first[counts == count][:, None] + np.arange(count)]
        deal = _dealt if count <= _MAX_KNOWN else _dealt.__wrapped__
        numbers: dict[tuple[int, ...], int] = {}
        contents = np.concatenate([lengths[items], rows[items]], axis=1).tolist()
        which = np.array([numbers.setdefault(tuple(content), len(numbers)) for content in contents])
        dealt = [deal(content, num_ranks, can_cut, tile_rows, num_groups) for content in numbers]
        ranks[items] = np.array([shares.ranks for shares in dealt])[which]
        # Fragments, all of one content one after the other.
        known = [[getattr(one.cuts, name) for name in ItemCuts.columns] for one in dealt if one.cuts is not None]
        if known:
            num = np.array([0 if one.cuts is None else len(one.cuts.item) for one in dealt])
            begins, num_here = (np.cumsum(num) - num)[which], num[which]
            of_cell = np.repeat(np.arange(len(items)), num_here)
            columns = np.concatenate(known, axis=1)[:, rows_of_runs(begins, num_here)]
            columns[0] = items[of_cell, columns[0]]
            cut.append(columns)
    return CellShares(ranks, *np.concatenate(cut, axis=1))


@lru_cache(maxsize=1 << 14)
def _dealt(content: tuple[int, ...], num_ranks: int, can_cut: bool, tile_rows: int, num_groups: int) -> ItemShares:
    """`item_shares` of a cell. content: the lengths of its items, then their rows. Orders of a step, and steps of a
    workload, have many of them in common.
    """
    lengths, rows = np.array(content, dtype=np.int64).reshape(2, -1)
    return item_shares(lengths, rows, num_ranks, can_cut=can_cut, tile_rows=tile_rows, num_groups=num_groups)


def joined_cuts(parts: list[tuple[ItemCuts, Int64Array, int]], position: Int64Array) -> ItemCuts | None:
    """The cuts of several replicas as those of all ranks; None without any.

    parts:    (cuts of a replica, numbers of its items, its first rank).
    position: int64 [num_items], by which items follow each other on a rank.
    """
    if not parts:
        return None
    item = np.concatenate([items[cuts.item] for cuts, items, _ in parts])
    rank = np.concatenate([cuts.rank + np.int32(first) for cuts, _, first in parts])
    begin, end, units = (
        np.concatenate([getattr(cuts, name) for cuts, *_ in parts]) for name in ("begin", "end", "units")
    )
    order = np.lexsort((begin, item, position[item]))
    return ItemCuts(*(column[order] for column in (item, rank, begin, end, units)))
