"""Attention in which a table says who sees whom: images that see themselves in both directions, prefixes, and the rows
of one rank against the keys of all (context parallelism).

On CUDA flex attention computes it (`models/flex.py`). Elsewhere it is computed by tiles: some consecutive rows against
the range of keys that they see (`models/tiles.py`), with a mask of this size; long runs of rows take none on a CPU
(`models/cpu_tiles.py`).
What is a plain pack takes the kernels for packs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from motet.core.attention_table import AttentionTable
from motet.dropout import counted_from, next_rows, of_heads
from motet.models.asked import Asked
from motet.models.attention import PackedItems
from motet.models.cpu_tiles import attend_tiles
from motet.models.flex import FlexTable, has_flex
from motet.models.scores import Scoring, attended
from motet.models.tiles import Tile, plan_tiles, tile_mask
from motet.on_device import Staged, on_device


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
        if has_runs := _has_runs(Asked.by(query, key, how)):
            tiles = [tile for group in self._groups_for(window, has_runs) for tile in group.tiles]
            return attend_tiles(query, key, value, tiles, bounds, scale)
        draws, columns = self._draws(dropout, query)
        has_scores = softcap is not None or sinks is not None or draws is not None
        groups, outputs = self._groups_for(window, has_runs), []
        # A split is one node of the autograd graph; each slice would add a gradient of the size of the whole pack.
        keys, values = (x.split([group.high - group.low for group in groups], dim=2) for x in (key, value))
        rows = iter(query.split([tile.last - tile.first for group in groups for tile in group.tiles], dim=2))
        for group, group_keys, group_values in zip(groups, keys, values, strict=True):
            for tile in group.tiles:
                own = slice(tile.low, tile.high)
                piece = [x.narrow(2, tile.low - group.low, tile.high - tile.low) for x in (group_keys, group_values)]
                is_seen = tile.high > tile.low
                if is_seen and not has_scores:
                    own_rows, is_grouped = next(rows), query.shape[1] != key.shape[1]
                    out = scaled_dot_product_attention(
                        own_rows, *piece, tile_mask(tile, *bounds), dropout, scale=scale, enable_gqa=is_grouped
                    )
                else:
                    piece = [x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in piece]
                    of_tile = None if draws is None else draws[:, :, tile.first : tile.last]
                    numbers = None if columns is None else columns[own]
                    # Scores are computed again in backward, as kernels do: those of all tiles would fill the memory.
                    out = checkpoint(
                        lambda mask, *rest: attended(*rest[:3], tile_mask(*mask), *rest[3:]),
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
