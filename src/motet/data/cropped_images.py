"""An image as InternVL prepares it (Chen et al. 2024, "How far are we to GPT-4V?", section 3.2): dynamic resolution.

The image is resized, whatever its aspect, to the grid of square tiles whose aspect is nearest to its own, and cut into
them. Behind several tiles stands one more: the whole image, squeezed into a square. Grid and pixels are those of
transformers' processor on PIL and numpy.
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


@dataclass(frozen=True)
class CroppedImages(ImageTransform):
    """An image file to the patch rows of its tiles, one tile after the other, the squeezed image last.

    A size is (patch rows of all tiles one below the other, patch columns of a tile).

    tile:        side of a tile in pixels; what is less than a patch at its edges is left out.
    least, most: tiles of a grid.
    resample:    Pillow's number of the filter: 3 is bicubic.

    Example:
        >>> transform = CroppedImages(patch_size=14, tile=448)
        >>> transform.sizes(np.array([[1000, 500]])).tolist()  # two tiles and the whole image, of 32 x 32 patches
        [[96, 32]]
    """

    tile: int = 448
    least: int = 1
    most: int = 12
    resample: int = 3

    @cached_property
    def _grids(self) -> Int64Array:
        """(columns, rows) of each grid, those of fewer tiles first, int64 [num_grids, 2]."""
        sides = range(1, self.most + 1)
        grids = [(columns, rows) for columns in sides for rows in sides if self.least <= columns * rows <= self.most]
        return np.array(sorted(grids, key=lambda grid: grid[0] * grid[1]), dtype=np.int64).reshape(-1, 2)

    def _grid(self, raw: Int64Array) -> Int64Array:
        """(columns, rows) of each image's grid, int64 [n, 2]; O(n * grids).

        Of grids of one aspect a larger one is taken if the image has more than half of its pixels.
        """
        aspect, area = raw[:, 0] / raw[:, 1], raw.prod(axis=1)
        best, nearest = np.ones_like(raw), np.full(len(raw), np.inf)
        for columns, rows in self._grids.tolist():
            distance = np.abs(aspect - columns / rows)
            is_large = area > 0.5 * self.tile * self.tile * columns * rows
            better = (distance < nearest) | ((distance == nearest) & is_large)
            best = np.where(better[:, None], (columns, rows), best)
            nearest = np.where(better, distance, nearest)
        return best

    def sizes(self, raw: Int64Array) -> Int64Array:
        """(patch rows of all tiles, patch columns of a tile) of each image, int64 [n, 2]."""
        num_tiles = self._grid(raw).prod(axis=1)
        side = self.tile // self.patch_size
        return np.stack([(num_tiles + (num_tiles > 1)) * side, np.full_like(num_tiles, side)], axis=1)

    def rows_of(self, decoded: tuple[Image.Image, tuple[int, int]]) -> Media:
        """The rows of what `decode` returned."""
        return self(decoded[0])

    def __call__(self, image: Image.Image) -> Media:
        """Rows [num_tiles * patches of a tile, row_dim], a row in the order (channel, y, x); size as of the class."""
        from PIL import Image

        columns, rows = self._grid(np.array([image.size], dtype=np.int64))[0].tolist()
        image, resample = plain_image(image, "RGB"), Image.Resampling(self.resample)
        tiles = tiles_of(image.resize((columns * self.tile, rows * self.tile), resample), self.tile)
        if len(tiles) > 1:
            tiles.append(image.resize((self.tile, self.tile), resample))
        stacked = stack_of_tiles(tiles, self.patch_size)
        return self._rows(stacked, stacked.size)
