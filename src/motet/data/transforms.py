"""The contract of transforms: a file to rows for its encoder, and the number of rows from the header alone."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, Protocol

import numpy as np

from motet.core.arrays import BoolArray, Int64Array
from motet.core.example import Media
from motet.data.audio import AudioTransform
from motet.data.images import ImageTransform
from motet.data.media import MediaRef, Unusable, raise_bad_media

__all__ = ["AudioTransform", "ImageTransform", "Transform", "kinds_of", "load_media"]


class Transform(Protocol):
    """A transform of one modality; picklable, and importable in a worker process (not defined in a script).

    raw: int64 [n, 2], from headers: (width, height) of images, (samples, sampling rate) of clips, `VideoHeader.raw` of
    videos, (rows, 0) of own items.
    Where several encoders read an item, transforms that have `decode(ref)`, `rows_of(decoded)` and an equal
    `decoding` share what is decoded; others decode it once more. To a transform whose `tells_several` is true the
    height of an image comes with `OF_SEVERAL` if there are several in its example: its model takes these otherwise, and
    no other transform reads images beside it. One that has `also` takes
    items of these modalities, too, for the same encoder; with `time_steps(raw)` it says how far apart their frames
    are (`core/grid_positions.py`). One whose items have text between their rows may say in `text_keys(raw)`, int64
    [n, k], what that text depends on. Of one that has `picture(values, size)`, which gives an image of Pillow's,
    the report shows what generators make. One that has `open()` is opened once in each worker, before its first item:
    it may read weights there, and raises UserError where it cannot.

    Example:
        >>> transform: Transform = ImageTransform(patch_size=16)
        >>> transform.modality, transform.sizes(np.array([[64, 32]])).tolist()  # 2 rows of 4 patches
        ('image', [[2, 4]])
    """

    @property
    def modality(self) -> str:
        """ "image", "audio", or that of the user's own: the placeholder that it stands for."""

    def sizes(self, raw: Int64Array) -> Int64Array:
        """The exact sizes of the items that `load` returns, int64 [n, size_dim], from their headers."""

    def accepts(self, raw: Int64Array) -> BoolArray:
        """Which items can be used, bool [n]; an example with another item is left out."""

    def refusal(self, raw: tuple[int, int]) -> str:
        """Why an item is not accepted, as a clause: "lasts 31 s, more than max_seconds = 30"."""

    def load(self, ref: MediaRef) -> Media:
        """Decode and transform a file; raises any Exception if it is missing or damaged."""


def kinds_of(transform: Transform) -> tuple[str, ...]:
    """The modalities of the items that a transform takes, its own first."""
    return (transform.modality, *getattr(transform, "also", ()))


def load_media(ref: MediaRef, transform: Transform, decoded: dict[Hashable, Any] | None = None) -> Media:
    """One item with finite values and the size in the index. Raises BadMedia (file, reason).

    decoded: what transforms before this one have decoded of the item, by `decoding`; None: no other reads it.
    """
    # Values that overflow are found below, so numpy need not warn.
    with raise_bad_media(ref), np.errstate(over="ignore", invalid="ignore"):
        media = transform.load(ref) if decoded is None else _load_shared(ref, transform, decoded)
        # Maximum and minimum are NaN if any value is NaN: faster than a test of each value.
        if media.values.size and not (np.isfinite(media.values.max()) and np.isfinite(media.values.min())):
            raise Unusable("becomes values that are not finite; its samples are too large to compute with")
        if ref.raw is not None:
            indexed = transform.sizes(np.array([ref.raw], dtype=np.int64))[0]
            if not np.array_equal(media.size, indexed):
                # All ranks have decided with the size in the index.
                raise Unusable(f"has size {media.size.tolist()}, its header at indexing promised {indexed.tolist()}")
    return media


def _load_shared(ref: MediaRef, transform: Any, decoded: dict[Hashable, Any]) -> Media:
    if not hasattr(transform, "decoding"):
        media: Media = transform.load(ref)
        return media
    key = (type(transform), transform.decoding)
    if key not in decoded:
        decoded[key] = transform.decode(ref)
    rows: Media = transform.rows_of(decoded[key])
    return rows
