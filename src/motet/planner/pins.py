"""Pins as text: what a user writes on the command line, such as `tp=8`, `recompute=none`, `schedule=1f1b`."""

from __future__ import annotations

import difflib
import re
import typing
from collections.abc import Iterable, Sequence
from dataclasses import fields, replace

from pydantic import TypeAdapter, ValidationError

from motet.core.errors import UserError
from motet.core.module_degrees import ModuleDegrees
from motet.core.plan import Fill
from motet.core.workload import BACKBONE
from motet.planner.candidate import FieldPins, Pins
from motet.planner.field_pins import pin_text

_DEGREES = tuple(field.name for field in fields(ModuleDegrees))
_BY_MODULE = ("modules", "fields")
_KEYS = tuple(
    "strategy" if field.name == "strategies" else field.name for field in fields(Pins) if field.name not in _BY_MODULE
)
_FIELDS = tuple(field.name for field in fields(FieldPins))
_OF_MODULE = _DEGREES + _FIELDS
_MAX_DIGITS = 9


def parse_pins(texts: Sequence[str], strategies: Iterable[str]) -> Pins:
    """Pins from texts KEY=VALUE.

    A key is a field of `Pins`; or `strategy`, which may be repeated, "-" or "_" standing for " " in its name; or
    `MODULE.DEGREE`, as in image.tp (`cp` alone is the backbone's); or `MODULE.FIELD`, as in image.zero. Numbers by
    stage are written as 4,2,0, fills as RANK:ACTION<BEFORE with commas between them, or none.
    Raises UserError for an unknown key or value, and for a key that is pinned twice.

    Example:
        >>> pins = parse_pins(["tp=8", "strategy=data-parallel"], ["chain", "data parallel"])
        >>> pins.tp, pins.strategies
        (8, ('data parallel',))
        >>> parse_pins(["image.pp=2", "image.dp=1"], []).modules
        {'image': ModuleDegrees(tp=None, cp=None, pp=2, dp=1, ep=None)}
    """
    pinned: dict[str, typing.Any] = {}
    modules: dict[str, dict[str, typing.Any]] = {}
    chosen: list[str] = []
    for text in texts:
        key, equals, value = (part.strip() for part in text.partition("="))
        if not equals:
            raise UserError(f"--pin {text}: must be written as KEY=VALUE, for example --pin tp=8.")
        if key == "strategy":
            chosen.append(_one_of(text, re.sub("[-_]", " ", value), tuple(strategies)))
            continue
        if key == "cp":
            key = f"{BACKBONE}.cp"
        module, _, name = key.rpartition(".")
        name = name if module else key
        given, known = (modules.setdefault(module, {}), _OF_MODULE) if module else (pinned, _KEYS)
        if name not in known:
            raise UserError(f"--pin {text}: there is no {name!r} to pin{_suggestion(name, module)}")
        if name in given:
            raise UserError(f"--pin {text}: {key} is pinned twice; it can be pinned to one value.")
        if name in _FIELDS and module:
            given[name] = _field(text, name, value)
        else:
            given[name] = _count(text, key, value) if module else _value(text, key, value)
    degrees = {module: ModuleDegrees(**_only(_DEGREES, stated)) for module, stated in modules.items()}
    others = {module: FieldPins(**_only(_FIELDS, stated)) for module, stated in modules.items()}
    return Pins(
        strategies=tuple(dict.fromkeys(chosen)),
        modules={module: stated for module, stated in degrees.items() if stated.stated},
        fields={module: stated for module, stated in others.items() if stated.stated},
        **pinned,
    )


def pin_texts(pins: Pins) -> list[str]:
    """The pins as texts of which `parse_pins` makes the same.

    Example:
        >>> pin_texts(Pins(tp=8, fields={"image": FieldPins(blocks=(4, 2), replicated=False)}))
        ['tp=8', 'image.blocks=4,2', 'image.replicated=no']
    """
    texts = [f"strategy={name.replace(' ', '-')}" for name in pins.strategies]
    whole = {key: getattr(pins, key) for key in _KEYS if key != "strategy"}
    texts += [f"{key}={pin_text(value)}" for key, value in whole.items() if value is not None]
    for module in dict.fromkeys([*pins.fields, *pins.modules]):
        stated = {**pins.of(module).stated, **(pins.fields[module].stated if module in pins.fields else {})}
        texts += [f"{module}.{name}={pin_text(value)}" for name, value in stated.items()]
    return texts


def pins_in_words(pins: Pins) -> str:
    """The pinned fields with their values; "" where nothing is pinned.

    Example:
        >>> pins_in_words(Pins(tp=8, schedule="1f1b"))
        'tp = 8, schedule = 1f1b'
    """
    strategies = [f"strategy = {' or '.join(pins.strategies)}"] if pins.strategies else []
    texts = pin_texts(replace(pins, strategies=()))
    return ", ".join([*strategies, *(text.replace("=", " = ", 1) for text in texts)])


def _only(names: Iterable[str], stated: dict[str, typing.Any]) -> dict[str, typing.Any]:
    return {name: stated[name] for name in names if name in stated}


def _field(text: str, name: str, value: str) -> object:
    """The value of a field of a module."""
    if name == "unit":
        if not value:
            raise UserError(f"--pin {text}: a unit must have a name.")
        return value
    if name == "replicated":
        return _yes_or_no(text, value)
    parts = value.split(",") if name in ("blocks", "recompute") else [value]
    if not all(part.isdecimal() and len(part) <= _MAX_DIGITS for part in parts):
        what = "whole numbers by stage, as in 4,2,0" if name in ("blocks", "recompute") else "a whole number"
        raise UserError(f"--pin {text}: must be {what}.")
    numbers = tuple(map(int, parts))
    if name == "zero" and numbers[0] > 3:
        raise UserError(f"--pin {text}: must be 0, 1, 2 or 3.")
    if name == "cap" and numbers[0] < 1:
        raise UserError(f"--pin {text}: must be a whole number of at least 1.")
    return numbers if name in ("blocks", "recompute") else numbers[0]


def _yes_or_no(text: str, value: str) -> bool:
    return _one_of(text, value, ("yes", "no")) == "yes"


def _fills(text: str, value: str) -> tuple[Fill, ...]:
    found = [re.fullmatch(r"(\d{1,9}):([^<,]+)<([^<,]*)", part) for part in value.split(",")] if value != "none" else []
    if not all(found):
        raise UserError(f"--pin {text}: must be RANK:ACTION<BEFORE, with commas between fills, or none.")
    return tuple(Fill(int(match[1]), match[2], match[3]) for match in found if match)


def _value(text: str, key: str, value: str) -> object:
    if key == "fills":
        return _fills(text, value)
    if key == "deferred_warmup":
        return _yes_or_no(text, value)
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


def _suggestion(key: str, module: str) -> str:
    """Keys that were perhaps meant: the closest, or all, and those of modules beside those of a Plan."""
    known = _OF_MODULE if module else (*_KEYS, "cp")
    if close := difflib.get_close_matches(key, known, n=1):
        return f"; did you mean '{close[0]}'?"
    of_module = "" if module else f"; and of a module, as in image.tp, {', '.join(_OF_MODULE)}"
    return f"; there are {', '.join(known)}{of_module}."
