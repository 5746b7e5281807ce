"""Turns of a conversation as its chat template is given them, and where they stand in the text that it writes."""

from __future__ import annotations

import json
import re
from dataclasses import replace

from motet.data.chat_template import ChatTemplate
from motet.data.conversation import TEXT, Conversation, Turn, placeholder
from motet.data.media_tokens import MediaForm


def turns_before(
    template: ChatTemplate,
    conversation: Conversation,
    turns: list[Turn],
    forms: dict[str, MediaForm],
    text: str,
    *,
    generation_prompt: bool = False,
) -> list[tuple[int, int]]:
    """Of each item in an answer the characters [start, end) of the turn before, (0, 0) where there is none.

    turns: the conversation's, as rendered. text: of them.
    """
    if not any(conversation.in_answers):
        return []
    found = []
    for number, turn in enumerate(turns):
        num_items = sum(kind != TEXT for kind, _ in turn.pieces)
        span = None
        if num_items and number and turn.has_loss:
            span = template.span_of(turns, number - 1, text, given_as_parts(forms), generation_prompt=generation_prompt)
        found += [span or (0, 0)] * num_items
    return found


def tool_text(conversation: Conversation) -> str:
    """All that a conversation says of tools, for a search."""
    said = [conversation.tools, *(turn.calls for turn in conversation.turns)]
    return json.dumps(said, ensure_ascii=False) if any(said) else ""


def without_double_breaks(turns: tuple[Turn, ...], forms: dict[str, MediaForm]) -> list[Turn]:
    """The turns without the line break beside a placeholder whose form has one of its own.

    A template that writes items where they stand writes it behind them, and the one before stays.

    Records part `<image>` from the text by a line break, and so do some templates: LLaVA's own code takes the
    placeholder with its white space out of the text before it writes `<image>` and a line break in front. Typed parts
    part items from texts by themselves, and stay as they are.
    """
    for form, written in ((form, placeholder(modality)) for modality, form in forms.items()):
        if form.breaks_line:
            pattern = re.compile(("\n?" if form.is_first else "") + f"{written}\n?")
            turns = tuple(
                turn if turn.parts is not None else replace(turn, text=pattern.sub(written, turn.text))
                for turn in turns
            )
    return list(turns)


def given_as_parts(forms: dict[str, MediaForm]) -> set[str]:
    """The modalities whose items the template takes as parts."""
    return {modality for modality, form in forms.items() if form.is_part}
