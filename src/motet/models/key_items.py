"""Who sees which rows of an encoder where these are no rows of the sequence, but keys of cross attention.

An image has one token in the sequence, and its rows are keys of some layers (Llama 3.2 Vision). Text sees the images of
the last run of image tokens before it, those of the run that stand before it; of each the rows of its real tiles alone.
So says transformers' MllamaProcessor. Text before the first image sees all rows of all images of its document, of tiles
that are only padding as well, and its MLP adds nothing: so transformers' layers have it. Documents without images do
not pass the layers at all.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from motet.core.arrays import BoolArray, Int64Array
from motet.core.attention_table import AttentionTable
from motet.dropout import ItemRows
from motet.models.asked import Asked
from motet.models.table_items import TableItems
from motet.on_device import Staged


class KeyItems:
    """The rows of packed documents that see an encoder's rows, and which of them. One object serves all layers.

    rows:     int64 [n], those that see any, ascending. sees: bool [n], which of them stand behind an item.
    table:    who sees which keys: n rows against `num_rows` keys of each item. A row's document begins with its keys.
    numbers:  the document of each of these rows, and the row's number in it.
    keys:     the document of each key, and its number among the keys of that.

    Example:
        A document of a token, an image of 4 rows of which 3 are real, and a token; then a document without an image:
        >>> items = KeyItems.packed(np.array([0, 3, 5]), np.array([1]), np.array([3]), num_rows=4)
        >>> items.rows.tolist(), items.table.start.tolist(), items.table.end.tolist(), items.sees.tolist()
        ([0, 1, 2], [[0, 0, 0]], [[4, 3, 3]], [False, True, True])
    """

    def __init__(
        self,
        rows: Int64Array,
        sees: BoolArray,
        table: AttentionTable,
        numbers: ItemRows,
        keys: ItemRows,
        num_rows: int,
    ) -> None:
        self.rows, self.sees, self.table, self.numbers, self.keys = rows, sees, table, numbers, keys
        self._num_rows = num_rows
        self._on: dict[torch.device, Staged] = {}

    @classmethod
    def packed(cls, offsets: Int64Array, places: Int64Array, num_seen: Int64Array, num_rows: int) -> KeyItems:
        """Of whole documents.

        offsets:  int64 [num_documents + 1], of the documents.
        places:   int64 [num_items], where the token of each item stands; ascending.
        num_seen: int64 [num_items], how many rows of each item the text behind it sees: its first ones.
        num_rows: of each item.
        """
        bounds = np.searchsorted(places, offsets)
        first, stop = bounds[:-1], bounds[1:]  # The items of each document.
        rows: Int64Array = np.flatnonzero(np.repeat(first < stop, np.diff(offsets)))
        document = np.searchsorted(offsets, rows, side="right") - 1
        last = np.searchsorted(places, rows, side="right") - 1
        sees = last >= first[document]
        # 1. Text behind an item: of its run, whose tokens stand one behind the other, an interval for each item.
        begins = np.diff(places, prepend=-2) > 1
        begins |= np.isin(places, offsets)
        begin = np.maximum.accumulate(np.where(begins, np.arange(len(places)), 0))[last]
        steps = np.arange(int((last - begin)[sees].max(initial=0)) + 1)[:, None]
        item = np.minimum(begin + steps, last)
        end = item * num_rows + num_seen[item]
        start = np.where(begin + steps > last, end, item * num_rows)
        # 2. Text before all items of its document: all rows, in one interval.
        end = np.where(sees, end, stop[document] * num_rows)
        start = np.where(sees, start, np.where(steps > 0, end, first[document] * num_rows))
        keys = np.arange(len(places) * num_rows)
        table = AttentionTable(start, end, np.arange(len(rows)), keys, first[document] * num_rows)
        # 3. The items of a document, one behind the other.
        of_keys = np.repeat(np.arange(len(first)), (stop - first) * num_rows)
        numbers = ItemRows(document, rows - offsets[document]), ItemRows(of_keys, keys - first[of_keys] * num_rows)
        return cls(rows, sees, table, *numbers, num_rows)

    def items_of(self, own: Int64Array) -> Int64Array:
        """The items of which some rows of documents see any, int64 [n], ascending. own: these rows."""
        seen = self.table.of(np.flatnonzero(np.isin(self.rows, own)), self.table.keys).seen
        return np.unique(seen // self._num_rows)

    def of(self, own: Int64Array, items: Int64Array) -> KeyItems:
        """The same for the rows of a rank that shares documents, which numbers them from 0, and keys of some items.

        own: int64 [n], ascending. items: those of `items_of`, or more.
        """
        is_here = np.isin(self.rows, own)
        keys = (items[:, None] * self._num_rows + np.arange(self._num_rows)).reshape(-1)
        table = self.table.of(np.flatnonzero(is_here), keys)
        numbers = ItemRows(self.numbers.item[is_here], self.numbers.row[is_here])
        of_keys = ItemRows(self.keys.item[keys], self.keys.row[keys])
        rows = np.searchsorted(own, self.rows[is_here])
        return KeyItems(rows, self.sees[is_here], table, numbers, of_keys, self._num_rows)

    @cached_property
    def extents(self) -> TableItems:
        """What computes attention of these rows to the items' rows."""
        return TableItems(self.table, causal=False)

    def on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """`rows` as LongTensor [n], and `sees` as BoolTensor [n, 1]."""
        rows, sees = self._staged(device).there
        return rows, sees

    def make_ahead(self, asked: Asked) -> None:
        """As of `attention.Extents`, and what `on` needs."""
        self._staged(asked.device)
        self.extents.make_ahead(asked)

    def _staged(self, device: torch.device) -> Staged:
        if device not in self._on:
            self._on[device] = Staged([self.rows, self.sees[:, None]], device)
        return self._on[device]
