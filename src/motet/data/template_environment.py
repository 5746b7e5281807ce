"""The Jinja environment of chat templates: that of transformers, with bounds.

A template comes with a published model. A broken template must end in an error, not in a full memory or an endless
loop, and a conversation must give the same text every day. So there is a bound on the size of every text and list that
an operator, a call, a filter or a block makes, and on the number of passes through loops.
"""

from __future__ import annotations

import functools
import inspect
import json
import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import jinja2.visitor

_MAX_CHARACTERS = 1 << 24
_MAX_STEPS = 1 << 22
# A width in a format, "%10000000000d" or "{:>10000000000}", or as an argument, "%*d".
_WIDE_FORMAT = re.compile(r"\d{8}|%[^%a-zA-Z]*\*")
_FORMATS = ("format", "format_map")
# Functions that put one text into another many times.
_MULTIPLIED = ("replace", "join", "indent")


class Rendering:
    """One rendering of a template. marks: two characters to put around {% generation %} blocks, or none."""

    def __init__(self, marks: str = "") -> None:
        self.opening, self.closing = marks or ("", "")
        self._steps_left = _MAX_STEPS

    def collect(self, written: Iterable[str]) -> str:
        """Join the pieces that a template writes. Raises TemplateError when they become too long."""
        pieces, num_characters = [], 0
        for piece in written:
            pieces.append(piece)
            num_characters += len(piece)
            if num_characters > _MAX_CHARACTERS:
                raise jinja2.TemplateError(f"it writes more than {_MAX_CHARACTERS:,} characters")
        return "".join(pieces)

    def count_steps(self, num_steps: int) -> None:
        """Count passes through loops. Raises TemplateError when there are too many in all."""
        self._steps_left -= num_steps
        if self._steps_left < 0:
            raise jinja2.TemplateError(f"its loops take more than {_MAX_STEPS:,} passes in all")


class _Generation(jinja2.ext.Extension):
    """The tag {% generation %} ... {% endgeneration %} around the assistant's text."""

    tags = {"generation"}  # noqa: RUF012 (jinja's own signature)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("_wrap", [jinja2.nodes.ContextReference()])
        return jinja2.nodes.CallBlock(call, [], [], body).set_lineno(line)

    def _wrap(self, context: jinja2.runtime.Context, caller: Any) -> str:
        rendering = context["motet_rendering"]
        return f"{rendering.opening}{caller()}{rendering.closing}"


class _Bounds(jinja2.visitor.NodeTransformer):
    """Makes compiled templates call functions of the environment for `a ~ b` and for loops."""

    def visit_Concat(self, node: jinja2.nodes.Concat) -> jinja2.nodes.Node:
        self.generic_visit(node)
        return _called("concatenate", *node.nodes).set_lineno(node.lineno)

    def visit_For(self, node: jinja2.nodes.For) -> jinja2.nodes.Node:
        self.generic_visit(node)
        node.iter = _called("counted", jinja2.nodes.ContextReference(), node.iter).set_lineno(node.lineno)
        return node


def _called(name: str, *arguments: jinja2.nodes.Expr) -> jinja2.nodes.Call:
    return jinja2.nodes.Call(jinja2.nodes.EnvironmentAttribute(name), list(arguments), [], None, None)


class _Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def _parse(self, source: str, name: str | None, filename: str | None) -> jinja2.nodes.Template:
        parsed: jinja2.nodes.Template = _Bounds().visit(super()._parse(source, name, filename))
        return parsed

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        """Compute the result, unless it would fill the memory."""
        lengths = [len(side) for side in (left, right) if isinstance(side, str | list | tuple)]
        numbers = [side for side in (left, right) if isinstance(side, int)]
        if operator == "%" and isinstance(left, str):
            _check_format(left)
        elif operator == "+":
            _check_length(sum(lengths))
        elif operator == "*" and lengths and numbers:
            _check_length(lengths[0] * numbers[0])
        elif operator in ("*", "**") and len(numbers) == 2:
            num_bits = [number.bit_length() for number in numbers]
            _check_length(sum(num_bits) << 8 if operator == "*" else num_bits[0] * max(right, 0) << 8)
        return super().call_binop(context, operator, left, right)

    def call(*arguments: Any, **options: Any) -> Any:
        # Positional arguments only, as in the sandbox: a template may pass options of any name.
        function = inspect.unwrap(arguments[2])
        subject = getattr(function, "__self__", None)
        _check_call(getattr(function, "__name__", ""), (subject, *arguments[3:], *options.values()))
        return _bounded(jinja2.sandbox.ImmutableSandboxedEnvironment.call(*arguments, **options))

    @staticmethod
    def concat(pieces: Iterable[str]) -> str:  # type: ignore[override]
        """Join the pieces that a block writes."""
        pieces = list(pieces)
        _check_length(sum(map(len, pieces)))
        return "".join(pieces)

    def concatenate(self, *parts: Any) -> str:
        """`a ~ b`."""
        return self.concat(map(str, parts))

    def counted(self, context: jinja2.runtime.Context, items: Any) -> Any:
        """The items of a loop, counted."""
        if hasattr(items, "__len__"):
            context["motet_rendering"].count_steps(len(items))
        return items


def _check_length(length: int) -> None:
    if length > _MAX_CHARACTERS:
        raise jinja2.TemplateError("it makes a value that would fill the memory")


def _check_format(text: str) -> None:
    if _WIDE_FORMAT.search(text):
        raise jinja2.TemplateError(f"it writes with a width that would fill the memory ({text[:40]!r})")


def _check_call(name: str, values: Sequence[Any]) -> None:
    """Raise TemplateError for a method or a filter whose result would be too large."""
    for value in values:
        if isinstance(value, int):
            # It may be a width or a count.
            _check_length(abs(value))
    if name in _FORMATS:
        _check_format(str(values[0]))
    if name in _MULTIPLIED:
        longest = sorted(len(value) for value in values if isinstance(value, str | list | tuple))[-2:]
        _check_length(math.prod(longest) if len(longest) > 1 else 0)


def _bounded(value: Any) -> Any:
    if isinstance(value, str | list | tuple):
        _check_length(len(value))
    return value


def _bounded_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter with the bounds of a call. `wraps` keeps jinja's marks, which say which arguments the filter gets."""

    @functools.wraps(function)
    def filtered(*arguments: Any, **options: Any) -> Any:
        _check_call(name, (*arguments, *options.values()))
        return _bounded(function(*arguments, **options))

    return filtered


def environment() -> jinja2.Environment:
    """A new environment with all bounds."""
    bounded = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols])
    bounded.filters["tojson"] = _to_json
    bounded.globals["raise_exception"] = _raise_exception
    bounded.globals["range"] = _range
    # There is no `strftime_now`: many templates then use a fixed date; the others raise that it is undefined.
    del bounded.globals["lipsum"], bounded.filters["random"]
    bounded.filters = {name: _bounded_filter(name, function) for name, function in bounded.filters.items()}
    return bounded


def _range(*bounds: int) -> range:
    numbers = range(*bounds)
    _check_length(len(numbers))
    return numbers


def _to_json(value: Any, **options: Any) -> str:
    # Jinja's own filter escapes HTML.
    return json.dumps(value, **({"ensure_ascii": False} | options))


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)
