"""The vision tower of Idefics3 and SmolVLM on packed patches: Siglip's layers, positions by fractions of sides."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers.models.idefics3.modeling_idefics3 import Idefics3VisionTransformer

from motet.models.families.patches import FeatureLayer
from motet.models.families.siglip import SiglipEncoder
from motet.on_device import on_device


class Idefics3Tower(SiglipEncoder):
    """feature_layer: as in `patches.taken_layers`.

    A patch has the row of the position table that lies at the same fraction of the sides (NaViT, Dehghani et al. 2023,
    section 3.1), as transformers rounds it.
    """

    def __init__(self, model: Idefics3VisionTransformer, feature_layer: FeatureLayer = None) -> None:
        super().__init__(model, feature_layer)
        self.side = model.embeddings.num_patches_per_side

    def _positions(self, sizes: Tensor) -> Tensor:
        by_grid = {grid: self._rows_of(*grid) for grid in {(height, width) for height, width in sizes.tolist()}}
        rows = torch.cat([by_grid[height, width] for height, width in sizes.tolist()])
        table = self.model.embeddings.position_embedding.weight
        return table[on_device(rows, table.device)]

    def _rows_of(self, height: int, width: int) -> Tensor:
        """The row of the table of each patch, int64 [height * width]."""
        down, across = (self._steps(count) for count in (height, width))
        return (down[:, None] * self.side + across).flatten()

    def _steps(self, count: int) -> Tensor:
        """Where the patches of one side stand on the table's, int64 [count].

        In float32, as there: a fraction that rounds to less than its bound stands one step before it.
        """
        bounds = torch.arange(1 / self.side, 1.0, 1 / self.side, dtype=torch.float32)
        fractions = torch.arange(count, dtype=torch.float32) * (1.0 / torch.tensor(count))
        return torch.bucketize(fractions.clamp(max=1.0 - 1e-6), bounds, right=True)
