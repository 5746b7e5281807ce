"""diffusers' SD3Transformer2DModel as a denoiser of packed items: joint attention over latents and conditions.

A row of an item's condition is what the transformer takes of a token of text, and beside it what its pooled text takes:
the mean of this over the item's rows. Items of one size are one dense batch. Of an item nothing depends on the others.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor, nn

from motet.core.arrays import Int64Array
from motet.core.errors import UserError
from motet.models.layers import LayerModules
from motet.models.rasters import check_rasters, in_batches
from motet.models.sd3_layers import sd3_layers
from motet.models.unet import Alone


class SD3(nn.Module):
    """An SD3Transformer2DModel that predicts what `diffusion.Diffusion` asks for.

    num_conditions: the rows of each item's condition.
    divisor:        what both sizes of an item must be multiples of: the side of a patch.
    Raises UserError for options that are not computed here; the key is named, without the recipe's before it.
    """

    def __init__(self, num_conditions: int, transformer: nn.Module) -> None:
        super().__init__()
        config = transformer.config
        if config.out_channels not in (None, config.in_channels):
            raise UserError(
                f"out_channels is {config.out_channels}; it must be in_channels, which is {config.in_channels}"
            )
        if config.caption_projection_dim != (width := config.num_attention_heads * config.attention_head_dim):
            raise UserError(
                f"caption_projection_dim is {config.caption_projection_dim}; it must be num_attention_heads * "
                f"attention_head_dim, which is {width}"
            )
        if config.qk_norm not in (None, "rms_norm"):
            raise UserError(f"qk_norm is {config.qk_norm!r}, of which only None and 'rms_norm' are computed")
        if not config.pos_embed_max_size:
            raise UserError("pos_embed_max_size is not set; positions of latents are cut of so many rows and columns")
        self.num_conditions, self.transformer = num_conditions, transformer
        self.row_dim: int = config.in_channels
        self.condition_dim: int = config.joint_attention_dim + config.pooled_projection_dim
        self.divisor: int = config.patch_size
        transformer.time_text_embed.time_proj = Alone(transformer.time_text_embed.time_proj)

    def check_sizes(self, sizes: Int64Array) -> None:
        """Raise UserError for sizes, int64 [num_items, 2], of no whole patches, or beyond the table of positions."""
        check_rasters(sizes, "an SD3 transformer")
        most = self.divisor * self.transformer.config.pos_embed_max_size
        if (wrong := np.flatnonzero((sizes % self.divisor).any(axis=1) | (sizes > most).any(axis=1))).size:
            rows, columns = sizes[wrong[0]].tolist()
            raise UserError(
                f"a raster of {rows} x {columns} rows is not what the SD3 transformer makes: let the transform make "
                f"sides that are multiples of {self.divisor} and at most {most}, as by fixed_size or buckets"
            )

    def forward(self, noised: Tensor, times: Tensor, sizes: Tensor, conditions: Tensor) -> Tensor:
        """As `diffusion.Diffusion` calls it. Raises UserError as `check_sizes` does."""
        self.check_sizes(sizes.numpy())
        of_items = conditions.unflatten(0, (len(sizes), self.num_conditions))
        width = self.transformer.config.joint_attention_dim
        text, pooled = of_items[..., :width], of_items[..., width:].mean(dim=1)

        def predicted(images: Tensor, items: Tensor) -> Tensor:
            here = items.to(images.device)
            given = {"encoder_hidden_states": text[here], "pooled_projections": pooled[here]}
            return self.transformer(images, timestep=times[items].to(images.device), **given, return_dict=False)[0]

        return in_batches(noised, sizes, predicted)

    def layers(self) -> list[LayerModules]:
        """The layers in execution order, on items of their numbers of rows."""
        return sd3_layers(self.transformer, self.num_conditions)
