"""CLIP's vision tower on packed patches: the rows are a layer's patches; the class row is computed and left out.

As in HF's `last_hidden_state`, no norm follows the last layer: `post_layernorm` is for the pooled class row.
"""

from __future__ import annotations

from torch import Tensor
from transformers import CLIPVisionModel

from motet.core.shapes import Transformer, patches
from motet.models.context_items import SharedItemRows
from motet.models.families.patches import (
    FeatureLayer,
    PatchEncoder,
    add_class_rows,
    attention_half,
    embed_patches,
    mlp_half,
    patch_positions,
    rows_here,
    without_class_rows,
    zero_image,
)
from motet.models.layers import LayerModules, any_trainable, unused_layer


class ClipEncoder(PatchEncoder):
    """feature_layer: as in `patches.taken_layers`; LLaVA takes -2."""

    class_rows = 1
    halves = (attention_half, mlp_half)

    def __init__(self, model: CLIPVisionModel, feature_layer: FeatureLayer = None) -> None:
        super().__init__(model, model.post_layernorm, feature_layer)
        # This norm is for the pooled class row, which an MLLM does not use: it would never get a gradient.
        model.post_layernorm.requires_grad_(False)

    def layers(self) -> list[LayerModules]:
        model, config = self.model, self.model.config
        hidden, before = config.hidden_size, (model.embeddings, model.pre_layrnorm)
        stem = patches(
            config.num_channels * config.patch_size**2,
            hidden,
            bias=False,
            num_positions=model.embeddings.num_positions,
            extra_parameters=hidden,
            norm=True,
            trainable=any_trainable(*before),
        )
        shape = Transformer(hidden, config.intermediate_size, config.num_attention_heads, activation=config.hidden_act)
        return [
            LayerModules(stem, before),
            *self.block_layers(shape),
            unused_layer(model.post_layernorm, self.output_dim),
        ]

    def spare(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """The smallest image, a patch of zeros."""
        return zero_image(values, self.model.embeddings.patch_embedding)

    def enter(self, values: Tensor, sizes: Tensor, shared: SharedItemRows | None = None) -> Tensor:
        grids = sizes.numpy()
        counts = self.num_outputs(grids)
        embeddings, table = self.model.embeddings, self.model.embeddings.position_embedding.weight
        patches = embed_patches(embeddings.patch_embedding, values) + rows_here(
            patch_positions(table[1:], grids), shared
        )
        return self.model.pre_layrnorm(add_class_rows(patches, embeddings.class_embedding + table[0], counts, shared))

    def leave(self, hidden: Tensor, sizes: Tensor, shared: SharedItemRows | None = None) -> Tensor:
        return without_class_rows(hidden, self.num_outputs(sizes.numpy()), shared=shared)
