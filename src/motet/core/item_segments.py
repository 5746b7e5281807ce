"""Segments of items: several lengths an item, where a module computes an item in parts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from motet.core.arrays import Int64Array
from motet.core.errors import ArgumentError


@dataclass(frozen=True, eq=False)
class ItemSegments:
    """The parts of items that a module computes like items of their own: tiles, frames, windows. A ragged array.

    No row attends beyond its segment, so the pairs of an item are the sum of its segments' squares, and not the square
    of their sum.

    length:  int64 [num_segments], item by item.
    offsets: int64 [num_items + 1], ascending from 0: item i has the segments offsets[i] ... offsets[i + 1] - 1.
    frames:  int64 [num_items], the equally many rows of each of which see no others even in layers that attend over
             whole items (`Attention.whole`); None: each item is one.
    Raises ArgumentError for offsets that are not these.

    Example:
        An image of two tiles and a thumbnail, and one that is a single tile:
        >>> tiles = ItemSegments.of([[1024, 1024, 256], [1024]])
        >>> tiles.summed(tiles.length).tolist(), tiles.summed(tiles.length**2).tolist()
        ([2304, 1024], [2162688, 1048576])
    """

    length: Int64Array
    offsets: Int64Array
    frames: Int64Array | None = None

    def __post_init__(self) -> None:
        ends = self.offsets
        if not len(ends) or ends[0] != 0 or ends[-1] != len(self.length) or (np.diff(ends) < 0).any():
            raise ArgumentError(f"offsets of segments must ascend from 0 to {len(self.length)}, their number.")

    @classmethod
    def of(cls, lengths: Iterable[Sequence[int] | Int64Array]) -> ItemSegments:
        """From the segments of each item."""
        columns = [np.asarray(each, dtype=np.int64) for each in lengths]
        return cls.counted(np.concatenate([np.zeros(0, np.int64), *columns]), np.array([len(each) for each in columns]))

    @classmethod
    def counted(cls, length: Int64Array, counts: Int64Array, frames: Int64Array | None = None) -> ItemSegments:
        """From all segments, item by item, and the number of segments of each item, int64 [num_items]."""
        return cls(length, np.concatenate([np.zeros(1, np.int64), np.cumsum(counts, dtype=np.int64)]), frames)

    @classmethod
    def whole(cls, length: Int64Array) -> ItemSegments:
        """Each item is one segment. length: int64 [num_items]."""
        return cls(length, np.arange(len(length) + 1))

    @classmethod
    def cut(cls, length: Int64Array, segment: int) -> ItemSegments:
        """Items cut after every `segment` rows; the rest is a shorter segment. length: int64 [num_items]."""
        counts = -(-length // segment)
        lengths = np.full(int(counts.sum()), segment, dtype=np.int64)
        cut = cls.counted(lengths, counts)
        has_segments = counts > 0
        lengths[cut.offsets[1:][has_segments] - 1] -= (counts * segment - length)[has_segments]
        return cut

    @classmethod
    def joined(cls, parts: Sequence[ItemSegments]) -> ItemSegments:
        """The items of all parts, one part after the other."""
        frames = None
        if any(part.frames is not None for part in parts):
            frames = np.concatenate(
                [np.ones_like(part.counts) if part.frames is None else part.frames for part in parts]
            )
        return cls.counted(
            np.concatenate([part.length for part in parts]), np.concatenate([part.counts for part in parts]), frames
        )

    @property
    def num_items(self) -> int:
        """The number of items."""
        return len(self.offsets) - 1

    @property
    def counts(self) -> Int64Array:
        """The number of segments of each item, int64 [num_items]."""
        return np.diff(self.offsets)

    @property
    def pattern(self) -> Int64Array:
        """A number for each item, int64 [num_items]: equal for items with equal segments and frames, in their order."""
        known: dict[bytes, int] = {}
        parts = np.split(self.length, self.offsets[1:-1]) if self.num_items else []
        frames = np.ones(len(parts), dtype=np.int64) if self.frames is None else self.frames
        keys = [part.tobytes() + count.tobytes() for part, count in zip(parts, frames)]
        return np.array([known.setdefault(key, len(known)) for key in keys], dtype=np.int64)

    def take(self, items: Int64Array) -> ItemSegments:
        """The given items, int64 [n], in this order. O(n + segments taken)."""
        counts = self.counts[items]
        first = self.offsets[items] - (np.cumsum(counts) - counts)
        frames = None if self.frames is None else self.frames[items]
        return self.counted(self.length[np.arange(counts.sum()) + np.repeat(first, counts)], counts, frames)

    def summed(self, amount: Int64Array) -> Int64Array:
        """The sum of each item's segments, [num_items]. amount: int64 [num_segments], or Python's own integers.

        Each item's sum must fit the type of `amount`; the sum of all items need not.
        """
        # Where the running sum of int64 passes 2^63 it goes on from -2^63, and differences are right all the same.
        before = np.concatenate([np.zeros(1, dtype=amount.dtype), np.cumsum(amount)])
        sums: Int64Array = before[self.offsets[1:]] - before[self.offsets[:-1]]
        return sums
