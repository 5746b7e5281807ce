"""An image as a model's own image processor prepares it: transformers' processor itself, which makes all of one size.

It is for models that Motet does not know (`models/whole/generic.py`). Those that it knows have transforms of their own,
which need no transformers in the processes that decode.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from motet.core.arrays import BoolArray, Int64Array
from motet.core.example import Media
from motet.data.headers import open_image
from motet.data.images import plain_image, upright
from motet.data.media import IMAGE, MediaRef, Unusable

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True)
class ImagesByProcessor:
    """The pixels of an image behind a processor, in equal rows: float32 [num_rows, values of all pixels / num_rows].

    path:     the directory of the processor.
    shape:    (channels, height, width) of what it makes of every image.
    num_rows: of an item.
    """

    path: Path
    shape: tuple[int, int, int]
    num_rows: int
    modality: ClassVar[str] = IMAGE

    @property
    def row_dim(self) -> int:
        """Values of a row."""
        return int(np.prod(self.shape)) // self.num_rows

    def sizes(self, raw: Int64Array) -> Int64Array:
        """Rows of each item, int64 [n, 1]: all the same."""
        return np.full((len(raw), 1), self.num_rows, dtype=np.int64)

    def accepts(self, raw: Int64Array) -> BoolArray:
        """All images."""
        return np.ones(len(raw), dtype=bool)

    def refusal(self, raw: tuple[int, int]) -> str:
        """No image is refused."""
        raise AssertionError("no image is refused")

    def load(self, ref: MediaRef) -> Media:
        """The rows of an image. Raises Unusable where the processor makes another shape of it."""
        with open_image(ref) as image:
            # Some processors take three colours alone; this is what the others do themselves, but for 16-bit grey.
            pixels = self._processor(images=plain_image(upright(image), "RGB"), return_tensors="np")["pixel_values"]
        if pixels.shape != (1, *self.shape):
            raise Unusable(f"becomes pixels {list(pixels.shape)} by its processor, not {[1, *self.shape]}")
        rows = np.ascontiguousarray(pixels, dtype=np.float32).reshape(self.num_rows, self.row_dim)
        return Media(rows, np.array([self.num_rows], dtype=np.int64))

    @cached_property
    def _processor(self) -> Any:
        from transformers import AutoImageProcessor

        return AutoImageProcessor.from_pretrained(
            self.path, backend="pil", local_files_only=True, trust_remote_code=False
        )

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path, "shape": self.shape, "num_rows": self.num_rows}
