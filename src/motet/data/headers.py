"""The headers of images, clips and videos: sizes, and whether files can be used, before memory is allocated.

Pillow reads width and height, soundfile samples and sampling rate, and PyAV what `data/videos.py` says; nothing is
decoded. An index is built from
`read_header`. Transforms open files through the same checks, so that a file that changed since is refused in the same
words.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING

from motet.core.modalities import VIDEO, find_own
from motet.data.clip_bounds import check_clip
from motet.data.media import IMAGE, MediaRef, Unusable, check_unchanged, raise_bad_media
from motet.data.mp3 import count_samples
from motet.data.own_items import read_own_header
from motet.data.video_sound import read_sound_header
from motet.data.videos import read_video_header

if TYPE_CHECKING:
    from PIL import Image
    from soundfile import SoundFile

MAX_PIXELS = (1 << 30) // 12
"""The most pixels of an image: 89 million, 256 MiB as RGB. From here Pillow warns of a decompression bomb."""
MAX_ASPECT = 200
"""The largest ratio of an image's longer side to its shorter one, as in Qwen2-VL's `smart_resize`."""

# Formats by the contents of a file, whatever its name: none that runs another program (EPS), none without a length.
_IMAGE_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "DIB", "TIFF", "PPM", "AVIF")
_CLIP_FORMATS = ("WAV", "WAVEX", "RF64", "AIFF", "FLAC", "OGG", "MP3", "MPEG")
_EXIF_ORIENTATION = 0x0112
# Orientations 5 to 8 of EXIF turn the picture by a quarter: the stored width becomes the height.
_QUARTER_TURNS = frozenset((5, 6, 7, 8))
# The byte order of the size in bytes 4 to 7 of a file; it counts all bytes after them.
_CHUNKED = {b"RIFF": "<I", b"RIFX": ">I", b"FORM": ">I"}
_UNKNOWN_CHUNK_BYTES = 0x7FFFF000
_MAX_OGG_PAGE_BYTES = 27 + 255 + 255 * 255
_OGG_LAST_PAGE = 4


def read_header(ref: MediaRef) -> tuple[int, int]:
    """(width, height) of an image after its EXIF turn, (samples, sampling rate) of a clip, (rows, 0) of an own item;
    `VideoHeader.raw` of a video. The sound of a video is a clip.

    Raises BadMedia.
    """
    with raise_bad_media(ref):
        if own := find_own(ref.modality):
            return read_own_header(own, ref)
        if ref.modality == VIDEO:
            return read_video_header(ref)
        if ref.is_sound_of_video:
            return read_sound_header(ref)
        if ref.modality == IMAGE:
            with open_image(ref) as image:
                return turned_size(image)
        with open_clip(ref) as (clip, num_samples):
            return num_samples, clip.samplerate


@contextmanager
def open_image(ref: MediaRef) -> Iterator[Image.Image]:
    """An image that passed the checks, not decoded yet. Raises Unusable, and Pillow's exceptions."""
    from PIL import Image

    with ref.open() as file:
        try:
            image = Image.open(file, formats=_IMAGE_FORMATS)
        except Image.DecompressionBombError:
            raise Unusable(f"has more than {MAX_PIXELS:,} pixels; scale it down") from None
        with image:
            _check_image(image)
            check_unchanged(ref, turned_size(image), "{:,} x {:,} pixels")
            yield image


@contextmanager
def open_clip(ref: MediaRef) -> Iterator[tuple[SoundFile, int]]:
    """A clip that passed the checks, at its first sample, and its length. Raises Unusable, and soundfile's errors."""
    import soundfile

    with ref.open() as file:
        _check_whole(file)
        with soundfile.SoundFile(file) as clip:
            _check_format(clip)
            num_samples = _num_samples(clip, ref)
            check_unchanged(ref, (num_samples, clip.samplerate), "{:,} samples at {:,} Hz")
            yield clip, num_samples


def orientation(image: Image.Image) -> int:
    """The EXIF orientation, 1 to 8, of formats with it in their header. (Pillow turns a TIFF when it decodes it.)"""
    # Pillow would decode a whole PNG in search of EXIF behind the pixels.
    if image.format in ("JPEG", "MPO", "WEBP", "AVIF") or (image.format == "PNG" and "exif" in image.info):
        return int(image.getexif().get(_EXIF_ORIENTATION, 1))
    return 1


def turned_size(image: Image.Image) -> tuple[int, int]:
    """(width, height) of an image after its EXIF turn."""
    width, height = image.size
    return (height, width) if orientation(image) in _QUARTER_TURNS else (width, height)


def _check_image(image: Image.Image) -> None:
    width, height = image.size
    if min(width, height) < 1:
        raise Unusable("is empty: no pixels")
    if width * height > MAX_PIXELS:
        raise Unusable(f"has {width:,} x {height:,} pixels, more than {MAX_PIXELS:,} in all; scale it down")
    if max(width, height) > MAX_ASPECT * min(width, height):
        raise Unusable(f"has {width:,} x {height:,} pixels, one side more than {MAX_ASPECT} times the other; crop it")
    # Of the formats with 32 bits, Pillow scales only PGM to a known range.
    if image.mode == "F" or (image.mode == "I" and image.format != "PPM"):
        raise Unusable("holds 32-bit values, of which nobody knows what is white; save it with 8 or 16 bits")


def _check_format(clip: SoundFile) -> None:
    if clip.format not in _CLIP_FORMATS:
        raise Unusable(f"is {clip.format_info} inside; save it as WAV, FLAC, OGG or MP3")
    check_clip(clip.frames, clip.samplerate, clip.channels)


def _num_samples(clip: SoundFile, ref: MediaRef) -> int:
    if clip.format not in ("MP3", "MPEG"):
        return int(clip.frames)
    with ref.open() as file:
        counted = count_samples(file)
    if counted is None:
        return int(clip.frames)
    if counted > clip.frames:
        raise Unusable(
            f"holds {counted:,} samples, of which soundfile would read {clip.frames:,}, as this MP3 has no header with "
            "its length; convert it to WAV or FLAC"
        )
    return counted


def _check_whole(file: IO[bytes]) -> None:
    """Raise Unusable for a clip that is cut off: soundfile would silently read the rest."""
    head = file.read(28).ljust(28, b"\0")
    actual = file.seek(0, os.SEEK_END)
    magic, num_bytes = head[:4], 0
    if magic in _CHUNKED:
        (num_bytes,) = struct.unpack(_CHUNKED[magic], head[4:8])
        # Programs that write to a pipe do not know the size: they write 0 or the largest number.
        num_bytes = num_bytes if num_bytes < _UNKNOWN_CHUNK_BYTES else 0
    elif magic == b"RF64" and head[12:16] == b"ds64":
        (num_bytes,) = struct.unpack("<Q", head[20:28])
    elif magic == b"OggS" and not _ends_in_last_page(file, actual):
        raise Unusable("is cut off: it does not end in the last page of its stream")
    # Files often lack the padding of an odd last byte.
    if num_bytes and num_bytes + 8 > actual + 1:
        raise Unusable(f"is cut off: it has {actual:,} of {num_bytes + 8:,} bytes")
    file.seek(0)


def _ends_in_last_page(file: IO[bytes], num_bytes: int) -> bool:
    """Whether the last page of an Ogg file is whole, and marked as the last one (RFC 3533, section 6)."""
    file.seek(max(num_bytes - _MAX_OGG_PAGE_BYTES, 0))
    tail = file.read(_MAX_OGG_PAGE_BYTES)
    page = tail[max(tail.rfind(b"OggS"), 0) :]
    if len(page) < 27 or len(page) < 27 + page[26]:
        return False
    size = 27 + page[26] + sum(page[27 : 27 + page[26]])
    return len(page) >= size and bool(page[5] & _OGG_LAST_PAGE)
