"""The config.json of an HF directory: of a family's own model, or of a larger one that holds its tower.

What a larger model takes of its tower is part of what the tower is there: LLaVA reads the second to last layer of
CLIP, LLaVA-OneVision the last layer of Siglip without the norm behind it. A tower that is read from such a directory
and gives its own output instead would train on other rows than the weights beside it were made for.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING, PreTrainedConfig
from transformers.utils import logging as hf_logging

from motet.core.errors import UserError
from motet.core.text_files import read_json
from motet.models.families.bounds import check_bounds
from motet.models.families.registry import Family

_TAKE_OUTPUT = ("siglip", "clip", "paligemma", "gemma3", "shieldgemma2", "cohere2_vision", "qwen2_vl", "qwen2_audio")
"""Types of larger models that take the tower's own output."""


def one_line(error: Exception) -> str:
    """What a library says is wrong, without its line breaks."""
    # Of a KeyError, str() is the repr of what it says.
    said = error.args[0] if isinstance(error, KeyError) and error.args else error
    return " ".join(str(said).split())


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


def read_config_json(file: Path) -> dict[str, Any]:
    """What a config.json holds, numbers within their bounds. Raises UserError for a file that is missing or broken."""
    if not file.is_file():
        raise UserError(f"There is no {file}; give a local directory that holds an HF model.")
    stored = read_json(file)
    if not isinstance(stored, dict):
        raise UserError(f"{file} holds no table of options, as the config of an HF model does.")
    if not isinstance(stored.get("model_type", ""), str | None):
        raise UserError(f"{file}: model_type is {stored['model_type']!r}; it must be a name.")
    check_bounds(f"{file}: ", stored)
    return stored


def parse_config(file: Path, kind: type[PreTrainedConfig], stored: dict[str, Any]) -> PreTrainedConfig:
    """`stored` as a config of `kind`; raises UserError for whatever HF says is wrong with it."""
    try:
        with quiet_transformers():
            return kind.from_dict(stored)
    except Exception as error:
        # HF checks types and relations with exceptions of any kind.
        raise UserError(f"{file} is no config of {kind.model_type} ({one_line(error)}).") from error


def read_config(where: str, family: Family, path: Path, options: dict[str, Any]) -> PreTrainedConfig:
    """The family's config from a directory that holds it, or a larger model's; `options` override what it says.

    Raises UserError for a file that is missing or broken, holds another kind of model, or says what is not computed.
    """
    file, stored = _stored(where, path)
    wanted, found = family.config.model_type, stored.get("model_type")
    if found != wanted:
        whole = _larger(file, stored, family)
        if whole is None:
            raise UserError(f"model.{where}.path: {path} holds a model of type {found!r}, where {wanted!r} is needed.")
        stored = getattr(whole, family.part).to_dict()
    config = parse_config(file, family.config, stored | options)
    family.check(config, f"{file}: " if not options else f"{file}, with model.{where}.config: ")
    return config


def check_taken(where: str, family: Family, path: Path, feature_layer: int | None) -> None:
    """Raises UserError if a larger model in `path` takes other rows of its tower than the encoder would give.

    feature_layer: the one that the recipe names, if it does: then the layer is its choice.
    """
    whole = _larger(*_stored(where, path), family) if family.feature_layers else None
    if whole is None or (whole.model_type in _TAKE_OUTPUT and feature_layer is None):
        return
    layer = getattr(whole, "vision_feature_layer", None)
    layer = layer[0] if isinstance(layer, list | tuple) and len(layer) == 1 else layer
    of_larger = f"the {whole.model_type} model in {path}"
    if feature_layer is None and not isinstance(layer, int):
        taken = (
            "it is not known here which layer of its tower" if layer is None else f"the layers {list(layer)} are what"
        )
        raise UserError(
            f"model.{where}: {taken} {of_larger} takes; set model.{where}.feature_layer to the one that you want."
        )
    if feature_layer is None:
        raise UserError(
            f"model.{where}: {of_larger} takes layer {layer} of its tower, not the tower's own output; set "
            f"model.{where}.feature_layer = {layer}, or to another one that you want."
        )
    keeps, needed = getattr(whole, "vision_feature_select_strategy", None), "default" if family.class_row else "full"
    if keeps not in (None, needed):
        raise UserError(
            f"model.{where}: {of_larger} has vision_feature_select_strategy = {keeps!r}, which "
            f"{'keeps the class row' if family.class_row else 'drops the first patch'}; the encoder of Motet does as "
            f"{needed!r} says, so save the tower in a directory of its own if that is what you want."
        )


def _stored(where: str, path: Path) -> tuple[Path, dict[str, Any]]:
    file = path / "config.json"
    if not file.is_file():
        raise UserError(f"model.{where}.path: there is no {file}; give a local directory that holds an HF model.")
    return file, read_config_json(file)


def _larger(file: Path, stored: dict[str, Any], family: Family) -> PreTrainedConfig | None:
    """The config of a larger model that holds a part of the family's type; None if `stored` is of no such model.

    HF's own class of the larger model reads it: it knows what a part is that the file does not spell out.
    """
    found = stored.get("model_type")
    if not family.part or found == family.config.model_type or found not in CONFIG_MAPPING:
        return None
    whole = parse_config(file, CONFIG_MAPPING[found], stored)
    part = getattr(whole, family.part, None)
    return whole if isinstance(part, PreTrainedConfig) and part.model_type == family.config.model_type else None
