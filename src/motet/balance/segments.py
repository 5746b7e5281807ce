"""Which token attends to which in a packed sequence, as a table. A row is a run of tokens that attend alike.

Cornstarch's bitfield attention mask (section 4.3.1) gives each token the modalities that it attends to. This does not
separate two images of a sequence, nor two packed documents. So (correction) a row also has its document and its
instance: the one image, clip or video of its tokens. The table needs no mask of tokens x tokens. A query attends to a
key of the same document if

- the key is the query itself, or
- the key comes earlier, and its modality is in the query's `attends_to`, or
- both belong to one instance, in any order.
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
"""The number of modalities is limited by the bits of a non-negative int64."""

MAX_TOKENS = 2**31 - 1
"""The most tokens of a sequence: the number of (query, key) pairs, below its square, then fits int64."""

MediaAttention = Literal["isolated", "bidirectional", "causal"]
"""What the tokens of an image or a clip attend to; Segments.of_documents defines it."""


@dataclass(frozen=True, eq=False)
class Segments:
    """Runs of consecutive tokens (segments), in the order of the sequence.

    length:     int64 [num_segments], tokens of the run; 0 is allowed.
    document:   int64 [num_segments], the packed document of the run; never descending.
    modality:   int64 [num_segments], 0 .. 62; 0 is text by convention.
    instance:   int64 [num_segments], 0 for tokens without an instance (text), else a number from 1 to num_segments.
                Several runs of one document and modality may be one instance: frames of a video with text between them.
    attends_to: int64 [num_segments], bit m is set if the tokens attend to earlier tokens of modality m.

    Lists become arrays. Raises ArgumentError for columns that are negative or not whole, that differ in length or break
    a rule above, and for more than 2^31 - 1 tokens.

    Example:
        >>> segments = Segments.of_documents([[("text", 3), ("image", 4), ("text", 2)]])
        >>> segments.length.tolist(), segments.attends_to.tolist()  # bits: 1 text, 2 image, 4 audio
        ([3, 4, 2], [7, 0, 7])
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
        first_row = np.zeros(self.num_segments + 1, dtype=np.int64)  # of each instance
        first_row[self.instance[::-1]] = np.arange(self.num_segments)[::-1]
        first = first_row[self.instance]
        differs = (self.document != self.document[first]) | (self.modality != self.modality[first])
        _check_rows(differs & (self.instance > 0), "instance", self.instance, "of one document and one modality")
        num_tokens = sum(self.length.tolist()) if self.length.max(initial=0) > MAX_TOKENS else self.num_tokens
        if num_tokens > MAX_TOKENS:
            raise ArgumentError(f"length adds up to {num_tokens} tokens; it must be at most {MAX_TOKENS}.")

    @property
    def num_segments(self) -> int:
        """The number of runs."""
        return len(self.length)

    @property
    def num_tokens(self) -> int:
        """The number of tokens of the sequence."""
        return int(self.length.sum())

    @classmethod
    def of_documents(
        cls,
        documents: Iterable[Sequence[tuple[str, int]]],
        modalities: Sequence[str] = ("text", "image", "audio"),
        media: MediaAttention = "isolated",
    ) -> Segments:
        """The table of packed documents; a document is a sequence of (modality, number of tokens).

        Text attends to everything before it in its document. Every other entry is an instance of its own:
        media: "isolated":      its tokens attend to each other, in both directions, and to nothing else (Cornstarch);
               "bidirectional": they also attend to everything before them (Gemma 3);
               "causal":        they attend as text does (Qwen2-VL).
        modalities: the names that may occur, text first; the index of a name is its bit.
        Raises ArgumentError for other names, and for an unknown `media`.
        """
        if media not in ("isolated", "bidirectional", "causal"):
            raise ArgumentError(f"media is {media!r}; it must be 'isolated', 'bidirectional' or 'causal'.")
        bit = {name: index for index, name in enumerate(modalities)}
        everything = (1 << len(bit)) - 1
        rows: list[tuple[int, int, int, int, int]] = []
        for document, entries in enumerate(documents):
            for name, length in entries:
                if name not in bit:
                    raise ArgumentError(f"documents[{document}] has {name!r}; modalities are {tuple(modalities)}.")
                is_text = bit[name] == 0
                instance = 0 if is_text or media == "causal" else len(rows) + 1
                attends_to = 0 if not is_text and media == "isolated" else everything
                rows.append((length, document, bit[name], instance, attends_to))
        if not rows:
            return cls(*np.zeros((5, 0), dtype=np.int64))
        return cls(*(np.array(column) for column in zip(*rows, strict=True)))


def _check_rows(wrong: BoolArray, name: str, column: Int64Array, right: str) -> None:
    if wrong.any():
        row = int(np.argmax(wrong))
        raise ArgumentError(f"{name}[{row}] is {column[row]}; it must be {right}.")
