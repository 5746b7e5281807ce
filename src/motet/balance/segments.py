"""Who attends to whom in a packed sequence, as a table: a row a run of tokens that all attend alike.

Cornstarch's bitfield attention mask (section 4.3.1) gives each token the modalities that it attends to. Alone, it
cannot tell two images of one sequence apart, nor two packed documents (correction): a row also names its document and
its instance, the one image, clip or video that its tokens are of. The table says exactly which query attends to which
key, without a mask of tokens x tokens. Both are tokens of one document, and

- the key is the query itself, or
- the key comes earlier and its modality is one of the query's `attends_to`, or
- both are tokens of one instance, in whatever order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from motet.balance.checks import checked_integers
from motet.core.arrays import BoolArray, Int64Array
from motet.core.errors import ArgumentError

MAX_MODALITIES = 63
"""Bits of a non-negative int64."""

MAX_TOKENS = 2**31 - 1
"""So that the pairs of all tokens, fewer than its square, fit int64."""

MediaAttention = Literal["isolated", "bidirectional", "causal"]
"""What tokens of an image or a clip attend to; see Segments.of_documents."""


@dataclass(frozen=True, eq=False)
class Segments:
    """Runs of consecutive tokens, in the order of the sequence; the module says which token attends to which.

    length:     int64 [num_segments], tokens of the run; 0 is allowed.
    document:   int64 [num_segments], the packed document that it belongs to; never descending.
    modality:   int64 [num_segments], 0 .. 62; by convention 0 is text.
    instance:   int64 [num_segments], 0 for tokens of no instance (text), else a number from 1 to num_segments. Several
                runs of one document and modality may be one instance: frames of a video with text between them.
    attends_to: int64 [num_segments], bit m is set where the tokens attend to earlier tokens of modality m.

    Lists become arrays. Raises ArgumentError for columns that are not whole or negative, of different lengths, or
    against what is said above, and for more than 2^31 - 1 tokens.
    """

    length: Int64Array
    document: Int64Array
    modality: Int64Array
    instance: Int64Array
    attends_to: Int64Array

    def __post_init__(self) -> None:
        for name in ("length", "document", "modality", "instance", "attends_to"):
            column = checked_integers(getattr(self, name), name)
            if len(column) != len(self.length):
                raise ArgumentError(f"{name} has {len(column)} rows; length has {len(self.length)}.")
            object.__setattr__(self, name, column)
        _check_rows(self.modality >= MAX_MODALITIES, "modality", self.modality, f"below {MAX_MODALITIES}")
        _check_rows(np.diff(self.document, prepend=0) < 0, "document", self.document, "at least that of the row before")
        _check_rows(
            self.instance > self.num_segments, "instance", self.instance, f"at most {self.num_segments}, the rows"
        )
        first = np.zeros(self.num_segments + 1, dtype=np.int64)  # the first row of each instance
        first[self.instance[::-1]] = np.arange(self.num_segments)[::-1]
        other = (self.document != self.document[first[self.instance]]) | (
            self.modality != self.modality[first[self.instance]]
        )
        _check_rows(other & (self.instance > 0), "instance", self.instance, "of one document and one modality")
        num_tokens = sum(self.length.tolist()) if self.length.max(initial=0) > MAX_TOKENS else self.num_tokens
        if num_tokens > MAX_TOKENS:
            raise ArgumentError(f"length adds up to {num_tokens} tokens; it must be at most {MAX_TOKENS}.")

    @property
    def num_segments(self) -> int:
        return len(self.length)

    @property
    def num_tokens(self) -> int:
        return int(self.length.sum())

    @classmethod
    def of_documents(
        cls,
        documents: Iterable[Sequence[tuple[str, int]]],
        modalities: Sequence[str] = ("text", "image", "audio"),
        media: MediaAttention = "isolated",
    ) -> Segments:
        """The table of documents that are packed one after the other, each a sequence of (modality, number of tokens).

        Text attends to all that comes before it in its document. Every other entry is an instance by itself:
        media: "isolated":      its tokens attend to one another, both ways, and to nothing else (Cornstarch);
               "bidirectional": they also attend to all that comes before (Gemma 3);
               "causal":        they attend as text does (Qwen2-VL).
        modalities: the names that occur, text first; the place of a name is its bit. Raises ArgumentError for others.
        """
        if media not in ("isolated", "bidirectional", "causal"):
            raise ArgumentError(f"media is {media!r}; it must be 'isolated', 'bidirectional' or 'causal'.")
        number = {name: place for place, name in enumerate(modalities)}
        everything = (1 << len(number)) - 1
        rows: list[tuple[int, int, int, int, int]] = []
        for document, entries in enumerate(documents):
            for name, length in entries:
                if name not in number:
                    raise ArgumentError(f"documents[{document}] has {name!r}; modalities are {tuple(modalities)}.")
                is_text = number[name] == 0
                instance = 0 if is_text or media == "causal" else len(rows) + 1
                attends_to = 0 if not is_text and media == "isolated" else everything
                rows.append((length, document, number[name], instance, attends_to))
        if not rows:
            return cls(*np.zeros((5, 0), dtype=np.int64))
        return cls(*(np.array(column) for column in zip(*rows, strict=True)))


def _check_rows(wrong: BoolArray, name: str, column: Int64Array, right: str) -> None:
    if wrong.any():
        row = int(np.argmax(wrong))
        raise ArgumentError(f"{name}[{row}] is {column[row]}; it must be {right}.")
