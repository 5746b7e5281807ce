"""The fields of a record: fields that Motet reads, fields that it refuses, and metadata.

A field that changes the training is read or refused, never ignored. Motet refuses such fields of LLaMA-Factory,
ms-swift, axolotl, TRL and others, and names that resemble a field with a meaning. All other fields (`id`, `task`,
`source`, ...) are metadata, which is kept and not used. A field that is null or empty counts as absent.
"""

from __future__ import annotations

import difflib
import re
from functools import lru_cache
from typing import Any

from motet.core.errors import UserError
from motet.core.modalities import AUDIO, VIDEO, modalities
from motet.data.media import modality_of

TURN_FIELDS = ("conversations", "messages")
SYSTEM_FIELD, TOOLS_FIELD, TEXT_FIELD, PARTS_FIELD = "system", "tools", "text", "document"
RECORD_FIELDS = (*TURN_FIELDS, PARTS_FIELD)
"""A table with one of these is a record, and not what is known of one."""
_READ = (
    *TURN_FIELDS,
    SYSTEM_FIELD,
    TOOLS_FIELD,
    PARTS_FIELD,
)

_REFUSED = {
    name: reason
    for reason, names in (
        ("tools are named 'tools', and calls are turns", "tool functions function_call tool_calls parallel_tool_calls"),
        (
            "answers are learned, not compared or judged",
            "chosen rejected rejected_response rejected_messages rejected_images rejected_audios chosen_response "
            "label labels kto_tag margin",
        ),
        (
            "what is learned is said in the turns, by 'loss': true or false",
            "loss loss_scale loss_weight loss_mask weight weights sample_weight mask train train_on_inputs "
            "completion_mask assistant_masks",
        ),
        ("records hold text, not tokens", "input_ids token_ids attention_mask position_ids pixel_values"),
        ("the chat template is given the turns alone", "chat_template chat_template_kwargs enable_thinking documents"),
        ("boxes are not written into the text", "objects"),
        ("a system prompt is named 'system'", "system_prompt system_message"),
    )
    for name in names.split()
}
_OTHER_MEDIA = re.compile(r"(?:image|img|picture|audio|video)s?_(?:path|url|uri|file|filename|bytes|base64)s?")
_MAY_NAME_FILES = re.compile(
    r"image|img|picture|photo|audio|video|clip|sound|speech|wav|media|file|path", re.IGNORECASE
)
"""Names of fields that hold media if their values end as files of media do: `file_name` of HF's folders of images,
`audio_filepath` of NeMo."""
_HELD_MEDIA = re.compile(
    "data:(?:(?:image|audio|video)/[^,]*,|;base64,(?:iVBORw0KGgo|/9j/|R0lGOD|UklGR|ZkxhQ|T2dnU|SUQz))"
)
"""How data URLs of media begin: by their type, or by the first bytes of PNG, JPEG, GIF, RIFF (WAV, WebP), FLAC, Ogg and
MP3, in base64."""
_PARTS = {
    VIDEO: ("start", "end", "start_time", "end_time", "video_start", "video_end", "clip", "nframes"),
    AUDIO: ("start", "end", "start_time", "end_time", "audio_start", "audio_end", "offset"),
}
"""What says in other programs that a part of a video or a clip is taken, or how many of a video's frames."""
_MIN_SIMILARITY = 0.85


def media_fields() -> dict[str, tuple[str, str]]:
    """Modality -> the fields that may name its files, one file or a list: {"image": ("image", "images"), ...}."""
    return {modality: (modality, f"{modality}s") for modality in modalities()}


def taken_fields() -> set[str]:
    """Fields that are read, or refused for what they mean elsewhere: no modality may have their name."""
    others = (
        "image_url",
        "audio_url",
        "input_audio",
        "video_url",
        "path",
        "url",
        "base64",
        "type",
        "metadata",
        "texts",
    )
    return {*_READ, *_REFUSED, TEXT_FIELD, *others}


def is_given(value: object) -> bool:
    """Whether a field has a value: null and an empty text, list or table are none."""
    return value is not None and value not in ("", [], {})


def kind_of(value: object) -> str:
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


def check_fields(record: dict[str, Any], where: str) -> None:
    """Raise UserError naming `where` for the first field that is not read and would change the training."""
    read = (*_READ, *(name for names in media_fields().values() for name in names))
    for name, value in record.items():
        if name not in read and (reason := _refusal(name, read)) and is_given(value):
            raise UserError(f"{where}: has a field '{name}': {reason}")


def check_names_no_media(record: dict[str, Any], where: str) -> None:
    """Raise UserError if a record without placeholders names media, which would silently be missing."""
    read = {
        TEXT_FIELD,
        *(name for names in media_fields().values() for name in names),
    }  # `match_media` says what lacks.
    for name, value in record.items():
        named = _OTHER_MEDIA.fullmatch(name) or (_MAY_NAME_FILES.search(name) and _names_files(value))
        named = named or _holds_media(value)
        if name not in read and is_given(value) and named:
            raise UserError(
                f"{where}: has a field '{name}', but no <image>, <audio> or <video> in its text; name media in "
                "'image', 'audio' or 'video' and put a placeholder where each stands, or remove the field"
            )


def _names_files(value: object) -> bool:
    """Whether a value is the name of a file of media, or a list or a table of such that begins with one."""
    first = next(iter(value), None) if isinstance(value, list) else value
    names = first.values() if isinstance(first, dict) else (first,)
    return any(isinstance(name, str) and modality_of(name) is not None for name in names)


def _holds_media(value: object) -> bool:
    """Whether a value is the bytes of a file of media, as HF datasets or a data URL hold them, or a list of such."""
    first = next(iter(value), None) if isinstance(value, list) else value
    if isinstance(first, dict):
        return first.keys() == {"bytes", "path"} and any(map(is_given, first.values()))
    return isinstance(first, str) and _HELD_MEDIA.match(first) is not None


def check_media_are_whole(record: dict[str, Any], where: str, modality: str) -> None:
    """Raise UserError if a record with a video or a clip asks for a part of it: all of it would be taken."""
    for name in _PARTS.get(modality, ()):
        if is_given(value := record.get(name)) and value != 0:
            taken = ", and [model.video] says which frames are taken" if modality == VIDEO else ""
            raise UserError(
                f"{where}: has a field '{name}', but {'a video' if modality == VIDEO else 'a clip'} is read from its "
                f"begin to its end{taken}; cut the file, or rename the field if it says something else"
            )


@lru_cache(maxsize=4096)
def _refusal(name: str, read: tuple[str, ...]) -> str | None:
    """Why a field that is not read is refused; None for metadata."""
    if reason := _REFUSED.get(name):
        return f"{reason}; remove the field, or leave such records out"
    close = difflib.get_close_matches(name.lower(), (*read, *_REFUSED), n=1, cutoff=_MIN_SIMILARITY)
    # Many records have a `conversation_id`.
    if not close or (close[0] in read and name.lower().endswith("_id")):
        return None
    return f"is it meant to be '{close[0]}'? Rename or remove it"
