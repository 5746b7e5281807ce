import math
import tracemalloc

import numpy as np
import pytest
import soundfile
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from motet.data.audio import AudioTransform
from motet.data.headers import read_header
from motet.data.media import BadMedia, MediaRef
from motet.data.transforms import load_media
from unit.data.samples import write_clip


def noise(num_samples: int) -> np.ndarray:
    rng = np.random.default_rng(num_samples)
    return (0.3 * rng.standard_normal(num_samples) * np.sin(np.arange(num_samples) / 7000)).astype(np.float32)


@pytest.mark.parametrize("num_mels", [80, 128])
def test_thirty_seconds_are_as_whisper_makes_them(num_mels):
    transformers = pytest.importorskip("transformers")
    clip = noise(480_000)
    reference = transformers.WhisperFeatureExtractor(feature_size=num_mels)
    expected = reference(clip, sampling_rate=16_000, return_tensors="np").input_features[0].T
    media = AudioTransform(num_mels=num_mels)(clip, 16_000)
    assert media.size.tolist() == [3000]
    np.testing.assert_allclose(media.values, expected, atol=5e-5)


@given(
    num_samples=st.integers(1, 3000),
    rate=st.sampled_from([8000, 11_025, 16_000, 22_050, 44_100, 48_000]),
    hop=st.sampled_from([1, 7, 160]),
    max_seconds=st.sampled_from([0.001, 0.05, 30]),
)
def test_sizes_are_those_of_the_transform(num_samples, rate, hop, max_seconds):
    transform = AudioTransform(num_mels=4, n_fft=256, hop_length=hop, max_seconds=max_seconds, longer="cut")
    media = transform(noise(num_samples), rate)
    sizes = transform.sizes(np.array([[num_samples, rate]]))
    assert media.size.tolist() == sizes[0].tolist()
    assert media.values.shape == (sizes[0, 0], 4)
    assert np.isfinite(media.values).all()


@pytest.mark.parametrize("ending", ["wav", "flac", "ogg", "mp3"])
def test_headers_promise_what_decoding_yields(tmp_path, ending):
    path = write_clip(tmp_path / f"clip.{ending}", 30_001, 22_050)
    raw = read_header(MediaRef("audio", str(path)))
    assert raw == (30_001, 22_050)
    media = load_media(MediaRef("audio", str(path), raw=raw), AudioTransform(num_mels=8))
    resampled = math.ceil(30_001 * 320 / 441)
    assert len(media.values) == math.ceil(resampled / 160)


@pytest.mark.parametrize("ending", ["wav", "flac", "ogg", "mp3"])
def test_a_cut_off_clip_is_bad(tmp_path, ending):
    path = write_clip(tmp_path / f"clip.{ending}", 40_000)
    raw = read_header(MediaRef("audio", str(path)))
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(BadMedia):
        load_media(MediaRef("audio", str(path), raw=raw), AudioTransform(num_mels=8))


def test_a_cut_off_wav_is_bad_by_its_header(tmp_path):
    path = write_clip(tmp_path / "clip.wav", 4000)
    path.write_bytes(path.read_bytes()[:3000])
    with pytest.raises(BadMedia, match="cut off"):
        read_header(MediaRef("audio", str(path)))


@pytest.mark.parametrize("bad_value", [np.nan, np.inf, -np.inf, 1e300])
@pytest.mark.parametrize("num_channels", [1, 2])
def test_samples_that_are_not_finite_make_a_clip_bad(tmp_path, bad_value, num_channels):
    clip = np.tile(noise(16_000)[:, None], num_channels).astype(np.float64)
    clip[8000, -1] = bad_value
    soundfile.write(tmp_path / "a.wav", clip, 16_000, subtype="DOUBLE")
    with pytest.raises(BadMedia, match=r"holds samples that are not finite, the first at 0\.500 s"):
        load_media(MediaRef("audio", str(tmp_path / "a.wav")), AudioTransform(num_mels=8))


@pytest.mark.parametrize("rate", [16_000, 44_100])
def test_samples_that_are_too_large_to_compute_with_make_a_clip_bad(tmp_path, rate):
    soundfile.write(tmp_path / "a.wav", 1e30 * noise(16_000), rate, subtype="FLOAT")
    with pytest.raises(BadMedia, match="becomes values that are not finite"):
        load_media(MediaRef("audio", str(tmp_path / "a.wav")), AudioTransform(num_mels=8))
    soundfile.write(tmp_path / "b.wav", 1e4 * noise(16_000), rate, subtype="FLOAT")
    assert np.isfinite(load_media(MediaRef("audio", str(tmp_path / "b.wav")), AudioTransform(num_mels=8)).values).all()


@pytest.mark.parametrize("rate", [8000, 44_100, 44_101, 96_001])
def test_odd_rates_are_resampled_as_scipy_does(rate):
    from scipy.signal import resample_poly

    clip, divisor = noise(2 * rate), math.gcd(rate, 16_000)
    transform = AudioTransform(num_mels=8)
    resampled = resample_poly(clip, 16_000 // divisor, rate // divisor)
    media = transform(clip, rate)
    np.testing.assert_array_equal(media.values, transform(resampled, 16_000).values)
    assert media.size.tolist() == transform.sizes(np.array([[len(clip), rate]]))[0].tolist() == [200]


def test_a_rate_that_would_take_an_absurd_filter_is_refused():
    transform, raw = AudioTransform(num_mels=8), np.array([[1000, 767_999], [1000, 768_000], [1000, 99_999]])
    assert transform.accepts(raw).tolist() == [False, True, True]
    assert transform.refusal((1000, 767_999)) == (
        "would be resampled from 767,999 to 16,000 Hz by 16,000 / 767,999, in more than 100,000 steps; "
        "resample it to a common rate"
    )
    with pytest.raises(ValueError, match="more than 100,000 steps"):
        transform(noise(1000), 767_999)


def test_a_header_that_promises_more_than_there_is_allocates_no_more_than_there_is(tmp_path):
    path = write_clip(tmp_path / "a.flac", 4000)
    data = bytearray(path.read_bytes())
    # A thousand million samples in STREAMINFO: 36 bits, the last four of byte 21 and the four bytes after it.
    data[22:26] = (10**9).to_bytes(4, "big")
    path.write_bytes(data)
    tracemalloc.start()
    with pytest.raises(BadMedia):
        load_media(MediaRef("audio", str(path)), AudioTransform(num_mels=8, max_seconds=86_400, longer="cut"))
    assert tracemalloc.get_traced_memory()[1] < 50e6
    tracemalloc.stop()


def test_an_empty_clip_is_bad(tmp_path):
    path = write_clip(tmp_path / "clip.wav", 0)
    with pytest.raises(BadMedia, match="no samples"):
        read_header(MediaRef("audio", str(path)))


def test_frames_are_a_spectrogram_with_low_bands_below():
    transform = AudioTransform(num_mels=20)
    times = np.arange(8000) / 16_000
    media = transform(np.sin(2 * np.pi * 300 * times).astype(np.float32), 16_000)
    shown = np.asarray(transform.picture(media.values, media.size))
    assert shown.shape == (20, 50)
    assert (shown.min(), shown.max()) == (0, 255)
    assert shown.mean(axis=1).argmax() == 19 - media.values.mean(axis=0).argmax() > 10
    assert not np.asarray(transform.picture(np.zeros((50, 20)), media.size)).any()  # Silence is no noise.


def test_longer_clips_are_refused_or_cut():
    raw = np.array([[16_000, 16_000], [16_001, 16_000], [8000, 8000], [96_000, 48_000]])
    assert AudioTransform(max_seconds=1).accepts(raw).tolist() == [True, False, True, False]
    cutting = AudioTransform(max_seconds=1, longer="cut")
    assert cutting.accepts(raw).all()
    assert cutting.sizes(raw).tolist() == [[100], [100], [100], [100]]
    assert len(cutting(noise(96_000), 48_000).values) == 100


def test_stereo_is_averaged(tmp_path):
    clip = noise(3200)
    soundfile.write(tmp_path / "mono.wav", clip, 16_000, subtype="FLOAT")
    soundfile.write(tmp_path / "stereo.wav", np.stack([2 * clip, 0 * clip], axis=1), 16_000, subtype="FLOAT")
    mono, stereo = (
        load_media(MediaRef("audio", str(tmp_path / f"{name}.wav")), AudioTransform()) for name in ("mono", "stereo")
    )
    np.testing.assert_allclose(mono.values, stereo.values, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hop_length": 0}, "from 1 to 16,384"),
        ({"max_seconds": 0}, "from 0.001 to 86,400"),
        ({"max_seconds": math.nan}, "max_seconds must be from 0.001 to 86,400, not nan"),
        ({"max_seconds": math.inf}, "from 0.001 to 86,400"),
        ({"n_fft": 2_000_000_000}, "n_fft must be from 2 to 16,384, not 2000000000"),
        ({"hop_length": 100_000_000}, "from 1 to 16,384"),
        ({"hop_length": 401}, "hop_length must be at most n_fft = 400"),
        ({"num_mels": 10**12}, "from 1 to 1,024"),
        ({"num_mels": 160}, "leaves 4 bands without a frequency of n_fft = 400"),
        ({"sampling_rate": 10**12}, "from 1,000 to 768,000"),
        ({"longer": "drop"}, "'refuse' or 'cut'"),
        ({"num_mel": 80}, "Unexpected keyword"),
    ],
)
def test_wrong_options_in_a_recipe(options, message):
    class Recipe(BaseModel):
        audio: AudioTransform

    with pytest.raises(ValidationError, match=message):
        Recipe(audio=options)
