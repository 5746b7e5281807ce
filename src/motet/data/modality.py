"""What the examples of a dataset are to one phase: the transform of its items, and what follows from their sizes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from motet.core.arrays import Int64Array
from motet.core.example import ItemText
from motet.core.grid_positions import BEHIND_SIDE
from motet.core.item_segments import ItemSegments
from motet.data.transforms import Transform


@dataclass(frozen=True)
class Modality:
    """The transform of a modality, and functions of the sizes of its items, int64 [n, size_dim] -> int64 [n].

    num_tokens: rows that each item takes in the backbone's sequence; of items that read a turn 0.
    lengths:    how much of each item the encoder computes on.
    segments:   the segments of each item; None: each item is one.
    is_made:    a generator learns to make its items, which are those of answers; encoders do not read them then.
    max_turn:   the most rows of the turn that such a generator is given of each item; 0: it is given no turn.
    grids:      frames, rows and columns of each item's rows in the sequence, int64 [n, 3], where the backbone's
                positions are those of a grid; None where they are not.
    behind:     how positions go on behind those rows (`core/grid_positions.py`).
    item_text:  key of an item -> what stands in its place, where its rows come in several pieces; None: they are one
                run, those of this item or of all. Keys are the transform's `text_keys(raw)`, or else sizes.
    """

    transform: Transform
    num_tokens: Callable[[Int64Array], Int64Array]
    lengths: Callable[[Int64Array], Int64Array]
    segments: Callable[[Int64Array], ItemSegments | None] | None = None
    is_made: bool = False
    max_turn: int = 0
    grids: Callable[[Int64Array], Int64Array] | None = None
    behind: int = BEHIND_SIDE
    item_text: Callable[[tuple[int, ...]], ItemText | None] | None = None

    def texts(self, raw: Int64Array) -> tuple[list[ItemText | None], Int64Array]:
        """The texts of items, those that are alike once; and which of them each item has, int64 [n]. raw: headers."""
        if self.item_text is None or not len(raw):
            return [None], np.zeros(len(raw), dtype=np.int64)
        keys = getattr(self.transform, "text_keys", self.transform.sizes)(raw)
        alike, which = np.unique(keys, axis=0, return_inverse=True)
        return [self.item_text(tuple(key)) for key in alike.tolist()], which.reshape(-1)

    def num_marks(self, raw: Int64Array) -> Int64Array:
        """Tokens that stand between the rows of each item, int64 [n]. raw: from headers."""
        texts, which = self.texts(raw)
        return np.array([text.num_marks if text else 0 for text in texts])[which]
