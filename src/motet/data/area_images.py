"""An image as Qwen's image processors prepare it: in its own aspect, with an area between two bounds.

Sizes and pixels are those of transformers' Qwen2VLImageProcessorPil (`smart_resize`). The values come from the model's
directory (`models/whole/processor.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from motet.core.arrays import BoolArray, Int64Array
from motet.data.images import ImageTransform

if TYPE_CHECKING:
    from PIL import Image

_MAX_ASPECT = 200
"""Processors raise an error for images that are longer."""


@dataclass(frozen=True)
class AreaImages(ImageTransform):
    """An image file to the patch rows of a model whose processor bounds areas.

    Each side becomes the nearest multiple of a block, patch_size * merge_size (half to even). An image whose area is
    then out of bounds is scaled to the bound first, and its sides are rounded to the inside.

    min_area, max_area: pixels. resample: Pillow's number of the filter: 3 is bicubic, 2 bilinear.

    Example:
        >>> transform = AreaImages(patch_size=14, merge_size=2, min_area=56 * 56, max_area=28 * 28 * 1280)
        >>> transform.sizes(np.array([[640, 480], [20, 10]])).tolist()  # patch rows and columns
        [[34, 46], [4, 6]]
    """

    min_area: int = 56 * 56
    max_area: int = 28 * 28 * 1280
    resample: int = 3

    _bounds: ClassVar[dict[str, tuple[float, float]]] = ImageTransform._bounds | {
        "min_area": (1, 2**28),
        "max_area": (1, 2**28),
    }

    def accepts(self, raw: Int64Array) -> BoolArray:
        """Which images are not too long for their width, bool [n]."""
        accepted: BoolArray = raw.max(axis=1) / raw.min(axis=1) <= _MAX_ASPECT
        return accepted

    def refusal(self, raw: tuple[int, int]) -> str:
        """Why an image is not accepted."""
        return f"has {raw[0]} x {raw[1]} pixels, which is longer than {_MAX_ASPECT} : 1; the model's processor stops"

    def pixels(self, raw: Int64Array) -> Int64Array:
        """(width, height) of each image, int64 [n, 2]. In float64, which rounds alike everywhere, as the processor."""
        sides = raw.astype(np.float64)
        nearest = np.rint(sides / self.block) * self.block
        area, made = sides.prod(axis=1, keepdims=True), nearest.prod(axis=1, keepdims=True)
        shrink, grow = np.sqrt(area / self.max_area), np.sqrt(self.min_area / area)
        smaller = np.maximum(self.block, np.floor(sides / shrink / self.block) * self.block)
        larger = np.ceil(sides * grow / self.block) * self.block
        chosen = np.where(made > self.max_area, smaller, np.where(made < self.min_area, larger, nearest))
        pixels: Int64Array = chosen.astype(np.int64)
        return pixels

    def _resized(self, image: Image.Image, target: tuple[int, int]) -> Image.Image:
        from PIL import Image

        return image if image.size == target else image.resize(target, Image.Resampling(self.resample))
