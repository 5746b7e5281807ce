"""diffusers' SD3Transformer2DModel as a denoiser of packed items: joint attention over latents and conditions.

A row of an item's condition is what the transformer takes of a token of text, and beside it what its pooled text takes:
the mean of this over the item's rows.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from motet.core.errors import UserError
from motet.models.denoiser import Alone, Denoiser
from motet.models.layers import LayerModules
from motet.models.sd3_layers import sd3_layers


class SD3(Denoiser):
    """An SD3Transformer2DModel. Sizes are of whole patches, within its table of positions.

    Raises UserError for options that are not computed here; the key is named, without the recipe's before it.
    """

    what, part = "an SD3 transformer", "transformer"
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
        super().__init__(num_conditions, transformer, given, config.patch_size)
        self.most = config.patch_size * config.pos_embed_max_size
        steering = self.model.time_text_embed
        steering.time_proj = Alone(steering.time_proj)

    def predict(self, images: Tensor, times: Tensor, conditions: Tensor, there: Tensor | None = None) -> Tensor:
        """As `Denoiser.predict`."""
        width = self.model.config.joint_attention_dim
        text, pooled = conditions[..., :width], conditions[..., width:].mean(dim=1)
        given = {"encoder_hidden_states": text, "pooled_projections": pooled}
        predicted: Tensor = self.model(images, timestep=times, **given, return_dict=False)[0]
        return predicted

    def layers(self) -> list[LayerModules]:
        """The layers in execution order, on items of their numbers of rows."""
        return sd3_layers(self.model, self.num_conditions)
