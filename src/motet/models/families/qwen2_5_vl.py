"""Qwen2.5-VL's vision transformer (Qwen2.5-VL, section 2.1.1): most layers attend within windows of an image, or of
a frame of a video; the others within the image or the frame.

Rows enter in the order of their windows, so that windows are packed items, and leave in the order in which they came.
Attention is Qwen2-VL's. The merger is the projector of the whole model; by parts it belongs to the encoder.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from torch import Tensor, nn
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel

from motet.core.arrays import Int64Array
from motet.core.errors import UserError
from motet.core.item_segments import ItemSegments
from motet.core.shapes import Transformer, merge, patches
from motet.models.attention import Extents, PackedItems
from motet.models.context_items import ContextItems, SharedItemRows
from motet.models.contract import ImageRows
from motet.models.exact import keep_float64
from motet.models.extents import extents_of
from motet.models.families.patches import MergedRows, PatchRows, embed_patches, frames_of, zero_image
from motet.models.families.qwen2_vl import (
    PackedVisionAttention,
    PartedVisionAttention,
    patch_coordinates,
    patch_rotation,
    qwen_attention_half,
    qwen_mlp_half,
)
from motet.models.layers import LayerModules, any_trainable
from motet.on_device import on_device


class _Qwen25VLBlocks(nn.Module):
    """What stands before the merger. Rows are patches (channel, time, y, x), merge x merge neighbours consecutive;
    sizes are (patch rows, columns), or, of videos and images alike, (frames, patch rows, columns).

    Raises UserError for windows that are not whole merge blocks.
    """

    halves = (qwen_attention_half, qwen_mlp_half)

    def __init__(self, model: Qwen2_5_VisionTransformerPretrainedModel) -> None:
        super().__init__()
        config = model.config
        self.model, self.output_dim, self.merge = model, config.hidden_size, model.spatial_merge_size
        self.takes = ImageRows(config.patch_size, self.merge, config.in_channels, config.temporal_patch_size)
        block = config.patch_size * self.merge
        if config.window_size < block or config.window_size % block:
            raise UserError(f"window_size is {config.window_size}; it must be a multiple of {block}, a block's side.")
        self.window = config.window_size // block
        self.whole = frozenset(config.fullatt_block_indexes)
        keep_float64(model)
        for layer in model.blocks:
            kind = PackedVisionAttention if hasattr(layer.attn, "qkv") else PartedVisionAttention
            layer.attn = kind(layer.attn)

    @property
    def blocks(self) -> list[nn.Module]:
        return list(self.model.blocks)

    def segments(self, sizes: Int64Array) -> ItemSegments:
        """The windows of each item, in patches; those at its right and lower edge may be smaller."""
        if sizes.shape[1] == 2:
            return ItemSegments.of(self._windows(height, width)[1] for height, width in sizes.tolist())
        windows = [np.tile(self._windows(height, width)[1], frames) for frames, height, width in sizes.tolist()]
        return replace(ItemSegments.of(windows), frames=sizes[:, 0])

    def layers(self) -> list[LayerModules]:
        """The patch embedding and the transformer layers."""
        model, config = self.model, self.model.config
        row_dim = config.in_channels * config.temporal_patch_size * config.patch_size**2
        stem = patches(row_dim, config.hidden_size, bias=False, trainable=any_trainable(model.patch_embed))
        shape = Transformer(
            config.hidden_size,
            config.intermediate_size,
            config.num_heads,
            gated=True,
            activation=config.hidden_act,
            norm="rms",
        )
        found = [LayerModules(stem, (model.patch_embed,))]
        for number, block in enumerate(self.blocks):
            layer = shape.layer(trainable=any_trainable(block))
            attention = replace(layer.attention, whole=number in self.whole)
            found.append(LayerModules(replace(layer, attention=attention), (block,)))
        return found

    def forward(self, values: Tensor, sizes: Tensor, shared: SharedItemRows | None = None) -> Tensor:
        hidden = self.through(self.enter(values, sizes, shared), sizes, 0, len(self.model.blocks), shared)
        return self.leave(hidden, sizes, shared)

    def spare(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """The smallest image, a block of zeros."""
        return zero_image(values, self.model.patch_embed.proj, self.merge)

    def enter(self, values: Tensor, sizes: Tensor, shared: SharedItemRows | None = None) -> Tensor:
        """The patch embedding; rows of a window are consecutive behind it. shared: as of `through`."""
        order, _ = self._rows_here(frames_of(sizes.numpy()), shared)
        return embed_patches(self.model.patch_embed.proj, values)[on_device(order, values.device)]

    def through(
        self, hidden: Tensor, sizes: Tensor, first: int, stop: int, shared: SharedItemRows | None = None
    ) -> Tensor:
        """The blocks first ... stop - 1. shared: the rows that are here, where ranks share images."""
        grids = frames_of(sizes.numpy())
        coordinates = patch_coordinates(grids, self.merge)[self._rows_here(grids, shared)[1]]
        rotation = patch_rotation(self.model.rotary_pos_emb.inv_freq, coordinates, hidden)
        images, windows = extents_of(self, sizes.numpy(), shared)
        for number in range(first, stop):
            seen = images if number in self.whole else windows
            hidden = self.blocks[number](hidden, cu_seqlens=seen, position_embeddings=rotation)
        return hidden

    def leave(self, hidden: Tensor, sizes: Tensor, shared: SharedItemRows | None = None) -> Tensor:
        """The rows in the order of their patches. shared: as of `through`."""
        back = np.argsort(self._rows_here(frames_of(sizes.numpy()), shared)[0])
        return hidden[on_device(back, hidden.device)]

    def who_sees(self, sizes: Int64Array, shared: SharedItemRows | None) -> tuple[Extents, ...]:
        """In the order of windows: of whole images or frames, and within windows. As of `contract`.

        A window that ranks share has its rows on them as the image has; windows that one rank has stay there.
        """
        grids = frames_of(sizes)
        of_images, of_windows = np.prod(grids, axis=1), self.segments(grids).length
        if shared is None:
            return PackedItems.from_lengths(of_images), PackedItems.from_lengths(of_windows)
        order, num_whole = self._order(grids), len(frames_of(sizes[: shared.num_whole]))
        images = shared.in_order(order, of_images, num_whole)
        windows = shared.in_order(order, of_windows, len(self.segments(grids[:num_whole]).length))
        return ContextItems(images, causal=False), ContextItems(windows, causal=False)

    def _rows_here(self, grids: Int64Array, shared: SharedItemRows | None) -> tuple[Int64Array, Int64Array]:
        """Of the rows that are here, in the order of windows: their places among these, and among all of the images."""
        order = self._order(grids)
        if shared is None:
            return order, order
        here = order[np.isin(order, shared.own)]
        return np.searchsorted(shared.own, here), here

    def _order(self, grids: Int64Array) -> Int64Array:
        """The place of each row of the windows among the rows of the images, int64 [sum(h * w)]."""
        starts = np.cumsum(np.prod(grids, axis=1)) - np.prod(grids, axis=1)
        orders = [start + self._windows(*grid)[0] for start, grid in zip(starts, grids.tolist())]
        return np.concatenate([np.zeros(0, dtype=np.int64), *orders])

    def _windows(self, height: int, width: int) -> tuple[Int64Array, Int64Array]:
        """Of one image: the place of each row of its windows among its rows, int64 [h * w]; the rows of each window."""
        if height % self.merge or width % self.merge:
            raise UserError(f"an image's patch rows and columns must be multiples of {self.merge}: {height} x {width}")
        down, across = height // self.merge, width // self.merge
        row, column = np.divmod(np.arange(down * across), across)
        window = row // self.window * -(-across // self.window) + column // self.window
        blocks, size = np.argsort(window, kind="stable"), self.merge**2
        return (blocks[:, None] * size + np.arange(size)).ravel(), np.bincount(window) * size


class Qwen25VLTower(PatchRows, _Qwen25VLBlocks):
    """The tower without its merger, which is the projector of the whole model."""

    def __init__(self, model: Qwen2_5_VisionTransformerPretrainedModel) -> None:
        super().__init__(model)
        model.merger = nn.Identity()


class Qwen25VLEncoder(MergedRows, _Qwen25VLBlocks):
    """The tower with its merger, which makes each merge x merge block one row."""

    def __init__(self, model: Qwen2_5_VisionTransformerPretrainedModel) -> None:
        super().__init__(model)
        self.output_dim = model.config.out_hidden_size

    def layers(self) -> list[LayerModules]:
        model, config, size = self.model, self.model.config, self.merge**2
        layer = merge(
            config.hidden_size, config.out_hidden_size, size, divisor=size, trainable=any_trainable(model.merger)
        )
        # Its norm has no bias.
        layer = replace(layer, parameters=sum(each.numel() for each in model.merger.parameters()))
        return [*super().layers(), LayerModules(layer, (model.merger,))]

    def leave(self, hidden: Tensor, sizes: Tensor, shared: SharedItemRows | None = None) -> Tensor:
        """As without the merger, of whose blocks a rank has all rows."""
        return self.model.merger(super().leave(hidden, sizes, shared))
