"""Conversations to tokens: the tokenizer's chat template, one token a placeholder, loss on the answers alone.

The whole text is rendered and tokenised once, and tokens are matched to the answers by their character offsets: a token
that shares any character with an answer is a target. So the result is right for tokenizers that merge across the
boundaries of turns too. A placeholder is replaced by one special token, at which every tokenizer splits: its own
(`<image>`) if there is one, else any other; the model puts the item's rows in its place and never looks at it.
"""

from __future__ import annotations

import hashlib
import json
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from motet.core.errors import UserError
from motet.core.example import TokenSequence
from motet.data.chat_template import DEFAULT_TEMPLATE, ChatTemplate
from motet.data.conversation import PLACEHOLDER_PATTERN, PLACEHOLDERS, Conversation

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# Part of every fingerprint: raise it when the same tokenizer and template are to give other tokens.
_VERSION = 1


class ChatTokenizer:
    """A tokenizer with its chat template; picklable, and small enough to send to worker processes.

    backend: the tokenizer as the JSON of the tokenizers library (`tokenizer.json`).
    template: Jinja source; None for the default one. special_tokens: at least eos_token, for the default template.
    """

    def __init__(self, backend: str, template: str | None, special_tokens: dict[str, str]) -> None:
        if template is None and "eos_token" not in special_tokens:
            raise UserError("the tokenizer has no chat template and no eos_token; give it one of them")
        self._backend_json = backend
        self._template = ChatTemplate(template or DEFAULT_TEMPLATE, special_tokens)

    @classmethod
    def from_directory(cls, directory: str | Path) -> ChatTokenizer:
        """From a directory with tokenizer.json and tokenizer_config.json, as transformers writes it.

        A directory of an older format (vocab.json and merges.txt, sentencepiece) is opened through transformers.
        Raises UserError if there is no tokenizer.
        """
        directory = Path(directory)
        if not directory.is_dir():
            raise UserError(f"tokenizer {directory}: there is no such directory; it must hold tokenizer.json")
        if not (directory / "tokenizer.json").is_file():
            return cls._convert(directory)
        config = _read_json(directory / "tokenizer_config.json")
        tokens = _read_json(directory / "special_tokens_map.json") | config
        special = {
            name: value["content"] if isinstance(value, dict) else value
            for name, value in tokens.items()
            if name.endswith("_token") and isinstance(value, (dict, str))
        }
        backend = (directory / "tokenizer.json").read_text(encoding="utf-8")
        return cls(backend, _read_template(directory, config), special)

    @classmethod
    def from_transformers(cls, tokenizer: Any) -> ChatTokenizer:
        """From a fast tokenizer of transformers."""
        template = tokenizer.chat_template
        template = template.get("default") if isinstance(template, dict) else template
        special = {name: value for name, value in tokenizer.special_tokens_map.items() if isinstance(value, str)}
        return cls(tokenizer.backend_tokenizer.to_str(), template, special)

    @cached_property
    def fingerprint(self) -> str:
        """The same for two tokenizers only if they give the same tokens."""
        digest = hashlib.blake2b(digest_size=16)
        for part in (str(_VERSION), self._template.source, json.dumps(self._template.special_tokens, sort_keys=True)):
            digest.update(part.encode() + b"\0")
        digest.update(self._backend_json.encode())
        return digest.hexdigest()

    @property
    def vocabulary_size(self) -> int:
        """One more than the largest token id."""
        return max(self._tokenizer.get_vocab().values()) + 1

    @property
    def end_token(self) -> int | None:
        """The id of the end-of-sequence token."""
        name = self._template.special_tokens.get("eos_token")
        return None if name is None else self._tokenizer.token_to_id(name)

    def encode(self, conversation: Conversation) -> TokenSequence:
        """All tokens of a conversation, those of the answers (end token included) as targets. Raises UserError."""
        text, spans, marked = self._template.render_with_answers(conversation.turns)
        if not marked:
            spans = [(start, self._past_end_token(text, end)) for start, end in spans]
        return self._tokenise(text, spans, conversation.placeholders)

    def encode_prompt(self, conversation: Conversation) -> tuple[TokenSequence, str]:
        """For evaluation: everything before the last answer with the prompt for it, and that answer as text."""
        before, answer = conversation.without_last_answer()
        text = self._template.render(before.turns, generation_prompt=True)
        return self._tokenise(text, [], before.placeholders), answer

    def decode(self, tokens: NDArray[np.int64]) -> str:
        """Text of token ids, special tokens left out."""
        return self._tokenizer.decode(tokens.tolist(), skip_special_tokens=True)

    def __getstate__(self) -> dict[str, Any]:
        return {"_backend_json": self._backend_json, "_template": self._template}

    @classmethod
    def _convert(cls, directory: Path) -> ChatTokenizer:
        from transformers import AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(directory)
        except (OSError, ValueError) as error:
            reason = str(error).splitlines()[0]
            raise UserError(
                f"tokenizer {directory}: cannot be opened ({reason}); it must hold tokenizer.json"
            ) from None
        return cls.from_transformers(tokenizer)

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_str(self._backend_json)
        # It would trim offsets, so that a space before an answer's word counts as no part of it.
        tokenizer.post_processor = None
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return tokenizer

    @cached_property
    def _special(self) -> dict[str, int]:
        """Tokens at which the tokenizer splits, whatever stands around them."""
        added = self._tokenizer.get_added_tokens_decoder()
        return {token.content: number for number, token in added.items() if token.special}

    @cached_property
    def _markers(self) -> dict[str, str]:
        """The special token that stands for each modality's placeholder."""
        if not self._special:
            raise UserError("the tokenizer has no special token that could stand for an image or a clip; add '<image>'")
        any_token = next(iter(self._special))
        return {name: text if text in self._special else any_token for name, text in PLACEHOLDERS.items()}

    def _past_end_token(self, text: str, end: int) -> int:
        """Where the special token ends that follows an answer, spaces between them allowed; `end` if none does."""
        rest = text[end:].lstrip()
        start = len(text) - len(rest)
        lengths = [len(token) for token in self._special if rest.startswith(token)]
        return start + max(lengths) if lengths else end

    def _tokenise(self, text: str, spans: list[tuple[int, int]], placeholders: tuple[str, ...]) -> TokenSequence:
        pieces, at = list[str](), 0
        starts, shifts = list[int](), list[int]()
        matches = list(PLACEHOLDER_PATTERN.finditer(text))
        if tuple(match.group()[1:-1] for match in matches) != placeholders:
            raise UserError("the tokenizer's chat template drops, repeats or reorders placeholders such as <image>")
        for match in matches:
            marker = self._markers[match.group()[1:-1]]
            pieces += [text[at : match.start()], marker]
            starts.append(match.start() + sum(shifts))
            shifts.append(len(marker) - (match.end() - match.start()))
            at = match.end()
        encoding = self._tokenizer.encode("".join([*pieces, text[at:]]), add_special_tokens=False)
        tokens = np.array(encoding.ids, dtype=np.int64)
        offsets = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2)
        targets = np.zeros(len(tokens), dtype=bool)
        for start, end in spans:
            start, end = (
                place + sum(shifts[: sum(match.end() <= place for match in matches)]) for place in (start, end)
            )
            targets |= (offsets[:, 0] < end) & (offsets[:, 1] > start)
        positions = self._find_markers(tokens, offsets, np.array(starts, dtype=np.int64), placeholders)
        # What stands at a placeholder is an input, even in an answer.
        targets[positions] = False
        return TokenSequence(tokens, targets, placeholders, positions)

    def _find_markers(
        self, tokens: NDArray[np.int64], offsets: NDArray[np.int64], starts: NDArray[np.int64], names: tuple[str, ...]
    ) -> NDArray[np.int64]:
        """The token of each placeholder, int64 [num_items]; a marker may have taken spaces around it along."""
        if not names:
            return np.zeros(0, dtype=np.int64)
        # A token that ends after the marker's start, and the first of these that is the marker.
        positions = np.searchsorted(offsets[:, 1], starts, side="right")
        expected = np.array([self._special[self._markers[name]] for name in names])
        if not np.array_equal(tokens[np.minimum(positions, len(tokens) - 1)], expected):
            raise UserError("the tokenizer does not keep its special tokens whole, so placeholders have no place")
        return positions.astype(np.int64)


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except ValueError as error:
        raise UserError(f"{path}: is no JSON ({error})") from None


def _read_template(directory: Path, config: dict[str, Any]) -> str | None:
    separate = directory / "chat_template.jinja"
    if separate.is_file():
        return separate.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        return {named["name"]: named["template"] for named in template}.get("default")
    return template
