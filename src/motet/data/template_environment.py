"""The Jinja environment of chat templates: transformers' own, with a bound on what a template may do.

A template comes with a model that somebody published. A broken one must end in an error, not in a full memory or a loop
without end, and the same conversation must give the same text tomorrow.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

_MOST_CHARACTERS = 1 << 24
_MOST_STEPS = 1 << 20


class Rendering:
    """One rendering of a template. marks: two characters for around what {% generation %} encloses, or none."""

    def __init__(self, marks: str = "") -> None:
        self.opening, self.closing = marks or ("", "")
        self._steps_left = _MOST_STEPS

    def collect(self, written: Iterable[str]) -> str:
        """What a template writes, piece by piece. Raises TemplateError when it becomes too long."""
        pieces, num_characters = [], 0
        for piece in written:
            pieces.append(piece)
            num_characters += len(piece)
            if num_characters > _MOST_CHARACTERS:
                raise jinja2.TemplateError(f"it writes more than {_MOST_CHARACTERS:,} characters")
        return "".join(pieces)

    def count_steps(self, num_steps: int) -> None:
        """Raises TemplateError when the loops over ranges of numbers become too long in all."""
        self._steps_left -= num_steps
        if self._steps_left < 0:
            raise jinja2.TemplateError(f"it counts through more than {_MOST_STEPS:,} numbers")


class _Generation(jinja2.ext.Extension):
    """The tag {% generation %} ... {% endgeneration %}: around what the assistant writes."""

    tags = {"generation"}  # noqa: RUF012 (jinja's own signature)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("_wrap", [jinja2.nodes.ContextReference()])
        return jinja2.nodes.CallBlock(call, [], [], body).set_lineno(line)

    def _wrap(self, context: jinja2.runtime.Context, caller: Any) -> str:
        rendering = context["motet_rendering"]
        return f"{rendering.opening}{caller()}{rendering.closing}"


class _Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(["*", "**"])

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        """Multiplies and raises to powers, unless the result would fill the memory."""
        lengths = [len(side) for side in (left, right) if isinstance(side, str | list | tuple)]
        factors = [side for side in (left, right) if isinstance(side, int)]
        if (lengths and factors and lengths[0] * factors[0] > _MOST_CHARACTERS) or (operator == "**" and right > 64):
            raise jinja2.TemplateError("it makes a value that would fill the memory")
        return super().call_binop(context, operator, left, right)


def environment() -> jinja2.Environment:
    made = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols])
    made.filters["tojson"] = _to_json
    made.globals["raise_exception"] = _raise_exception
    made.globals["range"] = _range
    # Without `strftime_now` many templates take a date of their own; the others say that it is undefined.
    del made.globals["lipsum"], made.filters["random"]
    return made


@jinja2.pass_context
def _range(context: jinja2.runtime.Context, *bounds: int) -> range:
    numbers = range(*bounds)
    context["motet_rendering"].count_steps(len(numbers))
    return numbers


def _to_json(value: Any, **options: Any) -> str:
    # Jinja's own filter escapes HTML.
    return json.dumps(value, **({"ensure_ascii": False} | options))


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)
