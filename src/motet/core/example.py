"""One training example as a reader returns it: tokens with placeholders, and the media of the placeholders."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from motet.core.arrays import BoolArray, Float32Array, Int64Array, UInt8Array


@dataclass(frozen=True, eq=False)
class TokenSequence:
    """The text of one example. Each item has one placeholder token, whatever number of rows the item becomes.

    An item that several encoders read is an item of each. They have a placeholder each, or one together: then their
    rows are added, which must be equally many.

    tokens:          int64 [num_tokens], text token ids; any valid id at a placeholder.
    targets:         bool [num_tokens], True for the tokens of an answer: loss is taken on predicting them.
    media:           the phase of each placeholder, in order of appearance: ("image", "audio").
    media_positions: int64 [num_items], the index of each item's placeholder in `tokens`; ascending.

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


@dataclass(frozen=True, eq=False)
class Pixels:
    """How rows of an image are made of bytes: value = byte * scale + shift, in float32, and each patch repeated.

    scale, shift: float32 [num_channels].
    num_repeats:  how often a row holds each channel of its patch, one after the other (`temporal_patch_size`).

    Example:
        >>> pixels = Pixels(np.float32([0.5]), np.float32([-1]), num_repeats=2)
        >>> rows = pixels.rows(np.array([[0, 4, 255]], dtype=np.uint8))
        >>> rows.tolist(), pixels.bytes_of(rows).tolist()
        ([[-1.0, 1.0, 126.5, -1.0, 1.0, 126.5]], [[0, 4, 255]])
    """

    scale: Float32Array
    shift: Float32Array
    num_repeats: int = 1

    def rows(self, patches: UInt8Array) -> Float32Array:
        """Float32 [num_rows, num_channels * num_repeats * area], from bytes, uint8 [num_rows, num_channels * area]."""
        num_rows, num_channels = len(patches), len(self.scale)
        by_channel = patches.reshape(num_rows, num_channels, 1, patches.shape[1] // num_channels)
        shape = (num_rows, num_channels, self.num_repeats, by_channel.shape[3])
        values = np.empty(shape, dtype=np.float32)
        values[...] = by_channel * self.scale[:, None, None] + self.shift[:, None, None]
        return values.reshape(num_rows, -1)

    def bytes_of(self, rows: Float32Array) -> UInt8Array:
        """The bytes that `rows` were made of: exact, as rounding errors are far below a step of `scale`."""
        num_rows, num_channels = len(rows), len(self.scale)
        first = rows.reshape(num_rows, num_channels, self.num_repeats, -1)[:, :, 0]
        exact = (first - self.shift[:, None]) / self.scale[:, None]
        patches: UInt8Array = np.rint(np.nan_to_num(exact)).clip(0, 255).astype(np.uint8).reshape(num_rows, -1)
        return patches


@dataclass(frozen=True, eq=False)
class Media:
    """One decoded and transformed item, ready for its encoder.

    values: float32 [num_rows, row_dim]: patches, or mel frames.
    size:   int64 [size_dim]: (patch rows, patch columns) of an image, (frames,) of a clip; size_dim is fixed by phase.
    pixels: what `values` were made of, if they are pixels of 8 bits: these are less to send.
    """

    values: Float32Array
    size: Int64Array
    pixels: Pixels | None = None
