"""The ModelSpec of a built model, of a recipe's `[model]`, or of an HF directory.

A model has one description: the `layers()` of its modules. A model that is not built yet is therefore built on the
`meta` device, without memory.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from transformers import CONFIG_MAPPING, PreTrainedConfig

from motet.core.errors import UserError
from motet.core.shapes import connect, multimodal
from motet.core.spec import ModelSpec, Module
from motet.models.attention import ATTENTION
from motet.models.backbone import Backbone
from motet.models.build import ModelConfig, build_mllm
from motet.models.config_file import one_line, parse_config, read_config_json
from motet.models.contract import AudioRows
from motet.models.families.patches import FeatureLayer, feature_layer_of
from motet.models.families.registry import BACKBONES, ENCODERS, Family
from motet.models.mllm import MLLM
from motet.models.projector import ProjectorConfig
from motet.models.whole.registry import WHOLE

_COMPOSITES = {
    "llava": {"vision_config": ProjectorConfig(kind="mlp")},
    "qwen2_audio": {"audio_config": ProjectorConfig(kind="linear")},
    "qwen2_vl": {"vision_config": None},
}
"""HF's multimodal models by type: their encoders' configs and projectors. Qwen2-VL's encoder needs no projector."""

_BACKBONE_TYPES = {family.config.model_type: family for family in BACKBONES.values()}
_ENCODER_TYPES = {family.config.model_type: family for family in ENCODERS.values()}
_TEXT_TYPES = {"qwen2_vl_text": "qwen2"}
"""The text parts whose spec is that of a family in the registry; they differ only in the axes of their positions."""


def model_spec(mllm: MLLM, name: str = "model") -> ModelSpec:
    """The ModelSpec of a built model: its encoders in their order, then the backbone, then generators."""
    encoders, generators = (
        [module.spec_module(phase) for phase, module in modules.items()] for modules in (mllm.encoders, mllm.generators)
    )
    spec = multimodal(name, mllm.backbone.spec_module(), encoders, generators, mllm.backbone.again)
    return replace(spec, merges=mllm.backbone.merge is not None)


def spec_of_config(config: ModelConfig, vocab_size: int, name: str = "model") -> ModelSpec:
    """The ModelSpec of a recipe's `[model]`, without memory or weights. Raises UserError as `build_mllm` does."""
    with torch.device("meta"):
        return model_spec(build_mllm(config, vocab_size), name)


def spec_of_directory(path: Path) -> ModelSpec:
    """The ModelSpec of an HF model: an LLM, an encoder alone, or both. path: its directory, or its config.json.

    All layers count as trainable. Raises UserError for a file that is missing or broken, and for a type of model or of
    a part that no family of the registry has.
    """
    file = path / "config.json" if path.is_dir() else path
    config, name = _read(file), file.absolute().parent.name
    if family := _ENCODER_TYPES.get(config.model_type):
        return ModelSpec(name, (_encoder(file, family, config),), ())
    if config.model_type not in _COMPOSITES:
        return multimodal(name, _backbone(file, config), ())
    text = config.text_config
    # transformers reads it from the larger config, if that has it.
    text.tie_word_embeddings = getattr(config, "tie_word_embeddings", getattr(text, "tie_word_embeddings", False))
    backbone, encoders = _backbone(file, text), []
    for part, projector in _COMPOSITES[config.model_type].items():
        part_config = getattr(config, part)
        part_type = part_config.model_type
        if part_type not in _ENCODER_TYPES:
            raise UserError(
                f"{file}: its {part} is of type {part_type!r}, which no family of encoders stands for; there are "
                f"{', '.join(_ENCODER_TYPES)}."
            )
        encoder = _encoder(file, _ENCODER_TYPES[part_type], part_config, feature_layer_of(config))
        if projector:
            encoder = connect(encoder, text.hidden_size, projector.kind, projector.downsample)
        encoders.append(encoder)
    return multimodal(name, backbone, encoders)


def _read(file: Path) -> PreTrainedConfig:
    stored = read_config_json(file)
    model_type = stored.get("model_type")
    known = {**_BACKBONE_TYPES, **_COMPOSITES, **_ENCODER_TYPES}
    if model_type in WHOLE and model_type not in known:
        raise UserError(
            f"{file}: a model of type {model_type!r} is planned by the recipe that trains it: one with [model] path = "
            f"{str(file.parent)!r}, a directory with the weights, and [data]."
        )
    if not isinstance(model_type, str) or model_type not in known:
        raise UserError(f"{file}: no family stands for a model of type {model_type!r}; there are {', '.join(known)}.")
    own = _ENCODER_TYPES | _BACKBONE_TYPES
    kind = own[model_type].config if model_type in own else CONFIG_MAPPING[model_type]
    return parse_config(file, kind, stored)


def _encoder(file: Path, family: Family, config: PreTrainedConfig, feature_layer: FeatureLayer = None) -> Module:
    options = {} if feature_layer is None else {"feature_layer": feature_layer}
    encoder = family.adapter(_on_meta(file, family, config), **options)
    name = "audio" if isinstance(encoder.takes, AudioRows) else "image"
    padded = getattr(encoder, "cost", "packed") == "padded"
    return Module.of(
        name, (each.layer for each in encoder.layers()), padded=padded, shareable=hasattr(encoder, "spare")
    )


def _backbone(file: Path, config: PreTrainedConfig) -> Module:
    family_type = _TEXT_TYPES.get(config.model_type, config.model_type)
    if family_type not in _BACKBONE_TYPES:
        raise UserError(
            f"{file}: its text_config is of type {config.model_type!r}, which no family of backbones stands for; "
            f"there are {', '.join(_BACKBONE_TYPES)}."
        )
    family = _BACKBONE_TYPES[family_type]
    if family_type != config.model_type:
        left_out = ("model_type", "rope_parameters")
        stored = {name: value for name, value in config.to_dict().items() if name not in left_out}
        config = parse_config(file, family.config, stored)
    return Backbone(_on_meta(file, family, config)).spec_module()


def _on_meta(file: Path, family: Family, config: PreTrainedConfig) -> torch.nn.Module:
    family.check(config, f"{file}: ")
    config._attn_implementation = ATTENTION
    try:
        with torch.device("meta"):
            return family.model(config)
    except Exception as error:
        raise UserError(f"{file}: no {config.model_type} model can be made of it ({one_line(error)}).") from error
