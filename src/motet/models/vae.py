"""diffusers' AutoencoderKL before the loss of a generator and behind its samples: pixels to latents, and back. Frozen.

    rows of pixels ──> encoder ──> mean and deviation ──> latents = (drawn - shift) * scale
    rows of latents ──> latents / scale + shift ──> decoder ──> rows of pixels

A row of an item's transform has the pixels of which the encoder makes one row of latents. So the sizes of items, known
from their headers, are those of the latents.

What the encoder says of an image never changes, as it is frozen: workers that decode files can compute it, too
(`train/input/latents.py`). What is drawn of it changes with each step, so that is left to the step.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor, nn
from torch.nn.functional import pixel_shuffle, pixel_unshuffle

from motet.core.arrays import Int64Array
from motet.core.errors import UserError
from motet.models import diffusers_directory as stored
from motet.models.layers import LayerModules
from motet.models.rasters import check_rasters, in_batches
from motet.models.vae_layers import unused_vae, vae_layers
from motet.noise import normal_of_rows

_BLOCKS = {"down_block_types": "DownEncoderBlock2D", "up_block_types": "UpDecoderBlock2D"}
"""The blocks that are described in `vae_layers`: those of Stable Diffusion and of SD3."""


class VAEConfig(BaseModel):
    """`[model.generators.NAME.vae]`: what makes latents of the pixels of items.

    path:      a local directory of diffusers: an AutoencoderKL, or a pipeline that has one; by default the generator's.
    posterior: "sample", which is drawn of what the encoder says, anew in each step; or "mode", its mean.
    encode_in: where the encoder runs: in the "step", with the generator; or in the "workers" that decode files.
    """

    model_config = ConfigDict(extra="forbid")
    path: Path | None = None
    posterior: Literal["sample", "mode"] = "sample"
    encode_in: Literal["step", "workers"] = "step"


class VAE(nn.Module):
    """A frozen AutoencoderKL on packed items.

    factor:      the side, in pixels, of what makes one row of latents. channels: the values of such a row.
    row_dim:     the values of a row of pixels. moments_dim: of a row of what the encoder says of them.
    encode_in:   as of `VAEConfig`: of "workers", `encode` is given what they have made of pixels.
    Raises UserError for options that are not computed here; the key is named, without the recipe's before it.
    """

    def __init__(
        self,
        vae: nn.Module,
        posterior: Literal["sample", "mode"] = "sample",
        encode_in: Literal["step", "workers"] = "step",
    ) -> None:
        super().__init__()
        _check_options(vae.config)
        self.vae, self.draws = vae.requires_grad_(False).eval(), posterior == "sample"
        self.encodes = encode_in == "step"
        self.factor: int = 2 ** (len(vae.config.block_out_channels) - 1)
        self.channels: int = vae.config.latent_channels
        self.row_dim: int = vae.config.in_channels * self.factor**2
        self.moments_dim: int = self.channels * (2 if self.draws else 1)
        self._scale: float = vae.config.scaling_factor
        self._shift: float = vae.config.shift_factor or 0.0

    def train(self, mode: bool = True) -> VAE:
        """`nn.Module.train`, except that it stays in eval mode."""
        return super().train(False)

    def check_sizes(self, sizes: Int64Array) -> None:
        """Raise UserError for sizes of sequences."""
        check_rasters(sizes, "a VAE")

    @torch.no_grad()
    def moments(self, values: Tensor, sizes: Tensor) -> Tensor:
        """The mean of latents and, where they are drawn, their deviation, [sum(rows), moments_dim].

        values: rows of pixels from -1 to 1, [sum(rows), row_dim]. sizes: int64 [num_items, 2] on the host.
        """

        def of_batch(pixels: Tensor, items: Tensor) -> Tensor:
            posterior = self.vae.encode(pixel_shuffle(pixels, self.factor), return_dict=False)[0]
            return torch.cat([posterior.mean, posterior.std], dim=1) if self.draws else posterior.mean

        return in_batches(values, sizes, of_batch)

    @torch.no_grad()
    def encode(self, values: Tensor, sizes: Tensor, keys: Int64Array) -> Tensor:
        """Latents [sum(rows), channels] of rows of pixels, or of what `moments` has made of them in a worker.

        sizes: as of `moments`. keys: of items, int64 [num_items], by which the posterior is drawn.
        """
        latents = self.moments(values, sizes) if self.encodes else values
        if self.draws:
            latents, deviation = latents.chunk(2, dim=1)
            counts = sizes.prod(dim=1).numpy()
            noise = normal_of_rows(keys, counts, self.channels, "posterior", values.device)
            latents = latents + deviation * noise.to(latents.dtype)
        return (latents - self._shift) * self._scale

    @torch.no_grad()
    def decode(self, latents: Tensor, sizes: Tensor) -> Tensor:
        """Rows of pixels [sum(rows), row_dim] of latents, [sum(rows), channels]."""

        def pixels(rasters: Tensor, items: Tensor) -> Tensor:
            return pixel_unshuffle(self.vae.decode(rasters, return_dict=False)[0], self.factor)

        return in_batches(latents / self._scale + self._shift, sizes, pixels)

    def layers(self) -> list[LayerModules]:
        """The encoder's layers, and as one layer what a step never calls: the decoder, or all of it."""
        return vae_layers(self.vae) if self.encodes else [unused_vae(self.vae)]


@dataclass(frozen=True)
class StoredVAE:
    """A VAE in a directory of diffusers. table: of the recipe, which messages name.

    Example: `StoredVAE("model.generators.draw.vae", Path("vae"), VAEConfig()).read(torch.float32).channels` is 4 of
    Stable Diffusion's.
    """

    table: str
    path: Path
    config: VAEConfig

    def read(self, dtype: torch.dtype) -> VAE:
        """With its weights; on meta, with shapes only. Raises UserError for another model, and for damaged weights."""
        model = stored.model_of_directory(self.table, self.path, stored.AUTOENCODER, dtype)
        try:
            return VAE(model, self.config.posterior, self.config.encode_in)
        except UserError as error:
            raise UserError(f"{self.table}.path: {self.path}: the VAE's {error}.") from None


def _check_options(config: Any) -> None:
    for name, known in _BLOCKS.items():
        for block in config[name]:
            if block != known:
                raise UserError(f"{name} has {block!r}, which is not computed; there is {known}")
    for name, computed in {"act_fn": "silu", "latents_mean": None, "latents_std": None}.items():
        if config[name] != computed:
            raise UserError(f"{name} is {config[name]!r}, of which only {computed!r} is computed")
    if config.out_channels != config.in_channels:
        raise UserError(f"out_channels is {config.out_channels}; it must be in_channels, which is {config.in_channels}")
    if not config.scaling_factor:
        raise UserError(f"scaling_factor is {config.scaling_factor}; latents are multiplied by it, so it cannot be 0")
