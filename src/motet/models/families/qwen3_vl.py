"""Qwen3-VL's vision transformer (Bai et al. 2025): learned positions that are interpolated, rotary ones besides, and
rows of inner layers that go along with those of the last one (DeepStack, Meng et al. 2024).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel
from transformers.vision_utils import get_vision_interpolation_indices_and_weights

from motet.core.arrays import Int64Array
from motet.core.item_segments import ItemSegments
from motet.core.shapes import Transformer, merge, patches
from motet.models.attention import Extents
from motet.models.context_items import SharedItemRows
from motet.models.contract import ImageRows
from motet.models.extents import extents_of
from motet.models.families.patches import (
    MergedRows,
    PatchRows,
    embed_patches,
    extents_of_frames,
    frame_segments,
    frames_of,
    gives_output,
    rows_here,
    sent_width,
    with_carried,
    zero_image,
)
from motet.models.families.qwen2_vl import (
    PackedVisionAttention,
    patch_coordinates,
    patch_rotation,
    qwen_attention_half,
    qwen_mlp_half,
)
from motet.models.layers import LayerModules, any_trainable, unused_layer
from motet.on_device import on_device


class _Qwen3VLBlocks(nn.Module):
    """What stands before the mergers.

    Rows are patches (channel, time, y, x), merge x merge neighbours consecutive; sizes are (patch rows, columns), or,
    of videos and images alike, (frames, patch rows, columns). An output row is a wide one: that of the last block, then
    those of the inner ones, in their order.
    inner: numbers of these blocks, ascending.
    """

    halves = (qwen_attention_half, qwen_mlp_half)

    def __init__(self, model: Qwen3VLVisionModel, inner: Sequence[int]) -> None:
        super().__init__()
        self.model = model
        config = model.config
        # In a tower that is profiled one layer deep its last block stands for those that are not there.
        self.width, self.inner = config.hidden_size, tuple(min(number, config.depth - 1) for number in inner)
        self.output_dim = self.width * (1 + len(self.inner))
        self.merge = config.spatial_merge_size
        self.takes = ImageRows(config.patch_size, self.merge, config.in_channels, config.temporal_patch_size)
        for block in model.blocks:
            block.attn = PackedVisionAttention(block.attn)

    @property
    def blocks(self) -> list[nn.Module]:
        return list(self.model.blocks)

    def layers(self) -> list[LayerModules]:
        """The patch embedding and the transformer layers, each of which sends on the inner rows so far."""
        model, config = self.model, self.model.config
        stem = patches(
            config.in_channels * config.temporal_patch_size * config.patch_size**2,
            self.width,
            num_positions=config.num_position_embeddings,
            trainable=any_trainable(model.patch_embed) or any_trainable(model.pos_embed),
        )
        shape = Transformer(self.width, config.intermediate_size, config.num_heads, activation=config.hidden_act)
        described = [LayerModules(stem, (model.patch_embed, model.pos_embed))]
        for number, block in enumerate(self.blocks):
            layer, sent = shape.layer(trainable=any_trainable(block)), sent_width(self.width, self.inner, number)
            described.append(LayerModules(with_carried(layer, sent), (block,)))
        return described

    def forward(self, values: Tensor, sizes: Tensor, shared: SharedItemRows | None = None) -> Tensor:
        hidden = self.through(self.enter(values, sizes, shared), sizes, 0, len(self.model.blocks), shared)
        return self.leave(hidden, sizes, shared)

    def spare(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """The smallest image, a block of zeros."""
        return zero_image(values, self.model.patch_embed.proj, self.merge)

    def enter(self, values: Tensor, sizes: Tensor, shared: SharedItemRows | None = None) -> Tensor:
        """The patch embedding and the positions of the table, between whose rows an image's patches stand.

        shared: as of `through`.
        """
        model = self.model
        embedded = embed_patches(model.patch_embed.proj, values)
        grids = sizes if sizes.shape[1] == 3 else torch.cat([torch.ones_like(sizes[:, :1]), sizes], dim=1)
        # In float32, as transformers rounds the weights of the rows.
        rows, weights = get_vision_interpolation_indices_and_weights(
            grids, model.num_grid_per_side, align_corners=True, spatial_merge_size=self.merge
        )
        rows, weights = (rows_here(on_device(each, embedded.device), shared) for each in (rows, weights))
        return embedded + (model.pos_embed(rows) * weights[:, :, None]).sum(1).to(embedded.dtype)

    def who_sees(self, sizes: Int64Array, shared: SharedItemRows | None) -> tuple[Extents, ...]:
        """Of a frame all patches see each other. As of `contract`."""
        return (extents_of_frames(sizes, shared),)

    def through(
        self, hidden: Tensor, sizes: Tensor, first: int, stop: int, shared: SharedItemRows | None = None
    ) -> Tensor:
        """The blocks first ... stop - 1. hidden: wide rows, with those of inner blocks so far.

        shared: the rows that are here, where ranks share images.
        """
        coordinates = patch_coordinates(frames_of(sizes.numpy()), self.merge)
        here = coordinates if shared is None else coordinates[shared.own]
        hidden, *inner = hidden.split(self.width, dim=1)
        rotation = patch_rotation(self.model.rotary_pos_emb.inv_freq, here, hidden)
        [segments] = extents_of(self, sizes.numpy(), shared)
        for number, block in enumerate(self.blocks[first:stop], first):
            hidden = block(hidden, cu_seqlens=segments, position_embeddings=rotation)
            inner += [hidden] * (self.inner.count(number) if gives_output(block) else 0)
        return torch.cat([hidden, *inner], dim=1)

    def leave(self, hidden: Tensor, sizes: Tensor, shared: SharedItemRows | None = None) -> Tensor:
        """The wide rows behind the last block."""
        return hidden


class Qwen3VLTower(PatchRows, _Qwen3VLBlocks):
    """The tower without its mergers, which are the projector of the whole model."""

    def __init__(self, model: Qwen3VLVisionModel) -> None:
        super().__init__(model, model.config.deepstack_visual_indexes)
        model.merger, model.deepstack_merger_list = nn.Identity(), nn.ModuleList()

    def segments(self, sizes: Int64Array) -> ItemSegments | None:
        """The frames of each item, in patches; None where items have none."""
        return frame_segments(sizes)


class Qwen3VLEncoder(MergedRows, _Qwen3VLBlocks):
    """The tower by itself, with the merger of its last rows. Those of inner ones are kept as they are."""

    def __init__(self, model: Qwen3VLVisionModel) -> None:
        super().__init__(model, ())
        self.output_dim = model.config.out_hidden_size
        model.deepstack_merger_list.requires_grad_(False)

    def layers(self) -> list[LayerModules]:
        model, size = self.model, self.merge**2
        merger = merge(self.width, self.output_dim, size, divisor=size, trainable=any_trainable(model.merger))
        return [
            *super().layers(),
            *(unused_layer(unused, self.output_dim) for unused in model.deepstack_merger_list),
            LayerModules(merger, (model.merger,)),
        ]

    def leave(self, hidden: Tensor, sizes: Tensor, shared: SharedItemRows | None = None) -> Tensor:
        """The merger: a row a merge x merge block."""
        return self.model.merger(hidden)
