"""What vision towers share: the encoder around them, patch rows, merged rows, and position tables of any grid."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate, linear
from transformers import PreTrainedConfig, PreTrainedModel

from motet.core.arrays import Int64Array
from motet.core.errors import UserError
from motet.core.item_segments import ItemSegments
from motet.core.shapes import Transformer
from motet.core.spec import Layer
from motet.core.words import counted_words
from motet.models.attention import Extents, PackedItems
from motet.models.context_items import ContextItems, SharedAttention, SharedItemRows
from motet.models.contract import ImageRows
from motet.models.extents import extents_of
from motet.models.layers import LayerModules, any_trainable, unused_layer
from motet.on_device import on_device

FeatureLayer = int | tuple[int, ...] | None
"""The layer, or layers, whose outputs are a tower's rows (`taken_layers`)."""


class PatchEncoder(nn.Module):
    """A vision tower on packed patches; subclasses compute it.

    Rows are patches (channel, y, x), row-major; sizes are (patch rows, patch columns).
    norm, feature_layer: as in `taken_layers`. stack: the path of the list of layers in the tower.
    class_rows: rows that `enter` puts before those of each image, and `leave` takes out. Of an image that ranks share,
                the rank with its first row has them.
    shared, in `enter` and `leave`: the rows that are here, without class rows, where ranks share images; for towers
                that have `spare`.
    """

    stack: ClassVar[str] = "encoder.layers"
    class_rows: int = 0

    def __init__(self, model: PreTrainedModel, norm: nn.Module, feature_layer: FeatureLayer) -> None:
        super().__init__()
        self.model = model
        self.takes = raster_rows(model.config)
        self.normalised = feature_layer is None
        self.taken = taken_layers(self.all_layers, norm, feature_layer)
        self.num_computed = max(self.taken)
        # Those before the last one, ascending: their rows go along.
        self.inner = sorted(set(self.taken) - {self.num_computed})
        self.width = model.config.hidden_size
        self.output_dim = self.width * len(self.taken)

    @property
    def all_layers(self) -> nn.ModuleList:
        """The tower's layers, also those that are not computed."""
        holder, _, name = self.stack.partition(".")
        return getattr(getattr(self.model, holder), name)

    @property
    def blocks(self) -> list[nn.Module]:
        """The layers that are computed."""
        return list(self.all_layers)[: self.num_computed]

    @property
    def uncomputed(self) -> list[nn.Module]:
        """The layers behind the last one whose rows are taken."""
        return list(self.all_layers)[self.num_computed :]

    def block_layers(self, shape: Transformer) -> list[LayerModules]:
        """The tower's layers of this shape, also those that are not computed, as `layers` has them."""
        layers = []
        for number, block in enumerate(self.blocks, 1):
            layer = shape.layer(extra_rows=self.class_rows, trainable=any_trainable(block))
            width = self.output_dim if number == self.num_computed else sent_width(self.width, self.inner, number)
            layers.append(LayerModules(with_carried(layer, width), (block,)))
        return layers + [unused_layer(block, self.output_dim) for block in self.uncomputed]

    def grid(self, sizes: Int64Array) -> Int64Array:
        """Patch rows and columns of each image, int64 [num_images, 2]."""
        return sizes

    def num_outputs(self, sizes: Int64Array) -> Int64Array:
        """Rows that come out for each image, int64 [num_images]."""
        return np.prod(sizes, axis=1)

    def forward(self, values: Tensor, sizes: Tensor, shared: SharedItemRows | None = None) -> Tensor:
        hidden = self.through(self.enter(values, sizes, shared), sizes, 0, self.num_computed, shared)
        return self.leave(hidden, sizes, shared)

    def enter(self, values: Tensor, sizes: Tensor, shared: SharedItemRows | None = None) -> Tensor:
        """Patch rows with their positions, [sum(rows + class_rows), dim]."""
        raise NotImplementedError

    def through(
        self, hidden: Tensor, sizes: Tensor, first: int, stop: int, shared: SharedItemRows | None = None
    ) -> Tensor:
        """The layers first ... stop - 1. shared: as of `enter`.

        hidden: rows with those of inner layers so far beside them; behind the last layer, those of the layers that are
        taken, in their order.
        """
        if first == stop:
            return hidden
        [segments] = extents_of(self, sizes.numpy(), shared)
        turns = self.turns(sizes, hidden, shared)
        hidden, *inner = hidden.split(self.width, dim=1)
        hidden, is_output = hidden[None], False
        for number, layer in enumerate(self.blocks[first:stop], first + 1):
            hidden, is_output = layer(hidden, segments, **turns), gives_output(layer)
            if is_output and number in self.inner:
                inner.append(hidden[0])
        parts = [hidden[0], *inner]
        if is_output and stop == self.num_computed:
            layers = [self.num_computed, *self.inner]
            parts = [parts[layers.index(number)] for number in self.taken]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def who_sees(self, sizes: Int64Array, shared: SharedItemRows | None) -> tuple[Extents, ...]:
        """Of an image all rows see each other. As of `contract`."""
        here = None if shared is None else shared.with_class_rows(self.class_rows)
        return (item_extents(self.num_outputs(sizes) + self.class_rows, here),)

    def turns(self, sizes: Tensor, hidden: Tensor, shared: SharedItemRows | None) -> dict[str, Any]:
        """What layers are given of the places of rows, besides; nothing where places are added before them."""
        return {}

    def leave(self, hidden: Tensor, sizes: Tensor, shared: SharedItemRows | None = None) -> Tensor:
        """The images' own rows behind the layers, [sum(rows), dim]."""
        raise NotImplementedError


def sent_width(width: int, inner: Sequence[int], number: int) -> int:
    """The width of what a layer sends on: its rows, of this width, and those of the inner layers up to it.

    inner, number: of layers, from the same first number. With `gives_output`, for towers whose inner rows go along.
    """
    return width * (1 + sum(each <= number for each in inner))


def with_carried(layer: Layer, width: int) -> Layer:
    """The layer that sends on rows of this width: its own, and beside them those of layers before it."""
    return replace(layer, output_width=width, carried_width=width - layer.output_width)


def gives_output(layer: nn.Module) -> bool:
    """Whether a layer is called whole, or the last half of it: what it returns is its output."""
    return getattr(layer, "half", -1) != 0


def attention_half(layer: nn.Module, hidden: Tensor, segments: PackedItems) -> Tensor:
    """The attention of a layer of Siglip or CLIP: a norm, attention, and what went in. hidden [1, rows, dim]."""
    attended, _ = layer.self_attn(layer.layer_norm1(hidden), attention_mask=segments)
    return hidden + attended


def mlp_half(layer: nn.Module, hidden: Tensor, segments: PackedItems) -> Tensor:
    """The MLP of such a layer, on what its attention returns."""
    return hidden + layer.mlp(layer.layer_norm2(hidden))


def raster_rows(config: PreTrainedConfig) -> ImageRows:
    """The input rows of a tower whose position table is a raster of patches."""
    return ImageRows(config.patch_size, channels=config.num_channels)


def feature_layer_of(config: PreTrainedConfig) -> FeatureLayer:
    """The layers of its tower that a larger model takes, by its config; None if that does not say."""
    said = getattr(config, "vision_feature_layer", None)
    return said if said is None or isinstance(said, int) else tuple(said)


def taken_layers(layers: nn.ModuleList, norm: nn.Module, feature_layer: FeatureLayer) -> tuple[int, ...]:
    """The layers whose outputs are an encoder's rows, counted from 1. It freezes the layers behind the last of them,
    and the norm if a layer is named.

    feature_layer: None is the output of the tower, behind all layers and the norm. A number counts hidden states as
    transformers does, without the norm: 1 is the output of the first layer, -1 of the last, -2 of the one before it.
    Of several, rows stand side by side.
    Raises UserError for a layer that the tower does not have.
    """
    if feature_layer is None:
        return (len(layers),)
    if feature_layer == ():
        raise UserError("feature_layer names no layer; it must be one, or a list of some.")
    taken = []
    for number in (feature_layer,) if isinstance(feature_layer, int) else feature_layer:
        count = number if number > 0 else len(layers) + 1 + number
        if not 1 <= count <= len(layers) or number == 0:
            raise UserError(
                f"feature_layer is {number}, but the tower has {counted_words(len(layers), 'layer')}: it must be 1 "
                f"to {len(layers)}, or -1 (the last) to {-len(layers)}."
            )
        taken.append(count)
    for unused in (*layers[max(taken) :], norm):
        unused.requires_grad_(False)
    return tuple(taken)


def item_extents(lengths: Int64Array, shared: SharedAttention | None) -> PackedItems | ContextItems:
    """Who sees whom of items of these lengths, int64 [num_items]; of the rows that are here, where ranks share some."""
    return PackedItems.from_lengths(lengths) if shared is None else ContextItems(shared, causal=False)


def extents_of_frames(sizes: Int64Array, shared: SharedItemRows | None) -> PackedItems | ContextItems:
    """As `item_extents`, of patches that see those of their image, or of their frame. sizes: as of `frames_of`."""
    grids = frames_of(sizes)
    lengths = np.prod(grids, axis=1)
    if shared is not None and len(grids) > len(sizes):
        num_whole = len(frames_of(sizes[: shared.num_whole]))
        shared = shared.in_order(np.arange(lengths.sum()), lengths, num_whole)
    return item_extents(lengths, shared)


def frames_of(sizes: Int64Array) -> Int64Array:
    """The grid of each frame of packed items, int64 [num_frames, 2]. sizes: int64 [num_items, 3], or 2 of images."""
    return sizes if sizes.shape[1] == 2 else np.repeat(sizes[:, 1:], sizes[:, 0], axis=0)


def frame_segments(sizes: Int64Array) -> ItemSegments | None:
    """The frames of packed items as segments, in patches; None where items have none. sizes: as of `frames_of`."""
    if sizes.shape[1] == 2:
        return None
    return ItemSegments.counted(np.prod(frames_of(sizes), axis=1), sizes[:, 0])


def zero_image(values: Tensor, convolution: nn.Conv2d | nn.Conv3d | nn.Linear, side: int = 1) -> tuple[Tensor, Tensor]:
    """Values and sizes of an image of side x side patches that `embed_patches` takes, on the device of `values`.

    Its weight may be on another stage of a pipeline.
    """
    if isinstance(convolution, nn.Linear):
        row_dim = convolution.in_features
    else:
        row_dim = convolution.in_channels * math.prod(convolution.kernel_size)
    return values.new_zeros(side**2, row_dim), torch.full((1, 2), side)


def embed_patches(convolution: nn.Conv2d | nn.Conv3d, rows: Tensor) -> Tensor:
    """A convolution whose stride is its kernel, on rows that each hold one patch as (channel, [time,] y, x)."""
    return linear(rows, convolution.weight.flatten(1), convolution.bias)


def patch_positions(table: Tensor, grids: Int64Array) -> Tensor:
    """Resize a square position table [side * side, dim] to the grids int64 [num_images, 2]: [sum(h * w), dim].

    The interpolation is bicubic, as in HF's `interpolate_pos_encoding` of one image, but at least in float32. Each
    distinct grid is computed once.
    """
    side = round(table.shape[0] ** 0.5)
    square = table.reshape(1, side, side, -1).permute(0, 3, 1, 2)
    square = square.to(torch.promote_types(square.dtype, torch.float32))
    by_grid = {(side, side): table}
    for height, width in np.unique(grids, axis=0).tolist():
        if (height, width) != (side, side):
            resized = interpolate(square, size=(height, width), mode="bicubic", align_corners=False)
            by_grid[height, width] = resized[0].flatten(1).transpose(0, 1).to(table.dtype)
    return torch.cat([by_grid[height, width] for height, width in grids.tolist()])


def rows_here(rows: Tensor, shared: SharedItemRows | None) -> Tensor:
    """Of rows of whole images, [n, dim], those that are here, where ranks share images."""
    return rows if shared is None else rows[on_device(shared.own, rows.device)]


def add_class_rows(
    rows: Tensor, class_rows: Tensor, counts: Int64Array, shared: SharedItemRows | None = None
) -> Tensor:
    """Put class rows, [k, dim] or one as [dim], before the rows of each image: [sum(counts + k), dim].

    counts: int64 [num_images]. shared: the images' own rows that are here, where ranks share images.
    """
    class_rows = class_rows.reshape(-1, rows.shape[1])
    numbers = class_numbers(counts, len(class_rows), shared)
    own = numbers == len(class_rows)
    order = np.where(own, len(class_rows) + np.cumsum(own) - 1, numbers)
    # All ranks have all class rows in the graph, so that each has a gradient on each.
    return torch.cat([class_rows, rows]).index_select(0, on_device(order, rows.device))


def without_class_rows(
    rows: Tensor, counts: Int64Array, num_before: int = 1, shared: SharedItemRows | None = None
) -> Tensor:
    """The rows of `add_class_rows` without the class rows, so many an image: [sum(counts), dim]."""
    places = np.flatnonzero(class_numbers(counts, num_before, shared) == num_before)
    return rows.index_select(0, on_device(places, rows.device))


def class_numbers(counts: Int64Array, num_before: int, shared: SharedItemRows | None = None) -> Int64Array:
    """Of each row of `add_class_rows`: which of its image's class rows it is, and num_before for the image's own."""
    starts = np.cumsum(counts + num_before) - (counts + num_before)
    numbers = np.full(counts.sum() + num_before * len(counts), num_before, dtype=np.int64)
    numbers[(starts[:, None] + np.arange(num_before)).ravel()] = np.tile(np.arange(num_before), len(counts))
    return numbers if shared is None else numbers[shared.with_class_rows(num_before).own]


class PatchRows:
    """Of an image tower whose outputs are its patches, merge x merge neighbours consecutive."""

    def num_outputs(self, sizes: Int64Array) -> Int64Array:
        """A row for each patch, int64 [num_items]."""
        return np.prod(sizes, axis=1)

    def grid(self, sizes: Int64Array) -> Int64Array:
        """Patch rows and columns, int64 [num_items, 2], or frames before them, [num_items, 3]."""
        return sizes


class MergedRows:
    """Of an image tower that makes each merge x merge block of patches one row."""

    merge: int

    def num_outputs(self, sizes: Int64Array) -> Int64Array:
        """A row for each block, int64 [num_items]. Raises UserError as `grid`."""
        return np.prod(self.grid(sizes), axis=1)

    def grid(self, sizes: Int64Array) -> Int64Array:
        """Rows and columns of blocks, int64 [num_items, 2]. Raises UserError for sizes that no blocks divide.

        Where sizes have frames before them, so has this.
        """
        if (sizes[:, -2:] % self.merge).any():
            raise UserError(
                f"an image's patch rows and columns must be multiples of {self.merge}, got {sizes.tolist()}"
            )
        return np.concatenate([sizes[:, :-2], sizes[:, -2:] // self.merge], axis=1)
