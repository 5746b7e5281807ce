"""Denoising diffusion as a generator: what is added to latents, what the loss compares, and how samples are drawn.

    noised  = sqrt(a) latents + sqrt(1 - a) noise       a = product of 1 - beta up to the timestep
    epsilon = noise                                     (Ho et al. 2020, eq. 4 and section 3.2)
    v       = sqrt(a) noise - sqrt(1 - a) latents       (Salimans & Ho 2022, section 4)

Of each item one timestep is drawn evenly. min-SNR (Hang et al. 2023, section 3.4) weighs the loss of an item by
min(SNR, gamma), with SNR = a / (1 - a), in terms of predicted latents: that is min(SNR, gamma) / SNR for epsilon, and
min(SNR, gamma) / (SNR + 1) for v.

Samples are drawn by Song et al. 2021, eq. 12, from the timestep t to an earlier one s, with a of each:

    latents <- sqrt(a_s) clean + sqrt(1 - a_s - sigma^2) epsilon + sigma noise

DDIM has sigma = 0; ancestral sampling of DDPM has sigma^2 = (1 - a_s) / (1 - a_t) (1 - a_t / a_s) (eq. 16, eta = 1).
Guidance is by what is predicted without a condition (Ho & Salimans 2022, eq. 6; its w is `guidance` - 1 here).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor, nn

from motet.core.arrays import Float64Array, Int64Array
from motet.core.errors import UserError
from motet.models.layers import LayerModules
from motet.models.vae import VAE
from motet.noise import normal_of_rows, uniform_of_items

MAX_TIMESTEPS = 10**5


class NoiseConfig(BaseModel):
    """`[model.generators.NAME.noise]`: the noise of a diffusion model, and its loss.

    schedule:   of the betas: "linear" from beta_start to beta_end; "scaled_linear", whose roots are linear (Stable
                Diffusion); "cosine" (Nichol & Dhariwal 2021, eq. 17), which takes neither; or "path", that of the
                scheduler beside a model of diffusers, which says all but min_snr.
    beta_start, beta_end: the first and the last beta, unless the schedule is "cosine".
    timesteps:  their number.
    predicts:   what the model predicts: "epsilon", the noise, or "v".
    min_snr:    gamma of min-SNR weighting; None: all timesteps weigh alike.
    """

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)
    schedule: Literal["linear", "scaled_linear", "cosine", "path"] = "scaled_linear"
    timesteps: int = Field(1000, ge=1, le=MAX_TIMESTEPS)
    beta_start: float = Field(0.00085, gt=0, lt=1)
    beta_end: float = Field(0.012, gt=0, lt=1)
    predicts: Literal["epsilon", "v"] = "epsilon"
    min_snr: float | None = Field(None, gt=0)

    @model_validator(mode="after")
    def _path_says_all(self) -> NoiseConfig:
        said = {name: value for name, value in self if name not in ("schedule", "min_snr")}
        if self.schedule == "path" and (
            stray := [name for name, value in said.items() if value != type(self).model_fields[name].default]
        ):
            raise ValueError(f'`{stray[0]}` has no effect beside `schedule` = "path", as the scheduler\'s file says it')
        return self

    def kept(self) -> Float64Array:
        """Of each timestep the share of the latents' variance that is left (a above), float64 [timesteps]."""
        if self.schedule == "cosine":
            steps = np.arange(self.timesteps + 1) / self.timesteps
            angle = np.cos((steps + 0.008) / 1.008 * np.pi / 2) ** 2
            betas = np.minimum(1 - angle[1:] / angle[:-1], 0.999)
        elif self.schedule == "scaled_linear":
            betas = np.linspace(self.beta_start**0.5, self.beta_end**0.5, self.timesteps) ** 2
        else:
            betas = np.linspace(self.beta_start, self.beta_end, self.timesteps)
        kept: Float64Array = np.cumprod(1 - betas)
        return kept

    def weights(self) -> Float64Array:
        """Of each timestep the weight of its loss, float64 [timesteps]."""
        kept = self.kept()
        if self.min_snr is None:
            return np.ones_like(kept)
        snr = kept / (1 - kept)
        weights: Float64Array = np.minimum(snr, self.min_snr) / (snr if self.predicts == "epsilon" else snr + 1)
        return weights

    def visits(self, sampling: SamplingConfig) -> list[Visit]:
        """The timesteps that a sampler takes, from the last to the first."""
        kept = self.kept()
        times = np.linspace(self.timesteps - 1, 0, sampling.steps).round().astype(np.int64).tolist()
        return [Visit(time, float(left)) for time, left in zip(times, [*kept[times[1:]], 1.0], strict=True)]

    @property
    def bound(self) -> float | None:
        """Predicted latents are clipped to plus and minus this; None: they are not."""
        return None


class Visit(NamedTuple):
    """A timestep of sampling, and what is kept (a above) where it leads to."""

    time: int
    left: float


class SamplingConfig(BaseModel):
    """`[model.generators.NAME.sampling]`: how items are made of held-out prompts.

    sampler:  "ddim", which adds no noise on its way, or "ddpm", ancestral sampling.
    steps:    timesteps that are taken, evenly spread from the last to the first.
    guidance: how far to go beyond what is predicted without a condition; 1 is none, and more needs drop_condition.
    """

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, frozen=True)
    sampler: Literal["ddim", "ddpm"] = "ddim"
    steps: int = Field(50, ge=1, le=MAX_TIMESTEPS)
    guidance: float = Field(1.0, ge=0, le=100)


class Diffusion(nn.Module):
    """A denoiser with its noise, as `contract.Generator` asks: the latents of an item are its target.

    denoiser: has condition_dim, row_dim and layers(), perhaps blocks, divisor and check_sizes, and is called with
              noised [sum(rows), row_dim], times int64 [num_items], sizes int64 [num_items, size_dim] and conditions
              [num_items * rows of each, condition_dim] -> [sum(rows), row_dim] (`dit.DiT`).
    vae:      makes latents of what is to be made, and shows what is sampled; None: that is latents already.
    Raises UserError for a VAE whose latents the denoiser does not take.
    """

    def __init__(self, denoiser: nn.Module, noise: NoiseConfig, vae: VAE | None = None) -> None:
        super().__init__()
        if vae is not None and vae.channels != denoiser.row_dim:
            raise UserError(
                f"the VAE makes latents of {vae.channels} values, but the model denoises rows of {denoiser.row_dim}"
            )
        self.denoiser, self.noise, self.vae = denoiser, noise, vae
        self.condition_dim: int = denoiser.condition_dim
        self._kept, self._weights = noise.kept(), noise.weights()

    @property
    def blocks(self) -> list[nn.Module]:
        """Those of the denoiser."""
        return list(getattr(self.denoiser, "blocks", []))

    @property
    def row_dim(self) -> int:
        """The values of a row of what is made: of pixels with a VAE, else of latents."""
        return self.denoiser.row_dim if self.vae is None else self.vae.row_dim

    @property
    def divisor(self) -> int:
        """What each size of an item must be a multiple of."""
        return getattr(self.denoiser, "divisor", 1)

    def check_sizes(self, sizes: Int64Array) -> None:
        """Raise UserError for sizes of items that the denoiser cannot make."""
        for part in (self.vae, self.denoiser):
            if check := getattr(part, "check_sizes", None):
                check(sizes)

    def layers(self) -> list[LayerModules]:
        """Those of the VAE's encoder, and of the denoiser."""
        return [*(self.vae.layers() if self.vae is not None else ()), *self.denoiser.layers()]

    def forward(self, values: Tensor, sizes: Tensor, conditions: Tensor, keys: Int64Array) -> Tensor:
        """The loss: squared errors, mean over the values of a row, summed over rows; at least float32, a scalar.

        keys: of items, int64 [num_items], by which timesteps and noise are drawn. Others: as in `contract.Generator`.
        """
        if self.vae is not None:
            values = self.vae.encode(values, sizes, keys)
        counts = sizes.prod(dim=1)
        drawn = uniform_of_items(keys, "time") * self.noise.timesteps
        times = drawn.long().clamp_max(self.noise.timesteps - 1)
        noise = normal_of_rows(keys, counts.numpy(), values.shape[1], "noise", values.device).to(values.dtype)
        return self.loss(values, noise, times, sizes, conditions)

    def loss(self, values: Tensor, noise: Tensor, times: Tensor, sizes: Tensor, conditions: Tensor) -> Tensor:
        """As `forward`, of latents, with given noise of their shape and timesteps int64 [num_items] on the host."""
        counts = sizes.prod(dim=1)
        wide = torch.promote_types(values.dtype, torch.float32)
        kept = self._of_rows(self._kept[times.numpy()], counts, values.device, wide)
        signal, spread, latents, noise = kept.sqrt(), (1 - kept).sqrt(), values.to(wide), noise.to(wide)
        noised = signal * latents + spread * noise
        predicted = self.denoiser(noised.to(values.dtype), times, sizes, conditions).to(wide)
        target = noise if self.noise.predicts == "epsilon" else signal * noise - spread * latents
        weights = self._of_rows(self._weights[times.numpy()], counts, values.device, wide)
        return ((predicted - target).square().mean(1, keepdim=True) * weights).sum()

    @torch.no_grad()
    def sample(
        self,
        sizes: Tensor,
        conditions: Tensor,
        keys: Int64Array,
        sampling: SamplingConfig,
        guided: Callable[[Callable[[Tensor], Tensor]], Tensor] | None = None,
    ) -> Tensor:
        """What is made for conditions [num_items * rows of each, condition_dim]: [sum(rows), row_dim].

        keys: of items, by which noise is drawn. guided: makes one prediction of predictions by conditions.
        """
        counts, device = sizes.prod(dim=1), conditions.device
        wide = torch.promote_types(conditions.dtype, torch.float32)
        latents = normal_of_rows(keys, counts.numpy(), self.denoiser.row_dim, "noise", device).to(wide)
        for step, left in self.noise.visits(sampling):
            times = torch.full((len(sizes),), step)

            def predict(given: Tensor, noised: Tensor = latents, times: Tensor = times) -> Tensor:
                return self.denoiser(noised.to(given.dtype), times, sizes, given).to(wide)

            predicted = predict(conditions) if guided is None else guided(predict)
            kept = float(self._kept[step])
            if self.noise.predicts == "epsilon":
                noise = predicted
                clean = (latents - (1 - kept) ** 0.5 * noise) / kept**0.5
            else:
                clean = kept**0.5 * latents - (1 - kept) ** 0.5 * predicted
                noise = kept**0.5 * predicted + (1 - kept) ** 0.5 * latents
            if (bound := self.noise.bound) is not None:
                clean = clean.clamp(-bound, bound)
                if sampling.sampler == "ddpm":  # Its mean is of what is clipped (Ho et al. 2020, eq. 7).
                    noise = (latents - kept**0.5 * clean) / (1 - kept) ** 0.5
            spread = (1 - left) / (1 - kept) * (1 - kept / left) if sampling.sampler == "ddpm" else 0.0
            latents = left**0.5 * clean + max(1 - left - spread, 0.0) ** 0.5 * noise
            if spread > 0:
                own = normal_of_rows(keys, counts.numpy(), self.denoiser.row_dim, f"noise before {step}", device)
                latents = latents + spread**0.5 * own.to(wide)
        if self.vae is None:
            return latents
        return self.vae.decode(latents.to(conditions.dtype), sizes).to(wide)

    @staticmethod
    def _of_rows(of_items: Float64Array, counts: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
        """A number of each item for each of its rows, [sum(rows), 1]."""
        return torch.from_numpy(of_items).repeat_interleave(counts)[:, None].to(device, dtype)
