"""The contract of modules: what an encoder and a generator of an MLLM must offer, and what a backbone receives.

Any `torch.nn.Module` with the members of `Encoder` can be an encoder. Further members are optional:

    blocks:          list of submodules in execution order. Each is called with the hidden states as its first
                     positional argument and returns them. Each is sharded by itself, and recomputed by itself if the
                     recipe says so. Default: none.
    cost:            "packed" (work grows with the sum of lengths; the default) or "padded" (with count x longest).
    lengths(sizes):  int64 [num_items], the lengths that balancing uses. Default: the product of an item's sizes.
    num_inputs(sizes): int64 [num_items], the rows of `values` that each item has. Default: the product of its sizes.
    segments(sizes): `core.item_segments.ItemSegments`, the parts of each item (tiles, frames, windows) beyond which
                     no row attends; they add up to the item's length. None, the default: each item is one segment.
                     Layers that attend over the whole item, or over a whole frame of it, say so:
                     `Attention(whole=True)`. "packed" encoders only.
    takes:           ImageRows or AudioRows: the contents of its input rows. A recipe's transform must make exactly
                     these. Default: unknown, and the recipe is not checked.
    grid(sizes):     int64 [num_items, 2], the rows and columns of an item's outputs as a raster, or, of videos,
                     [num_items, 3] with the frames before them, so that a projector can join neighbours in two
                     dimensions. The attribute is None if the outputs are a sequence. Default: a sequence; but a recipe
                     whose projector joins rows of images needs the attribute.
    enter(values, sizes), through(hidden, sizes, first, stop), leave(hidden, sizes): the parts of `forward` before the
                     blocks, the blocks first ... stop - 1, and behind the blocks; hidden states are [rows, width]. With
                     them a pipeline can cut the encoder between its blocks, as many as layers() describe. Default: it
                     runs whole on one stage.
    spare(values):   (values, sizes) of the smallest item, all zeros, on the device of `values`. With it, `forward` also
                     takes `shared` (`context_items.SharedItemRows`), the rows that are here, so that ranks can share an
                     item: its rows meet in attention alone, or where the encoder gets those of others
                     (`row_copies.rows_wanted`). In front of queries `layers()` says what length of an item makes a row
                     (`Layer.divisor`). Default: items are computed whole.
    who_sees(sizes, shared): the extents of its layers (`attention.Extents`), a tuple, of sizes int64 [num_items,
                     size_dim] and of `shared` as `forward` takes it, or None. With it the thread that loads makes what
                     attention asks of the host; `extents.extents_of` is what `through` gets them by. Default: they are
                     made in passes.
    num_hidden(sizes): int64 [num_items], rows of each item in blocks, without class rows and padding. Default: as
                     `lengths`.
    halves:          two functions (layer, hidden, ...) of a block's layer and of what the block is called with: its
                     attention, then its MLP, each with its norm and residual. Together they compute what the layer
                     does. With them, halves of blocks can fill bubbles of a pipeline. Default: a block runs whole.
    layers():        list of `layers.LayerModules` in execution order, for FLOPs, memory, profiles and plans. Default:
                     one product of every row with all linear layers and convolutions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from motet.core.arrays import Int64Array


@dataclass(frozen=True)
class ImageRows:
    """Patches as `data.images.ImageTransform` makes them; the fields have its names.

    The width of a row is not enough: rows of one width may hold different contents.
    merge_size: a block has merge_size x merge_size patches, which are consecutive rows; 1 is raster order.
    """

    patch_size: int
    merge_size: int = 1
    channels: int = 3
    temporal_patch_size: int = 1


@dataclass(frozen=True)
class AudioRows:
    """Frames as `data.audio.AudioTransform` makes them; the field has its name."""

    num_mels: int


class Encoder(Protocol):
    """An encoder of packed items. output_dim: the width of its output rows."""

    output_dim: int

    def forward(self, values: Tensor, sizes: Tensor) -> Tensor:
        """values [sum(rows), row_dim], sizes int64 [num_items, size_dim] -> [sum(num_outputs(sizes)), output_dim].

        Rows are in item order, in the input and in the output. There is at least one item; `sizes` is on the host. The
        result for an item must not depend on the other items of the call.
        """

    def num_outputs(self, sizes: Int64Array) -> Int64Array:
        """Output rows of each item, int64 [num_items]: pure arithmetic, called before any item is decoded."""


class Generator(Protocol):
    """A generator of packed items, behind its output projector. condition_dim: the width of the rows it is given.

    `blocks` and `layers()` are optional, as of an encoder; so is `sample` (see `diffusion.Diffusion`), for what the
    report shows. Of an item the length is its number of rows: the product of its sizes.
    """

    condition_dim: int

    def forward(
        self, values: Tensor, sizes: Tensor, conditions: Tensor, keys: Int64Array, counts: Int64Array | None = None
    ) -> Tensor:
        """The loss summed over the rows of all items, a scalar; a step divides it by the rows of all ranks.

        values [sum(rows), row_dim] are the items to learn; sizes int64 [num_items, size_dim], on the host; conditions
        [num_items * rows of each, condition_dim]; counts int64 [num_items], the rows of each item's condition, is given
        where `condition` is "turn" alone: conditions are [sum(counts), condition_dim] then; keys int64 [num_items]:
        what is random must follow from an item's key
        alone (`motet/noise.py`), so that it does not depend on the ranks. There is at least one item, and its loss must
        not depend on the others.
        """


def item_rows(extents: Int64Array) -> Int64Array:
    """Rows of items, int64 [num_items]. extents: these, or rows and columns of rasters, int64 [num_items, 2]."""
    return extents if extents.ndim == 1 else extents.prod(axis=1)


class Sequences(Protocol):
    """Documents packed without padding, as `dispatch.PackedSequences` holds them.

    tokens:            int64 [total]; any valid id where a feature row stands.
    targets:           bool [total], True where the loss counts the prediction of this token from those before it.
    offsets:           int32 or int64 [num_sequences + 1], on the host.
    feature_positions: per encoder, int64 [rows]: positions in [0, total) of its feature rows, in row order. Encoders
                       whose rows are added have them at the same positions.
    grid_positions:    optional, int64 [3, total] on the host: each row's time, row and column, for a backbone whose
                       positions are those of a grid; None where no item has one.
    num_targets:       optional, int64 [num_sequences] on the host: the targets of each document, without first tokens.
    turn_rows:         optional, generator -> the rows of the turn that each of its items reads, int64 [num_items].
    host:              optional, the same documents where all tensors are on the host, so that who reads them does not
                       wait for the device; None where these are.
    context:           optional, a `context_items.SharedRows` where ranks share the documents: tokens, targets and
                       positions are then of the rows of this rank, and offsets of all.
    """

    tokens: Tensor
    targets: Tensor
    offsets: Tensor
    feature_positions: dict[str, Tensor]


def on_host(sequences: Sequences) -> Sequences:
    """The documents as the host has them; those that were given, if it has none."""
    return getattr(sequences, "host", None) or sequences
