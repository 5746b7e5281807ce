"""How many samples an MP3 holds that has no header with its length, counted frame by frame.

libsndfile estimates the length of such a file from the bit rate of its first frame, and reads no further: where the bit
rate varies, two thirds of a clip are lost without a word. A Xing (or Info) header in the first frame gives the number.
Source: ISO/IEC 11172-3, section 2.4.1.3, and 13818-3 for the lower sampling rates ("2.5" halves these once more).
"""

from __future__ import annotations

import os
from typing import IO, NamedTuple

from motet.data.media import Unusable

# By the version's two bits: 3 is MPEG 1, 2 is MPEG 2, 0 is "2.5".
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
    """The samples of an MP3, a channel; None if a Xing header tells them. Leaves the file anywhere.

    Raises Unusable where frames do not follow on each other to the end. Reads the whole file if there is no header.
    """
    num_bytes = file.seek(0, os.SEEK_END)
    at = _past_id3(file)
    num_samples = 0
    while at < num_bytes:
        file.seek(at)
        head = file.read(4)
        frame = _parse(head)
        if frame is None:
            if num_samples == 0 or not (len(head) < 4 or head[:3] in _TAGS):
                raise Unusable(f"is no MP3 from byte {at:,} on, or damaged there")
            break
        if num_samples == 0:
            file.seek(frame.side_bytes, os.SEEK_CUR)
            xing = file.read(8)
            # The lowest bit says that the number of frames follows.
            if xing[:4] in (b"Xing", b"Info") and xing[7:] and xing[7] & 1:
                return None
        at += frame.num_bytes
        # The last frame is not played if it was cut off.
        num_samples += frame.num_samples if at <= num_bytes else 0
    return num_samples


def _past_id3(file: IO[bytes]) -> int:
    """Where the first frame begins: ID3v2 tags, their sizes in four times seven bits, may stand before it."""
    at = 0
    while True:
        file.seek(at)
        tag = file.read(10)
        if len(tag) < 10 or tag[:3] != b"ID3":
            return at
        footer = 10 if tag[5] & 0x10 else 0
        at += 10 + footer + (tag[6] << 21 | tag[7] << 14 | tag[8] << 7 | tag[9])


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
