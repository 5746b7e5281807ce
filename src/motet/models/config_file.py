"""The config.json of an HF directory: of a family's own model, or of a larger model that holds the family's tower.

A larger model may read an inner layer of its tower: LLaVA reads the second to last layer of CLIP, LLaVA-OneVision the
last layer of Siglip without the norm behind it. The weights of the larger model fit only the rows of that layer, so a
recipe must not silently use the tower's own output.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import transformers
from transformers import CONFIG_MAPPING, PreTrainedConfig
from transformers.utils import logging as hf_logging

from motet.core.errors import UserError
from motet.core.text_files import read_json
from motet.models.families.bounds import check_bounds
from motet.models.families.eva_clip import tower_options
from motet.models.families.patches import FeatureLayer, feature_layer_of
from motet.models.families.registry import Family

_USE_OUTPUT = (
    "siglip", "siglip2", "clip", "paligemma", "gemma3", "shieldgemma2", "cohere2_vision", "qwen2_vl", "qwen2_5_vl",
    "qwen2_audio",
)  # fmt: skip
"""The types of larger models that use the tower's own output."""

INNER = {"qwen2_5_omni": "thinker"}
"""Types of models of several models -> the one of them that reads texts and media: its config and its weights."""

_UNDECLARED = {
    "qwen3_moe": {"head_dim"},
    "qwen2_vl_text": {"tie_word_embeddings"},
    "qwen2_5_vl_text": {"tie_word_embeddings"},
    "qwen3_vl_text": {"tie_word_embeddings"},
    "qwen3_vl_moe_text": {"tie_word_embeddings"},
}
"""Options that a model reads of its config, although their class does not declare them."""


ADAPTER_CONFIG = "adapter_config.json"
"""The config of an adapter of peft."""


def one_line(error: Exception) -> str:
    """The message of a library's error on one line."""
    # str() of a KeyError is the repr of its message.
    message = error.args[0] if isinstance(error, KeyError) and error.args else error
    return " ".join(str(message).split())


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Turn off transformers' reports and progress bars.

    Its reports of unused weights are no errors: a checkpoint with a tower holds other weights too. Errors are raised.
    """
    verbosity, bars = hf_logging.get_verbosity(), hf_logging.is_progress_bar_enabled()
    hf_logging.set_verbosity(hf_logging.CRITICAL)
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        hf_logging.set_verbosity(verbosity)
        if bars:
            hf_logging.enable_progress_bar()


def hf_options(where: str, config: type[PreTrainedConfig], options: dict[str, Any]) -> None:
    """Raise UserError for an option that HF's class of configs does not have. where: the key of the recipe."""
    known = {field.name for field in fields(config)} - {field.name for field in fields(PreTrainedConfig)}
    if unknown := sorted(set(options) - known - _UNDECLARED.get(config.model_type, set())):
        raise UserError(f"{where}: {config.__name__} has no option {', '.join(unknown)}")


def read_config_json(file: Path) -> dict[str, Any]:
    """The contents of a config.json, of an EVA-CLIP those of its tower: transformers takes its type for CLIP's.

    Raises UserError for a missing or broken file, and for a number out of bounds.
    """
    if not file.is_file():
        raise UserError(f"There is no {file}; give a local directory that holds an HF model.")
    stored = read_json(file)
    if not isinstance(stored, dict):
        raise UserError(f"{file} holds no table of options, as the config of an HF model does.")
    if not isinstance(stored.get("model_type", ""), str | None):
        raise UserError(f"{file}: model_type is {stored['model_type']!r}; it must be a name.")
    check_bounds(f"{file}: ", stored)
    try:
        return tower_options(stored) or stored
    except UserError as error:
        raise UserError(f"{file}: {error}") from error


def check_class(file: Path, stored: dict[str, Any]) -> None:
    """Raise UserError for a model whose class is Python code beside its weights, as nobody knows what it computes.

    Without running such code, transformers would take the class of its own that has the same `model_type`.
    """
    named, code = stored.get("architectures"), stored.get("auto_map")
    own = isinstance(code, dict) and any(key.startswith("AutoModel") for key in code)
    if own and isinstance(named, list) and named and not any(hasattr(transformers, str(name)) for name in named):
        raise UserError(
            f"{file}: {named[0]} is no class of transformers, but code of its own (auto_map), which Motet does not "
            f"run; remove auto_map if transformers' own {stored.get('model_type')} computes the same."
        )


def parse_config(file: Path, kind: type[PreTrainedConfig], stored: dict[str, Any]) -> PreTrainedConfig:
    """`stored` as a config of `kind`. Raises UserError with HF's message if HF refuses it."""
    try:
        with quiet_transformers():
            return kind.from_dict(stored)
    except Exception as error:
        # HF checks types and relations with exceptions of any kind.
        raise UserError(f"{file} is no config of {kind.model_type} ({one_line(error)}).") from error


def read_config(where: str, family: Family, path: Path, options: dict[str, Any]) -> PreTrainedConfig:
    """The family's config from a directory that holds its model or a larger one; `options` override it.

    Raises UserError for a file that is missing or broken, for another type of model, and for options that Motet does
    not compute.
    """
    file, stored = _stored(where, path)
    needed_type, stored_type = family.config.model_type, stored.get("model_type")
    if stored_type != needed_type:
        larger = _larger_model(file, stored, family)
        if larger is None:
            raise UserError(
                f"model.{where}.path: {path} holds a model of type {stored_type!r}, where {needed_type!r} is needed."
            )
        stored = getattr(larger, family.part).to_dict()
    elif family.model.__module__.startswith("transformers."):
        check_class(file, stored)
    if "rope_parameters" in options:  # transformers would take that of the file, under its older name.
        stored = {key: value for key, value in stored.items() if key != "rope_scaling"}
    config = parse_config(file, family.config, stored | options)
    family.check(config, f"{file}: " if not options else f"{file}, with model.{where}.config: ")
    return config


def check_feature_layer(where: str, family: Family, path: Path, feature_layer: FeatureLayer) -> None:
    """Raise UserError if a larger model in `path` uses other rows of its tower than the encoder would return.

    feature_layer: what the recipe names; then that is used, whatever the larger model uses.
    """
    larger = _larger_model(*_stored(where, path), family)
    if larger is not None and not family.feature_layers:
        _check_takes_output(where, path, larger)
        return
    if larger is None or (larger.model_type in _USE_OUTPUT and feature_layer is None):
        return
    layer = feature_layer_of(larger)
    model = f"the {larger.model_type} model in {path}"
    if feature_layer is None:
        if layer is None:
            raise UserError(
                f"model.{where}: it is not known here which layer of its tower {model} takes; set "
                f"model.{where}.feature_layer to the one that you want."
            )
        layers, said = ("layer", layer) if isinstance(layer, int) else ("the layers", list(layer))
        raise UserError(
            f"model.{where}: {model} takes {layers} {said} of its tower, not the tower's own output; set "
            f"model.{where}.feature_layer = {said}, or to another one that you want."
        )
    strategy = getattr(larger, "vision_feature_select_strategy", None)
    computed = "default" if family.class_row else "full"
    if strategy not in (None, computed):
        raise UserError(
            f"model.{where}: {model} has vision_feature_select_strategy = {strategy!r}, which "
            f"{'keeps the class row' if family.class_row else 'drops the first patch'}; the encoder of Motet does as "
            f"{computed!r} says, so save the tower in a directory of its own if that is what you want."
        )


def _check_takes_output(where: str, path: Path, larger: PreTrainedConfig) -> None:
    """Raise UserError if a larger model takes other rows of its tower than the last layer's without the class row."""
    for key, taken in (("vision_feature_layer", -1), ("vision_feature_select_strategy", "default")):
        if (said := getattr(larger, key, None)) not in (None, taken, [taken]):
            raise UserError(
                f"model.{where}: the {larger.model_type} model in {path} has {key} = {said!r}, and the encoder of "
                f"Motet does as {taken!r} says, so save the tower in a directory of its own if that is what you want."
            )


def _stored(where: str, path: Path) -> tuple[Path, dict[str, Any]]:
    file = path / "config.json"
    if not file.is_file() and (path / ADAPTER_CONFIG).is_file():
        raise UserError(adapter_alone(f"model.{where}.path", path, f"[model.lora.{where.rpartition('.')[2]}]"))
    if not file.is_file():
        raise UserError(f"model.{where}.path: there is no {file}; give a local directory that holds an HF model.")
    return file, read_config_json(file)


def adapter_alone(key: str, path: Path, table: str) -> str:
    """The sentence for an adapter of peft in the place of a model. table: of the recipe, where adapters stand."""
    stored = read_json(path / ADAPTER_CONFIG)
    base = stored.get("base_model_name_or_path") if isinstance(stored, dict) else None
    trained = f" (it was trained on {base})" if isinstance(base, str) else ""
    return (
        f"{key}: {path} holds an adapter of peft alone; name its model there{trained}, and the adapter as {table} "
        f'path = "{path}".'
    )


def _larger_model(file: Path, stored: dict[str, Any], family: Family) -> PreTrainedConfig | None:
    """The config of a larger model that holds a part of the family's type; None if `stored` is of no such model.

    HF's class of the larger model reads it, because that class knows the defaults of parts that the file leaves out.
    """
    stored_type = stored.get("model_type")
    if not family.part or stored_type == family.config.model_type or stored_type not in CONFIG_MAPPING:
        return None
    larger = parse_config(file, CONFIG_MAPPING[stored_type], stored)
    larger = getattr(larger, f"{INNER[stored_type]}_config") if stored_type in INNER else larger
    part = getattr(larger, family.part, None)
    # Older files of Idefics3 and SmolVLM name the type of the larger model for the tower, too; HF's class is the same.
    is_of_type = isinstance(part, PreTrainedConfig) and part.model_type == family.config.model_type
    return larger if is_of_type or type(part) is family.config else None
