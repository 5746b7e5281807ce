"""A recipe read from its file and validated, and written as TOML.

Relative paths start at the recipe's folder, also in `--set`, so that a recipe means the same from any working
directory.
"""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from motet.core.errors import UserError
from motet.core.own_file import NAMED_IN_FILE
from motet.core.text_files import KeyPath
from motet.data.remote import LOCAL_URL, is_url
from motet.dispatch import BalanceConfig
from motet.models.build import ModelConfig
from motet.runtime.fsdp import FSDPConfig
from motet.train.checkpoint.remote import is_stored
from motet.train.recipe.drawn import DrawnRecipe, drawn_tables
from motet.train.recipe.errors import place_of, recipe_error
from motet.train.recipe.phases import key_in_phase
from motet.train.recipe.reading import read_recipe
from motet.train.recipe.recipe import Recipe
from motet.train.recipe.toml_text import dump_toml
from motet.train.recipe.whole import WholeRecipe, check_whole_tables
from motet.train.run_folder import outputs_named

_VARIABLE = re.compile(r"\$(\w+|\{\w+\})")
"""A variable of the shell in a path."""
_PRECISION = {"param_dtype", "reduce_dtype", "loss_scale", "loss_scale_steps"}


def load_recipe(path: Path, overrides: Sequence[str] = (), *, trains: bool = True) -> Recipe:
    """Read, override and validate a recipe; paths in the result are absolute.

    overrides: "table.key=value", the value in TOML (a bare word is a string).
    trains:    False if it is only planned: a whole model then needs no weights, and a recipe whose examples are drawn
               neither run.dir nor run.steps.
    Raises UserError if the file is missing or no TOML, for the first wrong key, and if data are what the run writes.
    """
    read = read_recipe(path, overrides)
    schema, tables = Recipe, _with_own_files(read.tables, path.resolve().parent)
    if "workload" in tables:
        schema, tables = DrawnRecipe, drawn_tables(path, tables, trains)
    elif isinstance(tables.get("model"), dict) and "path" in tables["model"]:
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
    for split, manifests in (("train", resolved.data.train), ("heldout", resolved.data.heldout)) if trains else ():
        for manifest in manifests:
            if not is_url(manifest) and (name := outputs_named(resolved.run.dir, manifest)):
                raise UserError(
                    f"{place_of(('data', split), str(path), read.text, read.set_keys)}: {manifest} in data.{split} "
                    f"names {resolved.run.dir / name} as well, which the run itself writes; set another run.dir."
                )
    try:
        _ = resolved.modules
        if trains:
            resolved.check_weights()
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
