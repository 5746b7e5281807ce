"""`[model.generators.NAME]`: what a generator is, what it learns with, and how it samples."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from motet.core.limits import MAX_QUERIES, MAX_TURN
from motet.models.dit import DiTConfig
from motet.models.noise_schedule import NoiseConfig, SamplingConfig
from motet.models.vae import VAEConfig


class GeneratorConfig(BaseModel):
    """One generator, `[model.generators.NAME]`.

    The generator is `family`, with random weights; `path`; or `module`.

    makes:        the media that it makes; by default that after which it is named. Its items are those in answers.
    family:       "dit": a diffusion transformer on the rows of `transforms` (`models/dit.py`); "unet", "sd3" and
                  "pixart": diffusers' UNet2DConditionModel, SD3Transformer2DModel and PixArtTransformer2DModel
                  (`models/unet.py`, `models/sd3.py`, `models/pixart.py`).
    config:       of the family; of those of diffusers the options of its class.
    path:         a local directory of diffusers: a model of these three classes, or a pipeline that has one.
    noise:        by default, of `path` that of the scheduler beside it, and of "sd3" a flow with a shift of 3, and
                  of "pixart" linear betas from 0.0001 to 0.02.
    vae:          makes latents of pixels before the loss, and pixels of samples; by default that of a pipeline `path`.
    module, args: "package.module:Class", called with `args`; see `contract.Generator`.
    condition:    what the backbone's hidden states are read at: "queries", or "turn", the rows of the turn before the
                  one that holds the item, which takes no row of the sequence then.
    num_queries:  learned query tokens of an item in the sequence.
    max_turn:     the most rows of a turn that is a condition; examples with a longer one are left out, and items are
                  priced as of so many.
    projector:    the kind of the output projector.
    drop_condition: the share of items that learn without their condition, for guidance.
    sampling:     how items are made of held-out prompts.
    weight:       of its loss, beside 1 of the loss of tokens.
    train_generator, train_projector: whether each learns; queries learn with the projector.
    """

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)
    makes: Literal["image", "audio"] | None = None
    family: Literal["dit", "unet", "sd3", "pixart"] | None = None
    config: dict[str, Any] = Field(default_factory=dict)
    path: Path | None = None
    noise: NoiseConfig | None = None
    vae: VAEConfig | None = None
    module: str | None = Field(default=None, min_length=1)
    args: dict[str, Any] = Field(default_factory=dict)
    condition: Literal["queries", "turn"] = "queries"
    num_queries: int | None = Field(default=None, ge=1, le=MAX_QUERIES)
    max_turn: int | None = Field(default=None, ge=1, le=MAX_TURN)
    projector: Literal["linear", "mlp"] = "mlp"
    drop_condition: float = Field(0.0, ge=0, lt=1)
    sampling: SamplingConfig = SamplingConfig()
    weight: float = Field(1.0, gt=0, le=10**6)
    train_generator: bool = True
    train_projector: bool = True

    @model_validator(mode="after")
    def _one_condition(self) -> GeneratorConfig:
        needed, other = ("num_queries", "max_turn") if self.condition == "queries" else ("max_turn", "num_queries")
        if getattr(self, needed) is None:
            raise ValueError(f'`condition` = "{self.condition}" needs `{needed}`')
        if getattr(self, other) is not None:
            raise ValueError(f'`condition` = "{self.condition}" excludes `{other}`')
        return self

    @property
    def num_conditions(self) -> int:
        """The rows of an item's condition; of turns the most."""
        return self.num_queries or self.max_turn or 0

    @model_validator(mode="after")
    def _one_source(self) -> GeneratorConfig:
        if [bool(self.module), bool(self.family), bool(self.path)].count(True) != 1:
            raise ValueError("a generator needs `family`, `path` or `module`, and one of them alone")
        if self.module and (self.config or self.noise or self.vae):
            raise ValueError("`module` excludes `config`, `noise` and `vae`")
        if self.vae and not (self.vae.path or self.path):
            raise ValueError("`vae.path` must say where the VAE is, as there is no `path` of a pipeline")
        if self.path and self.config:
            raise ValueError("`path` excludes `config`: the directory has the options of its model")
        if self.noise and self.noise.schedule == "path" and not self.path:
            raise ValueError('`noise.schedule` = "path" is for a generator with `path`')
        if self.path and self.noise and "schedule" not in self.noise.model_fields_set:
            raise ValueError(
                '`noise.schedule` must be said beside `path`: "path", for that of the scheduler beside it, or another'
            )
        if self.args and not self.module:
            raise ValueError("`args` are for `module` only")
        if self.sampling.guidance != 1 and not self.drop_condition:
            raise ValueError(
                f"`sampling.guidance` = {self.sampling.guidance:g} needs `drop_condition` above 0: the model must "
                "learn to go without a condition"
            )
        noise = self.own_noise
        if not self.module and noise.schedule != "path":
            if self.sampling.steps > noise.timesteps:
                raise ValueError(
                    f"`sampling.steps` is {self.sampling.steps}, but `noise.timesteps` is {noise.timesteps}"
                )
            if wrong := noise.sampler_error(self.sampling):
                raise ValueError(wrong)
        if self.family == "dit":
            try:
                DiTConfig.model_validate(self.config)
            except ValidationError as error:
                first = error.errors()[0]
                key = ".".join(map(str, first["loc"]))
                raise ValueError(f"`config.{key}` is wrong ({first['msg']})") from None
        return self

    @property
    def own_noise(self) -> NoiseConfig:
        """The noise that is said, or the default."""
        if self.noise is not None:
            return self.noise
        if self.path:
            return NoiseConfig(schedule="path")
        if self.family == "sd3":
            return NoiseConfig(schedule="flow", shift=3.0)
        if self.family == "pixart":
            return NoiseConfig(schedule="linear", beta_start=1e-4, beta_end=0.02)
        return NoiseConfig()
