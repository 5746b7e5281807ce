"""A table of who sees whom cut into tiles: some consecutive rows against the range of keys that they see."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from motet.core.attention_table import AttentionTable
from motet.models.row_runs import RowRun, row_runs

_TILE = 256
"""The most rows of a tile: causal rows of a long document then have few keys in their mask that they do not see."""
_CALL = 48**2
"""What a call costs, in entries of a mask (`kernel_calls` has the measurement)."""


@dataclass(frozen=True)
class Tile:
    """The rows first to last (exclusive) of a table against its keys low to high.

    full:   each row sees them all.
    is_run: each sees them but for those behind its own; row i of n all but the last n - 1 - i.
    """

    first: int
    last: int
    low: int
    high: int
    full: bool
    is_run: bool = False


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


def tile_mask(tile: Tile, start: Tensor, end: Tensor) -> Tensor | None:
    """bool [rows, keys] of a tile; None if it is full. start, end: int64 [num_intervals, num_rows] of the table."""
    if tile.full:
        return None
    key = torch.arange(tile.low, tile.high, device=start.device)
    rows = slice(tile.first, tile.last)
    mask = (start[0, rows, None] <= key) & (key < end[0, rows, None])
    for interval in range(1, len(start)):
        mask |= (start[interval, rows, None] <= key) & (key < end[interval, rows, None])
    return mask
