"""An MLLM from a recipe's `[model]`: HF models with random weights or from a directory, or the user's own classes.

Every module is initialised whole, from a seed derived from its name. So weights do not depend on the number of ranks,
and an added encoder does not change the other modules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator
from torch import nn
from transformers import GenerationConfig, PreTrainedModel

from motet.core.errors import UserError
from motet.core.modalities import AUDIO, IMAGE, VIDEO, modalities
from motet.core.readers import Combine, combine_error
from motet.core.workload import BACKBONE
from motet.models.attention import ATTENTION
from motet.models.backbone import Backbone
from motet.models.callbacks import imported, named_callback
from motet.models.config_file import check_feature_layer, hf_options, one_line, read_config
from motet.models.exact import keep_float64
from motet.models.families.bounds import check_bounds
from motet.models.families.patches import FeatureLayer
from motet.models.families.registry import BACKBONES, ENCODERS, Family
from motet.models.families.supported import check_windows
from motet.models.generator_build import build_generator
from motet.models.generator_config import GeneratorConfig
from motet.models.initialise import compute_buffers, seeded
from motet.models.load import checked_config, load_pretrained, on_meta
from motet.models.lora import LoraConfig, add_lora
from motet.models.materialise import fill_parameters
from motet.models.mllm import MLLM
from motet.models.module import ModalityModule
from motet.models.named_weights import weights_named
from motet.models.projector import ProjectorConfig, build_projector
from motet.models.stored import stored_tensors, weights_digest


def _alone() -> tuple[str, ...]:
    """The modalities that an encoder may read by itself: videos are read by the encoder of images, in whole models."""
    return tuple(kind for kind in modalities() if kind != VIDEO)


class EncoderConfig(BaseModel):
    """One encoder and its projector.

    The encoder is `family`, with random weights or those of `path`; or `module`.

    family:         an HF model that Motet knows.
    config:         HF's options of the family; they override those of `path`.
    path:           a local directory with safetensors. If it holds a larger model, only the tower is read: the
                    projector starts from random weights.
    module, args:   "package.module:Class" or "file.py:Class", called with `args`; see `contract.Encoder`.
    reads:          the media that it is given: image, audio, or a name of `[modalities]`; by default that after which
                    it is named. Several encoders may read one
                    kind of media (`ModelConfig.combine`).
    before, between, after: callbacks before the encoder, between encoder and projector, and after the projector, as
                    "package.module:function" or "file.py:function" (`models/callbacks.py`).
    train_encoder, train_projector: whether each learns; callbacks with weights learn with the projector.
    feature_layer:  the layer of a vision tower whose output is used, counted as transformers counts hidden states: -1
                    is the last layer, -2 the one before it (LLaVA), without the norm behind the layers. Of a list of
                    layers, rows stand side by side (Granite Vision). Default: the tower's own output.
    """

    model_config = ConfigDict(extra="forbid")
    is_of_whole: ClassVar[bool] = False
    reads: str | None = None
    family: (
        Literal[
            "siglip", "siglip2", "clip", "eva_clip", "dinov2", "dinov3", "pixtral", "internvl", "qwen2_vl",
            "qwen2_5_vl", "qwen3_vl", "whisper", "qwen2_audio", "qwen2_5_omni_audio",
        ]
        | None
    ) = None  # fmt: skip
    config: dict[str, Any] = Field(default_factory=dict)
    path: Path | None = None
    feature_layer: FeatureLayer = None
    module: str | None = Field(default=None, min_length=1)
    args: dict[str, Any] = Field(default_factory=dict)
    projector: ProjectorConfig = Field(default_factory=ProjectorConfig)
    train_encoder: bool = True
    train_projector: bool = True
    before: str | None = Field(default=None, min_length=1)
    between: str | None = Field(default=None, min_length=1)
    after: str | None = Field(default=None, min_length=1)

    @field_validator("reads")
    @classmethod
    def _is_a_modality(cls, reads: str | None) -> str | None:
        if reads is not None and reads not in _alone():
            raise ValueError(f"it must be {' or '.join(_alone())}, or have a table [modalities.{reads}]")
        return reads

    @model_validator(mode="after")
    def _one_source(self) -> EncoderConfig:
        if self.module and (self.family or self.path or self.config):
            raise ValueError("`module` excludes `family`, `path` and `config`")
        if self.args and not self.module:
            raise ValueError("`args` are for `module` only")
        if not (self.module or self.family or self.is_of_whole):
            raise ValueError("an encoder needs `family` or `module`")
        with_layers = [name for name, family in ENCODERS.items() if family.feature_layers]
        if self.feature_layer is not None and self.family not in with_layers:
            raise ValueError(f"`feature_layer` is for {', '.join(with_layers)} only")
        return self

    @property
    def classes(self) -> Family:
        """The HF classes of an encoder that has a family."""
        return ENCODERS[self.family]

    def own_encoder(self) -> nn.Module | None:
        """The encoder, where neither a family nor a module is it: that of a whole model. Its dtype is its files'."""
        return None

    def own_callbacks(self) -> dict[str, Callable[..., Any]]:
        """Callbacks that no recipe names: those of a whole model's family."""
        return {}


class BackboneConfig(BaseModel):
    """The backbone, with random weights or those of a directory.

    family: an HF model that Motet knows.
    config: HF's options of the family; they override those of `path`.
    path:   a local HF directory.
    train:  whether it learns.
    bidirectional: encoders whose rows see each other in both directions, as images do in Gemma 3: rows that follow each
            other without a token between. Text stays causal.
    prefix: whether rows of a document before its first target see each other in both directions, text included, as in
            PaliGemma. No window hides one of them from another, as in PaliGemma 2.
    first_position: of each document: PaliGemma counts from 1. Rotations differ by rounding alone.
    """

    model_config = ConfigDict(extra="forbid")
    family: Literal[
        "qwen2", "qwen3", "llama", "mistral", "gemma", "gemma2", "gemma3", "phi3", "olmo2", "mixtral", "qwen3_moe",
        "granite", "gpt2", "opt", "internlm2",
    ]  # fmt: skip
    config: dict[str, Any] = Field(default_factory=dict)
    path: Path | None = None
    train: bool = True
    bidirectional: tuple[str, ...] = ()
    prefix: bool = False
    first_position: int = Field(default=0, ge=0, le=1)

    @property
    def stacked_rows(self) -> dict[str, int]:
        """`stacked` of `Backbone`: no recipe has it, but families of whole models."""
        return {}

    @property
    def key_rows(self) -> dict[str, int]:
        """`keys` of `Backbone`: no recipe has it, but families of whole models."""
        return {}

    @property
    def classes(self) -> Family:
        """The HF classes of the family."""
        return BACKBONES[self.family]


class ModelConfig(BaseModel):
    """The whole model.

    encoders: by name, which is that of a phase.
    generators: likewise; what they make is learned from items in answers.
    combine:  what the backbone is given of media that several encoders read: "rows", those of one encoder after those
              of the other, in the order of the recipe; or "sum", one row for all of them. A sum of linear projections
              is the linear projection of joined channels.
    merge:    a callback in place of the merge of rows into the backbone's embeddings, as "package.module:function"
              (`models/callbacks.py`).
    lora:     by part (the backbone, encoders by name): LoRA adapters, beside which the part's own weights are frozen.
    freeze:   weights that do not learn, beside those of parts that do not: patterns of their names, as checkpoints have
              them, in which * stands for any characters.
    """

    model_config = ConfigDict(extra="forbid")
    backbone: BackboneConfig
    encoders: dict[str, EncoderConfig] = Field(default_factory=dict)
    generators: dict[str, GeneratorConfig] = Field(default_factory=dict)
    combine: dict[str, Combine] = Field(default_factory=dict)
    merge: str | None = Field(default=None, min_length=1)
    lora: dict[str, LoraConfig] = Field(default_factory=dict)
    freeze: tuple[str, ...] = ()

    def modality(self, name: str) -> str:
        """What the encoder of this name reads, or the generator makes."""
        return (self.generators[name].makes if name in self.generators else self.encoders[name].reads) or name

    @property
    def paths(self) -> dict[str, Path]:
        """Part -> the directory that has its weights; those of larger models, of which an encoder is a part, too."""
        parts = {BACKBONE: self.backbone, **self.encoders}
        return {name: part.path for name, part in parts.items() if part.path is not None}

    def beside_adapters(self, seed: int) -> dict[str, str] | None:
        """Part with LoRA adapters -> what says which its frozen weights are; None if there is no such part.

        seed: from which weights are drawn that have no path. Raises OSError for files that cannot be read.
        """
        paths = self.paths
        return {
            name: weights_digest(paths[name]) if name in paths else f"drawn from {seed}" for name in self.lora
        } or None

    @property
    def adapter_scales(self) -> dict[str, float] | None:
        """Part with LoRA adapters -> by what these are multiplied; None if there is no such part."""
        return {name: config.scale for name, config in self.lora.items()} or None

    @property
    def readers(self) -> dict[str, tuple[str, ...]]:
        """Modality -> the names of the encoders that read it."""
        names: dict[str, tuple[str, ...]] = {}
        for name in self.encoders:
            names[self.modality(name)] = (*names.get(self.modality(name), ()), name)
        return names

    @model_validator(mode="after")
    def _combine_is_said(self) -> ModelConfig:
        if wrong := combine_error(self.readers, self.combine):
            raise ValueError(wrong)
        return self

    @model_validator(mode="after")
    def _bidirectional_are_encoders(self) -> ModelConfig:
        if wrong := [name for name in self.backbone.bidirectional if name not in self.encoders]:
            raise ValueError(f"`backbone.bidirectional` names {wrong[0]!r}, which is no encoder of the model")
        return self

    @model_validator(mode="after")
    def _lora_of_what_learns(self) -> ModelConfig:
        for name in self.lora:
            if name != BACKBONE and name not in self.encoders:
                parts = ", ".join((BACKBONE, *self.encoders))
                raise ValueError(f"`lora.{name}` has no effect, as the model has no such part; it has {parts}")
            key, learns = (
                ("backbone.train", self.backbone.train)
                if name == BACKBONE
                else (f"encoders.{name}.train_encoder", self.encoders[name].train_encoder)
            )
            if not learns:
                raise ValueError(
                    f"`lora.{name}` gives adapters to a part that does not learn; remove `{key} = false`: the own "
                    "weights of a part with adapters are frozen in any case"
                )
        return self

    @model_validator(mode="after")
    def _generators_fit(self) -> ModelConfig:
        for name, part in self.generators.items():
            if name == BACKBONE or not name.isidentifier() or hasattr(nn.ModuleDict(), name) or name in self.encoders:
                raise ValueError(
                    f"{name!r} cannot name a generator: take letters, digits and _, and neither the name of another "
                    "module nor that of a method of torch's modules"
                )
            if name in (IMAGE, AUDIO) and part.makes not in (None, name):
                raise ValueError(f"a generator named {name!r} makes {name}, not {part.makes}; give it another name")
        if self.generators and self.merge is not None:
            raise ValueError("`merge` knows nothing of the query tokens of generators; remove it, or the generators")
        return self

    @field_validator("encoders")
    @classmethod
    def _phase_names(cls, encoders: dict[str, EncoderConfig]) -> dict[str, EncoderConfig]:
        for name, part in encoders.items():
            # Names of methods of a ModuleDict cannot be its keys.
            if name == BACKBONE or not name.isidentifier() or hasattr(nn.ModuleDict(), name):
                raise ValueError(
                    f"{name!r} cannot name an encoder: take letters, digits and _, and neither {BACKBONE!r} nor the "
                    "name of a method of torch's modules"
                )
            if name in _alone() and part.reads not in (None, name):
                raise ValueError(f"an encoder named {name!r} reads {name}, not {part.reads}; give it another name")
        return encoders


def build_mllm(
    config: ModelConfig, vocab_size: int, dtype: torch.dtype = torch.float32, seed: int = 0, *, deferred: bool = False
) -> MLLM:
    """The whole model on the CPU in `dtype`. vocab_size: the size of the tokenizer's vocabulary.

    Under `torch.device("meta")` the model has shapes only: it takes no memory and reads no weights.
    deferred: leave parameters of HF models on meta, for `materialise` to fill in once the model is sharded. Whole at
    once are then projectors, classes of the user's own, and weights in a directory that cannot be read by the slice.
    Raises UserError for an HF option that is unknown, out of bounds or not computed as in transformers; for a directory
    that is missing or holds another family; for a vocabulary smaller than vocab_size; for a custom class that does not
    fulfil the contract; for targets of adapters that name no layer; for a pattern of `freeze` that no weight matches,
    or frozen ones alone.
    """
    # First of all: what is wrong with them is said before anything large is built.
    callbacks = {name: _callbacks(name, part, dtype, seed) for name, part in config.encoders.items()}
    merge = None
    if config.merge is not None:
        merge = _callback("model.merge", "merge", config.merge, dtype, seed, learns=config.backbone.train)
    with seeded(seed, "queries"):
        queries = {name: part.num_queries for name, part in config.generators.items() if part.num_queries}
        turns = [name for name in config.generators if name not in queries]
        backbone = build_backbone(
            config.backbone, vocab_size, dtype, seed, deferred=deferred, merge=merge, queries=queries, turns=turns
        )
    for name in queries:
        backbone.queries[name].requires_grad_(config.generators[name].train_projector)
    encoders = {
        name: build_modality(name, part, backbone.dim, dtype, seed, deferred=deferred, callbacks=callbacks[name])
        for name, part in config.encoders.items()
    }
    generators = {
        name: build_generator(name, part, backbone.dim, dtype, seed) for name, part in config.generators.items()
    }
    model = MLLM(encoders, backbone, generators)
    add_lora(model, config.lora, seed)
    named = {pattern: weights_named(model, pattern, "model.freeze") for pattern in config.freeze}
    for pattern, weights in named.items():
        if not any(weight.requires_grad for weight in weights):
            raise UserError(
                f"model.freeze: all weights that match {pattern!r} are frozen without it; remove it (of training "
                "phases, state it in those in which they learn)"
            )
    for weight in chain.from_iterable(named.values()):
        weight.requires_grad_(False)
    return model


def _callbacks(name: str, config: EncoderConfig, dtype: torch.dtype, seed: int) -> dict[str, Callable[..., Any]]:
    named = {kind: getattr(config, kind) for kind in ("before", "between", "after")}
    return {
        kind: _callback(f"model.encoders.{name}.{kind}", kind, path, dtype, seed, learns=config.train_projector)
        for kind, path in named.items()
        if path is not None
    } | {
        kind: callback.to(dtype) if isinstance(callback, nn.Module) else callback
        for kind, callback in config.own_callbacks().items()
    }


def _callback(where: str, kind: str, path: str, dtype: torch.dtype, seed: int, *, learns: bool) -> Callable[..., Any]:
    callback = named_callback(where, kind, path, seed)
    if not isinstance(callback, nn.Module):
        return callback
    return (callback if learns else callback.requires_grad_(False)).to(dtype)


def build_backbone(
    config: BackboneConfig,
    vocab_size: int,
    dtype: torch.dtype,
    seed: int,
    *,
    deferred: bool = False,
    merge: Callable[..., Any] | None = None,
    queries: Mapping[str, int] = MappingProxyType({}),
    turns: Sequence[str] = (),
) -> Backbone:
    """The backbone on the CPU; raises UserError as `build_mllm` does."""
    # HF's default padding token belongs to another vocabulary, and the row of a padding token is never trained.
    options = config.config if config.path else {"vocab_size": vocab_size, "pad_token_id": None} | config.config
    causal_lm = _build_hf("backbone", config.classes, config.path, options, dtype, seed, deferred)
    if "router_aux_loss_coef" in options and not causal_lm.config.output_router_logits:
        raise UserError(
            "model.backbone.config.router_aux_loss_coef has no effect without output_router_logits = true, as in "
            "transformers; set both, or neither."
        )
    check_windows(causal_lm.config, options, "model.backbone.config.")
    if (rows := causal_lm.get_input_embeddings().num_embeddings) < vocab_size:
        raise UserError(f"model.backbone: its vocabulary has {rows} entries, but the tokenizer needs {vocab_size}")
    return Backbone(
        causal_lm,
        train=config.train,
        merge=merge,
        bidirectional=config.bidirectional,
        prefix=config.prefix,
        queries=queries,
        turns=turns,
        first_position=config.first_position,
        stacked=config.stacked_rows,
        keys=config.key_rows,
    )


def build_modality(
    name: str,
    config: EncoderConfig,
    backbone_dim: int,
    dtype: torch.dtype,
    seed: int,
    *,
    deferred: bool = False,
    callbacks: dict[str, Callable[..., Any]] | None = None,
) -> ModalityModule:
    """One encoder with its projector, on the CPU; raises UserError as `build_mllm` does.

    callbacks: those that `config` names, if they are there already.
    """
    if callbacks is None:
        callbacks = _callbacks(name, config, dtype, seed)
    if own := config.own_encoder():
        encoder = own.to(dtype)
    elif config.module:
        encoder = _build_custom(name, config, seed).to(dtype)
    else:
        family, where = config.classes, f"encoders.{name}"
        if config.path:
            check_feature_layer(where, family, config.path, config.feature_layer)
        model = _build_hf(where, family, config.path, config.config, dtype, seed, deferred)
        options = {"feature_layer": config.feature_layer} if family.feature_layers else {}
        with _named(f"model.{where}"):
            encoder = family.adapter(model, **options)
    width = getattr(callbacks.get("between"), "output_dim", encoder.output_dim)
    with _named(f"model.encoders.{name}"):
        with seeded(seed, f"{name} projector"):
            projector = build_projector(width, backbone_dim, config.projector).to(dtype)
        keep_float64(projector)
        return ModalityModule(encoder, projector, config.train_encoder, config.train_projector, **callbacks)


@contextmanager
def _named(where: str) -> Iterator[None]:
    """Put the recipe's key before the error that a class raises for its options."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{where}: {error}") from error


def _build_hf(
    where: str,
    family: Family,
    path: Path | None,
    options: dict[str, Any],
    dtype: torch.dtype,
    seed: int,
    deferred: bool,
) -> PreTrainedModel:
    options = deepcopy(options)  # HF writes its defaults into the tables of its caller.
    hf_options(f"model.{where}.config", family.config, options)
    check_bounds(f"model.{where}.config.", options)
    shapes_only = torch.get_default_device().type == "meta"
    if path is not None and not shapes_only:
        model = _laid_out(where, family, path, options) if deferred else None
        return load_pretrained(where, family, path, options, dtype) if model is None else cast_parameters(model, dtype)
    try:
        hf_config = read_config(where, family, path, options) if path else family.config(**options)
        family.check(hf_config, f"model.{where}.config.")
        hf_config._attn_implementation = ATTENTION
        model = cast_parameters(on_meta(family, hf_config), dtype)
        if not shapes_only:
            compute_buffers(model)
            if not deferred:
                fill_parameters(model, where, family, None, seed, torch.device("cpu"))
    except UserError:
        raise
    except Exception as error:
        # HF raises exceptions of any kind for wrong options.
        raise UserError(
            f"model.{where}.config: no {family.config.model_type} model can be made of it ({one_line(error)})"
        ) from error
    return model


def _laid_out(where: str, family: Family, path: Path, options: dict[str, Any]) -> PreTrainedModel | None:
    """A model on meta whose weights can be read from `path` by the slice, or None. Raises as `load_pretrained` does."""
    config = checked_config(where, family, path, options)
    try:
        model = on_meta(family, config)
    except Exception:
        return None  # load_pretrained says what is wrong.
    if stored_tensors(model, family, path) is None:
        return None
    compute_buffers(model)
    if model.can_generate() and (path / "generation_config.json").exists():
        model.generation_config = GenerationConfig.from_pretrained(path, local_files_only=True)
    return model


def _build_custom(name: str, config: EncoderConfig, seed: int) -> nn.Module:
    where = f"model.encoders.{name}.module = {config.module!r}"
    encoder_class = imported(where, config.module or "", "package.module:Class")
    try:
        with seeded(seed, f"encoders.{name}"):
            encoder = encoder_class(**config.args)
    except TypeError as error:
        raise UserError(f"{where}: does not take the given args ({error})") from error
    missing = [member for member in ("output_dim", "num_outputs") if not hasattr(encoder, member)]
    if missing or not isinstance(encoder, nn.Module):
        lacks = f"lacks {' and '.join(missing)}" if missing else "is no torch.nn.Module"
        raise UserError(f"{where}: {lacks}; see motet.models.contract.Encoder for what an encoder must offer")
    return encoder


def cast_parameters(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """Cast the parameters of an HF model but not its buffers: rotary frequencies must stay float32."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model
