"""diffusers' PixArtTransformer2DModel as a denoiser of packed items: patches that read the rows of a condition.

A row of an item's condition is what the transformer takes of a token of text. A model with twice as many outputs as
inputs has learned the variance beside the noise: the first half is what is predicted, as diffusers' pipelines take it,
and the other half has no loss.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from motet.core.errors import UserError
from motet.models.denoiser import Alone, Denoiser, check_defaults
from motet.models.layers import LayerModules
from motet.models.pixart_layers import pixart_layers

_ANY = frozenset(
    {
        "num_attention_heads", "attention_head_dim", "in_channels", "out_channels", "num_layers", "norm_num_groups",
        "cross_attention_dim", "attention_bias", "sample_size", "patch_size", "num_embeds_ada_norm", "norm_eps",
        "interpolation_scale", "use_additional_conditions", "caption_channels",
    }
)  # fmt: skip
"""Options that may have any value, or are looked at below. Others change what is computed and keep their default."""


class PixArt(Denoiser):
    """A PixArtTransformer2DModel. Sizes are of whole patches; positions are computed for any.

    Raises UserError for options that are not computed here; the key is named, without the recipe's before it.
    """

    what, part = "a PixArt transformer", "transformer"

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
        super().__init__(num_conditions, transformer, given, config.patch_size)
        steering = self.model.adaln_single.emb
        steering.time_proj = Alone(steering.time_proj)

    def predict(self, images: Tensor, times: Tensor, conditions: Tensor, there: Tensor | None = None) -> Tensor:
        """As `Denoiser.predict`."""
        given = {"encoder_attention_mask": there, "return_dict": False}
        predicted: Tensor = self.model(images, conditions, timestep=times, **given)[0]
        return predicted[:, : self.row_dim]

    def layers(self) -> list[LayerModules]:
        """The layers in execution order, on items of their numbers of rows."""
        return pixart_layers(self.model, self.num_conditions)
