"""A Plan as a JSON file: `{"motet_plan": 1, "model": ..., "cluster": ..., "units": [...], ...}`.

The keys are the fields of the dataclasses (core/plan.py, spec.py, cluster.py). pydantic reads them strictly: an unknown
key, or a text instead of a number, is an error. Defaults are left out, and equal neighbouring layers are one entry with
a count.

A file that is written by hand may name a model and a cluster instead. `model` is then the path of a recipe or of a
model's directory, relative to the file. `cluster` is a device of the catalogue, with num_nodes and optionally
ranks_per_node. The caller of `read_plan` passes in the functions that look these up.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
import types
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NoReturn

from pydantic import BaseModel, Field, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from motet.core.cluster import Cluster
from motet.core.errors import ArgumentError, UserError
from motet.core.limited import NumRanks
from motet.core.limits import MAX_NODES
from motet.core.plan import Plan
from motet.core.spec import ModelSpec
from motet.core.text_files import KeyPath, read_json

_VERSION = 1
_WIDTH = 120
_NAMES = {
    "int_type": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "a text",
    "tuple_type": "a list",
    "dict_type": "a table",
    "mapping_type": "a table",
    "dataclass_type": "a table",
}


@dataclass(frozen=True)
class _NamedCluster:
    device: str
    num_nodes: Annotated[int, Field(ge=1, le=MAX_NODES)] = 1
    ranks_per_node: NumRanks | None = None


class _OfPlan(BaseModel, extra="forbid", strict=True, defer_build=True):
    """Holds the pydantic configuration of the dataclasses in it, which have none of their own. It is built
    when a file is read: who writes one need not wait for it."""

    plan: Plan


class _OfCluster(BaseModel, extra="forbid", strict=True, defer_build=True):
    cluster: _NamedCluster


def write_plan(plan: Plan, path: str | Path) -> None:
    """Write a file from which `read_plan` reads an equal Plan. Raises UserError if it cannot be written."""
    fields = TypeAdapter(Plan).dump_python(plan, mode="json", exclude_defaults=True)
    try:
        Path(path).write_text(_laid_out({"motet_plan": _VERSION, **fields}) + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"The plan cannot be written to {path}: {error.strerror}.") from error


def plan_digest(plan: Plan) -> str:
    """16 hexadecimal digits that are the same for equal Plans."""
    text = json.dumps(TypeAdapter(Plan).dump_python(plan, mode="json"), sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def read_plan(
    path: str | Path,
    *,
    model_at: Callable[[Path], ModelSpec] | None = None,
    cluster_named: Callable[[str, int, int | None], Cluster] | None = None,
) -> Plan:
    """Read a Plan.

    model_at:      reads the model if the file has a path; the path is absolute if the file's own is.
    cluster_named: makes the cluster if the file names a device, from device, num_nodes and ranks_per_node; may raise
                   ArgumentError.
    Raises UserError for the first error: the file, the key and what would be right.
    """
    document = _parsed(Path(path))
    if document.pop("motet_plan", None) != _VERSION:
        raise UserError(f'{path} is no plan that this version reads: it must have "motet_plan": {_VERSION}.')
    model, cluster = document.get("model"), document.get("cluster")
    if isinstance(model, str):
        if model_at is None:
            raise UserError(f"{path}: 'model' is a path, {model!r}; here it must be the modules themselves.")
        spec = model_at(Path(path).parent / Path(model).expanduser())
        document["model"] = TypeAdapter(ModelSpec).dump_python(spec, mode="json")
    if isinstance(cluster, dict) and isinstance(cluster.get("device"), str):
        if cluster_named is None:
            raise UserError(f"{path}: 'cluster.device' is a name, {cluster['device']!r}; here it must be a table.")
        document["cluster"] = TypeAdapter(Cluster).dump_python(_looked_up(path, cluster, cluster_named), mode="json")
    try:
        return _OfPlan.model_validate_json(json.dumps({"plan": document})).plan
    except ValidationError as error:
        _fail(path, error.errors(), Plan, ())


def _looked_up(
    path: str | Path, table: dict[str, Any], cluster_named: Callable[[str, int, int | None], Cluster]
) -> Cluster:
    try:
        named = _OfCluster.model_validate_json(json.dumps({"cluster": table})).cluster
        return cluster_named(named.device, named.num_nodes, named.ranks_per_node)
    except ValidationError as error:
        _fail(path, error.errors(), _NamedCluster, ("cluster",))
    except ArgumentError as error:
        raise UserError(f"{path}: 'cluster' is wrong: {str(error).rstrip('.')}.") from error


def _parsed(path: Path) -> dict[str, Any]:
    document = read_json(path, "the plan")
    if not isinstance(document, dict):
        raise UserError(f'{path} is no plan: it must be a table with the keys "motet_plan", "model", "units", ...')
    return document


def _fail(path: str | Path, errors: Sequence[ErrorDetails], root: type, prefix: KeyPath) -> NoReturn:
    """Raise UserError for one of the errors. Unknown keys come first: a misspelt key is often missing as well.

    root: the dataclass that was read. prefix: its key in the file. The first entry of an error's `loc` is above root.
    """
    unknown = ("unexpected_keyword_argument", "extra_forbidden")
    error = next((error for error in errors if error["type"] in unknown), errors[0])
    key = error["loc"][1:]
    name, message = _text((*prefix, *key)), error["msg"].removeprefix("Value error, ").rstrip(".")
    if error["type"] in unknown:
        raise UserError(f"{path}: unknown key '{name}'{_suggestion(root, key)}")
    if error["type"] == "missing":
        raise UserError(f"{path}: '{name}' is missing and has no default.")
    if error["type"] == "value_error":
        raise UserError(f"{path}: '{name or 'plan'}' is wrong: {message}.")
    right = _NAMES.get(error["type"]) or message.removeprefix("Input should be ")
    for kind, word, limit in (("greater_than_equal", "least", "ge"), ("less_than_equal", "most", "le")):
        if error["type"] == kind:
            bound = error["ctx"][limit]
            right = f"at {word} {bound:{',' if isinstance(bound, int) else 'g'}}"
    given = "" if isinstance(error["input"], dict | list) else f", not {json.dumps(error['input'], default=str)}"
    raise UserError(f"{path}: '{name}' must be {right}{given}.")


def _text(key: KeyPath) -> str:
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in key).removeprefix(".")


def _suggestion(root: type, key: KeyPath) -> str:
    known = [field.name for field in dataclasses.fields(_class_at(root, key[:-1]))]
    close = difflib.get_close_matches(str(key[-1]), known, n=1)
    return f"; did you mean '{close[0]}'?" if close else f"; known here: {', '.join(known)}."


def _class_at(root: Any, key: KeyPath) -> Any:
    """The dataclass at a key of another dataclass."""
    for part in key:
        root = typing.get_type_hints(root)[part] if isinstance(part, str) else typing.get_args(root)[0]
        if isinstance(root, types.UnionType):
            root = typing.get_args(root)[0]
    return root


def _laid_out(value: Any, indent: int = 0, lead: int = 0) -> str:
    """JSON with as much in a line as fits. Each key of the outermost object has a line of its own.

    indent: spaces before the value's lines. lead: characters before the value in its first line.
    """
    line = json.dumps(value, ensure_ascii=False, allow_nan=False)
    if not isinstance(value, dict | list) or indent + lead + len(line) < _WIDTH or not value:
        return line
    if isinstance(value, list) and all(isinstance(entry, dict) for entry in value):
        return f"[{', '.join(_laid_out(entry, indent, lead + 1) for entry in value)}]"
    inside = " " * (indent + 2)
    if isinstance(value, dict):
        entries = [(f"{json.dumps(key, ensure_ascii=False)}: ", entry) for key, entry in value.items()]
    else:
        entries = [("", entry) for entry in value]
    lines: list[str] = []
    for head, entry in entries:
        text = head + _laid_out(entry, indent + 2, len(head))
        if lines and indent and len(inside) + len(f"{lines[-1]}, {text}") < _WIDTH and "\n" not in lines[-1] + text:
            lines[-1] += f", {text}"
        else:
            lines.append(text)
    body = f",\n{inside}".join(lines)
    opening, closing = "{}" if isinstance(value, dict) else "[]"
    return f"{opening}\n{inside}{body}\n{' ' * indent}{closing}"
