"""A chat template rendered without transformers, and which characters of the result are answers.

transformers takes six seconds and torch to import, workers need neither. The environment is the one in which
transformers renders templates (sandboxed, blocks trimmed, `raise_exception`, `strftime_now`, `tojson`, `{% generation
%}`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from datetime import datetime
from functools import cached_property
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from motet.core.errors import UserError
from motet.data.conversation import Turn

DEFAULT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}"
    "ASSISTANT:\n{% generation %}{{ message['content'] }}{{ eos_token }}{% endgeneration %}\n"
    "{% elif message['role'] == 'user' %}USER:\n{{ message['content'] }}\n"
    "{% else %}{{ message['content'] }}\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}ASSISTANT:\n{% endif %}"
)
"""For tokenizers that bring no template: roles in plain words, each answer ended by the end-of-sequence token."""

_GENERATION_TAG = re.compile(r"\{%[-+]?\s*generation\b")
# Private-use characters: no template looks for them, strips them or writes them.
_OPEN, _CLOSE = "\ue0f0", "\ue0f1"


class ChatTemplate:
    """source: the Jinja template. special_tokens: the variables it may use (bos_token, eos_token, ...)."""

    def __init__(self, source: str, special_tokens: dict[str, str]) -> None:
        self.source = source
        self.special_tokens = special_tokens

    def __getstate__(self) -> dict[str, Any]:
        return {"source": self.source, "special_tokens": self.special_tokens}

    def render(self, turns: Sequence[Turn], *, generation_prompt: bool = False) -> str:
        """The text of a conversation. Raises UserError if the template refuses it."""
        return self._render(turns, generation_prompt, marked=False)

    def render_with_answers(self, turns: Sequence[Turn]) -> tuple[str, list[tuple[int, int]], bool]:
        """The text, the spans [start, end) of the answers in it, and whether the template itself marks them.

        If it does ({% generation %}), a span is what it marks, the end token included if it says so. If not, a span is
        the answer's own text, found by rendering a second time with marks in the place of the answers.
        Raises UserError if the template refuses the conversation, or rewrites answers beyond recognition.
        """
        if self._marks_answers:
            return *_unmark(self._render(turns, False, marked=True)), True
        text = self._render(turns, False, marked=False)
        stand_ins = [Turn(turn.role, _OPEN) if turn.role == "assistant" else turn for turn in turns]
        between = self._render(stand_ins, False, marked=False).split(_OPEN)
        answers = [turn.text for turn in turns if turn.role == "assistant"]
        return text, _find_answers(text, between, answers), False

    @cached_property
    def _marks_answers(self) -> bool:
        return _GENERATION_TAG.search(self.source) is not None

    def _render(self, turns: Sequence[Turn], generation_prompt: bool, *, marked: bool) -> str:
        template = self._marked if marked else self._plain
        messages = [{"role": turn.role, "content": turn.text} for turn in turns]
        try:
            return template.render(
                messages=messages,
                add_generation_prompt=generation_prompt,
                tools=None,
                documents=None,
                **self.special_tokens,
            )
        except jinja2.TemplateError as error:
            raise UserError(f"the tokenizer's chat template refuses the conversation: {error}") from None

    @cached_property
    def _plain(self) -> jinja2.Template:
        return _environment(False).from_string(self.source)

    @cached_property
    def _marked(self) -> jinja2.Template:
        return _environment(True).from_string(self.source)


class _Generation(jinja2.ext.Extension):
    """The tag {% generation %} ... {% endgeneration %}: around what the assistant writes; marks it in `marked` mode."""

    tags = {"generation"}  # noqa: RUF012 (jinja's own signature)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_wrap"), [], [], body).set_lineno(line)

    def _wrap(self, caller: Any) -> str:
        marks = self.environment.motet_marks  # type: ignore[attr-defined]
        return f"{_OPEN}{caller()}{_CLOSE}" if marks else str(caller())


def _environment(marked: bool) -> jinja2.Environment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.extend(motet_marks=marked)
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _to_json(value: Any, **options: Any) -> str:
    # Jinja's own filter escapes HTML.
    return json.dumps(value, **({"ensure_ascii": False} | options))


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _unmark(marked: str) -> tuple[str, list[tuple[int, int]]]:
    """The text without the marks, and the spans in it that stood between them."""
    pieces = marked.replace(_CLOSE, _OPEN).split(_OPEN)
    spans, at = [], 0
    for number, piece in enumerate(pieces):
        if number % 2:
            spans.append((at, at + len(piece)))
        at += len(piece)
    return "".join(pieces), spans


def _find_answers(text: str, between: list[str], answers: list[str]) -> list[tuple[int, int]]:
    """Where each answer stands, given what stands before, between and after them. A template may have stripped them."""
    spans, at = [], len(between[0])
    intact = len(between) == len(answers) + 1 and text.startswith(between[0])
    for answer, following in zip(answers, between[1:]):
        forms = (answer, answer.strip(), answer.rstrip(), answer.lstrip())
        form = next((form for form in forms if text.startswith(form + following, at)), None)
        if form is None:
            intact = False
            break
        spans.append((at, at + len(form)))
        at += len(form) + len(following)
    if not intact or at != len(text):
        raise UserError(
            "the tokenizer's chat template rewrites answers, so that they cannot be found in its output; "
            "mark them in the template by {% generation %} and {% endgeneration %}"
        )
    return spans
