"""Turns pydantic's errors in a recipe into one sentence: file, line, key, and what would be right."""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from collections.abc import Callable, Collection, Sequence
from typing import Any

from pydantic import BaseModel
from pydantic_core import ErrorDetails

from motet.core.text_files import KeyPath
from motet.train.recipe.toml_text import line_of_key

_INSIDE_PHASE = 4
"""Parts of the shortest key of a training phase: run, phase, its number, the key."""
_UNKNOWN = ("extra_forbidden", "unexpected_keyword_argument")
_NAMES = {
    "float_parsing": "a number",
    "float_type": "a number",
    "int_parsing": "a whole number",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "bool_parsing": "true or false",
    "bool_type": "true or false",
    "string_type": "a string",
    "path_type": "a path, as a string",
    "list_type": "a list",
    "tuple_type": "a list",
    "dict_type": "a table",
    "model_type": "a table",
    "model_attributes_type": "a table",
    "dataclass_type": "a table",
}


def recipe_error(
    errors: Sequence[ErrorDetails],
    schema: type[BaseModel],
    where: str,
    text: str,
    overrides: set[KeyPath],
    in_phase: Callable[[KeyPath], KeyPath] | None = None,
) -> str:
    """The sentence for one of pydantic's errors: the first unknown key, else the first error.

    Unknown keys come first, as a misspelt key is often also missing under its right name.
    where: the recipe's path as the user gave it. text: its TOML text. overrides: keys that the command line has set.
    in_phase: where the training phase that was read has a key of the recipe, if it has it.
    """
    error = next((error for error in errors if error["type"] in _UNKNOWN), None) or _inside_union(errors)
    key, models = _walk(error["loc"], schema)
    name = ".".join(str(part) for part in key)
    if error["type"] in _UNKNOWN:
        problem = f"unknown key '{name}'{_suggestion(key, models, schema)}"
    elif not key:
        problem = error["msg"].removeprefix("Value error, ").rstrip(".")
    elif error["type"] == "missing":
        problem = f"'{name}' is missing and has no default{_description(key, models)}"
    else:
        problem = f"'{name}' {_requirement(error)}"
    return f"{place_of(key, where, text, overrides, in_phase)}: {problem}" + ("" if problem.endswith("?") else ".")


def _inside_union(errors: Sequence[ErrorDetails]) -> ErrorDetails:
    """The first error; of a union, which has one of each member, that of the member that came nearest."""
    loc = errors[0]["loc"]
    tag = next((index for index, part in enumerate(loc) if _is_tag(part)), len(loc))
    return max((error for error in errors if error["loc"][:tag] == loc[:tag]), key=lambda error: len(error["loc"]))


def _is_tag(part: int | str) -> bool:
    """Whether a part of pydantic's location names a member of a union of plain types, and is no key of the file."""
    return isinstance(part, str) and (part in ("bool", "int", "float", "str") or part.endswith("]"))


def place_of(
    key: KeyPath,
    where: str,
    text: str,
    overrides: Collection[KeyPath] = (),
    in_phase: Callable[[KeyPath], KeyPath] | None = None,
) -> str:
    """Where the user finds a key: the command line, or a line of the recipe. Arguments as of `recipe_error`."""
    if any(key[: len(override)] == override for override in overrides):
        return f"--set {'.'.join(map(str, key))}"
    line = line_of_key(text, key, at_least=len(key))
    if in_phase is not None:
        inner = in_phase(key)
        # A key may also stand in an inline table, which has one line.
        line = line_of_key(text, inner, len(inner)) or line or line_of_key(text, inner, _INSIDE_PHASE)
    if key and not line and (inside := sorted(".".join(map(str, o)) for o in overrides if o[: len(key)] == key)):
        return f"--set {inside[0]}"
    line = line or line_of_key(text, key)
    return f"{where}, line {line}" if line else where


def _requirement(error: ErrorDetails) -> str:
    """What a value must be, and what it is."""
    value = error["input"]
    shown = "" if isinstance(value, dict | BaseModel) else f", not {value!r}"
    if error["type"] in _NAMES:
        return f"must be {_NAMES[error['type']]}{shown}"
    if error["type"] in ("literal_error", "enum"):
        return f"must be {error['ctx']['expected']}{shown}"
    if error["type"] == "too_short":
        least = error["ctx"]["min_length"]
        return f"must have at least {least} {'entry' if least == 1 else 'entries'}, not {len(value)}"
    if error["type"] in ("value_error", "assertion_error"):
        return f"is wrong: {error['msg'].removeprefix('Value error, ').removeprefix('Assertion failed, ').rstrip('.')}"
    message = error["msg"].removeprefix("Input should be ").removeprefix("Input ").rstrip(".")
    return f"must be {message}{shown}" if error["msg"].startswith("Input should be ") else f"{message}{shown}"


def _walk(loc: tuple[int | str, ...], schema: type[BaseModel]) -> tuple[KeyPath, list[type]]:
    """(key, models): the key as the TOML has it, and the models that may have the key's last part as a field.

    loc: pydantic's location of an error, which also has the names of members of unions.
    """
    key: list[str | int] = []
    candidates: list[Any] = [schema]
    for index, part in enumerate(loc):
        last = index == len(loc) - 1
        if len(candidates) > 1 and _is_tag(part):
            continue
        models = [c for c in candidates if _is_model(c)]
        following: list[Any] = []
        for candidate in candidates:
            following += _step(candidate, part)
        # The tag of a union names one of the members, and is no key of the file.
        named = [m for m in models if m.__name__ == part or (part in _tags(m) and not last)]
        if not following and (named or (not last and (models or candidates))):
            candidates = named or candidates
            continue
        key.append(part)
        if last:
            return tuple(key), models
        candidates = following
    return tuple(key), [c for c in candidates if _is_model(c)]


def _step(annotation: Any, part: int | str) -> list[Any]:
    if _is_model(annotation):
        fields = _fields(annotation)
        return _members(fields[part]) if part in fields else []
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is dict and isinstance(part, str):
        return _members(arguments[1])
    if origin in (list, tuple) and isinstance(part, int):
        return _members(arguments[0])
    return []


def _members(annotation: Any) -> list[Any]:
    if typing.get_origin(annotation) is typing.Annotated:
        return _members(typing.get_args(annotation)[0])
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return [member for argument in typing.get_args(annotation) for member in _members(argument)]
    return [annotation]


def _is_model(annotation: Any) -> bool:
    return isinstance(annotation, type) and (issubclass(annotation, BaseModel) or dataclasses.is_dataclass(annotation))


def _fields(model: type) -> dict[str | int, Any]:
    """Name -> annotation of the keys that a table may have."""
    if issubclass(model, BaseModel):
        return {name: field.annotation for name, field in model.model_fields.items()}
    return dict(typing.get_type_hints(model).items()) if dataclasses.is_dataclass(model) else {}


def _tags(model: type) -> set[Any]:
    """Values of the model's Literal fields, by which a discriminated union chooses its member."""
    literals = (annotation for annotation in _fields(model).values() if typing.get_origin(annotation) is typing.Literal)
    return {value for literal in literals for value in typing.get_args(literal)}


def _suggestion(key: KeyPath, models: list[type], schema: type[BaseModel]) -> str:
    known = sorted({str(name) for model in models for name in _fields(model) if _is_key(model, str(name))})
    unknown = str(key[-1])
    if tuple(key) == ("model", "train"):
        return (
            "; it is of a model of model.path; of parts there are model.backbone.train, "
            "model.encoders.NAME.train_encoder and .train_projector"
        )
    longer = [name for name in known if name.startswith(f"{unknown}_")]
    if close := longer or difflib.get_close_matches(unknown, known, n=1, cutoff=0.6):
        return f"; did you mean {' or '.join(map(repr, close))}?"
    for section, field in schema.model_fields.items():
        # A key of another section was most likely written into the wrong section.
        if any(_is_model(m) and unknown in _fields(m) for m in _members(field.annotation)):
            return f"; '{unknown}' belongs into [{section}]"
    return f"; known here: {', '.join(known)}" if known else ""


def _is_key(model: type, name: str) -> bool:
    return issubclass(model, BaseModel) or name in {field.name for field in dataclasses.fields(model)}


def _description(key: KeyPath, models: list[type]) -> str:
    for model in models:
        field = model.model_fields.get(str(key[-1])) if issubclass(model, BaseModel) else None
        if field is not None and field.description:
            return f" ({field.description.rstrip('.')})"
    return ""
