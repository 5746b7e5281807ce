"""Counts the samples of an MP3 frame by frame, if no header has its length.

libsndfile estimates the length from the bit rate of the first frame, and reads no further. If the bit rate varies, up
to two thirds of a clip are silently lost. A Xing (or Info) header in the first frame has the length.
Source: ISO/IEC 11172-3, section 2.4.1.3, and 13818-3 for the lower sampling rates ("2.5" halves these once more).
"""

from __future__ import annotations

import os
from typing import IO, NamedTuple

from motet.data.media import Unusable

# Tables by the version's two bits: 3 is MPEG 1, 2 is MPEG 2, 0 is "2.5".
_KBITS_PER_S = {
    3: (32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320),
    2: (8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160),
    0: (8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160),
}
_HERTZ = {3: (44_100, 48_000, 32_000), 2: (22_050, 24_000, 16_000), 0: (11_025, 12_000, 8_000)}
_SAMPLES = {3: 1152, 2: 576, 0: 576}
_LAYER_3 = 1
_TAGS = (b"TAG", b"APE", b"LYR", b"ID3", b"\0\0\0")


class _Frame(NamedTuple):
    num_bytes: int
    num_samples: int
    side_bytes: int


def count_samples(file: IO[bytes]) -> int | None:
    """The samples of an MP3, counted in one channel; None if a Xing header has them. The file's position changes.

    It reads the whole file if there is no header. Raises Unusable if the frames do not reach the end of the file.
    """
    num_bytes = file.seek(0, os.SEEK_END)
    start = _past_id3(file)
    num_samples = 0
    while start < num_bytes:
        file.seek(start)
        head = file.read(4)
        frame = _parse(head)
        if frame is None:
            if num_samples == 0 or not (len(head) < 4 or head[:3] in _TAGS):
                raise Unusable(f"is no MP3 from byte {start:,} on, or damaged there")
            break
        if num_samples == 0:
            file.seek(frame.side_bytes, os.SEEK_CUR)
            xing = file.read(8)
            # The lowest bit is set if the number of frames follows.
            if xing[:4] in (b"Xing", b"Info") and xing[7:] and xing[7] & 1:
                return None
        start += frame.num_bytes
        # A last frame that is cut off is not played.
        num_samples += frame.num_samples if start <= num_bytes else 0
    return num_samples


def _past_id3(file: IO[bytes]) -> int:
    """The first byte behind ID3v2 tags, whose sizes have four times seven bits: the start of the first frame."""
    start = 0
    while True:
        file.seek(start)
        tag = file.read(10)
        if len(tag) < 10 or tag[:3] != b"ID3":
            return start
        footer = 10 if tag[5] & 0x10 else 0
        start += 10 + footer + (tag[6] << 21 | tag[7] << 14 | tag[8] << 7 | tag[9])


def _parse(head: bytes) -> _Frame | None:
    """A frame from its first four bytes: sync, version, layer, bit rate, sampling rate, padding, channels."""
    if len(head) < 4 or head[0] != 0xFF or head[1] & 0xE0 != 0xE0:
        return None
    version, layer = head[1] >> 3 & 3, head[1] >> 1 & 3
    rate_index, hertz_index, padding = head[2] >> 4, head[2] >> 2 & 3, head[2] >> 1 & 1
    if version not in _HERTZ or layer != _LAYER_3 or rate_index in (0, 15) or hertz_index == 3:
        return None
    num_samples, is_mono = _SAMPLES[version], head[3] >> 6 == 3
    num_bytes = (
        num_samples // 8 * _KBITS_PER_S[version][rate_index - 1] * 1000 // _HERTZ[version][hertz_index] + padding
    )
    side_bytes = {(3, False): 32, (3, True): 17, (2, False): 17, (2, True): 9}[3 if version == 3 else 2, is_mono]
    return _Frame(num_bytes, num_samples, side_bytes)
