"""MP3 files without a header that tells their length are read whole, or refused."""

import io

import numpy as np
import pytest
import soundfile

from motet.data.audio import AudioTransform
from motet.data.headers import read_header
from motet.data.media import BadMedia, MediaRef, Unusable
from motet.data.mp3 import count_samples
from motet.data.transforms import load_media


def mp3(rate: int, channels: int, mode: str, *, header: bool = False) -> bytes:
    """Two seconds of noise that comes and goes; without its first frame, which is the header, unless `header`."""
    samples = 0.1 * np.random.default_rng(0).standard_normal((2 * rate, channels))
    samples[: rate // 2] *= 0.01
    file = io.BytesIO()
    options = {"format": "MP3", "subtype": "MPEG_LAYER_III", "bitrate_mode": mode, "compression_level": 0.5}
    with soundfile.SoundFile(file, "w", rate, channels, **options) as clip:
        clip.write(samples)
    data = file.getvalue()
    return data if header else data[data.index(data[:2], 4) :]


@pytest.mark.parametrize("rate", [8000, 11_025, 16_000, 24_000, 44_100, 48_000])
@pytest.mark.parametrize("channels", [1, 2])
def test_a_constant_bit_rate_is_counted_and_read_whole(tmp_path, rate, channels):
    data = mp3(rate, channels, "CONSTANT")
    tags = b"ID3\3\0\0\0\0\x08\0" + bytes(1024), b"TAG" + bytes(125)
    lengths = set()
    for variant in (data, tags[0] + data + tags[1]):
        (tmp_path / "a.mp3").write_bytes(variant)
        ref = MediaRef("audio", str(tmp_path / "a.mp3"))
        raw = read_header(ref)
        with soundfile.SoundFile(tmp_path / "a.mp3") as clip:
            assert raw == (len(clip.read(always_2d=True)), rate)
        load_media(MediaRef("audio", str(tmp_path / "a.mp3"), raw=raw), AudioTransform(num_mels=8))
        lengths.add(raw)
    assert len(lengths) == 1
    assert 2 * rate <= lengths.pop()[0] <= 2 * rate + 3 * 1152


def test_a_bit_rate_that_varies_without_a_header_is_not_read_for_its_first_part(tmp_path):
    data = mp3(44_100, 1, "VARIABLE")
    assert 88_200 <= count_samples(io.BytesIO(data)) <= 88_200 + 3 * 1152
    (tmp_path / "a.mp3").write_bytes(data)
    with pytest.raises(BadMedia, match=r"samples, of which soundfile would read .* convert it to WAV or FLAC"):
        read_header(MediaRef("audio", str(tmp_path / "a.mp3")))


@pytest.mark.parametrize("mode", ["CONSTANT", "VARIABLE"])
@pytest.mark.parametrize("channels", [1, 2])
def test_a_header_is_believed(tmp_path, mode, channels):
    data = mp3(16_000, channels, mode, header=True)
    assert count_samples(io.BytesIO(data)) is None
    (tmp_path / "a.mp3").write_bytes(data)
    assert read_header(MediaRef("audio", str(tmp_path / "a.mp3"))) == (32_000, 16_000)


def test_a_last_frame_that_was_cut_off_is_not_counted():
    data = mp3(16_000, 1, "CONSTANT")
    assert count_samples(io.BytesIO(data[:-1])) == count_samples(io.BytesIO(data)) - 576


@pytest.mark.parametrize("place", [0, 1000])
def test_what_is_no_frame_is_not_passed_over(place):
    data = mp3(16_000, 1, "CONSTANT")
    with pytest.raises(Unusable, match=r"is no MP3 from byte [\d,]+ on, or damaged there"):
        count_samples(io.BytesIO(data[:place] + b"junk" + data[place:]))
