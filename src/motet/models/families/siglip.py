"""Siglip's vision tower on packed patches: the rows are all patches after the last norm or after a layer."""

from __future__ import annotations

from torch import Tensor
from transformers import SiglipVisionModel

from motet.core.shapes import Transformer, final_norm, patches
from motet.models.context_items import SharedItemRows
from motet.models.families.patches import (
    FeatureLayer,
    PatchEncoder,
    attention_half,
    embed_patches,
    mlp_half,
    patch_positions,
    rows_here,
    zero_image,
)
from motet.models.layers import LayerModules, any_trainable, unused_layer


class SiglipEncoder(PatchEncoder):
    """feature_layer: as in `patches.taken_layers`; LLaVA-OneVision takes -1."""

    halves = (attention_half, mlp_half)

    def __init__(self, model: SiglipVisionModel, feature_layer: FeatureLayer = None) -> None:
        super().__init__(model, model.post_layernorm, feature_layer)
        self.has_head = getattr(model, "use_head", False)  # Idefics3's tower has none.
        if self.has_head:
            # The head pools the patches into one row, which an MLLM does not use: it would never get a gradient.
            model.head.requires_grad_(False)

    def layers(self) -> list[LayerModules]:
        model, config = self.model, self.model.config
        hidden, embeddings = config.hidden_size, model.embeddings
        stem = patches(
            config.num_channels * config.patch_size**2,
            hidden,
            num_positions=len(embeddings.position_embedding.weight),
            trainable=any_trainable(embeddings),
        )
        norm = model.post_layernorm
        shape = Transformer(hidden, config.intermediate_size, config.num_attention_heads, activation=config.hidden_act)
        return [
            LayerModules(stem, (embeddings,)),
            *self.block_layers(shape),
            LayerModules(final_norm(hidden, trainable=any_trainable(norm)), (norm,))
            if self.normalised
            else unused_layer(norm, self.output_dim),
            *([unused_layer(model.head, self.output_dim)] if self.has_head else []),
        ]

    def spare(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """The smallest image, a patch of zeros."""
        return zero_image(values, self.model.embeddings.patch_embedding)

    def enter(self, values: Tensor, sizes: Tensor, shared: SharedItemRows | None = None) -> Tensor:
        return self._embedded(values) + rows_here(self._positions(sizes), shared)

    def _embedded(self, values: Tensor) -> Tensor:
        return embed_patches(self.model.embeddings.patch_embedding, values)

    def _positions(self, sizes: Tensor) -> Tensor:
        return patch_positions(self.model.embeddings.position_embedding.weight, sizes.numpy())

    def leave(self, hidden: Tensor, sizes: Tensor, shared: SharedItemRows | None = None) -> Tensor:
        return self.model.post_layernorm(hidden) if self.normalised else hidden
