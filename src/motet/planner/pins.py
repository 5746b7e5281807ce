"""Pins as text: what a user writes on the command line, such as `tp=8`, `recompute=none`, `schedule=1f1b`."""

from __future__ import annotations

import difflib
import typing
from collections.abc import Iterable, Sequence
from dataclasses import fields

from pydantic import TypeAdapter, ValidationError

from motet.core.errors import UserError
from motet.core.module_degrees import ModuleDegrees
from motet.planner.candidate import Pins

_DEGREES = tuple(field.name for field in fields(ModuleDegrees))
_KEYS = tuple(
    "strategy" if field.name == "strategies" else field.name for field in fields(Pins) if field.name != "modules"
)
_MAX_DIGITS = 9


def parse_pins(texts: Sequence[str], strategies: Iterable[str]) -> Pins:
    """Pins from texts KEY=VALUE.

    A key is a field of `Pins`; or `strategy`, which may be repeated, "-" standing for " " in its name; or
    `MODULE.DEGREE`, as in image.tp.
    Raises UserError for an unknown key or value, and for a key that is pinned twice.

    Example:
        >>> pins = parse_pins(["tp=8", "strategy=data-parallel"], ["chain", "data parallel"])
        >>> pins.tp, pins.strategies
        (8, ('data parallel',))
        >>> parse_pins(["image.pp=2", "image.dp=1"], []).modules
        {'image': ModuleDegrees(tp=None, cp=None, pp=2, dp=1)}
    """
    pinned: dict[str, typing.Any] = {}
    modules: dict[str, dict[str, typing.Any]] = {}
    chosen: list[str] = []
    for text in texts:
        key, equals, value = (part.strip() for part in text.partition("="))
        if not equals:
            raise UserError(f"--pin {text}: must be written as KEY=VALUE, for example --pin tp=8.")
        if key == "strategy":
            chosen.append(_one_of(text, value.replace("-", " "), tuple(strategies)))
            continue
        module, _, name = key.rpartition(".")
        name = name if module else key
        given, known = (modules.setdefault(module, {}), _DEGREES) if module else (pinned, _KEYS)
        if name not in known:
            raise UserError(f"--pin {text}: there is no {name!r} to pin{_suggestion(name, known)}")
        if name in given:
            raise UserError(f"--pin {text}: {key} is pinned twice; it can be pinned to one value.")
        given[name] = _count(text, key, value) if module else _value(text, key, value)
    degrees = {module: ModuleDegrees(**stated) for module, stated in modules.items()}
    return Pins(strategies=tuple(dict.fromkeys(chosen)), modules=degrees, **pinned)


def pins_in_words(pins: Pins) -> str:
    """The pinned fields with their values; "" where nothing is pinned.

    Example:
        >>> pins_in_words(Pins(tp=8, schedule="1f1b"))
        'tp = 8, schedule = 1f1b'
    """
    values = {name: getattr(pins, name) for name in Pins.__dataclass_fields__ if name != "modules"}
    pinned = [
        f"{'strategy' if name == 'strategies' else name} = {' or '.join(value) if isinstance(value, tuple) else value}"
        for name, value in values.items()
        if value not in (None, ())
    ]
    pinned += [
        f"{module}.{name} = {value}" for module, stated in pins.modules.items() for name, value in stated.stated.items()
    ]
    return ", ".join(pinned)


def _value(text: str, key: str, value: str) -> object:
    hint = typing.get_type_hints(Pins)[key]
    kinds = [kind for kind in typing.get_args(hint) if kind is not type(None)]
    if kinds == [int]:
        return _count(text, key, value)
    try:
        return TypeAdapter(hint).validate_python(value)
    except ValidationError:
        return _one_of(text, value, tuple(str(choice) for kind in kinds for choice in typing.get_args(kind)))


def _count(text: str, key: str, value: str) -> int:
    if not value.isdecimal() or len(value) > _MAX_DIGITS or int(value) < 1:
        raise UserError(f"--pin {text}: {key} must be a whole number of at least 1, and below a billion.")
    return int(value)


def _one_of(text: str, value: str, choices: Sequence[str]) -> str:
    if value not in choices:
        raise UserError(f"--pin {text}: must be one of {', '.join(choices)}.")
    return value


def _suggestion(key: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(key, known, n=1)
    return f"; did you mean '{close[0]}'?" if close else f"; there are {', '.join(known)}."
