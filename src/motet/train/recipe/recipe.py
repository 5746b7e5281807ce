"""A recipe: the whole of a training job as one validated TOML file.

Each table is the Config class of a component, defined beside that component. This file puts them together, reads the
TOML and the `--set` overrides, and makes paths absolute. Relative paths start at the recipe's folder, also in `--set`,
so that a recipe means the same from any working directory.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

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
from motet.core.limits import MAX_EXAMPLES, MAX_SEED, MAX_STEPS
from motet.cost.catalogue import ClusterConfig
from motet.data.audio import AudioTransform
from motet.data.config import DataConfig
from motet.data.images import ImageTransform
from motet.dispatch import BalanceConfig
from motet.models.build import ModelConfig
from motet.runtime.fsdp import FSDPConfig
from motet.train.checkpoint.saving import CheckpointConfig
from motet.train.evaluate import EvaluateConfig
from motet.train.export import ExportConfig
from motet.train.optimizer import OptimizerConfig
from motet.train.recipe.errors import recipe_error
from motet.train.recipe.toml_text import dump_toml, read_recipe


class RunConfig(BaseModel):
    """`[run]` of a recipe: folder, length, seed and device."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    dir: Path = Field(description="folder for metrics, checkpoints and the report")
    steps: int = Field(gt=0, le=MAX_STEPS, description="optimizer steps of the whole run")
    batch_size: int = Field(gt=0, le=MAX_EXAMPLES, description="examples of a step, over all ranks and microbatches")
    microbatches: int = Field(1, gt=0, le=MAX_EXAMPLES, description="parts of a batch whose gradients are accumulated")
    seed: int = Field(0, ge=0, le=MAX_SEED, description="of weights and dropout; data.seed orders the examples")
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["float32", "float64"] = Field("float32", description="of parameters and optimizer state")
    on_bad_step: Literal["stop", "skip"] = Field(
        "stop", description="what is done about a step whose loss or gradient is not finite; it changes no weight"
    )

    @model_validator(mode="after")
    def _whole_microbatches(self) -> RunConfig:
        if self.batch_size % self.microbatches:
            raise ValueError(f"microbatches = {self.microbatches} must divide batch_size = {self.batch_size}")
        return self


def _tables(kind: type) -> TypeAdapter[dict[str, ImageTransform | AudioTransform]]:
    """Tables by name, each read as a transform of one kind, which errors name."""
    kinds = (
        Annotated[ImageTransform, Tag(ImageTransform.__name__)]
        | Annotated[AudioTransform, Tag(AudioTransform.__name__)]
    )
    return TypeAdapter(dict[str, Annotated[kinds, Discriminator(lambda _: kind.__name__)]])


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
    model: ModelConfig
    data: DataConfig
    transforms: dict[str, ImageTransform | AudioTransform] = Field(
        default_factory=dict,
        description="by encoder, how files become its rows; an encoder without a table takes that of what it reads",
    )
    balance: BalanceConfig = BalanceConfig()
    fsdp: FSDPConfig = FSDPConfig()
    optimizer: OptimizerConfig
    checkpoint: CheckpointConfig = CheckpointConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    export: ExportConfig = ExportConfig()
    cluster: ClusterConfig | None = Field(
        None, description="what `motet plan` and `motet simulate` predict for; training takes what it is given"
    )

    @field_validator("transforms", mode="before")
    @classmethod
    def _of_what_is_read(cls, tables: Any, info: ValidationInfo) -> Any:
        """Read each table as what its encoder takes. A table named after a kind of media is of that kind."""
        model = info.data.get("model")
        if model is None or not isinstance(tables, dict):
            return {} if model is None else tables
        read: dict[str, Any] = {}
        for name, table in tables.items():
            modality = model.modality(name) if name in model.encoders else name
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
                'fsdp.recompute = "auto" takes the lengths of all examples, and with {rank} in data.train no rank '
                "knows them: state numbers"
            )
        if self.data.is_split and not self.exchanges_items:
            raise ValueError(
                f'balance.mode = "{self.balance.mode}" takes examples that every rank can read, and with {{rank}} in '
                'data.train each rank reads its own; set balance.mode = "exchange"'
            )
        return self

    @model_validator(mode="after")
    def _parts_fit(self) -> Recipe:
        for name in self.model.encoders:
            modality = self.model.modality(name)
            if modality not in _TABLES:
                raise ValueError(
                    f"model.encoders.{name} does not say what it reads, and is not named after it: give it reads = "
                    f"{' or '.join(json.dumps(each) for each in _TABLES)}"
                )
            if self.transform(name) is None:
                other = "" if modality == name else f", or [transforms.{modality}] for all that read {modality}"
                raise ValueError(
                    f"model.encoders.{name} needs a table [transforms.{name}] that says what it is given{other}"
                )
        for name, readers in ((name, self.model.readers.get(name, ())) for name in self.transforms):
            if name not in self.model.encoders and all(reader in self.transforms for reader in readers):
                raise ValueError(
                    f"transforms.{name} has no effect, as "
                    + (f"all that read {name} have their own" if readers else f"there is no model.encoders.{name}")
                )
        return self

    def transform(self, encoder: str) -> ImageTransform | AudioTransform | None:
        """The transform from files to the rows of an encoder; None if the recipe has none."""
        return self.transforms.get(self.table_of(encoder))

    def table_of(self, encoder: str) -> str:
        """The name of the table in `[transforms]` that is an encoder's: its own, or that of what it reads."""
        return encoder if encoder in self.transforms else self.model.modality(encoder)

    @property
    def exchanges_items(self) -> bool:
        """Whether items are loaded by their home ranks and then sent. Not with "auto": every dataset has an index."""
        return self.balance.mode == "exchange"


def load_recipe(path: Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read, override and validate a recipe; paths in the result are absolute.

    overrides: "table.key=value", the value in TOML (a bare word is a string).
    Raises UserError if the file is missing or no TOML, and for the first wrong key.
    """
    read = read_recipe(path, overrides)
    try:
        # JSON allows strict validation (no "8" for 8, no true for 1): it has lists for tuples, strings for paths.
        recipe = Recipe.model_validate_json(json.dumps(read.tables, default=str), strict=True)
    except ValidationError as error:
        raise UserError(recipe_error(error.errors(), Recipe, str(path), read.text, read.set_keys)) from error
    resolved = absolute(recipe.model_dump(exclude_unset=True), path.resolve().parent)
    return Recipe.model_validate(resolved)


def dump_recipe(recipe: Recipe) -> str:
    """The recipe as TOML with every default and absolute paths. It loads to the same recipe."""
    return dump_toml(recipe.model_dump(mode="json"))


def absolute(tables: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The same tables with every relative Path, and the manifests, joined to the recipe's folder."""

    def joined(value: Any) -> Any:
        if isinstance(value, Path):
            # Not resolve(): messages should name a link as the user wrote it.
            return Path(os.path.normpath(folder / value.expanduser()))
        if isinstance(value, dict):
            return {key: joined(item) for key, item in value.items()}
        return [joined(item) for item in value] if isinstance(value, list) else value

    tables = joined(tables)
    for split in ("train", "heldout"):
        # Manifests may be patterns of shards, so they are strings, not Paths.
        if split in tables.get("data", {}):
            tables["data"][split] = [str(joined(Path(manifest))) for manifest in tables["data"][split]]
    return tables
