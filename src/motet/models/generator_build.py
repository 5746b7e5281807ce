"""Generators from their tables: Motet's diffusion transformer, models of diffusers, or the user's own class."""

from __future__ import annotations

import inspect

import torch
from torch import nn

from motet.core.errors import ArgumentError, UserError
from motet.core.shapes import Transformer
from motet.models import diffusers_directory as stored
from motet.models.callbacks import imported
from motet.models.diffusion import Diffusion
from motet.models.dit import DiT, DiTConfig
from motet.models.families.shaped_denoiser import ShapedDenoiser
from motet.models.generator import GeneratorModule, OutputProjector
from motet.models.generator_config import GeneratorConfig
from motet.models.initialise import seeded
from motet.models.noise_schedule import NoiseConfig, SamplingConfig
from motet.models.pixart import PixArt
from motet.models.projector import Projector, ProjectorConfig
from motet.models.scheduler_noise import SCHEDULERS, SchedulerNoise
from motet.models.sd3 import SD3
from motet.models.unet import UNet
from motet.models.vae import VAE, StoredVAE, VAEConfig

_FAMILIES = {"unet": stored.UNET, "sd3": stored.SD3, "pixart": stored.PIXART}
_DENOISERS = {stored.UNET: UNet, stored.SD3: SD3, stored.PIXART: PixArt}
"""Class of diffusers -> what takes it on packed items."""


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
            made_of = {"dit": _own, "shapes": _of_shapes}.get(config.family or "", _of_diffusers)
            generator = made_of(where, config, dtype)
    with seeded(seed, f"{name} output projector"):
        projector = Projector(backbone_dim, generator.condition_dim, ProjectorConfig(kind=config.projector))
        entrance = OutputProjector(projector, config.num_queries or 1, config.drop_condition)
    return GeneratorModule(
        generator.to(dtype),
        entrance.to(dtype),
        config.num_queries or 0,
        config.weight,
        config.train_generator,
        config.train_projector,
        config.sampling,
        where,
        config.max_turn or 0,
    )


def _own(where: str, config: GeneratorConfig, dtype: torch.dtype) -> nn.Module:
    """A diffusion transformer of Motet's."""
    try:
        denoiser = DiT(config.num_conditions, DiTConfig.model_validate(config.config))
    except (UserError, ArgumentError) as error:
        raise UserError(f"{where}.{error}") from None
    return _diffusion(where, denoiser, config.own_noise, _vae(where, config, dtype))


def _of_shapes(where: str, config: GeneratorConfig, dtype: torch.dtype) -> nn.Module:
    """A diffusion transformer of the shapes that `shaped_config.py` has checked."""
    options = dict(config.config)
    shape = Transformer(**options.pop("shape"))
    return _diffusion(where, ShapedDenoiser(config.num_conditions, shape, **options), config.own_noise, None)


def _of_diffusers(where: str, config: GeneratorConfig, dtype: torch.dtype) -> nn.Module:
    """A denoiser of diffusers, with random weights or those of a directory."""
    if config.path is None:
        named, name = f"{where}.config", _FAMILIES[config.family or ""]
    else:
        named, name = f"{where}.path: {config.path}", stored.denoiser_class(where, config.path)

    def denoiser() -> nn.Module:
        if config.path is None:
            model = stored.model_of_config(where, name, config.config)
        else:
            model = stored.model_of_directory(where, config.path, name, dtype)
        try:
            return _DENOISERS[name](config.num_conditions, model)
        except UserError as error:
            raise UserError(f"{named}: {error}.") from None

    with torch.device("meta"):  # What is wrong with options is said before weights are read or drawn.
        _diffusion(where, denoiser(), NoiseConfig(), _vae(where, config, dtype))
    noise = _noise(where, config)
    return _diffusion(where, denoiser(), noise, _vae(where, config, dtype))


def _noise(where: str, config: GeneratorConfig) -> NoiseConfig:
    """That of a model of diffusers. Raises UserError for a scheduler beside it that is not computed here."""
    noise = config.own_noise
    if config.path is None or noise.schedule != "path":
        return noise
    scheduler = stored.scheduler_of_directory(where, config.path, SCHEDULERS)
    try:
        noise = SchedulerNoise.of(scheduler, noise)
        if config.sampling.steps > noise.timesteps:
            raise UserError(f"sampling.steps is {config.sampling.steps}, but there are {noise.timesteps} timesteps")
        if wrong := noise.sampler_error(config.sampling):
            raise UserError(wrong)
        noise.visits(config.sampling)
    except UserError as error:
        raise UserError(f"{where}: the scheduler of {config.path} does not fit: {error}.") from None
    return noise


def stored_vae(where: str, config: GeneratorConfig) -> StoredVAE | None:
    """The VAE of a directory of its own, or of the pipeline that the generator is of; None if there is neither.

    where: the table of the generator. Raises UserError for a VAE that is asked for and not there.
    """
    if config.vae is None and not (config.path and stored.has_model(config.path, stored.AUTOENCODER)):
        return None
    own = config.vae or VAEConfig()
    path, table = (own.path, f"{where}.vae") if own.path else (config.path, where)
    assert path is not None, "a config without either is refused"
    if own.path is None and not stored.has_model(path, stored.AUTOENCODER):
        raise UserError(f"{where}.vae: {path} is no pipeline with a folder vae; say where it is by vae.path.")
    return StoredVAE(table, path, own)


def _vae(where: str, config: GeneratorConfig, dtype: torch.dtype) -> VAE | None:
    found = stored_vae(where, config)
    return None if found is None else found.read(dtype)


def _diffusion(where: str, denoiser: nn.Module, noise: NoiseConfig, vae: VAE | None) -> Diffusion:
    try:
        return Diffusion(denoiser, noise, vae)
    except UserError as error:
        raise UserError(f"{where}: {error}.") from None


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
    if type(generator).forward is nn.Module.forward:
        raise UserError(f"{named}: has no forward, and so no loss; see motet.models.contract.Generator")
    if config.condition == "turn":
        for method in ("forward", "sample"):
            if hasattr(generator, method) and "counts" not in inspect.signature(getattr(generator, method)).parameters:
                raise UserError(
                    f'{named}: its {method} does not take `counts`, the rows of each item, which condition = "turn" '
                    "gives; see motet.models.contract.Generator"
                )
    given = ["values", "sizes", "conditions", "keys", *(["counts"] if config.condition == "turn" else [])]
    try:
        inspect.signature(generator.forward).bind(*given)
    except TypeError as error:
        raise UserError(
            f"{named}: its forward does not take ({', '.join(given)}): {error}; see motet.models.contract.Generator"
        ) from None
    return generator
