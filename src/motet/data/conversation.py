"""Checks a record: a conversation with its turns, or a document; and the media of its placeholders.

    {"conversations": [{"from": "human", "value": "<image> What is it?"}, {"from": "gpt", "value": "A cat."}],
     "image": "a.png"}

- `image`/`images`, `audio`/`audios` and `video`/`videos` name one file or a list of files. `<image>`, `<audio>` and
  `<video>`, anywhere in the text, stand for the next file of their kind; and so with the name of a modality of the
  user's own.
- A list in `video` or `videos` is the frames of one video, and so is a list of names of images; `fps` of the record
  says how many of them are a second.
- `messages` with `role` and `content` is the same in OpenAI's words. A content may be a list of typed parts
  (`data/parts.py`), which name their own media or take those of the record.
- `system` is one more turn in front.
- `"loss": false` in a turn of the assistant takes it out of the loss.
- `instruction`, `input`, `output` and `history`, or `query` and `response` in place of the first three, are turns, too
  (`data/alpaca.py`).
- `tools` and `tool_calls` are passed to the chat template (`data/tool_use.py`); turns from `tool` answer calls.

A record without turns is a document, of which all text is learned: `text` with placeholders, `document`, a list of
typed parts, or `texts` and `images` that take turns.

A turn may have no other fields. `data/record_fields.py` says which other fields a record may have.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import motet.core.text_files
from motet.core.errors import UserError
from motet.core.modalities import modalities
from motet.core.words import counted_words
from motet.data.alpaca import check_beside_turns, instruction_turns, is_instruction
from motet.data.media import IMAGE, VIDEO
from motet.data.media_names import DATA_URL_HEAD, FrameNames, media_name, video_names
from motet.data.parts import TEXTS_FIELD, TypedPart, interleaved, typed_parts
from motet.data.record_fields import (
    PARTS_FIELD,
    SYSTEM_FIELD,
    TEXT_FIELD,
    TOOLS_FIELD,
    TURN_FIELDS,
    check_fields,
    check_media_are_whole,
    check_names_no_media,
    is_given,
    kind_of,
    media_fields,
)
from motet.data.tool_use import Call, calls_in_text, parse_calls, parse_tools

TEXT, DOCUMENT = "text", "document"
# Other programs' placeholders of an item. As plain text they would be learned without the item.
_OTHER_PLACEHOLDER = re.compile(r"</?\|?\s*(?:image|img|audio|video)s?[\s_-]*\d*\s*\|?>", re.IGNORECASE)
_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}
_CALL_ROLES = ("tool_call", "function_call")
_ROLES |= dict.fromkeys(_CALL_ROLES, "assistant") | dict.fromkeys(("tool", "tool_response", "observation"), "tool")
_FIELDS_OF_ROLES = {"assistant": ("tool_calls",), "tool": ("name", "tool_call_id")}
_STYLES = (("from", "value"), ("role", "content"))
_SAID = frozenset(name for style in _STYLES for name in style)
_LOSS_FIELDS = ("loss", "train", "weight")


@dataclass(frozen=True)
class Turn:
    """One turn.

    role:     user, assistant, system or tool; DOCUMENT for the one turn of a document.
    has_loss: whether the loss counts its text; only the assistant's, and a document's.
    parts:    the pieces of a content that was given as a list of parts; None: it was given as a text.
    calls:    calls of tools; the assistant's.
    answers:  the name and the number of the call that a tool answers, as the record has them.
    """

    role: str
    text: str
    has_loss: bool = False
    parts: tuple[tuple[str, str], ...] | None = field(default=None, repr=False)
    calls: tuple[Call, ...] = field(default=(), repr=False)
    answers: tuple[tuple[str, str], ...] = field(default=(), repr=False)

    @cached_property
    def pieces(self) -> list[tuple[str, str]]:
        """The text and the items in it, in order: ("text", "What is "), ("image", "<image>"); at least one piece."""
        if self.parts is not None:
            return list(self.parts) or [(TEXT, "")]
        split = _placeholder_pattern().split(self.text)
        pieces = [(piece, placeholder(piece)) if i % 2 else (TEXT, piece) for i, piece in enumerate(split) if piece]
        return pieces or [(TEXT, "")]

    def with_texts(self, pieces: Sequence[tuple[str, str]]) -> Turn:
        """The same turn with other pieces, given in the same way."""
        parts = None if self.parts is None else tuple(pieces)
        return replace(self, text="".join(text for _, text in pieces), parts=parts)


@dataclass(frozen=True)
class Conversation:
    """A checked record.

    turns:        at least one has loss; a document is one turn.
    placeholders: the modality of each, in order of appearance.
    names:        of each placeholder, the path or data URL that its part names; None: that of the record's fields. ()
                  if no part names any.
    tools:        the JSON schemas of the tools that may be called.

    Example:
        >>> turns = [{"from": "human", "value": "<image> What is it?"}, {"from": "gpt", "value": "A cat."}]
        >>> conversation = parse_conversation({"conversations": turns, "image": "a.png"}, "line 1")
        >>> conversation.placeholders, conversation.turns[1]
        (('image',), Turn(role='assistant', text='A cat.', has_loss=True))
    """

    turns: tuple[Turn, ...]
    placeholders: tuple[str, ...]
    names: tuple[str | None, ...] = field(default=(), repr=False)
    tools: tuple[dict[str, Any], ...] = field(default=(), repr=False)

    @property
    def in_answers(self) -> tuple[bool, ...]:
        """Of each placeholder, whether it stands in a turn of the assistant, which a generator can learn to make."""
        return tuple(turn.has_loss and not self.is_document for turn in self.turns for _ in _placeholders((turn,)))

    @property
    def has_answer(self) -> bool:
        """Whether its last turn with loss is a text that could be compared: not a document, and not a call."""
        return not self.is_document and not [turn for turn in self.turns if turn.has_loss][-1].calls

    @property
    def is_document(self) -> bool:
        """Whether it is text without turns, which no chat template is for."""
        return self.turns[0].role == DOCUMENT

    def without_last_answer(self) -> tuple[Conversation, str]:
        """The turns before the last one with loss, and the text of that one."""
        last = max(i for i, turn in enumerate(self.turns) if turn.has_loss)
        turns = self.turns[:last]
        return Conversation(turns, _placeholders(turns), tools=self.tools), self.turns[last].text


def placeholder(modality: str) -> str:
    """What stands for an item in a text: "<image>"."""
    return f"<{modality}>"


def _placeholder_pattern() -> re.Pattern[str]:
    """A pattern of all placeholders, which names their modality."""
    return re.compile(f"<({'|'.join(modalities())})>")  # Compiled once: re keeps what it has compiled.


def parse_record(text: bytes, where: str) -> dict[str, Any]:
    """The record in a line, or in a member of a shard. Raises UserError naming `where`."""
    return check_is_object(motet.core.text_files.parse_json(text, where), where)


def check_is_object(record: object, where: str) -> dict[str, Any]:
    """The record itself. Raises UserError naming `where` if it is no JSON object."""
    if not isinstance(record, dict):
        raise UserError(
            f"{where}: is {kind_of(record)}, but each record must be an object with a field 'conversations'"
        )
    return record


def parse_conversation(record: dict[str, Any], where: str) -> Conversation:
    """The turns of a record. Raises UserError naming `where`, what is wrong and what would be right."""
    check_fields(record, where)
    fields = [field for field in TURN_FIELDS if is_given(record.get(field))]
    has_turns = bool(fields)
    if not fields and is_instruction(record):
        record, fields = record | {TURN_FIELDS[0]: instruction_turns(record, where)}, [TURN_FIELDS[0]]
    if not fields and any(is_given(record.get(name)) for name in (TEXTS_FIELD, PARTS_FIELD, TEXT_FIELD)):
        return _document(record, where)
    fields = fields or [field for field in TURN_FIELDS if record.get(field) is not None][:1]
    if not fields:
        raise UserError(
            f'{where}: has no field \'conversations\'; it must be a list of {{"from": ..., "value": ...}}; or, for a '
            "document, have 'text', 'document', or 'texts' and 'images'"
        )
    if len(fields) > 1:
        raise UserError(f"{where}: has both 'conversations' and 'messages'; give one of them")
    listed = record[fields[0]]
    if not isinstance(listed, list) or not listed:
        raise UserError(f"{where}: '{fields[0]}' is {kind_of(listed)}, but must be a list of turns, at least one")
    parsed = [_parse_turn(turn, f"{where}: turn {number}") for number, turn in enumerate(listed, start=1)]
    turns = _with_calls_joined([turn for turn, _ in parsed], listed, where)
    if has_turns:
        check_beside_turns(record, [turn.text for turn in turns], where, fields[0])
    system = _system_turn(record, turns, where)
    turns = (*system, *turns)
    if all(turn.role != "assistant" for turn in turns):
        raise UserError(f"{where}: has no answer to learn; at least one turn must be from 'gpt' (or 'assistant')")
    if not any(turn.has_loss for turn in turns):
        raise UserError(f"{where}: has no answer to learn; all its answers are out of the loss; leave the record out")
    names = (*(None for _ in _placeholders(system)), *(name for _, of_turn in parsed for name in of_turn))
    tools = parse_tools(record[TOOLS_FIELD], where) if is_given(record.get(TOOLS_FIELD)) else ()
    return _checked_media(Conversation(turns, _placeholders(turns), names, tools), record, where)


def media_names(record: dict[str, Any], where: str) -> dict[str, list[str] | None]:
    """Modality -> files that the record names; None if it has no such field. Raises UserError naming `where`."""
    if is_given(record.get(TEXTS_FIELD)) and not any(is_given(record.get(field)) for field in TURN_FIELDS):
        others = {modality: fields for modality, fields in media_fields().items() if modality != IMAGE}
        return {IMAGE: []} | {modality: _names(record, fields, where) for modality, fields in others.items()}
    return {modality: _names(record, fields, where) for modality, fields in media_fields().items()}


def match_media(conversation: Conversation, names: dict[str, list[str]], where: str) -> list[tuple[str, str]]:
    """(modality, name) of each placeholder, in order of appearance.

    Raises UserError unless each placeholder has one file and each file one placeholder.
    """
    own = conversation.names or (None,) * len(conversation.placeholders)
    unnamed = [modality for modality, name in zip(conversation.placeholders, own, strict=True) if name is None]
    for modality in modalities():
        num_placeholders, num_files = unnamed.count(modality), len(names[modality])
        if num_placeholders != num_files:
            raise UserError(
                f"{where}: has {num_placeholders} {placeholder(modality)} in its text, but "
                f"{counted_words(num_files, 'file')} in '{modality}'; each file needs one {placeholder(modality)} and "
                "the reverse"
            )
    remaining = {modality: iter(names[modality]) for modality in modalities()}
    return [
        (modality, next(remaining[modality]) if name is None else name)
        for modality, name in zip(conversation.placeholders, own)
    ]


def _document(record: dict[str, Any], where: str) -> Conversation:
    """A record without turns."""
    for name in (SYSTEM_FIELD, TOOLS_FIELD):
        if is_given(record.get(name)):
            raise UserError(f"{where}: has a field '{name}', which is of conversations; a document has none")
    given = [name for name in (TEXTS_FIELD, PARTS_FIELD, TEXT_FIELD) if is_given(record.get(name))]
    if len(given) > 1:
        raise UserError(f"{where}: has both '{given[0]}' and '{given[1]}', each a document; give one of them")
    names: tuple[str | None, ...] = ()
    if is_given(record.get(TEXTS_FIELD)):
        turn, names = _of_parts(DOCUMENT, interleaved(record, where), True, where)
    elif is_given(parts := record.get(PARTS_FIELD)):
        if not isinstance(parts, list):
            raise UserError(f"{where}: '{PARTS_FIELD}' is {kind_of(parts)}, but must be a list of typed parts")
        turn, names = _of_parts(DOCUMENT, typed_parts(parts, where), True, where)
    else:
        if not isinstance(text := record[TEXT_FIELD], str):
            raise UserError(f"{where}: 'text' is {kind_of(text)}, but must be the text of a document")
        turn = Turn(DOCUMENT, _checked_text(text, where), True)
    return _checked_media(Conversation((turn,), _placeholders((turn,)), names), record, where)


def _checked_media(conversation: Conversation, record: dict[str, Any], where: str) -> Conversation:
    """The same. Raises UserError for fields of its record that would say of its media what nothing heeds."""
    if not conversation.placeholders:
        check_names_no_media(record, where)
    for modality in dict.fromkeys(conversation.placeholders):
        check_media_are_whole(record, where, modality)
    if VIDEO in conversation.placeholders:
        videos = media_names(record, where)[VIDEO] or () if is_given(record.get("fps")) else None
        if videos is not None and not any(isinstance(name, FrameNames) for name in videos):
            raise UserError(
                f"{where}: has a field 'fps', but lists no frames of a video, of which it says how many come a second; "
                "a part that lists frames has an 'fps' of its own, and which frames of a file are taken, [model.video] "
                "says; remove or rename the field"
            )
    return conversation


def _of_parts(role: str, parts: Sequence[TypedPart], has_loss: bool, where: str) -> tuple[Turn, tuple[str | None, ...]]:
    """A turn of typed parts, and the names of its media."""
    for part in parts:
        if part.kind == TEXT and (found := _placeholder_pattern().search(_checked_text(part.text, where))):
            raise UserError(
                f"{where}: a text among parts holds '{found.group()}'; there each item is a part of its own"
            )
    pieces = tuple((part.kind, part.text if part.kind == TEXT else placeholder(part.kind)) for part in parts)
    turn = Turn(role, "".join(text for _, text in pieces), has_loss, pieces)
    return turn, tuple(part.name for part in parts if part.kind != TEXT)


def _parse_turn(turn: object, where: str) -> tuple[Turn, tuple[str | None, ...]]:
    """A turn, and of each of its placeholders the name that its part gives."""
    if not isinstance(turn, dict):
        raise UserError(f'{where}: is {kind_of(turn)}, but must be an object {{"from": ..., "value": ...}}')
    # In Parquet each turn has the fields of all turns, null or empty where a turn has none.
    turn = {name: value for name, value in turn.items() if is_given(value) or (name in _SAID and value is not None)}
    style = next((style for style in _STYLES if any(name in turn for name in style)), _STYLES[0])
    if turn.get("tool_calls"):
        turn.setdefault(style[1], "")
    for name in style:
        if name not in turn:
            raise UserError(f"{where}: has no field '{name}'; a turn must have '{style[0]}' and '{style[1]}'")
        if not isinstance(turn[name], str) and not (name == "content" and isinstance(turn[name], list)):
            parts = "; write the text with <image>, <audio> and <video> in it" if isinstance(turn[name], list) else ""
            raise UserError(f"{where}: '{name}' is {kind_of(turn[name])}, but must be text{parts}")
    if turn[style[0]] not in _ROLES:
        raise UserError(f"{where}: '{style[0]}' is '{turn[style[0]][:40]}', but must be one of {', '.join(_ROLES)}")
    role, content = _ROLES[turn[style[0]]], turn[style[1]]
    for name in turn:
        if name not in (*style, *_LOSS_FIELDS, *_FIELDS_OF_ROLES.get(role, ())):
            raise UserError(
                f"{where}: has a field '{name}', which is not understood; a turn has '{style[0]}', '{style[1]}' and, "
                "if it is the assistant's, 'loss' and 'tool_calls'"
            )
    has_loss = _has_loss(turn, role, where)
    if turn[style[0]] in _CALL_ROLES and isinstance(content, str):
        return Turn(role, "", has_loss, calls=calls_in_text(content, f"{where}: '{style[1]}'")), ()
    calls = parse_calls(turn["tool_calls"], where) if turn.get("tool_calls") else ()
    answers = tuple((name, str(turn[name])) for name in _FIELDS_OF_ROLES["tool"] if role == "tool" and name in turn)
    if isinstance(content, list):
        one, names = _of_parts(role, typed_parts(content, where), has_loss, where)
        return replace(one, calls=calls, answers=answers), names
    one = Turn(role, _checked_text(content, where), has_loss, calls=calls, answers=answers)
    return one, (None,) * len(_placeholders((one,)))


def _with_calls_joined(turns: list[Turn], listed: list[dict[str, Any]], where: str) -> tuple[Turn, ...]:
    """The turns, those that follow each other and are calls by their role as one: calls that are made at once."""
    joined: list[Turn] = []
    for number, (turn, given) in enumerate(zip(turns, listed), start=1):
        if given.get("from", given.get("role")) in _CALL_ROLES and joined and joined[-1].role == "assistant":
            if joined[-1].text or not joined[-1].calls or joined[-1].has_loss != turn.has_loss:
                raise UserError(
                    f"{where}: turn {number} is a call right behind an answer; write both as one turn with 'tool_calls'"
                )
            joined[-1] = replace(joined[-1], calls=joined[-1].calls + turn.calls)
        else:
            joined.append(turn)
    return tuple(joined)


def _has_loss(turn: dict[str, Any], role: str, where: str) -> bool:
    """The flag `loss` (as in ms-swift), `train` (axolotl) or `weight` (OpenAI; 0 or 1). Default: the assistant's."""
    fields = [field for field in _LOSS_FIELDS if field in turn]
    if not fields:
        return role == "assistant"
    if len(fields) > 1:
        raise UserError(f"{where}: has both '{fields[0]}' and '{fields[1]}'; give one of them")
    field, value = fields[0], turn[fields[0]]
    if field == "weight":
        if isinstance(value, bool) or value not in (0, 1):
            raise UserError(f"{where}: 'weight' is {kind_of(value)}, but must be 0 or 1; turns are learned or not")
    elif not isinstance(value, bool):
        raise UserError(f"{where}: '{field}' is {kind_of(value)}, but must be true or false")
    if value and role != "assistant":
        raise UserError(f"{where}: '{field}' is {kind_of(value)}, but loss is taken on the assistant's turns alone")
    return bool(value)


def _system_turn(record: dict[str, Any], turns: tuple[Turn, ...], where: str) -> tuple[Turn, ...]:
    """The turn of the field 'system', if the record has one."""
    text = record.get(SYSTEM_FIELD)
    if not is_given(text):
        return ()
    if not isinstance(text, str):
        raise UserError(f"{where}: 'system' is {kind_of(text)}, but must be text")
    if any(turn.role == "system" for turn in turns):
        raise UserError(f"{where}: has both a field 'system' and a turn from 'system'; give one of them")
    return (Turn("system", _checked_text(text, f"{where}: 'system'")),)


def _checked_text(text: str, where: str) -> str:
    if text.startswith(DATA_URL_HEAD):
        raise UserError(f"{where}: holds bytes in place of text; write the column as text")
    for match in _OTHER_PLACEHOLDER.finditer(text):
        if not _placeholder_pattern().fullmatch(match.group()):
            raise UserError(
                f"{where}: holds '{match.group()}', but it stands for no file; media are written <image>, <audio> and "
                "<video>"
            )
    return text


def _placeholders(turns: tuple[Turn, ...]) -> tuple[str, ...]:
    return tuple(kind for turn in turns for kind, _ in turn.pieces if kind != TEXT)


def _names(record: dict[str, Any], fields: tuple[str, str], where: str) -> list[str] | None:
    present = [field for field in fields if is_given(record.get(field))]
    if not present:
        return None
    if len(present) > 1:
        raise UserError(f"{where}: has both '{fields[0]}' and '{fields[1]}'; give one of them")
    names = record[present[0]]
    if fields[0] == VIDEO:
        return video_names(names, record.get("fps"), f"{where}: '{present[0]}'")
    names = names if isinstance(names, list) else [names]
    return [media_name(name, f"{where}: '{present[0]}'") for name in names]
