"""HF weights from a local directory: a model saved by itself, or a tower inside a larger checkpoint."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from motet.core.errors import UserError
from motet.core.files import irregular_kind
from motet.core.text_files import read_json
from motet.models.attention import ATTENTION
from motet.models.config_file import one_line, quiet_transformers, read_config
from motet.models.families.registry import Family


def load_pretrained(
    where: str, family: Family, path: Path, options: dict[str, Any], dtype: torch.dtype
) -> PreTrainedModel:
    """The family's model with the weights in `path`. options: HF options that override those of the directory.

    Never reaches for the network. Raises UserError for a missing directory, another kind of model, and weights that are
    missing, of another shape, or of a backbone that is not the one the config names.
    """
    config = read_config(where, family, path, options)
    config._attn_implementation = ATTENTION
    if (path / "adapter_config.json").exists():
        raise UserError(
            f"model.{where}.path: {path} holds an adapter, which would be put into the model where peft is installed "
            "and left out elsewhere; merge it into the weights first, and remove adapter_config.json."
        )
    _check_files(where, path)
    try:
        with quiet_transformers():
            model, info = family.model.from_pretrained(
                path,
                config=config,
                dtype=dtype,
                key_mapping={family.prefixes: ""} if family.prefixes else None,
                output_loading_info=True,
                ignore_mismatched_sizes=True,
                local_files_only=True,
                use_safetensors=True,
            )
    except Exception as error:
        # Missing and damaged files, other layouts, absent packages: HF has an exception for each.
        raise UserError(f"model.{where}.path: weights in {path} cannot be loaded ({one_line(error)})") from error
    if info["mismatched_keys"]:
        name, stored, wanted = min(info["mismatched_keys"])
        raise UserError(
            f"model.{where}.path: {name} in {path} has shape {list(stored)}, where the config asks for {list(wanted)}"
        )
    if absent := sorted(info["missing_keys"]):
        raise UserError(
            f"model.{where}.path: {path} lacks {len(absent)} weights of {family.model.__name__}, {absent[0]} for one"
        )
    # A larger checkpoint holds more than its tower; a backbone's holds nothing that the model would compute without.
    stray = [] if family.adapter else sorted(filter(_strange_to(config.num_hidden_layers), info["unexpected_keys"]))
    if stray:
        raise UserError(
            f"model.{where}.path: {path} holds {len(stray)} weights that {family.model.__name__} has no place for, "
            f"{stray[0]} for one; its config.json does not describe them"
        )
    return model


def _check_files(where: str, path: Path) -> None:
    """Raises UserError for a pipe, which HF would wait for, and for an index of weights that are not in `path`."""
    index = path / "model.safetensors.index.json"
    for file in (*path.glob("*.safetensors"), *([index] if os.path.lexists(index) else [])):
        if kind := irregular_kind(file) if file.exists() else None:
            raise UserError(f"model.{where}.path: {file} is {kind}, not a regular file")
    found = read_json(index) if index.is_file() else None
    of_weights = found.get("weight_map") if isinstance(found, dict) else None
    for name in of_weights.values() if isinstance(of_weights, dict) else ():
        if not isinstance(name, str) or name != os.path.basename(name):
            raise UserError(f"model.{where}.path: {index} names {str(name)[:40]!r}, which is no file beside it")


def _strange_to(depth: int) -> Callable[[str], bool]:
    """Whether a weight is neither of a layer beyond `depth`, which a config may leave out, nor an old rotary buffer."""

    def strange(name: str) -> bool:
        layer = re.search(r"\blayers\.(\d+)\.", name)
        return not (layer and int(layer[1]) >= depth) and not name.endswith("rotary_emb.inv_freq")

    return strange
