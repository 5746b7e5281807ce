"""A file that is of no use is bad by its header, with a reason, before anything is allocated for it."""

import io
import os
import socket
import struct
import zlib

import numpy as np
import pytest
import soundfile
from PIL import Image

from motet.data.audio import AudioTransform
from motet.data.headers import read_header
from motet.data.images import ImageTransform
from motet.data.media import BadMedia, MediaRef
from motet.data.transforms import load_media
from unit.data.samples import write_clip, write_image


def reason(path, modality: str) -> str:
    with pytest.raises(BadMedia) as bad:
        read_header(MediaRef(modality, str(path)))
    assert bad.value.path == str(path)
    return bad.value.reason


def png_header(width: int, height: int) -> bytes:
    """A PNG that promises so many pixels, and holds none."""
    chunk = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + chunk + struct.pack(">I", zlib.crc32(chunk)) + bytes(4) + b"IDAT"
    )


@pytest.mark.parametrize(
    ("width", "height", "expected"),
    [
        (100_000, 100_000, "has more than 89,478,485 pixels; scale it down"),
        (10_000, 10_000, "has 10,000 x 10,000 pixels, more than 89,478,485 in all; scale it down"),
        (1, 60_000, "has 1 x 60,000 pixels, one side more than 200 times the other; crop it"),
    ],
)
@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_images_of_absurd_size(tmp_path, width, height, expected):
    (tmp_path / "a.png").write_bytes(png_header(width, height))
    assert reason(tmp_path / "a.png", "image") == expected


@pytest.mark.parametrize("dtype", [np.float32, np.int32])
def test_images_without_a_white(tmp_path, dtype):
    Image.fromarray(np.full((4, 4), 7, dtype=dtype)).save(tmp_path / "a.tif")
    assert "nobody knows what is white" in reason(tmp_path / "a.tif", "image")


def test_an_image_that_is_a_program_is_not_run(tmp_path):
    (tmp_path / "a.png").write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n")
    assert "is no image that Pillow knows" in reason(tmp_path / "a.png", "image")


@pytest.mark.parametrize("ending", ["jpg", "png", "webp", "tif"])
def test_what_exif_turns_is_turned_in_every_format(tmp_path, ending):
    exif = Image.Exif()
    exif[0x0112] = 6
    options = {"tiffinfo": {0x0112: 6}} if ending == "tif" else {"exif": exif}
    path = write_image(tmp_path / f"turned.{ending}", 40, 20, **options)
    ref = MediaRef("image", str(path))
    assert read_header(ref) == (20, 40)
    assert load_media(MediaRef("image", str(path), raw=(20, 40)), ImageTransform(10)).size.tolist() == [4, 2]


def wav(rate: int, channels: int = 1, data: bytes = bytes(200)) -> bytes:
    layout = struct.pack("<4sIHHIIHH", b"fmt ", 16, 1, channels, rate, (rate * 2) & 0xFFFFFFFF, 2 * channels, 16)
    body = b"WAVE" + layout + b"data" + struct.pack("<I", len(data)) + data
    return b"RIFF" + struct.pack("<I", len(body)) + body


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (wav(1), "has a sampling rate of 1 Hz, not from 1,000 to 768,000"),
        (wav(2**31 - 1), "has a sampling rate of 2,147,483,647 Hz, not from 1,000 to 768,000"),
        (wav(16_000, 100), "has 100 channels, more than 64"),
        (wav(16_000, data=b""), "is empty: no samples"),
    ],
)
def test_clips_of_absurd_shape(tmp_path, data, expected):
    (tmp_path / "a.wav").write_bytes(data)
    assert reason(tmp_path / "a.wav", "audio") == expected


def test_a_clip_that_promises_a_week(tmp_path):
    path = write_clip(tmp_path / "a.flac", 4000)
    data = bytearray(path.read_bytes())
    # The number of samples in STREAMINFO: 36 bits, the last four of byte 21 and the four bytes after it.
    data[21:26] = bytes([data[21] | 0x0F]) + b"\xff\xff\xff\xff"
    path.write_bytes(data)
    assert reason(path, "audio") == "lasts 4,294,967 s by its header, more than 86,400"


def test_a_clip_of_another_format_than_those_that_tell_their_end(tmp_path):
    soundfile.write(tmp_path / "a.wav", np.zeros(100), 16_000, format="AU")
    assert reason(tmp_path / "a.wav", "audio") == "is AU (Sun/NeXT) inside; save it as WAV, FLAC, OGG or MP3"


@pytest.mark.parametrize("kind", ["WAV", "RF64", "AIFF", "OGG", "FLAC"])
def test_no_cut_through_a_clip_goes_unnoticed(tmp_path, kind):
    whole = io.BytesIO()
    soundfile.write(whole, 0.1 * np.random.default_rng(0).standard_normal(9000), 16_000, format=kind)
    path = tmp_path / "a.wav"
    ref = MediaRef("audio", str(path))
    for end in np.linspace(0, len(whole.getvalue()) - 2, 60).astype(int):
        path.write_bytes(whole.getvalue()[:end])
        with pytest.raises(BadMedia):
            load_media(ref, AudioTransform(num_mels=8))
    path.write_bytes(whole.getvalue())
    assert read_header(ref) == (9000, 16_000)


def test_a_clip_that_was_written_to_a_pipe_is_whole(tmp_path):
    data = bytearray(wav(16_000))
    data[4:8] = b"\xff\xff\xff\xff"
    (tmp_path / "a.wav").write_bytes(data)
    assert read_header(MediaRef("audio", str(tmp_path / "a.wav"))) == (100, 16_000)


@pytest.mark.parametrize("modality", ["image", "audio"])
def test_what_is_no_file_is_not_waited_for(tmp_path, modality):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "pipe")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "socket"))
    assert reason(tmp_path / "pipe", modality) == "is a pipe, not a regular file"
    assert reason(tmp_path / "link", modality) == "is a pipe, not a regular file"
    assert reason(tmp_path / "socket", modality) == "is a socket, not a regular file"
    assert reason(tmp_path, modality) == "is a directory, not a regular file"
    assert reason("/dev/zero", modality) == "is a device, not a regular file"
    assert reason(tmp_path / ("x" * 5000), modality).startswith("cannot be read (OSError")
    assert reason("a\0b", modality).startswith("cannot be read (ValueError")


def test_a_file_that_was_replaced_is_bad_though_it_fits(tmp_path):
    path = write_clip(tmp_path / "a.wav", 1599)
    with pytest.raises(BadMedia, match="has 1,599 samples at 16,000 Hz, but its header at indexing promised 1,600"):
        read_header(MediaRef("audio", str(path), raw=(1600, 16_000)))
