"""Bad images in a small training job: one among good ones, be it allowed or not."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Iterator
from functools import cache

import numpy as np
from PIL import Image

from bad.files.base import picture
from bad.files.damage import cut, overwrite, replace
from bad.files.media import bad_item, damaged_items, good_item, odd_item
from bad.run import Case

FORMATS = {
    "png": "PNG",
    "jpg": "JPEG",
    "webp": "WEBP",
    "gif": "GIF",
    "tif": "TIFF",
    "bmp": "BMP",
    "ppm": "PPM",
    "avif.png": "AVIF",
}
"""By ending of the file, the format inside; AVIF has no ending that a shard would know."""
_CUTS = {"a tenth": 0.1, "a half": 0.5, "nine tenths": 0.9}
"""What is left of a file, in words and as a share."""


@cache
def whole(ending: str) -> bytes:
    """A picture in a format."""
    file = io.BytesIO()
    picture().save(file, FORMATS[ending], **({"lossless": True} if ending == "webp" else {}))
    return file.getvalue()


def image_cases(seed: int) -> Iterator[Case]:
    """Each format under each damage, header fields that are absurd, and pictures that are unusual and good."""
    for ending in FORMATS:
        yield from damaged_items("image", ending, whole(ending), seed, cuts=_CUTS, num_flips=4, header_bytes=48)
        yield bad_item("image", f"{ending} cut to a half, none allowed", ending, cut(0.5)(whole(ending)), allowed=False)
    yield from _headers()
    yield from _unusual()


def _png(width: int, height: int, rows: bytes = b"", extra: bytes = b"", depth: int = 8, color: int = 2) -> bytes:
    """A PNG whose checksums are right, whatever it says. extra: chunks behind the header."""
    header = struct.pack(">IIBBBBB", width, height, depth, color, 0, 0, 0)
    data = zlib.compress(rows or b"\0" * ((3 * min(width, 99) + 1) * min(height, 99)))
    return b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", header) + extra + _chunk(b"IDAT", data) + _chunk(b"IEND", b"")


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def _jpeg_sized(width: int, height: int) -> bytes:
    data = whole("jpg")
    return overwrite(data.index(b"\xff\xc0") + 5, struct.pack(">HH", height, width))(data)


def _tiff_tag(tag: int, value: int) -> bytes:
    """A TIFF in which a tag of its first directory has another value."""
    data = whole("tif")
    (at,) = struct.unpack_from("<I", data, 4)
    (count,) = struct.unpack_from("<H", data, at)
    places = [at + 2 + 12 * number for number in range(count)]
    place = next(place for place in places if struct.unpack_from("<H", data, place)[0] == tag)
    return overwrite(place + 8, struct.pack("<I", value))(data)


def _headers() -> Iterator[Case]:
    """Fields of headers that make no sense, where the rest of the file is as it was."""
    bomb = b"Comment\0\0" + zlib.compress(bytes(80 << 20))
    bmp, tif, webp, ppm = whole("bmp"), whole("tif"), whole("webp"), whole("ppm")
    found = {
        "png of 2 billion pixels a side": ("png", _png(2**31 - 1, 2**31 - 1)),
        "png of 50,000 x 50,000 pixels": ("png", _png(50_000, 50_000)),
        "png of width 0": ("png", _png(0, 24)),
        "png 2 x 20,000": ("png", _png(2, 20_000, bytes(7 * 20_000))),
        "png of 3 bits": ("png", _png(24, 24, depth=3)),
        "png of an unknown colour type": ("png", _png(24, 24, color=5)),
        "png with a text of 80 MB": ("png", _png(24, 24, extra=_chunk(b"zTXt", bomb))),
        "png with a wrong checksum of its header": ("png", overwrite(29, b"\0\0\0\0")(_png(24, 24))),
        "png palette without a palette": ("png", _png(24, 24, bytes(25 * 24), color=3)),
        "jpg of 65,500 x 65,500 pixels": ("jpg", _jpeg_sized(65_500, 65_500)),
        "jpg of height 0": ("jpg", _jpeg_sized(24, 0)),
        "jpg of its start marker alone": ("jpg", b"\xff\xd8\xff"),
        "gif of 65,535 x 65,535 pixels": ("gif", overwrite(6, b"\xff\xff\xff\xff")(whole("gif"))),
        "bmp of 2 billion pixels": ("bmp", overwrite(18, struct.pack("<ii", 2**31 - 1, 2**31 - 1))(bmp)),
        "bmp of a negative width": ("bmp", overwrite(18, struct.pack("<i", -24))(bmp)),
        "bmp of 7 bits": ("bmp", overwrite(28, struct.pack("<H", 7))(bmp)),
        "bmp whose pixels are past its end": ("bmp", overwrite(10, struct.pack("<I", 10**9))(bmp)),
        "tif whose directory is itself": ("tif", overwrite(4, struct.pack("<I", 4))(tif)),
        "tif whose directory is past its end": ("tif", overwrite(4, struct.pack("<I", 2**32 - 2))(tif)),
        "tif of 2 billion pixels a side": ("tif", _tiff_tag(256, 2**31 - 1)),
        "tif of an unknown compression": ("tif", _tiff_tag(259, 9999)),
        "tif whose pixels are past its end": ("tif", _tiff_tag(273, 2**31)),
        "tif of 65,535 samples a pixel": ("tif", _tiff_tag(277, 65_535)),
        "webp of a wrong size": ("webp", overwrite(4, struct.pack("<I", 12))(webp)),
        "webp without its magic": ("webp", overwrite(8, b"WAVE")(webp)),
        "ppm of 10^9 pixels a side": ("ppm", replace(b"24 24", b"999999999 999999999")(ppm)),
        "ppm of a number of 5,000 digits": ("ppm", replace(b"24 24", b"9" * 5000 + b" 24")(ppm)),
        "ppm of a negative side": ("ppm", replace(b"24 24", b"-24 24")(ppm)),
        "ppm of values up to 0": ("ppm", replace(b"255", b"0")(ppm)),
        "ppm of values up to 99,999": ("ppm", replace(b"255", b"99999")(ppm)),
        "eps, which is a program": ("png", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\nshowpage\n"),
        "svg": ("png", b'<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"/>'),
        "32-bit float": ("tif", _saved(Image.new("F", (24, 24), 0.5), "TIFF")),
        "200 times as wide as high": ("png", _saved(Image.new("RGB", (2010, 10)), "PNG")),
    }
    for name, (ending, data) in found.items():
        yield bad_item("image", name, ending, data)


def _saved(image: Image.Image, kind: str, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def _unusual() -> Iterator[Case]:
    """What looks odd and can be used, or is damaged where no format can notice it: nothing is left out."""
    exif = Image.Exif()
    exif[0x0112] = 99
    grey = Image.fromarray(np.arange(24 * 24, dtype=np.uint16).reshape(24, 24) * 100)
    frames = [picture(), picture().rotate(90)]
    bmp, ppm = whole("bmp"), whole("ppm")
    found = {
        "png with the ending jpg": ("jpg", whole("png")),
        "png with bytes behind its end": ("png", whole("png") + b"more" * 9),
        "one pixel": ("png", _saved(Image.new("RGB", (1, 1)), "PNG")),
        "transparent": ("png", _saved(picture().convert("RGBA"), "PNG")),
        "palette": ("png", _saved(picture().convert("P"), "PNG")),
        "one bit": ("png", _saved(picture().convert("1"), "PNG")),
        "16-bit grey": ("png", _saved(grey, "PNG")),
        "CMYK": ("jpg", _saved(picture().convert("CMYK"), "JPEG")),
        "progressive": ("jpg", _saved(picture(), "JPEG", progressive=True)),
        "an orientation that is none": ("jpg", _saved(picture(), "JPEG", exif=exif)),
        "several frames": ("gif", _saved(frames[0], "GIF", save_all=True, append_images=frames[1:])),
        "6,000 x 6,000 pixels": ("png", _saved(Image.new("RGB", (6_000, 6_000)), "PNG")),
        "a flipped pixel in bmp": ("bmp", overwrite(-40, bytes([bmp[-40] ^ 8]))(bmp)),
        "a flipped pixel in ppm": ("ppm", overwrite(-40, bytes([ppm[-40] ^ 8]))(ppm)),
        "bmp from top to bottom": ("bmp", overwrite(22, struct.pack("<i", -24))(bmp)),
        "png whose pixels claim 4 GB": ("png", overwrite(33, b"\xff\xff\xff\xff")(_png(24, 24))),
        "gif whose screen has no pixels": ("gif", overwrite(6, b"\0\0\0\0")(whole("gif"))),
        "ppm with a comment": ("ppm", replace(b"P6\n", b"P6\n# a comment\n")(ppm)),
    }
    for name, (ending, data) in found.items():
        yield good_item("image", name, ending, data)
    # Their decoders only warn, which Pillow does not pass on: rows that are missing are black or grey.
    odd = {
        "png with fewer rows than it says": ("png", _png(24, 24, bytes(73 * 10))),
        "jpg of twice the height": ("jpg", _jpeg_sized(24, 48)),
    }
    for name, (ending, data) in odd.items():
        yield odd_item("image", name, ending, data)
