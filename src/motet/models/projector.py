"""From an encoder's rows to the backbone's: a linear map or an MLP, after joining consecutive rows of an item."""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn


class ProjectorConfig(BaseModel):
    """The map, "linear" or "mlp" (two layers with GELU), and how many rows are joined first (OrchMLLM section 8)."""

    model_config = ConfigDict(extra="forbid")
    kind: Literal["linear", "mlp"] = "mlp"
    downsample: int = Field(default=1, ge=1)


class Projector(nn.Module):
    """Rows [sum(counts), input_dim] of items with `counts` rows each -> [sum(ceil(counts / downsample)), output_dim].

    The tail of an item whose count is no multiple of `downsample` is filled with zero rows, so no row mixes two items.
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

    def num_outputs(self, counts: NDArray[np.int64]) -> NDArray[np.int64]:
        return -(-counts // self.downsample)

    def forward(self, rows: Tensor, counts: NDArray[np.int64]) -> Tensor:
        return self.layers(self._join(rows, counts) if self.downsample > 1 else rows)

    def _join(self, rows: Tensor, counts: NDArray[np.int64]) -> Tensor:
        filled = self.num_outputs(counts) * self.downsample
        if (filled != counts).any():
            # Row r of item i moves down by the zero rows that fill up the items before it.
            shift = np.repeat(np.cumsum(filled - counts) - (filled - counts), counts)
            places = torch.from_numpy(np.arange(counts.sum()) + shift).to(rows.device)
            rows = rows.new_zeros(int(filled.sum()), rows.shape[1]).index_copy(0, places, rows)
        return rows.reshape(-1, rows.shape[1] * self.downsample)
