"""The tokens of an item in a rendered conversation: the model's own, or a stand-in.

A multimodal model's chat template writes an item by itself if the item is a part of a turn. For one image Qwen2-VL's
template writes `<|vision_start|><|image_pad|><|vision_end|>`. Rendering a turn with and without an item shows what it
writes. The item's rows replace one of these special tokens; the others are the model's marks and stay. Some processors
change the text again before it is tokenised. The processors that Motet knows are listed here by their classes in
transformers; any other is refused.

A model that does not read the modality (a text model, for example) has no tokens for it. Then an item is one special
token: its placeholder (`<image>`) if that is a token, else any other. The item's rows replace it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from motet.core.crops import CropRule
from motet.core.errors import UserError
from motet.core.example import FrameTexts
from motet.core.modalities import modalities
from motet.core.words import number_words
from motet.data.chat_template import ChatTemplate
from motet.data.conversation import TEXT, placeholder
from motet.data.media import AUDIO, IMAGE, VIDEO

_AS_WRITTEN = {
    "LlavaProcessor": {IMAGE: "<image>"},
    "LlavaNextProcessor": {IMAGE: "<image>"},
    "LlavaOnevisionProcessor": {IMAGE: "<image>", VIDEO: "<video>"},
    "Qwen2VLProcessor": {IMAGE: "<|image_pad|>", VIDEO: "<|video_pad|>"},
    "Qwen2_5_VLProcessor": {IMAGE: "<|image_pad|>", VIDEO: "<|video_pad|>"},
    "Qwen3VLProcessor": {IMAGE: "<|image_pad|>", VIDEO: "<|video_pad|>"},
    "Qwen2AudioProcessor": {AUDIO: "<|AUDIO|>"},
    "Qwen2_5OmniProcessor": {IMAGE: "<|IMAGE|>", AUDIO: "<|AUDIO|>", VIDEO: "<|VIDEO|>"},
    "Glm4vProcessor": {IMAGE: "<|image|>"},
    "PaliGemmaProcessor": {IMAGE: "<image>"},
    "MllamaProcessor": {IMAGE: "<|image|>"},
}
"""Processors that only repeat the template's token, once for each row -> the token, in case no file names it."""
BARE = ("PaliGemmaProcessor",)
"""Processors that let the tokenizer put nothing around a text."""
BEGUN = ("MllamaProcessor",)
"""Processors that put the token that begins a text elsewhere, unless the template has written it first."""
_MARKS = {
    "Gemma3Processor": {IMAGE: ("boi_token", "eoi_token")},
    "Gemma3nProcessor": {IMAGE: ("boi_token", "eoi_token"), AUDIO: ("boa_token", "eoa_token")},
}
"""Processors that put each item between two tokens, with empty lines around -> the names of these tokens."""
_ENCLOSED = {"InternVLProcessor": {IMAGE: ("start_image_token", "context_image_token", "end_image_token")}}
"""Processors that put the template's token between two others -> the names of all three."""
_TILE_MARKS = {"fake_image_token": "<fake_token_around_image>", "global_image_token": "<global-img>"}
"""Names of the tokens around tiles, which SmolVLM's tokenizers may have otherwise -> what they are by default."""
TILED = {"Idefics3Processor": {IMAGE: "<image>"}, "SmolVLMProcessor": {IMAGE: "<image>"}}
"""Processors that put marks before each tile of an item, and one behind the last -> the token of a tile's rows."""

_ROLES = ("system", "user", "assistant")
_TEXT_MARK, _DUMP_MARK = "\ue0f0", "\ue0f1"


@dataclass(frozen=True)
class MediaForm:
    """The text and the token of an item of one modality in a conversation.

    is_part: whether the item is passed to the template as a part of a turn.
    written: the text that the template writes for it.
    put:     the text that replaces `written` before the conversation is tokenised.
    token:   the special token in `put` that the item's rows replace.
    breaks_line: whether the template writes a line break behind the item; one that a record has there is the same.
    is_first: whether it then writes items before all texts of a turn; one that a record has before it is the same, too.
    """

    is_part: bool
    written: str
    put: str
    token: str
    breaks_line: bool = False
    is_first: bool = False


@dataclass(frozen=True)
class TokenNames:
    """The named tokens of a tokenizer's directory.

    special:   name (`eos_token`, `image_token`, ...) -> token.
    processor: the class that prepares texts and media for the tokenizer's model; None for a text model.
    forms:     modality -> the token that the template writes for an item, and what the processor puts in its place,
               with one such token; where it is known, `processor` is not asked.
    beside:    modality -> that of a second item of the same file, whose token is put right behind the first one's.
    frames:    what the processor writes of a video, where its frames stand as images; None: they do not.
    crops:     which images have crops behind them, with text around them; None: none has.
    """

    special: dict[str, str]
    processor: str | None = None
    forms: dict[str, tuple[str, str]] = field(default_factory=dict)
    beside: dict[str, str] = field(default_factory=dict)
    frames: FrameTexts | None = None
    crops: CropRule | None = None


def media_form(modality: str, template: ChatTemplate, tokens: Iterable[str], names: TokenNames) -> MediaForm:
    """The form of a modality's items. tokens: those that the tokenizer keeps whole, special ones first.

    Raises UserError if it is unknown which token stands for an item, or how the model's processor changes it.
    """
    tokens = list(tokens)
    written = _written_tokens(modality, template, tokens)
    named = names.special.get(f"{modality}_token") or _AS_WRITTEN.get(names.processor or "", {}).get(modality)
    if modality in names.beside:
        return _with_item_beside(modality, named, names, template)
    if modality in names.forms:
        return _as_put(modality, written, names, template)
    if modality == VIDEO and names.frames is not None:
        return _as_frames(names.frames, names, template)
    if not written:
        return _stand_in(modality, tokens, names, named)
    if names.processor in TILED and modality in TILED[names.processor]:
        return _tiled(modality, written, names, template)
    if names.processor in _ENCLOSED and modality in _ENCLOSED[names.processor]:
        return _enclosed(modality, written, names, template)
    if names.processor in _MARKS:
        return _between_marks(modality, written, names)
    if names.processor is not None and names.processor not in _AS_WRITTEN:
        raise UserError(
            f"the tokenizer is of a model whose {names.processor} prepares texts in a way that is not known here, so "
            f"{modality} tokens cannot be placed; put the processor's files beside it if they are missing "
            "(preprocessor_config.json, processor_config.json), or take the tokenizer of another model"
        )
    if named is None and len(written) == 1:
        named = next(iter(written))
    if named is None or written[named] != 1:
        raise UserError(
            f"the tokenizer's chat template writes {' '.join(written.elements())} for one {modality}, and which "
            f"of them stands for it is not said; name it as '{modality}_token' in tokenizer_config.json"
        )
    return MediaForm(True, named, named, named, *_breaks(modality, named, written, template))


def reserved_tokens(template: ChatTemplate, tokens: Iterable[str], names: TokenNames) -> set[str]:
    """Special tokens that no text of a user may hold: named ones, and those that the template itself writes."""
    tokens = list(tokens)
    contents = {role: [{"type": TEXT, TEXT: role}] if role in template.roles_in_parts else role for role in _ROLES}
    turns = [{"role": role, "content": content} for role, content in contents.items()]
    rendered = [template.try_messages(turns[start:], generation_prompt=True) for start in (0, 1)]
    rendered += [template.try_messages(_one_turn(template, {"type": kind})) for kind in modalities()]
    written = {token for text in rendered if text for token in _occurrences(text, tokens)}
    return written | {token for token in names.special.values() if token in tokens and not token.isspace()}


def item_tokens(form: MediaForm, modality: str, template: ChatTemplate, tokens: Iterable[str]) -> set[str]:
    """The tokens that a modality's item is made of: the one that its rows replace, and the model's marks around it."""
    tokens = list(tokens)
    return {form.token, *_written_tokens(modality, template, tokens), *_occurrences(form.put, tokens)}


def document_text(form: MediaForm, modality: str, template: ChatTemplate, tokens: Iterable[str]) -> str:
    """What stands for an item in a text without turns: its token, with the model's marks that touch it."""
    tokens = list(tokens)
    text = template.try_messages(_one_turn(template, {"type": modality})) if form.is_part else None
    if text is None:
        return form.put
    mark = "|".join(map(re.escape, sorted(_written_tokens(modality, template, tokens), key=len, reverse=True)))
    found = re.search(f"(?:{mark})*{re.escape(form.written)}(?:{mark})*", text)
    return found.group().replace(form.written, form.put) if found else form.put


def _written_tokens(modality: str, template: ChatTemplate, tokens: list[str]) -> Counter[str]:
    """The special tokens that the template writes for one item; none if it does not know such parts."""
    without = template.try_messages(_one_turn(template))
    text = template.try_messages(_one_turn(template, {"type": modality, "dumped": _DUMP_MARK}))
    if without is None or text is None or _TEXT_MARK not in text or _DUMP_MARK in text + without:
        return Counter()
    return Counter(_occurrences(text, tokens)) - Counter(_occurrences(without, tokens))


def _one_turn(template: ChatTemplate, *items: dict[str, str]) -> list[dict[str, Any]]:
    """A question with items in it, and an answer, as messages."""
    answer: Any = [{"type": TEXT, TEXT: _TEXT_MARK}] if "assistant" in template.roles_in_parts else _TEXT_MARK
    question = [*items, {"type": TEXT, TEXT: _TEXT_MARK}]
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def _occurrences(text: str, tokens: list[str]) -> list[str]:
    """The tokens in a text, in order. White space is no token here: a template writes it as text."""
    visible = sorted((token for token in tokens if not token.isspace()), key=len, reverse=True)
    return re.findall("|".join(map(re.escape, visible)), text) if visible else []


def _breaks(modality: str, token: str, written: Iterable[str], template: ChatTemplate) -> tuple[bool, bool]:
    """`breaks_line` and `is_first` of a MediaForm. written: the special tokens of an item, of which marks follow."""
    behind = f"{re.escape(token)}(?:{'|'.join(map(re.escape, written))})*\n"
    question, answer = _one_turn(template, {"type": modality})
    turned = question | {"content": question["content"][::-1]}
    as_asked, other_way = (template.try_messages([asked, answer]) or "" for asked in (question, turned))
    breaks_line = re.search(behind, as_asked) is not None
    return breaks_line, breaks_line and 0 <= other_way.find(token) < other_way.find(_TEXT_MARK)


def _stand_in(modality: str, tokens: list[str], names: TokenNames, named: str | None) -> MediaForm:
    """The form of a modality for which the template writes nothing. named: the model's own token for it, if any."""
    written = placeholder(modality)
    modalities = _AS_WRITTEN.get(names.processor or "") or _MARKS.get(names.processor or "")
    is_read = names.processor is not None and (modalities is None or modality in modalities)
    if (named is not None or is_read) and not (named == written and names.processor in (None, *_AS_WRITTEN)):
        raise UserError(
            f"the tokenizer is of a model with {modality} tokens of its own ({named or names.processor}), but its chat "
            f"template writes none for a part of type '{modality}'; give it the model's own template"
        )
    if not tokens:
        raise UserError("the tokenizer has no special token that could stand for an image or a clip; add '<image>'")
    token = written if written in tokens else tokens[0]
    return MediaForm(False, written, token, token)


def _as_put(modality: str, written: Counter[str], names: TokenNames, template: ChatTemplate) -> MediaForm:
    """The form of an item of which it is known what the processor puts for it."""
    token, put = names.forms[modality]
    if written[token] != 1:
        raise UserError(f"the tokenizer's chat template does not write one {token} for an item of {modality}")
    return MediaForm(True, token, put, token, *_breaks(modality, token, written, template))


def _with_item_beside(modality: str, token: str | None, names: TokenNames, template: ChatTemplate) -> MediaForm:
    """The form of a video that is read with its sound: between the marks of both, its token and that of the sound.

    As Qwen2_5OmniProcessor writes it, before it lets them alternate.
    """
    beside = names.beside[modality]
    other = names.special.get(f"{beside}_token") or _AS_WRITTEN.get(names.processor or "", {}).get(beside)
    marks = [f"{kind}_{side}_token" for kind in ("vision", beside) for side in ("bos", "eos")]
    begin, end, begin_beside, end_beside = (names.special.get(name) for name in marks)
    text = template.try_messages(_one_turn(template, {"type": modality})) or ""
    if (
        token is None
        or other is None
        or begin_beside is None
        or end_beside is None
        or f"{begin}{token}{end}" not in text
    ):
        raise UserError(
            f"the tokenizer does not name the tokens of {modality} and {beside}, or the marks around them "
            f"({', '.join(marks)}), or its chat template does not write a {modality} between two of these; take its "
            "files as they were published, or remove model.video.sound"
        )
    put = f"{begin_beside}{token}{other}{end_beside}"
    return MediaForm(True, token, put, token, *_breaks(modality, token, (), template))


def _enclosed(modality: str, written: Counter[str], names: TokenNames, template: ChatTemplate) -> MediaForm:
    """The form of an item whose token the processor puts between two others."""
    begin, token, end = (names.special.get(name) for name in _ENCLOSED[str(names.processor)][modality])
    if begin is None or token is None or end is None or written != Counter([token]):
        raise UserError(
            f"the tokenizer is of a model with {names.processor}, but does not name the token that its template writes "
            f"for an item of {modality}, and those around it; take its tokenizer_config.json as it was published"
        )
    return MediaForm(True, token, f"{begin}{token}{end}", token, *_breaks(modality, token, written, template))


def _tiled(modality: str, written: Counter[str], names: TokenNames, template: ChatTemplate) -> MediaForm:
    """The form of an item in tiles, as it stands before its size is known: a mark, its token, a mark."""
    token = names.special.get(f"{modality}_token", TILED[str(names.processor)][modality])
    if written != Counter([token]):
        raise UserError(f"the tokenizer's chat template does not write one {token} for an item of {modality}")
    mark = _tile_marks(names)[0]
    return MediaForm(True, token, f"{mark}{token}{mark}", token, *_breaks(modality, token, written, template))


def tiled_text(form: MediaForm, names: TokenNames, rows: int, columns: int) -> str:
    """What stands between the first mark and the last one of an item in rows x columns tiles.

    Each tile's rows are one token here. Behind several tiles stands the whole image; an image of 1 x 1 is that alone.
    """
    mark, whole = _tile_marks(names)
    if rows * columns == 1:
        return whole + form.token
    lines = (
        "".join(f"{mark}<row_{row}_col_{column}>{form.token}" for column in range(1, columns + 1))
        for row in range(1, rows + 1)
    )
    tiles = "".join(f"{line}\n" for line in lines)
    return f"{tiles}\n{mark}{whole}{form.token}".removeprefix(mark)


CROPPED = "Here is the original image "
"""What Gemma3Processor writes before an image that has crops behind it."""


def cropped_text(form: MediaForm, num_crops: int) -> str:
    """What stands between the first mark of an image with crops and the last one; rows of each are one token.

    As Gemma3Processor writes it.
    """
    crops = " ".join([form.put] * num_crops)
    text = f"{form.put} and here are some crops to help you see better {crops}"
    before, behind = form.put.split(form.token)
    return text.removeprefix(before).removesuffix(behind)


def timed_frames(form: MediaForm, names: TokenNames, times: Sequence[float]) -> list[tuple[str, str]]:
    """What stands between the marks around an item that is frames at times: the time of each, and its enclosed rows.

    The rows are one token here. As Qwen3VLProcessor writes it.
    """
    begin, end = (names.special.get(f"vision_{side}_token", f"<|vision_{side}|>") for side in ("start", "end"))
    return [(f"<{time:.1f} seconds>", f"{begin}{form.token}{end}") for time in times]


def _as_frames(texts: FrameTexts, names: TokenNames, template: ChatTemplate) -> MediaForm:
    """The form of a video whose frames stand as images, before their number is known: the first words, a token, a mark.

    The words before the number are the same of all videos, and so is what stands behind the last mark: both touch other
    texts, with which they may share tokens.
    """
    written = names.special.get("video_token", "<video>")
    if (template.try_messages(_one_turn(template, {"type": VIDEO})) or "").count(written) != 1:
        raise UserError(f"the chat template of videos does not write one {written} for a video")
    token, mark = names.special.get("image_token", TILED[str(names.processor)][IMAGE]), _tile_marks(names)[0]
    put = f"{first_words(texts)}{token}{mark}{texts.end}"
    return MediaForm(True, written, put, token, *_breaks(VIDEO, written, (), template))


def first_words(texts: FrameTexts) -> str:
    """What stands before a video's frames and is the same of all videos, without the space behind it."""
    return texts.begin.partition("{frame_count}")[0].rstrip()


def frames_text(form: MediaForm, names: TokenNames, seconds: float, times: Sequence[float]) -> list[str]:
    """What stands between the first words of a video and its last mark, a text a frame; a frame's rows are one token.

    seconds: how long it is. times: the second of each frame. As SmolVLMProcessor writes it of a video alone.
    """
    texts, (mark, whole) = names.frames, _tile_marks(names)
    assert texts is not None
    lasts = str(timedelta(seconds=int(seconds)))
    begin = texts.begin.format(frame_count=number_words(len(times)), video_duration=lasts)
    before = [begin.removeprefix(first_words(texts)), *[mark] * (len(times) - 1)]
    stamps = [f"{int(time // 60):02d}:{int(time % 60):02d}" for time in times]
    return [
        f"{text}{texts.frame.format(timestamp=stamp)}{mark}{whole}{form.token}" for text, stamp in zip(before, stamps)
    ]


def _tile_marks(names: TokenNames) -> tuple[str, str]:
    """What stands before each tile, and behind that before the whole image."""
    named = names.special if names.processor == "SmolVLMProcessor" else {}
    around, whole = (named.get(name, mark) for name, mark in _TILE_MARKS.items())
    return around, whole


def _between_marks(modality: str, written: Counter[str], names: TokenNames) -> MediaForm:
    """The form of an item that the processor puts between two marks."""
    marks = [names.special.get(name) for name in _MARKS[str(names.processor)].get(modality, ())]
    token = names.special.get(f"{modality}_token")
    if len(marks) != 2 or None in marks or token is None or written.total() != 1:
        raise UserError(
            f"the tokenizer is of a model with {names.processor}, but does not name the tokens for an item of "
            f"{modality} and around it; take its tokenizer_config.json as it was published"
        )
    return MediaForm(True, next(iter(written)), f"\n\n{marks[0]}{token}{marks[1]}\n\n", token)
