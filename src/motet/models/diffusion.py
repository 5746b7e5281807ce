"""Denoising diffusion as a generator: the loss of latents with noise, and samples (`models/noise_schedule.py`).

Guidance is by what is predicted without a condition (Ho & Salimans 2022, eq. 6; its w is `guidance` - 1 here).
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from motet.core.arrays import Float64Array, Int64Array
from motet.core.errors import UserError
from motet.models.conditions import numbers_in
from motet.models.layers import LayerModules
from motet.models.noise_schedule import NoiseConfig, SamplingConfig
from motet.models.vae import VAE
from motet.noise import normal_of_rows
from motet.on_device import on_device


class Diffusion(nn.Module):
    """A denoiser with its noise, as `contract.Generator` asks: the latents of an item are its target.

    denoiser: has condition_dim, row_dim and layers(), perhaps blocks, divisor and check_sizes, and is called with
              noised [sum(rows), row_dim], times [num_items], sizes int64 [num_items, size_dim], conditions
              [sum(counts), condition_dim] and, where conditions are turns, counts int64 [num_items], the rows of each
              -> [sum(rows), row_dim] (`dit.DiT`).
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
        (self._signal, self._spread), self._weights = noise.factors(), noise.weights()

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

    @property
    def uncuttable(self) -> str:
        """Why a pipeline cannot cut it between its blocks, in words; "" if it can."""
        if self.vae is not None and self.vae.encodes and self.vae.channels > self._width:
            return f"latents of its VAE are {self.vae.channels} wide, and its rows {self._width}"
        return getattr(self.denoiser, "uncuttable", "")

    @property
    def carried_rows(self) -> int:
        """As `core.spec.Module.carried_rows`; 0 of a denoiser that cannot be cut."""
        return getattr(self.denoiser, "carried_rows", 0)

    @property
    def carried_divisor(self) -> int:
        """As `core.spec.Module.carried_divisor`: latents that the first stage has made of pixels go along, as the last
        one has no VAE. Those that workers have made a part of are drawn again.
        """
        return 0 if self.vae is None or not self.vae.encodes else self._width // self.vae.channels

    @property
    def _width(self) -> int:
        """Of the denoiser's hidden states."""
        return getattr(self.denoiser, "width", self.denoiser.condition_dim)

    def check_sizes(self, sizes: Int64Array) -> None:
        """Raise UserError for sizes of items that the denoiser cannot make."""
        for part in (self.vae, self.denoiser):
            if check := getattr(part, "check_sizes", None):
                check(sizes)

    def layers(self) -> list[LayerModules]:
        """Those of the VAE's encoder, and of the denoiser."""
        return [*(self.vae.layers() if self.vae is not None else ()), *self.denoiser.layers()]

    def forward(
        self, values: Tensor, sizes: Tensor, conditions: Tensor, keys: Int64Array, counts: Int64Array | None = None
    ) -> Tensor:
        """The loss: squared errors, mean over the values of a row, summed over rows; at least float32, a scalar.

        keys: of items, int64 [num_items], by which timesteps and noise are drawn. Others: as in `contract.Generator`.
        """
        if self.vae is not None:
            values = self.vae.encode(values, sizes, keys)
        times, noise = self._drawn(values, sizes, keys)
        return self.loss(values, noise, times, sizes, conditions, counts)

    def loss(
        self,
        values: Tensor,
        noise: Tensor,
        times: Tensor,
        sizes: Tensor,
        conditions: Tensor,
        counts: Int64Array | None = None,
    ) -> Tensor:
        """As `forward`, of latents, with given noise of their shape and timesteps int64 [num_items] on the host."""
        noised, target = self._noised(values, noise, times, sizes)
        given = noised.to(values.dtype), self.noise.given(times), sizes, conditions
        return self._error(self.denoiser(*given, *_if_ragged(counts)), target, times, sizes)

    def enter(
        self, values: Tensor, sizes: Tensor, conditions: Tensor, keys: Int64Array, counts: Int64Array | None = None
    ) -> Tensor:
        """What the denoiser has before its blocks, [rows, width], and rows of latents, if these go along.

        `enter`, `through` and `leave` make up `forward`; a stage of a pipeline calls those that it holds.
        """
        if self.vae is not None:
            values = self.vae.encode(values, sizes, keys)
        times, noise = self._drawn(values, sizes, keys)
        noised, _ = self._noised(values, noise, times, sizes)
        return self.entered(noised.to(values.dtype), self.noise.given(times), sizes, conditions, counts, values)

    def entered(
        self,
        noised: Tensor,
        times: Tensor,
        sizes: Tensor,
        conditions: Tensor,
        counts: Int64Array | None,
        latents: Tensor,
    ) -> Tensor:
        """As `enter`, of what the denoiser is called with. latents: those that go along."""
        hidden: Tensor = self.denoiser.enter(noised, times, sizes, conditions, counts)
        if not self.carried_divisor:
            return hidden
        slots, num_rows = self._slots(sizes)
        packed = hidden.new_zeros(num_rows * self.carried_divisor, latents.shape[1])
        packed[on_device(slots, hidden.device)] = latents.to(hidden.dtype)
        rows = packed.view(num_rows, -1)
        return torch.cat([hidden, pad(rows, (0, self._width - rows.shape[1]))])

    def through(self, hidden: Tensor, sizes: Tensor, counts: Int64Array | None, first: int, stop: int) -> Tensor:
        """The same behind the blocks first ... stop - 1."""
        hidden, along = self._parted(hidden, sizes)
        made: Tensor = self.denoiser.through(hidden, sizes, counts, first, stop)
        return torch.cat([made, along]) if self.carried_divisor else made

    def left(self, hidden: Tensor, sizes: Tensor, counts: Int64Array | None) -> Tensor:
        """What is predicted, [sum(rows), row_dim], of what `through` gives behind the last block."""
        predicted: Tensor = self.denoiser.leave(self._parted(hidden, sizes)[0], sizes, counts)
        return predicted

    def leave(
        self, hidden: Tensor, values: Tensor, sizes: Tensor, keys: Int64Array, counts: Int64Array | None = None
    ) -> Tensor:
        """The loss of what `through` gives behind the last block: noise and timesteps are drawn of the keys again."""
        if self.carried_divisor:
            slots, along = on_device(self._slots(sizes)[0], hidden.device), self._parted(hidden, sizes)[1]
            channels = self.denoiser.row_dim
            values = along[:, : self.carried_divisor * channels].reshape(-1, channels)[slots].detach()
        elif self.vae is not None:
            values = self.vae.encode(values, sizes, keys)
        times, noise = self._drawn(values, sizes, keys)
        _, target = self._noised(values, noise, times, sizes)
        return self._error(self.left(hidden, sizes, counts), target, times, sizes)

    def _parted(self, hidden: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor]:
        """Hidden states of the denoiser, and rows of latents that go along; none if they do not."""
        num = self._slots(sizes)[1] if self.carried_divisor else 0
        own, along = hidden.split([len(hidden) - num, num])
        return own, along

    def _slots(self, sizes: Tensor) -> tuple[Tensor, int]:
        """Where each latent stands in the rows that go along, of carried_divisor latents each; and their number."""
        lengths = sizes.prod(dim=1).numpy()
        num_rows = -(-lengths // self.carried_divisor)
        starts = self.carried_divisor * (np.cumsum(num_rows) - num_rows)
        return torch.from_numpy(np.repeat(starts, lengths) + numbers_in(lengths)), int(num_rows.sum())

    def _drawn(self, values: Tensor, sizes: Tensor, keys: Int64Array) -> tuple[Tensor, Tensor]:
        """Timesteps of items, and noise of their latents."""
        num_rows = sizes.prod(dim=1).numpy()
        noise = normal_of_rows(keys, num_rows, values.shape[1], "noise", values.device)
        return self.noise.drawn_times(keys), noise.to(values.dtype)

    def _noised(self, values: Tensor, noise: Tensor, times: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor]:
        """Latents with noise, and what is to be predicted of them, of at least float32."""
        num_rows, wide = sizes.prod(dim=1), torch.promote_types(values.dtype, torch.float32)
        signal, spread = (
            self._of_rows(factors[times.numpy()], num_rows, values.device, wide)
            for factors in (self._signal, self._spread)
        )
        latents, noise = values.to(wide), noise.to(wide)
        return signal * latents + spread * noise, self.noise.target(latents, noise, signal, spread)

    def _error(self, predicted: Tensor, target: Tensor, times: Tensor, sizes: Tensor) -> Tensor:
        """The weighed loss of what was predicted."""
        weights = self._of_rows(self._weights[times.numpy()], sizes.prod(dim=1), target.device, target.dtype)
        return ((predicted.to(target.dtype) - target).square().mean(1, keepdim=True) * weights).sum()

    @torch.no_grad()
    def sample(
        self,
        sizes: Tensor,
        conditions: Tensor,
        keys: Int64Array,
        sampling: SamplingConfig,
        guided: Callable[[Callable[[Tensor], Tensor]], Tensor] | None = None,
        counts: Int64Array | None = None,
    ) -> Tensor:
        """What is made for conditions [num_items * rows of each, condition_dim]: [sum(rows), row_dim].

        keys: of items, by which noise is drawn. guided: makes one prediction of predictions by conditions.
        counts: as of `forward`.
        """
        wide = torch.promote_types(conditions.dtype, torch.float32)
        steps = self.steps(sizes, keys, sampling, conditions)
        noised, times = next(steps)
        while True:

            def predict(given: Tensor, noised: Tensor = noised, times: Tensor = times) -> Tensor:
                return self.denoiser(noised.to(given.dtype), times, sizes, given, *_if_ragged(counts)).to(wide)

            try:
                noised, times = steps.send(predict(conditions) if guided is None else guided(predict))
            except StopIteration as ended:
                made: Tensor = ended.value
                return made

    def steps(
        self, sizes: Tensor, keys: Int64Array, sampling: SamplingConfig, like: Tensor
    ) -> Generator[tuple[Tensor, Tensor], Tensor, Tensor]:
        """The steps of a sample: yields latents with noise, and timesteps of items; is sent what is predicted of them.

        Returns what is made, as of `sample`. like: a tensor of the type and on the device in which the model computes.
        No gradients may be on.
        """
        num_rows, wide = sizes.prod(dim=1).numpy(), torch.promote_types(like.dtype, torch.float32)

        def drawn(name: str) -> Tensor:
            return normal_of_rows(keys, num_rows, self.denoiser.row_dim, name, like.device).to(wide)

        latents = drawn("noise")
        for visit in self.noise.visits(sampling):
            times = torch.full((len(sizes),), visit.time, dtype=torch.float64 if self.noise.is_flow else torch.int64)
            predicted = yield latents, times
            own = partial(drawn, f"noise before {visit.time}")
            latents = self.noise.step(latents, predicted, visit, sampling.sampler, own)
        if self.vae is None:
            return latents
        return self.vae.decode(latents.to(like.dtype), sizes).to(wide)

    @staticmethod
    def _of_rows(of_items: Float64Array, num_rows: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
        """A number of each item for each of its rows, [sum(rows), 1]."""
        return on_device(torch.from_numpy(of_items).repeat_interleave(num_rows)[:, None].to(dtype), device)


def _if_ragged(counts: Int64Array | None) -> tuple[Int64Array, ...]:
    """A further argument of a denoiser whose conditions are of different lengths."""
    return () if counts is None else (counts,)
