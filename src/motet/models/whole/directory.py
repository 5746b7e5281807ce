"""A directory that transformers' `from_pretrained` reads as one multimodal model, and the parts that Motet makes of it.

Weights have three names: that in a file, of whatever format; that in transformers' class, to which transformers' own
renamings lead; and that in an MLLM, which follows from the prefixes of the family's parts.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from types import MappingProxyType

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming, rename_source_key

from motet.core.errors import UserError
from motet.core.words import counted_words
from motet.core.workload import BACKBONE
from motet.models.build import EncoderConfig, ModelConfig
from motet.models.config_file import (
    ADAPTER_CONFIG,
    INNER,
    adapter_alone,
    check_class,
    one_line,
    parse_config,
    quiet_transformers,
    read_config_json,
)
from motet.models.load import check_files, is_quantised, quantised, weight_files
from motet.models.lora import LoraConfig
from motet.models.stored import TensorInFile, is_turned
from motet.models.whole.family import WholeFamily, WholeParts, check_option
from motet.models.whole.generic import generic_family
from motet.models.whole.registry import WHOLE
from motet.models.whole.saved_adapter import PROJECTOR, WholeSaved, part_of_place, with_saved

_POINTER = b"version https://git-lfs"
"""What a file of weights begins with that was cloned without them."""


class WholeDirectory:
    """The directory of a whole model.

    Example: `WholeDirectory(Path("weights/llava-1.5-7b-hf")).config({}, ())` is the model of which `build_mllm` makes
    an MLLM with its weights.
    """

    def __init__(self, path: Path, adapters: Mapping[str, Path] = MappingProxyType({})) -> None:
        """Reads config.json. Raises UserError for a directory that is not there, or of no family.

        adapters: key of the recipe -> a directory of peft, whose weights of projectors take the place of this one's.
        """
        self.path, self.file, self.adapters = path, path / "config.json", adapters
        if not self.file.is_file() and (path / ADAPTER_CONFIG).is_file():
            raise UserError(adapter_alone("model.path", path, "[model.lora]"))
        if not self.file.is_file():
            raise UserError(
                f"model.path: there is no {self.file}; give a local directory that transformers' from_pretrained reads "
                "(`hf download NAME --local-dir DIR` makes one of a model on the hub: nothing is downloaded here)."
            )
        stored = read_config_json(self.file)
        kind = stored.get("model_type")
        self.family: WholeFamily = WHOLE[kind] if kind in WHOLE else generic_family(path, kind, ", ".join(WHOLE))
        check_class(self.file, stored)
        self.hf_config: PreTrainedConfig = parse_config(self.file, CONFIG_MAPPING[kind], stored)
        self._inner = ""
        if kind in INNER:
            self.hf_config, self._inner = getattr(self.hf_config, f"{INNER[kind]}_config"), f"{INNER[kind]}."
        check_option(str(self.file), "quantization_config", stored.get("quantization_config"), None)
        check_files("model.path", path)
        self._saved: dict[Path, WholeSaved] = {}

    def saved_at(self, where: str, path: Path) -> WholeSaved:
        """A directory of peft, which is read once, whatever parts name it. where: the key of the recipe that does."""
        return self._saved.setdefault(path, WholeSaved(where, path, self))

    @cached_property
    def shapes(self) -> PreTrainedModel:
        """transformers' model without storage. Raises UserError for a config that it refuses."""
        try:
            with quiet_transformers(), torch.device("meta"):
                return self.family.model(self.hf_config)
        except Exception as error:
            raise UserError(
                f"{self.file}: no {self.family.model.__name__} can be made of it ({one_line(error)})."
            ) from error

    @cached_property
    def keys(self) -> dict[Path, dict[str, str]]:
        """File -> name in it -> name in transformers' class, for all weights of the directory, or of its inner model.

        Empty for a directory without files of weights, which can be planned. Raises UserError for weights that are
        missing, quantised, of another shape, or not part of the model.
        """
        if (files := self._files) is None:
            return {}
        names = self._names
        needed = dict(self.shapes.named_parameters())
        found: dict[Path, dict[str, str]] = {}
        for file in files:
            found[file] = {}
            for key, (kind, shape) in _stored_kinds(file).items():
                if not key.startswith(self._inner):
                    continue
                name = self.name_of(key.removeprefix(self._inner))
                if name not in names:
                    if name.endswith(("rotary_emb.inv_freq", "position_ids")):
                        continue  # Buffers that older versions stored.
                    raise UserError(
                        f"model.path: {file} holds {key}, which {self.family.model.__name__} has no place for; its "
                        "config.json does not describe it."
                    )
                if tuple(names[name].shape) != shape and not is_turned(self.shapes, name, shape):
                    raise UserError(
                        f"model.path: {key} in {file} has shape {list(shape)}, where the config asks for "
                        f"{list(names[name].shape)}."
                    )
                if name in needed and is_quantised(kind):
                    raise UserError(f"model.path: {quantised(key, file, kind)}")
                found[file][key] = name
        stored = {name for keys in found.values() for name in keys.values()}
        if absent := sorted(needed.keys() - stored):
            raise UserError(
                f"model.path: {self.path} lacks {counted_words(len(absent), 'weight')} of "
                f"{self.family.model.__name__}, {absent[0]} for one."
            )
        return found

    def check_weights(self) -> None:
        """Raises UserError for a directory without files of weights, which cannot be trained."""
        if self._files is None:
            raise UserError(
                f"model.path: {self.path} holds no model.safetensors, nor a file that an index of such files names; "
                "without weights a model can be planned, and not trained."
            )

    @cached_property
    def _files(self) -> list[Path] | None:
        files = weight_files(self.path)
        return files if files and any(file.is_file() for file in files) else None

    def name_of(self, key: str) -> str:
        """The name in transformers' class of a weight that has the name `key` in some format of it."""
        shapes = self.shapes
        return rename_source_key(key, self._renamings, [], shapes.base_model_prefix, self._names)[0]

    @cached_property
    def _renamings(self) -> list[WeightRenaming]:
        return [each for each in get_model_conversion_mapping(self.shapes) if isinstance(each, WeightRenaming)]

    @cached_property
    def _names(self) -> dict[str, Tensor]:
        return self.shapes.state_dict()

    def place_of(self, theirs: str) -> tuple[str, str]:
        """(part, name in the part's HF model) of a weight by its name in transformers' class.

        Of what is in projectors it is ("projector", name in an MLLM); of what is nowhere ("projector", "").
        """
        prefixes = [each for each in self.parts.names if theirs.startswith(each[1])]
        if not prefixes:
            return PROJECTOR, ""
        own, prefix = max(prefixes, key=lambda each: len(each[1]))
        return part_of_place(own + theirs.removeprefix(prefix))

    @cached_property
    def saved(self) -> dict[str, TensorInFile]:
        """Name in transformers' class -> tensor, of weights that `adapters` have whole. Raises UserError for two."""
        found: dict[str, TensorInFile] = {}
        for where, path in self.adapters.items():
            modules = self.saved_at(where, path).modules
            if twice := [name for name in modules if name in found and found[name] != modules[name]]:
                raise UserError(f"{where}: {path} holds {twice[0]}, and so does {found[twice[0]].file.parent}.")
            found |= modules
        return found

    def tensors_at(self, names: Mapping[str, str]) -> dict[str, TensorInFile]:
        """Own name -> stored tensor, of which only the names are right where the directory has no weights.

        names: own ones, and those in transformers' class.
        """
        stored = {name: TensorInFile(file, key) for file, keys in self.keys.items() for key, name in keys.items()}
        if self._files is None:
            stored = {name: TensorInFile(self.path / "model.safetensors", name) for name in names.values()}
        stored |= self.saved
        return {own: stored[theirs] for own, theirs in names.items()}

    @cached_property
    def parts(self) -> WholeParts:
        """The model's parts. Raises UserError for options that Motet does not compute."""
        return self.family.parts(self.hf_config, self)

    @property
    def trainable(self) -> tuple[str, ...]:
        """The names of parts in `model.train`."""
        has_projector = any(".projector." in own for own, _ in self.parts.names)
        return (*self.parts.encoders, *([PROJECTOR] if has_projector else []), BACKBONE)

    def config(
        self,
        train: Mapping[str, bool],
        freeze: tuple[str, ...],
        lora: Mapping[str, LoraConfig] | Path = MappingProxyType({}),
    ) -> ModelConfig:
        """The model as its parts. train: by part, whether it learns; freeze, lora: as of `ModelConfig`.

        lora: or a directory of peft, which says what there is, and what learns unless `train` says it.

        Raises UserError for a part that is not there, for adapters of one that does not learn, and as `parts` does.
        """
        if unknown := sorted(train.keys() - set(self.trainable)):
            raise UserError(
                f"model.train.{unknown[0]} has no effect: {self.path} has no such part; it has "
                f"{', '.join(self.trainable)}."
            )
        adapters: dict[str, LoraConfig] = {}
        if isinstance(lora, Path):
            saved = self.saved_at("model.lora.path", lora)
            adapters |= saved.own_configs()
            train = saved.learns(train, self.trainable)
        else:
            self._check_parts(lora)
            adapters |= with_saved(self, lora)
        for name in adapters:
            if not train.get(name, True):
                key = "path" if isinstance(lora, Path) else name
                raise UserError(
                    f"model.lora.{key} gives adapters to a part that does not learn; remove model.train.{name} = "
                    "false: the own weights of a part with adapters are frozen in any case."
                )

        def encoder(name: str, part: EncoderConfig) -> EncoderConfig:
            learns = {"train_encoder": train.get(name, True), "train_projector": train.get(PROJECTOR, True)}
            return part.model_copy(update=learns)

        return ModelConfig(
            backbone=self.parts.backbone.model_copy(update={"train": train.get(BACKBONE, True)}),
            encoders={name: encoder(name, part) for name, part in self.parts.encoders.items()},
            lora=adapters,
            freeze=freeze,
        )

    def _check_parts(self, lora: Mapping[str, LoraConfig]) -> None:
        adapted = [name for name in self.trainable if name != PROJECTOR]
        for name in lora:
            if name not in adapted:
                raise UserError(
                    f"model.lora.{name} has no effect: no such part of {self.path} can have adapters; those are "
                    f"{', '.join(adapted)}."
                )


def _stored_kinds(file: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """The type, as safetensors names it, and the shape of each tensor of a file. Raises UserError for a damaged one."""
    if file.is_file():
        with file.open("rb") as raw:
            if raw.read(len(_POINTER)) == _POINTER:
                raise UserError(f"model.path: {file} is a pointer of Git LFS; fetch the weights by `git lfs pull`.")
    try:
        with safe_open(file, framework="pt") as opened:
            slices = {key: opened.get_slice(key) for key in opened.keys()}  # noqa: SIM118
            return {key: (each.get_dtype(), tuple(each.get_shape())) for key, each in slices.items()}
    except (OSError, SafetensorError) as error:
        raise UserError(f"model.path: weights in {file} cannot be read ({one_line(error)}).") from error
