"""diffusers' UNet2DConditionModel as a denoiser of packed items: a convolutional net with skip connections.

A convolution reads the neighbours of a row, so a step computes as many dense batches as its items have sizes (buckets).
The rows of an item's condition are what its cross attention reads. Norms are over the channels of one item.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from motet.core.arrays import Int64Array
from motet.core.errors import UserError
from motet.models.denoiser import Alone, Denoiser, check_defaults
from motet.models.layers import LayerModules
from motet.models.rasters import in_batches
from motet.models.unet_layers import unet_layers
from motet.on_device import on_device

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


class UNet(Denoiser):
    """A UNet2DConditionModel. Sizes are multiples of 2 for each time that it halves them.

    Raises UserError for options that are not computed here; the key is named, without the recipe's before it.
    """

    what, part = "a UNet", "unet"

    def __init__(self, num_conditions: int, unet: nn.Module) -> None:
        config: Any = unet.config
        _check_options(unet)
        super().__init__(num_conditions, unet, config.cross_attention_dim, 2 ** (len(config.block_out_channels) - 1))
        self.model.time_proj = Alone(self.model.time_proj)

    def forward(
        self, noised: Tensor, times: Tensor, sizes: Tensor, conditions: Tensor, counts: Int64Array | None = None
    ) -> Tensor:
        """As `diffusion.Diffusion` calls it. Raises UserError as `check_sizes` does."""
        self.check_sizes(sizes.numpy())
        if counts is None:
            counts = np.full(len(sizes), self.num_conditions, dtype=np.int64)
        of_items, num_rows = conditions.split(counts.tolist()), torch.from_numpy(counts)

        def predicted(images: Tensor, items: Tensor) -> Tensor:
            own = num_rows[items]
            given = pad_sequence([of_items[item] for item in items.tolist()], batch_first=True)
            there = (
                None if (own == own[0]).all() else on_device(torch.arange(given.shape[1]) < own[:, None], images.device)
            )
            masked = {"encoder_attention_mask": there, "return_dict": False}
            found: Tensor = self.model(images, on_device(times[items], images.device), given, **masked)[0]
            return found

        return in_batches(noised, sizes, predicted)

    def layers(self) -> list[LayerModules]:
        """The layers in execution order, on items of their numbers of rows."""
        return unet_layers(self.model, self.num_conditions)


def _check_options(unet: nn.Module) -> None:
    config: Any = unet.config
    for name, known in _BLOCKS.items():
        given = config[name]
        for block in given if isinstance(given, list | tuple) else (given,):
            if block not in known:
                raise UserError(f"{name} has {block!r}, which is not computed; there are {', '.join(sorted(known))}")
    check_defaults(unet, _ANY)
    if config.out_channels != config.in_channels:
        raise UserError(f"out_channels is {config.out_channels}; it must be in_channels, which is {config.in_channels}")
    if not isinstance(config.cross_attention_dim, int):
        raise UserError("cross_attention_dim must be one number: each block reads the same conditions")
