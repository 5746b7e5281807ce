"""Checks a record in the LLaVA conversation format: its turns, and the media of their placeholders.

    {"conversations": [{"from": "human", "value": "<image> What is it?"}, {"from": "gpt", "value": "A cat."}],
     "image": "a.png"}

- `image`/`images` and `audio`/`audios` name one file or a list of files. `<image>` and `<audio>`, anywhere in the text,
  stand for the next file of their kind.
- `messages` with `role` and `content` is the same in OpenAI's words.
- `system` is one more turn in front.
- `"loss": false` in a turn of the assistant takes it out of the loss.

A turn may have no other fields. `data/record_fields.py` says which other fields a record may have.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import motet.core.text_files
from motet.core.errors import UserError
from motet.data.media import MODALITIES
from motet.data.record_fields import (
    MEDIA_FIELDS,
    SYSTEM_FIELD,
    TURN_FIELDS,
    check_fields,
    check_names_no_media,
    is_given,
)

TEXT = "text"
PLACEHOLDERS = {modality: f"<{modality}>" for modality in MODALITIES}
PLACEHOLDER_PATTERN = re.compile(f"<({'|'.join(MODALITIES)})>")
# Other programs' placeholders of an item. As plain text they would be learned without the item.
_OTHER_PLACEHOLDER = re.compile(r"</?\|?\s*(?:image|img|audio|video)s?[\s_-]*\d*\s*\|?>", re.IGNORECASE)
_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}
_TOOL_ROLES = ("tool", "tool_call", "tool_response", "function", "function_call", "observation", "ipython")
_STYLES = (("from", "value"), ("role", "content"))
_LOSS_FIELDS = ("loss", "train", "weight")


@dataclass(frozen=True)
class Turn:
    """One turn. role: user, assistant or system. has_loss: whether the loss counts its text; only the assistant's."""

    role: str
    text: str
    has_loss: bool = False

    @cached_property
    def pieces(self) -> list[tuple[str, str]]:
        """The text and the items in it, in order: ("text", "What is "), ("image", "<image>"); at least one piece."""
        split = PLACEHOLDER_PATTERN.split(self.text)
        pieces = [(piece, PLACEHOLDERS[piece]) if i % 2 else (TEXT, piece) for i, piece in enumerate(split) if piece]
        return pieces or [(TEXT, "")]


@dataclass(frozen=True)
class Conversation:
    """A checked record. turns: at least one has loss. placeholders: the modality of each, in order of appearance.

    Example:
        >>> turns = [{"from": "human", "value": "<image> What is it?"}, {"from": "gpt", "value": "A cat."}]
        >>> conversation = parse_conversation({"conversations": turns, "image": "a.png"}, "line 1")
        >>> conversation.placeholders, conversation.turns[1]
        (('image',), Turn(role='assistant', text='A cat.', has_loss=True))
    """

    turns: tuple[Turn, ...]
    placeholders: tuple[str, ...]

    def without_last_answer(self) -> tuple[Conversation, str]:
        """The turns before the last one with loss, and the text of that one."""
        last = max(i for i, turn in enumerate(self.turns) if turn.has_loss)
        turns = self.turns[:last]
        return Conversation(turns, _placeholders(turns)), self.turns[last].text


def parse_record(text: bytes, where: str) -> dict[str, Any]:
    """The record in a line, or in a member of a shard. Raises UserError naming `where`."""
    return check_is_object(motet.core.text_files.parse_json(text, where), where)


def check_is_object(record: object, where: str) -> dict[str, Any]:
    """The record itself. Raises UserError naming `where` if it is no JSON object."""
    if not isinstance(record, dict):
        raise UserError(f"{where}: is {_kind(record)}, but each record must be an object with a field 'conversations'")
    return record


def parse_conversation(record: dict[str, Any], where: str) -> Conversation:
    """The turns of a record. Raises UserError naming `where`, what is wrong and what would be right."""
    check_fields(record, where)
    fields = [field for field in TURN_FIELDS if record.get(field) is not None]
    if not fields:
        raise UserError(f'{where}: has no field \'conversations\'; it must be a list of {{"from": ..., "value": ...}}')
    if len(fields) > 1:
        raise UserError(f"{where}: has both 'conversations' and 'messages'; give one of them")
    listed = record[fields[0]]
    if not isinstance(listed, list) or not listed:
        raise UserError(f"{where}: '{fields[0]}' is {_kind(listed)}, but must be a list of turns, at least one")
    turns = tuple(_parse_turn(turn, f"{where}: turn {number}") for number, turn in enumerate(listed, start=1))
    turns = (*_system_turn(record, turns, where), *turns)
    if all(turn.role != "assistant" for turn in turns):
        raise UserError(f"{where}: has no answer to learn; at least one turn must be from 'gpt' (or 'assistant')")
    if not any(turn.has_loss for turn in turns):
        raise UserError(f"{where}: has no answer to learn; all its answers are out of the loss; leave the record out")
    conversation = Conversation(turns, _placeholders(turns))
    if not conversation.placeholders:
        check_names_no_media(record, where)
    return conversation


def media_names(record: dict[str, Any], where: str) -> dict[str, list[str] | None]:
    """Modality -> files that the record names; None if it has no such field. Raises UserError naming `where`."""
    return {modality: _names(record, fields, where) for modality, fields in MEDIA_FIELDS.items()}


def match_media(conversation: Conversation, names: dict[str, list[str]], where: str) -> list[tuple[str, str]]:
    """(modality, name) of each placeholder, in order of appearance.

    Raises UserError unless each placeholder has one file and each file one placeholder.
    """
    for modality in MODALITIES:
        num_placeholders, num_files = conversation.placeholders.count(modality), len(names[modality])
        if num_placeholders != num_files:
            raise UserError(
                f"{where}: has {num_placeholders} {PLACEHOLDERS[modality]} in its text, but {num_files} files in "
                f"'{modality}'; each file needs one {PLACEHOLDERS[modality]} and the reverse"
            )
    remaining = {modality: iter(names[modality]) for modality in MODALITIES}
    return [(modality, next(remaining[modality])) for modality in conversation.placeholders]


def _parse_turn(turn: object, where: str) -> Turn:
    if not isinstance(turn, dict):
        raise UserError(f'{where}: is {_kind(turn)}, but must be an object {{"from": ..., "value": ...}}')
    # In Parquet each turn has the fields of all turns, null where a turn has none.
    turn = {name: value for name, value in turn.items() if value is not None}
    style = next((style for style in _STYLES if any(name in turn for name in style)), _STYLES[0])
    for field in style:
        if field not in turn:
            raise UserError(f"{where}: has no field '{field}'; a turn must have '{style[0]}' and '{style[1]}'")
        if not isinstance(turn[field], str):
            parts = "; write the text with <image> and <audio> in it" if isinstance(turn[field], list) else ""
            raise UserError(f"{where}: '{field}' is {_kind(turn[field])}, but must be text{parts}")
    if turn[style[0]] in _TOOL_ROLES:
        raise UserError(f"{where}: '{style[0]}' is '{turn[style[0]]}', but tool use is not trained yet; leave it out")
    if turn[style[0]] not in _ROLES:
        raise UserError(f"{where}: '{style[0]}' is '{turn[style[0]][:40]}', but must be one of {', '.join(_ROLES)}")
    for field in turn:
        if field not in (*style, *_LOSS_FIELDS):
            raise UserError(
                f"{where}: has a field '{field}', which is not understood; a turn has '{style[0]}', '{style[1]}' and, "
                "if it is the assistant's, 'loss'"
            )
    role = _ROLES[turn[style[0]]]
    return Turn(role, _checked_text(turn[style[1]], where), _has_loss(turn, role, where))


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
            raise UserError(f"{where}: 'weight' is {_kind(value)}, but must be 0 or 1; turns are learned or not")
    elif not isinstance(value, bool):
        raise UserError(f"{where}: '{field}' is {_kind(value)}, but must be true or false")
    if value and role != "assistant":
        raise UserError(f"{where}: '{field}' is {_kind(value)}, but loss is taken on the assistant's turns alone")
    return bool(value)


def _system_turn(record: dict[str, Any], turns: tuple[Turn, ...], where: str) -> tuple[Turn, ...]:
    """The turn of the field 'system', if the record has one."""
    text = record.get(SYSTEM_FIELD)
    if not is_given(text):
        return ()
    if not isinstance(text, str):
        raise UserError(f"{where}: 'system' is {_kind(text)}, but must be text")
    if any(turn.role == "system" for turn in turns):
        raise UserError(f"{where}: has both a field 'system' and a turn from 'system'; give one of them")
    return (Turn("system", _checked_text(text, f"{where}: 'system'")),)


def _checked_text(text: str, where: str) -> str:
    for match in _OTHER_PLACEHOLDER.finditer(text):
        if not PLACEHOLDER_PATTERN.fullmatch(match.group()):
            why = "videos are not trained yet" if "video" in match.group().lower() else "it stands for no file"
            raise UserError(f"{where}: holds '{match.group()}', but {why}; media are written <image> and <audio>")
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
    names = [names] if isinstance(names, str) else names
    if not isinstance(names, list):
        raise UserError(f"{where}: '{present[0]}' is {_kind(names)}, but must be a file name or a list of file names")
    for name in names:
        if not isinstance(name, str) or not name:
            raise UserError(f"{where}: '{present[0]}' holds {_kind(name)}, but must hold file names")
    return names


def _kind(value: object) -> str:
    """A JSON value in words, for an error sentence."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return f"the text '{value[:40]}'" if value else "an empty text"
    if isinstance(value, (int, float)):
        return f"the number {str(value)[:40]}"
    if isinstance(value, list):
        return "a list" if value else "an empty list"
    return "an object" if isinstance(value, dict) else f"a value of type {type(value).__name__}"
