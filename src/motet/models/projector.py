"""The projector of an encoder's rows into the backbone: join or average neighbouring rows of an item, normalise them,
then a linear map or MLP.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from motet.core.arrays import Int64Array
from motet.core.errors import UserError
from motet.core.limits import MAX_JOINED
from motet.core.shapes import projector
from motet.models.config_file import one_line
from motet.models.cross_projector import CrossProjector
from motet.models.layers import LayerModules, any_trainable
from motet.on_device import on_device


class ProjectorConfig(BaseModel):
    """The kind of a projector, and the number of rows that it makes of an item (OrchMLLM section 8).

    kind:       "linear"; "mlp": two layers with GELU; "none": rows as they are, of the backbone's width; "resampler" or
                "qformer": by cross attention (`models/cross_projector.py`).
    downsample: rows joined into one. In a sequence (audio) they are consecutive. In a raster (images) they are a
                square, as in InternVL's pixel shuffle: 4 is 2 x 2, and a number that is no square is refused.
    pool:       rows averaged into one, likewise, in place of `downsample`, as in Gemma 3. At the end of a sequence and
                at the edges of a raster the mean is of those that there are.
    norm:       before the map: "layer", as in InternVL, or "rms". Default: none.
    path:       a safetensors file that it starts from, such as `projectors/NAME.safetensors` of an export. Default:
                random weights.
    queries:    of a resampler or qformer, the rows that each item becomes.
    config:     of a resampler or qformer, HF's options: of Idefics2PerceiverConfig, or of Blip2QFormerConfig.
    """

    model_config = ConfigDict(extra="forbid")
    kind: Literal["linear", "mlp", "none", "resampler", "qformer"] = "mlp"
    downsample: int = Field(default=1, ge=1, le=MAX_JOINED)
    pool: int = Field(default=1, ge=1, le=MAX_JOINED)
    norm: Literal["layer", "rms"] | None = None
    path: Path | None = None
    queries: int | None = Field(default=None, ge=1, le=MAX_JOINED)
    config: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _of_its_kind(self) -> ProjectorConfig:
        if self.kind in ("linear", "mlp", "none"):
            for name in ("queries", "config"):
                if getattr(self, name):
                    raise ValueError(f"`{name}` is for resampler and qformer only, not for {self.kind!r}")
            if self.downsample > 1 and self.pool > 1:
                raise ValueError("`downsample` joins rows, and `pool` averages them; give one of them")
            if self.path is not None and self.kind == "none" and self.norm is None:
                raise ValueError('`path` has no effect, as kind = "none" without `norm` has no weights; remove it')
        elif self.queries is None:
            raise ValueError(f"a {self.kind} needs `queries`, the number of rows that it makes of each item")
        elif self.downsample != 1 or self.pool != 1:
            name = "downsample" if self.downsample != 1 else "pool"
            raise ValueError(f"`{name}` is for linear and mlp only: a {self.kind} makes `queries` rows of an item")
        elif self.norm is not None:
            raise ValueError(f"`norm` is for linear, mlp and none only: a {self.kind} has norms of its own")
        return self

    def build(self, input_dim: int, output_dim: int) -> Projector | CrossProjector:
        """The projector. Raises UserError for HF options as `CrossProjector` does, and for other weights in `path`."""
        made = (
            Projector(input_dim, output_dim, self)
            if self.queries is None
            else CrossProjector(self.kind, input_dim, output_dim, self.queries, self.config)
        )
        if self.path is not None:
            _start_from(made, self.path)
        return made


class Projector(nn.Module):
    """Rows [sum(rows of an item), input_dim] -> [sum(num_outputs), output_dim].

    extents: the arrangement of each item's rows: int64 [num_items], the length of a sequence; or [num_items, 2], the
             rows and columns of a raster.
    A block of joined rows belongs to one item: zero rows fill up the end of a sequence, and the right and lower edge of
    a raster.

    Example:
        >>> projector = Projector(8, 32, ProjectorConfig(downsample=4))
        >>> projector.num_outputs(np.array([5, 8])).tolist()  # sequences
        [2, 2]
        >>> projector.num_outputs(np.array([[3, 4]])).tolist()  # a raster in blocks of 2 x 2
        [4]
    """

    def __init__(self, input_dim: int, output_dim: int, config: ProjectorConfig) -> None:
        super().__init__()
        self.kind, self.pools = config.kind, config.pool > 1
        self.downsample = config.pool if self.pools else config.downsample
        self.width = input_dim * config.downsample
        self.input_dim, self.output_dim = input_dim, output_dim
        if config.kind == "none" and self.width != output_dim:
            raise UserError(
                f'projector.kind = "none" gives the backbone rows of {self.width} values, and it takes {output_dim}; '
                'take "linear" or "mlp".'
            )
        self.norm = None if config.norm is None else _norm(config.norm, self.width)
        self.layers = nn.Sequential()
        if config.kind != "none":
            self.layers.append(nn.Linear(self.width, output_dim))
        if config.kind == "mlp":
            self.layers.extend([nn.GELU(), nn.Linear(output_dim, output_dim)])

    @property
    def blocks(self) -> list[nn.Module]:
        """None: it is sharded with what stands outside of the encoder's blocks."""
        return []

    @property
    def joins_by(self) -> str:
        """The option that says how many rows become one."""
        return "pool" if self.pools else "downsample"

    shareable = True
    """Whether ranks can project parts of an item, with `of_each`, `rows_for` and `forward(..., own)` where `joins`."""

    @property
    def joins(self) -> bool:
        """Whether several rows become one."""
        return self.downsample > 1

    def of_each(self, rows: Tensor) -> Tensor:
        """What is made of each row by itself before others join it: nothing."""
        return rows

    def rows_for(self, extents: Int64Array, own: Int64Array) -> Int64Array:
        """The rows, among all of the items, of which some output rows are made, ascending, int64. own: these, int64."""
        return np.flatnonzero(np.isin(self._places(extents) // self.downsample, own))

    def described(self, divisor: int) -> list[LayerModules]:
        """Its layer. divisor: length of an item that makes one row of the encoder's output."""
        layer = projector(
            self.width,
            self.output_dim,
            "linear" if self.kind == "none" else self.kind,
            divisor=divisor * self.downsample,
            trainable=any_trainable(self),
        )
        if self.kind == "none":
            layer = replace(layer, weights=0, parameters=0, inner_weights=0, weight_width=0)
        if self.norm is not None:  # It keeps its input, and the map its output.
            kept = layer.activation_width + (0 if self.kind == "none" else self.width)
            parameters = layer.parameters + sum(each.numel() for each in self.norm.parameters())
            layer = replace(
                layer,
                parameters=parameters,
                activation_width=kept,
                divided_width=0,
                divided_weight_width=0,
                inner_weights=layer.weights,
            )
        return [LayerModules(layer, (self,))]

    def num_outputs(self, extents: Int64Array) -> Int64Array:
        """Output rows of each item, int64 [num_items]."""
        return np.prod(self._blocks(extents)[2], axis=1)

    def forward(self, rows: Tensor, extents: Int64Array, own: Int64Array | None = None) -> Tensor:
        """own: which of the output rows are made, ascending, of the rows that `rows_for` says; None: all."""
        if self.pools:
            rows = self._pool(rows, extents, own)
        elif self.joins:
            rows = self._join(rows, extents, own)
        if self.norm is not None:
            rows = self.norm(rows)
        return self.layers(rows)

    def _pool(self, rows: Tensor, extents: Int64Array, own: Int64Array | None) -> Tensor:
        """rows [n, input_dim] -> [sum(num_outputs), input_dim]: the mean of each block's rows."""
        grids, block, _ = self._blocks(extents)
        joined = self._join(rows, extents, own)
        total = joined.view(len(joined), self.downsample, self.input_dim).sum(1)
        if not (grids % block).any():
            return total / self.downsample
        return total / self._join(rows.new_ones(len(rows), 1), extents, own).sum(1, keepdim=True)

    def _blocks(self, extents: Int64Array) -> tuple[Int64Array, Int64Array, Int64Array]:
        """Rows and columns of each item [num_items, 2] and of a block [2]; blocks of each item down and across."""
        if extents.ndim == 1:
            grids, block = np.stack([np.ones_like(extents), extents], axis=1), np.array([1, self.downsample])
        else:
            grids, block = extents, np.full(2, math.isqrt(self.downsample))
        return grids, block, -(-grids // block)

    def _join(self, rows: Tensor, extents: Int64Array, own: Int64Array | None) -> Tensor:
        """rows [n, input_dim] -> [sum(num_outputs), input_dim * downsample]; a block's rows in raster order."""
        grids, block, blocks = self._blocks(extents)
        num_blocks, width = int(blocks.prod(axis=1).sum()) if own is None else len(own), rows.shape[1]
        if own is not None or extents.ndim > 1 or (grids % block).any():
            places = self._places(extents)
            if own is not None:
                number, place = np.divmod(places[self.rows_for(extents, own)], self.downsample)
                places = np.searchsorted(own, number) * self.downsample + place
            positions = on_device(places, rows.device)
            rows = rows.new_zeros(num_blocks * self.downsample, width).index_copy(0, positions, rows)
        return rows.reshape(num_blocks, width * self.downsample)

    def _places(self, extents: Int64Array) -> Int64Array:
        """The place of each row in the sequence of all blocks, int64 [n]."""
        return _block_positions(*self._blocks(extents))


def _norm(kind: Literal["layer", "rms"], width: int) -> nn.Module:
    return nn.LayerNorm(width, eps=1e-5) if kind == "layer" else nn.RMSNorm(width, eps=1e-6)


def _start_from(projector: nn.Module, path: Path) -> None:
    """Give a projector the weights of a file, unless it has shapes only. Raises UserError if they are not its own."""
    where = f"projector.path: {path}"
    if not path.is_file():
        raise UserError(
            f"{where} is no file; it must be a safetensors file, as projectors/NAME.safetensors of an export."
        )
    try:
        with safe_open(path, framework="pt") as opened:
            stored = {key: tuple(opened.get_slice(key).get_shape()) for key in opened.keys()}  # noqa: SIM118
            own = {name: tuple(weight.shape) for name, weight in projector.named_parameters()}
            if stored != own:
                name = min(name for name in stored.keys() | own.keys() if stored.get(name) != own.get(name))
                has, needs = (f"of shape {list(of[name])}" if name in of else "none" for of in (stored, own))
                raise UserError(
                    f"{where} has other weights than the projector: of {name} it has {has}, and needs {needs}."
                )
            if torch.get_default_device().type != "meta":
                projector.load_state_dict({name: opened.get_tensor(name) for name in own})
    except (OSError, SafetensorError) as error:
        raise UserError(f"{where} cannot be read ({one_line(error)}).") from error


def build_projector(input_dim: int, output_dim: int, config: ProjectorConfig) -> Projector | CrossProjector:
    """The projector of a config. Raises UserError as `ProjectorConfig.build` does."""
    return config.build(input_dim, output_dim)


def _block_positions(grids: Int64Array, block: Int64Array, blocks: Int64Array) -> Int64Array:
    """The position of each row of the rasters in the sequence of all blocks, int64 [sum(rows * columns)]."""
    counts = grids.prod(axis=1)
    item = np.repeat(np.arange(len(grids)), counts)
    row, column = np.divmod(np.arange(counts.sum()) - (np.cumsum(counts) - counts)[item], grids[item, 1])
    before = np.cumsum(blocks.prod(axis=1)) - blocks.prod(axis=1)
    (down, row), (across, column) = np.divmod(row, block[0]), np.divmod(column, block[1])
    number = before[item] + down * blocks[item, 1] + across
    return number * block.prod() + row * block[1] + column
