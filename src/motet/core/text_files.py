"""Reading of text, JSON and TOML that users wrote. Every kind of damage gives a UserError of one sentence.

JSON is read strictly: UTF-8, each key once in an object, finite numbers, whole characters. The depth of nesting is
limited in both formats, so that no recursive function runs out of stack.
"""

from __future__ import annotations

import json
import math
import os
import re
import sys
import tomllib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from motet.core.errors import UserError
from motet.core.files import IrregularFile, open_regular

KeyPath = tuple[str | int, ...]
"""The keys and indexes that lead to a value in nested tables and lists."""

_MAX_LEVELS = 100
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_UTF_16_MARKS = (b"\xff\xfe", b"\xfe\xff")
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_ESCAPED_NULL = re.compile(r"\\(?:u0000|U00000000)")
_TOO_DEEP = f"nests lists and tables more than {_MAX_LEVELS} deep"


class _Damaged(ValueError):
    """A damaged text. The message is a clause that follows the name of the file. line: 0 if it is unknown."""

    def __init__(self, reason: str, line: int = 0) -> None:
        super().__init__(reason)
        self.line = line


def read_text(path: Path, what: str = "the file") -> str:
    """The text of a UTF-8 file, with "\\n" at the end of lines. Raises UserError: `what` the file is, its path, why."""
    try:
        text = _bytes(path, what).removeprefix(_BYTE_ORDER_MARK).decode()
    except UnicodeDecodeError as error:
        raise UserError(f"Cannot read {what} {path}: it {_not_utf_8(error)}.") from None
    return text.replace("\r\n", "\n").replace("\r", "\n")


def read_json(path: Path, what: str = "the file", *, infinite: bool = False) -> Any:
    """The value of a JSON file. infinite: it may have NaN, Infinity and -Infinity, as Python writes them.

    Raises UserError as `read_text` does, with the line.
    """
    return _read(partial(_json, constant=float) if infinite else _json, _bytes(path, what), str(path))


def read_optional_object(path: Path) -> dict[str, Any]:
    """The object of a JSON file; {} if there is no file. A broken link counts as a file.

    Raises UserError as `read_json` does, and for any other value.
    """
    if not os.path.lexists(path):
        return {}
    value = read_json(path)
    if not isinstance(value, dict):
        raise UserError(f"{path}: must hold a JSON object")
    return value


def parse_json(data: bytes, where: str) -> Any:
    """The value of a JSON text. Raises UserError with `where`, the name of the text, and the line if it has several."""
    return _read(_json, data, where)


def parse_toml(text: str, where: str) -> dict[str, Any]:
    """The tables of a TOML text. Raises UserError with `where`, the name of the text."""
    tables: dict[str, Any] = _read(_toml, text, where)
    if _ESCAPED_NULL.search(text) and "\0" in "".join(_texts(tables)):
        raise UserError(f"{where}: has a null character (\\u0000) in a text, which no file name or option can hold")
    return tables


def _bytes(path: Path, what: str) -> bytes:
    try:
        with open_regular(path) as file:
            return file.read()
    except (OSError, ValueError) as error:
        # A ValueError: the path holds a null character.
        reason = f"it {error.strerror}" if isinstance(error, IrregularFile) else getattr(error, "strerror", error)
        raise UserError(f"Cannot read {what} {path}: {reason}.") from None


def _read(read: Callable[[Any], Any], text: Any, where: str) -> Any:
    try:
        value = read(text)
        _check_depth(value)
    except _Damaged as error:
        line = f", line {error.line}" if error.line else ""
        raise UserError(f"{where}{line}: {error}") from None
    except RecursionError:
        raise UserError(f"{where}: {_TOO_DEEP}") from None
    except ValueError:
        raise UserError(f"{where}: has a number of more than {sys.get_int_max_str_digits():,} digits") from None
    return value


def _json(data: bytes, constant: Callable[[str], float] | None = None) -> Any:
    try:
        text = data.removeprefix(_BYTE_ORDER_MARK).decode()
    except UnicodeDecodeError as error:
        raise _Damaged(_not_utf_8(error)) from None
    if not text.strip():
        raise _Damaged("is empty, but must be JSON")
    try:
        value = json.loads(text, object_pairs_hook=_object, parse_constant=constant or _constant, parse_float=_finite)
    except json.JSONDecodeError as error:
        line = error.lineno if "\n" in text else 0
        raise _Damaged(f"is no JSON ({error.msg}, column {error.colno})", line) from None
    if surrogate := _SURROGATE.search(text):
        _check_characters(value, text[surrogate.start() : surrogate.start() + 6])
    return value


def _toml(text: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text, parse_float=_finite)
    except tomllib.TOMLDecodeError as error:
        raise _Damaged(f"is no valid TOML: {error}") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in value if names.count(name) > 1)
        raise _Damaged(f"has the key '{twice}' twice in one object; each key must stand once")
    return value


def _constant(name: str) -> NoReturn:
    raise _Damaged(f"has {name}, for which JSON has no word; write a finite number or null")


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value) and "inf" not in text:
        raise _Damaged(f"has the number {text[:40]}, which is too large")
    return value


def _check_characters(value: Any, first: str) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise _Damaged(f"has half of a character ({first} or the like without its other half)") from None


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(_MAX_LEVELS + 1):
        nested = [entry for entry in level if isinstance(entry, dict | list)]
        level = [inner for entry in nested for inner in (entry.values() if isinstance(entry, dict) else entry)]
        if not level:
            return
    raise _Damaged(_TOO_DEEP)


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        yield from value
    if isinstance(value, dict | list):
        for entry in value.values() if isinstance(value, dict) else value:
            yield from _texts(entry)
    if isinstance(value, str):
        yield value


def _not_utf_8(error: UnicodeDecodeError) -> str:
    if error.object[:2] in _UTF_16_MARKS:
        return "is UTF-16; save it as UTF-8"
    return f"is not UTF-8 (byte {error.start}); save it as UTF-8"
