"""Contents that are lists of typed parts, as OpenAI, transformers and ms-swift write them, and interleaved documents.

[{"type": "image_url", "image_url": {"url": "data:image/png;base64,..."}}, {"type": "text", "text": "What is it?"}]
{"texts": [null, "A cat."], "images": ["a.png", null]}
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from motet.core.errors import UserError
from motet.core.modalities import own_modalities
from motet.data.media import AUDIO, IMAGE, VIDEO
from motet.data.media_names import DATA_URL, DATA_URL_HEAD, FrameNames, media_name
from motet.data.record_fields import kind_of

_TEXT = "text"
_TYPES = {_TEXT: _TEXT, "image": IMAGE, "image_url": IMAGE, "audio": AUDIO, "audio_url": AUDIO, "input_audio": AUDIO}
_TYPES |= {"video": VIDEO, "video_url": VIDEO}
"""The types of parts, but those of own modalities, which have the modality's name."""
_ANY = ("path", "url", "base64")
"""Where transformers looks for the item of a part of any type."""
_FPS = ("fps", "sample_fps")
"""Where a part says the frames a second of a video whose frames it lists; the latter in Qwen's words."""
TEXTS_FIELD, _IMAGES = "texts", "images"


@dataclass(frozen=True)
class TypedPart:
    """kind: "text", or a modality. text: of a text. name: the path or data URL of an item, if the part names it.

    Example:
        >>> typed_parts([{"type": "image", "path": "a.png"}, {"type": "text", "text": "Hi"}], "line 1")
        [TypedPart(kind='image', text='', name='a.png'), TypedPart(kind='text', text='Hi', name=None)]
    """

    kind: str
    text: str = ""
    name: str | None = None


def typed_parts(content: Sequence[object], where: str) -> list[TypedPart]:
    """The parts of a content. Raises UserError naming `where` for a part that is not understood."""
    return [_typed_part(part, f"{where}: part {number}") for number, part in enumerate(content, start=1)]


def interleaved(record: dict[str, Any], where: str) -> list[TypedPart]:
    """The parts of a document as in OBELICS: two lists of one length, of which one has null where the other has not."""
    texts, images = record[TEXTS_FIELD], record.get(_IMAGES)
    images = [None] * len(texts) if images is None and isinstance(texts, list) else images
    if not isinstance(texts, list) or not isinstance(images, list) or len(images) != len(texts):
        raise UserError(f"{where}: 'texts' and 'images' must be lists of one length, null where the other has an entry")
    parts = []
    for number, (text, image) in enumerate(zip(texts, images), start=1):
        if (text is None) == (image is None):
            both = "neither" if text is None else "both"
            raise UserError(f"{where}: has {both} of a text and an image at place {number} of 'texts' and 'images'")
        if image is not None:
            parts.append(TypedPart(IMAGE, name=media_name(image, f"{where}: place {number} of 'images'")))
        elif isinstance(text, str):
            parts.append(TypedPart(_TEXT, text))
        else:
            raise UserError(f"{where}: place {number} of 'texts' is {kind_of(text)}, but must be text or null")
    if not any(part.text for part in parts):
        raise UserError(f"{where}: 'texts' has no text to learn; leave the record out")
    return parts


def _typed_part(part: object, where: str) -> TypedPart:
    if not isinstance(part, dict):
        raise UserError(f"{where}: is {kind_of(part)}, but must be an object with a 'type'")
    # In Parquet each part has the fields of all parts, null where a part has none.
    part = {name: value for name, value in part.items() if value is not None}
    types = _TYPES | {own.name: own.name for own in own_modalities()}
    named = part.get("type", next((name for name in types if name in part), None))
    if named not in types:
        raise UserError(f"{where}: its type is {kind_of(named)}, but must be one of {', '.join(types)}")
    kind = types[named]
    allowed = (_TEXT,) if kind == _TEXT else (*(name for name, of in types.items() if of == kind), *_ANY)
    lists = kind == VIDEO and any(isinstance(value, list) for value in part.values())
    allowed += _FPS if lists else ()
    for name in part:
        if name != "type" and name not in allowed:
            raise UserError(f"{where}: has a field '{name}', which is not understood in a part of type '{named}'")
    given = [name for name in part if name not in ("type", *(_FPS if lists else ()))]
    if kind == _TEXT:
        if not isinstance(part.get(_TEXT), str):
            raise UserError(f"{where}: 'text' is {kind_of(part.get(_TEXT))}, but must be text")
        return TypedPart(_TEXT, part[_TEXT])
    rates = [name for name in _FPS if lists and name in part]
    for several in (given, rates):
        if len(several) > 1:
            raise UserError(f"{where}: has both '{several[0]}' and '{several[1]}'; give one of them")
    if lists:
        rate = part[rates[0]] if rates else None
        return TypedPart(kind, name=FrameNames.of(part[given[0]], rate, f"{where}: '{given[0]}'"))
    return TypedPart(kind, name=_name(given[0], part[given[0]], f"{where}: '{given[0]}'") if given else None)


def _name(field: str, value: Any, where: str) -> str:
    """The path or data URL of a part. field: where the part has it."""
    if isinstance(value, dict) and "url" in value:
        others = {name: of for name, of in value.items() if name != "url" and of is not None}
        if others not in ({}, {"detail": "auto"}):
            raise UserError(f"{where} has a field '{min(others)}', which is not understood; give its 'url' alone")
        value = value["url"]
    elif isinstance(value, dict) and "data" in value:
        if value.keys() - {"data", "format"}:
            raise UserError(f"{where} must have 'data', its base64, and 'format' alone")
        value = f"{DATA_URL}audio/{value.get('format', '')};base64,{value['data']}"
    elif field == "base64" and isinstance(value, str) and not value.startswith(DATA_URL):
        value = f"{DATA_URL_HEAD}{value}"
    return media_name(value, where)
