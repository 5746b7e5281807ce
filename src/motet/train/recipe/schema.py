"""The keys of a recipe as a JSON Schema, each with what it does: for editors, and for who looks a key up."""

from __future__ import annotations

import inspect
import re
from dataclasses import is_dataclass
from typing import Any, get_args, get_type_hints

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from motet.train.recipe.drawn import DrawnRecipe
from motet.train.recipe.recipe import Recipe
from motet.train.recipe.whole import WholeRecipe

_RECIPES = (Recipe, DrawnRecipe, WholeRecipe)
_KEYS = re.compile(r"([a-z]\w*(?:, [a-z]\w*)*):\s+(\S.*)")
"""The first line in a docstring about one or several keys; the next ones are indented."""


def recipe_schema() -> dict[str, Any]:
    """A JSON Schema (draft 2020-12) of a recipe.

    With `[workload]` it is that of a recipe whose examples are drawn, with `model.path` that of a whole model.

    A key is described by its field, or by what the docstring of its class says of it.
    """
    tables, schema = models_json_schema([(each, "validation") for each in _RECIPES])
    kinds = {kind.__name__: kind for recipe in _RECIPES for kind in _tables(recipe)}
    for name, table in schema["$defs"].items():
        table["description"] = table["description"].partition("\n\n")[0]
        keys = _described(kinds[name])
        for key, said in table["properties"].items():
            if "$ref" not in said and key in keys:
                said.setdefault("description", keys[key])
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A recipe of motet",
        "if": {"required": ["workload"]},
        "then": tables[DrawnRecipe, "validation"],
        "else": {
            "if": {"properties": {"model": {"required": ["path"]}}},
            "then": tables[WholeRecipe, "validation"],
            "else": tables[Recipe, "validation"],
        },
        **schema,
    }


def _tables(kind: type) -> set[type]:
    """The class of a table, and those of all tables in it: models of pydantic, and dataclasses."""
    found: set[type] = set()
    left: list[Any] = [kind]
    while left:
        one = left.pop()
        if not isinstance(one, type):
            left += get_args(one)
        elif one not in found and (issubclass(one, BaseModel) or is_dataclass(one)):
            found.add(one)
            left += get_type_hints(one).values()
    return found


def _described(kind: type) -> dict[str, str]:
    """Key -> what the docstring of the class, or of one that it is made from, says of it."""
    keys: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        named: list[str] = []
        for line in inspect.cleandoc(base.__doc__ or "").splitlines():
            if first := _KEYS.fullmatch(line):
                named, text = first[1].split(", "), first[2]
                keys.update(dict.fromkeys(named, text))
            elif line.startswith(" "):
                keys.update({key: f"{keys[key]} {line.strip()}" for key in named})
            else:
                named = []
    return keys
