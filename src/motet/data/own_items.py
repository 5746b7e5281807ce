"""Items of a modality of the user's own: the number of their rows from a header, and the rows."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import numpy as np

from motet.core.arrays import BoolArray, Int64Array
from motet.core.example import Media
from motet.core.modalities import OwnModality
from motet.data.media import MediaRef, Unusable

_MAX_ROWS = 2**31 - 1


@dataclass(frozen=True)
class OwnTransform:
    """What a file of the user's own makes of items: rows in a sequence.

    Example: `OwnTransform(own_modality("points", "points.py")).load(ref).values` are the rows of an item.
    """

    own: OwnModality

    @property
    def modality(self) -> str:
        """The modality's name."""
        return self.own.name

    @property
    def row_dim(self) -> int:
        """The width of a row."""
        return self.own.row_dim

    def sizes(self, raw: Int64Array) -> Int64Array:
        """Rows of each item, int64 [n, 1]. raw: int64 [n, 2], these and 0."""
        return np.asarray(raw, dtype=np.int64)[:, :1]

    def accepts(self, raw: Int64Array) -> BoolArray:
        """All items whose header could be read."""
        return np.ones(len(raw), dtype=bool)

    def refusal(self, raw: tuple[int, int]) -> str:
        """No item is refused."""
        raise AssertionError("no item is refused")

    def load(self, ref: MediaRef) -> Media:
        """The rows of an item, float32. Raises Unusable for what are no rows, and what the user's function raises."""
        with ref.open() as file:
            rows = np.asarray(self.own.load(file))
        if rows.dtype.kind not in "fiu" or rows.ndim != 2 or rows.shape[1] != self.row_dim:
            raise Unusable(
                f"becomes {rows.dtype} {list(rows.shape)} by load of {self.own.file.name}; it must be numbers "
                f"[rows, {self.row_dim}]"
            )
        return Media(np.ascontiguousarray(rows, dtype=np.float32), np.array([len(rows)], dtype=np.int64))


def read_own_header(own: OwnModality, ref: MediaRef) -> tuple[int, int]:
    """(rows, 0) of an item. Raises Unusable for another number, and what the user's function raises."""
    with ref.open() as file:
        num_rows: Any = own.read_header(file)
    try:
        num_rows = operator.index(num_rows)
    except TypeError:
        raise Unusable(f"has {num_rows!r} rows by read_header of {own.file.name}; it must be a whole number") from None
    if not 1 <= num_rows <= _MAX_ROWS:
        raise Unusable(f"has {num_rows:,} rows by read_header of {own.file.name}; it must have 1 to {_MAX_ROWS:,}")
    return num_rows, 0
