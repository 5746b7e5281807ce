"""An image as AnyRes prepares it (LLaVA-NeXT, Liu et al. 2024; LLaVA-OneVision, Li et al. 2024, section 3.2).

The image comes to the canvas, of a list, that keeps most of its pixels; within it to the largest size of its own
aspect, in the middle, on black. The canvas is cut into square tiles. Before them stands one more tile: the whole image,
squeezed into a square. Canvas, sizes and pixels are those of transformers' processors on PIL and numpy.

LLaVA-OneVision takes an image beside others of its example otherwise: it is put on a square of one colour, and is one
tile.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from motet.core.arrays import BoolArray, Int64Array
from motet.core.example import Media
from motet.data.headers import MAX_PIXELS
from motet.data.images import ImageTransform, plain_image
from motet.data.media import OF_SEVERAL, MediaRef

if TYPE_CHECKING:
    from PIL import Image


@dataclass(frozen=True)
class AnyResImages(ImageTransform):
    """An image file to the patch rows of its tiles, one tile after the other, the squeezed image first.

    A size is int64 [4]: rows and columns of tiles, and rows and columns of patches of the canvas that the image covers,
    as LLaVA's unpadding counts them. All are 0 of an image on a square.

    tile:     side of a tile in pixels; what is less than a patch at its edges is left out.
    canvases: (height, width) of each, of whole tiles.
    resample: Pillow's number of the filter: 3 is bicubic.
    square:   (red, green, blue) of the square that an image beside others is put on; None: it is taken as one alone.

    Example:
        >>> transform = AnyResImages(patch_size=14, tile=336, canvases=((336, 672), (672, 336), (672, 672)))
        >>> transform.sizes(np.array([[640, 240]])).tolist()  # one row of two tiles; 18 of 24 rows of patches
        [[1, 2, 18, 48]]
    """

    tile: int = 336
    canvases: tuple[tuple[int, int], ...] = ((336, 336),)
    resample: int = 3
    square: tuple[int, int, int] | None = None

    @property
    def tells_several(self) -> bool:
        """As of `Transform`."""
        return self.square is not None

    def accepts(self, raw: Int64Array) -> BoolArray:
        """Which images fit a canvas, bool [n]; of one that is very long and thin nothing is left on any.

        Squares may have as many pixels as images.
        """
        squared, raw = _are_squared(raw), raw % OF_SEVERAL
        return np.where(squared, raw.max(axis=1) ** 2 <= MAX_PIXELS, self._best(raw)[1] > 0)

    def refusal(self, raw: tuple[int, int]) -> str:
        """Why an image fits no canvas, or no square."""
        width, height = raw[0], raw[1] % OF_SEVERAL
        if raw[1] != height:
            return (
                f"is {width:,} x {height:,} pixels, and beside other images it would be put on a square of "
                f"{max(width, height) ** 2:,}, more than {MAX_PIXELS:,}; scale it down"
            )
        return f"is {raw[0]} x {raw[1]} pixels, so long and thin that nothing of it is left on a canvas of tiles"

    def sizes(self, raw: Int64Array) -> Int64Array:
        """(tile rows, tile columns, patch rows, patch columns) of each image, int64 [n, 4]; O(n * canvases)."""
        squared, raw = _are_squared(raw), raw % OF_SEVERAL
        tiles = np.array(self.canvases, dtype=np.int64)[self._best(raw)[0]] // self.tile
        sides = tiles * (self.tile // self.patch_size)
        return np.concatenate([tiles, sides - 2 * _margins(raw, sides)], axis=1) * ~squared[:, None]

    def _best(self, raw: Int64Array) -> tuple[Int64Array, Int64Array]:
        """The canvas of each image, int64 [n], and the pixels that are left on it, int64 [n].

        The first of those with most pixels left, and of these with the fewest that are wasted.
        """
        width, height = raw[:, 0], raw[:, 1]
        best, left, wasted = (np.zeros(len(raw), dtype=np.int64) for _ in range(3))
        for number, (rows, columns) in enumerate(self.canvases):
            scale = np.minimum(columns / width, rows / height)
            scaled = (width * scale).astype(np.int64) * (height * scale).astype(np.int64)
            pixels = np.minimum(scaled, width * height)
            waste = rows * columns - pixels
            better = (pixels > left) | ((pixels == left) & (pixels > 0) & (waste < wasted))
            best, left, wasted = (
                np.where(better, new, old) for new, old in ((number, best), (pixels, left), (waste, wasted))
            )
        return best, left

    def decode(self, ref: MediaRef) -> tuple[Image.Image, tuple[int, int]]:
        """The image, upright, and its (width, height), with OF_SEVERAL as in `ref`. Raises as `load` does."""
        if ref.raw is None:
            return super().decode(ref)
        several, height = divmod(ref.raw[1], OF_SEVERAL)
        image, (width, height) = super().decode(replace(ref, raw=(ref.raw[0], height)))
        return image, (width, height + several * OF_SEVERAL)

    def rows_of(self, decoded: tuple[Image.Image, tuple[int, int]]) -> Media:
        """The rows of what `decode` returned."""
        image, (_, height) = decoded
        return self(image) if height < OF_SEVERAL else self._on_square(image)

    def __call__(self, image: Image.Image) -> Media:
        """Rows [num_tiles * patches of a tile, row_dim], a row in the order (channel, y, x); size as of the class."""
        from PIL import Image

        raw = np.array([image.size], dtype=np.int64)
        image, size, resample = plain_image(image, "RGB"), self.sizes(raw)[0], Image.Resampling(self.resample)
        height, width = self.canvases[self._best(raw)[0][0]]
        scaled = image.resize(_within(image.size, width, height), resample)
        canvas = Image.new("RGB", (width, height))
        canvas.paste(scaled, ((width - scaled.width) // 2, (height - scaled.height) // 2))
        squeezed = image.resize((self.tile, self.tile), resample)
        return self._stacked([squeezed, *tiles_of(canvas, self.tile)], size)

    def _on_square(self, image: Image.Image) -> Media:
        """The same of an image beside others: rows [patches of a tile, row_dim]."""
        from PIL import Image

        assert self.square is not None, "an image beside others is told of, and there is no square for it"
        image, side = plain_image(image, "RGB"), max(image.size)
        square = Image.new("RGB", (side, side), self.square)
        square.paste(image, ((side - image.width) // 2, (side - image.height) // 2))
        tile = square.resize((self.tile, self.tile), Image.Resampling(self.resample))
        return self._stacked([tile], np.zeros(4, dtype=np.int64))

    def _stacked(self, tiles: list[Image.Image], size: Int64Array) -> Media:
        stacked = stack_of_tiles(tiles, self.patch_size)
        rows = self._rows(stacked, stacked.size)
        return Media(rows.values, size, rows.pixels, rows.patches)


def _are_squared(raw: Int64Array) -> BoolArray:
    """Which images are put on squares, bool [n]."""
    return np.asarray(raw[:, 1] >= OF_SEVERAL)


def tiles_of(image: Image.Image, tile: int) -> list[Image.Image]:
    """The square tiles of an image of whole tiles, row by row."""
    corners = [(x, y) for y in range(0, image.height, tile) for x in range(0, image.width, tile)]
    return [image.crop((x, y, x + tile, y + tile)) for x, y in corners]


def stack_of_tiles(tiles: list[Image.Image], patch_size: int) -> Image.Image:
    """Whole patches of tiles one below the other: in raster order they are those of tile after tile."""
    from PIL import Image

    tile = tiles[0].width - tiles[0].width % patch_size
    stacked = Image.new(tiles[0].mode, (tile, tile * len(tiles)))
    for number, each in enumerate(tiles):
        stacked.paste(each.crop((0, 0, tile, tile)), (0, number * tile))
    return stacked


def _within(size: tuple[int, int], width: int, height: int) -> tuple[int, int]:
    """The largest (width, height) of the same aspect on a canvas."""
    across, down = width / size[0], height / size[1]
    if across < down:
        return width, min(math.ceil(size[1] * across), height)
    return min(math.ceil(size[0] * down), width), height


def _margins(raw: Int64Array, sides: Int64Array) -> Int64Array:
    """Patch rows above the image and patch columns beside it on its canvas, int64 [n, 2]; one of each pair is 0.

    raw: (width, height) of images; sides: patch rows and columns of their canvases. In floats, and rounded to 7 digits,
    as transformers counts them.
    """
    width, height = raw.T.astype(np.float64)
    rows, columns = sides.T
    is_wide = width / height > columns / rows
    own_rows = np.round(height * (columns / width), 7).astype(np.int64)
    own_columns = np.round(width * (rows / height), 7).astype(np.int64)
    above = np.where(is_wide, (rows - own_rows) // 2, 0)
    beside = np.where(is_wide, 0, (columns - own_columns) // 2)
    return np.stack([above, beside], axis=1)
