"""What turns a file into rows for its encoder, and tells their number beforehand: a class a modality."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from motet.core.arrays import BoolArray, Int64Array
from motet.core.example import Media
from motet.data.audio import AudioTransform
from motet.data.images import ImageTransform
from motet.data.media import MediaRef, Unusable, raise_bad_media

__all__ = ["AudioTransform", "ImageTransform", "Transform", "load_media"]


class Transform(Protocol):
    """Anything with these is a transform: picklable, and importable in a worker process (not defined in a script)."""

    @property
    def modality(self) -> str:
        """ "image" or "audio": the placeholder that it stands for."""

    def sizes(self, raw: Int64Array) -> Int64Array:
        """The sizes [n, size_dim] that `load` will yield, from what headers tell, raw [n, 2]. Exact."""

    def accepts(self, raw: Int64Array) -> BoolArray:
        """Which items are used at all, bool [n]; examples with others are left out."""

    def refusal(self, raw: tuple[int, int]) -> str:
        """Why an item that is not accepted is not, as a clause: "lasts 31 s, more than max_seconds = 30"."""

    def load(self, ref: MediaRef) -> Media:
        """Decode and transform; raises any Exception on a file that is missing or damaged."""


def load_media(ref: MediaRef, transform: Transform) -> Media:
    """One item, finite and of the size that the index promised. Raises BadMedia (file, reason)."""
    # What is too large to compute with is found below, in every value; numpy need not warn of it.
    with raise_bad_media(ref), np.errstate(over="ignore", invalid="ignore"):
        media = transform.load(ref)
        # numpy's maximum is NaN where any value is: two numbers tell of all, and faster than a look at each.
        if media.values.size and not (np.isfinite(media.values.max()) and np.isfinite(media.values.min())):
            raise Unusable("becomes values that are not finite; its samples are too large to compute with")
        if ref.raw is not None:
            promised = transform.sizes(np.array([ref.raw], dtype=np.int64))[0]
            if not np.array_equal(media.size, promised):
                # Others have planned with the promised size: a different one would not fit their plan.
                raise Unusable(f"has size {media.size.tolist()}, its header at indexing promised {promised.tolist()}")
    return media
