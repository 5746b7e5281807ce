"""Attention in which a table says who sees whom: images that see themselves in both directions, prefixes, and the rows
of one rank against the keys of all (context parallelism).

On CUDA flex attention computes it (`models/flex.py`). Elsewhere it is computed by tiles: some consecutive rows against
the range of keys that they see, with a mask of this size; long runs of rows take none (`models/row_runs.py`).
What is a plain pack takes the kernels for packs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from motet.core.attention_table import AttentionTable
from motet.dropout import counted_from, next_rows, of_heads
from motet.models.asked import Asked
from motet.models.attention import PackedItems
from motet.models.flex import FlexTable, has_flex
from motet.models.row_runs import RowRun, attend_causal_run, row_runs
from motet.models.scores import Scoring, attended
from motet.on_device import Staged, on_device

_TILE = 256
"""The most rows of a tile: causal rows of a long document then have few keys in their mask that they do not see."""
_CALL = 48**2
"""What a call costs, in entries of a mask (`kernel_calls` has the measurement)."""


@dataclass(frozen=True)
class Tile:
    """The rows first to last (exclusive) of a table against its keys low to high.

    full: each row sees them all. is_run: each sees them but for those behind its own, as `attend_causal_run` has it.
    """

    first: int
    last: int
    low: int
    high: int
    full: bool
    is_run: bool = False


class TableItems:
    """Rows that attend as a table says.

    causal: what the layers say of themselves; in a decoder text is causal, whatever its images are.
    One object serves all layers of a forward and keeps what it computed for each window and device.

    Example:
        Row 3 of a document of 4, against all keys:
        >>> table = AttentionTable.packed([4]).of(rows=[3], keys=[0, 1, 2, 3])
        >>> query, key, value = torch.zeros(1, 2, 1, 8), torch.zeros(1, 1, 4, 8), torch.ones(1, 1, 4, 8)
        >>> TableItems(table).attend(query, key, value, None, 0.0, None).shape
        torch.Size([1, 1, 2, 8])
    """

    def __init__(self, table: AttentionTable, causal: bool = True) -> None:
        self.table, self.causal = table, causal
        pack = table.as_pack()
        self._pack = None if pack is None else PackedItems(*pack)
        self._groups: dict[tuple[int | None, bool], list[_Group]] = {}
        self._flex: dict[tuple[int | None, torch.device], FlexTable] = {}
        self._bounds: dict[tuple[int | None, torch.device], Staged] = {}

    def with_scores(self) -> TableItems:
        """What computes soft caps and sinks: this does."""
        return self

    def make_ahead(self, asked: Asked) -> None:
        """As of `Extents`."""
        if (pack := self._as_pack(asked)) is not None:
            pack.make_ahead(asked)
        elif not self.table.num_rows:
            return
        elif has_flex(asked) and self.table.num_keys:
            self._flex_for(asked.window, asked.device)
        else:
            self._bounds_for(asked.window, asked.device)
            self._groups_for(asked.window, _has_runs(asked))

    def _as_pack(self, asked: Asked) -> PackedItems | None:
        """What computes a plain pack in place of this; None where this does."""
        if asked.is_scored or self._pack is None or not self.table.num_rows:
            return None
        return self._pack if asked.window is None or self._pack.causal else None

    def _flex_for(self, window: int | None, device: torch.device) -> FlexTable:
        at = (window, device)
        if at not in self._flex:
            self._flex[at] = FlexTable(self.table.windowed(window), device)
        return self._flex[at]

    def _bounds_for(self, window: int | None, device: torch.device) -> Staged:
        at, table = (window, device), self.table.windowed(window)
        if at not in self._bounds:
            self._bounds[at] = Staged([table.start, table.end], device)
        return self._bounds[at]

    def _groups_for(self, window: int | None, has_runs: bool) -> list[_Group]:
        at, table = (window, has_runs), self.table.windowed(window)
        if at not in self._groups:
            self._groups[at] = _groups(plan_tiles(table, has_runs=has_runs), table.num_keys)
        return self._groups[at]

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
        """query [1, heads, num_rows, head_dim], key and value [1, kv_heads, num_keys, head_dim] ->
        [1, num_rows, heads, head_dim].

        window:  a row sees no key that stands `window` places or more before it in the pack (causal only).
        softcap: a score s becomes softcap * tanh(s / softcap).
        sinks:   [heads], a score without a value, which takes its share of the weights.
        A row that sees no key gets 0.
        """
        if (query.shape[2], key.shape[2]) != (self.table.num_rows, self.table.num_keys):
            raise ValueError(
                f"attention got {query.shape[2]} rows and {key.shape[2]} keys, its table has {self.table.num_rows} and "
                f"{self.table.num_keys}"
            )
        if window is not None and not self.causal:
            raise ValueError("attention in both directions has no sliding window here")
        how = Scoring(scale, dropout, window, softcap, sinks)
        asked = Asked.by(query, key, how)
        if (pack := self._as_pack(asked)) is not None:
            return pack.attend(query, key, value, scale, dropout, window)
        if has_flex(asked) and query.shape[2] and key.shape[2]:
            table = self._flex_for(window, query.device)
            return table.attend(query, key, value, scale, softcap, sinks).transpose(1, 2)
        return self._attend_by_tiles(query, key, value, how).transpose(1, 2)

    def _attend_by_tiles(self, query: Tensor, key: Tensor, value: Tensor, how: Scoring) -> Tensor:
        """As `attend`, but [1, heads, num_rows, head_dim]."""
        scale, dropout, window, softcap, sinks = how
        bounds = self._bounds_for(window, query.device).there
        draws, columns = self._draws(dropout, query)
        has_scores = softcap is not None or sinks is not None or draws is not None
        has_runs = _has_runs(Asked.by(query, key, how))
        groups, outputs = self._groups_for(window, has_runs), []
        # A split is one node of the autograd graph; each slice would add a gradient of the size of the whole pack.
        keys, values = (x.split([group.high - group.low for group in groups], dim=2) for x in (key, value))
        rows = iter(query.split([tile.last - tile.first for group in groups for tile in group.tiles], dim=2))
        for group, group_keys, group_values in zip(groups, keys, values, strict=True):
            for tile in group.tiles:
                own = slice(tile.low, tile.high)
                piece = [x.narrow(2, tile.low - group.low, tile.high - tile.low) for x in (group_keys, group_values)]
                is_seen = tile.high > tile.low
                if tile.is_run:
                    out = attend_causal_run(next(rows), *piece, scale)
                elif is_seen and has_runs and not tile.full:
                    out = _MaskedTile.apply(next(rows), *piece, tile, bounds, scale)
                elif is_seen and not has_scores:
                    own_rows, is_grouped = next(rows), query.shape[1] != key.shape[1]
                    out = scaled_dot_product_attention(
                        own_rows, *piece, _mask(tile, *bounds), dropout, scale=scale, enable_gqa=is_grouped
                    )
                else:
                    piece = [x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in piece]
                    of_tile = None if draws is None else draws[:, :, tile.first : tile.last]
                    numbers = None if columns is None else columns[own]
                    # Scores are computed again in backward, as kernels do: those of all tiles would fill the memory.
                    out = checkpoint(
                        lambda mask, *rest: attended(*rest[:3], _mask(*mask), *rest[3:]),
                        (tile, *bounds),
                        next(rows),
                        *piece,
                        scale,
                        softcap,
                        sinks,
                        dropout,
                        of_tile,
                        numbers,
                        use_reentrant=False,
                        preserve_rng_state=bool(dropout) and draws is None,
                    )
                outputs.append(out)
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)

    def _draws(self, dropout: float, query: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Keys of rows and numbers of keys by which dropout is drawn: both count from where their document begins.

        int64 [1, heads, num_rows] and int64 [num_keys]; None without dropout, or where torch draws.
        """
        drawn = next_rows((query.shape[2],), query.device) if dropout else None
        if drawn is None:
            return None, None
        document, keys = (on_device(x, query.device) for x in (self.table.document, self.table.keys))
        return counted_from(of_heads(drawn[None], query.shape[1]), document), keys


class _MaskedTile(torch.autograd.Function):
    """The kernel of CPUs on a tile whose mask is made again in backward: masks of all tiles would fill the memory.

    `scaled_dot_product_attention` would keep each, as numbers, in every layer.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        tile: Tile,
        bounds: tuple[Tensor, Tensor],
        scale: float | None,
    ) -> Tensor:
        mask = _added_mask(tile, bounds, query.dtype)
        out, summed = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, False, attn_mask=mask, scale=scale
        )
        ctx.save_for_backward(query, key, value, out, summed, *bounds)
        ctx.tile, ctx.scale = tile, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, summed, *bounds = ctx.saved_tensors
        mask = _added_mask(ctx.tile, bounds, query.dtype)
        gradients = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            gradient, query, key, value, out, summed, 0.0, False, attn_mask=mask, scale=ctx.scale
        )
        return (*gradients, None, None, None)


def _has_runs(asked: Asked) -> bool:
    """Whether long runs of rows are tiles of their own, without a mask."""
    return asked.device.type == "cpu" and not (asked.is_scored or asked.dropout)


@dataclass(frozen=True)
class _Group:
    """Tiles that see the keys low to high (exclusive), which those of other groups do not see."""

    low: int
    high: int
    tiles: list[Tile]


def _groups(tiles: Sequence[Tile], num_keys: int) -> list[_Group]:
    """The tiles of a table, by ranges of keys that together are all of its keys."""
    seen = np.maximum.accumulate([tile.high for tile in tiles])
    needed = np.minimum.accumulate([tile.low for tile in reversed(tiles)])[::-1]
    cuts = [0, *(np.flatnonzero(seen[:-1] <= needed[1:]) + 1).tolist(), len(tiles)]
    ends = [*(int(needed[cut]) for cut in cuts[1:-1]), num_keys]
    starts = [0, *ends[:-1]]
    return [
        _Group(low, high, list(tiles[first:last]))
        for low, high, first, last in zip(starts, ends, cuts[:-1], cuts[1:], strict=True)
    ]


def plan_tiles(table: AttentionTable, *, has_runs: bool = False) -> list[Tile]:
    """Tiles that together have each row of the table once, in order. At least one, which may be empty.

    has_runs: whether runs of rows are tiles of their own, however long.
    """
    pairs = table.pairs
    sees = table.start < table.end
    low = np.where(sees, table.start, table.num_keys).min(axis=0, initial=table.num_keys)
    high = np.where(sees, table.end, 0).max(axis=0, initial=0)
    runs = row_runs(table) if has_runs else []
    cuts, causal_runs = _cuts(table, runs), {run.first for run in runs if run.is_causal}
    tiles: list[Tile] = []
    for first, last in zip(cuts[:-1].tolist(), cuts[1:].tolist(), strict=True):
        tile = replace(_tile(first, last, low, high, pairs), is_run=first in causal_runs)
        if tiles and last - tiles[-1].first <= _TILE and not (tile.is_run or tiles[-1].is_run):
            joined = _tile(tiles[-1].first, last, low, high, pairs)
            if _area(joined) <= _area(tiles[-1]) + _area(tile) + _CALL:
                tiles[-1] = joined
                continue
        tiles.append(tile)
    return tiles or [Tile(0, 0, 0, 0, True)]


def _cuts(table: AttentionTable, runs: Sequence[RowRun]) -> np.ndarray:
    """Where tiles may begin, int64: at each document's first row, every `_TILE` rows from there, and around runs."""
    number = np.arange(table.num_rows)
    new = np.diff(table.document, prepend=-1) != 0
    first = np.flatnonzero(new)[np.cumsum(new) - 1] if table.num_rows else number
    is_cut = (number - first) % _TILE == 0
    for begin, end, _ in runs:
        is_cut[begin:end] = False
        is_cut[begin] = True
        is_cut[end : end + 1] = True
    return np.append(np.flatnonzero(is_cut), table.num_rows)


def _tile(first: int, last: int, low: np.ndarray, high: np.ndarray, pairs: np.ndarray) -> Tile:
    bottom, top = int(low[first:last].min()), int(high[first:last].max())
    if top <= bottom:  # its rows see nothing
        return Tile(first, last, 0, 0, True)
    return Tile(first, last, bottom, top, bool((pairs[first:last] == top - bottom).all()))


def _area(tile: Tile) -> int:
    return (tile.last - tile.first) * (tile.high - tile.low)


def _added_mask(tile: Tile, bounds: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """What is added to the scores of a tile that is not full, [rows, keys]: 0, or minus infinity."""
    mask = _mask(tile, *bounds)
    assert mask is not None, "a tile that is not full"
    return torch.zeros(mask.shape, dtype=dtype).masked_fill_(~mask, -torch.inf)


def _mask(tile: Tile, start: Tensor, end: Tensor) -> Tensor | None:
    """bool [rows, keys] of a tile; None if it is full. start, end: int64 [num_intervals, num_rows] of the table."""
    if tile.full:
        return None
    key = torch.arange(tile.low, tile.high, device=start.device)
    rows = slice(tile.first, tile.last)
    mask = (start[0, rows, None] <= key) & (key < end[0, rows, None])
    for interval in range(1, len(start)):
        mask |= (start[interval, rows, None] <= key) & (key < end[interval, rows, None])
    return mask
