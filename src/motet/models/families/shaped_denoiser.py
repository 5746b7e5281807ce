"""A diffusion transformer made of shapes alone, as `core.shapes.denoising_transformer` describes it.

The rows of an item's condition and one of its timestep stand before its own and attend with them ("in-context
conditioning", Peebles & Xie, arXiv:2212.09748, section 3.2). So its layers are those of any other model of shapes.
Those of `models/dit.py` have half as many parameters again, for what scales and shifts their branches.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from motet.core.arrays import Int64Array
from motet.core.shapes import Transformer, denoising_transformer
from motet.models.attention import PackedItems
from motet.models.conditions import numbers_in
from motet.models.dit import in_turn, sine_waves
from motet.models.families.shaped import check_num_positions, described_layers, shaped_rotation
from motet.models.families.shaped_layer import ShapedLayer, shaped_norm
from motet.models.layers import LayerModules
from motet.on_device import on_device


class ShapedDenoiser(nn.Module):
    """Predicts what `diffusion.Diffusion` asks for. Rows are those of a sequence, sizes are (rows,).

    num_conditions: the rows of each item's condition; the most, where items have their own.
    num_positions:  the rows that the position table has for an item's own; 0: queries and keys are turned by position.
    The width of a row must be even: half of a timestep's are sines, the others cosines.
    """

    def __init__(
        self, num_conditions: int, shape: Transformer, num_layers: int, row_dim: int, num_positions: int = 0
    ) -> None:
        super().__init__()
        self.shape, self.row_dim, self.num_conditions = shape, row_dim, num_conditions
        self.condition_dim, self.num_positions = shape.hidden, num_positions
        self.patches = nn.Linear(row_dim, shape.hidden)
        num_places = num_positions and num_positions + num_conditions + 1
        self.positions = nn.Embedding(num_places, shape.hidden) if num_places else None
        self.layers_of_blocks = nn.ModuleList(ShapedLayer(shape) for _ in range(num_layers))
        self.norm = shaped_norm(shape.norm, shape.hidden)
        self.exit = nn.Linear(shape.hidden, row_dim)

    @property
    def blocks(self) -> list[nn.Module]:
        """The layers in execution order."""
        return list(self.layers_of_blocks)

    def check_sizes(self, sizes: Int64Array) -> None:
        """Raise UserError for an item with more rows than the position table."""
        check_num_positions("patches", sizes, self.num_positions)

    def layers(self) -> list[LayerModules]:
        """The layers in execution order, on items of their numbers of rows."""
        spec = denoising_transformer(
            "denoiser",
            self.shape,
            len(self.layers_of_blocks),
            row_dim=self.row_dim,
            num_conditions=self.num_conditions,
            num_positions=self.num_positions,
        )
        stem = [each for each in (self.patches, self.positions) if each is not None]
        return described_layers(spec, [stem, *([block] for block in self.blocks), [self.norm], [self.exit]])

    def forward(
        self, noised: Tensor, times: Tensor, sizes: Tensor, conditions: Tensor, counts: Int64Array | None = None
    ) -> Tensor:
        """As `diffusion.Diffusion` calls it."""
        hidden = self.enter(noised, times, sizes, conditions, counts)
        return self.leave(self.through(hidden, sizes, counts, 0, len(self.layers_of_blocks)), sizes, counts)

    def enter(
        self, noised: Tensor, times: Tensor, sizes: Tensor, conditions: Tensor, counts: Int64Array | None
    ) -> Tensor:
        """What stands before the blocks, [sum(rows + rows of conditions + 1), width]: of each item its condition, its
        timestep, its own rows.

        `enter`, `through` and `leave` make up `forward`; a stage of a pipeline calls those that it holds.
        """
        rows, before = self._num_rows(sizes, counts)
        waves = sine_waves(times.numpy()[:, None].astype(np.float64), self.shape.hidden).to(conditions)
        # 1. A timestep behind each condition; 2. an item's own rows behind both.
        hidden = torch.cat([conditions, waves])[_placed(np.ones_like(rows), before - 1, conditions)]
        hidden = torch.cat([hidden, self.patches(noised)])[_placed(rows, before, conditions)]
        if self.positions is None:
            return hidden
        return hidden + self.positions(on_device(numbers_in(rows + before), hidden.device))

    def through(self, hidden: Tensor, sizes: Tensor, counts: Int64Array | None, first: int, stop: int) -> Tensor:
        """Hidden states after the blocks first ... stop - 1."""
        lengths = np.add(*self._num_rows(sizes, counts))
        rotation = None
        if self.positions is None:
            places = on_device(numbers_in(lengths), hidden.device)
            rotation = shaped_rotation(places, hidden, self.shape.head_width)
        hidden, extents = hidden[None], PackedItems.from_lengths(lengths)
        for layer in self.blocks[first:stop]:
            hidden = layer(hidden, extents, rotation)
        return hidden[0]

    def leave(self, hidden: Tensor, sizes: Tensor, counts: Int64Array | None) -> Tensor:
        """What stands behind the blocks: what is predicted, [sum(rows), row_dim]."""
        rows, before = self._num_rows(sizes, counts)
        is_own = numbers_in(rows + before) >= np.repeat(before, rows + before)
        own = on_device(np.flatnonzero(is_own), hidden.device)
        return self.exit(self.norm(hidden[own]))

    def _num_rows(self, sizes: Tensor, counts: Int64Array | None) -> tuple[Int64Array, Int64Array]:
        """The rows of each item, and those that stand before them, int64 [num_items] each."""
        if counts is None:
            counts = np.full(len(sizes), self.num_conditions, dtype=np.int64)
        return sizes.prod(dim=1).numpy(), counts + 1


def _placed(rows: Int64Array, counts: Int64Array, like: Tensor) -> Tensor:
    """Indexes that put the rows of each item behind others of it, on the device of `like`. counts: of these others."""
    order, _ = in_turn(rows, counts)
    return on_device(order, like.device)
