"""The noise of a scheduler of diffusers: what is added, what is predicted, and which timesteps samples take.

diffusers computes betas, and levels of a flow, in float32. They are taken from it as they are, so that a loss equals
that of a script of diffusers to the last bits (`tests/unit/models/test_unet.py`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from pydantic import PrivateAttr

from motet.core.arrays import Float64Array
from motet.core.errors import UserError
from motet.models.noise_schedule import NoiseConfig, SamplingConfig, Visit

_PREDICTS = {"epsilon": "epsilon", "v_prediction": "v"}
_FLOW = "FlowMatchEulerDiscreteScheduler"
SCHEDULERS = ("DDPMScheduler", "DDIMScheduler", "PNDMScheduler", "DPMSolverMultistepScheduler", _FLOW)
"""The classes of diffusers whose noise is computed here; samples are of DDIM, DDPM, or of a flow."""
_OF_FLOW = {
    "use_dynamic_shifting": False,
    "invert_sigmas": False,
    "shift_terminal": None,
    "use_karras_sigmas": False,
    "use_exponential_sigmas": False,
    "use_beta_sigmas": False,
    "stochastic_sampling": False,
}
"""Options of a flow -> the value that is computed here."""


class SchedulerNoise(NoiseConfig):
    """As NoiseConfig, of a scheduler of SCHEDULERS. Make it by `of`."""

    _scheduler: Any = PrivateAttr(default=None)

    @classmethod
    def of(cls, scheduler: Any, said: NoiseConfig | None = None) -> SchedulerNoise:
        """said: has min_snr, or of a flow `times`. Raises UserError for what is not computed here: its key is named."""
        said = said or NoiseConfig()
        made = cls._of_flow(scheduler, said) if type(scheduler).__name__ == _FLOW else cls._of_betas(scheduler, said)
        made._scheduler = scheduler
        return made

    @classmethod
    def _of_flow(cls, scheduler: Any, said: NoiseConfig) -> SchedulerNoise:
        options = scheduler.config
        for name, computed in _OF_FLOW.items():
            if options.get(name, computed) != computed:
                raise UserError(f"{name} is {options[name]!r}, of which only {computed!r} is computed")
        if said.min_snr is not None:
            raise UserError("min_snr has no effect on a flow; remove it")
        return cls(schedule="flow", timesteps=options.num_train_timesteps, shift=options.shift, times=said.times)

    @classmethod
    def _of_betas(cls, scheduler: Any, said: NoiseConfig) -> SchedulerNoise:
        options = scheduler.config
        if said.times != "uniform":
            raise UserError(f"times = {said.times!r} is for the noise of a flow; remove it")
        predicts = _PREDICTS.get(options.prediction_type)
        if predicts is None:
            raise UserError(f"prediction_type is {options.prediction_type!r}; it must be {' or '.join(_PREDICTS)}")
        if options.get("rescale_betas_zero_snr") and predicts == "epsilon":
            raise UserError(
                "rescale_betas_zero_snr leaves nothing of the latents at the last timestep, of which noise then says "
                'nothing; prediction_type must be "v_prediction"'
            )
        for name in ("thresholding", "use_flow_sigmas"):
            if options.get(name):
                raise UserError(f"{name} is true, of which only false is computed")
        if options.get("variance_type") not in (None, "fixed_small"):
            raise UserError(f'variance_type is {options.variance_type!r}, of which only "fixed_small" is computed')
        if len(scheduler.alphas_cumprod) != options.num_train_timesteps:
            raise UserError(
                f"trained_betas has {len(scheduler.alphas_cumprod)} values; it must have one for each of the "
                f"{options.num_train_timesteps} num_train_timesteps"
            )
        return cls(timesteps=options.num_train_timesteps, predicts=predicts, min_snr=said.min_snr)

    def kept(self) -> Float64Array:
        """As diffusers has it, rounded to float32."""
        kept: Float64Array = self._scheduler.alphas_cumprod.double().numpy()
        return kept

    def levels(self) -> Float64Array:
        """As diffusers has them, rounded to float32."""
        levels: Float64Array = self._scheduler.sigmas.double().numpy()[::-1].copy()
        return levels

    def visits(self, sampling: SamplingConfig) -> list[Visit]:
        """The timesteps of diffusers' sampler of this name with the scheduler's spacing, offset and last step.

        Raises UserError if they begin behind the last one.
        """
        if self.is_flow:
            return super().visits(sampling)
        options, steps, kept = self._scheduler.config, sampling.steps, self.kept()
        spacing, stride = options.get("timestep_spacing", "leading"), self.timesteps // steps
        if spacing == "linspace":
            times = np.linspace(0, self.timesteps - 1, steps).round()[::-1].astype(np.int64)
        elif spacing == "leading":
            times = (np.arange(steps) * stride)[::-1] + options.get("steps_offset", 0)
        else:
            times = np.round(np.arange(self.timesteps, 0, -self.timesteps / steps)).astype(np.int64) - 1
        if times[0] >= self.timesteps:
            raise UserError(
                f"{steps} steps of sampling with steps_offset = {options.steps_offset} begin at timestep {times[0]}, "
                f"but there are {self.timesteps}; take fewer"
            )
        if sampling.sampler != "ddpm":
            last = 1.0 if options.get("set_alpha_to_one", True) else float(kept[0])
            following = times - stride
        else:
            last, following = 1.0, np.append(times[1:], -1)
        return [
            Visit(time, float(kept[time]), float(kept[after]) if after >= 0 else last)
            for time, after in zip(times.tolist(), following.tolist(), strict=True)
        ]

    @property
    def bound(self) -> float | None:
        """The scheduler's, if it clips samples."""
        options = self._scheduler.config
        return options.clip_sample_range if options.get("clip_sample") else None

    def write(self, folder: Path) -> None:
        """Write the scheduler as diffusers does."""
        self._scheduler.save_pretrained(folder)
