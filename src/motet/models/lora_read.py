"""LoRA adapters that start from a directory of peft: adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from motet.core.errors import UserError
from motet.core.text_files import read_json
from motet.models.named_weights import is_lora
from motet.models.stored import TensorInFile

if TYPE_CHECKING:
    from motet.models.lora import LoraConfig

PREFIX = "base_model.model."
"""What peft puts before the names of the model that it wraps."""
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PLAIN: Mapping[str, tuple[object, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "use_dora": (False, None),
    "fan_in_fan_out": (False, None),
    "modules_to_save": (None, []),
    "lora_bias": (False, None),
    "target_parameters": (None, []),
    "trainable_token_indices": (None,),
    "layer_replication": (None,),
}
"""Option of peft -> the values with which an adapter is what Motet computes."""


def read_adapter(where: str, config: LoraConfig, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, TensorInFile]:
    """Name of each weight of a part's adapters -> the tensor that peft has saved of it. No tensor is read.

    where:  the table of the recipe, for errors.
    shapes: of the weights that the part's adapters have by `config`, whose `path` is the directory.
    Raises UserError for a directory that cannot be read, or whose adapters are of another kind, of other layers, or of
    another rank or scale than `config` says.
    """
    assert config.path is not None, "it is called for a directory"
    stored, file = _read_config(where, config.path), config.path / WEIGHTS
    for key, allowed in _PLAIN.items():
        if (value := stored.get(key, allowed[0])) not in allowed:
            raise UserError(
                f"{where}.path: {config.path / CONFIG} has {key} = {value!r}, which Motet does not compute."
            )
    try:
        with safe_open(file, framework="pt") as opened:
            found = {key: tuple(opened.get_slice(key).get_shape()) for key in opened.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise UserError(f"{where}.path: {file} cannot be read ({error}).") from error
    if other := [key for key in found if not (key.startswith(PREFIX) and is_lora(key))]:
        raise UserError(f"{where}.path: {file} holds {other[0]}, which is no weight of LoRA's adapters.")
    layers, wanted = ({name.removeprefix(PREFIX).rpartition(".lora_")[0] for name in each} for each in (found, shapes))
    if layers != wanted:
        which = min(layers ^ wanted)
        has = "has no adapter" if which in wanted else "has an adapter"
        raise UserError(f"{where}.targets: the directory {config.path} {has} of {which}; name the layers that it has.")
    _check_scales(where, config, config.path, stored, layers)
    for name, shape in shapes.items():
        if found[PREFIX + name] != shape:
            raise UserError(
                f"{where}.rank: {name} has the shape {list(found[PREFIX + name])} in {file}, and {list(shape)} with "
                f"rank = {config.rank}."
            )
    return {name: TensorInFile(file, PREFIX + name) for name in shapes}


def _check_scales(where: str, config: LoraConfig, path: Path, stored: Mapping[str, Any], layers: set[str]) -> None:
    """Raise UserError if what peft adds for a layer is multiplied by something else than `config` says."""

    def stated(layer: str, key: str, patterns: str) -> float:
        matching = (
            each for name, each in (stored.get(patterns) or {}).items() if re.fullmatch(rf"(.*\.)?({name})", layer)
        )
        return float(next(matching, stored[key]))

    for layer in sorted(layers):
        try:
            alpha, rank = stated(layer, "lora_alpha", "alpha_pattern"), stated(layer, "r", "rank_pattern")
            scale = alpha / (math.sqrt(rank) if stored.get("use_rslora") else rank)
        except (KeyError, TypeError, ValueError, AttributeError, ZeroDivisionError, re.error) as error:
            raise UserError(f"{where}.path: {path / CONFIG} states no rank and alpha of {layer}.") from error
        if not math.isclose(scale, config.scale, rel_tol=1e-9):
            raise UserError(
                f"{where}: the adapter in {path} multiplies by {scale:g} (alpha = {alpha:g}, rank = {rank:g}"
                f"{', rank_stabilized' if stored.get('use_rslora') else ''}), and this table says {config.scale:g}."
            )


def _read_config(where: str, path: Path) -> Mapping[str, Any]:
    if not (path / CONFIG).is_file():
        raise UserError(f"{where}.path: there is no {path / CONFIG}; give a directory that peft has saved.")
    stored = read_json(path / CONFIG)
    if not isinstance(stored, dict):
        raise UserError(f"{where}.path: {path / CONFIG} is no table.")
    return stored
