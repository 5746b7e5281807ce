"""The ModelSpec of a model: of one that is built, of a recipe's `[model]`, or of an HF directory.

What is not built yet is built on the `meta` device, without memory, so that there is one description of a model: what
its modules say of themselves (`layers()`).
"""

from __future__ import annotations

from pathlib import Path

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING, PreTrainedConfig

from motet.core.errors import UserError
from motet.core.shapes import connect, multimodal
from motet.core.spec import ModelSpec, Module
from motet.core.text_files import read_json
from motet.models.attention import ATTENTION
from motet.models.backbone import Backbone
from motet.models.build import ModelConfig, build_mllm
from motet.models.families.audio import AudioEncoder
from motet.models.families.registry import BACKBONES, ENCODERS, Family
from motet.models.load import one_line, quiet_transformers
from motet.models.module import MLLM
from motet.models.projector import ProjectorConfig

_COMPOSITES = {
    "llava": {"vision_config": ProjectorConfig(kind="mlp")},
    "qwen2_audio": {"audio_config": ProjectorConfig(kind="linear")},
    "qwen2_vl": {"vision_config": None},
}
"""HF models of an LLM and encoders, by type: the parts and their projectors. Qwen2-VL's encoder needs none."""

_BACKBONE_TYPES = {family.config.model_type: family for family in BACKBONES.values()}
_ENCODER_TYPES = {family.config.model_type: family for family in ENCODERS.values()}
_TEXT_TYPES = {"qwen2_vl_text": "qwen2"}
"""Text parts that differ from a family of the registry in nothing that a spec holds."""


def model_spec(mllm: MLLM, name: str = "model") -> ModelSpec:
    """What the model is: its encoders in their order, then the backbone."""
    encoders = [module.spec_module(phase) for phase, module in mllm.encoders.items()]
    return multimodal(name, mllm.backbone.spec_module(), encoders)


def spec_of_config(config: ModelConfig, vocab_size: int, name: str = "model") -> ModelSpec:
    """What a recipe's `[model]` will be; takes no memory and reads no weights. Raises UserError as build_mllm does."""
    with torch.device("meta"):
        return model_spec(build_mllm(config, vocab_size), name)


def spec_of_directory(path: Path) -> ModelSpec:
    """What the HF model in a directory, or of a config.json, is: an LLM, an encoder alone, or one that has both.

    All of it is taken to be trained. Raises UserError for a file that is missing or broken, and for a type of model or
    of a part that no family stands for.
    """
    file = path / "config.json" if path.is_dir() else path
    config, name = _read(file), file.absolute().parent.name
    if family := _ENCODER_TYPES.get(config.model_type):
        return ModelSpec(name, (_encoder(family, config),), ())
    if config.model_type not in _COMPOSITES:
        return multimodal(name, _backbone(file, config), ())
    text = config.text_config
    # transformers reads it off the whole, where the whole has it at all.
    text.tie_word_embeddings = getattr(config, "tie_word_embeddings", getattr(text, "tie_word_embeddings", False))
    backbone, encoders = _backbone(file, text), []
    for part, projector in _COMPOSITES[config.model_type].items():
        held = getattr(config, part)
        if held.model_type not in _ENCODER_TYPES:
            raise UserError(
                f"{file}: its {part} is of type {held.model_type!r}, which no family of encoders stands for; there are "
                f"{', '.join(_ENCODER_TYPES)}."
            )
        encoder = _encoder(_ENCODER_TYPES[held.model_type], held)
        if projector:
            encoder = connect(encoder, text.hidden_size, projector.kind, projector.downsample)
        encoders.append(encoder)
    return multimodal(name, backbone, encoders)


def _read(file: Path) -> PreTrainedConfig:
    if not file.is_file():
        raise UserError(f"There is no {file}; give a directory with an HF model, or its config.json.")
    stored = read_json(file)
    found = stored.get("model_type") if isinstance(stored, dict) else None
    known = {**_BACKBONE_TYPES, **_COMPOSITES, **_ENCODER_TYPES}
    if not isinstance(found, str) or found not in known:
        raise UserError(f"{file}: no family stands for a model of type {found!r}; there are {', '.join(known)}.")
    kind = _ENCODER_TYPES[found].config if found in _ENCODER_TYPES else CONFIG_MAPPING[found]
    try:
        with quiet_transformers():
            return kind.from_dict(stored)
    except (StrictDataclassError, TypeError, ValueError, KeyError) as error:
        raise UserError(f"{file} is no config of {found} ({one_line(error)}).") from error


def _encoder(family: Family, config: PreTrainedConfig) -> Module:
    audio = issubclass(family.adapter, AudioEncoder)
    encoder = family.adapter(_on_meta(family, config))
    return Module.of("audio" if audio else "image", (each.layer for each in encoder.layers()), padded=audio)


def _backbone(file: Path, config: PreTrainedConfig) -> Module:
    found = _TEXT_TYPES.get(config.model_type, config.model_type)
    if found not in _BACKBONE_TYPES:
        raise UserError(
            f"{file}: its text_config is of type {config.model_type!r}, which no family of backbones stands for; "
            f"there are {', '.join(_BACKBONE_TYPES)}."
        )
    family = _BACKBONE_TYPES[found]
    if found != config.model_type:
        stored = {name: value for name, value in config.to_dict().items() if name != "model_type"}
        config = family.config.from_dict(stored)
    return Backbone(_on_meta(family, config)).spec_module()


def _on_meta(family: Family, config: PreTrainedConfig) -> torch.nn.Module:
    config._attn_implementation = ATTENTION
    with torch.device("meta"):
        return family.model(config)
