"""A recipe: the whole of a training job as one validated TOML file.

There are three kinds. One has `[data]`: files. Another has `[workload]`: a mixture of tasks (`core/sampler.py`), from
which examples are drawn for a model of shapes (`core/shape_tables.py`). The third has `model.path`: a model that brings
its own processor and tokenizer (`train/recipe/whole.py`).

Each table is the Config class of a component, defined beside that component. This file puts them together, reads the
TOML and the `--set` overrides, and makes paths absolute. Relative paths start at the recipe's folder, also in `--set`,
so that a recipe means the same from any working directory.
"""

from __future__ import annotations

import difflib
import json
import math
import os
import re
from collections.abc import Collection, Sequence
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    TypeAdapter,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from motet.core.errors import UserError
from motet.core.limits import MAX_EXAMPLES, MAX_SEED, MAX_STEPS, MAX_WAIT_S
from motet.core.modalities import AUDIO, IMAGE, VIDEO, own_modality
from motet.core.module_degrees import ModuleDegrees
from motet.core.own_file import NAMED_IN_FILE
from motet.core.sampler import Sampler
from motet.core.shape_tables import ModelShapes
from motet.core.text_files import KeyPath
from motet.core.words import counted_words
from motet.core.workload import BACKBONE, Workload
from motet.cost.catalogue import ClusterConfig
from motet.cost.memory import PRECISION_OF_DTYPE
from motet.data.audio import AudioTransform
from motet.data.config import DataConfig, DrawnDataConfig
from motet.data.drawn import DrawnTransform, DrawnVocabulary
from motet.data.images import ImageTransform
from motet.data.order import EpochOrder
from motet.data.own_items import OwnTransform
from motet.data.record_fields import taken_fields
from motet.data.remote import LOCAL_URL, is_url
from motet.data.text import ChatTokenizer
from motet.data.transforms import Transform
from motet.dispatch import BalanceConfig
from motet.dispatch.context import ContextConfig
from motet.models.build import ModelConfig
from motet.models.diffusers_directory import check_diffusers
from motet.models.generator_build import stored_vae
from motet.models.shaped_config import config_of_shapes
from motet.runtime.fsdp import FSDPConfig
from motet.train.checkpoint.remote import is_stored
from motet.train.checkpoint.saving import CheckpointConfig
from motet.train.evaluate import EvaluateConfig
from motet.train.export import ExportConfig
from motet.train.input.latents import LatentTransform
from motet.train.optimizer import OptimizerConfig
from motet.train.recipe.drawn_items import unfit_items
from motet.train.recipe.errors import place_of, recipe_error
from motet.train.recipe.phases import TrainingPhase, key_in_phase
from motet.train.recipe.reading import read_recipe
from motet.train.recipe.toml_text import dump_toml

_DRAWN_LR = 1e-4
"""The peak learning rate of a recipe whose examples are drawn, if it says none."""
Service = Literal["tensorboard", "wandb", "trackio"]
_DTYPE_OF = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
_OWN_NAME = re.compile(r"[a-z][a-z0-9_]*")
_VARIABLE = re.compile(r"\$(\w+|\{\w+\})")
"""A variable of the shell in a path."""
_PRECISION = {"param_dtype", "reduce_dtype", "loss_scale", "loss_scale_steps"}


class RunConfig(BaseModel):
    """`[run]` of a recipe: folder, length, seed and device."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    dir: Path = Field(description="folder for metrics, checkpoints and the report")
    steps: int | None = Field(
        None, gt=0, le=MAX_STEPS, description="optimizer steps of the whole run; it, or epochs, must be given"
    )
    epochs: float | None = Field(
        None,
        gt=0,
        le=MAX_STEPS,
        description="in place of steps: how often the run takes each example of data.train, with data.mixture at "
        "least; 0.5 takes half of them",
    )
    batch_size: int = Field(
        gt=0,
        le=MAX_EXAMPLES,
        description="examples of a step, over all ranks and microbatches; with data.group, groups of examples",
    )
    microbatches: int = Field(
        1,
        gt=0,
        le=MAX_EXAMPLES,
        description="parts of a batch whose gradients are accumulated; data.group sets it to the groups of a rank",
    )
    seed: int = Field(0, ge=0, le=MAX_SEED, description="of weights and dropout; data.seed orders the examples")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: GPUs if there are any")
    dtype: Literal["float32", "float64"] = Field("float32", description="of parameters and optimizer state")
    plan: Path | None = Field(None, description="a plan of `motet plan` to train under; --plan outweighs it")
    start: str | None = Field(
        None,
        min_length=1,
        description="a checkpoint whose weights the run begins with, a folder or a URL, or the folder of a run, which "
        "stands for the checkpoint of its last step; its optimizer and its position are not taken",
    )
    phase: tuple[TrainingPhase, ...] = Field(
        (), description="training phases, one after the other: [[run.phase]]; run.steps is theirs then"
    )
    on_bad_step: Literal["stop", "skip"] = Field(
        "stop", description="what is done about a step whose loss or gradient is not finite; it changes no weight"
    )
    report_to: tuple[Service, ...] = Field(
        ("tensorboard",), description="what scalars are reported to beside metrics.jsonl: one, or a list; [] is nothing"
    )
    compile: bool = Field(
        False,
        description="compile each block by torch.compile, for all lengths at once; without dropout, experts and "
        "generators, and under plans without tp, cp and zero-bubble schedules",
    )
    profile_steps: tuple[int, ...] = Field(
        (), description="steps, from 1, of which each rank writes a trace of torch's profiler to run.dir/profile"
    )
    wait_limit_s: float = Field(
        600.0,
        gt=0,
        le=MAX_WAIT_S,
        description="how long a rank waits for another that is alive; one whose process is gone ends the run at once",
    )

    @field_validator("report_to", mode="before", json_schema_input_type=Service | tuple[Service, ...])
    @classmethod
    def _one_or_several(cls, given: Any) -> Any:
        return (given,) if isinstance(given, str) else tuple(given) if isinstance(given, list) else given

    @model_validator(mode="after")
    def _whole_microbatches(self) -> RunConfig:
        if self.batch_size % self.microbatches:
            raise ValueError(f"microbatches = {self.microbatches} must divide batch_size = {self.batch_size}")
        return self

    @field_validator("profile_steps", mode="before", json_schema_input_type=int | tuple[int, ...])
    @classmethod
    def _one_step_or_several(cls, given: Any) -> Any:
        return (given,) if isinstance(given, int) else tuple(given) if isinstance(given, list) else given

    @model_validator(mode="after")
    def _has_an_end(self) -> RunConfig:
        if self.steps is None and self.epochs is None:
            raise ValueError("it has neither steps nor epochs; give steps, the optimizer steps of the whole run")
        if self.steps is not None and self.epochs is not None:
            raise ValueError(f"steps = {self.steps} and epochs = {self.epochs:g} both say how long it runs; remove one")
        return self

    @model_validator(mode="after")
    def _profiles_what_runs(self) -> RunConfig:
        if why := self._never_profiled():
            raise ValueError(why)
        return self

    @property
    def num_steps(self) -> int:
        """The steps of the run. Epochs are steps once the examples are known (`over`)."""
        assert self.steps is not None, "epochs of unknown length"
        return self.steps

    @property
    def length(self) -> str:
        """How long the run is, in words."""
        if self.epochs is None:
            return counted_words(self.num_steps, "step")
        return f"{self.epochs:g} epoch{'' if self.epochs == 1 else 's'}"

    def over(self, order: EpochOrder) -> RunConfig:
        """The same with `steps` in place of `epochs`. order: of the examples.

        The last step is whole: it takes what it lacks from the next epoch.
        Raises UserError for more steps than a run may have, and for a step of profile_steps that does not come.
        """
        if self.epochs is None:
            return self
        steps = -(-order.taken_in(Fraction(str(self.epochs))) // self.batch_size)
        if steps > MAX_STEPS:
            raise UserError(f"run.epochs = {self.epochs:g} are {steps:,} steps; a run may have {MAX_STEPS:,}.")
        over = self.model_copy(update={"steps": steps, "epochs": None})
        if why := over._never_profiled():
            raise UserError(f"run.epochs = {self.epochs:g} are {counted_words(steps, 'step')}, and {why}.")
        return over

    def _never_profiled(self) -> str:
        """A step of profile_steps that does not come, in words; "" if there is none, as far as is known."""
        last = math.inf if self.steps is None else self.steps
        wrong = [step for step in self.profile_steps if not 1 <= step <= last]
        return f"profile_steps has {wrong[0]}, and the steps are 1 to {self.steps or 'the last'}" if wrong else ""


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
                raise ValueError(
                    f"model.{table}.{name} does not say what it {verb}, and is not named after it: give it {verb} = "
                    f"{' or '.join(json.dumps(each) for each in (*_TABLES, *self.modalities))}"
                )
            if self._transform_of_files(name) is None:
                other = "" if modality == name else f", or [transforms.{modality}] for all that read {modality}"
                raise ValueError(
                    f"model.{table}.{name} needs a table [transforms.{name}] that says what it is given{other}"
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

    def vocabulary(self) -> ChatTokenizer | DrawnVocabulary:
        """What makes tokens, read from its directory. Raises UserError."""
        return ChatTokenizer.from_directory(self.data.tokenizer)

    @property
    def exchanges_items(self) -> bool:
        """Whether items are loaded by their home ranks and then sent. Not with "auto": every dataset has an index."""
        return self.balance.mode == "exchange"


class DrawnRecipe(Recipe):
    """A training job whose model is made of shapes, and whose examples are drawn: of random contents.

    precision: what modules compute in, by its name in Plans; `load_recipe` has it set `fsdp.param_dtype`.
    """

    model: ModelShapes
    data: DrawnDataConfig = DrawnDataConfig()
    workload: Sampler
    precision: Literal["bf16", "fp16", "fp32"] | None = None

    @model_validator(mode="after")
    def _parts_fit(self) -> DrawnRecipe:
        for name in ("modalities", "transforms", "evaluate", "export"):
            if getattr(self, name) != type(getattr(self, name))():
                raise ValueError(f"[{name}] has no effect beside [workload], as drawn examples mean nothing")
        dtype = self.fsdp.param_dtype or self.run.dtype
        if self.precision and dtype != _DTYPE_OF[self.precision]:
            raise ValueError(f"precision is {self.precision!r}, but modules compute in {dtype}; leave one of them out")
        if unfit := next(unfit_items(self.model, self.workload), ""):
            raise ValueError(unfit)
        return self

    @property
    def is_drawn(self) -> bool:
        """True."""
        return True

    @property
    def modules(self) -> ModelConfig:
        """The model to build. Raises UserError for shapes that training does not compute."""
        return config_of_shapes(self.model)

    def drawn(self) -> Workload:
        """The lengths of all examples, before any is left out."""
        return self.workload.workload(self.data.seed)

    def vocabulary(self) -> DrawnVocabulary:
        """Token ids without text."""
        return DrawnVocabulary(self.model.backbone.vocab_size)

    def table_of(self, encoder: str) -> str:
        """The encoder's own name: there are no transforms."""
        return encoder

    def transform(self, encoder: str) -> DrawnTransform:
        """What makes the rows of an encoder, or those that a generator learns to make."""
        if made := self.model.generators.get(encoder):
            return DrawnTransform(encoder, made.row_dim, is_pixels=False, seed=self.data.seed)
        shape = self.model.encoders[encoder]
        return DrawnTransform(encoder, shape.input_dim, is_pixels=shape.kind == "vit", seed=self.data.seed)


def load_recipe(path: Path, overrides: Sequence[str] = (), *, trains: bool = True) -> Recipe:
    """Read, override and validate a recipe; paths in the result are absolute.

    overrides: "table.key=value", the value in TOML (a bare word is a string).
    trains:    False if it is only planned: a recipe whose examples are drawn then needs no run.dir and run.steps.
    Raises UserError if the file is missing or no TOML, and for the first wrong key.
    """
    read = read_recipe(path, overrides)
    schema, tables = Recipe, _with_own_files(read.tables, path.resolve().parent)
    if "workload" in tables:
        schema, tables = DrawnRecipe, _drawn_tables(path, tables, trains)
    elif isinstance(tables.get("model"), dict) and "path" in tables["model"]:
        from motet.train.recipe.whole import WholeRecipe, check_whole_tables

        check_whole_tables(path, tables)
        schema = WholeRecipe
    elif "backbone" not in (model := tables.get("model") or {}):
        _check_names_a_model(path, read.text, read.set_keys, model)
    try:
        # JSON allows strict validation (no "8" for 8, no true for 1): it has lists for tuples, strings for paths.
        recipe = schema.model_validate_json(json.dumps(tables, default=str), strict=True)
    except ValidationError as error:
        in_phase = None if read.phase is None else partial(key_in_phase, number=read.phase)
        told = recipe_error(error.errors(), schema, str(path), read.text, read.set_keys, in_phase)
        raise UserError(told) from error
    for key in (("run", "dir"), ("data", "index_folder"), ("data", "cache_folder")):
        folder = getattr(getattr(recipe, key[0]), key[1], None)
        if found := _VARIABLE.search(str(folder)):
            raise UserError(
                f"{place_of(key, str(path), read.text, read.set_keys)}: '{'.'.join(key)}' has {found[0]} in it, and a "
                "folder of that very name would be made, as recipes know no variables; write the path, or let the "
                f"shell write it: --set {'.'.join(key)}=..."
            )
    resolved = schema.model_validate(absolute(recipe.model_dump(exclude_unset=True), path.resolve().parent))
    try:
        _ = resolved.modules
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    return resolved


def _check_names_a_model(path: Path, text: str, set_keys: Collection[KeyPath], model: object) -> None:
    """Raise UserError for a `[model]` that has neither `path` nor `backbone`, unless another slip is the cause."""
    if not isinstance(model, dict):
        return
    unknown = [name for name in model if name not in ModelConfig.model_fields]
    slip = next(iter(difflib.get_close_matches("path", unknown, n=1)), None)
    if unknown and slip is None:
        return
    key = ("model",) if slip is None else ("model", slip)
    said = (
        "the recipe names no model"
        if slip is None
        else f"unknown key 'model.{slip}'; did you mean 'path'? The recipe names no model so far"
    )
    raise UserError(
        f"{place_of(key, str(path), text, set_keys)}: {said}; give model.path, a local directory of a whole model that "
        "transformers reads, or parts: [model.backbone] and [model.encoders.NAME]."
    )


def _with_own_files(tables: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The same tables with absolute paths of the user's own files, which are opened while the tables are validated."""
    own = tables.get("modalities")
    if not isinstance(own, dict):
        return tables
    own = {
        name: table | {"file": str(folder / Path(table["file"]).expanduser())}
        if isinstance(table, dict) and isinstance(table.get("file"), str)
        else table
        for name, table in own.items()
    }
    return tables | {"modalities": own}


def _drawn_tables(path: Path, tables: dict[str, Any], trains: bool) -> dict[str, Any]:
    """The tables of a recipe whose examples are drawn. Raises UserError for one that cannot be trained."""
    model, data, run = (tables.get(name, {}) for name in ("model", "data", "run"))
    backbone = model.get("backbone") if isinstance(model, dict) else None
    if not isinstance(model, dict) or (isinstance(backbone, dict) and "family" in backbone):
        raise UserError(
            f"{path}: examples are drawn from [workload] for a model of shapes alone; a model of HF families reads "
            "files, so training it needs [data] in place of [workload]."
        )
    if isinstance(data, dict) and (files := sorted({"train", "heldout", "tokenizer"} & data.keys())):
        raise UserError(f"{path}: examples are drawn from [workload], so data.{files[0]} has no place beside it.")
    if not isinstance(run, dict):
        return tables
    if not trains:
        tables = {**tables, "run": {"dir": ".", "steps": 1} | run}
    elif missing := [f"run.{key}" for key in ("dir", "steps", "batch_size") if key not in run]:
        given = " ".join(f"--set {key}=..." for key in missing)
        raise UserError(f"{path} does not say {' and '.join(missing)}, which training needs: give {given}.")
    return tables | _drawn_defaults(tables)


def _drawn_defaults(tables: dict[str, Any]) -> dict[str, Any]:
    """The tables with what only such a recipe has by default: a learning rate, and computing in bfloat16."""
    run, fsdp, optimizer = (tables.get(name, {}) for name in ("run", "fsdp", "optimizer"))
    filled = {}
    if isinstance(optimizer, dict):
        filled["optimizer"] = {"lr": _DRAWN_LR} | optimizer
    if isinstance(run, dict) and isinstance(fsdp, dict) and not ("dtype" in run or "param_dtype" in fsdp):
        filled["fsdp"] = {"param_dtype": _DTYPE_OF.get(str(tables.get("precision")), "bfloat16")} | fsdp
    return filled


def dump_recipe(recipe: Recipe) -> str:
    """The recipe as TOML with every default and absolute paths. It loads to the same recipe.

    What a Plan decides is left out if the recipe names one.
    """
    by_plan: Any = {
        "run": {"microbatches"},
        "data": {"group"},
        "balance": {
            "method",
            "phases",
            "policy",
            *(BalanceConfig.model_fields.keys() - recipe.balance.model_fields_set),
        },
        "fsdp": FSDPConfig.model_fields.keys() - _PRECISION,
    }
    excluded = by_plan if recipe.run.plan else {}
    tables = recipe.model_dump(mode="json", exclude=excluded | {"run": {"phase"} | excluded.get("run", set())})
    if isinstance(recipe, DrawnRecipe):
        # Shapes and distributions refuse a key that has no effect, also with its default.
        tables |= recipe.model_dump(mode="json", include={"model", "workload"}, exclude_unset=True)
    return dump_toml(tables)


def absolute(tables: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The same tables with every relative Path joined to the recipe's folder; manifests, and files of code, too."""

    def joined(value: Any) -> Any:
        if isinstance(value, Path):
            # Not resolve(): messages should name a link as the user wrote it.
            return Path(os.path.normpath(folder / value.expanduser()))
        if isinstance(value, dict):
            return {key: joined(item) for key, item in value.items()}
        return [joined(item) for item in value] if isinstance(value, list) else value

    def in_folder(value: Any) -> Any:
        """Names of what a file of the user's own defines, with the file's absolute path."""
        if isinstance(value, dict):
            return {key: in_folder(item) for key, item in value.items()}
        if isinstance(value, str) and (found := NAMED_IN_FILE.fullmatch(value)):
            return f"{joined(Path(found[1]))}:{found[2]}"
        return value

    tables = joined(tables)
    if "model" in tables:
        tables["model"] = in_folder(tables["model"])
    if (start := tables.get("run", {}).get("start")) is not None and not is_stored(start):
        tables["run"]["start"] = str(joined(Path(start)))
    for split in ("train", "heldout"):
        # Manifests may be patterns of shards, so they are strings, not Paths.
        if split in tables.get("data", {}):
            tables["data"][split] = [
                manifest if is_url(manifest) else str(joined(Path(manifest.removeprefix(LOCAL_URL))))
                for manifest in tables["data"][split]
            ]
    return tables
