"""Attention within each document, image or clip of a pack, without a mask of the whole pack.

It is registered with transformers as "motet_packed". HF layers pass the extents of the items on: causal LMs as the
keyword argument `segments`, encoders in place of `attention_mask`. No mask builder is registered under this name, so
transformers builds no masks; each would cost a device synchronisation per forward.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from motet.core.arrays import Int64Array
from motet.core.attention_table import AttentionTable
from motet.dropout import next_rows, of_heads
from motet.models.asked import Asked
from motet.models.kernel_calls import KernelCalls, plan_calls
from motet.models.scores import Scoring, attended
from motet.on_device import Staged

if TYPE_CHECKING:
    from motet.models.table_items import TableItems

ATTENTION = "motet_packed"
"""The `attn_implementation` of every HF model that Motet builds."""

_USED_BEFORE = ("position_ids",)
"""Keywords that HF layers pass to attention after using them themselves: the rotation holds the positions.

Every other unknown keyword must be None or False (`use_cache`, `output_attentions`). Ignoring a soft cap, a sink or a
bias would silently train another model.
"""

_SCORES = {"softcap": "softcap", "s_aux": "sinks"}
"""Keywords of HF layers that change scores (Gemma 2, gpt-oss) -> what `TableItems.attend` calls them."""


class Extents(Protocol):
    """Who sees whom, in place of a mask.

    causal: what the layers that attend so say of themselves.
    `with_scores` is optional: it gives what computes the same with a soft cap or sinks, `TableItems`. So is
    `make_ahead(asked)`, which makes what `attend` needs of the host for a layer, in whatever thread.
    """

    causal: bool

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float | None, dropout: float, window: int | None
    ) -> Tensor:
        """query [1, heads, rows, head_dim], key and value [1, kv_heads, keys, head_dim] -> [1, rows, heads, head_dim].

        Raises ValueError for a window that it does not compute.
        """


class PackedItems:
    """Extents of the items packed along one axis: item i is rows offsets[i] to offsets[i + 1].

    offsets: int64 [num_items + 1], on the host, ascending from 0.
    causal:  row t sees only the rows up to t of its own item.
    One object serves all layers of a forward and keeps what it computed for each device.
    """

    def __init__(self, offsets: Int64Array, causal: bool) -> None:
        self.offsets = np.asarray(offsets, dtype=np.int64)
        self.causal = causal
        self._calls: dict[torch.device, KernelCalls] = {}
        self._device_offsets: dict[torch.device, Staged] = {}

    @classmethod
    def from_lengths(cls, lengths: Int64Array, causal: bool = False) -> PackedItems:
        """Items of these lengths, int64 [num_items], one after the other."""
        return cls(np.concatenate([[0], np.cumsum(lengths)]), causal)

    @cached_property
    def lengths(self) -> Int64Array:
        """Rows of each item, int64 [num_items]."""
        return np.diff(self.offsets)

    @property
    def longest(self) -> int:
        """Rows of the longest item; 0 without items."""
        return int(self.lengths.max(initial=0))

    @cached_property
    def _table(self) -> TableItems:
        from motet.models.table_items import TableItems

        return TableItems(AttentionTable.packed(self.lengths, self.causal), self.causal)

    def with_scores(self) -> TableItems:
        """What computes the same with a soft cap or sinks."""
        return self._table

    def make_ahead(self, asked: Asked) -> None:
        """As of `Extents`."""
        if asked.is_scored:
            self._table.make_ahead(asked)
        elif _has_varlen_kernel(asked):
            self._offsets_on(asked.device)
        else:
            self._calls_on(asked.device)

    def _offsets_on(self, device: torch.device) -> Staged:
        if device not in self._device_offsets:
            self._device_offsets[device] = Staged([self.offsets.astype(np.int32)], device)
        return self._device_offsets[device]

    def _calls_on(self, device: torch.device) -> KernelCalls:
        if device not in self._calls:
            self._calls[device] = plan_calls(self.offsets, device)
        return self._calls[device]

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float | None, dropout: float, window: int | None
    ) -> Tensor:
        """query [1, heads, rows, head_dim], key and value [1, kv_heads, rows, head_dim] -> [1, rows, heads, head_dim].

        window: a row sees itself and the window - 1 rows before it (causal only).
        """
        if query.shape[2] != self.offsets[-1]:
            raise ValueError(f"attention got {query.shape[2]} rows, its segments have {self.offsets[-1]}")
        if window is not None and not self.causal:
            raise ValueError("attention in both directions has no sliding window here")
        if window is not None and window >= self.longest:
            window = None
        if _has_varlen_kernel(Asked.by(query, key, Scoring(scale, dropout, window))):
            return self._attend_varlen(query, key, value, scale, window)
        heads_per_kv = query.shape[1] // key.shape[1]
        if heads_per_kv > 1:
            key, value = (x.repeat_interleave(heads_per_kv, dim=1) for x in (key, value))
        plan = self._calls_on(query.device)
        drawn = _drawn(dropout, (query.shape[2],), query.device)
        if plan.gather is not None:
            query, key, value = (x.index_select(2, plan.gather) for x in (query, key, value))
            drawn = None if drawn is None else drawn[plan.gather]
        # A split is one node of the autograd graph; each slice would add a gradient of the size of the whole pack.
        pieces = zip(*(x.split(plan.pieces, dim=2) for x in (query, key, value)), strict=True)
        rows = [None] * len(plan.calls) if drawn is None else drawn.split(plan.pieces)
        outputs = []
        for call, piece, drawn in zip(plan.calls, pieces, rows, strict=True):
            if call.count > 1:
                piece = [x[0].unflatten(1, (call.count, -1)).transpose(0, 1) for x in piece]
            of_call = None if drawn is None else drawn.view(call.count, -1)
            out = self._attend_equal(*piece, call.keys, scale, dropout, window, of_call)
            outputs.append(out.transpose(0, 1).flatten(1, 2)[None] if call.count > 1 else out)
        joined = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)
        return (joined if plan.restore is None else joined.index_select(2, plan.restore)).transpose(1, 2)

    def _attend_equal(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        keys: Tensor | None,
        scale: float | None,
        dropout: float,
        window: int | None,
        drawn: Tensor | None,
    ) -> Tensor:
        """Query, key and value [count, heads, length, head_dim] -> the same shape.

        keys: bool [count, 1, 1, length], False at padding rows; the output at padding rows is meaningless.
        drawn: keys of rows by which dropout is drawn, int64 [count, length]; None: torch draws.
        """
        if self.causal:
            # Padding rows stand behind the segment, where a causal row cannot see them.
            keys = _band(query.shape[2], window, query.device) if window is not None else None
        return _attended(query, key, value, keys, self.causal and keys is None, scale, dropout, drawn)

    def _attend_varlen(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float | None, window: int | None
    ) -> Tensor:
        from torch.nn.attention.varlen import varlen_attn

        [offsets] = self._offsets_on(query.device).there
        out = varlen_attn(
            *(x[0].transpose(0, 1).contiguous() for x in (query, key, value)),
            offsets,
            offsets,
            self.longest,
            self.longest,
            scale=scale,
            window_size=(-1 if window is None else window - 1, 0) if self.causal else (-1, -1),
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return out.unsqueeze(0)


class QueriedItems:
    """Extents of packed items to which queries attend: those of item i attend to its rows, and to nothing of others.

    counts:      int64 [num_items], rows of each item, on the host.
    num_queries: of each item; those of item i are the i-th so many rows of `query`.
    sees_queries: they attend to each other as well. Their keys and values then follow those of all rows.
    among:       extents of the queries alone, where they attend to each other and to nothing else.
    Items with equally many keys share a call of the kernel; none is padded.
    """

    causal = False

    def __init__(self, counts: Int64Array, num_queries: int, sees_queries: bool) -> None:
        self.counts, self.num_queries = np.asarray(counts, dtype=np.int64), num_queries
        self.sees_queries = sees_queries
        self.among = PackedItems.from_lengths(np.full(len(self.counts), num_queries, dtype=np.int64))
        self._order = np.argsort(self.counts, kind="stable")
        starts = np.cumsum(self.counts) - self.counts
        keys, self._calls = [], []
        for count in np.unique(self.counts).tolist():
            items = np.flatnonzero(self.counts == count)
            rows = starts[items, None] + np.arange(count)
            if sees_queries:
                own = self.counts.sum() + items[:, None] * num_queries + np.arange(num_queries)
                rows = np.concatenate([rows, own], axis=1)
            self._calls.append((len(items), rows.shape[1]))
            keys.append(rows.ravel())
        self._keys = np.concatenate(keys)
        self._indices: dict[torch.device, Staged] = {}

    def spread(self, queries: Tensor) -> Tensor:
        """The queries that all items have, [num_queries, dim] -> those of each, [num_items * num_queries, dim]."""
        return queries.repeat(len(self.counts), 1)

    def make_ahead(self, asked: Asked) -> None:
        """As of `Extents`."""
        self._indices_on(asked.device)
        self.among.make_ahead(asked)

    def _indices_on(self, device: torch.device) -> Staged:
        """The order of the items by number of keys, these keys, and the order back."""
        if device not in self._indices:
            self._indices[device] = Staged([self._order, self._keys, np.argsort(self._order)], device)
        return self._indices[device]

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float | None, dropout: float, window: int | None
    ) -> Tensor:
        """query [1, heads, num_items * num_queries, head_dim], key and value [1, kv_heads, rows, head_dim] -> the shape
        of a transposed query, [1, num_items * num_queries, heads, head_dim].
        """
        num_keys = int(self.counts.sum()) + self.sees_queries * self.num_queries * len(self.counts)
        if window is not None or query.shape[2] != self.num_queries * len(self.counts) or key.shape[2] != num_keys:
            raise ValueError(f"{query.shape[2]} queries and {key.shape[2]} keys do not fit the items of this attention")
        order, keys, restore = self._indices_on(query.device).there
        drawn = _drawn(dropout, (len(self.counts), self.num_queries), query.device)
        rows = [None] * len(self._calls)
        if drawn is not None:
            rows = drawn[order].split([count for count, _ in self._calls])
        by_item = query[0].unflatten(1, (-1, self.num_queries)).index_select(1, order)
        heads_per_kv = query.shape[1] // key.shape[1]
        key, value = (x[0].index_select(1, keys) for x in (key, value))
        pieces = [count * length for count, length in self._calls]
        outputs = []
        for (count, length), of_call, queries, *both in zip(
            self._calls,
            rows,
            by_item.split([count for count, _ in self._calls], 1),
            key.split(pieces, 1),
            value.split(pieces, 1),
        ):
            own_keys, own_values = (
                x.unflatten(1, (count, length)).transpose(0, 1).repeat_interleave(heads_per_kv, dim=1) for x in both
            )
            out = _attended(queries.transpose(0, 1), own_keys, own_values, None, False, scale, dropout, of_call)
            outputs.append(out.transpose(0, 1))
        joined = torch.cat(outputs, dim=1).index_select(1, restore)  # [heads, items, queries, head_dim]
        return joined.flatten(1, 2).transpose(0, 1)[None]


class PaddedClips:
    """Extents of clips that are padded to the longest, and stand one after the other: clip i is the first lengths[i] of
    its rows; full attention.

    It serves encoders that cannot be packed because they convolve before they attend.
    lengths: int64 [num_items], on the host. The common length is that of the longest.
    """

    causal = False

    def __init__(self, lengths: Int64Array) -> None:
        self.lengths = np.asarray(lengths)
        self.shape = len(self.lengths), int(self.lengths.max(initial=0))
        self._keys: dict[torch.device, Staged | None] = {}

    def make_ahead(self, asked: Asked) -> None:
        """As of `Extents`."""
        self._keys_on(asked.device)

    def _keys_on(self, device: torch.device) -> Staged | None:
        """Which rows of each clip are its own, bool [num_items, 1, 1, longest]; None: all are."""
        if device not in self._keys:
            real = np.arange(self.shape[1]) < self.lengths[:, None]
            self._keys[device] = None if real.all() else Staged([real[:, None, None, :]], device)
        return self._keys[device]

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float | None, dropout: float, window: int | None
    ) -> Tensor:
        """query [1, heads, num_items * longest, head_dim], key and value [1, kv_heads, num_items * longest, head_dim]
        -> [1, num_items * longest, heads, head_dim].
        """
        if window is not None:
            raise ValueError("padded attention has no sliding window")
        query, key, value = (x[0].unflatten(1, self.shape).transpose(0, 1) for x in (query, key, value))
        heads_per_kv = query.shape[1] // key.shape[1]
        if heads_per_kv > 1:
            key, value = (x.repeat_interleave(heads_per_kv, dim=1) for x in (key, value))
        drawn = _drawn(dropout, self.shape, query.device)
        real = self._keys_on(query.device)
        keys = None if real is None else real.there[0]
        out = _attended(query, key, value, keys, False, scale, dropout, drawn)
        return out.transpose(1, 2).flatten(0, 1)[None]


def _attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Extents | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    segments: Extents | None = None,
    **others: object,
) -> tuple[Tensor, None]:
    extents = segments if segments is not None else attention_mask
    # To ask whether it is of the protocol takes 20 us of the host, in each layer.
    if extents is None or not hasattr(extents, "attend"):
        # No default: attention over the whole pack would look plausible and be wrong.
        raise TypeError(
            f"{type(module).__name__}: packed attention needs the extents of its items, such as PackedItems, got "
            f"{type(extents).__name__}"
        )
    scores = {}
    if hasattr(extents, "with_scores"):
        scores = {own: others.pop(name, None) for name, own in _SCORES.items()}
    for name, option in others.items():
        if name not in _USED_BEFORE and option is not None and option is not False:
            raise TypeError(
                f"{type(module).__name__}: packed attention does not compute {name!r}, which changes the result"
            )
    causal = getattr(module, "is_causal", extents.causal) if is_causal is None else is_causal
    if causal != extents.causal:
        raise TypeError(
            f"{type(module).__name__} is {'' if causal else 'not '}causal, and the extents of its rows say the opposite"
        )
    if any(given is not None for given in scores.values()):
        extents = extents.with_scores()
    else:
        scores = {}
    return extents.attend(query, key, value, scaling, dropout, sliding_window, **scores), None


def _drawn(dropout: float, shape: tuple[int, ...], device: torch.device) -> Tensor | None:
    """Keys of rows by which dropout is drawn; None without dropout, or where torch draws."""
    return next_rows(shape, device) if dropout else None


def _attended(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keys: Tensor | None,
    causal: bool,
    scale: float | None,
    dropout: float,
    drawn: Tensor | None,
) -> Tensor:
    """Query, key and value [count, heads, length, head_dim] -> the same shape. keys: True where a row sees a key.

    drawn: keys of rows, int64 [count, length]. No kernel takes a mask of dropped weights, so these are in memory then.
    """
    if drawn is None:
        return scaled_dot_product_attention(
            query, key, value, attn_mask=keys, dropout_p=dropout, scale=scale, is_causal=causal
        )
    if causal:
        keys = _band(query.shape[2], query.shape[2], query.device)
    draws = of_heads(drawn, query.shape[1])
    return attended(query, key, value, keys, scale, dropout=dropout, draws=draws)


def _has_varlen_kernel(asked: Asked) -> bool:
    half = asked.dtype in (torch.float16, torch.bfloat16)
    is_known = half and asked.head_dim % 8 == 0 and asked.head_dim <= 256
    return asked.device.type == "cuda" and asked.dropout == 0 and is_known


def _band(length: int, window: int, device: torch.device) -> Tensor:
    """bool [length, length]: query row sees itself and the window - 1 rows before."""
    row = torch.arange(length, device=device)
    distance = row[:, None] - row
    return (distance >= 0) & (distance < window)


AttentionInterface.register(ATTENTION, _attention)
