"""The keys that docs/coming_from.md gives for those of other trainers are keys of a recipe."""

import re
from pathlib import Path

from motet.train.recipe.schema import recipe_schema

TEXT = (Path(__file__).parents[2] / "docs" / "coming_from.md").read_text()
TABLES = [
    "run",
    "data",
    "model",
    "transforms",
    "optimizer",
    "fsdp",
    "balance",
    "checkpoint",
    "evaluate",
    "export",
    "parallel",
    "context",
]


def described(schema, table):
    """The tables that a value may be: what a key refers to, or the values of a table by name."""
    if "$ref" in table:
        return [schema["$defs"][table["$ref"].rpartition("/")[2]]]
    found = [
        part for kind in ("anyOf", "allOf", "oneOf") for one in table.get(kind, ()) for part in described(schema, one)
    ]
    return found + ([table] if "properties" in table or "additionalProperties" in table else [])


def has_key(schema, tables, key):
    head, _, rest = key.partition(".")
    below = []
    for table in tables:
        one = table.get("properties", {}).get(head)
        if one is None and head == "NAME" and isinstance(table.get("additionalProperties"), dict):
            one = table["additionalProperties"]
        if one is not None:
            if not rest:
                return True
            below += described(schema, one)
    return bool(below) and has_key(schema, below, rest)


def test_every_key_of_ours_is_in_the_schema():
    schema = recipe_schema()
    ours = [row.split("|")[2] for row in TEXT.splitlines() if row.startswith("| `")]
    keys = {key for cell in ours for key in re.findall(r"`([a-z_]+(?:\.\w+)+)", cell) if key.split(".")[0] in TABLES}
    assert len(keys) > 35
    named = {key.replace(".backbone.", ".NAME.") if key.startswith("parallel.") else key for key in keys}
    recipes = [schema["$defs"][kind] for kind in ("Recipe", "WholeRecipe")]
    wrong = [key for key in sorted(named) if not has_key(schema, recipes, key)]
    assert wrong == []
    assert not has_key(schema, recipes, "optimizer.lrr")
