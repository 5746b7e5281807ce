"""The JSON Schema of recipes: every key described, every shipped recipe within it."""

import tomllib
from pathlib import Path

import pytest

from motet.train.recipe.schema import recipe_schema

RECIPES = sorted((Path(__file__).parents[4] / "recipes").glob("*.toml"))
SCHEMA = recipe_schema()


def resolved(said):
    return SCHEMA["$defs"][said["$ref"].rpartition("/")[2]] if "$ref" in said else said


def unknown_keys(table, said, path=""):
    """The keys of a table that the schema does not have, as paths."""
    said = resolved(said)
    if "properties" in said:
        for key, value in table.items():
            if key not in said["properties"]:
                yield path + key
            elif isinstance(value, dict):
                yield from unknown_keys(value, said["properties"][key], f"{path}{key}.")
    elif isinstance(said.get("additionalProperties"), dict):
        for key, value in table.items():
            if isinstance(value, dict) and "anyOf" not in said["additionalProperties"]:
                yield from unknown_keys(value, said["additionalProperties"], f"{path}{key}.")


def test_every_key_is_described():
    keys = {(name, key): said for name, table in SCHEMA["$defs"].items() for key, said in table["properties"].items()}
    assert [key for key, said in keys.items() if not resolved(said).get("description")] == []
    assert keys["DataConfig", "seed"]["description"].startswith("the order of examples")
    assert keys["RunConfig", "steps"]["description"].startswith("optimizer steps of the whole run; it, or epochs")


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_shipped_recipes_are_within_the_schema(path):
    recipe = tomllib.loads(path.read_text(encoding="utf-8"))
    kind = SCHEMA["then"] if "workload" in recipe else SCHEMA["else"]["else"]
    assert list(unknown_keys(recipe, kind)) == []
    assert list(unknown_keys({**recipe, "run": {"stepz": 1}}, kind)) == ["run.stepz"]


def test_a_whole_model_has_keys_of_its_own():
    recipe = {"model": {"path": "DIR", "train": {"image": False}}, "data": {"train": ["x"], "tokenizer": "DIR"}}
    assert list(unknown_keys(recipe, SCHEMA["else"]["then"])) == ["data.tokenizer"]


def test_a_table_is_described_by_its_first_sentence_and_a_key_by_its_own_lines():
    encoder = SCHEMA["$defs"]["EncoderConfig"]
    assert encoder["description"] == "One encoder and its projector."
    assert encoder["properties"]["before"]["description"].startswith("callbacks before the encoder")
    assert encoder["additionalProperties"] is False
