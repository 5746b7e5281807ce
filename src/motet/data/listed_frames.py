"""Videos whose frames are image files of their own: a record lists them in place of one file.

They are taken as transformers takes frames that have been decoded, with the frames a second that the record says as
their `VideoMetadata`: a processor that samples takes some of them, another one all. What a record lists is held by the
index, like bytes that a record holds.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from motet.core.arrays import Int64Array
from motet.core.errors import UserError
from motet.core.modalities import IMAGE, VIDEO
from motet.data.headers import open_image, turned_size
from motet.data.images import eight_bit, upright
from motet.data.media import MediaRef, Unusable, failure_reason
from motet.data.media_names import FrameNames
from motet.data.remote import is_url, located
from motet.data.videos import MAX_FRAMES, MAX_SIDE, VideoHeader, words_of_header

if TYPE_CHECKING:
    from pathlib import Path

    from PIL import Image

_MOST_DENOMINATOR = 1001
"""Of frames a second: that of the rates of television."""
_ANIMATIONS = ("GIF", "WEBP", "PNG", "AVIF")
"""Formats whose files may be animations. Several pictures of others are sizes or views of one."""


def held_frames(folder: Path | str, names: FrameNames, held_name: str, where: str) -> MediaRef:
    """The item of listed frames. folder: paths are relative to it. Raises UserError naming `where` for remote ones."""
    if remote := next((path for path in (located(folder, name) for name in names.frames) if is_url(path)), ""):
        raise UserError(
            f"{where} lists frames, and '{remote[:60]}' is a URL; frames are read from a disk: save them there, or "
            "name a video"
        )
    held = json.dumps({"frames": names.frames, "fps": names.fps})
    return MediaRef(VIDEO, "", held_name, data=held.encode(), folder=str(folder))


def read_listed_header(ref: MediaRef) -> tuple[int, int]:
    """`VideoHeader.raw` of listed frames: their number, and the size of the first one. Raises Unusable."""
    return _header(*_listed(ref)).raw


def listed_frames_at(ref: MediaRef, numbers: Int64Array) -> Iterator[Image.Image]:
    """The given frames in RGB, as transformers loads images. numbers: ascending.

    Raises Unusable for a frame that cannot be read or has another size than the first one.
    """
    paths, fps = _listed(ref)
    header = _header(paths, fps)
    if ref.raw is not None and header.raw != ref.raw:
        raise Unusable(
            f"has {words_of_header(header)}, but promised {words_of_header(VideoHeader.of(ref.raw))} at indexing; put "
            "the former files back, or delete the index"
        )
    for number in numbers.tolist():
        with _open_frame(number, paths[number]) as image:
            frame = eight_bit(upright(image)).convert("RGB")
        if frame.size != (header.width, header.height):
            width, height = frame.size
            raise Unusable(
                f"has frames of several sizes: the first has {header.width:,} x {header.height:,} pixels, and "
                f"{paths[number]} {width:,} x {height:,}"
            )
        yield frame


def frames_in(ref: MediaRef) -> list[MediaRef]:
    """The listed frames, each an image. Raises OSError where the list itself cannot be read."""
    return [MediaRef(IMAGE, path) for path in _listed(ref)[0]]


def _listed(ref: MediaRef) -> tuple[Sequence[str], float]:
    """The paths of frames, and the frames a second."""
    with ref.open() as file:
        held: dict[str, Any] = json.loads(file.read())
    return [os.path.join(ref.folder, name) for name in held["frames"]], held["fps"]


@contextmanager
def _open_frame(number: int, path: str) -> Iterator[Image.Image]:
    """As `open_image`. Raises Unusable, which names the frame, for what goes wrong with it, and for an animation, which
    a list of videos may name, and of which no frame is. MemoryError is no fault of the file.
    """
    try:
        with open_image(MediaRef(IMAGE, path)) as image:
            if image.format in _ANIMATIONS and getattr(image, "is_animated", False):
                raise Unusable("is an animation, and a list of images is the frames of one video; save it as a video")
            yield image
    except MemoryError:
        raise
    except Exception as error:
        raise Unusable(f"its frame {number + 1:,}, {path}, cannot be used: {failure_reason(error)}") from error


def _header(paths: Sequence[str], fps: float) -> VideoHeader:
    with _open_frame(0, paths[0]) as image:
        width, height = turned_size(image)
    if len(paths) > MAX_FRAMES or max(width, height) > MAX_SIDE:
        raise Unusable(f"has {len(paths):,} frames of {width:,} x {height:,} pixels; scale it down")
    return VideoHeader(len(paths), width, height, Fraction(fps).limit_denominator(_MOST_DENOMINATOR))
