"""diffusers' PixArtTransformer2DModel as a denoiser of packed items: patches that read the rows of a condition.

A row of an item's condition is what the transformer takes of a token of text. A model with twice as many outputs as
inputs has learned the variance beside the noise: the first half is what is predicted, as diffusers' pipelines take it,
and the other half has no loss.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from motet.core.errors import UserError
from motet.models.denoiser import Alone, check_defaults
from motet.models.layers import LayerModules
from motet.models.pixart_layers import pixart_layers
from motet.models.stacked_denoiser import StackedDenoiser

_ANY = frozenset(
    {
        "num_attention_heads", "attention_head_dim", "in_channels", "out_channels", "num_layers", "norm_num_groups",
        "cross_attention_dim", "attention_bias", "sample_size", "patch_size", "num_embeds_ada_norm", "norm_eps",
        "interpolation_scale", "use_additional_conditions", "caption_channels",
    }
)  # fmt: skip
"""Options that may have any value, or are looked at below. Others change what is computed and keep their default."""

_FACTORS, _MASKED = 6, -10_000.0
"""Factors and shifts of a block; what is added to scores of padding."""


class PixArt(StackedDenoiser):
    """A PixArtTransformer2DModel. Sizes are of whole patches; positions are computed for any.

    Raises UserError for options that are not computed here; the key is named, without the recipe's before it.
    """

    what = "a PixArt transformer"
    num_steering = _FACTORS + 1

    def __init__(self, num_conditions: int, transformer: nn.Module) -> None:
        config: Any = transformer.config
        check_defaults(transformer, _ANY)
        if transformer.use_additional_conditions:
            said = "null, which is true beside a sample_size of 128"
            said = said if config.use_additional_conditions is None else "true"
            raise UserError(
                f"use_additional_conditions is {said}; resolutions and aspects are not computed as conditions, so it "
                "must be false"
            )
        if config.out_channels not in (None, config.in_channels, 2 * config.in_channels):
            raise UserError(
                f"out_channels is {config.out_channels}; it must be in_channels, which is {config.in_channels}, or "
                "twice as many"
            )
        width = config.num_attention_heads * config.attention_head_dim
        if config.cross_attention_dim is None:
            raise UserError("cross_attention_dim is null; it must be a number, as a condition is what attention reads")
        if config.caption_channels is not None and config.cross_attention_dim != width:
            raise UserError(
                f"cross_attention_dim is {config.cross_attention_dim}; beside caption_channels it must be "
                f"num_attention_heads * attention_head_dim, which is {width}"
            )
        given = config.caption_channels or config.cross_attention_dim
        super().__init__(num_conditions, transformer, given)
        if config.caption_channels is None and given != width:
            self.uncuttable = f"the rows of its conditions are {given} wide, and those of its patches {width}"
        steering = self.model.adaln_single.emb
        steering.time_proj = Alone(steering.time_proj)

    def embedded(self, images: Tensor, times: Tensor, conditions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """As `StackedDenoiser.embedded`: what all blocks add to their tables, and what is added behind the last."""
        patches, projection = self.model.pos_embed(images), self.model.caption_projection
        factors, last = self.model.adaln_single(times, None, batch_size=len(images), hidden_dtype=patches.dtype)
        steering = torch.cat([factors.unflatten(1, (_FACTORS, -1)), last[:, None]], dim=1)
        return patches, conditions if projection is None else projection(conditions), steering

    @staticmethod
    def steered(
        block: nn.Module, patches: Tensor, conditions: Tensor, steering: Tensor, there: Tensor | None
    ) -> Tensor:
        """As `StackedDenoiser.steered`; conditions stay."""
        masked = None if there is None else (_MASKED * (~there).to(patches.dtype))[:, None]
        given = {"encoder_hidden_states": conditions, "encoder_attention_mask": masked}
        found: Tensor = block(patches, timestep=steering[:, :_FACTORS].flatten(1), **given)
        return found

    def projected(self, patches: Tensor, steering: Tensor) -> Tensor:
        """As `StackedDenoiser.projected`."""
        shift, scale = (self.model.scale_shift_table + steering[:, _FACTORS:]).chunk(2, dim=1)
        found: Tensor = self.model.proj_out(self.model.norm_out(patches) * (1 + scale) + shift)
        return found

    def layers(self) -> list[LayerModules]:
        """The layers in execution order, on items of their numbers of rows."""
        return pixart_layers(self.model, self.num_conditions)
