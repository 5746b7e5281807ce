"""From a recipe's words to an MLLM: HF models with random weights or from a directory, or classes of the user's own.

Every module is initialised as a whole tensor from a seed of its own name, so that weights do not depend on the number
of ranks, and adding an encoder does not change the others.
"""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator
from torch import nn
from transformers import PreTrainedConfig

from motet.core.errors import UserError
from motet.core.workload import BACKBONE
from motet.models.attention import ATTENTION
from motet.models.backbone import Backbone
from motet.models.config_file import check_taken, one_line, quiet_transformers, read_config
from motet.models.families.bounds import check_bounds
from motet.models.families.registry import BACKBONES, ENCODERS, Family
from motet.models.load import load_pretrained
from motet.models.module import MLLM, ModalityModule
from motet.models.projector import Projector, ProjectorConfig


class EncoderConfig(BaseModel):
    """One encoder and its projector. Its weights have one source:

    family, config: random weights; `config` are HF's options.
    family, path:   a local directory with safetensors; `config` overrides its options. If it holds a larger model, its
                    tower is read, and nothing else of it: the projector starts from random weights.
    feature_layer:  of a vision tower, the layer whose output is taken, counted as transformers counts hidden states: -1
                    the last layer, -2 the one before it (LLaVA), without the norm behind the layers. Default: the
                    tower's own output.
    module, args:   "package.module:Class", called with `args`; see `contract.Encoder`.
    """

    model_config = ConfigDict(extra="forbid")
    family: Literal["siglip", "clip", "dinov2", "qwen2_vl", "whisper", "qwen2_audio"] | None = None
    config: dict[str, Any] = Field(default_factory=dict)
    path: Path | None = None
    feature_layer: int | None = None
    module: str | None = Field(default=None, min_length=1)
    args: dict[str, Any] = Field(default_factory=dict)
    projector: ProjectorConfig = Field(default_factory=ProjectorConfig)
    train_encoder: bool = True
    train_projector: bool = True

    @model_validator(mode="after")
    def _one_source(self) -> EncoderConfig:
        if self.module and (self.family or self.path or self.config):
            raise ValueError("`module` excludes `family`, `path` and `config`")
        if self.args and not self.module:
            raise ValueError("`args` are for `module` only")
        if not (self.module or self.family):
            raise ValueError("an encoder needs `family` or `module`")
        able = [name for name, family in ENCODERS.items() if family.feature_layers]
        if self.feature_layer is not None and self.family not in able:
            raise ValueError(f"`feature_layer` is for {', '.join(able)} only")
        return self


class BackboneConfig(BaseModel):
    """`family` with `config` (HF options) for random weights, or with `path` for a local HF directory."""

    model_config = ConfigDict(extra="forbid")
    family: Literal["qwen2", "qwen3", "llama", "mistral", "gemma", "gemma3", "phi3", "olmo2"]
    config: dict[str, Any] = Field(default_factory=dict)
    path: Path | None = None
    train: bool = True


class ModelConfig(BaseModel):
    """The whole model; names of encoders are the names of their phases."""

    model_config = ConfigDict(extra="forbid")
    backbone: BackboneConfig
    encoders: dict[str, EncoderConfig] = Field(default_factory=dict)

    @field_validator("encoders")
    @classmethod
    def _phase_names(cls, encoders: dict[str, EncoderConfig]) -> dict[str, EncoderConfig]:
        for name in encoders:
            if name == BACKBONE or not name.isidentifier():
                raise ValueError(f"{name!r} cannot name an encoder: take letters, digits and _, and not {BACKBONE!r}")
        return encoders


def build_mllm(config: ModelConfig, vocab_size: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> MLLM:
    """The model on the CPU, whole, in `dtype`. vocab_size: what the tokenizer needs.

    Under `torch.device("meta")` it has shapes only: no memory is taken and no weights are read.
    Raises UserError for an HF option that is unknown, out of bounds or not computed as transformers does, a directory
    that is missing or holds another family, a vocabulary that is too small, or a custom class that does not fulfil the
    contract.
    """
    backbone = build_backbone(config.backbone, vocab_size, dtype, seed)
    encoders = {name: build_modality(name, part, backbone.dim, dtype, seed) for name, part in config.encoders.items()}
    return MLLM(encoders, backbone)


def build_backbone(config: BackboneConfig, vocab_size: int, dtype: torch.dtype, seed: int) -> Backbone:
    # HF's default padding token is of another vocabulary, and the row of a padding token is never trained.
    options = config.config if config.path else {"vocab_size": vocab_size, "pad_token_id": None} | config.config
    causal_lm = _build_hf("backbone", BACKBONES[config.family], config.path, options, dtype, seed)
    if (rows := causal_lm.config.vocab_size) < vocab_size:
        raise UserError(f"model.backbone: its vocabulary has {rows} entries, but the tokenizer needs {vocab_size}")
    return Backbone(causal_lm, train=config.train)


def build_modality(
    name: str, config: EncoderConfig, backbone_dim: int, dtype: torch.dtype, seed: int
) -> ModalityModule:
    """One encoder with its projector, on the CPU; raises UserError as `build_mllm` does."""
    if config.module:
        encoder = _build_custom(name, config, seed).to(dtype)
    else:
        family, where = ENCODERS[config.family], f"encoders.{name}"
        if config.path:
            check_taken(where, family, config.path, config.feature_layer)
        model = _build_hf(where, family, config.path, config.config, dtype, seed)
        taken = {"feature_layer": config.feature_layer} if family.feature_layers else {}
        with _named(f"model.{where}"):
            encoder = family.adapter(model, **taken)
    with _seeded(seed, f"{name} projector"):
        projector = Projector(encoder.output_dim, backbone_dim, config.projector).to(dtype)
    with _named(f"model.encoders.{name}"):
        return ModalityModule(encoder, projector, config.train_encoder, config.train_projector)


@contextmanager
def _named(where: str) -> Iterator[None]:
    """Puts the table of the recipe before what a class says is wrong with its options."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{where}: {error}") from error


def _build_hf(
    where: str, family: Family, path: Path | None, options: dict[str, Any], dtype: torch.dtype, seed: int
) -> nn.Module:
    options = deepcopy(options)  # HF writes its defaults into tables that it is given.
    known = {field.name for field in fields(family.config)} - {field.name for field in fields(PreTrainedConfig)}
    if unknown := sorted(set(options) - known):
        raise UserError(f"model.{where}.config: {family.config.__name__} has no option {', '.join(unknown)}")
    check_bounds(f"model.{where}.config.", options)
    on_meta = torch.get_default_device().type == "meta"
    if path is not None and not on_meta:
        return load_pretrained(where, family, path, options, dtype)
    try:
        with quiet_transformers(), _seeded(seed, where):
            hf_config = read_config(where, family, path, options) if path else family.config(**options)
            family.check(hf_config, f"model.{where}.config.")
            hf_config._attn_implementation = ATTENTION
            model = family.model(hf_config)
    except UserError:
        raise
    except Exception as error:
        # Whatever HF raises here it raises for these options, and there is no end to the kinds of exceptions.
        raise UserError(
            f"model.{where}.config: no {family.config.model_type} model can be made of it ({one_line(error)})"
        ) from error
    return cast_parameters(model, dtype)


def _build_custom(name: str, config: EncoderConfig, seed: int) -> nn.Module:
    where = f"model.encoders.{name}.module = {config.module!r}"
    package, _, attribute = (config.module or "").partition(":")
    try:
        made = getattr(importlib.import_module(package), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(f"{where}: cannot be imported as package.module:Class ({error})") from error
    try:
        with _seeded(seed, f"encoders.{name}"):
            encoder = made(**config.args)
    except TypeError as error:
        raise UserError(f"{where}: does not take the given args ({error})") from error
    missing = [member for member in ("output_dim", "num_outputs") if not hasattr(encoder, member)]
    if missing or not isinstance(encoder, nn.Module):
        lacks = f"lacks {' and '.join(missing)}" if missing else "is no torch.nn.Module"
        raise UserError(f"{where}: {lacks}; see motet.models.contract.Encoder for what an encoder must offer")
    return encoder


def cast_parameters(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Cast the parameters of an HF model, and not its buffers: rotary frequencies must stay float32."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


@contextmanager
def _seeded(seed: int, name: str) -> Iterator[None]:
    """The global CPU generator, from which modules initialise themselves, seeded by name and restored afterwards."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int.from_bytes(digest, "little") >> 1)
        yield
