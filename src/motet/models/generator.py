"""A generator with its output projector: the path from the backbone's hidden states to what an answer holds.

    rows at the item's queries ──> projector ──> conditions ──> generator ──> loss
                                   (or, of a share of items, rows that stand for no condition)

The output projector stands at the generator's entrance (MMScale section 2.1). The hidden states are those at learned
query tokens, which stand in the sequence where the item does, and see all that stands before it.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from torch import Tensor, nn

from motet.absent import take_part
from motet.core.arrays import Int64Array
from motet.core.errors import ArgumentError, UserError
from motet.core.item_segments import ItemSegments
from motet.core.spec import Module
from motet.models.block import Block, outside_blocks, wrap_blocks
from motet.models.callbacks import imported
from motet.models.diffusers_directory import scheduler_of_directory, unet_of_config, unet_of_directory
from motet.models.diffusion import Diffusion, NoiseConfig, SamplingConfig
from motet.models.dit import DiT, DiTConfig
from motet.models.initialise import seeded
from motet.models.layers import LayerModules, any_trainable, as_it_learns, frozen_to_eval, products_layer
from motet.models.projector import Projector, ProjectorConfig
from motet.models.scheduler_noise import SchedulerNoise
from motet.models.unet import UNet
from motet.noise import uniform_of_items

MAX_QUERIES = 4096


class GeneratorConfig(BaseModel):
    """One generator, `[model.generators.NAME]`.

    The generator is `family`, with random weights; `path`; or `module`.

    makes:        the media that it makes; by default that after which it is named. Its items are those in answers.
    family:       "dit": a diffusion transformer on the rows of `transforms` (`models/dit.py`); "unet": diffusers'
                  UNet2DConditionModel (`models/unet.py`).
    config:       of the family; of "unet" the options of diffusers' class.
    path:         a local directory of diffusers: a UNet2DConditionModel, or a pipeline that has one.
    noise:        of both; of `path`, by default, that of the scheduler beside it.
    module, args: "package.module:Class", called with `args`; see `contract.Generator`.
    num_queries:  learned query tokens of an item in the sequence: what is read there is its condition.
    projector:    the kind of the output projector.
    drop_condition: the share of items that learn without their condition, for guidance.
    sampling:     how items are made of held-out prompts.
    weight:       of its loss, beside 1 of the loss of tokens.
    train_generator, train_projector: whether each learns; the queries learn with the projector.
    """

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)
    makes: Literal["image", "audio"] | None = None
    family: Literal["dit", "unet"] | None = None
    config: dict[str, Any] = Field(default_factory=dict)
    path: Path | None = None
    noise: NoiseConfig | None = None
    module: str | None = Field(default=None, min_length=1)
    args: dict[str, Any] = Field(default_factory=dict)
    num_queries: int = Field(ge=1, le=MAX_QUERIES)
    projector: Literal["linear", "mlp"] = "mlp"
    drop_condition: float = Field(0.0, ge=0, lt=1)
    sampling: SamplingConfig = SamplingConfig()
    weight: float = Field(1.0, gt=0, le=10**6)
    train_generator: bool = True
    train_projector: bool = True

    @model_validator(mode="after")
    def _one_source(self) -> GeneratorConfig:
        if [bool(self.module), bool(self.family), bool(self.path)].count(True) != 1:
            raise ValueError("a generator needs `family`, `path` or `module`, and one of them alone")
        if self.module and (self.config or self.noise):
            raise ValueError("`module` excludes `config` and `noise`")
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
        timesteps = (self.noise or NoiseConfig()).timesteps
        says_timesteps = self.family or (self.noise and self.noise.schedule != "path")
        if says_timesteps and self.sampling.steps > timesteps:
            raise ValueError(f"`sampling.steps` is {self.sampling.steps}, but `noise.timesteps` is {timesteps}")
        if self.family == "dit":
            try:
                DiTConfig.model_validate(self.config)
            except ValidationError as error:
                first = error.errors()[0]
                key = ".".join(map(str, first["loc"]))
                raise ValueError(f"`config.{key}` is wrong ({first['msg']})") from None
        return self


class OutputProjector(nn.Module):
    """The backbone's rows to conditions; of items without a condition, learned rows in their place.

    nothing: these rows, [num_queries, condition_dim]; None if no item is without a condition.
    """

    def __init__(self, projector: Projector, num_queries: int, drop: float) -> None:
        super().__init__()
        self.projector, self.drop = projector, drop
        self.nothing = nn.Parameter(torch.zeros(num_queries, projector.output_dim)) if drop else None

    def forward(self, rows: Tensor, dropped: Tensor | None) -> Tensor:
        """rows [num_items * num_queries, dim], dropped bool [num_items] -> [num_items * num_queries, condition_dim]."""
        conditions = self.projector(rows, np.array([len(rows)]))
        if self.nothing is None or dropped is None:
            return conditions
        of_items = conditions.unflatten(0, (len(dropped), -1))
        return torch.where(dropped[:, None, None], self.nothing, of_items).flatten(0, 1)


class GeneratorModule(nn.Module):
    """A generator behind its output projector.

    generator: fulfils `contract.Generator`. weight: of its loss in a step, where the loss of tokens has 1.
    where:     what messages call it.
    Raises UserError for a generator that pads its items: items are packed.
    """

    cost = "packed"
    cut = None
    has_raster = False  # Its query tokens stand one after the other, as text does.

    def __init__(
        self,
        generator: nn.Module,
        entrance: OutputProjector,
        num_queries: int,
        weight: float = 1.0,
        train_generator: bool = True,
        train_projector: bool = True,
        sampling: SamplingConfig | None = None,
        where: str = "a generator",
    ) -> None:
        super().__init__()
        self.where = where
        self.sampling = sampling or SamplingConfig()
        self.generator, self.entrance = generator, entrance
        self.num_queries, self.weight = num_queries, weight
        if not train_generator:
            generator.requires_grad_(False)
        entrance.requires_grad_(train_projector)
        self._blocks = tuple(wrap_blocks(generator, getattr(generator, "blocks", [])))
        frozen_to_eval(generator, entrance)

    def train(self, mode: bool = True) -> GeneratorModule:
        """`nn.Module.train`, except that a part without trainable parameters stays in eval mode."""
        super().train(mode)
        frozen_to_eval(self.generator, self.entrance)
        return self

    @property
    def divisor(self) -> int:
        """What each size of an item must be a multiple of."""
        return getattr(self.generator, "divisor", 1)

    @property
    def blocks(self) -> tuple[Block, ...]:
        """The generator's layers in execution order; each is sharded and recomputed by itself."""
        return self._blocks

    @property
    def trainable(self) -> bool:
        """Whether any part of it learns."""
        return any(p.requires_grad for p in self.parameters())

    def lengths(self, sizes: Int64Array) -> Int64Array:
        """The rows of each item's latents, int64 [num_items]: by them its loss counts, and items are balanced."""
        return np.prod(sizes, axis=1)

    def segments(self, sizes: Int64Array) -> ItemSegments | None:
        """None: an item is computed whole."""
        return None

    def num_tokens(self, sizes: Int64Array) -> Int64Array:
        """The queries of each item in the backbone's sequence, int64 [num_items].

        Raises UserError for sizes that the generator cannot make.
        """
        if check := getattr(self.generator, "check_sizes", None):
            try:
                check(sizes)
            except UserError as error:
                raise UserError(f"{self.where}: {error}.") from None
        return np.full(len(sizes), self.num_queries, dtype=np.int64)

    def layers(self) -> list[LayerModules]:
        """The layers in execution order: the output projector's first."""
        projected = self.entrance.projector.described(1)[0].layer
        nothing = 0 if self.entrance.nothing is None else self.entrance.nothing.numel()
        first = replace(projected, item_rows=self.num_queries, parameters=projected.parameters + nothing)
        first = replace(first, trainable=any_trainable(self.entrance))
        described = getattr(self.generator, "layers", None)
        inner = described() if described else [products_layer("products", self.generator, self.generator.condition_dim)]
        return list(map(as_it_learns, [LayerModules(first, (self.entrance,)), *inner]))

    def spec_module(self, name: str) -> Module:
        """The module's part of a ModelSpec."""
        return Module.of(name, (each.layer for each in self.layers()))

    def __call__(self, values: Tensor, sizes: Tensor, rows: Tensor, keys: Int64Array) -> Tensor:
        """As `forward`."""
        # FSDP2 moves each tensor among the arguments to the device, where sizes cannot be read without a wait.
        return super().__call__(values, sizes.numpy(), rows, keys)

    def forward(self, values: Tensor, sizes: Tensor | Int64Array, rows: Tensor, keys: Int64Array) -> Tensor:
        """The loss of packed items, summed over their rows, a scalar of at least float32.

        values [sum(rows), row_dim]; sizes int64 [num_items, size_dim] on the host; rows [num_items * num_queries, dim]
        of the backbone; keys int64 [num_items], by which all that is random is drawn.
        Without items: 0, connected to `rows` and to every trainable parameter. Raises UserError for a generator that
        returns no scalar.
        """
        if len(sizes) == 0:
            return self._forward_empty(rows)
        sizes, rows = torch.as_tensor(sizes), rows.to(self._dtype)
        dropped = None
        if self.entrance.drop and self.training:
            dropped = (uniform_of_items(keys, "condition") < self.entrance.drop).to(rows.device)
        conditions = self.entrance(rows, dropped)
        loss = self.generator(values.to(self._dtype), sizes, conditions, keys)
        if not isinstance(loss, Tensor) or loss.ndim:
            given = list(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise UserError(
                f"{type(self.generator).__name__} returned {given}; a generator must return the sum of its loss over "
                "the rows of its items, a scalar (see motet.models.contract.Generator)"
            )
        return loss.to(torch.promote_types(loss.dtype, torch.float32))

    @torch.no_grad()
    def sample(self, sizes: Tensor, rows: Tensor, keys: Int64Array, sampling: SamplingConfig | None = None) -> Tensor:
        """What the generator makes of hidden states, [sum(rows), row_dim]. sampling: None: as it was built with.

        Others as in `forward`; there is at least one item. Takes `steps` passes, with guidance twice as many.
        Raises UserError for guidance where the model has not learned to go without a condition.
        """
        sampling = sampling or self.sampling
        guidance = sampling.guidance
        if guidance != 1 and self.entrance.nothing is None:
            raise UserError(f"guidance = {guidance:g} takes a generator with drop_condition above 0; set it to 1.")
        # FSDP2 has moved sizes to the device, as it enters this as it does `forward`.
        sizes, rows, num_items = sizes.cpu(), rows.to(self._dtype), len(sizes)
        conditions = self.entrance(rows, None)

        def guided(predict: Any) -> Tensor:
            if guidance == 1:
                return predict(conditions)
            without = predict(self.entrance(rows, torch.ones(num_items, dtype=torch.bool, device=rows.device)))
            return without + guidance * (predict(conditions) - without)

        return self.generator.sample(sizes, conditions, keys, sampling, guided)

    @property
    def _dtype(self) -> torch.dtype:
        return next(p.dtype for p in outside_blocks(self) if p.is_floating_point())

    def _forward_empty(self, rows: Tensor) -> Tensor:
        weight = outside_blocks(self)[0]
        x = weight.new_zeros(0, 1) + rows.sum().to(weight.dtype)
        for block in self._blocks:
            x = block(x)
        return take_part(x, outside_blocks(self)).sum(dtype=torch.promote_types(x.dtype, torch.float32))


def build_generator(
    name: str, config: GeneratorConfig, backbone_dim: int, dtype: torch.dtype, seed: int
) -> GeneratorModule:
    """One generator with its output projector, on the CPU.

    Raises UserError for options that do not fit, for a directory that is missing or holds another model, and for a
    class of the user's own that does not fulfil the contract.
    """
    where = f"model.generators.{name}"
    with seeded(seed, f"generators.{name}"):
        if config.module:
            generator = _custom(where, config)
        else:
            generator = _family(where, config) if config.family == "dit" else _of_diffusers(where, config, dtype)
    with seeded(seed, f"{name} output projector"):
        projector = Projector(backbone_dim, generator.condition_dim, ProjectorConfig(kind=config.projector))
        entrance = OutputProjector(projector, config.num_queries, config.drop_condition)
    return GeneratorModule(
        generator.to(dtype),
        entrance.to(dtype),
        config.num_queries,
        config.weight,
        config.train_generator,
        config.train_projector,
        config.sampling,
        where,
    )


def _family(where: str, config: GeneratorConfig) -> nn.Module:
    try:
        denoiser = DiT(config.num_queries, DiTConfig.model_validate(config.config))
    except (UserError, ArgumentError) as error:
        raise UserError(f"{where}.{error}") from None
    return Diffusion(denoiser, config.noise or NoiseConfig())


def _of_diffusers(where: str, config: GeneratorConfig, dtype: torch.dtype) -> nn.Module:
    """A UNet of diffusers, with random weights or those of a directory."""
    named = f"{where}.path: {config.path}" if config.path else f"{where}.config"

    def denoiser() -> UNet:
        if config.path is None:
            unet = unet_of_config(where, config.config)
        else:
            unet = unet_of_directory(where, config.path, dtype)
        try:
            return UNet(config.num_queries, unet)
        except UserError as error:
            raise UserError(f"{named}: {error}.") from None

    with torch.device("meta"):
        denoiser()  # What is wrong with its options is said before weights are read or drawn.
    noise = config.noise or NoiseConfig(schedule="path" if config.path else "scaled_linear")
    if config.path is None or noise.schedule != "path":
        return Diffusion(denoiser(), noise)
    scheduler = scheduler_of_directory(where, config.path)
    try:
        noise = SchedulerNoise.of(scheduler, noise.min_snr)
        if config.sampling.steps > noise.timesteps:
            raise UserError(f"sampling.steps is {config.sampling.steps}, but there are {noise.timesteps} timesteps")
        noise.visits(config.sampling)
    except UserError as error:
        raise UserError(f"{where}: the scheduler of {config.path} does not fit: {error}.") from None
    return Diffusion(denoiser(), noise)


def _custom(where: str, config: GeneratorConfig) -> nn.Module:
    named = f"{where}.module = {config.module!r}"
    kind = imported(named, config.module or "", "package.module:Class")
    try:
        generator = kind(**config.args)
    except TypeError as error:
        raise UserError(f"{named}: does not take the given args ({error})") from error
    if config.sampling != SamplingConfig() and not hasattr(generator, "sample"):
        raise UserError(f"{named}: has no `sample`, so `sampling` has no effect; remove it")
    if not isinstance(generator, nn.Module) or not hasattr(generator, "condition_dim"):
        lacks = "lacks condition_dim" if isinstance(generator, nn.Module) else "is no torch.nn.Module"
        raise UserError(f"{named}: {lacks}; see motet.models.contract.Generator for what a generator must offer")
    return generator
