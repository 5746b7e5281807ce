"""The projector of an encoder's rows into the backbone: join neighbouring rows of an item, then a linear map or MLP."""

from __future__ import annotations

import math
from typing import Any, Literal

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor, nn

from motet.core.arrays import Int64Array
from motet.core.limits import MAX_JOINED
from motet.core.shapes import projector
from motet.models.cross_projector import CrossProjector
from motet.models.layers import LayerModules, any_trainable


class ProjectorConfig(BaseModel):
    """The kind of a projector, and the number of rows that it makes of an item (OrchMLLM section 8).

    kind:       "linear"; "mlp": two layers with GELU; "resampler" or "qformer": by cross attention
                (`models/cross_projector.py`).
    downsample: rows joined into one. In a sequence (audio) they are consecutive. In a raster (images) they are a
                square, as in InternVL's pixel shuffle: 4 is 2 x 2, and a number that is no square is refused.
    queries:    of a resampler or qformer, the rows that each item becomes.
    config:     of a resampler or qformer, HF's options: of Idefics2PerceiverConfig, or of Blip2QFormerConfig.
    """

    model_config = ConfigDict(extra="forbid")
    kind: Literal["linear", "mlp", "resampler", "qformer"] = "mlp"
    downsample: int = Field(default=1, ge=1, le=MAX_JOINED)
    queries: int | None = Field(default=None, ge=1, le=MAX_JOINED)
    config: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _of_its_kind(self) -> ProjectorConfig:
        if self.kind in ("linear", "mlp"):
            for name in ("queries", "config"):
                if getattr(self, name):
                    raise ValueError(f"`{name}` is for resampler and qformer only, not for {self.kind!r}")
        elif self.queries is None:
            raise ValueError(f"a {self.kind} needs `queries`, the number of rows that it makes of each item")
        elif self.downsample != 1:
            raise ValueError(f"`downsample` is for linear and mlp only: a {self.kind} makes `queries` rows of an item")
        return self

    def build(self, input_dim: int, output_dim: int) -> Projector | CrossProjector:
        """The projector of this config. Raises UserError for HF options as `CrossProjector` does."""
        if self.queries is None:
            return Projector(input_dim, output_dim, self)
        return CrossProjector(self.kind, input_dim, output_dim, self.queries, self.config)


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
        self.kind, self.downsample = config.kind, config.downsample
        joined = input_dim * config.downsample
        self.input_dim, self.output_dim = input_dim, output_dim
        self.layers = (
            nn.Sequential(nn.Linear(joined, output_dim))
            if config.kind == "linear"
            else nn.Sequential(nn.Linear(joined, output_dim), nn.GELU(), nn.Linear(output_dim, output_dim))
        )

    @property
    def blocks(self) -> list[nn.Module]:
        """None: it is sharded with what stands outside of the encoder's blocks."""
        return []

    @property
    def shareable(self) -> bool:
        """Whether ranks can project parts of an item: an output row is made of consecutive rows, as many as any."""
        return self.downsample == 1

    def described(self, divisor: int) -> list[LayerModules]:
        """Its layer. divisor: length of an item that makes one row of the encoder's output."""
        layer = projector(
            self.input_dim,
            self.output_dim,
            self.kind,
            self.downsample,
            divisor=divisor,
            trainable=any_trainable(self),
        )
        return [LayerModules(layer, (self,))]

    def num_outputs(self, extents: Int64Array) -> Int64Array:
        """Output rows of each item, int64 [num_items]."""
        return np.prod(self._blocks(extents)[2], axis=1)

    def forward(self, rows: Tensor, extents: Int64Array) -> Tensor:
        return self.layers(self._join(rows, extents) if self.downsample > 1 else rows)

    def _blocks(self, extents: Int64Array) -> tuple[Int64Array, Int64Array, Int64Array]:
        """Rows and columns of each item [num_items, 2] and of a block [2]; blocks of each item down and across."""
        if extents.ndim == 1:
            grids, block = np.stack([np.ones_like(extents), extents], axis=1), np.array([1, self.downsample])
        else:
            grids, block = extents, np.full(2, math.isqrt(self.downsample))
        return grids, block, -(-grids // block)

    def _join(self, rows: Tensor, extents: Int64Array) -> Tensor:
        """rows [n, input_dim] -> [sum(num_outputs), input_dim * downsample]; a block's rows in raster order."""
        grids, block, blocks = self._blocks(extents)
        if extents.ndim > 1 or (grids % block).any():
            positions = torch.from_numpy(_block_positions(grids, block, blocks)).to(rows.device)
            num_rows = int(blocks.prod(axis=1).sum()) * self.downsample
            rows = rows.new_zeros(num_rows, rows.shape[1]).index_copy(0, positions, rows)
        return rows.reshape(-1, rows.shape[1] * self.downsample)


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
