"""How the items of a modality stand in a rendered conversation: by the model's own tokens, or by a stand-in.

A chat template of a multimodal model writes an item by itself, if it is given as a part of a turn: for one image,
Qwen2-VL's writes `<|vision_start|><|image_pad|><|vision_end|>`. What it writes is found out by rendering a turn with
and without an item. One of the special tokens that come with the item gives way to the item's rows, the others are the
model's marks and stay. Some processors change the text once more before it is tokenised; those that Motet knows are
named here, by their classes in transformers, and a directory of any other is refused.

A model that does not read the modality (a text model, say) has no tokens for it. There an item is one special token:
that of its placeholder (`<image>`) if there is one, else any other; the rows take its place, and nobody looks at it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from motet.core.errors import UserError
from motet.data.chat_template import ChatTemplate
from motet.data.conversation import PLACEHOLDERS, TEXT
from motet.data.media import AUDIO, IMAGE

_AS_WRITTEN = {
    "LlavaProcessor": {IMAGE: "<image>"},
    "LlavaNextProcessor": {IMAGE: "<image>"},
    "LlavaOnevisionProcessor": {IMAGE: "<image>"},
    "Qwen2VLProcessor": {IMAGE: "<|image_pad|>"},
    "Qwen2_5_VLProcessor": {IMAGE: "<|image_pad|>"},
    "Qwen3VLProcessor": {IMAGE: "<|image_pad|>"},
    "Qwen2AudioProcessor": {AUDIO: "<|AUDIO|>"},
    "Qwen2_5OmniProcessor": {IMAGE: "<|IMAGE|>", AUDIO: "<|AUDIO|>"},
    "Glm4vProcessor": {IMAGE: "<|image|>"},
}
"""Processors that repeat the template's token, once a row, and change no more; the token, where no file names it."""
_MARKS = {
    "Gemma3Processor": {IMAGE: ("boi_token", "eoi_token")},
    "Gemma3nProcessor": {IMAGE: ("boi_token", "eoi_token"), AUDIO: ("boa_token", "eoa_token")},
}
"""Processors that put each item between two tokens of these names, and empty lines around (`Gemma3Processor`)."""

_ROLES = ("system", "user", "assistant")
_SAID, _DUMPED = "\ue0f0", "\ue0f1"


@dataclass(frozen=True)
class MediaForm:
    """How an item of one modality stands in a conversation.

    is_part: it is given to the template as a part of a turn. written: what the template then writes for it, and what is
    looked for. put: what is tokenised in its place. token: the special token in `put` that gives way to the rows.
    """

    is_part: bool
    written: str
    put: str
    token: str


@dataclass(frozen=True)
class TokenNames:
    """What a tokenizer's directory says of its tokens.

    special: by name (`eos_token`, `image_token`, ...). processor: the class that prepares texts and media for the
    model that the tokenizer came with, None for a text model.
    """

    special: dict[str, str]
    processor: str | None = None


def media_form(modality: str, template: ChatTemplate, tokens: Iterable[str], names: TokenNames) -> MediaForm:
    """The form of a modality's items. tokens: those that the tokenizer keeps whole, special ones first.

    Raises UserError where it is not clear which token stands for an item, or what the model's processor makes of it.
    """
    tokens = list(tokens)
    brought = _brought(modality, template, tokens)
    own = names.special.get(f"{modality}_token") or _AS_WRITTEN.get(names.processor or "", {}).get(modality)
    if not brought:
        return _stand_in(modality, tokens, names, own)
    if names.processor in _MARKS:
        return _between_marks(modality, brought, names)
    if names.processor is not None and names.processor not in _AS_WRITTEN:
        raise UserError(
            f"the tokenizer is of a model whose {names.processor} prepares texts in a way that is not known here, so "
            f"{modality} tokens cannot be placed; take the tokenizer of another model"
        )
    if own is None and len(brought) == 1:
        own = next(iter(brought))
    if own is None or brought[own] != 1:
        raise UserError(
            f"the tokenizer's chat template writes {' '.join(brought.elements())} for one {modality}, and which "
            f"of them stands for it is not said; name it as '{modality}_token' in tokenizer_config.json"
        )
    return MediaForm(True, own, own, own)


def reserved_tokens(template: ChatTemplate, tokens: Iterable[str], names: TokenNames) -> set[str]:
    """Special tokens that no text of a user may hold: those with names, and those that the template itself writes."""
    tokens = list(tokens)
    said = {role: [{"type": TEXT, TEXT: role}] if role in template.roles_in_parts else role for role in _ROLES}
    turns = [{"role": role, "content": content} for role, content in said.items()]
    rendered = [template.try_messages(turns[start:], generation_prompt=True) for start in (0, 1)]
    rendered += [template.try_messages(_one_turn(template, {"type": kind})) for kind in (*PLACEHOLDERS, "video")]
    written = {token for text in rendered if text for token in _found(text, tokens)}
    return written | {token for token in names.special.values() if token in tokens and not token.isspace()}


def _brought(modality: str, template: ChatTemplate, tokens: list[str]) -> Counter[str]:
    """The special tokens that the template writes for one item; none if it does not know such parts."""
    without = template.try_messages(_one_turn(template))
    text = template.try_messages(_one_turn(template, {"type": modality, "dumped": _DUMPED}))
    if without is None or text is None or _SAID not in text or _DUMPED in text + without:
        return Counter()
    return Counter(_found(text, tokens)) - Counter(_found(without, tokens))


def _one_turn(template: ChatTemplate, *items: dict[str, str]) -> list[dict[str, Any]]:
    """A question with items in it, and an answer, as messages."""
    answer: Any = [{"type": TEXT, TEXT: _SAID}] if "assistant" in template.roles_in_parts else _SAID
    question = [*items, {"type": TEXT, TEXT: _SAID}]
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def _found(text: str, tokens: list[str]) -> list[str]:
    """Each occurrence of a token. Some tokenizers count line breaks among theirs, which are text to a template."""
    visible = sorted((token for token in tokens if not token.isspace()), key=len, reverse=True)
    return re.findall("|".join(map(re.escape, visible)), text) if visible else []


def _stand_in(modality: str, tokens: list[str], names: TokenNames, own: str | None) -> MediaForm:
    placeholder = PLACEHOLDERS[modality]
    of_processor = _AS_WRITTEN.get(names.processor or "") or _MARKS.get(names.processor or "")
    is_read = names.processor is not None and (of_processor is None or modality in of_processor)
    if (own is not None or is_read) and not (own == placeholder and names.processor in (None, *_AS_WRITTEN)):
        raise UserError(
            f"the tokenizer is of a model with {modality} tokens of its own ({own or names.processor}), but its chat "
            f"template writes none for a part of type '{modality}'; give it the model's own template"
        )
    if not tokens:
        raise UserError("the tokenizer has no special token that could stand for an image or a clip; add '<image>'")
    token = placeholder if placeholder in tokens else tokens[0]
    return MediaForm(False, placeholder, token, token)


def _between_marks(modality: str, brought: Counter[str], names: TokenNames) -> MediaForm:
    marks = [names.special.get(name) for name in _MARKS[str(names.processor)].get(modality, ())]
    token = names.special.get(f"{modality}_token")
    if len(marks) != 2 or None in marks or token is None or brought.total() != 1:
        raise UserError(
            f"the tokenizer is of a model with {names.processor}, but does not name the tokens for an item of "
            f"{modality} and around it; take its tokenizer_config.json as it was published"
        )
    return MediaForm(True, next(iter(brought)), f"\n\n{marks[0]}{token}{marks[1]}\n\n", token)
