"""The bytes of a token sequence and of a media item in the exchange. The receiver knows their sizes from lengths.

Every part begins at a multiple of 8 bytes, so that arrays can be views of the received bytes. The byte order is the
machine's: all ranks run on one kind of machine.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from motet.core.arrays import Int64Array, UInt8Array
from motet.core.example import Media, TokenSequence

T = TypeVar("T", int, Int64Array)


def example_bytes(num_text_tokens: Int64Array, num_items: Int64Array) -> Int64Array:
    """Bytes of each sequence: tokens int64, targets one byte each, positions of placeholders int64."""
    return 8 * num_text_tokens + _up_to_8(num_text_tokens) + 8 * num_items


def write_example(sequence: TokenSequence, into: UInt8Array) -> None:
    """Fill `into`, uint8 [example_bytes]."""
    num_tokens = len(sequence.tokens)
    start = 8 * num_tokens
    into[:start] = _as_bytes(sequence.tokens, np.int64)
    into[start : start + num_tokens] = _as_bytes(sequence.targets, np.bool_)
    into[start + _up_to_8(num_tokens) :] = _as_bytes(sequence.media_positions, np.int64)


def read_example(data: UInt8Array, num_text_tokens: int, media: tuple[str, ...]) -> TokenSequence:
    """The sequence that `write_example` wrote, as a view of `data`. media: the phases of its placeholders, in order."""
    start = 8 * num_text_tokens
    return TokenSequence(
        tokens=data[:start].view(np.int64),
        targets=data[start : start + num_text_tokens].view(np.bool_),
        media=media,
        media_positions=data[start + _up_to_8(num_text_tokens) :].view(np.int64),
    )


def media_bytes(num_rows: Int64Array, row_dim: Int64Array, size_dim: Int64Array) -> Int64Array:
    """Bytes of each item: its size int64 [size_dim], its values float32 [num_rows, row_dim]."""
    return 8 * size_dim + _up_to_8(4 * num_rows * row_dim)


def write_media(media: Media, into: UInt8Array) -> None:
    """Fill `into`, uint8 [media_bytes]."""
    start = 8 * len(media.size)
    into[:start] = _as_bytes(media.size, np.int64)
    into[start : start + 4 * media.values.size] = _as_bytes(media.values, np.float32)


def read_media(data: UInt8Array, num_rows: int, row_dim: int, size_dim: int) -> Media:
    """The item that `write_media` wrote, as a view of `data`."""
    start = 8 * size_dim
    values = data[start : start + 4 * num_rows * row_dim].view(np.float32).reshape(num_rows, row_dim)
    return Media(values=values, size=data[:start].view(np.int64))


def _up_to_8(size: T) -> T:
    return (size + 7) // 8 * 8


def _as_bytes(array: NDArray, dtype: type) -> UInt8Array:
    return np.ascontiguousarray(array, dtype=dtype).reshape(-1).view(np.uint8)
