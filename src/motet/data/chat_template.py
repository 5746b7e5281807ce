"""A chat template rendered without transformers, and which characters of the result are answers.

transformers takes six seconds and torch to import, workers need neither. The environment is the one in which
transformers renders templates (sandboxed, blocks trimmed, `raise_exception`, `tojson`, `{% generation %}`), less what
would make tokens differ from day to day: today's date, and random choices.

A turn is given to the template as a text, or as a list of parts where it holds an item that the template writes by
itself (`data/media_tokens.py`), or where the template understands nothing else.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence, Set
from dataclasses import replace
from functools import cached_property
from itertools import groupby, islice
from typing import Any

import jinja2

from motet.core.errors import UserError
from motet.data.conversation import TEXT, Turn
from motet.data.template_environment import Rendering, environment

DEFAULT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}"
    "ASSISTANT:\n{% generation %}{{ message['content'] }}{{ eos_token }}{% endgeneration %}\n"
    "{% elif message['role'] == 'user' %}USER:\n{{ message['content'] }}\n"
    "{% else %}{{ message['content'] }}\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}ASSISTANT:\n{% endif %}"
)
"""For tokenizers that bring no template: roles in plain words, each answer ended by the end-of-sequence token."""

NO_PARTS: Set[str] = frozenset()
_PRIVATE_USE = range(0xE000, 0xF900)
_MAX_REASON_CHARACTERS = 200


class ChatTemplate:
    """source: the Jinja template. special_tokens: the variables it may use (bos_token, eos_token, ...).

    parts, below: the modalities whose items are given to the template as parts, not as text.
    """

    def __init__(self, source: str, special_tokens: dict[str, str]) -> None:
        self.source = source
        self.special_tokens = special_tokens

    def __getstate__(self) -> dict[str, Any]:
        return {"source": self.source, "special_tokens": self.special_tokens}

    def check(self) -> None:
        """Raises UserError if the template is no Jinja."""
        _compiled(self.source)

    def render(self, turns: Sequence[Turn], parts: Set[str] = NO_PARTS, *, generation_prompt: bool = False) -> str:
        """The text of a conversation. Raises UserError if the template refuses it, or leaves out a turn."""
        text = self._render(turns, parts, generation_prompt=generation_prompt)
        self._check_kept(turns, parts, text, generation_prompt)
        return text

    def render_with_answers(
        self, turns: Sequence[Turn], parts: Set[str] = NO_PARTS
    ) -> tuple[str, list[tuple[int, int]], bool]:
        """The text, the spans [start, end) of what is learned in it, and whether the template itself marks them.

        If it does ({% generation %}), a span is what it marks, the end token included if it says so. If not, a span is
        the answer's own text, found by rendering a second time with marks in the place of the answers.
        Raises UserError if the template refuses the conversation, leaves out a turn, or rewrites answers beyond
        recognition.
        """
        opening, closing = self._marks(turns, 2)
        text, spans = _unmark(self._render(turns, parts, marks=opening + closing), opening, closing)
        self._check_kept(turns, parts, text, False)
        if spans:
            return text, self._spans_with_loss(turns, parts, spans, opening, closing), True
        answers = [turn for turn in turns if turn.role == "assistant"]
        if any(kind in parts for turn in answers for kind, _ in turn.pieces):
            raise UserError(
                "an answer holds media, and the tokenizer's chat template does not say where answers end; mark them in "
                "the template by {% generation %} and {% endgeneration %}"
            )
        stand_ins = [replace(turn, text=opening) if turn.role == "assistant" else turn for turn in turns]
        between = self._render(stand_ins, parts).split(opening)
        found = _find_answers(text, between, [turn.text for turn in answers])
        return text, [span for span, turn in zip(found, answers) if turn.has_loss], False

    def try_messages(self, messages: list[dict[str, Any]], *, generation_prompt: bool = False) -> str | None:
        """The text of messages as the template takes them; None if it refuses them."""
        try:
            return self._render_messages(messages, Rendering(), generation_prompt)
        except UserError:
            return None

    @cached_property
    def roles_in_parts(self) -> frozenset[str]:
        """Roles whose text the template writes only if it is given as a list of parts, as many multimodal ones do."""
        *marks, dumped = map(chr, _PRIVATE_USE[:4])
        found = set()
        for roles in (("user", "assistant"), ("system", "user", "assistant")):
            said = dict(zip(roles, marks))
            as_text = self.try_messages([{"role": role, "content": mark} for role, mark in said.items()]) or ""
            part = {"type": TEXT, "dumped": dumped}
            listed = [{"role": role, "content": [part | {TEXT: mark}]} for role, mark in said.items()]
            as_parts = self.try_messages(listed)
            # A template for texts alone may write a list out as it stands.
            if as_parts is not None and dumped not in as_parts:
                found |= {role for role, mark in said.items() if mark in as_parts and mark not in as_text}
        return frozenset(found)

    @cached_property
    def _template(self) -> jinja2.Template:
        return _compiled(self.source)

    def _render(
        self, turns: Sequence[Turn], parts: Set[str], *, marks: str = "", generation_prompt: bool = False
    ) -> str:
        messages = [{"role": turn.role, "content": self._content(turn, parts)} for turn in turns]
        return self._render_messages(messages, Rendering(marks), generation_prompt)

    def _content(self, turn: Turn, parts: Set[str]) -> str | list[dict[str, str]]:
        pieces = turn.pieces
        if turn.role not in self.roles_in_parts and all(kind not in parts for kind, _ in pieces):
            return turn.text
        content: list[dict[str, str]] = []
        # What is no part by itself is text, and texts that follow on each other are one.
        for kind, run in groupby(pieces, key=lambda piece: piece[0] if piece[0] in parts else TEXT):
            if kind == TEXT:
                content.append({"type": TEXT, TEXT: "".join(text for _, text in run)})
            else:
                content += [{"type": kind} for _ in run]
        return content

    def _render_messages(self, messages: list[dict[str, Any]], rendering: Rendering, generation_prompt: bool) -> str:
        try:
            written = self._template.generate(
                messages=messages,
                add_generation_prompt=generation_prompt,
                tools=None,
                documents=None,
                motet_rendering=rendering,
                **self.special_tokens,
            )
            return rendering.collect(written)
        except UserError:
            raise
        # A template is a program: whatever it runs into, it is not Motet that is wrong.
        except Exception as error:
            reason = _reason(error)
            if "strftime_now" in reason:
                reason = "it asks for today's date, so tokens would differ from day to day; write a date into it"
            raise UserError(f"the tokenizer's chat template refuses the conversation: {reason}") from None

    def _check_kept(self, turns: Sequence[Turn], parts: Set[str], text: str, generation_prompt: bool) -> None:
        """Raises UserError if the template leaves out a text. What it has rewritten is looked for by a mark instead."""
        said = Counter(piece.strip() for turn in turns for kind, piece in turn.pieces if kind == TEXT)
        if all(text.count(piece) >= count for piece, count in said.items() if piece):
            return
        marks = self._marks(turns, len(turns))
        stand_ins = [_with_text(turn, mark) for turn, mark in zip(turns, marks)]
        skeleton = self._render(stand_ins, parts, generation_prompt=generation_prompt)
        for turn, stand_in, mark in zip(turns, stand_ins, marks):
            if skeleton.count(mark) < stand_in.text.count(mark):
                raise UserError(
                    f"the tokenizer's chat template leaves out what the {turn.role} says ('{turn.text.strip()[:40]}')"
                )

    def _spans_with_loss(
        self, turns: Sequence[Turn], parts: Set[str], spans: list[tuple[int, int]], opening: str, closing: str
    ) -> list[tuple[int, int]]:
        """The spans that are not of answers to be left out; which they are of, is seen with a mark in each answer."""
        if all(turn.has_loss for turn in turns if turn.role == "assistant"):
            return spans
        marks = self._marks(turns, len(turns) + 2)[2:]
        stand_ins = [_with_text(turn, mark) if turn.role == "assistant" else turn for turn, mark in zip(turns, marks)]
        text, found = _unmark(self._render(stand_ins, parts, marks=opening + closing), opening, closing)
        owners = [
            [turn for turn, mark in zip(turns, marks) if turn.role == "assistant" and mark in text[start:end]]
            for start, end in found
        ]
        if len(found) != len(spans) or any(len({turn.has_loss for turn in owner}) != 1 for owner in owners):
            raise UserError(
                "the tokenizer's chat template marks answers in a way that does not tell which turn they are of, so "
                "turns cannot be left out of the loss"
            )
        return [span for span, owner in zip(spans, owners) if owner[0].has_loss]

    def _marks(self, turns: Sequence[Turn], count: int) -> str:
        """So many characters that stand nowhere: private-use ones, which no template strips, that no turn holds."""
        held = (self.source, *(turn.text for turn in turns))
        free = (mark for mark in map(chr, _PRIVATE_USE) if not any(mark in text for text in held))
        marks = "".join(islice(free, count))
        if len(marks) < count:
            raise UserError(f"a conversation of {len(turns)} turns is too long to tell its answers apart; split it")
        return marks


def _compiled(source: str) -> jinja2.Template:
    try:
        return environment().from_string(source)
    # Not only jinja's own errors: parentheses may nest too deep, numbers be too long.
    except Exception as error:
        line = f"line {error.lineno}: " if isinstance(error, jinja2.TemplateSyntaxError) else ""
        raise UserError(f"the tokenizer's chat template is no Jinja ({line}{_reason(error)})") from None


def _with_text(turn: Turn, mark: str) -> Turn:
    """The turn with a mark for each of its texts, and the same media."""
    return replace(turn, text="".join(mark if kind == TEXT and piece.strip() else piece for kind, piece in turn.pieces))


def _reason(error: Exception) -> str:
    known = isinstance(error, jinja2.TemplateError)
    text = " ".join(str(error).split()) if known else f"{type(error).__name__}: {' '.join(str(error).split())}"
    return text[:_MAX_REASON_CHARACTERS]


def _unmark(marked: str, opening: str, closing: str) -> tuple[str, list[tuple[int, int]]]:
    """The text without the marks, and the spans in it that stood between them."""
    pieces = marked.replace(closing, opening).split(opening)
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
        form = next((form for form in _forms(answer) if text.startswith(form + following, at)), None)
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


def _forms(answer: str) -> Iterator[str]:
    yield answer
    yield answer.strip()
    yield answer.rstrip()
    yield answer.lstrip()
