"""Values for every key of a schema, right and wrong, and which of them the schema takes. Used by bad_inputs.py.

A schema is JSON schema, as pydantic writes it of its models and of dataclasses.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Key = tuple[str | int, ...]
Node = Mapping[str, Any]

HUGE = 10**30
"""More than any key takes."""
_LABELS = {10**12: "10**12", 10**9: "10**9", HUGE: "10**30"}
_OF_NUMBERS = ("word", True, [1], {"a": 1}, "")
_OF_OTHERS = (-1, 3, 1.5, "unknown word", True, [1], ["unknown word"], {"a": 1}, math.nan)


@dataclass(frozen=True)
class Leaf:
    """A key and what the schema says of its value."""

    key: Key
    node: Node

    @property
    def name(self) -> str:
        return ".".join(map(str, self.key))


def label(value: Any) -> str:
    """What a value is called in the name of a case."""
    if isinstance(value, int) and not isinstance(value, bool) and value in _LABELS:
        return _LABELS[value]
    return json.dumps(value)


def leaves(schema: Node, names: Mapping[str, str], key: Key = (), root: Node | None = None) -> Iterator[Leaf]:
    """Every key that may stand in a document, its tables included, tables before what is in them.

    names: for each table of free keys, the key to take in it; a table that is not named is taken as it is.
    """
    root = schema if root is None else root
    options = [*_options(schema, root)]
    if key:
        yield Leaf(key, {"anyOf": options, "$defs": root.get("$defs", {})})
    for option in options:
        for name, node in option.get("properties", {}).items():
            yield from leaves(node, names, (*key, name), root)
        inner = option.get("additionalProperties")
        if isinstance(inner, Mapping) and key and key[-1] in names:
            yield from leaves(inner, names, (*key, names[str(key[-1])]), root)
        items = option.get("items")
        if isinstance(items, Mapping):
            yield from leaves(items, names, (*key, 0), root)


def _options(node: Node, root: Node) -> Iterator[Node]:
    """The nodes of which a value must be one, without references; null is left out, as TOML has no word for it."""
    if "$ref" in node:
        yield from _options(root["$defs"][node["$ref"].rpartition("/")[2]], root)
    elif "anyOf" in node:
        for option in node["anyOf"]:
            yield from _options(option, root)
    elif node.get("type") != "null":
        yield node


def holds(node: Node, value: Any, root: Node | None = None) -> bool:
    """Whether a schema takes a value, read strictly: no "8" for 8, no true for 1."""
    root = node if root is None else root
    return any(_holds_one(option, value, root) for option in _options(node, root))


def _holds_one(node: Node, value: Any, root: Node) -> bool:
    if "const" in node or "enum" in node:
        words = node.get("enum", [node.get("const")])
        return any(word == value and type(word) is type(value) for word in words)
    kind = node.get("type")
    if kind in ("integer", "number"):
        taken = (int,) if kind == "integer" else (int, float)
        return isinstance(value, taken) and not isinstance(value, bool) and _in_bounds(node, value)
    if kind == "array":
        return isinstance(value, list) and _holds_all(node, value, root)
    if kind == "object":
        return isinstance(value, dict) and _holds_table(node, value, root)
    return isinstance(value, {"string": str, "boolean": bool}.get(str(kind), object))


def _in_bounds(node: Node, value: float) -> bool:
    return (
        math.isfinite(value)
        and node.get("minimum", -math.inf) <= value <= node.get("maximum", math.inf)
        and node.get("exclusiveMinimum", -math.inf) < value < node.get("exclusiveMaximum", math.inf)
    )


def _holds_all(node: Node, values: Sequence[Any], root: Node) -> bool:
    first = node.get("prefixItems", [])
    of_each = [*first, *[node.get("items", {})] * (len(values) - len(first))]
    return node.get("minItems", 0) <= len(values) <= node.get("maxItems", math.inf) and all(
        holds(each, value, root) for each, value in zip(of_each, values)
    )


def _holds_table(node: Node, table: Mapping[str, Any], root: Node) -> bool:
    known, others = node.get("properties", {}), node.get("additionalProperties", True)
    if any(name not in table for name in node.get("required", ())):
        return False
    for name, value in table.items():
        inner = known.get(name, others)
        if inner is False or (inner is not True and not holds(inner, value, root)):
            return False
    return True


def values(leaf: Leaf, rng: random.Random, num_drawn: int = 2) -> list[Any]:
    """What is tried at a key: at its bounds and past them, nan, a huge number, and a few others, drawn."""
    numbers = [option for option in _options(leaf.node, leaf.node) if option.get("type") in ("integer", "number")]
    tried: list[Any] = []
    for node in numbers:
        tried += [math.nan, HUGE, *_around(node)]
        tried += rng.sample([math.inf, -math.inf, -1, 0, 10**12, 1.5, *_OF_NUMBERS], num_drawn)
    if not numbers:
        tried += rng.sample(_OF_OTHERS, num_drawn)
        tried += [word for option in _options(leaf.node, leaf.node) for word in option.get("enum", ())]
        kinds = {option.get("type") for option in _options(leaf.node, leaf.node)}
        tried += [True, False] if "boolean" in kinds else [""] if "string" in kinds else []
    return list({label(value): value for value in tried}.values())


def tried(leaf: Leaf, rng: random.Random, num_drawn: int = 2) -> Iterator[tuple[Key, Any, bool]]:
    """The same with the key, and whether the schema takes it; of a table, a key that it does not have as well."""
    for value in values(leaf, rng, num_drawn):
        yield leaf.key, value, holds(leaf.node, value)
    if any("properties" in option for option in leaf.node["anyOf"]):
        yield (*leaf.key, "unknown_key"), 1, False


def _around(node: Node) -> Iterator[float]:
    """At the bounds of a number, and past them."""
    step = 1 if node["type"] == "integer" else 0
    for least, sign in (("minimum", -1), ("maximum", 1)):
        if least in node:
            bound = int(node[least]) if step else float(node[least])
            yield bound
            yield bound + sign * (step or abs(bound) * 1e-6 or 1e-300)
    for beyond, sign in (("exclusiveMinimum", 1), ("exclusiveMaximum", -1)):
        if beyond in node:
            bound = int(node[beyond]) if step else float(node[beyond])
            yield bound
            yield bound + sign * (step or (abs(bound) or 1.0) * 1e-6)
