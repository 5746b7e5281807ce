"""Attention over sequences, and items of encoders, whose rows several ranks share (context parallelism).

Three ways in which rows of other ranks get to attention, all exact:

group_cast: each rank gets a copy of the keys and values that its rows see, and of no others.
all_gather: each rank gets all keys and values.
ulysses:    each rank gets all rows of some heads, and gives back what they attend to (DeepSpeed-Ulysses).

Each is one uneven all-to-all, transposed in backward; Ulysses has a second one behind attention. All ranks of the group
take part, also one without rows, and so they do when a block is recomputed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import ArrayLike
from torch import Tensor
from torch.autograd.function import once_differentiable

from motet.core.arrays import Int64Array
from motet.core.attention_table import AttentionTable
from motet.core.context_rows import ContextRows, RowMoves, moved_heads
from motet.core.errors import UserError
from motet.dropout import draws_by_item, heads_from
from motet.models.attention import PackedItems
from motet.models.contract import Sequences
from motet.models.key_items import KeyItems
from motet.models.scores import Scoring
from motet.models.table_items import TableItems

GROUP_CAST, ALL_GATHER, ULYSSES = "group_cast", "all_gather", "ulysses"


class SharedAttention(Protocol):
    """What attention must know of the rows that one of several ranks runs, of items that it shares.

    Fields are as of `dispatch.context.ContextShare` and `dispatch.shared_items.SharedItems`.
    """

    @property
    def rows(self) -> ContextRows: ...
    @property
    def num_whole(self) -> int: ...
    @property
    def rank(self) -> int: ...
    @property
    def group(self) -> dist.ProcessGroup | None: ...
    @property
    def method(self) -> str: ...
    @property
    def own(self) -> Int64Array:
        """The rows of this rank, ascending, int64 [n]."""

    def count_bytes(self, size_bytes: float) -> None:
        """Add to the bytes that this rank has given to others."""


class SharedItemRows(SharedAttention, Protocol):
    """The rows that a rank runs of an encoder's items; as of `dispatch.shared_items.SharedItems`."""

    @property
    def num_rows_out(self) -> int: ...
    @property
    def is_idle(self) -> bool: ...
    def with_spare(self, num_rows: int) -> SharedItemRows: ...
    def with_class_rows(self, num_before: int) -> SharedItemRows: ...
    def in_order(self, order: Int64Array, lengths: Int64Array, num_whole: int) -> SharedItemRows: ...


class SharedRows(Protocol):
    """The rows that one of several ranks runs of sequences; fields are as of `dispatch.context.ContextShare`."""

    whole: Sequences
    rows: ContextRows
    num_whole: int
    numbers: Int64Array
    num_shared: int
    rank: int
    predicted: Tensor
    labels: Tensor
    ends: Tensor
    routes: Mapping[str, Any]
    trained: frozenset[str]
    group: dist.ProcessGroup | None
    method: str

    @property
    def own(self) -> Int64Array:
        """The rows of this rank, ascending, int64 [n]."""

    def placed(self, phase: str, rows: Tensor) -> Tensor:
        """Rows that this rank has taken in -> those whose places are here. A collective."""

    def count_bytes(self, size_bytes: float) -> None:
        """Add to the bytes that this rank has given to others."""


def context_of(sequences: object) -> SharedRows | None:
    """The rows of this rank, of sequences that ranks share; None if it has all."""
    shared: SharedRows | None = getattr(sequences, "context", None)
    return shared


def spare_row(own: Int64Array, hidden: Tensor) -> tuple[Int64Array, Tensor]:
    """The rows of this rank, int64 [n], and their hidden states; a rank without any runs a row of zeros.

    Layers of transformers cannot run without rows, and all ranks meet in the collectives of attention. Nobody sees the
    row, and nothing of it is kept.
    """
    if len(own):
        return own, hidden
    return np.zeros(1, dtype=np.int64), torch.cat([hidden, hidden.new_zeros(1, hidden.shape[1])])


def placed(
    features: Mapping[str, Tensor],
    context: SharedRows,
    names: Iterable[str],
    like: Tensor,
    width: Callable[[str], int],
) -> dict[str, Tensor]:
    """The rows of encoders whose places are on this rank. A collective.

    features: those that this rank has taken in; it may have none of an encoder. names: of encoders, the same on all
    ranks in the same order. like: of the type of the rows. width: of the rows of each.
    """
    taken = {name: features[name] if name in features else like.new_zeros(0, width(name)) for name in names}
    return {name: context.placed(name, rows.to(like.dtype)) for name, rows in taken.items()}


def keys_here(rows: Tensor, items: KeyItems, places: Int64Array, context: SharedRows) -> tuple[Tensor, KeyItems]:
    """Copies of the items whose rows are keys of rows of this rank, and who sees which of them. A collective.

    rows: those of the items whose places are on this rank. items: of whole documents. places: int64 [num_items].
    """
    of_items = ContextRows(np.array([len(places)]), context.rows.owner[places], context.rows.num_ranks)
    wanted = [items.items_of(own) for own in context.rows.rows]
    copies = _Copies(of_items.moves(context.rank, wanted), context, rows.device)
    return copies.of(rows), items.of(context.own, wanted[context.rank])


class ContextItems:
    """Extents of documents of which this rank has some rows. One object serves all layers and passes of a pack.

    Documents that this rank has whole stand first, and attend as in `PackedItems`, without an exchange.
    It is used as `models.attention.PackedItems` is, by all ranks of a group.
    together: rows that see each other in both directions, as of `AttentionTable.packed`; all others are causal.
    causal:   False: all rows of a document, or of an encoder's item, see each other.

    Example:
        Rank 0 has the first row and the last of four, and sees both rows of rank 1:
        >>> from types import SimpleNamespace
        >>> rows = ContextRows(np.array([4]), np.array([0, 1, 1, 0]), num_ranks=2)
        >>> ContextItems(SimpleNamespace(rows=rows, num_whole=0, rank=0, method="auto")).method_for(4, 2, None)
        'group_cast'
    """

    def __init__(self, share: SharedRows | SharedAttention, together: ArrayLike = (), *, causal: bool = True) -> None:
        self.causal = causal
        self._share, self._rows, self._rank = share, share.rows.after(share.num_whole), share.rank
        self._whole = PackedItems.from_lengths(share.rows.lengths[: share.num_whole], causal=causal)
        self._num_whole = int(self._whole.offsets[-1])
        self._joined: dict[int | None, TableItems] = {}
        self._table = AttentionTable.packed(self._rows.lengths, causal, together=together)
        self._methods: dict[tuple[int, int, int | None], str] = {}
        self._keys: dict[tuple[int | None, bool, torch.device], tuple[TableItems, _Copies]] = {}
        self._heads: dict[torch.device, tuple[TableItems, _Copies, _Copies]] = {}

    def with_scores(self) -> ContextItems:
        """What computes soft caps and sinks: this does."""
        return self

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float | None,
        dropout: float,
        window: int | None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """query [1, heads, rows, head_dim], key and value [1, kv_heads, rows, head_dim] -> [1, rows, heads, head_dim].

        rows: of this rank, or the one of `spare_row`. Other arguments: as of `TableItems.attend`. A collective, as is
        backward. Raises UserError for Ulysses where heads cannot be dealt out.
        """
        num_whole, how = self._num_whole, Scoring(scale, dropout, window, softcap, sinks)
        num_rows = num_whole + len(self._rows.rows[self._rank])
        if query.shape[2] != max(num_rows, 1):
            raise ValueError(f"attention got {query.shape[2]} rows; this rank has {num_rows}")
        if not num_rows:
            met = self._meet(*(x[:, :, :0] for x in (query, key, value)), how)
            return query.transpose(1, 2) * 0 + met[:0].sum()
        if not num_whole:
            return self._meet(query, key, value, how)
        if dropout and draws_by_item():
            return self._attend_at_once(query, key, value, how)
        (query, shared_query), (key, shared_key), (value, shared_value) = (
            x.split([num_whole, num_rows - num_whole], dim=2) for x in (query, key, value)
        )
        of_whole = self._of_whole(query, key, value, how)
        met = self._meet(shared_query, shared_key, shared_value, how)
        return torch.cat([of_whole, met], dim=1) if num_rows > num_whole else of_whole + met[:0].sum()

    def _of_whole(self, query: Tensor, key: Tensor, value: Tensor, how: Scoring) -> Tensor:
        """As `attend`, of the documents that this rank has whole."""
        if how.softcap is None and how.sinks is None:
            return self._whole.attend(query, key, value, how.scale, how.dropout, how.window)
        return self._whole.with_scores().attend(query, key, value, *how)

    def _attend_at_once(self, query: Tensor, key: Tensor, value: Tensor, how: Scoring) -> Tensor:
        """As `attend`, in one call for whole documents and others: dropout is drawn for all rows of a layer at once."""
        num_whole, window = self._num_whole, how.window
        _, copies = self._keys_for(window, False, query.device)
        both = torch.cat([key[0], value[0]]).transpose(0, 1)  # [rows, 2 kv_heads, head_dim]
        seen = torch.cat([both[:num_whole], copies.of(both[num_whole:])])
        if window not in self._joined:
            every, whole = self._share.rows, np.arange(num_whole)
            wanted = self._wanted(window, everything=False)[self._rank]
            table = AttentionTable.packed(every.lengths, self.causal).windowed(window)
            seen_here = table.of(every.rows[self._rank], np.append(whole, num_whole + wanted))
            self._joined[window] = TableItems(seen_here, self.causal)
        keys, values = seen.transpose(0, 1)[None].chunk(2, dim=1)
        return self._joined[window].attend(query, keys, values, *how._replace(window=None))

    def _meet(self, query: Tensor, key: Tensor, value: Tensor, how: Scoring) -> Tensor:
        """As `attend`, of shared documents. A rank without rows of them gets some tensor, with the graph of what it has
        taken part in.
        """
        if how.window is not None and how.window >= self._rows.lengths.max(initial=0):
            how = how._replace(window=None)
        method = self.method_for(query.shape[1], key.shape[1], how.window)
        if method == ULYSSES:
            return self._attend_by_heads(query, key, value, how)
        items, copies = self._keys_for(how.window, method == ALL_GATHER, query.device)
        both = torch.cat([key[0], value[0]]).transpose(0, 1)  # [rows, 2 kv_heads, head_dim]
        seen = copies.of(both)
        if not query.shape[2]:
            return seen
        keys, values = seen.transpose(0, 1)[None].chunk(2, dim=1)
        return items.attend(query, keys, values, *how._replace(window=None))  # Its table has the window.

    def _attend_by_heads(self, query: Tensor, key: Tensor, value: Tensor, how: Scoring) -> Tensor:
        num_ranks, heads = self._rows.num_ranks, query.shape[1]
        if key.shape[1] % num_ranks:
            key, value = (x.repeat_interleave(heads // key.shape[1], dim=1) for x in (key, value))
        items, there, back = self._heads_on(query.device)
        parts = [x[0].unflatten(0, (num_ranks, -1)) for x in (query, key, value)]  # [ranks, heads of each, rows, dim]
        rows = torch.cat(parts, dim=1).transpose(1, 2).flatten(0, 1)  # [ranks * rows, heads of each, head_dim]
        whole = there.of(rows).transpose(0, 1)[None].split([part.shape[1] for part in parts], dim=1)
        if how.sinks is not None:
            how = how._replace(sinks=how.sinks.unflatten(0, (num_ranks, -1))[self._rank])
        with heads_from(self._rank * (heads // num_ranks)):
            attended = items.attend(*whole, *how)[0]
        # [ranks * rows, heads of each, head_dim] -> [rows, heads, head_dim]
        return back.of(attended).unflatten(0, (num_ranks, -1)).transpose(0, 1).flatten(1, 2)[None]

    def method_for(self, heads: int, kv_heads: int, window: int | None) -> str:
        """The method that is used for a layer; of "auto" the one under which the busiest rank moves fewer elements.

        The same on all ranks. Raises UserError for Ulysses where ranks do not divide the heads.
        """
        method, num_ranks = self._share.method, self._rows.num_ranks
        if method == ULYSSES and heads % num_ranks:
            raise UserError(
                f"context.exchange is {ULYSSES!r}, but {num_ranks} context-parallel ranks do not divide {heads} heads; "
                f"set {GROUP_CAST!r}."
            )
        if method != "auto":
            return method
        if (of_layer := (heads, kv_heads, window)) not in self._methods:
            counts = (self._rows.most_moved(self._wanted(window, everything)) for everything in (False, True))
            by_cast, by_heads = moved_heads(*counts, num_ranks, heads, kv_heads)
            self._methods[of_layer] = ULYSSES if by_heads < by_cast else GROUP_CAST
        return self._methods[of_layer]

    def _wanted(self, window: int | None, everything: bool) -> list[Int64Array]:
        """By rank, the rows whose keys it gets."""
        if everything:
            return [self._table.keys] * self._rows.num_ranks
        return self._rows.wanted(self._table.windowed(window))

    def _keys_for(self, window: int | None, everything: bool, device: torch.device) -> tuple[TableItems, _Copies]:
        at = window, everything, device
        if at not in self._keys:
            wanted = self._wanted(window, everything)
            table = self._table.windowed(window).of(self._rows.rows[self._rank], wanted[self._rank])
            self._keys[at] = (
                TableItems(table, self.causal),
                _Copies(self._rows.moves(self._rank, wanted), self._share, device),
            )
        return self._keys[at]

    def _heads_on(self, device: torch.device) -> tuple[TableItems, _Copies, _Copies]:
        """All rows against all keys, and how rows get from their ranks to those of heads, and back."""
        if device not in self._heads:
            counts = tuple(len(rows) for rows in self._rows.rows)
            own, order = (counts[self._rank],) * len(counts), np.concatenate(self._rows.rows)
            there = RowMoves(np.arange(sum(own)), own, counts, np.argsort(order))
            back = RowMoves(order, counts, own, np.arange(sum(own)))
            copies = (_Copies(moves, self._share, device) for moves in (there, back))
            self._heads[device] = TableItems(self._table, self.causal), *copies
        return self._heads[device]


class _Copies:
    """Copies of rows that go from rank to rank."""

    def __init__(self, moves: RowMoves, share: SharedRows | SharedAttention, device: torch.device) -> None:
        self.send, self.order = (torch.from_numpy(index).to(device) for index in (moves.send, moves.order))
        self.num_sent, self.num_received = list(moves.num_sent), list(moves.num_received)
        self._share = share

    def of(self, rows: Tensor) -> Tensor:
        """rows [n, ...] of this rank -> the rows that it gets, [num_wanted, ...]."""
        return _Copied.apply(rows, self)

    def exchange(self, rows: Tensor, *, backward: bool) -> Tensor:
        """Rows to each rank, one after the other -> rows from each rank. backward: they go back."""
        if (group := self._share.group) is None:
            raise ValueError("rows that several ranks share need the process group of these ranks")
        splits = (self.num_sent, self.num_received) if backward else (self.num_received, self.num_sent)
        moved = rows.new_empty(sum(splits[0]), *rows.shape[1:])
        dist.all_to_all_single(moved, rows.contiguous(), *splits, group=group)
        row_bytes = rows.shape[1:].numel() * rows.element_size()
        self._share.count_bytes((len(rows) - splits[1][self._share.rank]) * row_bytes)
        return moved


class _Copied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, copies: _Copies) -> Tensor:
        ctx.copies, ctx.num_rows = copies, len(rows)
        return copies.exchange(rows.index_select(0, copies.send), backward=False).index_select(0, copies.order)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        copies: _Copies = ctx.copies
        returned = torch.empty_like(gradient).index_copy_(0, copies.order, gradient)
        returned = copies.exchange(returned, backward=True)
        total = gradient.new_zeros(ctx.num_rows, *gradient.shape[1:])
        return total.index_add_(0, copies.send, returned), None
