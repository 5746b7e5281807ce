"""Dinov3 on packed patches: the rows are the patches after the last norm or after a layer.

A class row and registers stand before the patches of each image, see them and are left out. Patches turn with their
place in the image, from -1 to 1 along each side, whatever its size; class row and registers do not turn.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import DINOv3ViTModel

from motet.core.errors import UserError
from motet.core.shapes import Transformer, final_norm, patches
from motet.models.attention import PackedItems
from motet.models.context_items import SharedItemRows
from motet.models.families.patches import (
    FeatureLayer,
    PatchEncoder,
    add_class_rows,
    class_numbers,
    embed_patches,
    rows_here,
    without_class_rows,
    zero_image,
)
from motet.models.families.qwen2_vl import patch_coordinates
from motet.models.layers import LayerModules, any_trainable, unused_layer
from motet.on_device import on_device

_NOTHING_DRAWN = {"pos_embed_shift": 0, "pos_embed_jitter": 1, "pos_embed_rescale": 1, "drop_path_rate": 0}
"""Option -> the value at which training draws nothing, as None does."""


def _attention(layer: nn.Module, hidden: Tensor, segments: PackedItems, **turns: Any) -> Tensor:
    attended, _ = layer.attention(layer.norm1(hidden), attention_mask=segments, **turns)
    return layer.layer_scale1(attended) + hidden


def _mlp(layer: nn.Module, hidden: Tensor, segments: PackedItems, **turns: Any) -> Tensor:
    return layer.layer_scale2(layer.mlp(layer.norm2(hidden))) + hidden


class Dinov3Encoder(PatchEncoder):
    """feature_layer: as in `patches.taken_layers`.

    Raises UserError for options by which transformers draws the places of a whole batch in training.
    """

    stack = "model.layer"
    halves = (_attention, _mlp)

    def __init__(self, model: DINOv3ViTModel, feature_layer: FeatureLayer = None) -> None:
        config = model.config
        for key, none in _NOTHING_DRAWN.items():
            if getattr(config, key) not in (None, none):
                raise UserError(
                    f"{key} is {getattr(config, key)}; it must be {none}: transformers draws one number for a whole "
                    "batch in training, and packed images share one batch"
                )
        super().__init__(model, model.norm, feature_layer)
        self.class_rows = 1 + config.num_register_tokens
        # It stands for masked patches in Dinov3's own pre-training: it would never get a gradient.
        model.embeddings.mask_token.requires_grad_(False)

    def layers(self) -> list[LayerModules]:
        model, config = self.model, self.model.config
        hidden, embeddings, norm = config.hidden_size, model.embeddings, model.norm
        stem = patches(
            config.num_channels * config.patch_size**2,
            hidden,
            extra_parameters=hidden * (self.class_rows + 1),
            trainable=any_trainable(embeddings),
        )
        products = {"query": config.query_bias, "key": config.key_bias, "value": config.value_bias}
        products |= {"output": config.proj_bias, "mlp": config.mlp_bias}
        shape = Transformer(
            hidden,
            config.intermediate_size,
            config.num_attention_heads,
            gated=config.use_gated_mlp,
            activation=config.hidden_act,
            biases=tuple(name for name, has_bias in products.items() if has_bias),
            layer_scale=True,
        )
        more = self.class_rows
        return [
            LayerModules(stem, (embeddings,)),
            *self.block_layers(shape),
            LayerModules(final_norm(hidden, extra_rows=more, trainable=any_trainable(norm)), (norm,))
            if self.normalised
            else unused_layer(norm, self.output_dim),
        ]

    def spare(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """The smallest image, a patch of zeros."""
        return zero_image(values, self.model.embeddings.patch_embeddings)

    def enter(self, values: Tensor, sizes: Tensor, shared: SharedItemRows | None = None) -> Tensor:
        embeddings = self.model.embeddings
        before = torch.cat([embeddings.cls_token[0], embeddings.register_tokens[0]])
        return add_class_rows(
            embed_patches(embeddings.patch_embeddings, values), before, self.num_outputs(sizes.numpy()), shared
        )

    def turns(self, sizes: Tensor, hidden: Tensor, shared: SharedItemRows | None) -> dict[str, Any]:
        """Rows of no place have a turn of nothing."""
        grids, dtype = sizes.numpy(), torch.promote_types(hidden.dtype, torch.float32)
        counts = self.num_outputs(grids)
        sides = torch.from_numpy(grids).repeat_interleave(torch.from_numpy(counts), 0)
        places = 2 * (torch.from_numpy(patch_coordinates(grids, 1)).to(dtype) + 0.5) / sides - 1
        frequencies = self.model.rope_embeddings.inv_freq.to(dtype)
        turned = (2 * math.pi * on_device(places, hidden.device)[:, :, None] * frequencies).flatten(1).repeat(1, 2)
        turned = rows_here(turned, shared)
        numbers = class_numbers(counts, self.class_rows, shared)
        angles = turned.new_zeros(len(numbers), turned.shape[1])
        angles[on_device(np.flatnonzero(numbers == self.class_rows), hidden.device)] = turned
        return {"position_embeddings": (angles.cos().to(hidden.dtype), angles.sin().to(hidden.dtype))}

    def leave(self, hidden: Tensor, sizes: Tensor, shared: SharedItemRows | None = None) -> Tensor:
        hidden = self.model.norm(hidden) if self.normalised else hidden
        return without_class_rows(hidden, self.num_outputs(sizes.numpy()), self.class_rows, shared)
