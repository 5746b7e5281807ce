"""Which crops of an image stand behind it (Gemma 3's pan and scan; Gemma Team 2025, section 2.1)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from motet.core.arrays import Int64Array


@dataclass(frozen=True)
class CropRule:
    """An image that is much longer than wide, or wider than long, is cut into crops of one row or one column.

    least: pixels of a crop's shorter side. most: crops of an image. ratio: of an image's sides, at least.

    Example:
        >>> CropRule(least=256, most=4, ratio=1.2).sides(np.array([[1000, 400], [400, 900], [300, 280]])).tolist()
        [[3, 1], [1, 2], [0, 0]]
    """

    least: int
    most: int
    ratio: float

    def sides(self, raw: Int64Array) -> Int64Array:
        """(columns, rows) of the crops of each image, int64 [n, 2]; 0 where it has none. raw: (width, height)."""
        longer, shorter = raw.max(axis=1), raw.min(axis=1)
        aspect = longer / np.maximum(shorter, 1)
        count = np.minimum(np.floor(aspect + 0.5).astype(np.int64), longer // self.least)
        count = np.minimum(np.maximum(count, 2), self.most)
        has_crops = (aspect >= self.ratio) & (np.minimum(-(-longer // count), shorter) >= self.least)
        is_wide = raw[:, 0] >= raw[:, 1]
        sides = np.stack([np.where(is_wide, count, 1), np.where(is_wide, 1, count)], axis=1)
        return np.where(has_crops[:, None], sides, 0)
