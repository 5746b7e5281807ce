"""Every number that a recipe may hold: NaN and infinity are refused, in whatever table, now and in those to come."""

import dataclasses
import math
import types
import typing

import pytest
from pydantic import BaseModel, TypeAdapter, ValidationError

from cli.tiny_job import RECIPE
from motet.core.errors import UserError
from motet.planning.planned_recipe import PlanRecipe
from motet.train.recipe.recipe import Recipe
from motet.train.recipe.recipe_file import load_recipe

REQUIRED = {"ImageTransform": {"patch_size": 14}}
"""Of tables that look at their numbers only when they are complete."""
MAY_BE_INFINITE = {("OptimizerConfig", "clip_norm")}


def members(annotation):
    """The types that an annotation is made of."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return members(arguments[0])
    if origin in (typing.Union, types.UnionType, tuple, list, dict):
        return [member for argument in arguments for member in members(argument)]
    return [annotation]


def fields(table):
    if issubclass(table, BaseModel):
        return {name: field.annotation for name, field in table.model_fields.items()}
    hints = typing.get_type_hints(table, include_extras=True)
    return {field.name: hints[field.name] for field in dataclasses.fields(table)}


def is_table(kind):
    return isinstance(kind, type) and (issubclass(kind, BaseModel) or dataclasses.is_dataclass(kind))


def tables(table, found):
    if table not in found:
        found.append(table)
        for annotation in fields(table).values():
            for member in filter(is_table, members(annotation)):
                tables(member, found)
    return found


NUMBERS = [
    (table, name, annotation)
    for table in tables(PlanRecipe, tables(Recipe, []))
    for name, annotation in fields(table).items()
    if float in members(annotation)
]


def shaped(annotation, value):
    """A value as a field takes it: a list of it for a tuple, a table of it for a dict."""
    kinds = [typing.get_origin(annotation), *(typing.get_origin(part) for part in typing.get_args(annotation))]
    return [value, value] if tuple in kinds else {"bf16": value} if dict in kinds else value


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    ("table", "name", "annotation"), NUMBERS, ids=lambda part: getattr(part, "__name__", str(part))
)
def test_a_number_is_finite(table, name, annotation, value):
    if (table.__name__, name) in MAY_BE_INFINITE and value > 0:
        return
    with pytest.raises(ValidationError) as error:
        TypeAdapter(table).validate_python(REQUIRED.get(table.__name__, {}) | {name: shaped(annotation, value)})
    found = [each for each in error.value.errors() if each["type"] != "missing"]
    assert any(each["loc"][:1] == (name,) or f"{name} must" in each["msg"] for each in found)


def test_the_walk_finds_what_it_should():
    known = {(table.__name__, name) for table, name, _ in NUMBERS}
    assert known >= {("OptimizerConfig", "betas"), ("SpeedConfig", "device_tflops"), ("AudioTransform", "max_seconds")}
    assert known >= {("ClusterConfig", "peak_tflops"), ("ImageTransform", "std"), ("Distribution", "weights")}


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("optimizer.clip_norm=nan", "'optimizer.clip_norm' must be greater than 0, not nan"),
        ("optimizer.betas=[0.9, 1.0]", "must be less than 1, not 1.0"),
        ("optimizer.eps=0.0", "'optimizer.eps' must be greater than or equal to 0.000000000000001, not 0.0"),
        ("cluster={device = 'h100', nodes = 100000000}", "'cluster.nodes' must be less than or equal to 100000"),
        ("balance.speed.device_tflops=inf", "'balance.speed.device_tflops' must be a finite number, not inf"),
        ("balance.costs.backbone.quadratic=10000000000", "quadratic' must be less than or equal to 1000000"),
    ],
)
def test_what_is_no_setting_is_one_sentence(tmp_path, override, said):
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE)
    with pytest.raises(UserError) as error:
        load_recipe(path, [override])
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_how_items_are_sampled_has_no_effect_without_held_out_prompts(tmp_path):
    file, draw = tmp_path / "recipe.toml", "model.generators.draw"
    file.write_text(RECIPE)
    config = "config={ row_dim = 16, hidden = 16, num_layers = 1, num_heads = 2 }"
    given = [f"{draw}.{key}" for key in ('makes="image"', 'family="dit"', "num_queries=1", config, "sampling.steps=4")]
    assert load_recipe(file, given).model.generators["draw"].sampling.steps == 4
    load_recipe(file, [*given, "data.heldout=[]"])  # Evaluation that is turned off.
    with pytest.raises(UserError, match=r"model.generators.draw.sampling has no effect without data.heldout"):
        load_recipe(file, [*given, "~data.heldout", "~evaluate"])
