"""A diffusion transformer on packed items: blocks in a chain (Peebles & Xie, arXiv:2212.09748).

The rows of its condition stand before an item's own and attend with them ("in-context conditioning", section 3.2); the
timestep, with the mean of these rows, scales and shifts each branch of a block (adaLN-Zero). Positions are sines and
cosines of the row's place in the item's raster, so that items may have any size.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn
from torch.nn.functional import silu

from motet.core.arrays import Int64Array
from motet.core.errors import UserError
from motet.core.limits import MAX_HEADS, MAX_LAYERS, MAX_MLP, MAX_WIDTH
from motet.core.shapes import Transformer, patches
from motet.core.spec import Layer
from motet.models.attention import PackedItems
from motet.models.conditions import in_rows, numbers_in
from motet.models.layers import LayerModules, any_trainable
from motet.on_device import on_device

_LONGEST_WAVE = 10_000.0


class DiTConfig(BaseModel):
    """`[model.generators.NAME.config]` of the family "dit".

    row_dim:    the values of a row of what it makes, such as 3 * 8 * 8 of a patch.
    hidden:     the width of a row.
    num_layers, num_heads: of blocks, and of heads in each.
    mlp:        the width of the MLP's inner row; by default 4 * hidden.
    """

    model_config = ConfigDict(extra="forbid")
    row_dim: int = Field(ge=1, le=MAX_MLP)
    hidden: int = Field(ge=4, le=MAX_WIDTH)
    num_layers: int = Field(ge=1, le=MAX_LAYERS)
    num_heads: int = Field(ge=1, le=MAX_HEADS)
    mlp: int = Field(0, ge=0, le=MAX_MLP)


class DiT(nn.Module):
    """Predicts what `diffusion.Diffusion` asks for.

    num_conditions: the rows of each item's condition, or the most of any.
    carried_rows:   as `core.spec.Module.carried_rows`: what steers the blocks.
    Raises UserError for a width that heads do not divide, or that is no multiple of 4, as two sines and two cosines of
    a place are.
    """

    carried_rows = 1

    def __init__(self, num_conditions: int, config: DiTConfig) -> None:
        super().__init__()
        hidden, row_dim = config.hidden, config.row_dim
        if hidden % config.num_heads or hidden % 4:
            raise UserError(
                f"config.hidden is {hidden}; it must be a multiple of 4, and of config.num_heads = {config.num_heads}."
            )
        self.config, self.row_dim, self.num_conditions = config, row_dim, num_conditions
        self.condition_dim = hidden
        self.entrance = nn.Linear(row_dim, hidden)
        self.places = nn.Embedding(num_conditions, hidden)
        self.time = nn.Sequential(nn.Linear(hidden, hidden), nn.SiLU(), nn.Linear(hidden, hidden))
        self.layers_of_blocks = nn.ModuleList(DiTLayer(config) for _ in range(config.num_layers))
        self.last_modulation = nn.Linear(hidden, 2 * hidden)
        self.exit = nn.Linear(hidden, row_dim)
        nn.init.normal_(self.places.weight, std=0.02)
        for zeroed in (self.last_modulation, self.exit):
            nn.init.zeros_(zeroed.weight)
            nn.init.zeros_(zeroed.bias)

    @property
    def blocks(self) -> list[nn.Module]:
        """The layers in execution order."""
        return list(self.layers_of_blocks)

    def forward(
        self,
        noised: Tensor,
        times: Tensor,
        sizes: Tensor,
        conditions: Tensor,
        counts: Int64Array | None = None,
    ) -> Tensor:
        """As `diffusion.Diffusion` calls it. sizes: rows and columns of rasters, or lengths of sequences."""
        hidden, steering = self._entered(noised, times, sizes, conditions, counts)
        hidden = self._through(hidden, steering, sizes, counts, 0, len(self.layers_of_blocks))
        return self._left(hidden, steering, sizes, counts)

    def enter(
        self, noised: Tensor, times: Tensor, sizes: Tensor, conditions: Tensor, counts: Int64Array | None
    ) -> Tensor:
        """What stands before the blocks: hidden states, the rows of an item's condition before its own; then a row of
        each item that steers the blocks, [sum(rows + rows of conditions) + num_items, width].

        `enter`, `through` and `leave` make up `forward`; a stage of a pipeline calls those that it holds.
        """
        return torch.cat(self._entered(noised, times, sizes, conditions, counts))

    def through(self, hidden: Tensor, sizes: Tensor, counts: Int64Array | None, first: int, stop: int) -> Tensor:
        """The same after the blocks first ... stop - 1."""
        rows, steering = hidden.split([len(hidden) - len(sizes), len(sizes)])
        return torch.cat([self._through(rows, steering, sizes, counts, first, stop), steering])

    def leave(self, hidden: Tensor, sizes: Tensor, counts: Int64Array | None) -> Tensor:
        """What stands behind the blocks: what is predicted, [sum(rows), row_dim]."""
        return self._left(*hidden.split([len(hidden) - len(sizes), len(sizes)]), sizes, counts)

    def _entered(
        self, noised: Tensor, times: Tensor, sizes: Tensor, conditions: Tensor, counts: Int64Array | None
    ) -> tuple[Tensor, Tensor]:
        """As `enter`: hidden states, and what steers the blocks."""
        dtype, device, num_items = noised.dtype, noised.device, len(sizes)
        waves = on_device(sine_waves(times.numpy()[:, None].astype(np.float64), self.config.hidden).to(dtype), device)
        means, places = self._of_conditions(conditions, num_items, counts)
        steering = silu(self.time(waves) + means)
        rows = self.entrance(noised) + on_device(_places(sizes.numpy(), self.config.hidden).to(dtype), device)
        order, _ = in_turn(*self._num_rows(sizes, counts))
        return torch.cat([conditions + places, rows])[on_device(order, device)], steering

    def _through(
        self, hidden: Tensor, steering: Tensor, sizes: Tensor, counts: Int64Array | None, first: int, stop: int
    ) -> Tensor:
        """Hidden states after the blocks first ... stop - 1."""
        num_rows, counts = self._num_rows(sizes, counts)
        item = on_device(np.repeat(np.arange(len(counts)), num_rows + counts), hidden.device)
        extents = PackedItems.from_lengths(num_rows + counts)
        for layer in self.blocks[first:stop]:
            hidden = layer(hidden, steering, item, extents)
        return hidden

    def _left(self, hidden: Tensor, steering: Tensor, sizes: Tensor, counts: Int64Array | None) -> Tensor:
        num_rows, counts = self._num_rows(sizes, counts)
        order, item = in_turn(num_rows, counts)
        restore = np.flatnonzero(order >= counts.sum())
        of_items, own = (on_device(each, hidden.device) for each in (item[restore], restore))
        shift, scale = self.last_modulation(steering)[of_items].chunk(2, dim=-1)
        return self.exit(_normed(hidden[own]) * (1 + scale) + shift)

    def _num_rows(self, sizes: Tensor, counts: Int64Array | None) -> tuple[Int64Array, Int64Array]:
        """The rows of each item and of its condition, int64 [num_items] each."""
        if counts is None:
            counts = np.full(len(sizes), self.num_conditions, dtype=np.int64)
        return sizes.prod(dim=1).numpy(), counts

    def _of_conditions(self, conditions: Tensor, num_items: int, counts: Int64Array | None) -> tuple[Tensor, Tensor]:
        """The mean of each item's condition, [num_items, width], and what tells its rows apart, of each row."""
        if counts is None:
            of_items = conditions.unflatten(0, (num_items, self.num_conditions))
            return of_items.mean(dim=1), self.places.weight.repeat(num_items, 1)
        padded = in_rows(conditions, counts)
        number = on_device(numbers_in(counts), conditions.device)
        return padded.sum(dim=1) / torch.from_numpy(counts)[:, None].to(conditions), self.places.weight[number]

    def layers(self) -> list[LayerModules]:
        """The layers in execution order, on items of their numbers of rows."""
        hidden, num, config = self.config.hidden, self.num_conditions, self.config
        mlp = config.mlp or 4 * hidden
        shape = Transformer(hidden, mlp, config.num_heads, activation="gelu_pytorch_tanh")
        stem = patches(self.row_dim, hidden, extra_parameters=num * hidden, trainable=any_trainable(self.entrance))
        described = [
            LayerModules(stem, (self.entrance, self.places)),
            LayerModules(
                _of_item("time", 2 * hidden**2, 2 * hidden, 4 * hidden, any_trainable(self.time)), (self.time,)
            ),
        ]
        for block in self.layers_of_blocks:
            learns = any_trainable(block)
            layer = shape.layer(extra_rows=num, trainable=learns)
            # Norms have no weights. Beside the six factors and shifts each branch keeps what enters it, its norm, the
            # factor with 1 added, the input of its first product, and what the gate multiplies; attention keeps
            # queries, keys, values and what they become, twice; the MLP both ends of its activation.
            kept = 21 * hidden + 2 * mlp + config.num_heads + 4
            layer = replace(layer, parameters=layer.parameters - 4 * hidden, activation_width=kept)
            modulation = _of_item("modulation", 6 * hidden**2, 6 * hidden, 7 * hidden, learns)
            described += [
                LayerModules(layer, (block.attention, block.mlp)),
                LayerModules(replace(modulation, continues=True), (block.modulation,)),
            ]
        learns = any_trainable(self.exit)
        last = _of_item("modulation", 2 * hidden**2, 2 * hidden, 3 * hidden, learns)
        weights = hidden * self.row_dim
        kept = 4 * hidden + self.row_dim + 10  # Of the loss, too: what is wrong of each value.
        out = Layer("output", weights, weights + self.row_dim, self.row_dim, kept, trainable=learns)
        return [*described, LayerModules(last, (self.last_modulation,)), LayerModules(out, (self.exit,))]


class DiTLayer(nn.Module):
    """Attention, then an MLP; each a branch whose input is scaled and shifted, and whose output is scaled."""

    def __init__(self, config: DiTConfig) -> None:
        super().__init__()
        hidden, mlp = config.hidden, config.mlp or 4 * config.hidden
        self.attention = DiTAttention(hidden, config.num_heads)
        self.mlp = nn.Sequential(nn.Linear(hidden, mlp), nn.GELU(approximate="tanh"), nn.Linear(mlp, hidden))
        self.modulation = nn.Linear(hidden, 6 * hidden)
        nn.init.zeros_(self.modulation.weight)
        nn.init.zeros_(self.modulation.bias)

    def forward(self, hidden: Tensor, steering: Tensor, item: Tensor, extents: PackedItems) -> Tensor:
        """hidden [rows, width], steering [num_items, width], item int64 [rows] -> [rows, width]."""
        of_rows = self.modulation(steering)[item].chunk(6, dim=-1)
        shift, scale, gate = of_rows[:3]
        hidden = hidden + gate * self.attention(_normed(hidden) * (1 + scale) + shift, extents)
        shift, scale, gate = of_rows[3:]
        return hidden + gate * self.mlp(_normed(hidden) * (1 + scale) + shift)


class DiTAttention(nn.Module):
    """The rows of an item attend to all of it, its condition included. num_heads: here, of tensor-parallel ranks."""

    def __init__(self, hidden: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads, self.head_dim = num_heads, hidden // num_heads
        self.input, self.output = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)

    def forward(self, rows: Tensor, extents: PackedItems) -> Tensor:
        """rows [rows, width] -> the same shape."""
        products = self.input(rows)[None].unflatten(-1, (3, self.num_heads, -1))
        query, key, value = (each.transpose(1, 2) for each in products.unbind(2))
        return self.output(extents.attend(query, key, value, None, 0.0, None).flatten(-2)[0])


def _of_item(kind: str, weights: int, biases: int, kept: int, learns: bool) -> Layer:
    """A product of one row of each item."""
    return Layer(kind, weights, weights + biases, biases, kept, item_rows=1, trainable=learns)


def _normed(hidden: Tensor) -> Tensor:
    return nn.functional.layer_norm(hidden, hidden.shape[-1:], eps=1e-6)


def in_turn(num_rows: Int64Array, counts: Int64Array) -> tuple[Int64Array, Int64Array]:
    """Where each row of items with their conditions stands in (all conditions, all own rows), and its item.

    counts: the rows of each item's condition.
    """
    item, number = np.repeat(np.arange(len(counts)), num_rows + counts), numbers_in(num_rows + counts)
    before, of_rows = np.cumsum(counts) - counts, np.cumsum(num_rows) - num_rows
    own = counts.sum() + of_rows[item] + number - counts[item]
    return np.where(number < counts[item], before[item] + number, own), item


def _places(sizes: Int64Array, width: int) -> Tensor:
    """Sines and cosines of the place of each row, float64 [sum(rows), width]. sizes: [num_items, 1 or 2]."""
    places = [np.stack(np.unravel_index(np.arange(size.prod()), size), axis=1) for size in sizes]
    return sine_waves(np.concatenate(places).astype(np.float64), width)


def sine_waves(places: np.ndarray, width: int) -> Tensor:
    """places [n, axes] -> [n, width], an equal part of each axis; width is a multiple of 4, and there are 1 or 2."""
    num_waves = width // (2 * places.shape[1])
    angles = places[..., None] * np.exp(-math.log(_LONGEST_WAVE) * np.arange(num_waves) / num_waves)
    return torch.from_numpy(np.concatenate([np.sin(angles), np.cos(angles)], axis=-1).reshape(len(places), -1))
