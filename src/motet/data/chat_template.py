"""Renders a chat template without transformers, and finds the characters of the answers in the result.

Importing transformers takes six seconds and torch; workers need neither. The environment is that of transformers
(sandboxed, blocks trimmed, `raise_exception`, `tojson`, `{% generation %}`), without today's date and random choices,
which would make tokens differ from day to day.

A turn is passed to the template as a text; or as a list of parts, if it holds an item that the template writes by
itself (`data/media_tokens.py`), if it was given as parts that the template accepts, or if that accepts nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from dataclasses import replace
from functools import cached_property
from itertools import groupby, islice
from typing import Any

import jinja2

from motet.core.errors import UserError
from motet.data.conversation import TEXT, Turn
from motet.data.template_environment import Rendering, environment
from motet.data.tool_use import with_name, with_objects

DEFAULT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}"
    "ASSISTANT:\n{% generation %}{{ message['content'] }}{{ eos_token }}{% endgeneration %}\n"
    "{% elif message['role'] == 'user' %}USER:\n{{ message['content'] }}\n"
    "{% else %}{{ message['content'] }}\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}ASSISTANT:\n{% endif %}"
)
"""The template for tokenizers without one: roles in plain words; the end-of-sequence token ends each answer."""

NO_PARTS: Set[str] = frozenset()
_PRIVATE_USE = range(0xE000, 0xF900)
_ONE_ROUND = (Turn("user", "a"), Turn("assistant", chr(_PRIVATE_USE[0]), has_loss=True))
"""What a template is tried on."""
_MAX_REASON_CHARACTERS = 200


class ChatTemplate:
    """A chat template. In its methods, `parts` are the modalities whose items are passed as parts, not as text.

    source:         Jinja.
    special_tokens: the variables that it may use (bos_token, eos_token, ...).

    Example:
        >>> template = ChatTemplate(DEFAULT_TEMPLATE, {"eos_token": "</s>"})
        >>> template.render([Turn("user", "Hi"), Turn("assistant", "Hello", has_loss=True)])
        'USER:\\nHi\\nASSISTANT:\\nHello</s>'
    """

    def __init__(self, source: str, special_tokens: dict[str, str]) -> None:
        self.source = source
        self.special_tokens = special_tokens
        self._tools: tuple[dict[str, Any], ...] = ()

    def with_tools(self, tools: tuple[dict[str, Any], ...]) -> ChatTemplate:
        """The same template, compiled once, with tools that it writes into each text."""
        if not tools:
            return self
        other = ChatTemplate(self.source, self.special_tokens)
        # What is found of the template holds with and without tools.
        other.__dict__ |= {"_template": self._template, "_part_roles": self._part_roles, "_tools": tools}
        other.__dict__ |= {
            "_writes_argument_text": self._writes_argument_text,
            "_answers_at_once": self._answers_at_once,
        }
        return other

    def __getstate__(self) -> dict[str, Any]:
        return {"source": self.source, "special_tokens": self.special_tokens, "_tools": self._tools}

    def check(self) -> None:
        """Raise UserError if the template is no Jinja."""
        _compiled(self.source)

    def render(self, turns: Sequence[Turn], parts: Set[str] = NO_PARTS, *, generation_prompt: bool = False) -> str:
        """The text of a conversation. Raises UserError if the template refuses it, or leaves out a turn."""
        text = self._render(turns, parts, generation_prompt=generation_prompt)
        self._check_kept(turns, parts, text, generation_prompt)
        return text

    def render_with_answers(
        self, turns: Sequence[Turn], parts: Set[str] = NO_PARTS
    ) -> tuple[str, list[tuple[int, int]], bool]:
        """The text, the spans [start, end) of answers with loss in it, and whether the template itself marks answers.

        A template with {% generation %} marks the spans, with or without the end token. Otherwise a span is the
        answer's own text, which is found by a second rendering with a mark in place of each answer, and what stands
        between the prompt for an answer and that text: the empty thought that Qwen3's template writes there is asked of
        the model, too.
        Raises UserError if the template refuses the conversation, leaves out a turn, or rewrites an answer so that it
        cannot be found.
        """
        opening, closing = self._marks(turns, 2)
        text, spans = _unmark(self._render(turns, parts, marks=opening + closing), opening, closing)
        self._check_kept(turns, parts, text, False)
        if spans:
            return text, self._spans_with_loss(turns, parts, spans, opening, closing), True
        if any(turn.calls for turn in turns):
            return text, self._spans_by_difference(turns, parts, text), True
        answers = [turn for turn in turns if turn.role == "assistant"]
        if any(kind in parts for turn in answers for kind, _ in turn.pieces):
            raise UserError(
                "an answer holds media, and the tokenizer's chat template does not say where answers end; mark them in "
                "the template by {% generation %} and {% endgeneration %}"
            )
        stand_ins = [turn.with_texts([(TEXT, opening)]) if turn.role == "assistant" else turn for turn in turns]
        between = self._render(stand_ins, parts).split(opening)
        try:
            found = iter(_find_answers(text, between, [turn.text for turn in answers]))
        except UserError:
            if spans := self._rewritten_spans(turns, parts, text):
                return text, spans, True
            raise
        for number, turn in enumerate(turns):
            if turn.role == "assistant":
                start, end = next(found)
                is_behind = turn.has_loss and not self._answers_at_once
                asked = self.num_asked(turns, number, text, parts) if is_behind else None
                spans += [(start if asked is None else min(start, asked), end)] if turn.has_loss else []
        return text, spans, False

    def num_asked(self, turns: Sequence[Turn], number: int, text: str, parts: Set[str] = NO_PARTS) -> int | None:
        """The characters of the prompt for the answer of a turn, with which the text of all turns begins.

        None where the text begins otherwise; and where the template writes nothing to ask for an answer, unless no more
        than white space stands before the answer then (Llama 2, Mistral).
        """
        try:
            plain, prompt = (self._render(turns[:number], parts, generation_prompt=asks) for asks in (False, True))
        except UserError:
            return None
        answer, behind = turns[number].text.strip(), text[len(prompt) :].lstrip()
        is_asked = len(prompt) > len(plain) or (answer and behind.startswith(answer))
        return len(prompt) if is_asked and text.startswith(prompt) else None

    @cached_property
    def _answers_at_once(self) -> bool:
        """Whether answers stand right behind the prompts for them, as with most templates; found of two rounds.

        Else the prompt for each answer is rendered, which takes as long again for each.
        """
        marks = [chr(mark) for mark in _PRIVATE_USE[:2]]
        turns = [turn for mark in marks for turn in (Turn("user", "a"), Turn("assistant", mark, has_loss=True))]
        try:
            text = self._render(turns, NO_PARTS)
        except UserError:
            return False
        return all(self.num_asked(turns, turn, text) in (None, text.find(mark)) for turn, mark in zip((1, 3), marks))

    @cached_property
    def unlearned_lead(self) -> str:
        """What a template that marks answers writes behind the prompt for an answer and before its mark.

        It is not learned, as of transformers' masks. "" where it writes nothing, where it marks none, and where no
        conversation could be tried.
        """
        try:
            opening, closing = self._marks(_ONE_ROUND, 2)
            text, spans = _unmark(self._render(_ONE_ROUND, NO_PARTS, marks=opening + closing), opening, closing)
        except UserError:
            return ""
        asked = self.num_asked(_ONE_ROUND, 1, text) if spans else None
        return "" if asked is None else text[asked : spans[0][0]]

    @cached_property
    def untrained_prompt(self) -> str:
        """The end of the prompt for an answer that the template does not write before an answer that is there.

        DeepSeek-R1's prompt begins a thought so. "" where all of it is written, and where no conversation could be
        tried.
        """
        try:
            text = self._render(_ONE_ROUND, NO_PARTS)
            prompt = self._render(_ONE_ROUND[:1], NO_PARTS, generation_prompt=True)
        except UserError:
            return ""
        first = next((place for place, (own, written) in enumerate(zip(prompt, text)) if own != written), len(text))
        return prompt[first:]

    def span_of(
        self,
        turns: Sequence[Turn],
        number: int,
        text: str,
        parts: Set[str] = NO_PARTS,
        *,
        generation_prompt: bool = False,
    ) -> tuple[int, int] | None:
        """The characters [start, end) of a turn in the text of all; None if it is written in no place of its own.

        A second rendering, with a mark in place of the turn, tells what stands before and behind it.
        """
        mark = self._marks(turns, 1)
        stand_ins = [turn.with_texts([(TEXT, mark)]) if i == number else turn for i, turn in enumerate(turns)]
        try:
            around = self._render(stand_ins, parts, generation_prompt=generation_prompt).split(mark)
        except UserError:
            return None
        if len(around) != 2 or not (text.startswith(around[0]) and text.endswith(around[1])):
            return None
        start, end = len(around[0]), len(text) - len(around[1])
        return (start, end) if start < end else None

    def try_messages(self, messages: list[dict[str, Any]], *, generation_prompt: bool = False) -> str | None:
        """The text of messages in the template's format; None if it refuses them."""
        try:
            return self._render_messages(messages, Rendering(), generation_prompt)
        except UserError:
            return None

    @property
    def roles_in_parts(self) -> frozenset[str]:
        """Roles whose text the template writes only as a list of parts; many multimodal templates do so."""
        return self._part_roles[0]

    @cached_property
    def _part_roles(self) -> tuple[frozenset[str], frozenset[str]]:
        """Roles whose text the template writes only as a list of parts, and those of which it takes such a list.

        They are found by rendering a mark for each role, once as a text and once as a part.
        """
        *marks, dumped = map(chr, _PRIVATE_USE[:4])
        in_parts, taken = set[str](), set[str]()
        for roles in (("user", "assistant"), ("system", "user", "assistant")):
            mark_of = dict(zip(roles, marks))
            as_text = self.try_messages([{"role": role, "content": mark} for role, mark in mark_of.items()]) or ""
            part = {"type": TEXT, "dumped": dumped}
            messages = [{"role": role, "content": [part | {TEXT: mark}]} for role, mark in mark_of.items()]
            as_parts = self.try_messages(messages)
            # A template that knows only texts may print the list itself, and `dumped` with it.
            if as_parts is not None and dumped not in as_parts:
                taken |= {role for role, mark in mark_of.items() if mark in as_parts}
                in_parts |= {role for role, mark in mark_of.items() if mark in as_parts and mark not in as_text}
        return frozenset(in_parts), frozenset(taken)

    @cached_property
    def _template(self) -> jinja2.Template:
        return _compiled(self.source)

    def _render(
        self, turns: Sequence[Turn], parts: Set[str], *, marks: str = "", generation_prompt: bool = False
    ) -> str:
        messages = [self._message(turn, parts) for turn in turns]
        return self._render_messages(messages, Rendering(marks), generation_prompt)

    def _message(self, turn: Turn, parts: Set[str]) -> dict[str, Any]:
        message: dict[str, Any] = {"role": turn.role, "content": self._content(turn, parts), **dict(turn.answers)}
        if turn.calls:
            as_objects = not self._writes_argument_text
            message["tool_calls"] = [with_objects(call) if as_objects else call for call in turn.calls]
        return message

    @cached_property
    def _writes_argument_text(self) -> bool:
        """Whether arguments that are the JSON of an object, as OpenAI has them, are written as they are.

        Most templates write the JSON of what they are given, and would make a quoted text of a text.
        """
        arguments = f'{{"{chr(_PRIVATE_USE[0])}": "{chr(_PRIVATE_USE[1])}"}}'
        call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
        said: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": [call]}
        text = self.try_messages([{"role": "user", "content": "a"}, said])
        return text is not None and arguments in text

    def _content(self, turn: Turn, parts: Set[str]) -> str | list[dict[str, str]]:
        """A turn's content as the template takes it: a text, or a list of parts."""
        pieces, (in_parts, taken) = turn.pieces, self._part_roles
        is_given_so = turn.parts is not None and turn.role in taken
        if turn.role not in in_parts and not is_given_so and all(kind not in parts for kind, _ in pieces):
            return turn.text
        if turn.parts is not None:
            return [{"type": kind} if kind in parts else {"type": TEXT, TEXT: text} for kind, text in pieces]
        content: list[dict[str, str]] = []
        # Every piece that is no part is text, and adjacent texts are one part.
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
                tools=list(self._tools) or None,
                documents=None,
                motet_rendering=rendering,
                **self.special_tokens,
            )
            return rendering.collect(written)
        except UserError:
            raise
        # A template is a program, and may raise any exception.
        except Exception as error:
            reason = _reason(error)
            if "strftime_now" in reason:
                reason = "it asks for today's date, so tokens would differ from day to day; write a date into it"
            raise UserError(f"the tokenizer's chat template refuses the conversation: {reason}") from None

    def _check_kept(self, turns: Sequence[Turn], parts: Set[str], text: str, generation_prompt: bool) -> None:
        """Raise UserError if the template leaves out a text, a call or a tool."""
        if self._tools or any(turn.calls for turn in turns):
            self._check_tools_kept(turns, parts)
        # 1. Usually all texts are in the result, one behind the other: what a turn says may be a part of another's.
        end = 0
        for piece in (piece.strip() for turn in turns for kind, piece in turn.pieces if kind == TEXT):
            start = text.find(piece, end)
            end = start + len(piece)
            if start < 0:
                break
        else:
            return
        # 2. The template may have rewritten a text: render a mark in place of each.
        marks = self._marks(turns, len(turns))
        stand_ins = [_with_text(turn, mark) for turn, mark in zip(turns, marks)]
        skeleton = self._render(stand_ins, parts, generation_prompt=generation_prompt)
        for turn, stand_in, mark in zip(turns, stand_ins, marks):
            if skeleton.count(mark) < stand_in.text.count(mark):
                raise UserError(
                    f"the tokenizer's chat template leaves out what the {turn.role} says ('{turn.text.strip()[:40]}')"
                )

    def _check_tools_kept(self, turns: Sequence[Turn], parts: Set[str]) -> None:
        """Raise UserError if the template leaves out a call or a tool: a mark in place of each must be written."""
        num_calls = sum(len(turn.calls) for turn in turns)
        marks = self._marks(turns, num_calls + len(self._tools))
        of_calls, of_tools = iter(marks[:num_calls]), marks[num_calls:]
        stand_ins = [
            replace(turn, calls=tuple(with_name(call, next(of_calls)) for call in turn.calls)) for turn in turns
        ]
        marked = [
            tool | {"function": tool["function"] | {"name": mark}} if "function" in tool else tool | {"name": mark}
            for tool, mark in zip(self._tools, of_tools)
        ]
        text = self.with_tools(tuple(marked))._render(stand_ins, parts)
        for call, mark in zip((call for turn in turns for call in turn.calls), marks):
            if text.count(mark) < 3:
                name = call["function"]["name"]
                raise UserError(f"the tokenizer's chat template leaves out a call of '{name}', or its arguments")
        if any(mark not in text for mark in of_tools):
            raise UserError("the tokenizer's chat template leaves out tools; give it one that writes them")

    def _spans_by_difference(self, turns: Sequence[Turn], parts: Set[str], text: str) -> list[tuple[int, int]]:
        """The spans of answers with loss: what each adds to the prompt for it, up to its last visible character."""
        spans = []
        for number, turn in enumerate(turns):
            if not turn.has_loss:
                continue
            before = self._render(turns[:number], parts, generation_prompt=True)
            through = self._render(turns[: number + 1], parts).rstrip()
            end = len(through)
            if not text.startswith(through):
                end = self._end_of_same(turn, text, len(before), through) if text.startswith(before) else 0
            if end <= len(before) or not through.startswith(before):
                raise UserError(
                    "the tokenizer's chat template writes an answer in another way when more follows, so that it "
                    "cannot be found; mark answers in the template by {% generation %} and {% endgeneration %}"
                )
            spans.append((len(before), end))
        return spans

    def _end_of_same(self, turn: Turn, text: str, start: int, through: str) -> int:
        """Where an answer ends that begins at `start`, if the template writes more before it where nothing follows.

        So does Qwen3's, with a thought. through: the text up to the answer, alone. 0: the answers are not the same.
        """
        ends = [token for token in self.special_tokens.values() if through.endswith(token)]
        end = max((text.find(token, start) + len(token) for token in ends if token in text[start:]), default=0)
        written = text[start:end]
        is_whole = "".join(turn.text.split()) in "".join(written.split())
        return end if is_whole and through.endswith(written) else 0

    def _rewritten_spans(self, turns: Sequence[Turn], parts: Set[str], text: str) -> list[tuple[int, int]]:
        """As `_spans_by_difference`, of answers of which a template changes white space alone; [] of others.

        Qwen3's takes the thoughts apart from the answer, and puts line breaks of its own around them.
        """
        try:
            spans = self._spans_by_difference(turns, parts, text)
            learned = [number for number, turn in enumerate(turns) if turn.has_loss]
            for number, (_, end) in zip(learned, spans, strict=True):
                written = text[len(self._render(turns[:number], parts)) : end]
                if "".join(turns[number].text.split()) not in "".join(written.split()):
                    return []
        except UserError:
            return []
        return spans

    def _spans_with_loss(
        self, turns: Sequence[Turn], parts: Set[str], spans: list[tuple[int, int]], opening: str, closing: str
    ) -> list[tuple[int, int]]:
        """The spans of answers with loss. A second rendering with a mark in each answer tells the answer of a span."""
        if all(turn.has_loss for turn in turns if turn.role == "assistant"):
            return spans
        marks = self._marks(turns, len(turns) + 2)[2:]
        stand_ins = [_with_text(turn, mark) if turn.role == "assistant" else turn for turn, mark in zip(turns, marks)]
        text, marked_spans = _unmark(self._render(stand_ins, parts, marks=opening + closing), opening, closing)
        owners = [
            [turn for turn, mark in zip(turns, marks) if turn.role == "assistant" and mark in text[start:end]]
            for start, end in marked_spans
        ]
        if len(marked_spans) != len(spans) or any(len({turn.has_loss for turn in owner}) != 1 for owner in owners):
            raise UserError(
                "the tokenizer's chat template marks answers in a way that does not tell which turn they are of, so "
                "turns cannot be left out of the loss"
            )
        return [span for span, owner in zip(spans, owners) if owner[0].has_loss]

    def _marks(self, turns: Sequence[Turn], count: int) -> str:
        """`count` private-use characters that are in no turn and not in the template; no template strips them."""
        texts = (self.source, *(turn.text for turn in turns))
        unused = (mark for mark in map(chr, _PRIVATE_USE) if not any(mark in text for text in texts))
        marks = "".join(islice(unused, count))
        if len(marks) < count:
            raise UserError(f"a conversation of {len(turns)} turns is too long to tell its answers apart; split it")
        return marks


def _compiled(source: str) -> jinja2.Template:
    try:
        return environment().from_string(source)
    # Besides jinja's own errors: parentheses may nest too deep, and numbers may be too long.
    except Exception as error:
        line = f"line {error.lineno}: " if isinstance(error, jinja2.TemplateSyntaxError) else ""
        raise UserError(f"the tokenizer's chat template is no Jinja ({line}{_reason(error)})") from None


def _with_text(turn: Turn, mark: str) -> Turn:
    """The turn with the same media, and a mark in place of each text."""
    return turn.with_texts([(kind, mark if kind == TEXT and piece.strip() else piece) for kind, piece in turn.pieces])


def _reason(error: Exception) -> str:
    known = isinstance(error, jinja2.TemplateError)
    text = " ".join(str(error).split()) if known else f"{type(error).__name__}: {' '.join(str(error).split())}"
    return text[:_MAX_REASON_CHARACTERS]


def _unmark(marked: str, opening: str, closing: str) -> tuple[str, list[tuple[int, int]]]:
    """The text without the marks, and the spans in it that were between them."""
    pieces = marked.replace(closing, opening).split(opening)
    spans, start = [], 0
    for number, piece in enumerate(pieces):
        if number % 2:
            spans.append((start, start + len(piece)))
        start += len(piece)
    return "".join(pieces), spans


def _find_answers(text: str, between: list[str], answers: list[str]) -> list[tuple[int, int]]:
    """The span of each answer, which may be stripped. between: the texts before, between and after the answers."""
    spans, start = [], len(between[0])
    intact = len(between) == len(answers) + 1 and text.startswith(between[0])
    for answer, following in zip(answers, between[1:]):
        form = next((form for form in _stripped_forms(answer) if text.startswith(form + following, start)), None)
        if form is None:
            intact = False
            break
        spans.append((start, start + len(form)))
        start += len(form) + len(following)
    if not intact or start != len(text):
        raise UserError(
            "the tokenizer's chat template rewrites answers, so that they cannot be found in its output; "
            "mark them in the template by {% generation %} and {% endgeneration %}"
        )
    return spans


def _stripped_forms(answer: str) -> Iterator[str]:
    yield answer
    yield answer.strip()
    yield answer.rstrip()
    yield answer.lstrip()
