"""One training example as a reader hands it over: tokens with placeholders, and the media that stand for them."""

from __future__ import annotations

from dataclasses import dataclass

from motet.core.arrays import BoolArray, Float32Array, Int64Array


@dataclass(frozen=True, eq=False)
class TokenSequence:
    """The text of one example; each placeholder token stands once for one item, whatever rows it becomes.

    tokens:          int64 [num_tokens], text token ids; at a placeholder any valid id.
    targets:         bool [num_tokens], True where the token is part of an answer: loss is taken on predicting it.
    media:           phase name of each placeholder, in order of appearance: ("image", "audio").
    media_positions: int64 [num_items], place of each placeholder in `tokens`; ascending.
    """

    tokens: Int64Array
    targets: BoolArray
    media: tuple[str, ...]
    media_positions: Int64Array


@dataclass(frozen=True, eq=False)
class Media:
    """One decoded and transformed item, ready for its encoder.

    values: float32 [num_rows, row_dim]: patches, or mel frames.
    size:   int64 [size_dim]: (patch rows, patch columns) of an image, (frames,) of a clip; fixed number per phase.
    """

    values: Float32Array
    size: Int64Array
