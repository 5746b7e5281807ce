"""LoRA adapters of a whole model that start from a directory of peft: which part has which of them, and what learns.

peft names layers as transformers' class does, in one directory for all parts; modules that are saved whole beside the
adapters (`modules_to_save`) may be projectors here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from torch import nn

from motet.core.errors import UserError
from motet.core.workload import BACKBONE
from motet.models.lora import LoraConfig
from motet.models.lora_read import PREFIX, SavedAdapter, adapted_layer
from motet.models.named_weights import is_lora
from motet.models.stored import TensorInFile

if TYPE_CHECKING:
    from motet.models.whole.directory import WholeDirectory

PROJECTOR = "projector"
"""What holds the projectors in `model.train`."""
_IN_BLOCK = re.compile(r"\.\d+\.")


class WholeLora(LoraConfig):
    """Adapters of a part that start from a directory of the whole model.

    keys: name there -> name in the part's HF model, of the weights of the part's adapters.
    """

    of_whole: ClassVar[bool] = True
    keys: dict[str, str]

    def own_name(self, key: str) -> str | None:
        return self.keys.get(key)


@dataclass(frozen=True)
class WholeSaved:
    """A directory of peft beside a whole model. where: the key of the recipe that names it."""

    where: str
    path: Path
    directory: WholeDirectory

    @cached_property
    def adapter(self) -> SavedAdapter:
        """What is stored. Raises UserError as `SavedAdapter.read`."""
        return SavedAdapter.read(self.where, self.path, ("modules_to_save",))

    @cached_property
    def modules(self) -> dict[str, TensorInFile]:
        """Name in transformers' class -> tensor, of weights that are saved whole.

        Raises UserError for one that the class has not, or has in another shape.
        """
        found, known = {}, self.directory.shapes.state_dict()
        for key, shape in self.adapter.shapes.items():
            if is_lora(key) or ".base_layer." in key:
                continue  # peft saves embeddings beside adapters of them, which `parts` refuses.
            name = self.directory.name_of(key.removeprefix(PREFIX))
            if not key.startswith(PREFIX) or name not in known:
                raise UserError(
                    f"{self.where}: {self.adapter.file} holds {key}, which {self._kind} has no place for; it is an "
                    "adapter of another model."
                )
            if tuple(known[name].shape) != shape:
                raise UserError(
                    f"{self.where}: {key} in {self.adapter.file} has shape {list(shape)}, where {self._kind} has "
                    f"{list(known[name].shape)}."
                )
            found[name] = TensorInFile(self.adapter.file, key)
        return found

    @cached_property
    def parts(self) -> dict[str, dict[str, str]]:
        """Part -> name in the file -> name in the part's HF model, of the weights of all adapters.

        Raises UserError for adapters of what is no linear layer of a part's blocks, and for modules that are saved
        whole and are no projector.
        """
        found: dict[str, dict[str, str]] = {}
        for key in filter(is_lora, self.adapter.shapes):
            layer = adapted_layer(key.removeprefix(PREFIX))
            weight = self.directory.name_of(f"{layer}.weight")
            name, (part, own) = weight.removesuffix(".weight"), self.directory.place_of(weight)
            if not key.startswith(PREFIX) or not own or not _is_linear(self.directory.shapes, name):
                raise UserError(
                    f"{self.where}: {self.path} has an adapter of {layer}, which is no linear layer of {self._kind}; "
                    "it is an adapter of another model, or of another kind."
                )
            # Of an encoder that Motet does not know it is not known which layers are of blocks.
            adapts_all = part != BACKBONE and bool(self.directory.parts.forms)
            if part == PROJECTOR or not (adapts_all or _IN_BLOCK.search(name)):
                raise UserError(
                    f"{self.where}: {self.path} has an adapter of {layer}, and adapters are those of linear layers in "
                    "the blocks of encoders and the backbone; train one without it."
                )
            found.setdefault(part, {})[key] = own.removesuffix(".weight") + key.removeprefix(PREFIX + layer)
        for name, tensor in self.modules.items():
            if self.directory.place_of(name)[0] != PROJECTOR:
                raise UserError(
                    f"{self.where}: {self.adapter.file} holds {tensor.key} whole (modules_to_save), which only "
                    "projectors may be; merge it into the directory of model.path with peft."
                )
        return found

    @property
    def _kind(self) -> str:
        return type(self.directory.shapes).__name__

    def own_configs(self) -> dict[str, WholeLora]:
        """Part -> its adapters, as the directory says it. Raises UserError for parts with several ranks or scales."""
        return {part: self._config(part, keys) for part, keys in self.parts.items()}

    def _config(self, part: str, keys: Mapping[str, str]) -> WholeLora:
        layers = {adapted_layer(key): adapted_layer(own) for key, own in keys.items()}
        stated: dict[tuple[float, float], str] = {}
        for layer in sorted(layers):
            theirs = layer.removeprefix(PREFIX)
            alpha, rank = self.adapter.alpha_and_rank(self.where, theirs)
            stated.setdefault((alpha, rank), layers[layer])
            shapes = {end: self.adapter.shapes.get(f"{layer}.lora_{end}.weight") for end in "AB"}
            self._check_shapes(theirs, rank, shapes)
        if len(stated) > 1:
            (first, one), (second, other), *_ = ((pair, layer) for pair, layer in stated.items())
            raise UserError(
                f"{self.where}: the adapters of {part} in {self.path} have several ranks or alphas ({one} has rank "
                f"{first[1]:g} and alpha {first[0]:g}, {other} has {second[1]:g} and {second[0]:g}), and a part of "
                "Motet has one."
            )
        [(alpha, rank)] = stated
        config = self.adapter.config
        try:
            return WholeLora(
                rank=int(rank),
                alpha=alpha,
                targets=tuple(sorted(layers.values())),
                dropout=config.get("lora_dropout", 0.0),
                rank_stabilized=bool(config.get("use_rslora")),
                path=self.path,
                keys=dict(keys),
            )
        except ValueError as error:
            raise UserError(
                f"{self.where}: {self.path} has rank {rank:g}, alpha {alpha:g} or dropout "
                f"{config.get('lora_dropout')!r}, which no adapter can have."
            ) from error

    def _check_shapes(self, layer: str, rank: float, shapes: Mapping[str, tuple[int, ...] | None]) -> None:
        """Raise UserError unless A and B fit their layer and its rank."""
        linear = self.directory.shapes.get_submodule(self.directory.name_of(f"{layer}.weight").removesuffix(".weight"))
        rows, columns = linear.weight.shape  # type: ignore[misc, union-attr]
        for end, wanted in {"A": (rank, columns), "B": (rows, rank)}.items():
            if shapes[end] != wanted:
                has = f"is {list(shapes[end] or ())}" if shapes[end] else "is not there"
                raise UserError(
                    f"{self.where}: lora_{end} of {layer} {has} in {self.adapter.file}, and beside {self._kind} with "
                    f"rank {rank:g} it has the shape {[int(each) for each in wanted]}."
                )

    def learns(self, train: Mapping[str, bool], trainable: Iterable[str]) -> dict[str, bool]:
        """`model.train` with what it does not say as peft has it: adapters learn, and modules that are saved whole.

        trainable: the names of parts. Raises UserError if some weights of the projectors are saved, and not all.
        """
        chosen = {part: train.get(part, part in self.parts) for part in trainable}
        if PROJECTOR not in chosen or PROJECTOR in train:
            return chosen
        names = dict(self.directory.shapes.named_parameters())
        own = [name for name in names if self.directory.place_of(name)[0] == PROJECTOR]
        missing = [name for name in own if name not in self.modules]
        if self.modules and missing:
            raise UserError(
                f"{self.where}: {self.path} has some weights of the projector, and not {missing[0]}; say whether all "
                "of it learns: model.train.projector = true, or false."
            )
        return chosen | {PROJECTOR: bool(self.modules)}


def with_saved(directory: WholeDirectory, lora: Mapping[str, LoraConfig]) -> dict[str, LoraConfig]:
    """Tables of parts, those with a `path` with what lies there of them.

    Raises UserError for a directory with adapters of a part whose table does not name it.
    """
    found = dict(lora)
    for name, config in lora.items():
        if config.path is None:
            continue
        where = f"model.lora.{name}.path"
        saved = directory.saved_at(where, config.path)
        for part in saved.parts:
            if part not in lora or lora[part].path != config.path:
                raise UserError(
                    f"{where}: {config.path} has adapters of {part}, too; name it in [model.lora.{part}] as well, or "
                    f'take all that it has: [model.lora] path = "{config.path}".'
                )
        keys = saved.parts.get(name, {})
        found[name] = WholeLora.model_validate(config.model_dump(exclude_unset=True) | {"keys": keys})
    return found


def _is_linear(model: nn.Module, name: str) -> bool:
    try:
        return type(model.get_submodule(name)) is nn.Linear
    except AttributeError:
        return False


def part_of_place(own: str) -> tuple[str, str]:
    """(part, name in the part's HF model) of a weight or layer by its name in an MLLM; of projectors ("projector", it).

    Example:
        >>> part_of_place("encoders.image.encoder.model.layers.0.mlp.fc1"), part_of_place("encoders.image.projector.0")
        (('image', 'layers.0.mlp.fc1'), ('projector', 'encoders.image.projector.0'))
    """
    if own.startswith(f"{BACKBONE}.causal_lm."):
        return BACKBONE, own.removeprefix(f"{BACKBONE}.causal_lm.")
    if found := re.fullmatch(r"encoders\.(\w+)\.encoder\.model\.(.+)", own):
        return found[1], found[2]
    return PROJECTOR, own
