"""Buckets: a few sizes to which images are resized and cropped, so that few sizes are computed.

An image goes to the bucket of the nearest aspect, and of the nearest area among those; the first of equal ones. It is
scaled until it covers the bucket, and cropped in the middle.
"""

from __future__ import annotations

import numpy as np

from motet.core.arrays import Int64Array
from motet.core.words import counted_words

Buckets = tuple[tuple[int, int], ...]
"""(width, height) in pixels of each."""

_MAX_BUCKETS = 1024


def check_buckets(buckets: Buckets, block: int, max_rows: int, patch_size: int) -> None:
    """Raise ValueError for buckets that are none, twice there, or not of whole merge blocks. block: pixels of a side.

    max_rows: the most patches of an image.
    """
    if not 1 <= len(buckets) <= _MAX_BUCKETS:
        raise ValueError(f"buckets has {len(buckets)} sizes; there may be 1 to {_MAX_BUCKETS:,}")
    for width, height in buckets:
        if min(width, height) < 1 or width % block or height % block:
            raise ValueError(
                f"buckets has [{width}, {height}], but both sides must be multiples of patch_size * merge_size, which "
                f"is {block}"
            )
        if (rows := width * height // patch_size**2) > max_rows:
            raise ValueError(
                f"buckets has [{width}, {height}], which patch_size = {patch_size} makes "
                f"{counted_words(rows, 'patch', 'patches')} of; there may be {max_rows:,}"
            )
    if len(set(buckets)) < len(buckets):
        raise ValueError("buckets has a size twice; remove one of them")


def nearest_bucket(raw: Int64Array, buckets: Buckets) -> Int64Array:
    """The bucket of each image, int64 [n]. raw: (width, height), int64 [n, 2].

    Ratios are quotients of whole numbers below 2**53, so that all machines find the same. O(n x buckets).
    """
    (width, height), (to_width, to_height) = raw.T[:, :, None], np.array(buckets, dtype=np.int64).T[:, None]
    aspect, area = _ratio(width * to_height, height * to_width), _ratio(width * height, to_width * to_height)
    is_nearest = aspect == aspect.min(axis=1, keepdims=True)
    nearest: Int64Array = np.where(is_nearest, area, np.inf).argmin(axis=1)
    return nearest


def _ratio(one: Int64Array, other: Int64Array) -> np.ndarray:
    """How many times the larger is the smaller, float64."""
    return np.maximum(one, other) / np.minimum(one, other).clip(1)  # What cannot be read has no pixels.
