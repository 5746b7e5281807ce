"""Siglip's vision tower on packed patches: every patch after the last norm is a row."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import SiglipVisionModel

from motet.core.shapes import Transformer, final_norm, patches
from motet.models.attention import Segments
from motet.models.families.patches import embed_patches, patch_positions
from motet.models.layers import LayerModules, trains, unused_layer


class SiglipEncoder(nn.Module):
    """Rows are patches (channel, y, x), row-major; sizes are (patch rows, patch columns)."""

    def __init__(self, model: SiglipVisionModel) -> None:
        super().__init__()
        self.model = model
        self.output_dim = model.config.hidden_size
        if model.use_head:
            # Pools the patches into one row, which an MLLM does not use: no gradient would ever reach it.
            model.head.requires_grad_(False)

    @property
    def blocks(self) -> list[nn.Module]:
        return list(self.model.encoder.layers)

    def num_outputs(self, sizes: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.prod(sizes, axis=1)

    def layers(self) -> list[LayerModules]:
        model, config = self.model, self.model.config
        hidden, embeddings = config.hidden_size, model.embeddings
        stem = patches(
            config.num_channels * config.patch_size**2,
            hidden,
            num_positions=embeddings.num_positions,
            trained=trains(embeddings),
        )
        shape = Transformer(hidden, config.intermediate_size, config.num_attention_heads, activation=config.hidden_act)
        return [
            LayerModules(stem, (embeddings,)),
            *(LayerModules(shape.layer(trained=trains(block)), (block,)) for block in self.blocks),
            LayerModules(final_norm(hidden, trained=trains(model.post_layernorm)), (model.post_layernorm,)),
            *([unused_layer(model.head, hidden)] if model.use_head else []),
        ]

    def forward(self, values: Tensor, sizes: Tensor) -> Tensor:
        grids = sizes.numpy()
        embeddings = self.model.embeddings
        hidden = embed_patches(embeddings.patch_embedding, values)
        hidden = (hidden + patch_positions(embeddings.position_embedding.weight, grids))[None]
        segments = Segments.from_lengths(self.num_outputs(grids))
        for layer in self.model.encoder.layers:
            hidden = layer(hidden, segments)
        return self.model.post_layernorm(hidden)[0]
