"""A recipe: the whole of a training job as one validated TOML file.

There are three kinds. One has `[data]`: files. Another has `[workload]`: a mixture of tasks (`core/sampler.py`), from
which examples are drawn for a model of shapes (`drawn.py`). The third has `model.path`: a model that brings its own
processor and tokenizer (`whole.py`).

Each table is the Config class of a component, defined beside that component. This file puts them together, and refuses
what does not go together; `recipe_file.py` reads the TOML.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    TypeAdapter,
    ValidationInfo,
    field_validator,
    model_validator,
)

from motet.core.errors import UserError
from motet.core.modalities import AUDIO, IMAGE, VIDEO, own_modality
from motet.core.module_degrees import ModuleDegrees
from motet.core.workload import BACKBONE
from motet.cost.catalogue import ClusterConfig
from motet.cost.memory import PRECISION_OF_DTYPE
from motet.data.audio import AudioTransform
from motet.data.config import DataConfig
from motet.data.drawn import DrawnVocabulary
from motet.data.images import ImageTransform
from motet.data.own_items import OwnTransform
from motet.data.record_fields import taken_fields
from motet.data.text import ChatTokenizer
from motet.data.transforms import Transform
from motet.dispatch import BalanceConfig
from motet.dispatch.context import ContextConfig
from motet.models.build import ModelConfig
from motet.models.diffusers_directory import check_diffusers
from motet.models.generator_build import stored_vae
from motet.runtime.fsdp import FSDPConfig
from motet.train.checkpoint.saving import CheckpointConfig
from motet.train.evaluate import EvaluateConfig
from motet.train.export import ExportConfig
from motet.train.input.latents import LatentTransform
from motet.train.optimizer import OptimizerConfig
from motet.train.recipe.run_config import RunConfig

_OWN_NAME = re.compile(r"[a-z][a-z0-9_]*")


def _tables(kind: type) -> TypeAdapter[dict[str, ImageTransform | AudioTransform]]:
    """Tables by name, each read as a transform of one kind, which errors name."""
    kinds = (
        Annotated[ImageTransform, Tag(ImageTransform.__name__)]
        | Annotated[AudioTransform, Tag(AudioTransform.__name__)]
    )
    return TypeAdapter(dict[str, Annotated[kinds, Discriminator(lambda _: kind.__name__)]])


class ModalityConfig(BaseModel):
    """`[modalities.NAME]`: a modality of the user's own.

    file: a Python file with ROW_DIM, read_header(file) and load(file), and perhaps SUFFIXES (`core/modalities.py`).
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    file: Path


_TABLES = {kind.modality: _tables(kind) for kind in (ImageTransform, AudioTransform)}
_LEAST = {
    ImageTransform.modality: "patch_size at least, and the mean and std that preprocessor_config.json beside it has",
    AudioTransform.modality: "an empty one is Whisper's, 80 mel bands at 16 kHz",
}
"""Modality -> the least that its table says."""


class Recipe(BaseModel):
    """A training job.

    Example:
        >>> recipe = Recipe.model_validate({
        ...     "run": {"dir": "runs/demo", "steps": 100, "batch_size": 32},
        ...     "model": {"backbone": {"family": "qwen2", "path": "weights/Qwen2-0.5B"}},
        ...     "data": {"train": ["train.jsonl"], "tokenizer": "weights/Qwen2-0.5B"},
        ...     "optimizer": {"lr": 1e-4}})
        >>> recipe.run.microbatches, recipe.exchanges_items, recipe.optimizer.schedule
        (1, False, 'cosine')
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    run: RunConfig
    modalities: dict[str, ModalityConfig] = Field(
        default_factory=dict,
        description="modalities of your own, by name; <NAME> stands for an item, and records name files in NAME",
    )
    model: ModelConfig
    data: DataConfig
    transforms: dict[str, ImageTransform | AudioTransform] = Field(
        default_factory=dict,
        description="by encoder, how files become its rows; an encoder without a table takes that of what it reads",
    )
    balance: BalanceConfig = BalanceConfig()
    fsdp: FSDPConfig = FSDPConfig()
    context: ContextConfig = ContextConfig()
    optimizer: OptimizerConfig
    checkpoint: CheckpointConfig = CheckpointConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    export: ExportConfig = ExportConfig()
    cluster: ClusterConfig | None = Field(
        None, description="what `motet plan` and `motet simulate` predict for; training takes what it is given"
    )
    parallel: dict[str, ModuleDegrees] = Field(
        default_factory=dict,
        description="degrees of parallelism of single modules: `motet plan` keeps to them, and plans what is not said",
    )

    @field_validator("modalities")
    @classmethod
    def _are_known(cls, tables: dict[str, ModalityConfig]) -> dict[str, ModalityConfig]:
        """Let this process know them: what follows in a recipe names them."""
        for name, table in tables.items():
            others = [IMAGE, AUDIO, VIDEO, *(other for other in tables if other != name)]
            is_taken = {name, f"{name}s"} & {*taken_fields(), *others, *(f"{other}s" for other in others)}
            if name == BACKBONE or is_taken or not _OWN_NAME.fullmatch(name):
                raise ValueError(
                    f"{name!r} cannot name a modality: take lower-case letters, digits and _, and no name that fields "
                    "of records, another modality or a part of the model have already"
                )
            try:
                own_modality(name, table.file)
            except UserError as error:
                raise ValueError(str(error)) from error
        return tables

    @field_validator("transforms", mode="before")
    @classmethod
    def _of_what_is_read(cls, tables: Any, info: ValidationInfo) -> Any:
        """Read each table as what its encoder takes. A table named after a kind of media is of that kind."""
        model = info.data.get("model")
        if model is None or not isinstance(tables, dict):
            return {} if model is None else tables
        if not isinstance(model, ModelConfig):
            return tables  # Refused by `DrawnRecipe` and `WholeRecipe`.
        read: dict[str, Any] = {}
        for name, table in tables.items():
            modality = model.modality(name) if name in model.encoders or name in model.generators else name
            if modality in info.data.get("modalities", {}):
                raise ValueError(
                    f"transforms.{name} has no effect, as the file of modalities.{modality} says what files become"
                )
            if modality not in _TABLES:
                for part, verb in (("encoders", "reads"), ("generators", "makes")):
                    if name in getattr(model, part):
                        raise ValueError(_unsaid(part, name, verb, info.data.get("modalities", {})))
                raise ValueError(f"transforms.{name} has no effect, as there is no model.encoders.{name}")
            if info.mode == "json":
                read |= _TABLES[modality].validate_json(json.dumps({name: table}), strict=True)
            else:
                read |= _TABLES[modality].validate_python({name: table})
        return read

    @model_validator(mode="after")
    def _splits_are_exchanged(self) -> Recipe:
        if self.data.is_split and self.fsdp.recompute == "auto":
            raise ValueError(
                'fsdp.recompute = "auto" takes the lengths of all examples, which no rank knows with {rank} in '
                "data.train; state numbers of blocks"
            )
        if self.data.is_split and self.balance.defer == "auto" and "defer" in self.balance.model_fields_set:
            raise ValueError(
                'balance.defer = "auto" takes the lengths of all examples of a step, which no rank knows with {rank} '
                "in data.train; remove defer"
            )
        if self.data.is_split and not self.exchanges_items:
            raise ValueError(
                f'balance.mode = "{self.balance.mode}" takes examples that every rank can read, and with {{rank}} in '
                'data.train each rank reads its own; set balance.mode = "exchange"'
            )
        return self

    @model_validator(mode="after")
    def _cuts_fit(self) -> Recipe:
        for is_there, why in (
            (self.data.is_split, "takes examples that every rank can read, and with {rank} in data.train none is"),
            (self.run.compile, "shares rows of a block among ranks, which run.compile does not know; remove one"),
            (
                self.fsdp.recompute == "auto",
                'takes the same recomputation on all ranks, as they meet in attention, and fsdp.recompute = "auto" is '
                "of each rank alone; state numbers of blocks",
            ),
        ):
            if self.balance.cut_by and is_there:
                raise ValueError(f"balance.{self.balance.cut_by} {why}")
        return self

    @model_validator(mode="after")
    def _parts_fit(self) -> Recipe:
        for name in self.modalities:
            if name not in self.model.readers:
                raise ValueError(f"modalities.{name} has no effect, as there is no model.encoders.{name}; remove it")
        kinds = {"encoders": ("reads", self.model.encoders), "generators": ("makes", self.model.generators)}
        for table, verb, name in ((table, verb, name) for table, (verb, of) in kinds.items() for name in of):
            modality = self.model.modality(name)
            if modality in self.modalities and table == "encoders":
                continue
            if modality not in _TABLES:
                raise ValueError(_unsaid(table, name, verb, self.modalities))
            if self._transform_of_files(name) is None:
                other = "" if modality == name else f", or [transforms.{modality}] for all that read {modality}"
                raise ValueError(
                    f"model.{table}.{name} needs a table [transforms.{name}] that says what it is given{other}: "
                    f"{_LEAST[modality]}"
                )
        for name in self.transforms:
            readers = [*self.model.readers.get(name, ())]
            readers += [each for each in self.model.generators if self.model.modality(each) == name]
            is_module = name in self.model.encoders or name in self.model.generators
            if not is_module and all(reader in self.transforms for reader in readers):
                raise ValueError(
                    f"transforms.{name} has no effect, as "
                    + (f"all that read {name} have their own" if readers else f"there is no model.encoders.{name}")
                )
        return self

    @model_validator(mode="after")
    def _recomputes_as_counted(self) -> Recipe:
        if self.fsdp.recompute == "auto" and (why := self.why_uncounted):
            raise ValueError(f'fsdp.recompute = "auto" goes by bytes, and {why.removesuffix(".")}')
        return self

    @model_validator(mode="after")
    def _has_workers(self) -> Recipe:
        for name in self._encoded_by_workers if self.data.num_workers == 0 else ():
            raise ValueError(
                f'model.generators.{name}.vae.encode_in = "workers" takes workers, and data.num_workers is 0; raise it'
            )
        return self

    @model_validator(mode="after")
    def _evaluates_something(self) -> Recipe:
        # Held-out data that are stated as [] are evaluation turned off.
        is_stated = "heldout" in self.data.model_fields_set
        if "evaluate" in self.model_fields_set and not (self.is_drawn or is_stated):
            raise ValueError(
                "[evaluate] has no effect without data.heldout; name held-out manifests, or remove [evaluate]"
            )
        for name, generator in getattr(self.model, "generators", {}).items():
            if "sampling" in generator.model_fields_set and not (self.is_drawn or is_stated):
                raise ValueError(
                    f"model.generators.{name}.sampling has no effect without data.heldout, of whose prompts items are "
                    "made; name held-out manifests, or remove sampling"
                )
        is_default = self.evaluate.num_made == EvaluateConfig.model_fields["num_made"].default
        if not is_default and not getattr(self.model, "generators", None):
            raise ValueError(
                f"evaluate.num_made = {self.evaluate.num_made} has no effect without [model.generators]; remove it"
            )
        return self

    @model_validator(mode="after")
    def _adapters_are_there(self) -> Recipe:
        if self.export.adapter != "saved" and not getattr(self.model, "lora", None):
            raise ValueError(f"export.adapter = {self.export.adapter!r} has no effect without [model.lora]; remove it")
        return self

    @model_validator(mode="after")
    def _epochs_have_a_length(self) -> Recipe:
        for is_there, why in ((self.is_drawn, "with [workload] examples are drawn, without an end"),):
            if self.run.epochs is not None and is_there:
                raise ValueError(f"run.epochs = {self.run.epochs:g} has no meaning, as {why}; give run.steps")
        return self

    @model_validator(mode="after")
    def _groups_fit(self) -> Recipe:
        if self.data.group is None:
            return self
        if why := self.why_no_groups("data.group"):
            raise ValueError(why)
        if self.run.microbatches != 1:
            raise ValueError(
                f"run.microbatches = {self.run.microbatches} has no effect with data.group: a microbatch of a rank is "
                "a group, so there are run.batch_size / ranks of them; remove run.microbatches"
            )
        if self.balance.policy != "auto":
            raise ValueError(
                "data.group keeps a rank's microbatch below caps by what it computes, and balance.policy weighs "
                "something else; remove one of them"
            )
        return self

    @model_validator(mode="after")
    def _parallel_has_modules(self) -> Recipe:
        modules = [*self.model.encoders, *getattr(self.model, "generators", {}), BACKBONE]
        for name in self.parallel:
            if name not in modules:
                raise ValueError(
                    f"parallel.{name} has no effect, as the model has no such module; it has {', '.join(modules)}"
                )
        return self

    def microbatches_on(self, num_ranks: int) -> int:
        """The microbatches of a step: run.microbatches, or with data.group the groups that a rank takes.

        Raises UserError for groups that the ranks cannot share evenly.
        """
        if self.data.group is None:
            return self.run.microbatches
        count, left = divmod(self.run.batch_size, num_ranks)
        if left:
            raise UserError(
                f"run.batch_size = {self.run.batch_size} is a number of groups with data.group, and each of the "
                f"{num_ranks} ranks takes as many: it must be a multiple of {num_ranks}."
            )
        return count

    def transform(self, encoder: str) -> Transform | None:
        """The transform from files to the rows of an encoder, or of a generator; None if the recipe has none."""
        transform = self._transform_of_files(encoder)
        if transform is None or encoder not in self._encoded_by_workers:
            return transform
        check_diffusers(f"model.generators.{encoder}.vae")
        vae = stored_vae(f"model.generators.{encoder}", self.model.generators[encoder])
        return None if vae is None else LatentTransform(transform, vae, getattr(torch, self.run.dtype))

    def _transform_of_files(self, encoder: str) -> Transform | None:
        if own := self.modalities.get(self.model.modality(encoder)):
            return OwnTransform(own_modality(self.model.modality(encoder), own.file))
        return self.transforms.get(self.table_of(encoder))

    @property
    def _encoded_by_workers(self) -> list[str]:
        """The generators whose VAE runs in the workers that decode."""
        generators = getattr(self.model, "generators", {}).items()
        vaes = {name: getattr(generator, "vae", None) for name, generator in generators}
        return [name for name, vae in vaes.items() if vae and vae.encode_in == "workers"]

    def table_of(self, encoder: str) -> str:
        """The name of the table in `[transforms]` that is an encoder's: its own, or that of what it reads."""
        return encoder if encoder in self.transforms else self.model.modality(encoder)

    def why_no_groups(self, asked: str) -> str:
        """What there is beside groups of the examples of an epoch that they leave no room for, and why; "" if nothing.

        asked: what asks for groups, `data.group` or caps of a Plan.
        """
        for is_there, what in (
            (self.exchanges_items, 'balance.mode = "exchange", whose lengths are not known before items are loaded'),
            (bool(self.data.weights), "data.mixture, in which each manifest has its own epochs"),
            (not self.data.shuffle, "data.shuffle = false, as groups take examples at random"),
            (bool(self.balance.cut_by), f"balance.{self.balance.cut_by}, which gives a sequence to several ranks"),
        ):
            if is_there:
                return f"{asked} beside {what}; remove one of them"
        return ""

    @property
    def plan_precision(self) -> str:
        """What modules compute in, by its name in Plans."""
        return PRECISION_OF_DTYPE[self.fsdp.param_dtype or self.run.dtype]

    @property
    def why_uncounted(self) -> str:
        """Why the memory model would count too few bytes, as a sentence; "" if it does not."""
        if self.run.dtype != "float64" or self.plan_precision == "fp64":
            return ""
        # A Plan's precision says what is computed in; from it follows what is stored.
        return (
            f'run.dtype = "float64" beside fsdp.param_dtype = "{self.fsdp.param_dtype}" is not counted: the memory '
            "model has float32 weights and moments beside narrower products, half of what ranks would hold, or less; "
            'set run.dtype = "float32", or leave fsdp.param_dtype out.'
        )

    @property
    def is_drawn(self) -> bool:
        """Whether its examples are drawn, and its model is made of shapes."""
        return False

    @property
    def modules(self) -> ModelConfig:
        """The model to build."""
        return self.model

    def check_weights(self) -> None:
        """Raise UserError for a whole model without weights, which can only be planned. Parts are read when built."""

    def vocabulary(self) -> ChatTokenizer | DrawnVocabulary:
        """What makes tokens, read from its directory. Raises UserError."""
        return ChatTokenizer.from_directory(self.data.tokenizer)

    @property
    def exchanges_items(self) -> bool:
        """Whether items are loaded by their home ranks and then sent. Not with "auto": every dataset has an index."""
        return self.balance.mode == "exchange"


def _unsaid(table: str, name: str, verb: str, modalities: Iterable[str]) -> str:
    """What is said of an encoder or a generator whose kind of media nothing tells. verb: "reads" or "makes"."""
    kinds = " or ".join(json.dumps(each) for each in (*_TABLES, *modalities))
    return f"model.{table}.{name} does not say what it {verb}, and is not named after it: give it {verb} = {kinds}"
