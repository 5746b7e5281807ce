"""Memory by rank: a row for ranks that hold the same."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np

from motet.simulate.predict.prediction import Prediction

_MAX_ROWS, _MAX_RANGES = 12, 4


class MemoryRow(NamedTuple):
    """Ranks that hold as much of each part, to a digit behind the point. sizes: of the parts, then of all together."""

    ranks: str
    sizes: tuple[float, ...]


class MemoryTable(NamedTuple):
    """unit: "GB" or "MB", of the sizes. parts: their names. rows: the fullest first. left_out: rows not shown."""

    unit: str
    parts: tuple[str, ...]
    rows: tuple[MemoryRow, ...]
    left_out: int


def memory_table(prediction: Prediction) -> MemoryTable:
    """The memory of all ranks. Of many different ones, the fullest and the emptiest are among those that are shown."""
    unit, scale = ("GB", 1e9) if prediction.peak_bytes.max() >= 1e9 else ("MB", 1e6)
    held = np.stack([*prediction.memory_bytes.values(), prediction.peak_bytes], axis=1)
    sizes, row_of_rank = np.unique(np.round(held / scale, 1), axis=0, return_inverse=True)
    order = np.lexsort((*sizes.T[:-1], sizes[:, -1]))[::-1]
    shown = order[np.unique(np.linspace(0, len(order) - 1, min(len(order), _MAX_ROWS)).round().astype(np.int64))]
    rows = (
        MemoryRow(_ranges(prediction.ranks[row_of_rank.reshape(-1) == row].tolist()), tuple(sizes[row].tolist()))
        for row in shown.tolist()
    )
    return MemoryTable(unit, tuple(prediction.memory_bytes), tuple(rows), len(order) - len(shown))


def _ranges(ranks: Sequence[int]) -> str:
    """`0-7, 16, 24-31 and 40 more`: ascending ranks, runs of them as one."""
    runs = list(_runs(ranks))
    words = [f"{first:,}" if first == last else f"{first:,}-{last:,}" for first, last in runs[:_MAX_RANGES]]
    num_left = sum(last - first + 1 for first, last in runs[_MAX_RANGES:])
    return ", ".join(words) + (f" and {num_left:,} more" if num_left else "")


def _runs(ranks: Sequence[int]) -> Iterator[tuple[int, int]]:
    for _, run in groupby(enumerate(sorted(ranks)), lambda entry: entry[1] - entry[0]):
        numbers = [rank for _, rank in run]
        yield numbers[0], numbers[-1]
