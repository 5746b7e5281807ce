"""Which token attends to which in a packed sequence, as a table. A row is a run of tokens that attend alike.

Cornstarch's bitfield attention mask (section 4.3.1) gives each token the modalities that it attends to. This does not
separate two images of a sequence, nor two packed documents. So (correction) a row also has its document and its
instance: the one image, clip or video of its tokens. The table needs no mask of tokens x tokens. A query attends to a
key of the same document if

- the key is the query itself, or
- the key comes earlier, and its modality is in the query's `attends_to`, or
- both belong to one instance, in any order.

`Segments.table` says the same row by row, as attention needs it (`core.attention_table`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from motet.balance.checks import checked_integers
from motet.core.arrays import BoolArray, Int64Array
from motet.core.attention_table import AttentionTable
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

    @classmethod
    def of_bitfield(cls, bits: ArrayLike, document: ArrayLike, instance: ArrayLike) -> Segments:
        """The table of Cornstarch's bitfield attention mask (section 4.3.1), with what it lacks.

        bits:     int [num_tokens]; a token of an encoder has the bit of its modality alone; a token of text has bit 0,
                  and the bits of all modalities to whose earlier tokens it attends.
        document: int [num_tokens], the packed document of each token; never descending.
        instance: int [num_tokens], 0 for text, else a number from 1 of the token's image or clip. Without it
                  (correction) two images of a sequence would see each other, as their bits are equal.
        Raises ArgumentError for columns that are not these.
        """
        field, documents, instances = (
            checked_integers(column, name)
            for column, name in ((bits, "bits"), (document, "document"), (instance, "instance"))
        )
        for name, column in (("document", documents), ("instance", instances)):
            if len(column) != len(field):
                raise ArgumentError(f"{name} has {len(column)} tokens; bits has {len(field)}.")
        is_text = field & 1 == 1
        media = ~is_text
        _check_rows(
            media & ((field == 0) | (field & (field - 1) != 0)), "bits", field, "text's, with bit 0, or one bit"
        )
        _check_rows(is_text != (instances == 0), "instance", instances, "0 for text, and above 0 for all else")
        runs = np.flatnonzero(np.diff(np.stack([field, documents, instances]), prepend=-1).any(axis=0))
        length = np.diff(np.append(runs, len(field)))
        known = np.unique(np.append(instances[runs], 0))
        modality = np.where(is_text, 0, np.frexp(field.astype(np.float64))[1] - 1)  # the exponent of a power of two
        return cls(
            length,
            documents[runs],
            modality[runs].astype(np.int64),
            np.searchsorted(known, instances[runs]),
            np.where(is_text, field, 0)[runs],
        )

    def table(self) -> AttentionTable:
        """Which keys each token sees, row by row. O(num_tokens * intervals a token)."""
        starts = np.cumsum(self.length) - self.length
        spans = _spans(self)
        # Behind the last interval of a segment are empty ones, at the end.
        most = max([1, *(len(each) for each in spans)])
        bounds = np.full((2, most, self.num_segments), self.num_tokens, dtype=np.int64)
        for segment, each in enumerate(spans):
            bounds[:, : len(each), segment] = np.array(each, dtype=np.int64).reshape(-1, 2).T
        start, end = np.repeat(bounds, self.length, axis=2)
        last = np.repeat(np.array([len(each) - 1 for each in spans], dtype=np.int64), self.length)
        rows = np.arange(self.num_tokens)
        moving = np.repeat(self.instance == 0, self.length)  # the last interval ends with the row itself
        alone = moving & np.repeat((self.attends_to >> self.modality & 1) == 0, self.length)
        end[last[moving], rows[moving]] = rows[moving] + 1
        start[last[alone], rows[alone]] = rows[alone]
        new = np.diff(self.document, prepend=-1) != 0
        first = starts[np.flatnonzero(new)[np.cumsum(new) - 1]] if self.num_segments else starts
        return AttentionTable(start, end, rows, rows, np.repeat(first, self.length))


_Run = tuple[int, int]
"""From a token to another (exclusive)."""


def _spans(segments: Segments) -> list[list[_Run]]:
    """For each segment, the intervals of keys that its tokens see: ascending, without overlap.

    The last interval of a segment without an instance ends with the segment. Its tokens see of it what is up to
    themselves, or themselves alone: then it is not joined with what stands before it.
    """
    ends = np.cumsum(segments.length)
    runs: list[_Run] = list(zip((ends - segments.length).tolist(), ends.tolist(), strict=True))
    of_instance: dict[int, list[_Run]] = {}
    for run, instance in zip(runs, segments.instance.tolist(), strict=True):
        of_instance.setdefault(instance, []).append(run)
    spans = []
    earlier: list[tuple[int, _Run]] = []  # modality and run, of the document
    seen: dict[int, list[_Run]] = {}  # by `attends_to`, the earlier tokens of the document, joined
    current = -1
    columns = (segments.document, segments.modality, segments.instance, segments.attends_to)
    for run, document, modality, instance, bits in zip(runs, *(column.tolist() for column in columns), strict=True):
        if document != current:
            current, earlier, seen = document, [], {}
        if bits not in seen:
            seen[bits] = _joined([other for kind, other in earlier if bits >> kind & 1])
        if instance:
            spans.append(_joined(sorted([*seen[bits], *of_instance[instance]])))
        else:
            spans.append(_joined([*seen[bits], run]) if bits >> modality & 1 else [*seen[bits], run])
        earlier.append((modality, run))
        for known, before in seen.items():
            if known >> modality & 1:
                seen[known] = [*before[:-1], *_joined([*before[-1:], run])]
    return spans


def _joined(spans: list[_Run]) -> list[_Run]:
    """Ascending spans as fewest spans, none of which is empty or touches another."""
    joined: list[_Run] = []
    for start, end in spans:
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        elif start < end:
            joined.append((start, end))
    return joined


def _check_rows(wrong: BoolArray, name: str, column: Int64Array, right: str) -> None:
    if wrong.any():
        row = int(np.argmax(wrong))
        raise ArgumentError(f"{name}[{row}] is {column[row]}; it must be {right}.")
