"""What sizes of items alone say of their path through a module: lengths, segments, and rows at each place of it."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

from motet.core.arrays import Int64Array
from motet.core.errors import UserError
from motet.core.grid_positions import NUM_AXES
from motet.core.item_segments import ItemSegments
from motet.models.callbacks import callback_name, checked_counts
from motet.models.contract import item_rows
from motet.models.cross_projector import CrossProjector
from motet.models.projector import Projector


class ModuleSizes:
    """The base of `ModalityModule`, whose parts these are; nothing is computed on values of items here.

    Example: of `module = ModalityModule(encoder, projector)`, `module.num_tokens(np.array([[2, 3]]))` are the rows that
    an image of 2 x 3 patches takes in a sequence.
    """

    encoder: nn.Module
    projector: Projector | CrossProjector
    before: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None
    between: Callable[[Tensor, Tensor], Tensor] | None
    after: Callable[[Tensor, Tensor], Tensor] | None
    _cut: Callable[[Int64Array], ItemSegments] | None

    @property
    def cost(self) -> str:
        """How the work of its items adds up: "packed" or "padded"."""
        return getattr(self.encoder, "cost", "packed")

    def lengths(self, sizes: Int64Array) -> Int64Array:
        """The length of each item for balancing, int64 [num_items]: patches, mel frames, over all that it becomes."""
        segments = self.segments(sizes)
        if segments is not None:
            return segments.summed(segments.length)
        seen, counts = self.seen(sizes)
        return sums(self.seen_lengths(seen), counts)

    def seen_lengths(self, seen: Int64Array) -> Int64Array:
        """The length of each item that the encoder is given."""
        lengths = getattr(self.encoder, "lengths", None)
        return lengths(seen) if lengths else np.prod(seen, axis=1)

    @property
    def joins_by(self) -> str:
        """The projector's option that says how many rows become one."""
        found: str = getattr(self.projector, "joins_by", "downsample")
        return found

    @property
    def cut(self) -> Callable[[Int64Array], ItemSegments] | None:
        """Sizes of items -> their segments; None: each item is one."""
        if self._cut is not None:
            return self._cut
        makes_tiles = getattr(self.before, "items", None) is not None and self.cost != "padded"
        return self._tiles if makes_tiles else getattr(self.encoder, "segments", None)

    @cut.setter
    def cut(self, cut: Callable[[Int64Array], ItemSegments] | None) -> None:
        self._cut = cut

    def segments(self, sizes: Int64Array) -> ItemSegments | None:
        """The segments of each item; None: each item is one."""
        return self.cut(sizes) if self.cut else None

    def _tiles(self, sizes: Int64Array) -> ItemSegments:
        """The segments of items of which `before` makes several: theirs, or each is one."""
        inner = getattr(self.encoder, "segments", None)
        seen, counts = self.seen(sizes)
        found = inner(seen) if inner else None
        if found is None:
            return ItemSegments.counted(self.seen_lengths(seen), counts)
        # Layers that attend over whole items do so over each that the encoder is given.
        frames = counts if found.frames is None else sums(found.frames, counts)
        return ItemSegments.counted(found.length, sums(found.counts, counts), frames)

    def num_tokens(self, sizes: Int64Array) -> Int64Array:
        """Rows that each item takes in the backbone's sequence, int64 [num_items]."""
        if said := getattr(self.after, "num_rows", None):
            return checked_counts("after", self.after, "num_rows", said(sizes), len(sizes), (1,))
        seen, counts = self.seen(sizes)
        return sums(self.projector.num_outputs(self._projected(seen)), counts)

    def num_values(self, sizes: Int64Array) -> Int64Array:
        """Rows of values of each item as the module is given them, int64 [num_items]."""
        if self.before is None:
            said = getattr(self.encoder, "num_inputs", None)
        else:
            said = getattr(self.before, "num_values", None)
        return said(sizes) if said else np.prod(sizes, axis=1)

    def seen(self, sizes: Int64Array) -> tuple[Int64Array, Int64Array]:
        """The sizes of the items that the encoder is given, and how many of them each item becomes."""
        said = getattr(self.before, "items", None)
        if said is None:
            return sizes, np.ones(len(sizes), dtype=np.int64)
        seen, counts = said(sizes)
        counts = checked_counts("before", self.before, "items", counts, len(sizes), (1,))
        if len(seen) != counts.sum() or (counts < 1).any():
            raise UserError(
                f"before ({callback_name(self.before)}): its items says that {len(sizes)} items become "
                f"{counts.tolist()}, and gives the sizes of {len(seen)}; each must become at least one"
            )
        return seen, counts

    def _seen_sizes(self, sizes: Tensor) -> Tensor:
        """The sizes of the items that the encoder is given, int64 [num_seen, size_dim]."""
        return torch.from_numpy(self.seen(sizes.numpy())[0])

    def extents(self, seen: Int64Array) -> Int64Array:
        """The arrangement of the encoder's rows of each item: `extents` of `Projector`."""
        counts, grid = self.encoder.num_outputs(seen), getattr(self.encoder, "grid", None)
        if grid is None:
            return counts
        if (grid(seen).prod(axis=1) != counts).any():
            raise UserError(f"{type(self.encoder).__name__}.grid has not as many rows as num_outputs says.")
        return grid(seen)

    def _projected(self, seen: Int64Array) -> Int64Array:
        """The arrangement of the rows that the projector is given."""
        said = getattr(self.between, "num_rows", None)
        if said is None:
            return self.extents(seen)
        extents = checked_counts("between", self.between, "num_rows", said(seen), len(seen), (1, 2))
        if extents.ndim > 1 and math.isqrt(self.projector.downsample) ** 2 != self.projector.downsample:
            raise UserError(
                f"projector.{self.joins_by} is {self.projector.downsample}, but between "
                f"({callback_name(self.between)}) gives a raster of rows, of which squares are "
                "joined: it must be 1, 4, 9, 16, ..."
            )
        return extents

    @property
    def has_raster(self) -> bool:
        """Whether rows of an item in the sequence are a raster, or keys; else they are one after the other, as text."""
        return hasattr(self.projector, "raster") or hasattr(self.encoder, "key_rows")

    def grids(self, sizes: Int64Array) -> Int64Array:
        """Frames, rows and columns of the raster that each item's rows in the sequence are, int64 [num_items, 3].

        Rows of a projector that says no `raster` are a frame each, and so are keys that text sees. There must be no
        callback behind the projector.
        """
        if hasattr(self.encoder, "key_rows"):
            return np.pad(self.encoder.key_rows(sizes)[:, None], ((0, 0), (0, NUM_AXES - 1)), constant_values=1)
        if not self.has_raster:
            return np.pad(self.num_tokens(sizes)[:, None], ((0, 0), (0, NUM_AXES - 1)), constant_values=1)
        raster = self.projector.raster(self._projected(self.seen(sizes)[0]))
        return raster if raster.shape[1] == NUM_AXES else np.insert(raster, 0, 1, axis=1)

    def _encoder_rows(self, sizes: Tensor) -> list[Int64Array]:
        """Rows of each item in tensors of the encoder, in each way in which they may be, for `arranged`."""
        seen, counts = self.seen(sizes.numpy())
        outputs = item_rows(self.extents(seen))
        if (said := getattr(self.encoder, "num_hidden", None)) is not None:
            hidden = said(seen)
            if self.cost == "padded":  # In layers, clips are as long as the longest.
                hidden = np.full(len(hidden), hidden.max(initial=0))
            return [sums(rows, counts) for rows in (hidden, outputs)]
        class_rows = getattr(self.encoder, "class_rows", 0)
        return [sums(rows, counts) for rows in (np.prod(seen, axis=1), outputs, outputs + class_rows)]

    def _projected_rows(self, sizes: Tensor) -> list[Int64Array]:
        """As `_encoder_rows`, behind the projector."""
        seen, counts = self.seen(sizes.numpy())
        return [sums(self.projector.num_outputs(self._projected(seen)), counts)]

    def _between_rows(self, sizes: Tensor) -> list[Int64Array]:
        """As `_encoder_rows`, before `between` and behind it."""
        seen, counts = self.seen(sizes.numpy())
        return [sums(item_rows(extents), counts) for extents in (self.extents(seen), self._projected(seen))]


def sums(values: Int64Array, counts: Int64Array) -> Int64Array:
    """The sums of the first counts[0] values, of the next counts[1], and so on."""
    ends, stops = np.concatenate([[0], np.cumsum(values)]), np.cumsum(counts)
    return ends[stops] - ends[stops - counts]
