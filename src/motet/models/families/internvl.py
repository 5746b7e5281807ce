"""InternVL's vision tower on packed patches: the rows are the patches after the last layer, without the class row."""

from __future__ import annotations

from torch import Tensor, nn
from transformers import InternVLVisionConfig, InternVLVisionModel
from transformers.models.internvl.modeling_internvl import InternVLVisionLayer

from motet.core.errors import UserError
from motet.core.shapes import BIASES, Transformer, patches
from motet.models.attention import PackedItems
from motet.models.context_items import SharedItemRows
from motet.models.contract import ImageRows
from motet.models.families.patches import (
    PatchEncoder,
    add_class_rows,
    embed_patches,
    patch_positions,
    rows_here,
    without_class_rows,
    zero_image,
)
from motet.models.layers import LayerModules, any_trainable

_ONLY = {"norm_type": "layer_norm", "use_qk_norm": False, "use_mean_pooling": True, "use_mask_token": False} | {
    "use_absolute_position_embeddings": True
}


def _attention(layer: nn.Module, hidden: Tensor, segments: PackedItems) -> Tensor:
    attended, _ = layer.attention(layer.layernorm_before(hidden), attention_mask=segments)
    return layer.lambda_1 * attended + hidden


def _mlp(layer: nn.Module, hidden: Tensor, segments: PackedItems) -> Tensor:
    return layer.lambda_2 * layer.dropout(layer.mlp(layer.layernorm_after(hidden))) + hidden


class _PackedLayer(InternVLVisionLayer):
    """The layer with a second argument: transformers' own hands no mask to its attention."""

    def forward(self, hidden: Tensor, segments: PackedItems) -> Tensor:
        return _mlp(self, _attention(self, hidden, segments), segments)


class InternVLEncoder(PatchEncoder):
    """The tower of InternVL's small models (InternViT-300M). Raises UserError for the options of the large one."""

    stack = "encoder.layer"
    class_rows = 1
    halves = (_attention, _mlp)

    def __init__(self, model: InternVLVisionModel) -> None:
        config = model.config
        for key, value in _ONLY.items():
            if getattr(config, key) != value:
                raise UserError(
                    f"{key} is {getattr(config, key)!r}, which Motet does not compute; it must be {value!r}"
                )
        super().__init__(model, model.layernorm, None)
        self.takes = ImageRows(one_side(config, "patch_size"), channels=config.num_channels)
        for layer in self.all_layers:
            layer.__class__ = _PackedLayer

    def layers(self) -> list[LayerModules]:
        config, embeddings = self.model.config, self.model.embeddings
        hidden = config.hidden_size
        stem = patches(
            config.num_channels * one_side(config, "patch_size") ** 2,
            hidden,
            num_positions=embeddings.position_embeddings.shape[1],
            extra_parameters=hidden,
            trainable=any_trainable(embeddings),
        )
        shape = Transformer(
            hidden,
            config.intermediate_size,
            config.num_attention_heads,
            activation=config.hidden_act,
            biases=BIASES if config.attention_bias else ("output", "mlp"),
            layer_scale=True,
        )
        return [
            LayerModules(stem, (embeddings,)),
            *(
                LayerModules(shape.layer(extra_rows=1, trainable=any_trainable(block)), (block,))
                for block in self.blocks
            ),
        ]

    def spare(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """The smallest image, a patch of zeros."""
        return zero_image(values, self.model.embeddings.patch_embeddings.projection)

    def enter(self, values: Tensor, sizes: Tensor, shared: SharedItemRows | None = None) -> Tensor:
        grids = sizes.numpy()
        embeddings, table = self.model.embeddings, self.model.embeddings.position_embeddings[0]
        patches = embed_patches(embeddings.patch_embeddings.projection, values) + rows_here(
            patch_positions(table[1:], grids), shared
        )
        rows = add_class_rows(patches, embeddings.cls_token[0, 0] + table[0], self.num_outputs(grids), shared)
        return embeddings.dropout(rows)

    def leave(self, hidden: Tensor, sizes: Tensor, shared: SharedItemRows | None = None) -> Tensor:
        return without_class_rows(hidden, self.num_outputs(sizes.numpy()), shared=shared)


def one_side(config: InternVLVisionConfig, key: str) -> int:
    """The one side of a square (image_size, patch_size), which InternVL gives twice. Raises UserError for another."""
    sides = getattr(config, key)
    height, width = (sides, sides) if isinstance(sides, int) else sides
    if height != width:
        raise UserError(f"{key} is {list(sides)}; it must be square")
    return int(height)
