"""An image as Llama 3.2 Vision prepares it (Dubey et al. 2024, section 7.1): on a canvas of tiles, from its corner.

The canvas is that on which the image is scaled up least, or, if it is larger than all, scaled down least; the image is
made no larger than itself, but for sides that are shorter than a tile. What lacks to the canvas is black. Canvas and
pixels are those of transformers' processor on PIL and numpy.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from motet.core.arrays import Int64Array
from motet.core.example import Media
from motet.data.anyres_images import stack_of_tiles, tiles_of
from motet.data.images import ImageTransform, plain_image

if TYPE_CHECKING:
    from PIL import Image


def canvas_sides(most: int) -> tuple[tuple[int, int], ...]:
    """(rows, columns) of each canvas of at most so many tiles, in the order in which transformers numbers them.

    Example:
        >>> canvas_sides(4)
        ((1, 1), (1, 2), (1, 3), (1, 4), (2, 1), (2, 2), (3, 1), (4, 1))
    """
    sides = range(1, most + 1)
    return tuple((rows, columns) for rows in sides for columns in sides if rows * columns <= most)


@dataclass(frozen=True)
class CanvasImages(ImageTransform):
    """An image file to the patch rows of its tiles, one tile after the other.

    A size is (rows, columns) of tiles.

    tile:     side of a tile in pixels; what is less than a patch at its edges is left out.
    most:     tiles of a canvas.
    resample: Pillow's number of the filter: 2 is bilinear.

    Example:
        >>> transform = CanvasImages(patch_size=14, tile=560)
        >>> transform.sizes(np.array([[1000, 500], [300, 200]])).tolist()  # (width, height)
        [[1, 2], [1, 1]]
    """

    tile: int = 560
    most: int = 4
    resample: int = 2

    @cached_property
    def _sides(self) -> Int64Array:
        return np.array(canvas_sides(self.most), dtype=np.int64)

    def sizes(self, raw: Int64Array) -> Int64Array:
        """(rows, columns) of tiles of each image, int64 [n, 2]; O(n * canvases).

        Of canvases on which an image has the same scale, that of the fewest tiles; of these the first.
        """
        scale = (self._sides[:, ::-1] * self.tile / raw[:, None]).min(axis=2)
        goes_up = scale >= 1
        least_up = np.where(goes_up, scale, np.inf).min(axis=1)
        chosen = np.where(goes_up.any(axis=1), least_up, scale.max(axis=1))
        area = np.where(scale == chosen[:, None], self._sides.prod(axis=1), np.iinfo(np.int64).max)
        return self._sides[area.argmin(axis=1)]

    def _fitted(self, size: tuple[int, int], canvas: tuple[int, int]) -> tuple[int, int]:
        """(width, height) to which an image is resized on a canvas, all in pixels."""
        (width, height), (widest, highest) = size, canvas
        most = min(max(width, self.tile), widest), min(max(height, self.tile), highest)
        across, down = most[0] / width, most[1] / height
        if across < down:
            return most[0], min(int(height * across) or 1, most[1])
        return min(int(width * down) or 1, most[0]), most[1]

    def rows_of(self, decoded: tuple[Image.Image, tuple[int, int]]) -> Media:
        """The rows of what `decode` returned."""
        return self(decoded[0])

    def __call__(self, image: Image.Image) -> Media:
        """Rows [num_tiles * patches of a tile, row_dim], a row in the order (channel, y, x); size as of the class."""
        from PIL import Image

        size = self.sizes(np.array([image.size], dtype=np.int64))[0]
        canvas = Image.new("RGB", tuple((size[::-1] * self.tile).tolist()))
        fitted = self._fitted(image.size, canvas.size)
        canvas.paste(plain_image(image, "RGB").resize(fitted, Image.Resampling(self.resample)), (0, 0))
        stacked = stack_of_tiles(tiles_of(canvas, self.tile), self.patch_size)
        rows = self._rows(stacked, stacked.size)
        return Media(rows.values, size, rows.pixels, rows.patches)
