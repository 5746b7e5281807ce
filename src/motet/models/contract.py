"""What a module must offer to be an encoder of an MLLM, and what a backbone is given: the whole contract.

Any `torch.nn.Module` with the members of `Encoder` can be an encoder. More are optional:

    blocks:          list of submodules in execution order, each called with the hidden states as its first positional
                     argument and returning them; each is sharded by itself, and recomputed by itself if asked. Default:
                     none.
    cost:            "packed" (work grows with the sum of lengths; the default) or "padded" (with count x longest).
    lengths(sizes):  int64 [num_items], what the phase is balanced on. Default: the product of an item's sizes.
    takes:           ImageRows or AudioRows, what its rows are made of; a recipe's transform must make just these.
                     Default: not known, and whoever writes the recipe answers for it.
    grid(sizes):     int64 [num_items, 2], the rows and columns in which an item's outputs lie as a raster, so that a
                     projector can join neighbours in two dimensions. None in the place of the method: the outputs are
                     a sequence. Default: a sequence; a recipe whose projector joins rows of images needs it said.
    layers():        list of `layers.LayerModules` in execution order: what it consists of, for FLOPs, memory, profiles
                     and plans. Default: one product of every row with all linear layers and convolutions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from motet.core.arrays import Int64Array


@dataclass(frozen=True)
class ImageRows:
    """Patches as `data.images.ImageTransform` makes them, by its names: rows of one width may hold different things.

    merge_size: patches of a block's side; the patches of a block are consecutive rows. 1: raster.
    """

    patch_size: int
    merge_size: int = 1
    channels: int = 3
    temporal_patch_size: int = 1


@dataclass(frozen=True)
class AudioRows:
    """Frames as `data.audio.AudioTransform` makes them, by its names."""

    num_mels: int


class Encoder(Protocol):
    """An encoder of packed items. output_dim: columns of what it returns."""

    output_dim: int

    def forward(self, values: Tensor, sizes: Tensor) -> Tensor:
        """values [sum(rows), row_dim], sizes int64 [num_items, size_dim] -> [sum(num_outputs(sizes)), output_dim].

        Rows of item 0 come first, then those of item 1, and so on, in both. There is at least one item; `sizes` is on
        the host. The result for an item must not depend on the other items of the call.
        """

    def num_outputs(self, sizes: Int64Array) -> Int64Array:
        """Rows that each item becomes, int64 [num_items]; pure arithmetic, called long before any item is decoded."""


class Sequences(Protocol):
    """Documents packed without padding, as `dispatch.PackedSequences` holds them.

    tokens:            int64 [total]; any valid id where a feature row stands.
    targets:           bool [total], True where loss is taken on predicting the token from those before it.
    offsets:           int32 or int64 [num_sequences + 1], on the host.
    feature_positions: per encoder, int64 [rows]: places in [0, total) of its feature rows, in row order.
    """

    tokens: Tensor
    targets: Tensor
    offsets: Tensor
    feature_positions: dict[str, Tensor]
