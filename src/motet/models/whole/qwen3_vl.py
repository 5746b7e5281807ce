"""Qwen3-VL (Bai et al. 2025): images and videos of their own size on positions of a grid, rows of the tower's inner
layers in the first layers of the LM (DeepStack, Meng et al. 2024). The time of each frame of a video stands before it.
Qwen3-VL-MoE has the same tower, and experts in the LM.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import (
    PreTrainedConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMoeForConditionalGeneration,
    Qwen3VLVisionConfig,
)
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionPatchMerger

from motet.core.arrays import Int64Array
from motet.core.errors import UserError
from motet.core.shapes import merge
from motet.models.layers import LayerModules, any_trainable
from motet.models.whole.family import (
    TowerConfig,
    WholeBackboneConfig,
    WholeFamily,
    WholeParts,
    check_option,
    one_tower,
)
from motet.models.whole.merger import MergerProjector
from motet.models.whole.projector import StoredProjectorConfig, with_weights
from motet.models.whole.video_processor import TimedAreas

if TYPE_CHECKING:
    from motet.models.whole.directory import WholeDirectory

_TOWER = "model.visual."


class StackedMergerConfig(StoredProjectorConfig):
    """Qwen3-VL's mergers with stored weights. tower: the config of its vision tower."""

    tower: Any

    def build(self, input_dim: int, output_dim: int) -> StackedMerger:
        """The projector, with its weights unless it has shapes only. Its dtype is that of the files."""
        return with_weights(StackedMerger(self.tower), self.tensors)


class StackedMerger(MergerProjector):
    """transformers' own mergers, side by side: of the tower's last rows, and of those of each inner block.

    Rows of merge x merge neighbours, which are consecutive, become one wide row.

    Example:
        >>> import numpy as np
        >>> config = Qwen3VLVisionConfig(hidden_size=8, out_hidden_size=32, deepstack_visual_indexes=[1, 3])
        >>> merger = StackedMerger(config)
        >>> merger.raster(np.array([[4, 6]])).tolist(), merger.input_dim, merger.output_dim
        ([[2, 3]], 24, 96)
    """

    def __init__(self, tower: Qwen3VLVisionConfig) -> None:
        self.widths, count = (tower.hidden_size, tower.out_hidden_size), len(tower.deepstack_visual_indexes)
        super().__init__(*self.widths, partial(_merger, tower), tower.spatial_merge_size)
        self.deepstack_merger_list = nn.ModuleList(_merger(tower, use_postshuffle_norm=True) for _ in range(count))
        self.num_parts = 1 + count
        self.input_dim, self.output_dim = (self.num_parts * width for width in self.widths)

    def described(self, divisor: int) -> list[LayerModules]:
        """Its layer. divisor: length of an item that makes one row of the encoder's output."""
        layer = merge(*self.widths, self.downsample, divisor=divisor * self.downsample, trainable=any_trainable(self))
        layer = replace(
            layer,
            weights=self.num_parts * layer.weights,
            inner_weights=self.num_parts * layer.weights,
            parameters=sum(each.numel() for each in self.parameters()),
            output_width=self.output_dim,
            activation_width=self.num_parts * layer.activation_width,
            weight_width=self.num_parts * layer.weight_width,
        )
        return [LayerModules(layer, (self,))]

    def forward(self, rows: Tensor, extents: Int64Array) -> Tensor:
        """rows [sum(rows of an image), input_dim] -> [sum(num_outputs), output_dim]. extents: sides, behind frames."""
        mergers = (self.merger, *self.deepstack_merger_list)
        parts = rows.split(self.widths[0], dim=1)
        return torch.cat([merger(part.contiguous()) for merger, part in zip(mergers, parts, strict=True)], dim=1)


def _merger(tower: Qwen3VLVisionConfig, *, use_postshuffle_norm: bool = False, **sides: int) -> nn.Module:
    """transformers' merger, which reads the sides of its matrices from the config."""
    return Qwen3VLVisionPatchMerger(tower, use_postshuffle_norm=use_postshuffle_norm)


def _parts(family: str, config: PreTrainedConfig, directory: WholeDirectory) -> WholeParts:
    """family: of tower and text."""
    where, tower, text = str(directory.file), config.vision_config, config.text_config
    check_option(where, "vision_config.out_hidden_size", tower.out_hidden_size, text.hidden_size)
    inner = list(tower.deepstack_visual_indexes)
    if inner != sorted(set(inner) & set(range(tower.depth))) or len(inner) >= text.num_hidden_layers:
        raise UserError(
            f"{where}: vision_config.deepstack_visual_indexes is {inner}; it must name layers of the tower (0 to "
            f"{tower.depth - 1}) in order, and fewer than the {text.num_hidden_layers} of the text."
        )
    with torch.device("meta"):
        names = [name for name, _ in StackedMerger(tower).named_parameters()]
    encoder = TowerConfig(
        family=family,
        path=directory.path,
        projector=StackedMergerConfig(
            tensors=directory.tensors_at({name: _TOWER + name for name in names}), tower=tower
        ),
    )
    return one_tower(
        WholeBackboneConfig(
            family=family,
            path=directory.path,
            config={"tie_word_embeddings": config.tie_word_embeddings},
            stacked={"image": len(inner)} if inner else {},
        ),
        "image",
        encoder,
        TimedAreas(tower.patch_size, tower.spatial_merge_size, tower.temporal_patch_size),
        _TOWER,
        {f"{name}.": f"{_TOWER}{name}." for name in ("merger", "deepstack_merger_list")},
    )


QWEN3_VL = WholeFamily(Qwen3VLForConditionalGeneration, partial(_parts, "qwen3_vl"))
QWEN3_VL_MOE = WholeFamily(Qwen3VLMoeForConditionalGeneration, partial(_parts, "qwen3_vl_moe"))
