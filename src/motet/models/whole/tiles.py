"""Images of several tiles: each tile is an item of the tower, and what its rows become behind the projector."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate

from motet.core.arrays import BoolArray, Int64Array

_LEAST_SHRINK = 1.1
"""LLaVA-OneVision shrinks a raster only if its sides become shorter by more than this factor."""


class Tiles:
    """A callback before a tower: the patches of an image's tiles, one tile after the other, are items of their own.

    side:   patches of a tile's side. tile: the size of every tile, int64 [1, 2].
    counts: sizes of images -> tiles of each, int64 [num_images].

    Example:
        >>> tiles = Tiles(2, lambda sizes: sizes[:, 0])
        >>> seen, counts = tiles.items(np.array([[3], [1]]))
        >>> seen.tolist(), counts.tolist()
        ([[2, 2], [2, 2], [2, 2], [2, 2]], [3, 1])
    """

    def __init__(self, side: int, counts: Callable[[Int64Array], Int64Array]) -> None:
        self.side, self.counts = side, counts
        self.tile = np.full((1, 2), side, dtype=np.int64)

    def items(self, sizes: Int64Array) -> tuple[Int64Array, Int64Array]:
        """The size of every tile, int64 [num_tiles, 2], and the tiles of each image, int64 [num_images]."""
        counts = self.counts(sizes)
        return self.tile.repeat(int(counts.sum()), axis=0), counts

    def num_values(self, sizes: Int64Array) -> Int64Array:
        """Patch rows of each image, int64 [num_images]."""
        return self.counts(sizes) * self.side**2

    def __call__(self, values: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor]:
        return values, torch.from_numpy(self.items(sizes.numpy())[0])


def anyres_counts(sizes: Int64Array) -> Int64Array:
    """Tiles of each image of `AnyResImages`, with the whole image, or frames of a video, int64 [num_items]."""
    return np.where(_are_videos(sizes), sizes[:, 0], 1 + sizes[:, 0] * sizes[:, 1])


def _are_videos(sizes: Int64Array) -> BoolArray:
    """Which sizes are those that `AnyResVideos` has of videos, bool [num_items]."""
    return np.asarray((sizes[:, 1] == 0) & (sizes[:, 0] > 0))


def _are_squared(sizes: Int64Array) -> BoolArray:
    """Which sizes are those that `AnyResImages` has of images on squares, bool [num_items]."""
    return np.asarray((sizes == 0).all(axis=1))


class Newlines(nn.Module):
    """A callback behind a projector: the tiles' rows as one raster without margins, a learned row behind each line.

    (LLaVA-NeXT's "spatial_unpad".) The squeezed image's rows come first. Sizes are those of `AnyResVideos`: a video's
    frames are resampled to half as many rows and columns each, without newlines, and one stands behind the last. One
    stands behind the rows of an image on a square.

    dim:   width of a row. side: rows of a tile's side.
    most:  in how many tiles' rows the raster must fit, or else it is resampled to fewer (LLaVA-OneVision's
           "anyres_max_9" has 9); None: in any number.

    Example:
        >>> Newlines(8, side=24).num_rows(np.array([[1, 2, 18, 48]])).tolist()  # 24 * 24 + 18 * (48 + 1)
        [1458]
    """

    def __init__(self, dim: int, side: int, most: int | None = None) -> None:
        super().__init__()
        self.side, self.most = side, most
        self.image_newline = nn.Parameter(torch.zeros(dim))

    def num_rows(self, sizes: Int64Array) -> Int64Array:
        """Rows of each image, int64 [num_images]."""
        rows, columns = self._rasters(sizes).T
        of_videos = sizes[:, 0] * self._half**2 + 1
        of_images = self.side**2 + np.where(_are_squared(sizes), 1, rows * (columns + 1))
        return np.where(_are_videos(sizes), of_videos, of_images)

    @property
    def _half(self) -> int:
        """Rows and columns of a video's frame."""
        return -(-self.side // 2)

    def _rasters(self, sizes: Int64Array) -> Int64Array:
        """Rows and columns of each raster without margins and newlines, int64 [num_images, 2]."""
        kept = sizes[:, 2:]
        if self.most is None:
            return kept
        factor = np.sqrt(kept.prod(axis=1, keepdims=True) / (self.most * self.side**2))
        return np.where(factor > _LEAST_SHRINK, kept // np.maximum(factor, 1), kept).astype(np.int64)

    def forward(self, rows: Tensor, sizes: Tensor) -> Tensor:
        """rows [sum(tiles) * side**2, dim] -> [sum(num_rows), dim]."""
        on_host, tile = sizes.numpy(), self.side**2
        images = rows.split((anyres_counts(on_host) * tile).tolist())
        lines = []
        for image, size, raster in zip(images, on_host.tolist(), self._rasters(on_host).tolist(), strict=True):
            if not size[1]:
                lines += [self._frames(image) if size[0] else image, self.image_newline[None]]
                continue
            lines += [image[:tile], self._lines(image[tile:], size, raster)]
        return torch.cat(lines)

    def _frames(self, rows: Tensor) -> Tensor:
        """The rows of a video's frames, resampled, [frames * half**2, dim]."""
        frames = rows.reshape(-1, self.side, self.side, rows.shape[1]).movedim(-1, 1)
        return interpolate(frames, (self._half, self._half), mode="bilinear").movedim(1, -1).flatten(0, 2)

    def _lines(self, rows: Tensor, size: list[int], raster: list[int]) -> Tensor:
        """The rows of an image's tiles as lines, [raster rows * (raster columns + 1), dim]."""
        down, across, *kept = size
        tiles = rows.reshape(down, across, self.side, self.side, -1).transpose(1, 2)
        whole = tiles.reshape(down * self.side, across * self.side, -1)
        above, beside = ((side - own) // 2 for side, own in zip(whole.shape, kept))
        image = whole[above : above + kept[0], beside : beside + kept[1]]
        if raster != kept:
            image = interpolate(image.movedim(-1, 0)[None], raster, mode="bilinear")[0].movedim(0, -1)
        newlines = self.image_newline.expand(raster[0], 1, -1)
        return torch.cat([image, newlines], dim=1).flatten(0, 1)
