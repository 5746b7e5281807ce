"""Queries of a projector that read items some of which ranks share.

Of a shared item a rank has a run of its rows and a run of its queries, which are the rows that the item becomes. A
query sees all rows of its item, so that each rank of the item gets copies of the keys and values that the others make
of theirs, as in the layers before the projector (`models/context_items.py`). Where queries see each other, too, their
keys and values go along in the same exchange.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from motet.core.attention_table import AttentionTable
from motet.core.context_rows import ContextRows
from motet.models.asked import Asked
from motet.models.context_items import ContextItems, SharedItemRows
from motet.models.row_copies import RowCopies
from motet.models.table_items import TableItems
from motet.on_device import Staged


class SharedReading(NamedTuple):
    """What a rank has of items that ranks share: of the rows that are read, and of the queries that read them.

    Both have the same items, in the same order.
    """

    rows: SharedItemRows
    queries: SharedItemRows


class SharedQueries:
    """Extents of the items of a `SharedReading`. It is used as `models.attention.QueriedItems` is, by all ranks of a
    group.

    sees_queries, among: as of `QueriedItems`. One object serves all layers and passes of a pack.

    Example:
        Two ranks share an item of four rows that two queries read; each has two rows and one query:
        >>> from types import SimpleNamespace
        >>> counts, owners = (np.array([4]), np.array([2])), (np.array([0, 0, 1, 1]), np.array([0, 1]))
        >>> rows, queries = (
        ...     SimpleNamespace(rows=ContextRows(count, owner, 2), num_whole=0, rank=1, method="group_cast")
        ...     for count, owner in zip(counts, owners)
        ... )
        >>> SharedQueries(SharedReading(rows, queries), sees_queries=True).spread(torch.tensor([[1.0], [2.0]])).tolist()
        [[2.0]]
    """

    causal = False

    def __init__(self, shared: SharedReading, sees_queries: bool) -> None:
        self._share, rank = shared.rows, shared.rows.rank
        self.among = ContextItems(shared.queries, causal=False)
        of_rows, of_queries = shared.rows.rows, shared.queries.rows
        # Keys by item: its rows, then its queries. A rank has those of its rows, then those of its queries.
        keys, order = of_rows, np.arange(of_rows.num_rows)
        if sees_queries:
            items = np.arange(len(of_rows.lengths))
            item = np.concatenate([np.repeat(items, of_rows.lengths), np.repeat(items, of_queries.lengths)])
            order = np.argsort(item, kind="stable")
            owner = np.concatenate([of_rows.owner, of_queries.owner])[order]
            keys = ContextRows(of_rows.lengths + of_queries.lengths, owner, of_rows.num_ranks)
        here = np.concatenate([of_rows.rows[rank], of_rows.num_rows + of_queries.rows[rank] if sees_queries else ()])
        self._order = np.argsort(np.argsort(order)[here.astype(np.int64)])
        self._num_whole = int(keys.lengths[: shared.rows.num_whole].sum())
        item = np.repeat(np.arange(len(keys.lengths)), of_queries.lengths)
        begin, end = keys.starts[item], (keys.starts + keys.lengths)[item]
        table = AttentionTable(begin[None], end[None], np.arange(len(item)), np.arange(keys.num_rows), begin)
        # Nobody else has anything of items that this rank has whole.
        wanted = [seen[seen >= self._num_whole] - self._num_whole for seen in of_queries.wanted(table)]
        self._moves = keys.after(shared.rows.num_whole).moves(rank, wanted)
        held = np.append(np.arange(self._num_whole), self._num_whole + wanted[rank])
        self._items = TableItems(table.of(of_queries.rows[rank], held), causal=False)
        self._own = of_queries.positions[of_queries.rows[rank]]
        self._on: dict[torch.device, tuple[Staged, RowCopies]] = {}

    def spread(self, queries: Tensor) -> Tensor:
        """The queries that all items have, [num_queries, dim] -> those of all items that are here, [n, dim]."""
        index, _ = self._indices(queries.device)
        return queries.index_select(0, index.there[0])

    def make_ahead(self, asked: Asked) -> None:
        """As of `models.attention.Extents`."""
        self._indices(asked.device)
        for items in (self.among, self._items):
            items.make_ahead(asked)

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float | None, dropout: float, window: int | None
    ) -> Tensor:
        """As of `QueriedItems`, of the queries and the rows that are here. A collective, as is backward."""
        if window is not None or key.shape[2] != len(self._order):
            raise ValueError(f"{query.shape[2]} queries and {key.shape[2]} keys do not fit the items of this attention")
        index, copies = self._indices(query.device)
        _, order = index.there
        both = torch.cat([key[0], value[0]]).transpose(0, 1).index_select(0, order)  # [keys, 2 kv_heads, head_dim]
        seen = torch.cat([both[: self._num_whole], copies.of(both[self._num_whole :])])
        keys, values = seen.transpose(0, 1)[None].chunk(2, dim=1)
        return self._items.attend(query, keys, values, scale, dropout, None)

    def _indices(self, device: torch.device) -> tuple[Staged, RowCopies]:
        """Which queries of an item are here, and the order of keys by item; copies of those of others."""
        if device not in self._on:
            self._on[device] = Staged([self._own, self._order], device), RowCopies(self._moves, self._share, device)
        return self._on[device]
