"""An image as Idefics3 prepares it (Laurençon et al. 2024, section 3.2): resized to whole tiles, and cut into them.

Its longer side comes to a given length, with the same aspect; then both sides come to whole tiles. Behind the tiles
stands one more: the whole image, squeezed into a square. Sizes and pixels are those of transformers' processors on PIL
and numpy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from motet.core.arrays import Int64Array, UInt8Array
from motet.core.example import Media
from motet.data.anyres_images import stack_of_tiles, tiles_of
from motet.data.images import ImageTransform, plain_image

if TYPE_CHECKING:
    from PIL import Image

_LONGEST = 4096
"""No side is resized to more pixels than this before it comes to whole tiles."""


@dataclass(frozen=True)
class SplitImages(ImageTransform):
    """An image file to the patch rows of its tiles, one tile after the other, the squeezed image last.

    A size is (rows, columns) of tiles, the squeezed one not counted; (1, 1) is that one alone.

    tile:     side of a tile in pixels; what is less than a patch at its edges is left out.
    longest:  pixels that the longer side is resized to.
    splits:   whether images are cut; else each is squeezed into one tile.
    resample: Pillow's number of the filter: 1 is Lanczos.

    Example:
        >>> transform = SplitImages(patch_size=14, tile=364, longest=728)
        >>> transform.sizes(np.array([[1000, 500], [1000, 900]])).tolist()
        [[1, 2], [2, 2]]
    """

    tile: int = 364
    longest: int = 1456
    splits: bool = True
    resample: int = 1

    def sizes(self, raw: Int64Array) -> Int64Array:
        """(tile rows, tile columns) of each image, int64 [n, 2]."""
        return self._whole_tiles(self._scaled(raw))[:, ::-1] // self.tile

    def _scaled(self, raw: Int64Array) -> Int64Array:
        """(width, height) of each image, with its longer side resized, int64 [n, 2]."""
        scaled = _by_longer_side(raw, np.full(len(raw), self.longest))
        shorter = np.arange(2) == np.where(raw[:, 0] >= raw[:, 1], 1, 0)[:, None]
        scaled = np.maximum(scaled + shorter * scaled % 2, 1)
        bounded = np.maximum(_by_longer_side(scaled, np.full(len(raw), _LONGEST)), 1)
        return np.where(scaled.max(axis=1, keepdims=True) > _LONGEST, bounded, scaled)

    def _whole_tiles(self, scaled: Int64Array) -> Int64Array:
        """(width, height) of each image as it is cut, int64 [n, 2]."""
        if not self.splits:
            return np.full_like(scaled, self.tile)
        longer = -(-scaled.max(axis=1) // self.tile) * self.tile
        return -(-_by_longer_side(scaled, longer) // self.tile) * self.tile

    def rows_of(self, decoded: tuple[Image.Image, tuple[int, int]]) -> Media:
        """The rows of what `decode` returned."""
        return self(decoded[0])

    def __call__(self, image: Image.Image) -> Media:
        """Rows [num_tiles * patches of a tile, row_dim], a row in the order (channel, y, x); size as of the class."""
        tiles, size = self._cut(image)
        stacked = stack_of_tiles(tiles, self.patch_size)
        rows = self._rows(stacked, stacked.size)
        return Media(rows.values, size, rows.pixels, rows.patches)

    def patches_of(self, image: Image.Image) -> UInt8Array:
        """The bytes of the rows, uint8 [num_tiles * patches of a tile, channels * patch_size**2]."""
        stacked = stack_of_tiles(self._cut(image)[0], self.patch_size)
        return self._patches(stacked, stacked.size)

    def _cut(self, image: Image.Image) -> tuple[list[Image.Image], Int64Array]:
        """The tiles of an image, and its size."""
        from PIL import Image

        image, resample = plain_image(image, "RGB"), Image.Resampling(self.resample)
        for target in (scaled := self._scaled(np.array([image.size], dtype=np.int64)), self._whole_tiles(scaled)):
            image = image.resize(tuple(target[0].tolist()), resample)
        size = np.array(image.size[::-1], dtype=np.int64) // self.tile
        tiles = tiles_of(image, self.tile)
        if len(tiles) > 1:
            tiles.append(image.resize((self.tile, self.tile), resample))
        return tiles, size


def _by_longer_side(sizes: Int64Array, longer: Int64Array) -> Int64Array:
    """(width, height) of each image, with the longer side so long, and the other cut to whole pixels, int64 [n, 2]."""
    width, height = sizes.T
    aspect = width / height
    wide = np.stack([longer, (longer / aspect).astype(np.int64)], axis=1)
    high = np.stack([(longer * aspect).astype(np.int64), longer], axis=1)
    return np.where((width >= height)[:, None], wide, high)
