"""The headers of videos, and their frames, by PyAV: how many there are is known before any of them is decoded.

Counts, rates and sizes are those of the container's header. A container that does not count frames (Matroska, WebM,
MPEG) has its packets counted while a manifest is indexed, without decoding them; the index keeps the number.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from types import ModuleType
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from motet.core.arrays import Float64Array, Int64Array
from motet.core.errors import UserError
from motet.core.modalities import IMAGE, VIDEO
from motet.core.words import counted_words
from motet.data.media import OF_SEVERAL, MediaRef, Unusable

if TYPE_CHECKING:
    from PIL import Image

_FORMATS = "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,mpegts,mpeg,mpegvideo,ogg,flv,asf"
"""Containers by the contents of a file, whatever its name: none that names other files (playlists)."""
MAX_SIDE = 2**16 - 1
_MAX_PIXELS = 7680 * 4320
"""The most pixels of a frame: 8K."""
MAX_FRAMES = 2**31 - 1
RATES = (Fraction(1, 100), 1000)
"""The bounds of frames a second. Below there is no motion; above, no screen shows them."""
_SIDE_BITS, _COUNT_BITS = 16, 32


@dataclass(frozen=True)
class VideoHeader:
    """What a container says of its first video.

    num_frames: at least 1. width, height: pixels, as frames are stored. rate: frames a second, in the mean.

    Example:
        >>> header = VideoHeader(250, 640, 480, Fraction(25))
        >>> VideoHeader.of(header.raw) == header
        True
    """

    num_frames: int
    width: int
    height: int
    rate: Fraction

    @property
    def raw(self) -> tuple[int, int]:
        """The header as an index keeps it. Images have less than 2^32 as the first number (`is_video`)."""
        size = self.width << _SIDE_BITS | self.height
        return self.num_frames << _COUNT_BITS | size, self.rate.numerator << _COUNT_BITS | self.rate.denominator

    @classmethod
    def of(cls, raw: tuple[int, int]) -> VideoHeader:
        """From what an index keeps."""
        ((num_frames, width, height),) = video_shapes(np.array([raw])).tolist()
        return cls(num_frames, width, height, cls.rate_of(raw[1]))

    @staticmethod
    def rate_of(raw: int) -> Fraction:
        """The rate from the second number that an index keeps."""
        return Fraction(raw >> _COUNT_BITS, raw & (1 << _COUNT_BITS) - 1)


def is_video(raw: Int64Array) -> Any:
    """Which of images and videos are videos, bool [n]. raw: int64 [n, 2]."""
    return raw[:, 0] >= 1 << _COUNT_BITS


def video_shapes(raw: Int64Array) -> Int64Array:
    """Frames, width and height of each video, int64 [n, 3]. raw: int64 [n, 2]."""
    size = raw[:, 0] & (1 << _COUNT_BITS) - 1
    return np.stack([raw[:, 0] >> _COUNT_BITS, size >> _SIDE_BITS, size & MAX_SIDE], axis=1)


def video_rates(raw: Int64Array) -> Float64Array:
    """Frames a second of each video, float64 [n]. raw: int64 [n, 2]."""
    rates: Float64Array = (raw[:, 1] >> _COUNT_BITS) / (raw[:, 1] & (1 << _COUNT_BITS) - 1)
    return rates


def video_seconds(raw: Int64Array) -> Float64Array:
    """How long each video is, float64 [n]: its frames by their rate, rounded once. raw: int64 [n, 2]."""
    frames, numerators = video_shapes(raw)[:, 0].astype(np.float64), raw[:, 1] >> _COUNT_BITS
    seconds: Float64Array = frames * (raw[:, 1] & (1 << _COUNT_BITS) - 1) / numerators
    return seconds


def amount_of(ref: MediaRef) -> int:
    """The pixels of an image or of all frames of a video, the samples of a clip, or the rows of an own item.

    By its header; 0: not known yet.
    """
    if ref.raw is None:
        return 0
    if ref.modality == VIDEO:
        header = VideoHeader.of(ref.raw)
        return header.num_frames * header.width * header.height
    return ref.raw[0] * (ref.raw[1] % OF_SEVERAL) if ref.modality == IMAGE else ref.raw[0]


def read_video_header(ref: MediaRef) -> tuple[int, int]:
    """`VideoHeader.raw` of a file, or of listed frames. Raises Unusable, and UserError without PyAV."""
    if ref.is_held_list:
        from motet.data.listed_frames import read_listed_header

        return read_listed_header(ref)
    with open_video(ref) as (_, _, header):
        return header.raw


@contextmanager
def open_video(ref: MediaRef) -> Iterator[tuple[Any, Any, VideoHeader]]:
    """A container at its begin, its first video stream, and the header, which passed the checks.

    Raises Unusable, and UserError without PyAV.
    """
    with open_container(ref) as (_, container):
        if not container.streams.video:
            raise Unusable("holds no video")
        stream = container.streams.video[0]
        # One worker decodes one video; other cores have others.
        stream.codec_context.thread_count = 1
        header = _checked_header(container, stream, None if ref.raw is None else VideoHeader.of(ref.raw))
        yield container, stream, header


@contextmanager
def open_container(ref: MediaRef) -> Iterator[tuple[ModuleType, Any]]:
    """PyAV, and a container at its begin. Raises Unusable, and UserError without PyAV."""
    av = _pyav()
    with ref.open() as file, _opened(av, file) as container:
        yield av, container


def frames_at(ref: MediaRef, numbers: Int64Array) -> Iterator[Image.Image]:
    """The given frames in RGB, one after the other. numbers: ascending, at least one. O(frames up to the last one).

    Raises Unusable for a file that is damaged or cut off before the last of them, or whose frames are to be turned.
    """
    if ref.is_held_list:
        from motet.data.listed_frames import listed_frames_at

        yield from listed_frames_at(ref, numbers)
        return
    from PIL import Image

    av, wanted = _pyav(), iter(numbers.tolist())
    with open_video(ref) as (container, stream, header):
        next_one: int | None = next(wanted)
        decoded = 0
        try:
            for frame in container.decode(stream):
                decoded += 1
                if decoded - 1 != next_one:
                    continue
                _check_frame(frame, decoded, header)
                yield Image.fromarray(frame.to_ndarray(format="rgb24"))
                if (next_one := next(wanted, None)) is None:
                    return
        except av.error.FFmpegError as error:
            raise Unusable(f"is damaged: frame {decoded + 1:,} cannot be decoded ({error.strerror})") from None
    raise Unusable(f"is cut off or damaged: it holds {decoded:,} of {header.num_frames:,} frames")


def _pyav() -> ModuleType:
    try:
        import av
    except ImportError:
        raise UserError("Videos are read by PyAV, which is not installed: pip install 'motet[video]'.") from None
    return av


@contextmanager
def _opened(av: ModuleType, file: IO[bytes]) -> Iterator[Any]:
    try:
        container = av.open(file, options={"format_whitelist": _FORMATS})
    except av.error.FFmpegError as error:
        raise Unusable(
            f"is no video in a container that Motet reads (MP4, MOV, MKV, WebM, AVI, MPEG), or its header is damaged "
            f"({error.strerror})"
        ) from None
    with container:
        yield container


def _checked_header(container: Any, stream: Any, indexed: VideoHeader | None) -> VideoHeader:
    width, height, rate = stream.codec_context.width, stream.codec_context.height, stream.average_rate
    if min(width, height) < 1:
        raise Unusable("does not say how large its frames are")
    if max(width, height) > MAX_SIDE or width * height > _MAX_PIXELS:
        raise Unusable(f"has frames of {width:,} x {height:,} pixels, more than {_MAX_PIXELS:,} in all; scale it down")
    if rate is None or not RATES[0] <= rate <= RATES[1]:
        raise Unusable(f"has {rate or 'no'} frames a second by its header, not from {RATES[0]} to {RATES[1]}")
    if indexed is not None and (indexed.width, indexed.height, indexed.rate) == (width, height, rate):
        counted = stream.frames or indexed.num_frames
    else:
        counted = stream.frames or _num_packets(container, stream)
    if not 1 <= counted <= MAX_FRAMES:
        raise Unusable("is empty: no frames" if counted < 1 else f"has {counted:,} frames by its header")
    header = VideoHeader(counted, width, height, Fraction(rate))
    if indexed is not None and header != indexed:
        raise Unusable(
            f"has {words_of_header(header)}, but its header at indexing promised {words_of_header(indexed)}; put the "
            "former file back, or delete the index"
        )
    return header


def words_of_header(header: VideoHeader) -> str:
    """The header in a few words."""
    return (
        f"{counted_words(header.num_frames, 'frame')} of {header.width:,} x {header.height:,} pixels, {header.rate} a "
        "second"
    )


def _num_packets(container: Any, stream: Any) -> int:
    """The packets of a video, which are read and not decoded; a frame is one. The last one that is given is empty."""
    count = sum(packet.size > 0 for packet in container.demux(stream))
    container.seek(0)
    return count


def _check_frame(frame: Any, number: int, header: VideoHeader) -> None:
    if (frame.width, frame.height) != (header.width, header.height):
        raise Unusable(f"changes its size: frame {number:,} has {frame.width} x {frame.height} pixels")
    if frame.is_corrupt:
        raise Unusable(f"is damaged: frame {number:,} cannot be decoded whole")
    if frame.rotation:
        raise Unusable(
            f"is to be turned by {frame.rotation} degrees by its header, which models' readers ignore; have its frames "
            "themselves turned (ffmpeg -i IN OUT)"
        )
