"""Attention over sequences, and items of encoders, whose rows several ranks share (context parallelism).

Three ways in which rows of other ranks get to attention, all exact:

group_cast: each rank gets a copy of the keys and values that its rows see, and of no others.
all_gather: each rank gets all keys and values.
ulysses:    each rank gets all rows of some heads, and gives back what they attend to (DeepSpeed-Ulysses).

Each is one uneven all-to-all, transposed in backward; Ulysses has a second one behind attention. All ranks of the group
take part, also one without rows, and so they do when a block is recomputed.

Keys and values of heads may go in groups (`head_groups`): those of the next group are on their way while attention of
one is computed, and in backward gradients of one while that of the group before it is (Cornstarch, section 5.3).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import ArrayLike
from torch import Tensor

from motet.core.arrays import Int64Array
from motet.core.attention_table import AttentionTable
from motet.core.context_rows import ContextRows, RowMoves, moved_heads
from motet.core.errors import UserError
from motet.core.words import counted_words
from motet.dropout import draws_by_item, heads_from
from motet.models.asked import Asked
from motet.models.attention import PackedItems
from motet.models.contract import Sequences
from motet.models.key_items import KeyItems
from motet.models.row_copies import RowCopies
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
    def outputs(self) -> ContextRows: ...
    @property
    def num_rows_out(self) -> int: ...
    @property
    def is_idle(self) -> bool: ...
    def with_rows(self, counts: Int64Array) -> SharedItemRows: ...
    def with_spare(self, num_rows: int) -> SharedItemRows: ...
    def with_class_rows(self, num_before: int) -> SharedItemRows: ...
    def in_order(self, order: Int64Array, lengths: Int64Array, num_whole: int) -> SharedItemRows: ...


class SharedMerge(Protocol):
    """What a rank merges whole; fields are as of `dispatch.context.MergeShare`."""

    @property
    def sequences(self) -> Sequences: ...
    @property
    def item(self) -> Int64Array: ...
    @property
    def routes(self) -> Mapping[str, Any]: ...


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
    given: Mapping[str, Any]
    trained: frozenset[str]
    group: dist.ProcessGroup | None
    method: str
    head_groups: int
    merging: SharedMerge | None

    @property
    def own(self) -> Int64Array:
        """The rows of this rank, ascending, int64 [n]."""

    def to_merge(self, phase: str, rows: Tensor) -> Tensor:
        """Rows that this rank has taken in -> those of sequences that it merges. A collective."""

    def merged(self, rows: Tensor) -> Tensor:
        """Rows of the sequences that this rank has merged -> those whose places are here. A collective."""

    def placed(self, phase: str, rows: Tensor) -> Tensor:
        """Rows that this rank has taken in -> those whose places are here. A collective."""

    def collected(self, generator: str, rows: Tensor) -> Tensor:
        """Rows at places of a generator's items -> all rows of items that this rank gives away. A collective."""

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
    *,
    to_merge: bool = False,
) -> dict[str, Tensor]:
    """The rows of encoders whose places are on this rank. A collective.

    features: those that this rank has taken in; it may have none of an encoder. names: of encoders, the same on all
    ranks in the same order. like: of the type of the rows. width: of the rows of each. to_merge: those of sequences
    that this rank merges, in their place.
    """
    move = context.to_merge if to_merge else context.placed
    taken = {name: features[name] if name in features else like.new_zeros(0, width(name)) for name in names}
    return {name: move(name, rows.to(like.dtype)) for name, rows in taken.items()}


class KeysHere:
    """The items whose rows are keys of rows of this rank, of which other ranks have some. items: who sees which.

    every: of whole documents. places: int64 [num_items], where the items stand.
    """

    def __init__(self, every: KeyItems, places: Int64Array, context: SharedRows) -> None:
        # No other rank sees the items of documents that this rank has whole, nor knows of them.
        self._num_whole = int(np.searchsorted(places, context.rows.lengths[: context.num_whole].sum()))
        of_shared = ContextRows(
            np.array([len(places) - self._num_whole]),
            context.rows.owner[places[self._num_whole :]],
            context.rows.num_ranks,
        )
        seen = [every.items_of(own) for own in context.rows.rows]
        wanted = [each[each >= self._num_whole] - self._num_whole for each in seen]
        self.items = every.of(context.own, seen[context.rank])
        self._moves, self._share = of_shared.moves(context.rank, wanted), context
        self._copies: dict[torch.device, RowCopies] = {}

    def make_ahead(self, asked: Asked) -> None:
        """As of `attention.Extents`. No collective."""
        self._copies_on(asked.device)
        self.items.make_ahead(asked)

    def of(self, rows: Tensor) -> Tensor:
        """rows of the items whose places are on this rank -> those of `items`. A collective."""
        copies = self._copies_on(rows.device).of(rows[self._num_whole :])
        return torch.cat([rows[: self._num_whole], copies]) if self._num_whole else copies

    def _copies_on(self, device: torch.device) -> RowCopies:
        if device not in self._copies:
            self._copies[device] = RowCopies(self._moves, self._share, device)
        return self._copies[device]


class ContextItems:
    """Extents of documents of which this rank has some rows. One object serves all layers and passes of a pack.

    Documents that this rank has whole stand first, and attend without an exchange.
    It is used as `models.attention.PackedItems` is, by all ranks of a group.
    together: rows that see each other in both directions, as of `AttentionTable.packed`; all others are causal.
    causal:   False: all rows of a document, or of an encoder's item, see each other.
    prefix:   as of `AttentionTable.packed`.
    table:    who sees whom of all rows, in place of these; None: as they say.
    head_groups: groups of heads whose keys and values go one after the other; not under Ulysses.

    Example:
        Rank 0 has the first row and the last of four, and sees both rows of rank 1:
        >>> from types import SimpleNamespace
        >>> rows = ContextRows(np.array([4]), np.array([0, 1, 1, 0]), num_ranks=2)
        >>> ContextItems(SimpleNamespace(rows=rows, num_whole=0, rank=0, method="auto")).method_for(4, 2, None)
        'group_cast'
    """

    def __init__(
        self,
        share: SharedRows | SharedAttention,
        together: ArrayLike = (),
        *,
        causal: bool = True,
        prefix: bool = False,
        table: AttentionTable | None = None,
        head_groups: int = 1,
    ) -> None:
        self.causal, self._prefix, self._head_groups = causal, prefix, head_groups
        self._share, self._rows, self._rank = share, share.rows.after(share.num_whole), share.rank
        self._together = np.asarray(together, dtype=np.int64).reshape(-1, 2)
        lengths, self._given = share.rows.lengths[: share.num_whole], table
        self._num_whole = int(lengths.sum())
        of_whole = self._together[:, 1] <= self._num_whole
        self._whole: PackedItems | TableItems = PackedItems.from_lengths(lengths, causal=causal)
        if table is not None:
            self._whole = TableItems(table.within(0, self._num_whole), causal)
        elif of_whole.any():
            self._whole = TableItems(AttentionTable.packed(lengths, causal, self._together[of_whole], prefix), causal)
        self._joined: dict[int | None, TableItems] = {}
        of_shared = self._together[~of_whole] - self._num_whole
        if table is not None:
            self._table = table.within(self._num_whole, table.num_rows)
        else:
            self._table = AttentionTable.packed(self._rows.lengths, causal, of_shared, prefix)
        self._methods: dict[tuple[int, int, int | None], str] = {}
        self._wanted_rows: dict[int | None, list[Int64Array]] = {}
        self._keys: dict[tuple[int | None, bool, torch.device], tuple[TableItems, RowCopies]] = {}
        self._heads: dict[torch.device, tuple[TableItems, RowCopies, RowCopies]] = {}

    def with_scores(self) -> ContextItems:
        """What computes soft caps and sinks: this does."""
        return self

    def make_ahead(self, asked: Asked) -> None:
        """As of `Extents`. No collective."""
        if self._num_whole and asked.dropout:  # It is drawn by item in training, for all rows at once.
            self._keys_for(asked.window, False, asked.device)
            self._joined_for(asked.window).make_ahead(asked._replace(window=None))
            return
        if self._num_whole:
            of_whole = self._whole.with_scores() if asked.is_scored else self._whole
            of_whole.make_ahead(asked)
        window = self._reached(asked.window)
        method = self.method_for(asked.heads, asked.kv_heads, window)
        if method == ULYSSES:
            self._heads_on(asked.device)[0].make_ahead(asked._replace(window=window))
        else:
            items, _ = self._keys_for(window, method == ALL_GATHER, asked.device)
            items.make_ahead(asked._replace(window=None))

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
            met = self._started(*(x[:, :, :0] for x in (query, key, value)), how)()
            return query.transpose(1, 2) * 0 + met[:0].sum()
        if not num_whole:
            return self._started(query, key, value, how)()
        if dropout and draws_by_item():
            return self._attend_at_once(query, key, value, how)
        (query, shared_query), (key, shared_key), (value, shared_value) = (
            x.split([num_whole, num_rows - num_whole], dim=2) for x in (query, key, value)
        )
        meet = self._started(shared_query, shared_key, shared_value, how)
        of_whole = self._of_whole(query, key, value, how)  # Beside the way of the others' keys.
        met = meet()
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
        whole, shared = (
            self._by_group(key[:, :, rows], value[:, :, rows]) for rows in (slice(num_whole), slice(num_whole, None))
        )
        seen = (torch.cat(both) for both in zip(whole, copies.one_ahead(shared), strict=True))
        return self._attend_by_group(self._joined_for(window), query, seen, how._replace(window=None))

    def _joined_for(self, window: int | None) -> TableItems:
        """Rows of whole documents and of others against the keys that any of them see."""
        if window not in self._joined:
            every, num_whole = self._share.rows, self._num_whole
            wanted = self._wanted(window, everything=False)[self._rank]
            table = self._given or AttentionTable.packed(every.lengths, self.causal, self._together, self._prefix)
            seen_here = table.windowed(window).of(
                every.rows[self._rank], np.append(np.arange(num_whole), num_whole + wanted)
            )
            self._joined[window] = TableItems(seen_here, self.causal)
        return self._joined[window]

    def _reached(self, window: int | None) -> int | None:
        """The window; None where it hides nothing."""
        return None if window is not None and window >= self._rows.lengths.max(initial=0) else window

    def _started(self, query: Tensor, key: Tensor, value: Tensor, how: Scoring) -> Callable[[], Tensor]:
        """As `attend`, of shared documents, whose keys are on their way when this returns. A rank without rows of them
        gets some tensor, with the graph of what it has taken part in.
        """
        how = how._replace(window=self._reached(how.window))
        method = self.method_for(query.shape[1], key.shape[1], how.window)
        if method == ULYSSES:
            return lambda: self._attend_by_heads(query, key, value, how)
        items, copies = self._keys_for(how.window, method == ALL_GATHER, query.device)
        seen = copies.one_ahead(self._by_group(key, value))
        if not query.shape[2]:
            return lambda: torch.stack([each[:0].sum() for each in seen])
        return lambda: self._attend_by_group(items, query, seen, how._replace(window=None))  # Its table has the window.

    def _by_group(self, key: Tensor, value: Tensor) -> list[Tensor]:
        """As of `attend` -> of each group of heads, keys and values [rows, 2 kv_heads of the group, head_dim]."""
        size, left = divmod(kv_heads := key.shape[1], self._head_groups)
        if left:
            raise UserError(
                f"context.head_groups is {self._head_groups}, and does not divide the "
                f"{counted_words(kv_heads, 'head')} of keys and values of a rank."
            )
        of_groups = zip(key[0].split(size), value[0].split(size), strict=True)
        # Row by row, as rows are sent: of rows that do not lie together, picking some takes three times as long.
        return [torch.cat([x.transpose(0, 1) for x in both], dim=1) for both in of_groups]

    def _attend_by_group(self, items: TableItems, query: Tensor, seen: Iterator[Tensor], how: Scoring) -> Tensor:
        """As `TableItems.attend`. seen: as of `_by_group`, one after the other."""
        num_heads, attended = query.shape[1] // self._head_groups, []
        parts = (query,) if self._head_groups == 1 else query.split(num_heads, dim=1)
        sinks = [None] * len(parts) if how.sinks is None else how.sinks.split(num_heads)
        for group, (part, both) in enumerate(zip(parts, seen, strict=True)):
            keys, values = both.transpose(0, 1)[None].chunk(2, dim=1)
            with heads_from(group * num_heads, is_last=group == len(parts) - 1):
                attended.append(items.attend(part, keys, values, *how._replace(sinks=sinks[group])))
        return torch.cat(attended, dim=2) if len(attended) > 1 else attended[0]

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
                f"context.exchange is {ULYSSES!r}, but {num_ranks} context-parallel ranks do not divide "
                f"{counted_words(heads, 'head')}; set {GROUP_CAST!r}."
            )
        if method != "auto":
            return method
        if (of_layer := (heads, kv_heads, window)) not in self._methods:
            counts = (self._rows.most_moved(self._wanted(window, everything)) for everything in (False, True))
            by_cast, by_heads = moved_heads(*counts, num_ranks, heads, kv_heads)
            self._methods[of_layer] = ULYSSES if by_heads < by_cast else GROUP_CAST
        return self._methods[of_layer]

    def _wanted(self, window: int | None, everything: bool) -> list[Int64Array]:
        """By rank, the rows whose keys it gets. A method is chosen by them, and keys are sent: they are made once."""
        if everything:
            return [self._table.keys] * self._rows.num_ranks
        if window not in self._wanted_rows:
            self._wanted_rows[window] = self._rows.wanted(self._table.windowed(window))
        return self._wanted_rows[window]

    def _keys_for(self, window: int | None, everything: bool, device: torch.device) -> tuple[TableItems, RowCopies]:
        at = window, everything, device
        if at not in self._keys:
            wanted = self._wanted(window, everything)
            table = self._table.windowed(window).of(self._rows.rows[self._rank], wanted[self._rank])
            self._keys[at] = (
                TableItems(table, self.causal),
                RowCopies(self._rows.moves(self._rank, wanted), self._share, device),
            )
        return self._keys[at]

    def _heads_on(self, device: torch.device) -> tuple[TableItems, RowCopies, RowCopies]:
        """All rows against all keys, and how rows get from their ranks to those of heads, and back."""
        if device not in self._heads:
            counts = tuple(len(rows) for rows in self._rows.rows)
            own, order = (counts[self._rank],) * len(counts), np.concatenate(self._rows.rows)
            there = RowMoves(np.arange(sum(own)), own, counts, np.argsort(order))
            back = RowMoves(order, counts, own, np.arange(sum(own)))
            copies = (RowCopies(moves, self._share, device) for moves in (there, back))
            self._heads[device] = TableItems(self._table, self.causal), *copies
        return self._heads[device]
