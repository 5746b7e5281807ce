"""Dinov2 on packed patches: the rows are the patches after the last norm or after a layer, without the class row."""

from __future__ import annotations

from torch import Tensor, nn
from transformers import Dinov2Model

from motet.core.errors import UserError
from motet.core.shapes import BIASES, Transformer, final_norm, patches
from motet.models.attention import PackedItems
from motet.models.context_items import SharedItemRows
from motet.models.families.patches import (
    FeatureLayer,
    PatchEncoder,
    add_class_rows,
    embed_patches,
    patch_positions,
    rows_here,
    without_class_rows,
    zero_image,
)
from motet.models.layers import LayerModules, any_trainable, unused_layer


def _attention(layer: nn.Module, hidden: Tensor, segments: PackedItems) -> Tensor:
    attended, _ = layer.attention(layer.norm1(hidden), attention_mask=segments)
    return layer.layer_scale1(attended) + hidden


def _mlp(layer: nn.Module, hidden: Tensor, segments: PackedItems) -> Tensor:
    return layer.layer_scale2(layer.mlp(layer.norm2(hidden))) + hidden


class Dinov2Encoder(PatchEncoder):
    """feature_layer: as in `patches.taken_layers`."""

    stack = "encoder.layer"
    class_rows = 1
    halves = (_attention, _mlp)

    def __init__(self, model: Dinov2Model, feature_layer: FeatureLayer = None) -> None:
        super().__init__(model, model.layernorm, feature_layer)
        if model.config.drop_path_rate:
            raise UserError(
                "Dinov2's drop_path_rate must be 0: it drops whole batch entries, and packed images share one"
            )
        if model.embeddings.mask_token is not None:
            # It stands for masked patches in Dinov2's own pre-training: it would never get a gradient.
            model.embeddings.mask_token.requires_grad_(False)

    def layers(self) -> list[LayerModules]:
        model, config = self.model, self.model.config
        hidden, embeddings = config.hidden_size, model.embeddings
        stem = patches(
            config.num_channels * config.patch_size**2,
            hidden,
            num_positions=embeddings.position_embeddings.shape[1],
            extra_parameters=hidden * (1 if embeddings.mask_token is None else 2),
            trainable=any_trainable(embeddings),
        )
        mlp = self.all_layers[0].mlp
        shape = Transformer(
            hidden,
            (mlp.down_proj if config.use_swiglu_ffn else mlp.fc2).in_features,
            config.num_attention_heads,
            gated=config.use_swiglu_ffn,
            activation="silu" if config.use_swiglu_ffn else config.hidden_act,
            biases=BIASES if config.qkv_bias else ("output", "mlp"),
            layer_scale=True,
        )
        norm = model.layernorm
        return [
            LayerModules(stem, (embeddings,)),
            *self.block_layers(shape),
            LayerModules(final_norm(hidden, extra_rows=1, trainable=any_trainable(norm)), (norm,))
            if self.normalised
            else unused_layer(norm, self.output_dim),
        ]

    def spare(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """The smallest image, a patch of zeros."""
        return zero_image(values, self.model.embeddings.patch_embeddings.projection)

    def enter(self, values: Tensor, sizes: Tensor, shared: SharedItemRows | None = None) -> Tensor:
        grids = sizes.numpy()
        counts = self.num_outputs(grids)
        embeddings, table = self.model.embeddings, self.model.embeddings.position_embeddings[0]
        patches = embed_patches(embeddings.patch_embeddings.projection, values) + rows_here(
            patch_positions(table[1:], grids), shared
        )
        return embeddings.dropout(add_class_rows(patches, embeddings.cls_token[0, 0] + table[0], counts, shared))

    def leave(self, hidden: Tensor, sizes: Tensor, shared: SharedItemRows | None = None) -> Tensor:
        hidden = self.model.layernorm(hidden) if self.normalised else hidden
        return without_class_rows(hidden, self.num_outputs(sizes.numpy()), shared=shared)
