"""A tokenizer of the tokenizers library: texts to token ids with the characters of each, and back."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from motet.core.arrays import Int64Array
from motet.core.errors import UserError
from motet.data.tokenizer_files import open_backend

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_MAX_REASON_CHARACTERS = 200


class TokenizerBackend:
    """A tokenizer, opened when it is first used; picklable, and small enough to send to worker processes.

    source: the tokenizer as JSON (`tokenizer.json`).
    names:  what it is called by -> a special token, such as eos_token.
    """

    def __init__(self, source: str, names: Mapping[str, str]) -> None:
        self.source = source
        self._names = dict(names)

    def __getstate__(self) -> dict[str, Any]:
        return {"source": self.source, "_names": self._names}

    @property
    def vocabulary_size(self) -> int:
        """One more than the largest token id."""
        return max(self._tokenizer.get_vocab().values()) + 1

    @cached_property
    def added(self) -> dict[str, int]:
        """Tokens at which the tokenizer always splits, with their ids; special ones first."""
        return self.special | {
            token.content: number for number, token in self._tokenizer.get_added_tokens_decoder().items()
        }

    @cached_property
    def special(self) -> dict[str, int]:
        """Special tokens with their ids: they mark turns and items, and are no text."""
        added = self._tokenizer.get_added_tokens_decoder()
        return {token.content: number for number, token in added.items() if token.special}

    @property
    def around(self) -> tuple[list[int], list[int]]:
        """The tokens that the tokenizer's own post-processor puts before and behind a text."""
        return self._opened[1:]

    def token_id(self, token: str) -> int | None:
        """The id of a token; None if the tokenizer has no such token."""
        return self._tokenizer.token_to_id(token)

    def token(self, token_id: int) -> str | None:
        """The token of an id; None if the tokenizer has no such id."""
        return self._tokenizer.id_to_token(token_id)

    def encode(self, text: str) -> tuple[Int64Array, Int64Array]:
        """Token ids int64 [num_tokens], and the characters [start, end) of each, int64 [num_tokens, 2].

        Nothing is put around the text. Raises UserError for a text that the tokenizer cannot encode.
        """
        try:
            encoding = self._tokenizer.encode(text, add_special_tokens=False)
        # The library raises plain Exception, usually for a text that its vocabulary has no token for.
        except Exception as error:
            raise UserError(f"the tokenizer cannot encode the text ({_reason(error)})") from None
        return np.array(encoding.ids, dtype=np.int64), np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2)

    def decode(self, tokens: list[int], *, special: bool) -> str:
        """Text of token ids. special: with special tokens, which are left out else."""
        return self._tokenizer.decode(tokens, skip_special_tokens=not special)

    @property
    def _tokenizer(self) -> Tokenizer:
        return self._opened[0]

    @cached_property
    def _opened(self) -> tuple[Tokenizer, list[int], list[int]]:
        """The tokenizer, and `around`."""
        from tokenizers import AddedToken

        tokenizer = open_backend(self.source, "tokenizer.json")
        tokenizer.no_truncation()
        tokenizer.no_padding()
        before, behind = _around(tokenizer)
        # A post-processor would trim offsets: a space before an answer's word would not belong to the answer.
        tokenizer.post_processor = None
        # As in transformers, a named token is special, even if the file does not mark it.
        special = {token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special}
        named = {token for token in self._names.values() if tokenizer.token_to_id(token) is not None}
        added = [AddedToken(token, special=True, normalized=False) for token in sorted(named - special)]
        tokenizer.add_special_tokens(added)
        return tokenizer, before, behind


def _around(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """The tokens that a tokenizer's post-processor puts before and behind a text."""
    try:
        encoding = tokenizer.encode("a")
    except Exception:
        return [], []  # Without a token for "a"; `encode` says so of a text.
    is_added = encoding.special_tokens_mask
    first = next((place for place, added in enumerate(is_added) if not added), len(is_added))
    last = len(is_added) - next((place for place, added in enumerate(reversed(is_added)) if not added), 0)
    return encoding.ids[:first], encoding.ids[max(first, last) :]


def _reason(error: Exception) -> str:
    return " ".join(str(error).split())[:_MAX_REASON_CHARACTERS] or type(error).__name__
