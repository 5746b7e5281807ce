"""What the models of diffusers that denoise share: which items they make, and what is refused.

Items are computed in dense batches of one size. Of an item nothing depends on the others. The rows of its condition are
its alone.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from motet.core.arrays import Int64Array
from motet.core.errors import UserError
from motet.models.rasters import check_rasters


class Denoiser(nn.Module):
    """A model of diffusers that predicts what `diffusion.Diffusion` asks for.

    what, part:     what messages call it; its folder in a pipeline, and the name under which it holds the model.
    most:           the most rows and the most columns of an item; None: any number.
    num_conditions: the rows of each item's condition, of condition_dim values each; or the most of any.
    row_dim:        the values of a row of what it makes.
    divisor:        what both sizes of an item must be multiples of.
    """

    what: ClassVar[str]
    part: ClassVar[str]
    most: int | None = None

    def __init__(self, num_conditions: int, model: nn.Module, condition_dim: int, divisor: int) -> None:
        super().__init__()
        self.num_conditions, self.condition_dim, self.divisor = num_conditions, condition_dim, divisor
        self.row_dim: int = model.config.in_channels
        self.add_module(self.part, model)

    @property
    def model(self) -> Any:
        """That of diffusers."""
        return getattr(self, self.part)

    def check_sizes(self, sizes: Int64Array) -> None:
        """Raise UserError for sizes, int64 [num_items, 2], that it cannot make."""
        check_rasters(sizes, self.what, self.divisor, self.most)


def check_defaults(model: nn.Module, free: Collection[str]) -> None:
    """Raise UserError for an option of a model of diffusers that is not at its default. free: may have any value."""
    config: Any = model.config
    for name, each in inspect.signature(type(model).__init__).parameters.items():
        if name == "self" or name in free:
            continue
        if _plain(config[name]) != _plain(each.default):
            raise UserError(f"{name} is {config[name]!r}, of which only {each.default!r} is computed")


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, list | tuple) else value


class Alone(nn.Module):
    """Waves of timesteps, item by item: the last bits of a sine in float32 may hang on where it stands in a batch."""

    def __init__(self, waves: nn.Module) -> None:
        super().__init__()
        self.waves = waves

    def forward(self, times: Tensor) -> Tensor:
        return torch.cat([self.waves(each) for each in times.split(1)])
