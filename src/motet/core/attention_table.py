"""One table says who sees whom: for each row of a pack, the intervals of the keys to which it attends.

A mask of rows x keys has too many entries to be built. Packed documents, causal text, images whose rows see each other
in both directions, prefixes, encoder segments and sliding windows all need one interval a row; several are needed only
where a row skips what stands between (Cornstarch section 4.3.1 lets text skip a modality). `balance.segments.Segments`
describes such sequences by runs of tokens, and makes this table of them.

The same table holds for some rows against some keys, as context parallelism computes them: both keep their order.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike

from motet.core.arrays import BoolArray, Int64Array, rows_of_runs
from motet.core.errors import ArgumentError


@dataclass(frozen=True, eq=False)
class AttentionTable:
    """Row i sees the keys start[j, i] to end[j, i] - 1, for every j.

    start, end: int64 [num_intervals, num_rows], numbers of keys; intervals of a row ascend and do not overlap, and may
                be empty.
    rows:       int64 [num_rows], where in the pack the rows stand; ascending.
    keys:       int64 [num_keys], where in the pack the keys stand; ascending.
    document:   int64 [num_rows], where in the pack the document of each row begins.
    kept:       int64 [num_rows], where in the pack begin the keys that no window hides from a row; None: with the row.
    Raises ArgumentError for columns that are not these.

    Example:
        Two documents; in the first, rows 1 and 2 are an image:
        >>> table = AttentionTable.packed([4, 2], together=[[1, 3]])
        >>> table.start.tolist(), table.end.tolist()
        ([[0, 0, 0, 0, 4, 4]], [[1, 3, 3, 4, 5, 6]])
        >>> of_rank = table.of(rows=[3, 5], keys=[0, 1, 2, 3, 4, 5])
        >>> of_rank.start.tolist(), of_rank.end.tolist()
        ([[0, 4]], [[4, 6]])
    """

    start: Int64Array
    end: Int64Array
    rows: Int64Array
    keys: Int64Array
    document: Int64Array
    kept: Int64Array | None = None

    def __post_init__(self) -> None:
        if self.start.ndim != 2 or self.start.shape != self.end.shape or self.start.shape[1] != self.num_rows:
            raise ArgumentError(
                f"start {self.start.shape} and end {self.end.shape} must both be intervals x {self.num_rows} rows."
            )
        if len(self.document) != self.num_rows:
            raise ArgumentError(f"document has {len(self.document)} entries; the table has {self.num_rows} rows.")
        if self.kept is not None and len(self.kept) != self.num_rows:
            raise ArgumentError(f"kept has {len(self.kept)} entries; the table has {self.num_rows} rows.")
        _check_ascending(self.rows, "rows")
        _check_ascending(self.keys, "keys")
        bounds = np.stack([self.start, self.end], axis=1).reshape(2 * len(self.start), self.num_rows)
        if bounds.size and (
            bounds[0].min() < 0 or bounds[-1].max() > self.num_keys or (np.diff(bounds, axis=0) < 0).any()
        ):
            raise ArgumentError(f"intervals of a row must ascend from 0 to at most {self.num_keys}, its keys.")

    @classmethod
    def packed(
        cls, lengths: ArrayLike, causal: bool = True, together: ArrayLike = (), prefix: bool = False
    ) -> AttentionTable:
        """Documents or segments one after the other, each of which sees itself alone.

        lengths:  int [num_documents].
        causal:   a row sees the rows of its document up to itself; else all of them.
        together: int [n, 2], from row to row (exclusive): these rows also see each other, in both directions. Images
                  of Gemma 3, or a prefix (PaliGemma). Ascending, and each within a document.
        prefix:   no window hides anything of those that begin with their document (PaliGemma 2).
        """
        sizes = np.asarray(lengths, dtype=np.int64)
        offsets = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(sizes)])
        rows = np.arange(offsets[-1])
        document = np.repeat(offsets[:-1], sizes)
        end = rows + 1 if causal else np.repeat(offsets[1:], sizes)
        kept = rows.copy() if prefix else None
        runs = np.asarray(together, dtype=np.int64).reshape(-1, 2)
        if len(runs):
            if (np.diff(runs.ravel()) < 0).any() or runs[0, 0] < 0 or runs[-1, 1] > len(rows):
                raise ArgumentError(f"together must ascend, from row to row, within 0 and {len(rows)}.")
            sizes = np.diff(runs)[:, 0]
            inside = rows_of_runs(runs[:, 0], sizes)
            run = np.repeat(np.arange(len(runs)), sizes)
            across = document[inside] > runs[run, 0]
            if across.any():
                wrong = runs[run[np.argmax(across)]]
                raise ArgumentError(f"together has rows {wrong[0]} to {wrong[1]}, which are not of one document.")
            end[inside] = np.maximum(end[inside], runs[run, 1])
            if kept is not None:
                kept[inside] = np.where(runs[run, 0] == document[inside], document[inside], inside)
        return cls(document[None], end[None], rows, rows, document, kept)

    @property
    def num_rows(self) -> int:
        """The number of rows that attend."""
        return len(self.rows)

    @property
    def num_keys(self) -> int:
        """The number of keys that are attended to."""
        return len(self.keys)

    @property
    def pairs(self) -> Int64Array:
        """How many keys each row sees, int64 [num_rows]."""
        counts: Int64Array = (self.end - self.start).sum(axis=0)
        return counts

    @cached_property
    def seen(self) -> Int64Array:
        """Where in the pack the keys stand that some row sees, int64 [n]: what context parallelism must bring here."""
        begins = np.bincount(self.start.ravel(), minlength=self.num_keys + 1)
        ends = np.bincount(self.end.ravel(), minlength=self.num_keys + 1)
        return self.keys[np.cumsum(begins - ends)[:-1] > 0]

    def of(self, rows: ArrayLike, keys: ArrayLike) -> AttentionTable:
        """The table of some rows against some keys, which are named by where they stand in the pack, ascending.

        Raises ArgumentError for rows that this table lacks, and for keys among which one is missing that a row sees.
        """
        some, held = np.asarray(rows, dtype=np.int64), np.asarray(keys, dtype=np.int64)
        at = np.searchsorted(self.rows, some)
        if len(some) and (self.num_rows == 0 or (self.rows[np.minimum(at, self.num_rows - 1)] != some).any()):
            raise ArgumentError("rows has one that the table does not have.")
        before = np.searchsorted(held, self.keys)  # keys that are held, of those before each key of the table
        before = np.concatenate([before, [np.searchsorted(held, self.keys[-1] + 1) if self.num_keys else 0]])
        start, end = before[self.start[:, at]], before[self.end[:, at]]
        kept = None if self.kept is None else self.kept[at]
        table = AttentionTable(start, end, some, held, self.document[at], kept)
        lacking = table.pairs != self.pairs[at]
        if lacking.any():
            row = int(some[np.argmax(lacking)])
            raise ArgumentError(f"keys lacks one that row {row} of the pack sees; `seen` has those that are needed.")
        return table

    def within(self, first: int, stop: int) -> AttentionTable:
        """Of whole documents in the rows first ... stop - 1, renumbered from 0. Errors: as of `of`.

        Example:
            >>> AttentionTable.packed([2, 3], causal=False).within(2, 5).end.tolist()
            [[3, 3, 3]]
        """
        table = self.of(np.arange(first, stop), np.arange(first, stop))
        kept = None if table.kept is None else table.kept - first
        places = (table.rows - first, table.keys - first, table.document - first)
        return AttentionTable(table.start, table.end, *places, kept)

    def windowed(self, window: int | None) -> AttentionTable:
        """Without the keys that stand `window` places or more before their row, also those of its own image (Gemma 3).

        Keys that are kept stay, as those of a prefix (PaliGemma 2).
        Applied twice, it does no more than once. None: the table itself. Cached.
        """
        if window is None:
            return self
        if window not in self._windowed:
            begin = self.rows - window + 1
            first = np.searchsorted(self.keys, begin if self.kept is None else np.minimum(begin, self.kept))
            start, end = np.maximum(self.start, first), np.maximum(self.end, first)
            self._windowed[window] = replace(self, start=start, end=end)
        return self._windowed[window]

    @cached_property
    def _windowed(self) -> dict[int, AttentionTable]:
        return {}

    def as_pack(self) -> tuple[Int64Array, bool] | None:
        """(offsets int64 [num_segments + 1], causal), if each row sees its segment, or that up to itself, and no more.

        None for every other table.
        """
        if len(self.start) != 1 or not np.array_equal(self.rows, self.keys):
            return None
        place, start, end = np.arange(self.num_rows), self.start[0], self.end[0]
        offsets = np.append(np.flatnonzero(start == place), self.num_rows)
        segment = np.cumsum(start == place) - 1
        if (segment < 0).any() or (start != offsets[segment]).any():
            return None
        if (end == place + 1).all():
            return offsets, True
        return (offsets, False) if (end == offsets[segment + 1]).all() else None

    def dense(self) -> BoolArray:
        """The mask itself, bool [num_rows, num_keys]: for tests, and for small tables."""
        key = np.arange(self.num_keys)
        inside = (self.start[:, :, None] <= key) & (key < self.end[:, :, None])
        mask: BoolArray = np.logical_or.reduce(inside, axis=0)
        return mask

    def pairs_of_blocks(self, block: int) -> Int64Array:
        """Pairs of (row, key) that attend, by blocks of `block` rows and of `block` keys.

        int64 [row blocks, key blocks]; the last of both may be shorter. O(num_rows + row blocks * key blocks): an
        interval adds a part of a block at both ends, and whole blocks between, which are a step up and a step down.
        """
        shape = -(-self.num_rows // block), -(-self.num_keys // block)
        width = shape[1] + 2
        row = np.arange(self.num_rows) // block * width
        sees = self.start < self.end
        base, start, end = np.broadcast_to(row, sees.shape)[sees], self.start[sees], self.end[sees]
        first, last = start // block, end // block
        at_first, at_last = base + first, base + last
        # In place: new pages of memory cost more than the sums.
        pairs = np.zeros(shape[0] * width, dtype=np.int64)
        np.add.at(pairs, at_first + 1, block)
        np.subtract.at(pairs, at_last, block)
        np.cumsum(pairs.reshape(-1, width), axis=1, out=pairs.reshape(-1, width))
        np.add.at(pairs, at_first, (first + 1) * block - start)
        np.add.at(pairs, at_last, end - last * block)
        return pairs.reshape(-1, width)[:, : shape[1]]


def _check_ascending(places: Int64Array, name: str) -> None:
    if (np.diff(places) <= 0).any():
        raise ArgumentError(f"{name} must ascend: places in the pack, each at most once.")
