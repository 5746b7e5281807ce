"""An encoder's items on the ranks that share those of a replica: whole ones, and fragments of what replicas share.

What a replica has of a microbatch, its ranks deal out by length (`item_shares.py`): a whole item, or a fragment, stays
whole, unless it is more than a rank's share of all of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from motet.assign.item_shares import CellShares, shares_of_cells
from motet.assign.step import ModuleAssignment
from motet.core.arrays import Int64Array
from motet.core.cuts import ItemCuts, shares_between
from motet.core.spec import Module


@dataclass(frozen=True, eq=False)
class DealtItems(CellShares):
    """Items of an encoder on ranks, which are numbered replica * num_ranks + c.

    ranks: int64 [num_items], of each item, or of the largest fragment that its replica has of one that is cut.
    Fragments are as of `CellShares`, by item, then by row.
    """

    def cuts(self, position: Int64Array) -> ItemCuts | None:
        """The items that are cut, where ranks have them by position, int64 [num_items]; None: all are whole."""
        if not len(self.item):
            return None
        order = np.argsort(position[self.item], kind="stable")
        item, rank, *columns = (getattr(self, name)[order] for name in ItemCuts.columns)
        return ItemCuts(item, rank.astype(np.int32), *columns)


def dealt_items(items: ModuleAssignment, module: Module, num_ranks: int, cp: int) -> DealtItems:
    """The items of a step on the ranks of each replica, the same in training and in predictions.

    items: by replica. num_ranks: ranks that deal out those of a replica, in groups of cp. O(items).
    """
    parts, of = items.parts, items.parts.item
    rows = module.cut_rows.num_rows(items.num_tokens, items.length)[of]
    first, stop = (edge * rows // parts.units for edge in (parts.begin, parts.end))
    dealt = shares_of_cells(
        items.microbatch[of].astype(np.int64) * items.num_replicas + parts.replica,
        shares_between(items.length[of], parts.begin, parts.end, parts.units),
        stop - first,
        cp,
        can_cut=module.shareable,
        tile_rows=module.tile_rows,
        num_groups=num_ranks // cp,
    )
    replica, is_own = parts.replica.astype(np.int64) * num_ranks, parts.replica == items.replica[of]
    ranks = np.zeros(len(items.example), np.int64)
    ranks[of[is_own]] = (replica + dealt.ranks)[is_own]
    # A fragment that stays whole is on one rank.
    kept, cut = np.setdiff1d(np.flatnonzero(parts.is_cut), dealt.item), dealt.item
    part, rank = np.concatenate([kept, cut]), np.concatenate([dealt.ranks[kept], dealt.rank])
    edges = ((stop - first)[cut] * edge // dealt.units for edge in (dealt.begin, dealt.end))
    begin, end = (np.concatenate([whole[kept], first[cut] + edge]) for whole, edge in zip((first, stop), edges))
    order = np.lexsort((begin, of[part]))
    columns = of[part], replica[part] + rank, begin, end, rows[part]
    return DealtItems(ranks, *(column[order] for column in columns))
