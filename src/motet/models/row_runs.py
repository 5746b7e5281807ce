"""Runs of rows that attend without a mask on CPUs: each sees what the one before it sees, or that and one key more.

Such runs stand in whole documents, and in the fragments of a sequence that ranks share. `models/cpu_tiles.py` has the
kernels that they take. Masks of tiles made these fragments take up to 1.4 times their share of the whole one's time.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from motet.core.attention_table import AttentionTable

_SHORTEST = 64
"""Rows of a run from which on two calls take less than a mask."""


class RowRun(NamedTuple):
    """The rows first to last (exclusive) of a table; is_causal: each sees one key more than the row before it."""

    first: int
    last: int
    is_causal: bool


def row_runs(table: AttentionTable) -> list[RowRun]:
    """The runs of _SHORTEST rows or more in a table, in order. O(rows)."""
    if len(table.start) != 1 or table.num_rows < _SHORTEST:
        return []
    start, end = table.start[0], table.end[0]
    stays = (np.diff(start) == 0) & (np.diff(table.document) == 0) & (start < end)[:-1]
    steps = np.where(stays, np.diff(end), -1)  # from each row to the next
    bounds = np.append(np.flatnonzero(np.diff(steps, prepend=-2)), len(steps))
    runs: list[RowRun] = []
    for begin, stop in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        # A row between two runs belongs to the former.
        first = max(begin, runs[-1].last) if runs else begin
        if steps[begin] in (0, 1) and stop + 1 - first >= _SHORTEST:
            runs.append(RowRun(first, stop + 1, bool(steps[begin])))
    return runs
