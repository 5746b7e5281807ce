"""HF weights from a local directory: a model saved by itself, or a tower inside a larger checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import logging as hf_logging

from motet.core.errors import UserError
from motet.core.text_files import read_json
from motet.models.attention import ATTENTION
from motet.models.families.registry import Family


def load_pretrained(
    where: str, family: Family, path: Path, options: dict[str, Any], dtype: torch.dtype
) -> PreTrainedModel:
    """The family's model with the weights in `path`. options: HF options that override those of the directory.

    Never reaches for the network. Raises UserError for a missing directory, another kind of model, or weights that are
    missing or of another shape.
    """
    config = read_config(where, family, path, options)
    config._attn_implementation = ATTENTION
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
    except (OSError, RuntimeError, ValueError, SafetensorError) as error:
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
    return model


def one_line(error: Exception) -> str:
    """What a library says is wrong, without its line breaks."""
    return " ".join(str(error).split())


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Without transformers' reports and progress bars.

    A checkpoint that holds a tower holds other weights too, which is as it should be; what is amiss is raised.
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


def read_config(where: str, family: Family, path: Path, options: dict[str, Any]) -> PreTrainedConfig:
    """The family's config from a directory that holds it, or a larger model's. Raises UserError as load_pretrained."""
    file = path / "config.json"
    if not file.is_file():
        raise UserError(f"model.{where}.path: there is no {file}; give a local directory that holds an HF model")
    stored = read_json(file)
    if not isinstance(stored, dict):
        raise UserError(f"model.{where}.path: {file} must hold an object, as an HF model's config.json does")
    wanted = family.config.model_type
    found = stored.get("model_type")
    if found != wanted and family.part:
        stored = stored.get(family.part) or {}
        # Older files leave out the type of a part where the class of the whole implies it.
        found = stored.get("model_type", wanted if stored else found)
    if found != wanted:
        raise UserError(f"model.{where}.path: {path} holds a model of type {found!r}, where {wanted!r} is needed")
    try:
        return family.config.from_dict(stored | options)
    except (StrictDataclassError, TypeError, ValueError, KeyError) as error:
        raise UserError(f"model.{where}.path: {file} is no config of {wanted} ({one_line(error)})") from error
