"""Siglip 2's vision tower on packed patches: Siglip's layers behind another embedding.

Its patches have their channels last, and its position table is resized as pictures are: bilinear, and with antialias
where an image has fewer patches than the table.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import interpolate, linear
from transformers import Siglip2VisionModel

from motet.core.errors import UserError
from motet.models.families.patches import FeatureLayer
from motet.models.families.siglip import SiglipEncoder


class Siglip2Encoder(SiglipEncoder):
    """feature_layer: as in `patches.taken_layers`. Raises UserError for a position table that is no square."""

    def __init__(self, model: Siglip2VisionModel, feature_layer: FeatureLayer = None) -> None:
        super().__init__(model, feature_layer)
        self.side = model.embeddings.position_embedding_size
        if self.side**2 != model.config.num_patches:
            raise UserError(f"num_patches is {model.config.num_patches}; it must be the square of a whole number")

    def _embedded(self, values: Tensor) -> Tensor:
        embedding, config = self.model.embeddings.patch_embedding, self.model.config
        weight = embedding.weight.unflatten(1, (config.patch_size, config.patch_size, config.num_channels))
        return linear(values, weight.permute(0, 3, 1, 2).flatten(1), embedding.bias)

    def _positions(self, sizes: Tensor) -> Tensor:
        table = self.model.embeddings.position_embedding.weight
        # Of channels that stand last torch makes other values, with antialias, for an image one patch wide.
        square = table.view(1, self.side, self.side, -1).permute(0, 3, 1, 2).contiguous()
        square = square.to(torch.promote_types(table.dtype, torch.float32))
        by_grid = {
            grid: interpolate(square, size=grid, mode="bilinear", align_corners=False, antialias=True)
            for grid in {(height, width) for height, width in sizes.tolist()}
        }
        rows = [by_grid[height, width][0].flatten(1).transpose(0, 1) for height, width in sizes.tolist()]
        return torch.cat(rows).to(table.dtype)
