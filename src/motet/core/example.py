"""One training example as a reader returns it: tokens with placeholders, and the media of the placeholders."""

from __future__ import annotations

from dataclasses import dataclass

from motet.core.arrays import BoolArray, Float32Array, Int64Array


@dataclass(frozen=True, eq=False)
class TokenSequence:
    """The text of one example. Each item has one placeholder token, whatever number of rows the item becomes.

    tokens:          int64 [num_tokens], text token ids; any valid id at a placeholder.
    targets:         bool [num_tokens], True for the tokens of an answer: loss is taken on predicting them.
    media:           the phase of each placeholder, in order of appearance: ("image", "audio").
    media_positions: int64 [num_items], the index of each placeholder in `tokens`; ascending.

    Example:
        An image between two tokens of a question, then an answer of one token:
        >>> import numpy as np
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
class Media:
    """One decoded and transformed item, ready for its encoder.

    values: float32 [num_rows, row_dim]: patches, or mel frames.
    size:   int64 [size_dim]: (patch rows, patch columns) of an image, (frames,) of a clip; size_dim is fixed by phase.
    """

    values: Float32Array
    size: Int64Array
