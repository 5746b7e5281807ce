"""The recipes that `motet plan` takes: those of training jobs, and planning recipes, with no more than planning needs.

A planning recipe has a workload instead of data, and needs neither tokenizer nor weights. With tables that say how it
trains ([fsdp], [balance], ...), one of shapes is read as a training recipe (`train/recipe/recipe.py: DrawnRecipe`):

    [run]
    batch_size = 2560

    [model.backbone]           # shapes (core/shape_tables.py), HF families with `vocab_size`, as in training, or
    ...                        # model = "DIR", an HF model's directory

    [cluster]                  # or --cluster; cost/catalogue.py
    device = "h100"
    nodes = 320

    [[workload.task]]          # or --workload; core/sampler.py
    ...
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from motet.core.cluster import Cluster
from motet.core.errors import UserError
from motet.core.limits import MAX_EXAMPLES
from motet.core.module_degrees import ModuleDegrees
from motet.core.sampler import Sampler
from motet.core.shape_tables import ModelShapes
from motet.core.spec import ModelSpec
from motet.core.workload import Workload
from motet.cost.catalogue import ClusterConfig
from motet.cost.memory import PRECISION_OF_DTYPE
from motet.train.recipe.drawn_items import unfit_items
from motet.train.recipe.errors import recipe_error
from motet.train.recipe.reading import RecipeText, read_recipe

if TYPE_CHECKING:
    from motet.train.recipe.recipe import Recipe

PlannedPrecision = Literal["bf16", "fp16", "fp32"]
"""What the job of a planning recipe may compute in."""


class PlannedRun(BaseModel):
    """`[run]` of a planning recipe."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    batch_size: int = Field(gt=0, le=MAX_EXAMPLES, description="examples of a step, over all ranks and microbatches")


class PlanRecipe(BaseModel):
    """A job to plan. `model` may also be HF families, as in a training recipe, or the path of an HF directory."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    run: PlannedRun
    model: ModelShapes
    precision: PlannedPrecision = "bf16"
    cluster: ClusterConfig | None = None
    workload: Sampler | None = None
    parallel: dict[str, ModuleDegrees] = Field(default_factory=dict)


@dataclass(frozen=True)
class JobRecipe:
    """What both kinds of recipe say of a job.

    workload: None if a planning recipe has none.
    recipe:   the recipe itself, if it is read as a training recipe, whose workload is its data; else None.
    parallel: the degrees of single modules that it states.
    """

    model: ModelSpec
    batch_size: int
    precision: str
    cluster: ClusterConfig | None
    workload: Workload | None
    recipe: Recipe | None
    parallel: Mapping[str, ModuleDegrees]

    @property
    def trains(self) -> bool:
        """Whether it is read as a training recipe."""
        return self.recipe is not None

    def check_peak(self, path: Path, cluster: Cluster) -> None:
        """Raise UserError if the devices state no peak of what the job computes in. path: of the recipe."""
        peaks = cluster.device.peak_flops
        if self.precision in peaks:
            return
        if self.recipe is None:
            key, values = "precision", [name for name in get_args(PlannedPrecision) if name in peaks]
        else:
            key, allowed = "run.dtype", {"fp32", "fp64"}
            if self.recipe.fsdp.param_dtype:
                key, allowed = "fsdp.param_dtype", set(PRECISION_OF_DTYPE.values())
            values = [dtype for dtype, name in PRECISION_OF_DTYPE.items() if name in allowed & peaks.keys()]
        raise UserError(
            f"{path} computes in {self.precision} ({key}), of which {cluster.device.name} has no peak: set {key} to "
            f"{' or '.join(map(repr, values))}, name another device (--cluster), or state it (cluster.peak_tflops)."
        )


def read_job_recipe(path: Path, overrides: Sequence[str] = (), *, as_trained: bool = False) -> JobRecipe:
    """The job that a recipe of either kind describes. Raises UserError for what is wrong with it.

    as_trained: read a recipe that says nothing of how it trains as one that trains by default.
    """
    text = read_recipe(path, overrides)
    return _of_training(path, overrides) if as_trained or _trains(text.tables) else _of_planning(path, text)


def check_counted(path: Path, recipe: Recipe) -> None:
    """Raise UserError for types of numbers that the memory model does not count."""
    if why := recipe.why_uncounted:
        raise UserError(f"{path}: {why}")


def _trains(tables: dict[str, Any]) -> bool:
    """Whether a recipe says how it trains. One with a workload does so if a planning recipe lacks some of its keys."""
    if "workload" not in tables:
        return "data" in tables
    run = tables.get("run")
    own = tables.keys() - PlanRecipe.model_fields.keys()
    if isinstance(run, dict):
        own |= run.keys() - PlannedRun.model_fields.keys()
    return bool(own) and _schema(tables.get("model"))[1]


def _of_training(path: Path, overrides: Sequence[str]) -> JobRecipe:
    from motet.models.spec import spec_of_config
    from motet.train.recipe.recipe_file import load_recipe

    recipe = load_recipe(path, overrides, trains=False)
    model = spec_of_config(recipe.modules, recipe.vocabulary().vocabulary_size, path.stem)
    return JobRecipe(model, recipe.run.batch_size, recipe.plan_precision, recipe.cluster, None, recipe, recipe.parallel)


def _of_planning(path: Path, read: RecipeText) -> JobRecipe:
    schema, has_shapes = _schema(read.tables.get("model"))
    try:
        recipe = schema.model_validate_json(json.dumps(read.tables, default=str), strict=True)
    except ValidationError as error:
        raise UserError(recipe_error(error.errors(), schema, str(path), read.text, read.set_keys)) from error
    model = recipe.model.spec(path.stem) if has_shapes else _model_of_hf(path, recipe)
    for unfit in unfit_items(recipe.model, recipe.workload) if has_shapes and recipe.workload else ():
        print(f"{path}: {unfit}. It is planned as it stands, and training refuses it.", file=sys.stderr)
    workload = recipe.workload and replace(recipe.workload.workload(), source=str(path))
    run = recipe.run
    return JobRecipe(model, run.batch_size, recipe.precision, recipe.cluster, workload, None, recipe.parallel)


def _schema(model: Any) -> tuple[type[PlanRecipe], bool]:
    """The class of a planning recipe by the form of its `model`, and whether that is tables of shapes."""
    if isinstance(model, str):
        return create_model("PlanRecipe", __base__=PlanRecipe, model=(Path, ...)), False
    backbone = model.get("backbone") if isinstance(model, dict) else None
    if isinstance(backbone, dict) and "family" in backbone:
        from motet.models.build import ModelConfig

        return create_model("PlanRecipe", __base__=PlanRecipe, model=(ModelConfig, ...)), False
    return PlanRecipe, True


def _model_of_hf(path: Path, recipe: Any) -> ModelSpec:
    from motet.models.spec import spec_of_config, spec_of_directory
    from motet.train.recipe.recipe_file import absolute

    folder = path.resolve().parent
    if isinstance(recipe.model, Path):
        return spec_of_directory(folder / recipe.model.expanduser())
    model = type(recipe.model).model_validate(absolute(recipe.model.model_dump(exclude_unset=True), folder))
    backbone = model.backbone
    if backbone.path is None and "vocab_size" not in backbone.config:
        raise UserError(f"{path}: 'model.backbone.config' must have vocab_size, as there is no tokenizer to tell it.")
    return spec_of_config(model, backbone.config.get("vocab_size", 0), path.stem)
