"""The bytes of a token sequence and of a media item in the exchange. The receiver knows their sizes from lengths.

Every part begins at a multiple of 8 bytes, so that arrays can be views of the received bytes. The byte order is the
machine's: all ranks run on one kind of machine.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from motet.core.arrays import Int64Array, UInt8Array
from motet.core.example import Media, Pixels, TokenSequence
from motet.core.grid_positions import GRID_DIM

T = TypeVar("T", int, Int64Array)


def example_bytes(num_text_tokens: Int64Array, num_placeholders: Int64Array) -> Int64Array:
    """Bytes of each sequence: tokens int64, targets one byte each, positions of placeholders int64, and their grids
    and the turns of their items, int32 [GRID_DIM + 2].
    """
    return 8 * num_text_tokens + _up_to_8(num_text_tokens) + (8 + 4 * (GRID_DIM + 2)) * num_placeholders


def write_example(sequence: TokenSequence, into: UInt8Array) -> None:
    """Fill `into`, uint8 [example_bytes]."""
    num_tokens = len(sequence.tokens)
    start = 8 * num_tokens
    into[:start] = _as_bytes(sequence.tokens, np.int64)
    into[start : start + num_tokens] = _as_bytes(sequence.targets, np.bool_)
    grids = np.zeros((len(sequence.media_positions), GRID_DIM)) if sequence.grids is None else sequence.grids
    start += _up_to_8(num_tokens)
    end = start + 8 * len(sequence.media_positions)
    into[start:end] = _as_bytes(sequence.media_positions, np.int64)
    into[end:] = _as_bytes(
        np.concatenate([grids, np.repeat(sequence.item_turns, sequence.num_pieces, axis=0)], axis=1), np.int32
    )


def read_example(data: UInt8Array, num_text_tokens: int, media: tuple[str, ...], pieces: Int64Array) -> TokenSequence:
    """The sequence that `write_example` wrote, as a view of `data`.

    media, pieces: the phases of its items, in order, and the placeholders of each, int64 [num_items].
    """
    start = 8 * num_text_tokens
    items = start + _up_to_8(num_text_tokens)
    end = items + 8 * int(pieces.sum())
    of_placeholders = data[end:].view(np.int32).reshape(-1, GRID_DIM + 2).astype(np.int64)
    grids, turns = of_placeholders[:, :GRID_DIM], of_placeholders[np.cumsum(pieces) - pieces, GRID_DIM:]
    return TokenSequence(
        tokens=data[:start].view(np.int64),
        targets=data[start : start + num_text_tokens].view(np.bool_),
        media=media,
        media_positions=data[items:end].view(np.int64),
        # No grid is without columns.
        grids=grids if grids[:, 2].all() and len(grids) else None,
        pieces=pieces if (pieces != 1).any() else None,
        turns=turns if turns.any() else None,
    )


class MediaShape(NamedTuple):
    """What tells how an item lies in a message; an int, or int64 [num_items], each.

    num_channels, num_repeats: of its Pixels; 0 and 1 if it has none. value_bytes: of a value, 4 or 8.
    """

    num_rows: Any
    row_dim: Any
    size_dim: Any
    num_channels: Any = 0
    num_repeats: Any = 1
    value_bytes: Any = 4

    @classmethod
    def of(cls, media: Media) -> MediaShape:
        """The shape of one item."""
        pixels = media.pixels
        of_pixels = (len(pixels.mean), pixels.num_repeats) if pixels else (0, 1)
        return cls(*media.values.shape, len(media.size), *of_pixels, _value_type(media)().nbytes)


def media_bytes(shape: MediaShape) -> Int64Array:
    """Bytes of each item: its size int64 [size_dim]; then its values [num_rows, row_dim], float32 or float64, or, if it
    has Pixels, mean and std float32 [num_channels] each, and a byte a value, repeats left out.
    """
    num_values = shape.num_rows * shape.row_dim
    of_floats = _up_to_8(shape.value_bytes * num_values)
    of_pixels = 8 * shape.num_channels + _up_to_8(num_values // shape.num_repeats)
    has_pixels = shape.num_channels > 0
    return 8 * shape.size_dim + has_pixels * of_pixels + (1 - has_pixels) * of_floats


def write_media(media: Media, into: UInt8Array) -> None:
    """Fill `into`, uint8 [media_bytes]. Raises ValueError if the values are not those of the item's Pixels."""
    pixels = media.pixels
    parts = [_as_bytes(media.size, np.int64)]
    if pixels is None:
        parts.append(_as_bytes(media.values, _value_type(media)))
    else:
        parts += [_as_bytes(part, np.float32) for part in (pixels.mean, pixels.std)]
        patches = pixels.bytes_of(media.values)
        if not np.array_equal(pixels.rows(patches), media.values):
            raise ValueError(
                "the values of an item are not those of its pixels; a transform that changes them must leave pixels out"
            )
        parts.append(_as_bytes(patches, np.uint8))
    end = 0
    for part in parts:
        into[end : end + len(part)] = part
        end += len(part)


def read_media(data: UInt8Array, shape: MediaShape) -> Media:
    """The item that `write_media` wrote. Values that are floats are a view of `data`."""
    start = 8 * shape.size_dim
    size, num_values = data[:start].view(np.int64).copy(), shape.num_rows * shape.row_dim
    if not shape.num_channels:
        values = data[start : start + shape.value_bytes * num_values].view(f"f{shape.value_bytes}")
        return Media(values.reshape(shape.num_rows, shape.row_dim), size)
    mean, std = data[start : start + 8 * shape.num_channels].view(np.float32).reshape(2, -1).copy()
    pixels = Pixels(mean, std, shape.num_repeats)
    start += 8 * shape.num_channels
    patches = data[start : start + num_values // shape.num_repeats]
    return Media(pixels.rows(patches.reshape(shape.num_rows, -1)), size, pixels)


def _value_type(media: Media) -> type[np.float32] | type[np.float64]:
    return np.float64 if media.pixels is None and media.values.dtype == np.float64 else np.float32


def _up_to_8(size: T) -> T:
    return (size + 7) // 8 * 8


def _as_bytes(array: NDArray, dtype: type) -> UInt8Array:
    return np.ascontiguousarray(array, dtype=dtype).reshape(-1).view(np.uint8)
