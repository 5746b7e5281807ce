"""The rows that a rank computes of an encoder's items, some of which several ranks share.

A fragment is a run of the rows that an item becomes. Of any other tensor of the item, such as its patches, frames or
hidden states, a fragment has the same share of rows, in their order (`core/cuts.py: rows_behind`), so that lengths say
who has what. Where a layer needs rows of other fragments, ranks get them: keys and values of attention, frames beside
those of a convolution, rows that a projector joins.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace

import numpy as np
import torch.distributed as dist

from motet.assign.orchestrator import Decision
from motet.core.arrays import Int64Array
from motet.core.context_rows import ContextRows
from motet.core.cuts import CutRows, rows_behind
from motet.core.workload import ItemLengths


@dataclass(frozen=True, eq=False)
class SharedItems:
    """The rows of one rank, of items of an encoder that it has whole, and then of those that it shares.

    outputs:   which rank of the group has which of the rows that the items become, or of those side by side in these
               (`CutRows.parts`). rows: the same in a tensor before these; at first, of as many rows as the items are
               long.
    rank:      which of the ranks this one is.
    num_whole: the first items, of which this rank has all rows.
    num_rows_out: rows that come out of the encoder and its projector for this rank. One of several side by side is
               that rank's that has the last of these.
    group:     the ranks that share items. sent: what `count_bytes` has been told.
    read:      int64 [num_items], rows of each item that queries read: those that the item becomes. With each go equally
               many of them, or about, and with each of these as many of tensors before; None: no queries do.

    Example:
        Of a whole item of one row and one of two, rank 1 has the latter's second half; two patches make a row:
        >>> outputs = ContextRows(np.array([1, 2]), np.array([1, 0, 1]), 2)
        >>> shared = SharedItems(outputs, outputs, 1, 1, num_rows_out=2).with_rows(np.array([2, 4]))
        >>> shared.own.tolist(), shared.is_idle
        ([0, 1, 4, 5], False)
    """

    outputs: ContextRows
    rows: ContextRows
    rank: int
    num_whole: int
    num_rows_out: int
    group: dist.ProcessGroup | None = None
    method: str = "group_cast"
    sent: deque[float] = field(default_factory=deque)  # As of `ContextShare`.
    read: Int64Array | None = None

    @property
    def own(self) -> Int64Array:
        """The rows of this rank among those of all of its items, ascending, int64 [n]."""
        return self.rows.rows[self.rank]

    @property
    def is_idle(self) -> bool:
        """Whether this rank has no row, and only meets the others."""
        return len(self.own) == 0

    def with_rows(self, counts: Int64Array) -> SharedItems:
        """The same in a tensor of so many rows of each item, int64 [num_items]."""
        lengths, whole = self.outputs.lengths, np.full(counts[: self.num_whole].sum(), self.rank)
        owners, stops = [whole], np.cumsum(lengths)
        for item in range(self.num_whole, len(lengths)):
            of_item = self.outputs.owner[stops[item] - lengths[item] : stops[item]]
            if self.read is not None and counts[item] >= self.read[item]:
                of_item = np.repeat(of_item, rows_behind(len(of_item), int(self.read[item])))
            owners.append(np.repeat(of_item, rows_behind(len(of_item), int(counts[item]))))
        return replace(self, rows=ContextRows(counts, np.concatenate(owners), self.outputs.num_ranks))

    def with_spare(self, num_rows: int) -> SharedItems:
        """The same, for a rank without rows: with a whole item of so many rows, of which nothing is kept."""
        rows = ContextRows(np.array([num_rows]), np.full(num_rows, self.rank), self.rows.num_ranks)
        return replace(self, outputs=rows, rows=rows, num_whole=1, read=None)

    def with_class_rows(self, num_before: int) -> SharedItems:
        """The same with so many rows more before each item, which the rank has that has the item's first.

        Example:
            Ranks 1 and 0 share an item; rank 1 has its first row, and so the one before it:
            >>> rows = ContextRows(np.array([3]), np.array([1, 0, 0]), 2)
            >>> shared = SharedItems(rows, rows, 1, 0, num_rows_out=1)
            >>> shared.with_class_rows(1).own.tolist(), shared.with_class_rows(2).rows.rows[0].tolist()
            ([0, 1], [3, 4])
        """
        lengths, owner = self.rows.lengths, self.rows.owner
        firsts = np.repeat(np.cumsum(lengths) - lengths, num_before)
        rows = ContextRows(lengths + num_before, np.insert(owner, firsts, owner[firsts]), self.rows.num_ranks)
        return replace(self, rows=rows)

    def in_order(self, order: Int64Array, lengths: Int64Array, num_whole: int) -> SharedItems:
        """The same rows in another order, as items of other lengths, of which the first num_whole are here whole.

        order: int64 [num_rows], the number of each row before. lengths: int64 [num_items], such as of windows.
        """
        return replace(
            self, rows=ContextRows(lengths, self.rows.owner[order], self.rows.num_ranks), num_whole=num_whole
        )

    def count_bytes(self, size_bytes: float) -> None:
        """Note bytes that this rank has given to others that share items."""
        self.sent.append(size_bytes)


def shared_items(decision: Decision, phase: str, items: ItemLengths, rank: int) -> SharedItems | None:
    """The rows of one rank of a phase; None if it shares no item of the phase, nor do those that share with it.

    items: all of the phase.
    """
    cuts = decision.cuts_of(phase)
    num_ranks = decision.assignments[phase].num_ranks if decision.is_over_all(phase) else decision.sharing[phase]
    first = rank // num_ranks * num_ranks
    if cuts is None or not (cuts.rank // num_ranks * num_ranks == first).any():
        return None
    own, num_whole = decision.items_on(phase, rank), len(decision.whole_items_on(phase, rank))
    cut_rows, num_tokens, lengths = decision.cut_rows.get(phase, CutRows()), items.num_tokens[own], items.length[own]
    num_rows = num_tokens * cut_rows.parts
    owners = [np.full(num_rows[:num_whole].sum(), rank, dtype=np.int32)]
    of_cut = zip(own[num_whole:].tolist(), num_rows[num_whole:].tolist(), strict=True)
    owners += [cuts.run_owner(item, count) for item, count in of_cut]
    outputs = ContextRows(num_rows, np.concatenate(owners) - first, num_ranks)
    shared = SharedItems(outputs, outputs, rank - first, num_whole, 0, read=cut_rows.read(lengths))
    num_rows_out = len(shared.with_rows(num_tokens).own)
    return replace(shared, num_rows_out=num_rows_out).with_rows(lengths)
