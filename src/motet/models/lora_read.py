"""LoRA adapters that start from a directory of peft: adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Set
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from safetensors import SafetensorError, safe_open

from motet.core.errors import UserError
from motet.core.text_files import read_json
from motet.models.config_file import ADAPTER_CONFIG
from motet.models.stored import TensorInFile

if TYPE_CHECKING:
    from motet.models.lora import LoraConfig

PREFIX = "base_model.model."
"""What peft puts before the names of the model that it wraps."""
ADAPTER_WEIGHTS = "adapter_model.safetensors"
_PLAIN: Mapping[str, tuple[object, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "use_dora": (False, None),
    "modules_to_save": (None, []),
    "lora_bias": (False, None),
    "target_parameters": (None, []),
    "trainable_token_indices": (None,),
    "layer_replication": (None,),
    # Others change the weights beside the adapters when peft loads them (PiSSA, OLoRA, CorDA, LoftQ).
    "init_lora_weights": (True, False, None, "gaussian", "eva", "orthogonal"),
    "alora_invocation_tokens": (None, []),
    "use_qalora": (False, None),
    "use_bdlora": (None, False),
    "arrow_config": (None,),
    "kasa_config": (None,),
    "velora_config": (None,),
    "monteclora_config": (None,),
}
"""Option of peft -> the values with which an adapter is what Motet computes."""


class SavedAdapter(NamedTuple):
    """A directory of peft. config: its table. shapes: of the tensors in `file`, by their names there."""

    config: Mapping[str, Any]
    file: Path
    shapes: Mapping[str, tuple[int, ...]]

    @staticmethod
    def read(where: str, path: Path, but: Collection[str] = ()) -> SavedAdapter:
        """What `path` holds. No tensor is read. but: options whose values are not checked.

        where: the key of the recipe, for errors. Raises UserError for a directory that cannot be read, and for another
        kind of adapters.
        """
        if not (path / ADAPTER_CONFIG).is_file():
            raise UserError(f"{where}: there is no {path / ADAPTER_CONFIG}; give a directory that peft has saved.")
        config, file = read_json(path / ADAPTER_CONFIG), path / ADAPTER_WEIGHTS
        if not isinstance(config, dict):
            raise UserError(f"{where}: {path / ADAPTER_CONFIG} is no table.")
        for key, allowed in _PLAIN.items():
            if key not in but and (value := config.get(key, allowed[0])) not in allowed:
                raise UserError(
                    f"{where}: {path / ADAPTER_CONFIG} has {key} = {value!r}, which Motet does not compute."
                )
        try:
            with safe_open(file, framework="pt") as opened:
                shapes = {key: tuple(opened.get_slice(key).get_shape()) for key in opened.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise UserError(f"{where}: {file} cannot be read ({error}).") from error
        return SavedAdapter(config, file, shapes)

    def alpha_and_rank(self, where: str, layer: str) -> tuple[float, float]:
        """Those of a layer, by its name in the file without `PREFIX`. Raises UserError if they are not stated."""

        def stated(key: str, patterns: str) -> float:
            matching = (
                each
                for name, each in (self.config.get(patterns) or {}).items()
                if re.fullmatch(rf"(.*\.)?({name})", layer)
            )
            return float(next(matching, self.config[key]))

        try:
            alpha, rank = stated("lora_alpha", "alpha_pattern"), stated("r", "rank_pattern")
            if not (alpha > 0 and rank > 0):
                raise ValueError("neither is 0 or less")
        except (KeyError, TypeError, ValueError, AttributeError, re.error) as error:
            raise UserError(
                f"{where}: {self.file.with_name(ADAPTER_CONFIG)} states no rank and alpha of {layer}."
            ) from error
        return alpha, rank


def adapted_layer(name: str) -> str:
    """The layer of a weight of adapters, by that weight's name."""
    return name.rpartition(".lora_")[0]


def read_adapter(
    where: str, config: LoraConfig, shapes: Mapping[str, tuple[int, ...]], unused: Set[str] = frozenset()
) -> dict[str, TensorInFile]:
    """As `saved_weights`. No tensor is read.

    where:  the table of the recipe, for errors.
    shapes: of the weights that the part's adapters have by `config`, whose `path` is the directory.
    unused: layers that are not computed, of which the directory may have adapters.
    Raises UserError unless the directory has these adapters, as `config` says.
    """
    saved, keys = _read_part(where, config)
    if None in keys and not config.of_whole:
        raise UserError(f"{where}.path: {saved.file} holds {keys[None]}, which is no weight of LoRA's adapters.")
    found = {name: key for name, key in keys.items() if name is not None and adapted_layer(name) not in unused}
    layers, wanted = ({adapted_layer(name) for name in each} for each in (found, shapes))
    if layers != wanted:
        which = min(layers ^ wanted)
        has = "has no adapter" if which in wanted else "has an adapter"
        raise UserError(f"{where}.targets: the directory {config.path} {has} of {which}; name the layers that it has.")
    for layer in sorted({adapted_layer(key.removeprefix(PREFIX)) for key in found.values()}):
        alpha, rank = saved.alpha_and_rank(f"{where}.path", layer)
        is_stabilized = saved.config.get("use_rslora")
        scale = alpha / (math.sqrt(rank) if is_stabilized else rank)
        if not math.isclose(scale, config.scale, rel_tol=1e-9):
            raise UserError(
                f"{where}: the adapter in {config.path} multiplies by {scale:g} (alpha = {alpha:g}, rank = {rank:g}"
                f"{', rank_stabilized' if is_stabilized else ''}), and this table says {config.scale:g}."
            )
    for name, shape in shapes.items():
        if name not in found or saved.shapes[found[name]] != shape:
            has = "is not" if name not in found else f"has the shape {list(saved.shapes[found[name]])}"
            raise UserError(
                f"{where}.rank: {name} {has} in {saved.file}, and {list(shape)} is its shape with rank = {config.rank}."
            )
    return _tensors(saved, found)


def saved_weights(where: str, config: LoraConfig) -> dict[str, TensorInFile]:
    """Name of each weight of a part's adapters in its HF model -> the tensor in the directory that they start from."""
    saved, keys = _read_part(where, config)
    return _tensors(saved, keys)


def _read_part(where: str, config: LoraConfig) -> tuple[SavedAdapter, dict[str | None, str]]:
    """The directory of a part's adapters, and name in the part's HF model -> name there; of what is not theirs None."""
    assert config.path is not None, "it is called for a directory"
    saved = SavedAdapter.read(f"{where}.path", config.path, ("modules_to_save",) if config.of_whole else ())
    return saved, {config.own_name(key): key for key in saved.shapes}


def _tensors(saved: SavedAdapter, keys: Mapping[Any, str]) -> dict[str, TensorInFile]:
    return {name: TensorInFile(saved.file, key) for name, key in keys.items() if name is not None}
