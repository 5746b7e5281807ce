"""TOML as text: finds the line of a key, takes values of the command line, and writes TOML."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from datetime import date, time
from typing import Any

from motet.core.errors import UserError
from motet.core.text_files import KeyPath, parse_toml

_HEADER = re.compile(r"^\s*(\[\[?)\s*([^\[\]]+?)\s*\]\]?\s*(#.*)?$")
_ASSIGNMENT = re.compile(
    r"^\s*((?:[A-Za-z0-9_-]+|\"[^\"]*\"|'[^']*')(?:\s*\.\s*(?:[A-Za-z0-9_-]+|\"[^\"]*\"|'[^']*'))*)\s*="
)
_BARE_KEY = re.compile(r"^[A-Za-z0-9_-]+$")
_REMOVES = "~"
"""Before a key of `--set`: it is removed, as in Hydra; TOML has no null."""


def set_key(tables: dict[str, Any], override: str) -> KeyPath:
    """Set one key in the tables, or remove it, as `--set` says; returns the key. Raises UserError for a wrong override.

    Example:
        >>> tables = {"run": {"plan": "plan.json", "steps": 5}}
        >>> set_key(tables, "run.steps=8"), set_key(tables, "~run.plan"), tables
        (('run', 'steps'), ('run', 'plan'), {'run': {'steps': 8}})
    """
    key, value = key_of(override), override.partition("=")[2].strip()
    table, removes = tables, override.startswith(_REMOVES)
    if not removes and not value:
        name = ".".join(key)
        raise UserError(
            f"--set {override}: has no value; '{_REMOVES}{name}' removes the key, and '{name}=\"\"' is an empty text."
        )
    for part in key[:-1]:
        table = table.get(part, {}) if removes else table.setdefault(part, {})
        if not isinstance(table, dict):
            raise UserError(f"--set {override}: '{part}' is a value in the recipe, not a table.")
    if not removes:
        table[key[-1]] = parse_value(value)
    elif key[-1] in table:
        del table[key[-1]]
    else:
        raise UserError(f"--set {override}: the recipe does not have this key, so there is nothing to remove.")
    return key


def key_of(override: str) -> KeyPath:
    """The key that an override sets or removes. Raises UserError for a wrong override."""
    name, equals, _ = override.removeprefix(_REMOVES).partition("=")
    key = tuple(part.strip() for part in name.split("."))
    if bool(equals) == override.startswith(_REMOVES) or not all(key):
        raise UserError(
            f"--set {override}: must be written as table.key=value, for example --set optimizer.lr=1e-3, or as "
            f"{_REMOVES}table.key, which removes the key."
        )
    return key


def line_of_key(text: str, key: KeyPath, at_least: int = 1) -> int | None:
    """The line (from 1) of `key`, or of the nearest table around it; None if the text has neither.

    at_least: how many parts of the key that table has.

    A key inside an inline table or a multi-line value has the line where the outermost value begins.
    """
    lines = _lines_of_keys(text)
    for length in range(len(key), at_least - 1, -1):
        if key[:length] in lines:
            return lines[key[:length]]
    return None


def _lines_of_keys(text: str) -> dict[KeyPath, int]:
    lines: dict[KeyPath, int] = {}
    table: KeyPath = ()
    num_tables: dict[KeyPath, int] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        if header := _HEADER.match(line):
            table = _split_key(header[2])
            if header[1] == "[[":
                lines.setdefault(table, number)
                index = num_tables.get(table, 0)
                num_tables[table] = index + 1
                table = (*table, index)
            lines.setdefault(table, number)
        elif assignment := _ASSIGNMENT.match(line):
            key = _split_key(assignment[1])
            for length in range(1, len(key) + 1):
                lines.setdefault((*table, *key[:length]), number)
    return lines


def _split_key(dotted: str) -> KeyPath:
    parts = re.findall(r"\"([^\"]*)\"|'([^']*)'|([A-Za-z0-9_-]+)", dotted)
    # One group of the three has matched; "" is a valid key.
    return tuple("".join(groups) for groups in parts)


def parse_value(text: str) -> Any:
    """A value of the command line: parsed if it is TOML, else a string, so that a word needs no quotes.

    A date or a time, which no key of a recipe is, stays as it is written: it may name a folder.
    Raises UserError for TOML that Python cannot read, such as a number of thousands of digits.
    """
    line = f"value = {text}"
    try:
        tables = tomllib.loads(line)
    except tomllib.TOMLDecodeError:
        return text
    except (ValueError, RecursionError):
        tables = {}
    if len(tables) > 1:
        return text  # A text with a second line that sets a second key is no TOML value.
    value = parse_toml(line, f"--set {text[:40]}")["value"]
    return text if isinstance(value, date | time) else value


def dump_toml(tables: Mapping[str, Any]) -> str:
    """Nested tables of plain values as TOML. None values are left out, as TOML has no null."""
    return "\n".join(_dump_table((), tables)).strip() + "\n"


def _dump_table(name: tuple[str, ...], table: Mapping[str, Any]) -> list[str]:
    plain = {key: value for key, value in table.items() if value is not None and not isinstance(value, Mapping)}
    nested = {key: value for key, value in table.items() if isinstance(value, Mapping)}
    lines = ["", f"[{'.'.join(map(_dump_key, name))}]"] if name and (plain or not nested) else []
    lines += [f"{_dump_key(key)} = {_dump_value(value)}" for key, value in plain.items()]
    for key, value in nested.items():
        lines += _dump_table((*name, key), value)
    return lines


def _dump_key(key: str) -> str:
    return key if _BARE_KEY.match(key) else json.dumps(key, ensure_ascii=False)


def _dump_value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float | int):
        return repr(value)
    if isinstance(value, Mapping):
        items = (f"{_dump_key(key)} = {_dump_value(item)}" for key, item in value.items() if item is not None)
        return f"{{{', '.join(items)}}}"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return f"[{', '.join(_dump_value(item) for item in value)}]"
    # A JSON string is a TOML basic string.
    return json.dumps(str(value), ensure_ascii=False)
