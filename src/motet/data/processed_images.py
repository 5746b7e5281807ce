"""An image as a model's own image processor prepares it: resized, cropped at the centre, normalised.

Sizes and pixels are those of transformers' processors on PIL and numpy (`PilBackend`). The processor's values come from
the model's directory (`models/whole/processor.py`). Every image comes to one size, whatever its own is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from motet.core.arrays import Int64Array
from motet.data.images import ImageTransform

if TYPE_CHECKING:
    from PIL import Image


@dataclass(frozen=True)
class ProcessedImages(ImageTransform):
    """An image file to the patch rows of a model that has an image processor of its own.

    size:          (height, width) of all images, behind the crop if there is one.
    shortest_edge: the shorter side is resized to this, with the same aspect, and the centre of `size` is cut out; what
                   lacks to it is black. None: the image is resized to `size`, whatever its aspect.
    resample:      Pillow's number of the filter: 3 is bicubic, 2 bilinear.

    Example:
        >>> transform = ProcessedImages(patch_size=14, size=(336, 336), shortest_edge=336)
        >>> transform.sizes(np.array([[640, 480]])).tolist()  # patch rows and columns
        [[24, 24]]
    """

    size: tuple[int, int] = (224, 224)
    shortest_edge: int | None = None
    resample: int = 3

    def pixels(self, raw: Int64Array) -> Int64Array:
        """(width, height) of each image, int64 [n, 2]: all the same."""
        return np.broadcast_to(np.array(self.size[::-1], dtype=np.int64), raw.shape)

    def _resized(self, image: Image.Image, target: tuple[int, int]) -> Image.Image:
        from PIL import Image

        resample = Image.Resampling(self.resample)
        if self.shortest_edge is None:
            return image.resize(target, resample)
        width, height = image.size
        shorter, longer = min(width, height), max(width, height)
        longer = int(self.shortest_edge * longer / shorter)
        image = image.resize(
            (self.shortest_edge, longer) if width <= height else (longer, self.shortest_edge), resample
        )
        left, top = (_offset(whole, cut) for whole, cut in zip(image.size, target))
        return image.crop((left, top, left + target[0], top + target[1]))


def _offset(whole: int, cut: int) -> int:
    """Where the centre of a side begins; less than 0 if the side is shorter, which is filled up around it."""
    return (whole - cut) // 2 if whole >= cut else -((cut - whole + 1) // 2)
