"""Conversations to tokens: the tokenizer's chat template, one token for each item, loss on the answers alone.

The whole text is rendered and tokenised once. Character offsets match tokens to answers: a token that shares any
character with an answer is a target. So the result is also right for tokenizers that merge across turns. An item is one
special token, at which every tokenizer splits (`data/media_tokens.py`).

A document has no turns, so no template: its tokens are those of its text, with what the tokenizer itself puts around a
text and the end-of-sequence token, and all of its text is learned.

A text must not hold a named special token or one that the template writes: it would end a turn or stand for an item.
Other special tokens in a text (boxes, for example) become tokens.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, replace
from functools import cache, cached_property, partial
from itertools import accumulate
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from motet.core.arrays import BoolArray, Int64Array
from motet.core.crops import CropRule
from motet.core.errors import UserError
from motet.core.example import FrameTexts, ItemText, TokenSequence
from motet.data.chat_template import DEFAULT_TEMPLATE, ChatTemplate
from motet.data.conversation import TEXT, Conversation, Turn
from motet.data.media import IMAGE, VIDEO
from motet.data.media_tokens import (
    BARE,
    BEGUN,
    CROPPED,
    TILED,
    MediaForm,
    TokenNames,
    cropped_text,
    document_text,
    first_words,
    frames_text,
    item_tokens,
    media_form,
    reserved_tokens,
    tiled_text,
    timed_frames,
)
from motet.data.rendered_turns import given_as_parts, tool_text, turns_before, without_double_breaks
from motet.data.tokenizer_backend import TokenizerBackend
from motet.data.tokenizer_files import (
    TOOL_TEMPLATE,
    open_by_transformers,
    read_template,
    read_tokenizer,
    special_tokens,
)

# Part of every fingerprint: increment it when the same tokenizer and template give other tokens than before.
_VERSION = 7


class ChatTokenizer:
    """A tokenizer with its chat template; picklable, and small enough to send to worker processes.

    backend:        the tokenizer as the JSON of the tokenizers library (`tokenizer.json`).
    template:       Jinja source; None: the default template.
    special_tokens: name -> token; the default template needs at least eos_token.
    processor:      the class in transformers that prepares the inputs of the tokenizer's model; None for a text model.
    tool_template:  the template of conversations with tools; None: theirs is that of all.
    """

    def __init__(
        self,
        backend: str,
        template: str | None,
        special_tokens: dict[str, str],
        *,
        processor: str | None = None,
        tool_template: str | None = None,
    ) -> None:
        if template is None and "eos_token" not in special_tokens:
            raise UserError("the tokenizer has no chat template and no eos_token; give it one of them")
        self.backend = TokenizerBackend(backend, special_tokens)
        self._template = ChatTemplate(template or DEFAULT_TEMPLATE, special_tokens)
        self._tool_template = ChatTemplate(tool_template, special_tokens) if tool_template else self._template
        self._names = TokenNames(special_tokens, processor)

    @classmethod
    def from_directory(
        cls,
        directory: str | Path,
        template: str | None = None,
        forms: Mapping[str, tuple[str, str]] = MappingProxyType({}),
        beside: Mapping[str, str] = MappingProxyType({}),
        frames: FrameTexts | None = None,
        crops: CropRule | None = None,
    ) -> ChatTokenizer:
        """The tokenizer of a directory with tokenizer.json and tokenizer_config.json, as transformers writes it.

        template: in place of the default template, for a directory without one.
        forms: modality -> the token that the template writes for an item, and what its processor puts in its place,
               with one such token.
        beside: modality -> that of a second item of the same file, whose token is put right behind the first one's.
        frames: what its processor writes of a video, where frames stand as images.
        crops: which images its processor puts crops behind.
        transformers opens a directory of an older format (vocab.json and merges.txt, sentencepiece).
        Raises UserError if there is no tokenizer, or one of its files is damaged.
        """
        directory = Path(directory)
        if not directory.is_dir():
            raise UserError(f"tokenizer {directory}: there is no such directory; it must hold tokenizer.json")
        if not os.path.lexists(directory / "tokenizer.json"):
            return cls._convert(directory, template)
        files = read_tokenizer(directory)
        try:
            source = files.template or template
            of_model: Any = {"processor": files.names.processor, "tool_template": files.tool_template}
            tokenizer = cls(files.backend, source, files.names.special, **of_model)
            names = replace(tokenizer._names, forms=dict(forms), beside=dict(beside), frames=frames, crops=crops)
            tokenizer._names = names
            tokenizer._template.check()
            tokenizer._tool_template.check()
        except UserError as error:
            raise UserError(f"tokenizer {directory}: {error}") from None
        return tokenizer

    @classmethod
    def from_transformers(cls, tokenizer: Any, template: str | None = None) -> ChatTokenizer:
        """A fast tokenizer of transformers. template: replaces the tokenizer's own."""
        given = tokenizer.chat_template
        named = given if isinstance(given, dict) else {"default": given}
        processor = tokenizer.init_kwargs.get("processor_class")
        tool_template = named.get(TOOL_TEMPLATE) if processor is None and template is None else None
        backend, special = tokenizer.backend_tokenizer.to_str(), special_tokens(tokenizer)
        return cls(backend, template or named.get("default"), special, processor=processor, tool_template=tool_template)

    @cached_property
    def fingerprint(self) -> str:
        """Equal for two tokenizers only if they give the same tokens."""
        digest = hashlib.blake2b(digest_size=16)
        forms: list[Any] = [each for each in (self._names.forms, self._names.beside) if each]
        forms += [astuple(each) for each in (self._names.frames, self._names.crops) if each]
        names = json.dumps([self._names.special, self._names.processor, *forms], sort_keys=True)
        sources = dict.fromkeys(each.source for each in (self._template, self._tool_template))
        for part in (str(_VERSION), *sources, names):
            digest.update(part.encode() + b"\0")
        digest.update(self.backend.source.encode())
        return digest.hexdigest()

    @property
    def vocabulary_size(self) -> int:
        """One more than the largest token id."""
        return self.backend.vocabulary_size

    @property
    def end_token(self) -> int | None:
        """The id of the end-of-sequence token."""
        name = self._names.special.get("eos_token")
        return None if name is None else self.backend.token_id(name)

    @cached_property
    def end_tokens(self) -> frozenset[int]:
        """The ids of tokens that end an answer: that of a sequence, and what the template has learned behind answers.

        A chat template may end turns by a token of its own, `<end_of_turn>`, and the tokenizer name another one.
        """
        ends = set() if self.end_token is None else {self.end_token}
        return frozenset(ends.union(*self._learned_ends))

    @property
    def ends_answers(self) -> bool:
        """Whether a special token is learned behind the last answer; True if no conversation could be tried."""
        return not self._learned_ends or bool(self._learned_ends[-1])

    @property
    def unlearned_lead(self) -> str:
        """As of `ChatTemplate`."""
        return self._template.unlearned_lead

    @property
    def untrained_prompt(self) -> str:
        """As of `ChatTemplate`."""
        return self._template.untrained_prompt

    @cached_property
    def _learned_ends(self) -> list[set[int]]:
        """The special token that is learned behind each of two answers, if there is one; [] if none can be tried."""
        turns = (Turn("user", "a"), Turn("assistant", "a", has_loss=True)) * 2
        try:
            sequence = self.encode(Conversation(turns, ()))
        except UserError:  # Another form of conversation may do.
            return []
        special, ends = set(self.backend.special.values()), []
        for run in np.split(np.arange(len(sequence.tokens)), np.flatnonzero(np.diff(sequence.targets)) + 1):
            tokens = sequence.tokens[run].tolist() if sequence.targets[run[0]] else []
            # A line break may stand behind the token that ends a turn.
            while tokens and not self.backend.decode(tokens[-1:], special=True).strip():
                del tokens[-1]
            ends += [special.intersection(tokens[-1:])] if tokens else []
        return ends

    def encode(self, conversation: Conversation, raws: Sequence[tuple[int, int]] = ()) -> TokenSequence:
        """All tokens of a conversation, those of the answers (end token included) as targets. Raises UserError.

        Of a document all text has loss, with the end token, and without the marks of items.
        raws: what the header of each item says; () if no text follows from it.
        """
        forms, leads = self._forms(conversation), self._leads(conversation.placeholders, raws)
        if conversation.is_document:
            return self._with_items_beside(self._encode_document(conversation, forms, leads))
        template, turns = self._template_for(conversation), without_double_breaks(conversation.turns, forms)
        text, spans, is_marked = template.render_with_answers(turns, given_as_parts(forms))
        behind = self._past_end_of_sequence if is_marked else self._past_end_token
        spans = [(start, behind(text, end)) for start, end in spans]
        before = turns_before(template, conversation, turns, forms, text)
        sequence = self._with_items_beside(self._tokenise(text, spans, conversation.placeholders, forms, leads, before))
        if not sequence.targets.any():
            raise UserError("the answers come to no token that could be learned; leave the record out")
        return sequence

    def encode_prompt(
        self, conversation: Conversation, raws: Sequence[tuple[int, int]] = ()
    ) -> tuple[TokenSequence, str]:
        """For evaluation: the tokens before the last answer with the prompt for it, and what is to be answered.

        raws: as of `encode`, of all items of the conversation.
        That is the answer's text, behind what else the template writes between it and the prompt.
        """
        if conversation.is_document:
            raise UserError("it is a document, in which nothing is asked")
        before, answer = conversation.without_last_answer()
        forms = self._forms(before)
        template, turns = self._template_for(before), without_double_breaks(before.turns, forms)
        text = template.render(turns, given_as_parts(forms), generation_prompt=True)
        answer = self._expected(conversation, len(turns)) or answer
        of_items = turns_before(template, before, turns, forms, text, generation_prompt=True)
        leads = self._leads(before.placeholders, raws)
        tokens = self._tokenise(text, [], before.placeholders, forms, leads, of_items, is_prompt=True)
        return self._with_items_beside(tokens), answer

    def _expected(self, conversation: Conversation, number: int) -> str:
        """What the answer of a turn adds to the prompt for it, but for the token that ends it; "" if unknown.

        It is the answer's own text, as a rule. Qwen3's template writes a thought before it.
        """
        forms = self._forms(conversation)
        template, turns = self._template_for(conversation), without_double_breaks(conversation.turns, forms)
        try:
            text, spans, _ = template.render_with_answers(turns, given_as_parts(forms))
        except UserError:
            return ""
        asked = template.num_asked(turns, number, text, given_as_parts(forms))
        added = "" if asked is None or turns[number].calls else text[asked : spans[-1][1]].rstrip()
        for token in (token for token, token_id in self.backend.special.items() if token_id in self.end_tokens):
            added = added.removesuffix(token)
        return added

    def items_of(self, modality: str) -> tuple[str, ...]:
        """The modalities of the items that the file of one becomes: its own, and of those beside it."""
        beside = self._names.beside.get(modality)
        return (modality,) if beside is None else (modality, beside)

    def item_tokens(self, modality: str) -> frozenset[int]:
        """The ids of the tokens of an item: the one that its rows replace, and the marks around it."""
        template = self._template_of((modality,))
        tokens = item_tokens(self._form(modality, template), modality, template, self.backend.added)
        return frozenset(self.backend.added[token] for token in tokens if token in self.backend.added)

    def item_text(self, modality: str) -> Callable[[tuple[int, ...]], ItemText | None] | None:
        """Size of an item -> what stands in its place, where its rows come in several pieces; None: they are one run,
        those of this item or of all.

        Sizes are rows and columns of tiles, or of squares of an image and its crops.
        """
        if modality == IMAGE and self._names.crops is not None:
            return cache(partial(self._text_of_crops, self._form(modality, self._template)))
        if modality not in TILED.get(self._names.processor or "", {}):
            return None
        return cache(partial(self._text_of_tiles, self._form(modality, self._template)))

    def timed_text(self, modality: str, times: Sequence[float]) -> ItemText | None:
        """What stands in the place of an item whose frames are in pieces, each at its second; None: there are none.

        O(frames); the tokens of a time are found once.
        """
        if not times:
            return None
        form, tokens, places, length = self._form(modality, self._template), list[Int64Array](), list[int](), 0
        for time, rows in timed_frames(form, self._names, times):
            for text in (time, rows):
                if text not in self._timed:
                    self._timed[text] = self._between(form.token, text)
            place = int(np.flatnonzero(self._timed[rows] == self.backend.added[form.token])[0])
            places.append(length + len(self._timed[time]) + place)
            tokens += [self._timed[time], self._timed[rows]]
            length += len(tokens[-2]) + len(tokens[-1])
        return ItemText(np.concatenate(tokens), np.array(places, dtype=np.int64))

    def frames_text(self, seconds: float, times: Sequence[float]) -> ItemText:
        """What stands in the place of a video of so many seconds, whose frames, each at its second, stand as images.

        Raises UserError where the tokenizer joins the number of frames with the words before it. O(frames); the tokens
        of a time are found once.
        """
        form, texts = self._form(VIDEO, self._template_of((VIDEO,))), self._names.frames
        assert texts is not None
        first, *others = frames_text(form, self._names, seconds, times)
        words = first_words(texts)
        alone, joined = self._between(form.token, words), self._between(form.token, words + first)
        if not np.array_equal(joined[: len(alone)], alone):
            raise UserError(
                f"the tokenizer joins the end of '{words}' with what stands behind it, so a video has no place of its "
                "own in a text"
            )
        for text in others:
            if text not in self._timed:
                self._timed[text] = self._between(form.token, text)
        tokens = np.concatenate([joined[len(alone) :], *(self._timed[text] for text in others)])
        return ItemText(tokens, np.flatnonzero(tokens == self.backend.added[form.token]))

    def _between(self, token: str, text: str) -> Int64Array:
        """The tokens of a text that stands between two special tokens, without these."""
        return self.backend.encode(f"{token}{text}{token}")[0][1:-1]

    def _text_of_crops(self, form: MediaForm, size: tuple[int, ...]) -> ItemText | None:
        """What stands between the marks of an image and those of its last crop; None: it has none."""
        if size[0] == 1:
            return None
        tokens = self._between(form.token, cropped_text(form, size[0] - 1))
        return ItemText(tokens, np.flatnonzero(tokens == self.backend.added[form.token]))

    def _leads(self, placeholders: Sequence[str], raws: Sequence[tuple[int, int]]) -> list[str]:
        """What the processor writes before each item, because of its size."""
        rule = self._names.crops
        if rule is None:
            return [""] * len(placeholders)
        has_crops = rule.sides(np.array(raws[: len(placeholders)], dtype=np.int64).reshape(-1, 2)).any(axis=1)
        kinds = zip(placeholders, has_crops.tolist(), strict=True)
        return [CROPPED if kind == IMAGE and is_cropped else "" for kind, is_cropped in kinds]

    def _text_of_tiles(self, form: MediaForm, size: tuple[int, ...]) -> ItemText:
        """All tokens of the item but the first and the last, which stand around it in every sequence."""
        before, behind = form.put.split(form.token)
        tokens, _ = self.backend.encode(before + tiled_text(form, self._names, *size) + behind)
        first, last = (len(self.backend.encode(part)[0]) for part in (before, behind))
        tokens = tokens[first : len(tokens) - last]
        return ItemText(tokens, np.flatnonzero(tokens == self.backend.added[form.token]))

    def decode(self, tokens: Int64Array, *, special: bool = False) -> str:
        """Text of token ids. special: with special tokens, which are left out else."""
        return self.backend.decode(tokens.tolist(), special=special)

    def __getstate__(self) -> dict[str, Any]:
        names = ("backend", "_template", "_tool_template", "_names")
        return {name: getattr(self, name) for name in names}

    @classmethod
    def _convert(cls, directory: Path, template: str | None) -> ChatTokenizer:
        try:
            return cls.from_transformers(open_by_transformers(directory), read_template(directory) or template)
        except UserError as error:
            raise UserError(f"tokenizer {directory}: {error}") from None

    @cached_property
    def _media_forms(self) -> dict[tuple[str, str], MediaForm]:
        """The forms of the modalities so far, by template: a cache."""
        return {}

    @cached_property
    def _timed(self) -> dict[str, Int64Array]:
        """The tokens of times of frames so far: a cache."""
        return {}

    @cached_property
    def _reserved(self) -> re.Pattern[str] | None:
        """A pattern of the tokens that no text may hold; None if there are none."""
        templates = (self._template_of(()), self._template_of((VIDEO,)), self._tool_template)
        tokens = set[str]().union(*(reserved_tokens(each, self.backend.special, self._names) for each in templates))
        return re.compile("|".join(map(re.escape, sorted(tokens, key=len, reverse=True)))) if tokens else None

    def _forms(self, conversation: Conversation) -> dict[str, MediaForm]:
        """The form of the items of each modality in a conversation. Raises UserError for a reserved token in a text."""
        if self._reserved and (match := self._reserved.search(tool_text(conversation))):
            raise UserError(f"a tool or a call holds '{match.group()}', a token by which the tokenizer marks turns")
        for turn in conversation.turns:
            for kind, text in turn.pieces:
                if kind == TEXT and self._reserved and (match := self._reserved.search(text)):
                    raise UserError(
                        f"the text of the {turn.role} holds '{match.group()}', a token by which the tokenizer marks "
                        "turns, texts or media; write it in another way"
                    )
        template = self._template_of(conversation.placeholders)
        forms = {modality: self._form(modality, template) for modality in dict.fromkeys(conversation.placeholders)}
        if len({form.written for form in forms.values()}) < len(forms):
            raise UserError(f"the tokenizer's chat template writes the same for {' and '.join(forms)}")
        return forms

    def _form(self, modality: str, template: ChatTemplate) -> MediaForm:
        key = modality, template.source
        if key not in self._media_forms:
            self._media_forms[key] = media_form(modality, template, self.backend.added, self._names)
        return self._media_forms[key]

    def _template_of(self, placeholders: Sequence[str]) -> ChatTemplate:
        """The template of a conversation with such items."""
        return self._template if self._names.frames is None or VIDEO not in placeholders else self._frames_template

    def _template_for(self, conversation: Conversation) -> ChatTemplate:
        """The template of a conversation, with its tools."""
        template = self._template_of(conversation.placeholders)
        if conversation.tools and template is self._template:
            template = self._tool_template
        return template.with_tools(conversation.tools)

    @cached_property
    def _frames_template(self) -> ChatTemplate:
        """That of conversations with videos, where they have one of their own."""
        assert self._names.frames is not None
        return ChatTemplate(self._names.frames.template, self._names.special)

    def _past_end_of_sequence(self, text: str, end: int) -> int:
        """The end of the `eos_token` that a template writes directly behind what it marks, if there is one.

        Published templates of LLaVA-OneVision leave it out of their marks: who is not taught to stop goes on writing.
        """
        token = self._names.special.get("eos_token")
        return end + len(token) if token and text.startswith(token, end) else end

    def _past_end_token(self, text: str, end: int) -> int:
        """The end of the special token that follows an answer, perhaps after spaces; `end` if none follows."""
        rest = text[end:].lstrip()
        start = len(text) - len(rest)
        lengths = [len(token) for token in self.backend.special if rest.startswith(token)]
        return start + max(lengths) if lengths else end

    def _tokenise(
        self,
        text: str,
        spans: list[tuple[int, int]],
        placeholders: tuple[str, ...],
        forms: dict[str, MediaForm],
        leads: Sequence[str],
        before: list[tuple[int, int]],
        *,
        is_prompt: bool = False,
    ) -> TokenSequence:
        """Tokens of a rendered text.

        leads: what is put before each item. spans: characters [start, end) of the answers in the text. before: of each
        item those of the turn before that of the item, or (0, 0); [] if it is (0, 0) of all. is_prompt: as of
        `_encode`.
        """
        # 1. Find the items, and replace what the template wrote for them by what is tokenised.
        modality_of = {form.written: modality for modality, form in forms.items()}
        matches = list(re.finditer("|".join(map(re.escape, modality_of)), text)) if forms else []
        if tuple(modality_of[match.group()] for match in matches) != placeholders:
            raise UserError("the tokenizer's chat template drops, repeats or reorders placeholders such as <image>")
        pieces, copied = list[str](), 0
        for match, lead in zip(matches, leads, strict=True):
            pieces += [text[copied : match.start()], lead + forms[modality_of[match.group()]].put]
            copied = match.end()
        # 2. Tokenise.
        whole = "".join([*pieces, text[copied:]])
        tokens, offsets = self._encode(whole, is_prompt=is_prompt)
        # 3. Targets: move the spans as the replacements moved the text. shifts[i]: characters added by i items.
        shifts = [0, *accumulate(len(put) - len(match.group()) for match, put in zip(matches, pieces[1::2]))]

        def holds(span: tuple[int, int]) -> BoolArray:
            start, end = (bound + shifts[sum(match.end() <= bound for match in matches)] for bound in span)
            held: BoolArray = (offsets[:, 0] < end) & (offsets[:, 1] > start)
            # A mark that takes the white space behind it (Phi-3's) reaches into an answer that begins with some.
            for place in np.flatnonzero(held & (offsets[:, 0] < start)).tolist():
                token = self.backend.token(int(tokens[place]))
                held[place] = token not in self.backend.special or whole.find(token, int(offsets[place, 0])) >= start
            return held

        targets = np.zeros(len(tokens), dtype=bool)
        for span in spans:
            targets |= holds(span)
        turns = np.zeros((len(placeholders), 2), dtype=np.int64)
        for item, span in enumerate(before):
            if span[0] < span[1] and (held := np.flatnonzero(holds(span))).size:
                turns[item] = held[0], held[-1] + 1
        # 4. The token of each item; it is an input, even in an answer.
        markers = [forms[name] for name in placeholders]
        starts = [
            match.start() + shift + len(lead) + form.put.index(form.token)
            for match, shift, lead, form in zip(matches, shifts, leads, markers)
        ]
        positions = self._find_markers(tokens, offsets, starts, [form.token for form in markers])
        targets[positions] = False
        return TokenSequence(tokens, targets, placeholders, positions, turns=turns if turns.any() else None)

    def _with_items_beside(self, sequence: TokenSequence) -> TokenSequence:
        """The same tokens, where the next one behind that of an item is that of an item beside it."""
        if not self._names.beside:
            return sequence
        of_items = [self.items_of(modality) for modality in sequence.media]
        counts = np.array([len(each) for each in of_items], dtype=np.int64)
        number = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        positions = np.repeat(sequence.media_positions, counts) + number
        targets = sequence.targets.copy()
        targets[positions] = False
        return replace(
            sequence,
            targets=targets,
            media=tuple(modality for each in of_items for modality in each),
            media_positions=positions,
            turns=None if sequence.turns is None else np.repeat(sequence.turns, counts, axis=0),
        )

    def _encode_document(
        self, document: Conversation, forms: dict[str, MediaForm], leads: Sequence[str]
    ) -> TokenSequence:
        """Tokens of text without turns. leads: what is put before each item."""
        template = self._template_of(document.placeholders)
        alone = {name: document_text(form, name, template, self.backend.added) for name, form in forms.items()}
        lead = iter(leads)
        pieces = [
            (kind, next(lead) + alone[kind] if kind in alone else text) for kind, text in document.turns[0].pieces
        ]
        starts = [0, *accumulate(len(text) for _, text in pieces)]
        tokens, offsets = self.backend.encode("".join(text for _, text in pieces))
        items = [(kind, start, text) for start, (kind, text) in zip(starts, pieces) if kind != TEXT]
        markers = [forms[kind].token for kind, _, _ in items]
        places = [start + text.index(marker) for (_, start, text), marker in zip(items, markers)]
        positions = self._find_markers(tokens, offsets, places, markers)
        targets = np.ones(len(tokens), dtype=bool)
        for _, start, text in items:
            targets[(offsets[:, 0] >= start) & (offsets[:, 1] <= start + len(text))] = False
        before, after = self.backend.around
        if self.end_token is not None and after[-1:] != [self.end_token]:
            after = [*after, self.end_token]
        targets = np.concatenate([np.zeros(len(before), dtype=bool), targets, np.ones(len(after), dtype=bool)])
        # Nothing predicts the first token.
        targets[:1] = False
        if not targets.any():
            raise UserError("its text comes to no token that could be learned; leave the record out")
        whole = np.concatenate([np.array(before, dtype=np.int64), tokens, np.array(after, dtype=np.int64)])
        return TokenSequence(whole, targets, document.placeholders, positions + len(before))

    def _encode(self, text: str, *, is_prompt: bool) -> tuple[Int64Array, Int64Array]:
        """As `TokenizerBackend.encode`, with what stands around the text.

        A model's processor puts around a text what the tokenizer's post-processor names, unless the template has
        written its first token already; the tokenizer of a text model leaves that to the template, and so do processors
        that are `BARE`. What stands behind the last answer is learned with it.

        is_prompt: the text goes on with an answer, so nothing stands behind it.
        """
        ids, offsets = self.backend.encode(text)
        before, behind = self.backend.around
        behind = [] if is_prompt else behind
        begin = self._names.special.get("bos_token")
        if self._names.processor in BEGUN and begin and not text.startswith(begin):
            raise UserError(
                f"the tokenizer's chat template does not begin with {begin}, which {self._names.processor} would write "
                "behind the first images; take the model's own template"
            )
        if self._names.processor not in (None, *BARE) and not (begin and text.startswith(begin)):
            ids = np.concatenate([np.array(before, dtype=np.int64), ids, np.array(behind, dtype=np.int64)])
            first, last = np.zeros((len(before), 2), dtype=np.int64), np.repeat(offsets[-1:], len(behind), axis=0)
            offsets = np.concatenate([first, offsets, last])
        return ids, offsets

    def _find_markers(
        self, tokens: Int64Array, offsets: Int64Array, starts: list[int], markers: list[str]
    ) -> Int64Array:
        """The position of each item's token, int64 [num_items]; a marker's token may include spaces around it."""
        if not markers:
            return np.zeros(0, dtype=np.int64)
        # The first token that ends after the marker's start.
        positions = np.searchsorted(offsets[:, 1], np.array(starts, dtype=np.int64), side="right")
        expected = np.array([self.backend.added[marker] for marker in markers])
        if not np.array_equal(tokens[np.minimum(positions, len(tokens) - 1)], expected):
            raise UserError("the tokenizer does not keep its special tokens whole, so placeholders have no place")
        return positions.astype(np.int64)
