"""HF weights from a local directory: a model saved by itself, or a tower inside a larger checkpoint."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from motet.core.errors import UserError
from motet.core.files import irregular_kind
from motet.core.text_files import read_json
from motet.core.words import counted_words
from motet.models.attention import ATTENTION
from motet.models.config_file import ADAPTER_CONFIG, one_line, quiet_transformers, read_config
from motet.models.families.registry import Family

INDEX = "model.safetensors.index.json"
_TYPES = ("F64", "F32", "F16", "BF16")
"""Types of stored weights, as safetensors names them."""


def load_pretrained(
    where: str, family: Family, path: Path, options: dict[str, Any], dtype: torch.dtype
) -> PreTrainedModel:
    """The family's model with the weights in `path`. options: HF options that override those of the directory.

    It never uses the network. Raises UserError for a missing directory, for another type of model, for weights that are
    missing, quantised or of another shape, and for weights of a backbone that its config does not describe.
    """
    config = checked_config(where, family, path, options)
    try:
        with quiet_transformers():
            model, info = family.model.from_pretrained(
                path,
                config=config,
                dtype=dtype,
                key_mapping=key_mapping(family),
                output_loading_info=True,
                ignore_mismatched_sizes=True,
                local_files_only=True,
                use_safetensors=True,
            )
    except Exception as error:
        # HF raises exceptions of any kind: for missing and damaged files, other layouts, absent packages.
        raise UserError(f"model.{where}.path: weights in {path} cannot be loaded ({one_line(error)})") from error
    if info["mismatched_keys"]:
        name, stored, expected = min(info["mismatched_keys"])
        raise UserError(
            f"model.{where}.path: {name} in {path} has shape {list(stored)}, where the config asks for {list(expected)}"
        )
    if absent := sorted(info["missing_keys"]):
        raise UserError(
            f"model.{where}.path: {path} lacks {counted_words(len(absent), 'weight')} of {family.model.__name__}, "
            f"{absent[0]} for one"
        )
    # A larger checkpoint holds more than its tower. A backbone's checkpoint must hold only weights of the model.
    stray = [] if family.is_part else sorted(filter(is_stray(config.num_hidden_layers), info["unexpected_keys"]))
    if stray:
        raise UserError(
            f"model.{where}.path: {path} holds {counted_words(len(stray), 'weight')} that {family.model.__name__} has "
            f"no place for, {stray[0]} for one; its config.json does not describe them"
        )
    shapes = on_meta(family, config)
    _check_types(where, shapes, family, path)
    # transformers lets all that it has read be trained, also what its class freezes: Whisper's table of positions.
    for name, parameter in shapes.named_parameters():
        model.get_parameter(name).requires_grad_(parameter.requires_grad)
    return model


def on_meta(family: Family, config: PreTrainedConfig) -> PreTrainedModel:
    """A model of the family with shapes only, in torch's default dtype. config: transformers may write into it."""
    with quiet_transformers(), torch.device("meta"):
        return family.model(deepcopy(config))


def checked_config(where: str, family: Family, path: Path, options: dict[str, Any]) -> PreTrainedConfig:
    """The config of `load_pretrained`; raises UserError for a directory whose files it must not read."""
    config = read_config(where, family, path, options)
    config._attn_implementation = ATTENTION
    check_files(f"model.{where}.path", path)
    return config


def key_mapping(family: Family) -> dict[str, str] | None:
    """What transformers is to take from the names of weights: where the tower lies in a larger checkpoint."""
    return {family.prefixes: family.prefix} if family.prefixes else None


def key_reader(model: PreTrainedModel, family: Family) -> Callable[[str], tuple[str, str | None]]:
    """Key of a weight in a file -> its name in `model` as transformers renames it, and what converts it, if anything.

    model: of the family, without Blocks.
    """
    transforms = get_model_conversion_mapping(model, key_mapping(family))
    renamings = [each for each in transforms if isinstance(each, WeightRenaming)]
    converters = [each for each in transforms if isinstance(each, WeightConverter)]
    names = model.state_dict()
    return lambda key: rename_source_key(key, renamings, converters, model.base_model_prefix, names)


def _check_types(where: str, shapes: PreTrainedModel, family: Family, path: Path) -> None:
    """Raise UserError for a quantised weight of the model: transformers would read its numbers without their scale.

    A larger model may be quantised but for its tower, so its config does not tell. shapes: on meta.
    """
    name_of, names = key_reader(shapes, family), shapes.state_dict()
    for file in weight_files(path) or ():
        with safe_open(file, framework="pt") as opened:
            for key in opened.keys():  # noqa: SIM118, the file is no mapping
                kind = opened.get_slice(key).get_dtype()
                if is_quantised(kind) and name_of(key)[0] in names:
                    raise UserError(f"model.{where}.path: {quantised(key, file, kind)}")


def is_quantised(kind: str) -> bool:
    """Whether a weight of this type, as safetensors names it, needs a scale. Buffers may be of such a type, too."""
    return kind not in _TYPES


def quantised(key: str, file: Path, kind: str) -> str:
    """The sentence for a weight in a file that is quantised."""
    return f"{key} in {file} is quantised ({kind}); weights must be float64, float32, float16 or bfloat16."


def check_files(key: str, path: Path) -> None:
    """Raise UserError for files of a directory that must not be read.

    They are an adapter, a pipe, on which HF would wait forever, and an index that names files outside `path`.
    """
    if (path / ADAPTER_CONFIG).exists():
        raise UserError(
            f"{key}: {path} holds an adapter, which would be put into the model where peft is installed "
            "and left out elsewhere; merge it into the weights first, and remove adapter_config.json."
        )
    index = path / INDEX
    for file in (*path.glob("*.safetensors"), *([index] if os.path.lexists(index) else [])):
        if kind := irregular_kind(file) if file.exists() else None:
            raise UserError(f"{key}: {file} is {kind}, not a regular file")
    for name in indexed_files(path):
        if not isinstance(name, str) or name != os.path.basename(name):
            raise UserError(f"{key}: {index} names {str(name)[:40]!r}, which is no file beside it")


def indexed_files(path: Path) -> list[Any]:
    """The file of each weight that the index of a directory names; empty without one, or without such a table."""
    index = path / INDEX
    contents = read_json(index) if index.is_file() else None
    weight_map = contents.get("weight_map") if isinstance(contents, dict) else None
    return list(weight_map.values()) if isinstance(weight_map, dict) else []


def weight_files(path: Path) -> list[Path] | None:
    """The files of weights that transformers would read, or None if it would search further."""
    if any(path.glob("shard-*.safetensors")):
        return None
    whole = path / "model.safetensors"
    if whole.is_file():
        return [whole]
    return [path / name for name in sorted({name for name in indexed_files(path) if isinstance(name, str)})] or None


def is_stray(num_layers: int) -> Callable[[str], bool]:
    """Whether an unexpected weight is an error. A layer beyond num_layers, or an old rotary buffer, is none."""

    def stray(name: str) -> bool:
        layer = re.search(r"\blayers\.(\d+)\.", name)
        return not (layer and int(layer[1]) >= num_layers) and not name.endswith("rotary_emb.inv_freq")

    return stray
