"""Qwen2-VL's vision transformer: images and videos of any grid, rotary positions, merge x merge patches
joined into one row.

A module of our own computes its attention with HF's parameters. HF's module always rotates in float32, so that float64
could not be exact to 1e-10, and calls the kernel once for each image. The frames of a video (of two pictures each) do
not see each other.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VisionTransformerPretrainedModel, VisionAttention

from motet.core.arrays import Int64Array
from motet.core.item_segments import ItemSegments
from motet.core.shapes import Transformer, merge, patches
from motet.models.attention import Extents, PackedItems
from motet.models.context_items import ContextItems, SharedItemRows
from motet.models.contract import ImageRows
from motet.models.extents import extents_of
from motet.models.families.patches import (
    MergedRows,
    PatchRows,
    embed_patches,
    extents_of_frames,
    frame_segments,
    frames_of,
    zero_image,
)
from motet.models.layers import LayerModules, any_trainable
from motet.models.rotary import Rotation
from motet.on_device import on_device


class PackedVisionAttention(nn.Module):
    """HF's VisionAttention over packed images, with HF's parameters under HF's names."""

    def __init__(self, hf: VisionAttention) -> None:
        super().__init__()
        self.qkv, self.proj = hf.qkv, hf.proj
        self.num_heads, self.head_dim = hf.num_heads, hf.proj.in_features // hf.num_heads

    def forward(self, hidden: Tensor, cu_seqlens: PackedItems | ContextItems, position_embeddings: Rotation) -> Tensor:
        """hidden [rows, dim] -> [rows, dim]."""
        query, key, value = self._products(hidden)
        query, key = position_embeddings.apply(query), position_embeddings.apply(key)
        query, key, value = (x.transpose(0, 1)[None] for x in (query, key, value))
        return self.proj(cu_seqlens.attend(query, key, value, None, 0.0, None).reshape(len(hidden), -1))

    def _products(self, hidden: Tensor) -> tuple[Tensor, ...]:
        """Queries, keys and values, [rows, heads, head_dim] each."""
        return self.qkv(hidden).view(len(hidden), 3, self.num_heads, -1).unbind(1)


class PartedVisionAttention(PackedVisionAttention):
    """The same with products of their own for queries, keys and values, as Qwen2.5-Omni has them."""

    def __init__(self, hf: nn.Module) -> None:
        nn.Module.__init__(self)
        self.q, self.k, self.v, self.proj = hf.q, hf.k, hf.v, hf.proj
        self.num_heads, self.head_dim = hf.num_heads, hf.proj.in_features // hf.num_heads

    def _products(self, hidden: Tensor) -> tuple[Tensor, ...]:
        return tuple(each(hidden).view(len(hidden), -1, self.head_dim) for each in (self.q, self.k, self.v))


def qwen_attention_half(layer: nn.Module, hidden: Tensor, **arrangement: Any) -> Tensor:
    """The first half of a block of a Qwen vision transformer."""
    return hidden + layer.attn(layer.norm1(hidden), **arrangement)


def qwen_mlp_half(layer: nn.Module, hidden: Tensor, **arrangement: Any) -> Tensor:
    """The second half."""
    return hidden + layer.mlp(layer.norm2(hidden))


class _Qwen2VLBlocks(nn.Module):
    """What stands before the merger. Rows are patches (channel, time, y, x), merge x merge neighbours consecutive;
    sizes are (patch rows, columns), or, of videos and images alike, (frames, patch rows, columns).
    """

    halves = (qwen_attention_half, qwen_mlp_half)

    def __init__(self, model: Qwen2VisionTransformerPretrainedModel) -> None:
        super().__init__()
        self.model = model
        self.output_dim = model.config.embed_dim
        self.merge = model.spatial_merge_size
        config = model.config
        self.takes = ImageRows(config.patch_size, self.merge, config.in_channels, config.temporal_patch_size)
        for block in model.blocks:
            block.attn = PackedVisionAttention(block.attn)

    @property
    def blocks(self) -> list[nn.Module]:
        return list(self.model.blocks)

    def layers(self) -> list[LayerModules]:
        """The patch embedding and the transformer layers."""
        model, config = self.model, self.model.config
        row_dim = config.in_channels * config.temporal_patch_size * config.patch_size**2
        stem = patches(row_dim, config.embed_dim, bias=False, trainable=any_trainable(model.patch_embed))
        shape = Transformer(
            config.embed_dim,
            int(config.embed_dim * config.mlp_ratio),
            config.num_heads,
            activation=config.hidden_act,
        )
        return [
            LayerModules(stem, (model.patch_embed,)),
            *(LayerModules(shape.layer(trainable=any_trainable(block)), (block,)) for block in self.blocks),
        ]

    def forward(self, values: Tensor, sizes: Tensor, shared: SharedItemRows | None = None) -> Tensor:
        hidden = self.through(self.enter(values, sizes, shared), sizes, 0, len(self.model.blocks), shared)
        return self.leave(hidden, sizes, shared)

    def enter(self, values: Tensor, sizes: Tensor, shared: SharedItemRows | None = None) -> Tensor:
        """The patch embedding."""
        return embed_patches(self.model.patch_embed.proj, values)

    def who_sees(self, sizes: Int64Array, shared: SharedItemRows | None) -> tuple[Extents, ...]:
        """Of a frame all patches see each other. As of `contract`."""
        return (extents_of_frames(sizes, shared),)

    def through(
        self, hidden: Tensor, sizes: Tensor, first: int, stop: int, shared: SharedItemRows | None = None
    ) -> Tensor:
        """The blocks first ... stop - 1. shared: the rows that are here, where ranks share images."""
        coordinates = patch_coordinates(frames_of(sizes.numpy()), self.merge)
        here = coordinates if shared is None else coordinates[shared.own]
        rotation = patch_rotation(self.model.rotary_pos_emb.inv_freq, here, hidden)
        [segments] = extents_of(self, sizes.numpy(), shared)
        for block in self.blocks[first:stop]:
            hidden = block(hidden, cu_seqlens=segments, position_embeddings=rotation)
        return hidden

    def spare(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """The smallest image, a block of zeros."""
        return zero_image(values, self.model.patch_embed.proj, self.merge)

    def leave(self, hidden: Tensor, sizes: Tensor, shared: SharedItemRows | None = None) -> Tensor:
        """The rows behind the last block."""
        return hidden


class Qwen2VLTower(PatchRows, _Qwen2VLBlocks):
    """The tower without its merger, which is the projector of the whole model."""

    def __init__(self, model: Qwen2VisionTransformerPretrainedModel) -> None:
        super().__init__(model)
        model.merger = nn.Identity()

    def segments(self, sizes: Int64Array) -> ItemSegments | None:
        """The frames of each item, in patches; None where items have none."""
        return frame_segments(sizes)


class Qwen2VLEncoder(MergedRows, _Qwen2VLBlocks):
    """The tower with its merger."""

    def __init__(self, model: Qwen2VisionTransformerPretrainedModel) -> None:
        super().__init__(model)
        self.output_dim = model.config.hidden_size

    def layers(self) -> list[LayerModules]:
        model, config = self.model, self.model.config
        size = self.merge**2
        merger = merge(config.embed_dim, config.hidden_size, size, divisor=size, trainable=any_trainable(model.merger))
        return [*super().layers(), LayerModules(merger, (model.merger,))]

    def leave(self, hidden: Tensor, sizes: Tensor, shared: SharedItemRows | None = None) -> Tensor:
        """The merger: a row a merge x merge block."""
        return self.model.merger(hidden)


def patch_rotation(frequencies: Tensor, coordinates: Int64Array, like: Tensor) -> Rotation:
    """The turns of patches: half of a head's channels turn with the patch's row, half with its column.

    frequencies: [head_dim / 4]. coordinates: row and column, int64 [num_patches, 2]. like: whose device and dtype, at
    least float32, they get.
    """
    frequencies = frequencies.to(torch.promote_types(like.dtype, torch.float32))
    angles = (on_device(coordinates, like.device)[:, :, None] * frequencies).flatten(1).repeat(1, 2)
    return Rotation(angles.cos(), angles.sin())


def patch_coordinates(grids: Int64Array, merge: int) -> Int64Array:
    """Row and column of each patch, int64 [sum(h * w), 2], in raster order of the blocks, then inside each block."""
    counts = np.prod(grids, axis=1)
    patch = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    blocks_across = np.repeat(grids[:, 1] // merge, counts)
    block, inside = np.divmod(patch, merge**2)
    row = block // blocks_across * merge + inside // merge
    column = block % blocks_across * merge + inside % merge
    return np.stack([row, column], axis=1)
