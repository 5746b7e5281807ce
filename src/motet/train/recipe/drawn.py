"""A recipe whose model is made of shapes, and whose examples are drawn from `[workload]` (`core/sampler.py`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import model_validator

from motet.core.errors import UserError
from motet.core.sampler import Sampler
from motet.core.shape_tables import ModelShapes
from motet.core.workload import Workload
from motet.data.config import DrawnDataConfig
from motet.data.drawn import DrawnTransform, DrawnVocabulary
from motet.models.build import ModelConfig
from motet.models.shaped_config import config_of_shapes
from motet.train.recipe.drawn_items import unfit_items
from motet.train.recipe.recipe import Recipe

_DRAWN_LR = 1e-4
"""The peak learning rate of a recipe whose examples are drawn, if it says none."""
_DTYPE_OF = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


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


def drawn_tables(path: Path, tables: dict[str, Any], trains: bool) -> dict[str, Any]:
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
