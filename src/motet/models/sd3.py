"""diffusers' SD3Transformer2DModel as a denoiser of packed items: joint attention over latents and conditions.

A row of an item's condition is what the transformer takes of a token of text, and beside it what its pooled text takes:
the mean of this over the item's rows.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from motet.core.errors import UserError
from motet.models.denoiser import Alone
from motet.models.layers import LayerModules
from motet.models.sd3_layers import sd3_layers
from motet.models.stacked_denoiser import StackedDenoiser


class SD3(StackedDenoiser):
    """An SD3Transformer2DModel. Sizes are of whole patches, within its table of positions.

    Raises UserError for options that are not computed here; the key is named, without the recipe's before it.
    """

    what = "an SD3 transformer"
    masks = False  # Joint attention of diffusers takes no mask.

    def __init__(self, num_conditions: int, transformer: nn.Module) -> None:
        config: Any = transformer.config
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
        given = config.joint_attention_dim + config.pooled_projection_dim
        super().__init__(num_conditions, transformer, given)
        self.most = config.patch_size * config.pos_embed_max_size
        steering = self.model.time_text_embed
        steering.time_proj = Alone(steering.time_proj)

    def embedded(self, images: Tensor, times: Tensor, conditions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """As `StackedDenoiser.embedded`; no condition is padded."""
        text, pooled = conditions.split(
            [self.model.config.joint_attention_dim, self.model.config.pooled_projection_dim], -1
        )
        steering = self.model.time_text_embed(times, pooled.mean(dim=1))
        return self.model.pos_embed(images), self.model.context_embedder(text), steering[:, None]

    @staticmethod
    def steered(
        block: nn.Module, patches: Tensor, conditions: Tensor, steering: Tensor, there: Tensor | None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """As `StackedDenoiser.steered`. The last block gives patches alone."""
        given = {"hidden_states": patches, "encoder_hidden_states": conditions, "temb": steering[:, 0]}
        conditions, patches = block(**given)
        return patches if conditions is None else (patches, conditions)

    def projected(self, patches: Tensor, steering: Tensor) -> Tensor:
        """As `StackedDenoiser.projected`."""
        found: Tensor = self.model.proj_out(self.model.norm_out(patches, steering[:, 0]))
        return found

    def layers(self) -> list[LayerModules]:
        """The layers in execution order, on items of their numbers of rows."""
        return sd3_layers(self.model, self.num_conditions)
