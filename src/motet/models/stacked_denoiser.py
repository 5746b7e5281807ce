"""What transformers of diffusers that denoise share: blocks in a chain, which a pipeline can cut between any two.

What goes on behind a block is one tensor: patches of items, rows of their conditions, and rows of each item that steer
the blocks. Items stand in it batch by batch (`ItemBatches`), so that a batch is a view of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import ClassVar, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from motet.core.arrays import Int64Array
from motet.models.block import wrap_blocks
from motet.models.conditions import numbers_in
from motet.models.denoiser import Denoiser
from motet.on_device import on_device


class ItemBatch(NamedTuple):
    """Items of one size. items: their places in the order of all batches.

    height, width: of an item, in patches. patches, conditions: where their rows are, in this order.
    num_conditions: the rows of the longest condition.
    there:         which rows of padded conditions are some, bool [num_items, num_conditions] on the host; None: all.
    """

    items: slice
    height: int
    width: int
    patches: slice
    conditions: slice
    num_conditions: int
    there: Tensor | None

    def padded(self, conditions: Tensor) -> Tensor:
        """The conditions of these items, [num_items, num_conditions, width], of rows in the order of all batches."""
        rows = conditions[self.conditions]
        if self.there is None:
            return rows.unflatten(0, (self.items.stop - self.items.start, -1))
        return pad_sequence(list(rows.split(self.there.sum(1).tolist())), batch_first=True)

    def packed(self, padded: Tensor) -> Tensor:
        """What `padded` has made, without padding."""
        return padded.flatten(0, 1) if self.there is None else padded[on_device(self.there, padded.device)]


class ItemBatches:
    """Items in dense batches of one size and, unless padding is masked, of one number of rows of their conditions.

    sizes: int64 [num_items, 2] of rasters, in latents. counts: int64 [num_items], the rows of each condition.
    side:  latents of a side of a patch.

    order:       items, batch by batch, int64 [num_items].
    latents, conditions: the rows of both in that order, among those of all items, int64 [sum(rows)] each.
    num_patches, num_conditions: of all items.
    """

    def __init__(self, sizes: Int64Array, counts: Int64Array, side: int, *, masks: bool) -> None:
        kinds = np.column_stack([sizes, np.zeros_like(counts) if masks else counts])
        kind = np.unique(kinds, axis=0, return_inverse=True)[1].reshape(-1)
        self.order: Int64Array = np.argsort(kind, kind="stable")
        self.sizes, self.counts, self._side = sizes[self.order], counts[self.order], side
        self.latents = _rows_in_order(sizes.prod(axis=1), self.order)
        self.conditions = _rows_in_order(counts, self.order)
        self._ends = np.flatnonzero(np.diff(kind[self.order], append=-1)) + 1
        self.num_patches, self.num_conditions = int(sizes.prod(axis=1).sum()) // side**2, int(counts.sum())

    def __iter__(self) -> Iterator[ItemBatch]:
        first = patches = conditions = 0
        for stop in self._ends.tolist():
            height, width = (self.sizes[first] // self._side).tolist()
            counts = self.counts[first:stop]
            most, num = int(counts.max()), int(counts.sum())
            there = None if (counts == most).all() else torch.from_numpy(np.arange(most) < counts[:, None])
            of_patches = slice(patches, patches := patches + (stop - first) * height * width)
            of_conditions = slice(conditions, conditions := conditions + num)
            yield ItemBatch(slice(first, stop), height, width, of_patches, of_conditions, most, there)
            first = stop


_Steered: TypeAlias = "Tensor | tuple[Tensor, Tensor]"
"""Patches behind a block, and the rows of conditions if they have changed."""


class StackedDenoiser(Denoiser):
    """A transformer of diffusers that predicts what `diffusion.Diffusion` asks for, in parts (`dit.DiT`).

    masks:      whether padded conditions are masked; else a batch is of one length of them, too.
    num_steering: the rows of each item that steer the blocks.
    uncuttable: why no pipeline can cut it, in words; "": it can.
    """

    part: ClassVar[str] = "transformer"
    masks: ClassVar[bool] = True
    num_steering: ClassVar[int] = 1
    uncuttable: str = ""

    def __init__(self, num_conditions: int, model: nn.Module, condition_dim: int) -> None:
        super().__init__(num_conditions, model, condition_dim, model.config.patch_size)
        for block in wrap_blocks(self.model, self.model.transformer_blocks):
            block.run = partial(_in_batches, self.steered)

    @property
    def blocks(self) -> list[nn.Module]:
        """The layers in execution order."""
        return list(self.model.transformer_blocks)

    @property
    def width(self) -> int:
        """Of hidden states."""
        width: int = self.model.inner_dim
        return width

    @property
    def carried_rows(self) -> int:
        """As `core.spec.Module.carried_rows`."""
        return self.num_conditions + self.num_steering

    def embedded(self, images: Tensor, times: Tensor, conditions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What stands before the blocks, of a batch: patches [num, patches, width], conditions [num, rows, width],
        and what steers the blocks, [num, num_steering, width].

        images: [num, row_dim, height, width]. times: [num]. conditions: [num, rows, condition_dim], perhaps padded.
        """
        raise NotImplementedError

    @staticmethod
    def steered(
        block: nn.Module, patches: Tensor, conditions: Tensor, steering: Tensor, there: Tensor | None
    ) -> _Steered:
        """A block on such a batch. there: which rows of conditions are some, bool [num, rows]; None: all."""
        raise NotImplementedError

    def projected(self, patches: Tensor, steering: Tensor) -> Tensor:
        """What stands behind the blocks, [num, patches, side * side * channels], of which the first are row_dim."""
        raise NotImplementedError

    def forward(
        self, noised: Tensor, times: Tensor, sizes: Tensor, conditions: Tensor, counts: Int64Array | None = None
    ) -> Tensor:
        """As `diffusion.Diffusion` calls it. Raises UserError as `check_sizes` does."""
        batches = self._batches(sizes, counts)
        patches, rows, steering = self._entered(noised, times, conditions, batches)
        patches, _ = self._through(patches, rows, steering, batches, 0, len(self.blocks))
        return self._left(patches, steering, batches)

    def enter(
        self, noised: Tensor, times: Tensor, sizes: Tensor, conditions: Tensor, counts: Int64Array | None
    ) -> Tensor:
        """What stands before the blocks, [patches + sum(counts) + num_items * num_steering, width].

        `enter`, `through` and `leave` make up `forward`; a stage of a pipeline calls those that it holds.
        """
        return torch.cat(self._entered(noised, times, conditions, self._batches(sizes, counts)))

    def through(self, hidden: Tensor, sizes: Tensor, counts: Int64Array | None, first: int, stop: int) -> Tensor:
        """The same behind the blocks first ... stop - 1."""
        batches = self._batches(sizes, counts)
        patches, rows, steering = self._parts(hidden, batches)
        return torch.cat([*self._through(patches, rows, steering, batches, first, stop), steering])

    def leave(self, hidden: Tensor, sizes: Tensor, counts: Int64Array | None) -> Tensor:
        """What stands behind the blocks: what is predicted, [sum(rows), row_dim]."""
        batches = self._batches(sizes, counts)
        patches, _, steering = self._parts(hidden, batches)
        return self._left(patches, steering, batches)

    def _batches(self, sizes: Tensor, counts: Int64Array | None) -> ItemBatches:
        self.check_sizes(sizes.numpy())
        if counts is None:
            counts = np.full(len(sizes), self.num_conditions, dtype=np.int64)
        return ItemBatches(sizes.numpy(), counts, self.divisor, masks=self.masks)

    def _parts(self, hidden: Tensor, batches: ItemBatches) -> tuple[Tensor, Tensor, Tensor]:
        """Patches, rows of conditions, and what steers the blocks."""
        num = batches.num_patches, batches.num_conditions
        patches, rows, steering = hidden.split([*num, len(hidden) - sum(num)])
        return patches, rows, steering

    def _entered(
        self, noised: Tensor, times: Tensor, conditions: Tensor, batches: ItemBatches
    ) -> tuple[Tensor, Tensor, Tensor]:
        """As `_parts`."""
        latents, given = (
            rows[on_device(order, rows.device)]
            for rows, order in ((noised, batches.latents), (conditions, batches.conditions))
        )
        times, area, made = on_device(times[torch.from_numpy(batches.order)], noised.device), self.divisor**2, []
        for batch in batches:
            own = latents[area * batch.patches.start : area * batch.patches.stop]
            size = len(times[batch.items]), self.divisor * batch.height, self.divisor * batch.width
            images = own.unflatten(0, size).permute(0, 3, 1, 2).contiguous()
            patches, rows, steering = self.embedded(images, times[batch.items], batch.padded(given))
            made.append((patches.flatten(0, 1), batch.packed(rows), steering.flatten(0, 1)))
        patches, rows, steering = (torch.cat(parts) for parts in zip(*made, strict=True))
        return patches, rows, steering

    def _through(
        self, patches: Tensor, rows: Tensor, steering: Tensor, batches: ItemBatches, first: int, stop: int
    ) -> tuple[Tensor, Tensor]:
        for block in self.blocks[first:stop]:
            made = block(patches, rows, steering, batches)
            patches, rows = made if isinstance(made, tuple) else (made, rows)
        return patches, rows

    def _left(self, patches: Tensor, steering: Tensor, batches: ItemBatches) -> Tensor:
        side, made = self.divisor, []
        for batch in batches:
            num = batch.items.stop - batch.items.start
            own, steers = patches[batch.patches].unflatten(0, (num, -1)), _of_items(steering, batches, batch)
            latents = self.projected(own, steers).unflatten(-1, (side, side, -1))[..., : self.row_dim]
            in_rows = latents.unflatten(1, (batch.height, batch.width)).permute(0, 1, 3, 2, 4, 5)
            made.append(in_rows.flatten(0, 4))
        restore = on_device(np.argsort(batches.latents), patches.device)
        return torch.cat(made)[restore]


def _in_batches(
    compute: Callable[..., _Steered],
    block: nn.Module,
    patches: Tensor,
    rows: Tensor,
    steering: Tensor,
    batches: ItemBatches,
) -> _Steered:
    """A block on all batches: patches behind it, and rows of conditions if it changes them. compute: of one batch."""
    made, changed = [], []
    for batch in batches:
        num, there = batch.items.stop - batch.items.start, batch.there
        found = compute(
            block,
            patches[batch.patches].unflatten(0, (num, -1)),
            batch.padded(rows),
            _of_items(steering, batches, batch),
            None if there is None else on_device(there, patches.device),
        )
        if isinstance(found, tuple):
            found, context = found
            changed.append(batch.packed(context))
        made.append(found.flatten(0, 1))
    # Of one batch, too: FSDP2 warns of a block that returns a view.
    return (torch.cat(made), torch.cat(changed)) if changed else torch.cat(made)


def _of_items(steering: Tensor, batches: ItemBatches, batch: ItemBatch) -> Tensor:
    """What steers the blocks for the items of a batch, [num, num_steering, width]."""
    return steering.unflatten(0, (len(batches.order), -1))[batch.items]


def _rows_in_order(counts: Int64Array, order: Int64Array) -> Int64Array:
    """The packed rows of items in this order. counts: of each item, int64 [num_items]."""
    starts = np.cumsum(counts) - counts
    return np.repeat(starts[order], counts[order]) + numbers_in(counts[order])
