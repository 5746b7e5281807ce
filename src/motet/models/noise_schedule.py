"""What is added to latents at each timestep, what the loss compares, and how samples go from one to an earlier one.

    noised  = sqrt(a) latents + sqrt(1 - a) noise       a = product of 1 - beta up to the timestep
    epsilon = noise                                     (Ho et al. 2020, eq. 4 and section 3.2)
    v       = sqrt(a) noise - sqrt(1 - a) latents       (Salimans & Ho 2022, section 4)

Of each item one timestep is drawn evenly. min-SNR (Hang et al. 2023, section 3.4) weighs the loss of an item by
min(SNR, gamma), with SNR = a / (1 - a), in terms of predicted latents: that is min(SNR, gamma) / SNR for epsilon, and
min(SNR, gamma) / (SNR + 1) for v.

Samples are drawn by Song et al. 2021, eq. 12, from the timestep t to an earlier one s, with a of each:

    latents <- sqrt(a_s) clean + sqrt(1 - a_s - sigma^2) epsilon + sigma noise

DDIM has sigma = 0; ancestral sampling of DDPM has sigma^2 = (1 - a_s) / (1 - a_t) (1 - a_t / a_s) (eq. 16, eta = 1).

A flow (rectified flow: Esser et al. 2024, sections 2 and 3.1) goes from latents to noise in straight lines:

    noised   = (1 - s) latents + s noise                s = shift t / (1 + (shift - 1) t), and t is up to 1
    velocity = noise - latents
    latents <- latents + (s' - s) velocity              (Euler's step to an earlier s')
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor

from motet.core.arrays import Float64Array, Int64Array
from motet.noise import normal_of_rows, uniform_of_items

MAX_TIMESTEPS = 10**5
_ENDS, _OF_FLOW = ("beta_start", "beta_end"), ("shift", "times")
_UNUSED = {"flow": (*_ENDS, "predicts", "min_snr"), "cosine": (*_ENDS, *_OF_FLOW), "path": ()}
"""Schedule -> the options that it does not read; of all others those of a flow."""


class NoiseConfig(BaseModel):
    """`[model.generators.NAME.noise]`: the noise of a diffusion model, and its loss.

    schedule:   of the betas: "linear" from beta_start to beta_end; "scaled_linear", whose roots are linear (Stable
                Diffusion); "cosine" (Nichol & Dhariwal 2021, eq. 17), which takes neither; "flow", which has none; or
                "path", that of the scheduler beside a model of diffusers, which says all but min_snr and times.
    beta_start, beta_end: the first and the last beta, unless the schedule is "cosine".
    timesteps:  their number.
    predicts:   what the model predicts: "epsilon", the noise, or "v"; of a flow it is the velocity.
    min_snr:    gamma of min-SNR weighting; None: all timesteps weigh alike.
    shift:      of a flow: above 1, more of its timesteps are near the noise (SD3: 3).
    times:      of a flow, which timesteps it learns from: "uniform", or "logit_normal", fewer at both ends.
    """

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)
    schedule: Literal["linear", "scaled_linear", "cosine", "flow", "path"] = "scaled_linear"
    timesteps: int = Field(1000, ge=1, le=MAX_TIMESTEPS)
    beta_start: float = Field(0.00085, gt=0, lt=1)
    beta_end: float = Field(0.012, gt=0, lt=1)
    predicts: Literal["epsilon", "v"] = "epsilon"
    min_snr: float | None = Field(None, gt=0)
    shift: float = Field(1.0, gt=0, le=100)
    times: Literal["uniform", "logit_normal"] = "uniform"

    @model_validator(mode="after")
    def _path_says_all(self) -> NoiseConfig:
        said = [name for name, value in self if value != type(self).model_fields[name].default]
        if self.schedule == "path" and (
            stray := [name for name in said if name not in ("schedule", "min_snr", "times")]
        ):
            raise ValueError(f'`{stray[0]}` has no effect beside `schedule` = "path", as the scheduler\'s file says it')
        unused = _UNUSED.get(self.schedule, _OF_FLOW)
        if stray := [name for name in said if name in unused]:
            raise ValueError(f'`{stray[0]}` has no effect on `schedule` = "{self.schedule}"; remove it')
        return self

    @property
    def is_flow(self) -> bool:
        """Whether it goes from latents to noise in straight lines."""
        return self.schedule == "flow"

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

    def levels(self) -> Float64Array:
        """Of a flow, the share of noise at each timestep (s above), ascending, float64 [timesteps]."""
        return self._shifted(np.arange(1, self.timesteps + 1) / self.timesteps)

    def _shifted(self, times: Float64Array) -> Float64Array:
        return self.shift * times / (1 + (self.shift - 1) * times)

    def factors(self) -> tuple[Float64Array, Float64Array]:
        """Of each timestep the factors of latents and of noise in what is noised, float64 [timesteps] each."""
        if self.is_flow:
            levels = self.levels()
            return 1 - levels, levels
        kept = self.kept()
        return np.sqrt(kept), np.sqrt(1 - kept)

    def weights(self) -> Float64Array:
        """Of each timestep the weight of its loss, float64 [timesteps]."""
        if self.min_snr is None:
            return np.ones(self.timesteps)
        kept = self.kept()
        snr = kept / (1 - kept)
        weights: Float64Array = np.minimum(snr, self.min_snr) / (snr if self.predicts == "epsilon" else snr + 1)
        return weights

    def drawn_times(self, keys: Int64Array) -> Tensor:
        """Timesteps of items, int64 [num_items], on the host. keys: of items, int64 [num_items]."""
        if self.times == "logit_normal":
            host = torch.device("cpu")
            drawn = normal_of_rows(keys, np.ones(len(keys), np.int64), 1, "time", host)[:, 0].sigmoid()
        else:
            drawn = uniform_of_items(keys, "time")
        return (drawn * self.timesteps).long().clamp_max(self.timesteps - 1)

    def given(self, times: Tensor) -> Tensor:
        """What the model is told of timesteps, int64 [num_items]: of a flow, how far they are, float64."""
        return torch.from_numpy(self.levels())[times] * self.timesteps if self.is_flow else times

    def target(self, latents: Tensor, noise: Tensor, signal: Tensor, spread: Tensor) -> Tensor:
        """What the model is to predict. signal, spread: of each row, as of `factors`."""
        if self.is_flow:
            return noise - latents
        return noise if self.predicts == "epsilon" else signal * noise - spread * latents

    def visits(self, sampling: SamplingConfig) -> list[Visit]:
        """The timesteps that a sampler takes, from the last to the first."""
        if self.is_flow:
            return self._visits_of_flow(sampling.steps)
        kept = self.kept()
        times = np.linspace(self.timesteps - 1, 0, sampling.steps).round().astype(np.int64).tolist()
        lefts = [*kept[times[1:]].tolist(), 1.0]
        return [Visit(time, float(kept[time]), left) for time, left in zip(times, lefts, strict=True)]

    def _visits_of_flow(self, steps: int) -> list[Visit]:
        """As diffusers' FlowMatchEulerDiscreteScheduler takes them, which shifts levels that are shifted already."""
        levels = self.levels()
        visited = self._shifted(np.linspace(levels[-1], levels[0], steps))
        following = [*visited[1:].tolist(), 0.0]
        return [
            Visit(level * self.timesteps, level, after)
            for level, after in zip(visited.tolist(), following, strict=True)
        ]

    def step(
        self, latents: Tensor, predicted: Tensor, visit: Visit, sampler: str | None, own: Callable[[], Tensor]
    ) -> Tensor:
        """The latents at the timestep to which a visit leads. own: draws noise like latents, which "ddpm" adds."""
        if self.is_flow:
            return latents + (visit.after - visit.at) * predicted
        kept, left = visit.at, visit.after
        if self.predicts == "epsilon":
            noise = predicted
            clean = (latents - (1 - kept) ** 0.5 * noise) / kept**0.5
        else:
            clean = kept**0.5 * latents - (1 - kept) ** 0.5 * predicted
            noise = kept**0.5 * predicted + (1 - kept) ** 0.5 * latents
        if (bound := self.bound) is not None:
            clean = clean.clamp(-bound, bound)
            if sampler == "ddpm":  # Its mean is of what is clipped (Ho et al. 2020, eq. 7).
                noise = (latents - kept**0.5 * clean) / (1 - kept) ** 0.5
        spread = (1 - left) / (1 - kept) * (1 - kept / left) if sampler == "ddpm" else 0.0
        latents = left**0.5 * clean + max(1 - left - spread, 0.0) ** 0.5 * noise
        return latents + spread**0.5 * own() if spread > 0 else latents

    def sampler_error(self, sampling: SamplingConfig) -> str:
        """Why it has no such sampler, as a clause; "" if it has."""
        if sampling.sampler is not None and (sampling.sampler == "euler") != self.is_flow:
            those = '"euler"' if self.is_flow else '"ddim" or "ddpm"'
            return f'sampling.sampler is "{sampling.sampler}", but this noise is sampled by {those}; remove it'
        return ""

    @property
    def bound(self) -> float | None:
        """Predicted latents are clipped to plus and minus this; None: they are not."""
        return None


class Visit(NamedTuple):
    """A timestep of sampling.

    time: what the model is told. at, after: what is kept (a above) there and where it leads to; of a flow, levels of
    noise (s above).
    """

    time: float
    at: float
    after: float


class SamplingConfig(BaseModel):
    """`[model.generators.NAME.sampling]`: how items are made of held-out prompts.

    sampler:  "ddim", which adds no noise on its way, or "ddpm", ancestral sampling; of a flow "euler". Default: "ddim",
              or "euler" of a flow.
    steps:    timesteps that are taken, evenly spread from the last to the first.
    guidance: how far to go beyond what is predicted without a condition; 1 is none, and more needs drop_condition.
    """

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, frozen=True)
    sampler: Literal["ddim", "ddpm", "euler"] | None = None
    steps: int = Field(50, ge=1, le=MAX_TIMESTEPS)
    guidance: float = Field(1.0, ge=0, le=100)
