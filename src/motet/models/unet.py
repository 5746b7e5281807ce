"""diffusers' UNet2DConditionModel as a denoiser of packed items: a convolutional net with skip connections.

Items of one size are one dense batch, since a convolution reads the neighbours of a row; so a step computes as many
batches as its items have sizes (buckets). The rows of an item's condition are what its cross attention reads. Of an
item nothing depends on the others: norms are over the channels of one item.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from motet.core.arrays import Int64Array
from motet.core.errors import UserError
from motet.models.layers import LayerModules
from motet.models.rasters import check_rasters, in_batches
from motet.models.unet_layers import unet_layers

_BLOCKS = {
    "down_block_types": {"DownBlock2D", "CrossAttnDownBlock2D"},
    "mid_block_type": {"UNetMidBlock2DCrossAttn"},
    "up_block_types": {"UpBlock2D", "CrossAttnUpBlock2D"},
}
"""The blocks that are described in `unet_layers`: those of Stable Diffusion 1 and 2."""

_ANY = frozenset(
    {
        "sample_size", "in_channels", "out_channels", "center_input_sample", "flip_sin_to_cos", "freq_shift",
        "block_out_channels", "layers_per_block", "norm_num_groups", "norm_eps", "cross_attention_dim",
        "transformer_layers_per_block", "attention_head_dim", "use_linear_projection", "upcast_attention", *_BLOCKS,
    }
)  # fmt: skip
"""Options that may have any value. Others change what is computed, or what it is computed of, and keep their default;
dropout would draw masks by batch, and not by item."""


class UNet(nn.Module):
    """A UNet2DConditionModel that predicts what `diffusion.Diffusion` asks for.

    num_conditions: the rows of each item's condition.
    divisor:        what both sizes of an item must be multiples of: 2 for each time that they are halved.
    Raises UserError for options that are not computed here; the key is named, without the recipe's before it.
    """

    def __init__(self, num_conditions: int, unet: nn.Module) -> None:
        super().__init__()
        check_options(unet.config, type(unet))
        self.num_conditions, self.unet = num_conditions, unet
        self.row_dim: int = unet.config.in_channels
        self.condition_dim: int = unet.config.cross_attention_dim
        self.divisor: int = 2 ** (len(unet.config.block_out_channels) - 1)
        unet.time_proj = Alone(unet.time_proj)

    def check_sizes(self, sizes: Int64Array) -> None:
        """Raise UserError for sizes, int64 [num_items, 2], that do not stay whole when they are halved."""
        check_rasters(sizes, "a UNet")
        if (wrong := np.flatnonzero((sizes % self.divisor).any(axis=1))).size:
            rows, columns = sizes[wrong[0]].tolist()
            raise UserError(
                f"a raster of {rows} x {columns} rows cannot be halved {self.divisor.bit_length() - 1} times, as the "
                f"UNet does; let its transform make sides that are multiples of {self.divisor}, as by fixed_size"
            )

    def forward(self, noised: Tensor, times: Tensor, sizes: Tensor, conditions: Tensor) -> Tensor:
        """As `diffusion.Diffusion` calls it. Raises UserError as `check_sizes` does."""
        self.check_sizes(sizes.numpy())
        of_items = conditions.unflatten(0, (len(sizes), self.num_conditions))

        def predicted(images: Tensor, items: Tensor) -> Tensor:
            given = of_items[items.to(images.device)]
            return self.unet(images, times[items].to(images.device), given, return_dict=False)[0]

        return in_batches(noised, sizes, predicted)

    def layers(self) -> list[LayerModules]:
        """The layers in execution order, on items of their numbers of rows."""
        return unet_layers(self.unet, self.num_conditions)


def check_options(config: Any, kind: type[nn.Module]) -> None:
    """Raise UserError for options of a UNet2DConditionModel that Motet does not compute."""
    import inspect

    defaults = {name: each.default for name, each in inspect.signature(kind.__init__).parameters.items()}
    for name, known in _BLOCKS.items():
        given = config[name]
        for block in given if isinstance(given, list | tuple) else (given,):
            if block not in known:
                raise UserError(f"{name} has {block!r}, which is not computed; there are {', '.join(sorted(known))}")
    for name, default in defaults.items():
        if name == "self" or name in _ANY:
            continue
        if _plain(config[name]) != _plain(default):
            raise UserError(f"{name} is {config[name]!r}, of which only {default!r} is computed")
    if config.out_channels != config.in_channels:
        raise UserError(f"out_channels is {config.out_channels}; it must be in_channels, which is {config.in_channels}")
    if not isinstance(config.cross_attention_dim, int):
        raise UserError("cross_attention_dim must be one number: each block reads the same conditions")


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, list | tuple) else value


class Alone(nn.Module):
    """Waves of timesteps, item by item: the last bits of a sine in float32 may hang on where it stands in a batch."""

    def __init__(self, waves: nn.Module) -> None:
        super().__init__()
        self.waves = waves

    def forward(self, times: Tensor) -> Tensor:
        return torch.cat([self.waves(each) for each in times.split(1)])
