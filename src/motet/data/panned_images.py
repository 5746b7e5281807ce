"""An image as Gemma 3 prepares it with pan and scan: the whole image and crops of it, each squeezed into a square.

Crops and pixels are those of transformers' processor on PIL and numpy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from motet.core.arrays import Int64Array, UInt8Array
from motet.core.crops import CropRule
from motet.core.example import Media
from motet.data.anyres_images import stack_of_tiles
from motet.data.images import ImageTransform, plain_image

if TYPE_CHECKING:
    from PIL import Image

_CROPS = CropRule(least=256, most=4, ratio=1.2)


@dataclass(frozen=True)
class PannedImages(ImageTransform):
    """An image file to the patch rows of the whole image, and behind them those of its crops.

    A size is (squares, 1): one, and one for each crop.

    tile:     side of a square in pixels; what is less than a patch at its edges is left out.
    crops:    which crops an image has.
    resample: Pillow's number of the filter: 2 is bilinear.

    Example:
        >>> transform = PannedImages(patch_size=14, tile=896)
        >>> transform.sizes(np.array([[1000, 400], [300, 280]])).tolist()  # (width, height)
        [[4, 1], [1, 1]]
    """

    tile: int = 896
    crops: CropRule = _CROPS
    resample: int = 2

    def sizes(self, raw: Int64Array) -> Int64Array:
        """(squares, 1) of each image, int64 [n, 2]."""
        num_crops = self.crops.sides(raw).prod(axis=1)
        return np.stack([1 + num_crops, np.ones_like(num_crops)], axis=1)

    def rows_of(self, decoded: tuple[Image.Image, tuple[int, int]]) -> Media:
        """The rows of what `decode` returned."""
        return self(decoded[0])

    def __call__(self, image: Image.Image) -> Media:
        """Rows [squares * patches of a square, row_dim], a row in the order (channel, y, x); size as of the class."""
        squares = self._squares(image)
        stacked = stack_of_tiles(squares, self.patch_size)
        rows = self._rows(stacked, stacked.size)
        return Media(rows.values, np.array([len(squares), 1], dtype=np.int64), rows.pixels, rows.patches)

    def patches_of(self, image: Image.Image) -> UInt8Array:
        """The bytes of the rows, uint8 [squares * patches of a square, channels * patch_size**2]."""
        stacked = stack_of_tiles(self._squares(image), self.patch_size)
        return self._patches(stacked, stacked.size)

    def _squares(self, image: Image.Image) -> list[Image.Image]:
        from PIL import Image

        image, resample = plain_image(image, "RGB"), Image.Resampling(self.resample)
        across, down = self.crops.sides(np.array([image.size], dtype=np.int64))[0].tolist()
        parts = [image]
        width, height = (-(-side // max(count, 1)) for side, count in zip(image.size, (across, down)))
        for top in range(0, down * height, height):
            for left in range(0, across * width, width):
                # The last crop ends with the image.
                parts.append(image.crop((left, top, *np.minimum((left + width, top + height), image.size).tolist())))
        return [part.resize((self.tile, self.tile), resample) for part in parts]
