"""What vision transformers with a position table share: images of any grid as packed patch rows."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import interpolate, linear


def embed_patches(convolution: nn.Conv2d | nn.Conv3d, rows: Tensor) -> Tensor:
    """A convolution whose stride is its kernel, on rows that each hold one patch as (channel, [time,] y, x)."""
    return linear(rows, convolution.weight.flatten(1), convolution.bias)


def patch_positions(table: Tensor, grids: NDArray[np.int64]) -> Tensor:
    """A square position table [side * side, dim] for images of any grid, int64 [num_images, 2] -> [sum(h * w), dim].

    Bicubic, as HF's `interpolate_pos_encoding` does it for one image, but never in less than float32. Each distinct
    grid is computed once.
    """
    side = round(table.shape[0] ** 0.5)
    square = table.reshape(1, side, side, -1).permute(0, 3, 1, 2)
    square = square.to(torch.promote_types(square.dtype, torch.float32))
    by_grid = {(side, side): table}
    for height, width in np.unique(grids, axis=0).tolist():
        if (height, width) != (side, side):
            resized = interpolate(square, size=(height, width), mode="bicubic", align_corners=False)
            by_grid[height, width] = resized[0].flatten(1).transpose(0, 1).to(table.dtype)
    return torch.cat([by_grid[height, width] for height, width in grids.tolist()])


def add_class_rows(rows: Tensor, class_row: Tensor, counts: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
    """Put one class row before the rows of each image: (rows [sum(counts + 1), dim], places of the old rows in it)."""
    num_images = len(counts)
    starts = np.cumsum(counts + 1) - (counts + 1)
    places = np.arange(counts.sum()) + np.repeat(np.arange(num_images), counts) + 1
    order = np.empty(counts.sum() + num_images, dtype=np.int64)
    order[starts] = np.arange(num_images)
    order[places] = num_images + np.arange(counts.sum())
    joined = torch.cat([class_row.expand(num_images, -1), rows])
    return joined.index_select(0, torch.from_numpy(order).to(rows.device)), torch.from_numpy(places).to(rows.device)
