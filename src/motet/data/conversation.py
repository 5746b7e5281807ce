"""One record in the LLaVA conversation format, checked: the turns, and the media that their placeholders stand for.

`{"conversations": [{"from": "human", "value": "<image> What is it?"}, {"from": "gpt", "value": "A cat."}], "image":
"a.png"}` with `image`/`images`, `audio`/`audios` naming one file or a list; `<image>` and `<audio>` stand anywhere in
the text, each for the next file of its kind. Other keys are kept and not looked at.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from motet.core.errors import UserError
from motet.data.media import AUDIO, IMAGE, MODALITIES

PLACEHOLDERS = {modality: f"<{modality}>" for modality in MODALITIES}
PLACEHOLDER_PATTERN = re.compile("|".join(f"<({modality})>" for modality in MODALITIES))
_FIELDS = {IMAGE: ("image", "images"), AUDIO: ("audio", "audios")}
_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}


@dataclass(frozen=True)
class Turn:
    """role: user, assistant or system."""

    role: str
    text: str


@dataclass(frozen=True)
class Conversation:
    """turns: at least one of them the assistant's. placeholders: the modality of each, in order of appearance."""

    turns: tuple[Turn, ...]
    placeholders: tuple[str, ...]

    def without_last_answer(self) -> tuple[Conversation, str]:
        """The turns before the last one of the assistant, and what the assistant said in it."""
        last = max(at for at, turn in enumerate(self.turns) if turn.role == "assistant")
        turns = self.turns[:last]
        return Conversation(turns, _placeholders(turns)), self.turns[last].text


def parse_json(text: bytes, where: str) -> dict[str, Any]:
    """The record that a line, or a member of a shard, holds. Raises UserError naming `where`."""
    try:
        record = json.loads(text)
    except UnicodeDecodeError as error:
        raise UserError(f"{where}: is not UTF-8 (byte {error.start}); save the file as UTF-8") from None
    except ValueError as error:
        raise UserError(f"{where}: is no JSON ({error}); each record must be one JSON object") from None
    return check_is_object(record, where)


def check_is_object(record: object, where: str) -> dict[str, Any]:
    if not isinstance(record, dict):
        raise UserError(f"{where}: is {_kind(record)}, but each record must be an object with a field 'conversations'")
    return record


def parse_conversation(record: dict[str, Any], where: str) -> Conversation:
    """The turns of a record. Raises UserError naming `where`, what is wrong and what would be right."""
    if record.get("conversations") is None:
        raise UserError(f'{where}: has no field \'conversations\'; it must be a list of {{"from": ..., "value": ...}}')
    listed = record["conversations"]
    if not isinstance(listed, list) or not listed:
        raise UserError(f"{where}: 'conversations' is {_kind(listed)}, but must be a list of turns, at least one")
    turns = tuple(_parse_turn(turn, f"{where}: turn {number}") for number, turn in enumerate(listed, start=1))
    if all(turn.role != "assistant" for turn in turns):
        raise UserError(f"{where}: has no answer to learn; at least one turn must be from 'gpt' (or 'assistant')")
    return Conversation(turns, _placeholders(turns))


def media_names(record: dict[str, Any], where: str) -> dict[str, list[str] | None]:
    """The files that a record names for each modality; None if it has no such field.

    Raises UserError naming `where`.
    """
    return {modality: _names(record, fields, where) for modality, fields in _FIELDS.items()}


def match_media(conversation: Conversation, names: dict[str, list[str]], where: str) -> list[tuple[str, str]]:
    """(modality, name) of each placeholder in order of appearance.

    Raises UserError unless every one has just one file.
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
    for field in ("from", "value"):
        if field not in turn:
            raise UserError(f"{where}: has no field '{field}'; a turn must have 'from' and 'value'")
        if not isinstance(turn[field], str):
            raise UserError(f"{where}: '{field}' is {_kind(turn[field])}, but must be text")
    if turn["from"] not in _ROLES:
        raise UserError(f"{where}: 'from' is '{turn['from']}', but must be one of {', '.join(_ROLES)}")
    return Turn(_ROLES[turn["from"]], turn["value"])


def _placeholders(turns: tuple[Turn, ...]) -> tuple[str, ...]:
    found = (PLACEHOLDER_PATTERN.finditer(turn.text) for turn in turns)
    return tuple(match.group()[1:-1] for matches in found for match in matches)


def _names(record: dict[str, Any], fields: tuple[str, str], where: str) -> list[str] | None:
    given = [field for field in fields if record.get(field) is not None]
    if not given:
        return None
    if len(given) > 1:
        raise UserError(f"{where}: has both '{fields[0]}' and '{fields[1]}'; give one of them")
    names = record[given[0]]
    names = [names] if isinstance(names, str) else names
    if not isinstance(names, list):
        raise UserError(f"{where}: '{given[0]}' is {_kind(names)}, but must be a file name or a list of file names")
    for name in names:
        if not isinstance(name, str) or not name:
            raise UserError(f"{where}: '{given[0]}' holds {_kind(name)}, but must hold file names")
    return names


def _kind(value: object) -> str:
    """What a JSON value is, in JSON's words."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return f"the text '{value[:40]}'" if value else "an empty text"
    if isinstance(value, (int, float)):
        return f"the number {value}"
    if isinstance(value, list):
        return "a list" if value else "an empty list"
    return "an object" if isinstance(value, dict) else f"a value of type {type(value).__name__}"
