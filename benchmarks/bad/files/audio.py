"""Bad clips in a small training job: one among good ones, be it allowed or not."""

from __future__ import annotations

import io
import math
import struct
from collections.abc import Iterator
from functools import cache

import numpy as np
import soundfile

from bad.files.base import tone
from bad.files.damage import overwrite
from bad.files.media import bad_item, damaged_items, good_item
from bad.run import Case

FORMATS = {
    "int16.wav": ("WAV", "PCM_16"),
    "int24.wav": ("WAV", "PCM_24"),
    "uint8.wav": ("WAV", "PCM_U8"),
    "float.wav": ("WAV", "FLOAT"),
    "double.wav": ("WAV", "DOUBLE"),
    "ulaw.wav": ("WAV", "ULAW"),
    "flac": ("FLAC", "PCM_16"),
    "ogg": ("OGG", "VORBIS"),
    "opus": ("OGG", "OPUS"),
    "mp3": ("MP3", "MPEG_LAYER_III"),
    "aiff.wav": ("AIFF", "PCM_16"),
    "rf64.wav": ("RF64", "PCM_16"),
}
"""By ending of the file, the format inside."""
_CUTS = {"a twentieth": 0.05, "a half": 0.5, "nine tenths": 0.9}
"""What is left of a file, in words and as a share."""


@cache
def whole(ending: str) -> bytes:
    """A tone in a format."""
    file = io.BytesIO()
    kind, subtype = FORMATS[ending]
    soundfile.write(file, tone(8_000), 16_000, subtype, format=kind)
    return file.getvalue()


def audio_cases(seed: int) -> Iterator[Case]:
    """Each format under each damage, header fields that are absurd, and samples that are no numbers."""
    for ending in FORMATS:
        # The first part of an MP3 is an MP3, where it has a whole frame.
        cuts = {"a twentieth": _CUTS["a twentieth"]} if ending == "mp3" else _CUTS
        yield from damaged_items("audio", ending, whole(ending), seed, cuts=cuts, num_flips=3, header_bytes=44)
        yield bad_item("audio", f"{ending} empty, none allowed", ending, b"", allowed=False)
    yield from _headers()
    yield from _samples()
    yield from _unusual()


def _wav(
    samples: np.ndarray | None = None,
    *,
    kind: int = 1,
    channels: int = 1,
    rate: int = 16_000,
    align: int | None = None,
    bits: int = 16,
    data_bytes: int | None = None,
    riff_bytes: int | None = None,
) -> bytes:
    """A WAV file that says what it is told to. kind: 1 integers, 3 floats."""
    data = (np.round(32_000 * tone()).astype("<i2") if samples is None else samples).tobytes()
    align = channels * bits // 8 if align is None else align
    head = struct.pack("<HHIIHH", kind, channels, rate, min(rate * max(align, 0), 2**32 - 1), align & 0xFFFF, bits)
    size = len(data) if data_bytes is None else data_bytes
    body = b"WAVEfmt " + struct.pack("<I", 16) + head + b"data" + struct.pack("<I", size) + data
    return b"RIFF" + struct.pack("<I", len(body) if riff_bytes is None else riff_bytes) + body


def _headers() -> Iterator[Case]:
    """Fields of headers that make no sense, where the rest of the file is as it was."""
    flac, ogg, mp3 = whole("flac"), whole("ogg"), whole("mp3")
    found: dict[str, tuple[str, bytes]] = {
        **{f"wav at {rate:,} Hz": ("wav", _wav(rate=rate)) for rate in (0, 1, 999, 768_001, 2**31 - 1, 2**32 - 1)},
        "wav at 700,001 Hz": ("wav", _wav(rate=700_001)),
        **{f"wav of {count:,} channels": ("wav", _wav(channels=count)) for count in (0, 65, 1_025, 65_535)},
        **{f"wav of {bits} bits": ("wav", _wav(bits=bits)) for bits in (0, 65_535)},
        "wav of an unknown coding": ("wav", _wav(kind=0x7777)),
        "wav without samples": ("wav", _wav(np.zeros(0, dtype="<i2"))),
        "wav without its format": ("wav", _wav().replace(b"fmt ", b"xxxx", 1)),
        "wav without its data": ("wav", _wav().replace(b"data", b"xxxx", 1)),
        "wav of its magic alone": ("wav", b"RIFF\x24\0\0\0WAVE"),
        "wav with a chunk of 4 GB": ("wav", _wav().replace(b"fmt \x10\0\0\0", b"fmt \xff\xff\xff\xff", 1)),
        "flac at 0 Hz": ("flac", overwrite(18, b"\0\0\x02")(flac)),
        "flac of 2^36 samples": ("flac", overwrite(21, b"\xff\xff\xff\xff\xff")(flac)),
        "flac of half its samples": ("flac", overwrite(22, struct.pack(">I", 16_000))(flac)),
        "flac without its magic": ("flac", overwrite(0, b"FLAC")(flac)),
        "ogg without its last page": ("ogg", ogg[: ogg.rindex(b"OggS")]),
        "ogg with a page of a wrong checksum": ("ogg", overwrite(ogg.rindex(b"OggS") + 22, b"\0\0\0\0")(ogg)),
        "ogg that ends in the year 300,000": ("ogg", overwrite(ogg.rindex(b"OggS") + 6, b"\xff" * 7 + b"\x7f")(ogg)),
        "mp3 of its tag alone": ("mp3", b"ID3\x04\0\0\x7f\x7f\x7f\x7f"),
        "mp3 with zeros in its middle": ("mp3", overwrite(len(mp3) // 2, bytes(len(mp3) // 4))(mp3)),
        "midi": ("wav", b"MThd\0\0\0\x06\0\x01\0\x01\0\x60MTrk\0\0\0\x04\0\xff\x2f\0"),
        "caf, which is none of those that tell where they end": ("wav", _encoded("CAF", "PCM_16")),
        "au": ("wav", _encoded("AU", "PCM_16")),
        "longer than max_seconds": ("wav", _wav(np.zeros(16_000 * 31, dtype="<i2"))),
    }
    for name, (ending, data) in found.items():
        yield bad_item("audio", name, ending, data)


def _encoded(kind: str, subtype: str) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, tone(), 16_000, subtype, format=kind)
    return file.getvalue()


def _samples() -> Iterator[Case]:
    """Samples that are no numbers that a sound has."""
    for name, value in {"nan": math.nan, "inf": math.inf, "-inf": -math.inf, "3e38": 3e38, "1e30": 1e30}.items():
        for where in (0, 1_600, -1):
            samples = tone().astype("<f4")
            samples[where] = value
            wav = _wav(samples, kind=3, bits=32)
            yield bad_item("audio", f"wav with {name} at {where}", "wav", wav)
            if where == 0:
                yield bad_item("audio", f"wav with {name} at {where}, none allowed", "wav", wav, allowed=False)
        wide = tone().astype("<f8")
        wide[7] = 1e300 if value == 3e38 else value
        yield bad_item("audio", f"wav of doubles with {name}", "wav", _wav(wide, kind=3, bits=64))


def _unusual() -> Iterator[Case]:
    """What looks odd and can be used, or is damaged where no format can notice it: nothing is left out."""
    samples = np.round(32_000 * tone()).astype("<i2")
    flipped = samples.copy()
    flipped[1_000] ^= 1 << 12
    found: dict[str, tuple[str, bytes]] = {
        "a flipped sample": ("wav", _wav(flipped)),
        "silence": ("wav", _wav(np.zeros(3_200, dtype="<i2"))),
        "one sample": ("wav", _wav(samples[:1])),
        "two channels": ("wav", _wav(np.repeat(samples, 2), channels=2)),
        "64 channels": ("wav", _wav(np.repeat(samples, 64), channels=64)),
        # Samples of fewer than 8 bits lie in bytes, so these are what they say.
        **{f"wav of {bits} bits": ("wav", _wav(bits=bits)) for bits in (1, 7)},
        "wav at 2,000 Hz": ("wav", _wav(rate=2_000)),
        "wav at 44,100 Hz": ("wav", _wav(rate=44_100)),
        "wav at 768,000 Hz": ("wav", _wav(rate=768_000)),
        "floats up to 100": ("wav", _wav((100 * tone()).astype("<f4"), kind=3, bits=32)),
        "wav of nearly 2 GB, as some leave where they cannot go back": (
            "wav",
            _wav(data_bytes=2**31 - 100, riff_bytes=2**31 - 64),
        ),
        "wav of a size that a pipe leaves": ("wav", _wav(riff_bytes=2**32 - 1, data_bytes=2**32 - 1)),
        "wav with bytes behind its end": ("wav", _wav() + b"LIST\x04\0\0\0more"),
        "wav with the ending mp3": ("mp3", _wav()),
    }
    for name, (ending, data) in found.items():
        yield good_item("audio", name, ending, data)
