"""An image to patch rows: resized to whole merge blocks, normalised, cut into patches in merge-block order.

Size, with block = patch_size * merge_size: an image whose longer side is more than `max_pixels_side` is scaled down to
it, with the same aspect. Then each side becomes the nearest multiple of the block (half rounds up, at least one block,
never beyond the bound). So nothing is cropped or padded, and an image of whole blocks is not resampled; `buckets` crop.
This is Qwen2-VL's rule (`smart_resize`) with a bound on the side in place of its bounds on the area.

Pixels: the first picture of a file with several, turned as its EXIF says. Transparent pixels become white, as in
transformers' image processors. 16-bit grey keeps its upper 8 bits. A file is decoded whole, unless `draft_jpeg` is set.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from motet.core.arrays import BoolArray, Float32Array, Int64Array, UInt8Array
from motet.core.example import Media, Pixels
from motet.core.words import counted_words
from motet.data.bounds import check_attributes
from motet.data.buckets import Buckets, check_buckets, nearest_bucket
from motet.data.headers import open_image, orientation, turned_size
from motet.data.media import IMAGE, MediaRef

if TYPE_CHECKING:
    from PIL import Image


_MAX_ROWS = 2**20
"""The most patch rows of an image with fixed_size; more is a slip, and would fill the memory."""


@dataclass(frozen=True)
class ImageTransform:
    """An image file to patch rows. The fields are the options of a recipe; unknown options are refused.

    patch_size:      pixels of a patch's side, at most 256.
    merge_size:      patches of a merge block's side, at most 16; the merge_size ** 2 patches of a block are consecutive
                     rows. 1: raster order.
    max_pixels_side: bound of the longer side in pixels, at least one block and at most 16,384.
    fixed_size:      if given, every image is resized to fixed_size x fixed_size pixels, whatever its aspect (as in
                     SigLIP), for encoders with fixed position embeddings; a multiple of patch_size * merge_size, at
                     most 16,384.
    buckets:         if given, [width, height] in pixels of a few sizes: every image is resized to cover the one of the
                     nearest aspect, and cropped to it (`data/buckets.py`); multiples of patch_size * merge_size.
    channels:        3 (RGB) or 1 (grey).
    temporal_patch_size: each row repeats the image this many times, for encoders that patch over time (Qwen2-VL: 2); at
                         most 16.
    mean, std:       rows hold (value - mean) / std of pixel values from 0 to 1; one number, or one for each channel.
                     mean is from 0 to 1, std from 0.001 to 1 (1 / 255 gives values from 0 to 255).
    draft_jpeg:      decode a JPEG at a half, a quarter or an eighth of its size if that is still at least twice the
                     resized image in width and height. Two to three times faster on photographs. Sizes are the same;
                     pixels are close to those of the whole decoded image, which processors define.
    resample:        the filter of resizing, by Pillow's number, as preprocessor_config.json has it: 3 is bicubic, 2
                     bilinear, 1 Lanczos.

    Example:
        >>> transform = ImageTransform(patch_size=14, merge_size=2)
        >>> transform.sizes(np.array([[640, 480]])).tolist(), transform.row_dim  # patch rows and columns
        ([[34, 46]], 588)
    """

    patch_size: int
    merge_size: int = 1
    max_pixels_side: int = 1344
    fixed_size: int | None = None
    buckets: Buckets | None = None
    channels: int = 3
    temporal_patch_size: int = 1
    mean: tuple[float, ...] = (0.5,)
    std: tuple[float, ...] = (0.5,)
    draft_jpeg: bool = False
    resample: int = 3

    # pydantic reads this where the class is a field of a recipe; no import of pydantic is needed here.
    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}
    modality: ClassVar[str] = IMAGE

    # Far beyond every encoder. The side is beyond every image that is read (`headers.MAX_PIXELS`), panoramas excepted.
    _bounds: ClassVar[dict[str, tuple[float, float]]] = {
        "patch_size": (1, 256),
        "merge_size": (1, 16),
        "temporal_patch_size": (1, 16),
        "max_pixels_side": (1, 16_384),
        "fixed_size": (1, 16_384),
        "mean": (0, 1),
        "std": (0.001, 1),
        "resample": (0, 5),
    }

    def __post_init__(self) -> None:
        check_attributes(self, self._bounds)
        if self.channels not in (1, 3):
            raise ValueError(f"channels must be 1 (grey) or 3 (RGB), not {self.channels}")
        if self.max_pixels_side < self.block:
            raise ValueError(
                f"max_pixels_side is {self.max_pixels_side}, less than a block, patch_size * merge_size = {self.block}"
            )
        if self.fixed_size is not None and self.fixed_size % self.block:
            raise ValueError(
                f"fixed_size is {self.fixed_size}, but must be a multiple of patch_size * merge_size = {self.block}"
            )
        if self.fixed_size is not None and (rows := (self.fixed_size // self.patch_size) ** 2) > _MAX_ROWS:
            raise ValueError(
                f"fixed_size = {self.fixed_size} and patch_size = {self.patch_size} make "
                f"{counted_words(rows, 'patch', 'patches')} of an image; there may be {_MAX_ROWS:,}"
            )
        if self.fixed_size is not None and self.max_pixels_side != type(self).max_pixels_side:
            raise ValueError("max_pixels_side has no effect beside fixed_size, the size of every image; remove it")
        if self.buckets is not None:
            for name in ("fixed_size", "max_pixels_side"):
                if getattr(self, name) != getattr(type(self), name):
                    raise ValueError(f"{name} has no effect beside buckets, which say the sizes; remove one of them")
            check_buckets(self.buckets, self.block, _MAX_ROWS, self.patch_size)
        for name, values in (("mean", self.mean), ("std", self.std)):
            if len(values) not in (1, self.channels):
                raise ValueError(
                    f"{name} must have 1 value{f' or {self.channels}' * (self.channels > 1)}, one a channel, not "
                    f"{len(values)}"
                )

    @property
    def block(self) -> int:
        """Pixels of a merge block's side."""
        return self.patch_size * self.merge_size

    @property
    def row_dim(self) -> int:
        """Values of a row: channels * temporal_patch_size * patch_size**2."""
        return self.channels * self.temporal_patch_size * self.patch_size**2

    def accepts(self, raw: Int64Array) -> BoolArray:
        """Which images can be used, bool [n]: all whose headers passed the checks of `headers`."""
        return np.ones(len(raw), dtype=bool)

    def refusal(self, raw: tuple[int, int]) -> str:
        """Raises ValueError: no image is refused."""
        raise ValueError(f"an image of {raw[0]} x {raw[1]} pixels is not refused")

    def pixels(self, raw: Int64Array) -> Int64Array:
        """(width, height) after resizing, int64 [n, 2], from raw [n, 2] (width, height); integer arithmetic only."""
        if self.fixed_size is not None:
            return np.full(raw.shape, self.fixed_size, dtype=np.int64)
        if self.buckets is not None:
            return np.array(self.buckets, dtype=np.int64)[nearest_bucket(raw, self.buckets)]
        longer = raw.max(axis=1, keepdims=True)
        # blocks = round(side * scale / (longer * block)): one rounding, not one to pixels and one to blocks.
        scale = np.where(longer > self.max_pixels_side, self.max_pixels_side, longer)
        divisor = longer * self.block
        blocks = (2 * raw * scale + divisor) // (2 * divisor)
        pixels: Int64Array = np.clip(blocks, 1, self.max_pixels_side // self.block) * self.block
        return pixels

    def sizes(self, raw: Int64Array) -> Int64Array:
        """(patch rows, patch columns) of each image, int64 [n, 2], from raw [n, 2] (width, height) alone."""
        return self.pixels(raw)[:, ::-1] // self.patch_size

    def load(self, ref: MediaRef) -> Media:
        """Decode and transform one image. Raises Unusable, and whatever Pillow raises on a damaged file."""
        return self.rows_of(self.decode(ref))

    @property
    def decoding(self) -> ImageTransform | None:
        """Transforms of one `decoding` can share what any of them has decoded: all but those that draft."""
        return self if self.draft_jpeg else None

    def decode(self, ref: MediaRef) -> tuple[Image.Image, tuple[int, int]]:
        """The image, upright, and its (width, height) before drafting. Raises as `load` does."""
        with open_image(ref) as image:
            size = turned_size(image)
            if self.draft_jpeg:
                _draft(image, self._target(size))
            image.load()
            return upright(image), size

    def rows_of(self, decoded: tuple[Image.Image, tuple[int, int]]) -> Media:
        """The rows of what `decode` returned."""
        image, size = decoded
        return self._rows(image, self._target(size))

    def __call__(self, image: Image.Image) -> Media:
        """Rows [num_patches, row_dim], a row in the order (channel, time, y, x); size (patch rows, patch columns)."""
        return self._rows(image, self._target(image.size))

    def picture(self, values: Float32Array, size: Int64Array) -> Image.Image:
        """The image whose rows are the nearest to `values`: the inverse of a call, but for resizing.

        values: [num_patches, row_dim]. size: int64 [2], (patch rows, patch columns).
        """
        from PIL import Image

        patch, merge = self.patch_size, self.merge_size
        rows, columns = size.tolist()
        patches = self._pixels().bytes_of(np.asarray(values, dtype=np.float32))
        blocks = patches.reshape(rows // merge, columns // merge, merge, merge, self.channels, patch, patch)
        pixels = blocks.transpose(0, 2, 5, 1, 3, 6, 4).reshape(rows * patch, columns * patch, self.channels)
        return Image.fromarray(np.ascontiguousarray(pixels[:, :, 0] if self.channels == 1 else pixels))

    def _target(self, raw: tuple[int, int]) -> tuple[int, int]:
        """(width, height) after resizing, from (width, height) after the EXIF turn."""
        width, height = self.pixels(np.array([raw], dtype=np.int64))[0].tolist()
        return width, height

    def patches_of(self, image: Image.Image) -> UInt8Array:
        """The bytes of an image's rows, uint8 [num_patches, channels * patch_size**2], in the order (channel, y, x)."""
        return self._patches(image, self._target(image.size))

    def _patches(self, image: Image.Image, target: tuple[int, int]) -> UInt8Array:
        image = self._resized(plain_image(image, "L" if self.channels == 1 else "RGB"), target)
        width, height = target
        patch, merge = self.patch_size, self.merge_size
        rows, columns = height // patch, width // patch
        if image.size != (columns * patch, rows * patch):
            # Towers make patches by a convolution, which leaves out what is less than a patch (384 pixels by 14).
            image = image.crop((0, 0, columns * patch, rows * patch))
        pixels = np.asarray(image).reshape(rows // merge, merge, patch, columns // merge, merge, patch, self.channels)
        # Transposing bytes before the conversion to floats takes a quarter of the memory traffic.
        ordered = np.ascontiguousarray(pixels.transpose(0, 3, 1, 4, 6, 2, 5))
        return ordered.reshape(rows * columns, self.channels * patch * patch)

    def _rows(self, image: Image.Image, target: tuple[int, int]) -> Media:
        patches, (width, height), pixels_of_rows = self._patches(image, target), target, self._pixels()
        size = np.array([height // self.patch_size, width // self.patch_size], dtype=np.int64)
        return Media(pixels_of_rows.rows(patches), size, pixels_of_rows, patches)

    def _resized(self, image: Image.Image, target: tuple[int, int]) -> Image.Image:
        """The image in the size (width, height); of a bucket its middle."""
        from PIL import Image, ImageOps

        if image.size == target:
            return image
        resample = Image.Resampling(self.resample)
        return image.resize(target, resample) if self.buckets is None else ImageOps.fit(image, target, resample)

    def _pixels(self) -> Pixels:
        mean, std = (np.broadcast_to(np.float32(values), (self.channels,)) for values in (self.mean, self.std))
        return Pixels(mean, std, self.temporal_patch_size)


def plain_image(image: Image.Image, mode: str) -> Image.Image:
    """The image in a mode of 8 bits a channel (RGB, L), on white where it is transparent."""
    image = _opaque(eight_bit(image))
    return image if image.mode == mode else image.convert(mode)  # Pillow would copy it.


def _draft(image: Image.Image, target: tuple[int, int]) -> None:
    """Have a JPEG decoded at the smallest scale of its DCT that leaves twice the target; other formats ignore it.

    target: (width, height) after the EXIF turn. Pillow's `thumbnail` takes the same factor of two.
    """
    width, height = (2 * side for side in target)
    image.draft(None, (width, height) if image.size == turned_size(image) else (height, width))


def upright(image: Image.Image) -> Image.Image:
    """The image turned as its EXIF orientation says, if it has one."""
    from PIL import ImageOps

    return ImageOps.exif_transpose(image) if orientation(image) != 1 else image


def eight_bit(image: Image.Image) -> Image.Image:
    """The image with 8 bits a channel. (Pillow's conversion would clip 16-bit grey at 255.)"""
    from PIL import Image

    if not image.mode.startswith("I"):
        return image
    return Image.fromarray((np.asarray(image).clip(0, 65535) >> 8).astype(np.uint8))


def _opaque(image: Image.Image) -> Image.Image:
    """The image on a white background if any of it is transparent: the colours below are not meant to be seen."""
    from PIL import Image

    image.load()
    if not image.has_transparency_data:
        return image
    image = image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
