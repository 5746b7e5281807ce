"""Dinov2 on packed patches: the patches after the last norm are rows; the class row is computed and left out."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import Dinov2Model

from motet.core.errors import UserError
from motet.cost.flops import FlopStage
from motet.models.attention import Segments
from motet.models.families.patches import add_class_rows, embed_patches, patch_positions
from motet.models.flops import layers_stage, product_stage


class Dinov2Encoder(nn.Module):
    """Rows are patches (channel, y, x), row-major; sizes are (patch rows, patch columns)."""

    def __init__(self, model: Dinov2Model) -> None:
        super().__init__()
        if model.config.drop_path_rate:
            raise UserError(
                "Dinov2's drop_path_rate must be 0: it drops whole batch entries, and packed images share one"
            )
        self.model = model
        self.output_dim = model.config.hidden_size
        if model.embeddings.mask_token is not None:
            # Stands for masked patches in Dinov2's own pre-training: no gradient would ever reach it.
            model.embeddings.mask_token.requires_grad_(False)

    @property
    def blocks(self) -> list[nn.Module]:
        return list(self.model.encoder.layer)

    def num_outputs(self, sizes: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.prod(sizes, axis=1)

    def flop_stages(self) -> tuple[FlopStage, ...]:
        return (
            product_stage(self.model.embeddings.patch_embeddings.projection),
            layers_stage(self.blocks, self.output_dim, extra_rows=1),
        )

    def forward(self, values: Tensor, sizes: Tensor) -> Tensor:
        grids = sizes.numpy()
        counts = self.num_outputs(grids)
        embeddings, table = self.model.embeddings, self.model.embeddings.position_embeddings[0]
        patches = embed_patches(embeddings.patch_embeddings.projection, values) + patch_positions(table[1:], grids)
        hidden, places = add_class_rows(patches, embeddings.cls_token[0, 0] + table[0], counts)
        hidden = embeddings.dropout(hidden)[None]
        segments = Segments.from_lengths(counts + 1)
        for layer in self.model.encoder.layer:
            hidden = layer(hidden, segments)
        return self.model.layernorm(hidden)[0].index_select(0, places)
