"""One training example as a reader returns it: tokens with placeholders, and the media of the placeholders."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from motet.core.arrays import BoolArray, Float32Array, Float64Array, Int64Array, UInt8Array


@dataclass(frozen=True, eq=False)
class TokenSequence:
    """The text of one example. Each item has one placeholder token, whatever number of rows the item becomes; or
    several, among which its rows are dealt evenly, with text between them (tiles of Idefics3, frames of Qwen3-VL).

    An item that several encoders read is an item of each. They have a placeholder each, or one together: then their
    rows are added, which must be equally many.

    tokens:          int64 [num_tokens], text token ids; any valid id at a placeholder.
    targets:         bool [num_tokens], True for the tokens of an answer: loss is taken on predicting them.
    media:           the phase of each item, in order of appearance: ("image", "audio").
    media_positions: int64 [num_placeholders], the index of each placeholder in `tokens`; ascending.
    grids:           int64 [num_placeholders, 5], frames, rows and columns of the raster that the rows at a placeholder
                     are, the step of its frames, and how text goes on behind it (`core/grid_positions.py`), for a
                     backbone whose positions are those of a grid; or how many rows text sees of an item whose rows are
                     keys; None for all others.
    pieces:          int64 [num_items], the placeholders of each item; None: each has one.
    turns:           int64 [num_items, 2], the tokens [start, stop) of the turn whose rows a generator is given of an
                     item, which has no row of its own then; (0, 0) of other items; None: there are no such items.

    Example:
        An image between two tokens of a question, then an answer of one token:
        >>> tokens, answer = np.array([17, 0, 23, 42]), np.array([False, False, False, True])
        >>> sequence = TokenSequence(tokens, answer, media=("image",), media_positions=np.array([1]))
        >>> dict(zip(sequence.media, sequence.media_positions.tolist()))
        {'image': 1}
    """

    tokens: Int64Array
    targets: BoolArray
    media: tuple[str, ...]
    media_positions: Int64Array
    grids: Int64Array | None = None
    pieces: Int64Array | None = None
    turns: Int64Array | None = None

    @property
    def num_pieces(self) -> Int64Array:
        """The placeholders of each item, int64 [num_items]."""
        return np.ones(len(self.media), dtype=np.int64) if self.pieces is None else self.pieces

    @property
    def item_turns(self) -> Int64Array:
        """`turns`, int64 [num_items, 2]: (0, 0) of all items where there are none."""
        return np.zeros((len(self.media), 2), dtype=np.int64) if self.turns is None else self.turns

    @property
    def reads_turn(self) -> BoolArray:
        """Whether a turn is what a generator is given of an item, bool [num_items]."""
        turns = self.item_turns
        return turns[:, 1] > turns[:, 0]

    def token_rows(self, item_rows: Int64Array) -> Int64Array:
        """The rows that each token takes in a packed sequence, int64 [num_tokens].

        item_rows: those of each item, int64 [num_items]; of one that reads a turn they are not its own.
        """
        rows, pieces = np.ones(len(self.tokens), dtype=np.int64), self.num_pieces
        rows[self.media_positions] = np.repeat(np.where(self.reads_turn, 0, item_rows) // pieces, pieces)
        return rows

    def turn_rows(self, item_rows: Int64Array) -> Int64Array:
        """The rows of the turn that each item reads, int64 [num_items]; 0 of one that reads none.

        item_rows: as of `token_rows`.
        """
        if self.turns is None:
            return np.zeros(len(self.media), dtype=np.int64)
        ends = np.concatenate([[0], np.cumsum(self.token_rows(item_rows))])
        rows: Int64Array = ends[self.turns[:, 1]] - ends[self.turns[:, 0]]
        return rows


@dataclass(frozen=True, eq=False)
class ItemText:
    """What stands in the place of an item whose rows come in several pieces.

    tokens: int64 [n], marks, and any valid id at the placeholders. places: int64 [num_pieces], these; ascending.

    Example:
        Two tiles of rows, and a mark before each:
        >>> ItemText(np.array([7, 0, 8, 0]), np.array([1, 3])).num_marks
        2
    """

    tokens: Int64Array
    places: Int64Array

    @property
    def num_marks(self) -> int:
        """Tokens that stay."""
        return len(self.tokens) - len(self.places)


@dataclass(frozen=True)
class FrameTexts:
    """What a processor writes of a video whose frames stand in its text as images in one tile do (SmolVLM).

    template: the chat template of a conversation with a video, in place of the directory's own.
    begin:    before the first frame, with "{frame_count}", in words, and "{video_duration}" in it.
    frame:    before each frame, with "{timestamp}" in it.
    end:      behind the last one.

    Example:
        >>> texts = FrameTexts("", "{frame_count} frames of {video_duration}:", " [{timestamp}]", ".")
        >>> texts.begin.format(frame_count="two", video_duration="0:00:09")
        'two frames of 0:00:09:'
    """

    template: str
    begin: str
    frame: str
    end: str


def in_pieces(sequence: TokenSequence, texts: Sequence[ItemText | None]) -> TokenSequence:
    """A sequence whose items have one placeholder each, with other texts in their places. Marks are no targets.

    texts: of each item; None: its placeholder stays. Items with texts share no placeholder with others.
    """
    tokens, targets, positions, pieces, copied, length = [], [], [], [], 0, 0
    repeats = np.ones(len(sequence.tokens), dtype=np.int64)
    for place, text in zip(sequence.media_positions.tolist(), texts, strict=True):
        text = text or ItemText(sequence.tokens[place : place + 1], np.zeros(1, dtype=np.int64))
        tokens += [sequence.tokens[copied:place], text.tokens]
        targets += [sequence.targets[copied:place], np.zeros(len(text.tokens), dtype=np.bool_)]
        length += place - copied
        positions.append(length + text.places)
        pieces.append(len(text.places))
        repeats[place] = len(text.tokens)
        length += len(text.tokens)
        copied = place + 1
    return TokenSequence(
        np.concatenate([*tokens, sequence.tokens[copied:]]),
        np.concatenate([*targets, sequence.targets[copied:]]),
        sequence.media,
        np.concatenate([*positions, np.empty(0, np.int64)]).astype(np.int64),
        pieces=np.array(pieces, dtype=np.int64),
        turns=moved_turns(sequence.turns, repeats),
    )


def moved_turns(turns: Int64Array | None, repeats: Int64Array) -> Int64Array | None:
    """The turns of a sequence in which each token stands `repeats` times, int64 [num_tokens]."""
    return None if turns is None else np.concatenate([[0], np.cumsum(repeats)])[turns]


@dataclass(frozen=True, eq=False)
class Pixels:
    """How rows of an image are made of bytes: value = (byte / 255 - mean) / std, and each patch repeated.

    Each step is rounded to float32 as in transformers' image processors on numpy: values are theirs bit by bit.

    mean, std:   float32 [num_channels], of values from 0 to 1.
    num_repeats: how often a row holds each channel of its patch, one after the other (`temporal_patch_size`).

    Example:
        >>> pixels = Pixels(np.float32([0.5]), np.float32([0.5]), num_repeats=2)
        >>> rows = pixels.rows(np.array([[0, 255]], dtype=np.uint8))
        >>> rows.tolist(), pixels.bytes_of(rows).tolist()
        ([[-1.0, 1.0, -1.0, 1.0]], [[0, 255]])
    """

    mean: Float32Array
    std: Float32Array
    num_repeats: int = 1

    def rows(self, patches: UInt8Array) -> Float32Array:
        """Float32 [num_rows, num_channels * num_repeats * area], from bytes, uint8 [num_rows, num_channels * area]."""
        num_rows, num_channels = len(patches), len(self.mean)
        by_channel = patches.reshape(num_rows, num_channels, 1, patches.shape[1] // num_channels)
        shape = (num_rows, num_channels, self.num_repeats, by_channel.shape[3])
        values = np.empty(shape, dtype=np.float32)
        # A look-up takes twice the time of a product and a sum, and is exact.
        for channel, value_of_byte in enumerate((_UNIT_OF_BYTE - self.mean[:, None]) / self.std[:, None]):
            values[:, channel] = value_of_byte[by_channel[:, channel]]
        return values.reshape(num_rows, -1)

    def bytes_of(self, rows: Float32Array) -> UInt8Array:
        """The bytes that `rows` were made of: exact, as rounding errors are far below the step of a byte."""
        num_rows, num_channels = len(rows), len(self.mean)
        first = rows.reshape(num_rows, num_channels, self.num_repeats, -1)[:, :, 0]
        exact = (first * self.std[:, None] + self.mean[:, None]) * 255
        patches: UInt8Array = np.rint(np.nan_to_num(exact)).clip(0, 255).astype(np.uint8).reshape(num_rows, -1)
        return patches


_UNIT_OF_BYTE = (np.arange(256) * (1 / 255)).astype(np.float32)
"""Each byte as a value from 0 to 1."""


@dataclass(frozen=True, eq=False)
class Media:
    """One decoded and transformed item, ready for its encoder.

    values: float32 [num_rows, row_dim]: patches, or mel frames; float64 of what a worker computes in float64.
    size:   int64 [size_dim]: (patch rows, patch columns) of an image, (frames,) of a clip, or, where videos are read,
            (frames, patch rows, patch columns) of both; size_dim is fixed by phase.
    pixels: what `values` were made of, if they are pixels of 8 bits: these are less to send.
    patches: the bytes themselves, uint8 [num_rows, num_channels * area], as long as `values` are what they make: an
             item then goes to another process as bytes, a fourth of its values or less, and is made of them there.
    """

    values: Float32Array | Float64Array
    size: Int64Array
    pixels: Pixels | None = None
    patches: UInt8Array | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        if self.pixels is None or self.patches is None:
            return Media, (self.values, self.size, self.pixels)
        return _media_of_bytes, (self.patches, self.size, self.pixels)


def _media_of_bytes(patches: UInt8Array, size: Int64Array, pixels: Pixels) -> Media:
    return Media(pixels.rows(patches), size, pixels)
