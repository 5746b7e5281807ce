"""Pixtral's vision tower on packed patches: images of any grid, whose rows turn with their row and their column."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PixtralVisionModel

from motet.core.shapes import Transformer, patches
from motet.models.attention import PackedItems
from motet.models.context_items import SharedItemRows
from motet.models.exact import keep_float64
from motet.models.families.patches import FeatureLayer, PatchEncoder, embed_patches, zero_image
from motet.models.families.qwen2_vl import patch_coordinates
from motet.models.layers import LayerModules, any_trainable
from motet.on_device import on_device


def _attention(layer: nn.Module, hidden: Tensor, segments: PackedItems, **turns: Any) -> Tensor:
    attended, _ = layer.attention(layer.attention_norm(hidden), attention_mask=segments, **turns)
    return hidden + attended


def _mlp(layer: nn.Module, hidden: Tensor, segments: PackedItems, **turns: Any) -> Tensor:
    return hidden + layer.feed_forward(layer.ffn_norm(hidden))


class PixtralEncoder(PatchEncoder):
    """feature_layer: as in `patches.taken_layers`; no norm stands behind the layers."""

    stack = "transformer.layers"
    halves = (_attention, _mlp)

    def __init__(self, model: PixtralVisionModel, feature_layer: FeatureLayer = None) -> None:
        super().__init__(model, nn.Identity(), feature_layer)
        keep_float64(model)

    def layers(self) -> list[LayerModules]:
        model, config = self.model, self.model.config
        hidden, before = config.hidden_size, (model.patch_conv, model.ln_pre)
        row_dim = config.num_channels * config.patch_size**2
        stem = patches(row_dim, hidden, bias=False, extra_parameters=hidden, trainable=any_trainable(*before))
        shape = Transformer(
            hidden,
            config.intermediate_size,
            config.num_attention_heads,
            gated=True,
            activation=config.hidden_act,
            norm="rms",
            biases=(),
        )
        return [
            LayerModules(stem, before),
            *self.block_layers(shape),
        ]

    def spare(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """The smallest image, a patch of zeros."""
        return zero_image(values, self.model.patch_conv)

    def enter(self, values: Tensor, sizes: Tensor, shared: SharedItemRows | None = None) -> Tensor:
        return self.model.ln_pre(embed_patches(self.model.patch_conv, values))

    def turns(self, sizes: Tensor, hidden: Tensor, shared: SharedItemRows | None) -> dict[str, Any]:
        """Every second frequency turns with the row of a patch, the others with its column."""
        places = patch_coordinates(sizes.numpy(), 1)[slice(None) if shared is None else shared.own]
        frequencies = self.model.patch_positional_embedding.inv_freq
        frequencies = frequencies.to(torch.promote_types(hidden.dtype, torch.float32)).view(2, -1)
        angles = (on_device(places, hidden.device)[:, :, None] * frequencies).flatten(1).repeat(1, 2)
        return {"position_embeddings": (angles.cos().to(hidden.dtype), angles.sin().to(hidden.dtype))}

    def leave(self, hidden: Tensor, sizes: Tensor, shared: SharedItemRows | None = None) -> Tensor:
        return hidden
