"""A clip to log-mel frames as Whisper makes them, without padding to 30 seconds.

Source: Radford et al., "Robust Speech Recognition via Large-Scale Weak Supervision" (2022), section 2.2, and the
published feature extractor: power spectrum under a Hann window; mel bands on Slaney's scale with Slaney's norm, up to
half the rate; log10; at most 8 below the clip's maximum; (x + 4) / 4. Zeros fill the clip up to a whole hop, so the
number of frames is ceil(samples / hop_length). Samples of a float file may be beyond -1 and 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np

from motet.core.arrays import BoolArray, Float32Array, Float64Array, Int64Array
from motet.core.example import Media
from motet.data.bounds import check_attributes
from motet.data.clip_bounds import MAX_RATE, MAX_SECONDS, MIN_RATE, check_finite
from motet.data.headers import open_clip
from motet.data.media import AUDIO, MediaRef, Unusable
from motet.data.video_sound import read_video_sound

if TYPE_CHECKING:
    from PIL import Image
    from soundfile import SoundFile

_FRAMES_AT_ONCE = 4096
_SAMPLES_AT_ONCE = 1 << 16
_POWER_FLOOR = 1e-10
# Resampling by up / down needs a filter of 20 * max(up, down) taps. max(up, down) is in the hundreds for usual rates,
# and the rate itself for an odd one like 44,101 Hz. 2 million taps are 8 MB, and take half a second once.
_MAX_RESAMPLING = 100_000


@dataclass(frozen=True)
class AudioTransform:
    """A clip's file to log-mel frames. The fields are the options of a recipe; unknown options are refused.

    sampling_rate: Hz; clips are resampled to it (polyphase, scipy), from 1,000 to 768,000. Channels are averaged.
    num_mels:      mel bands, the values of a row, at most 1,024; each must contain a frequency of the window.
    n_fft:         samples of a window, at most 16,384.
    hop_length:    samples between two windows, at most n_fft, so that no sample is left out.
    max_seconds:   the longest clip, from 0.001 to a day.
    longer:        "refuse": an example with a longer clip is left out (counted and reported). "cut": the first
                   max_seconds are used.

    Example:
        >>> transform = AudioTransform(max_seconds=2)
        >>> raw = np.array([[32_000, 16_000], [88_200, 44_100], [48_001, 16_000]])  # samples, sampling rate
        >>> transform.sizes(raw[:2]).tolist(), transform.accepts(raw).tolist()
        ([[200], [200]], [True, True, False])
    """

    sampling_rate: int = 16_000
    num_mels: int = 80
    n_fft: int = 400
    hop_length: int = 160
    max_seconds: float = 30.0
    longer: Literal["refuse", "cut"] = "refuse"

    # pydantic reads this where the class is a field of a recipe; no import of pydantic is needed here.
    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}
    modality: ClassVar[str] = AUDIO

    # A window of 16,384 samples is a second of speech; its filters of 1,024 bands take 32 MB.
    _bounds: ClassVar[dict[str, tuple[float, float]]] = {
        "sampling_rate": (MIN_RATE, MAX_RATE),
        "num_mels": (1, 1024),
        "n_fft": (2, 16_384),
        "hop_length": (1, 16_384),
        "max_seconds": (0.001, MAX_SECONDS),
    }

    def __post_init__(self) -> None:
        check_attributes(self, self._bounds)
        if self.hop_length > self.n_fft:
            raise ValueError(
                f"hop_length must be at most n_fft = {self.n_fft}, not {self.hop_length}, or samples are left out"
            )
        if self.longer not in ("refuse", "cut"):
            raise ValueError(f"longer must be 'refuse' or 'cut', not {self.longer!r}")
        empty = np.flatnonzero(~_mel_filters(self.sampling_rate, self.n_fft, self.num_mels).any(axis=0))
        if len(empty):
            raise ValueError(
                f"num_mels = {self.num_mels} leaves {len(empty)} bands without a frequency of n_fft = {self.n_fft}; "
                "use fewer bands or a longer window"
            )

    @property
    def row_dim(self) -> int:
        """Values of a row: num_mels."""
        return self.num_mels

    def accepts(self, raw: Int64Array) -> BoolArray:
        """Which clips can be used, bool [n], from raw [n, 2] (samples, rate)."""
        samples, rate = raw[:, 0], raw[:, 1]
        short: BoolArray = (samples <= self._max_samples(rate)) | (self.longer == "cut")
        resampling = np.maximum(rate, self.sampling_rate) // np.gcd(rate, self.sampling_rate)
        return short & (resampling <= _MAX_RESAMPLING)

    def refusal(self, raw: tuple[int, int]) -> str:
        """Why a clip is not accepted, as a clause."""
        samples, rate = raw
        if self.longer == "refuse" and samples > self._max_samples(np.array([rate]))[0]:
            return f"lasts {samples / rate:.6g} s, more than max_seconds = {self.max_seconds:g}"
        up, down = self._resampling(rate)
        return (
            f"would be resampled from {rate:,} to {self.sampling_rate:,} Hz by {up:,} / {down:,}, in more than "
            f"{_MAX_RESAMPLING:,} steps; resample it to a common rate"
        )

    def sizes(self, raw: Int64Array) -> Int64Array:
        """Frames of each clip, int64 [n, 1], from raw [n, 2] (samples, rate) alone."""
        samples, rate = np.minimum(raw[:, 0], self._max_samples(raw[:, 1])), raw[:, 1]
        divisor = np.gcd(rate, self.sampling_rate)
        resampled = -(-samples * (self.sampling_rate // divisor) // (rate // divisor))
        frames: Int64Array = np.maximum(-(-resampled // self.hop_length), 1)
        return frames[:, None]

    def load(self, ref: MediaRef) -> Media:
        """Decode and transform one clip. Raises Unusable, and soundfile's exceptions on a damaged file."""
        return self.rows_of(self.decode(ref))

    @property
    def decoding(self) -> float:
        """Transforms of one `decoding` can share what any of them has decoded: as many seconds."""
        return self.max_seconds

    def decode(self, ref: MediaRef) -> tuple[Float32Array, int]:
        """Mono samples [n] of at most max_seconds, and their rate. Raises as `load` does."""
        if ref.is_sound_of_video:
            return read_video_sound(ref, lambda rate: int(self._max_samples(np.array([rate]))[0]))
        with open_clip(ref) as (clip, num_samples):
            max_samples = int(self._max_samples(np.array([clip.samplerate]))[0])
            return _read_mono(clip, min(num_samples, max_samples)), clip.samplerate

    def rows_of(self, decoded: tuple[Float32Array, int]) -> Media:
        """The frames of what `decode` returned."""
        return self(*decoded)

    def picture(self, values: Float32Array, size: Int64Array) -> Image.Image:
        """The spectrogram, low bands below, from its least value (black) to its largest. values: [frames, num_mels].

        size: int64 [1], its frames, as of every transform.
        """
        from PIL import Image

        bands = np.asarray(values, dtype=np.float32).reshape(int(size[0]), self.num_mels).T[::-1]
        span = max(float(np.ptp(bands)), 1e-6)
        return Image.fromarray(np.rint((bands - bands.min()) / span * 255).astype(np.uint8))

    def __call__(self, samples: Float32Array, rate: int) -> Media:
        """Frames [num_frames, num_mels] of mono samples [n], -1 to 1, at `rate` Hz; size (frames,).

        Raises Unusable for a rate that cannot be resampled from.
        """
        samples = samples[: int(self._max_samples(np.array([rate]))[0])]
        if rate != self.sampling_rate:
            # Imported here, because it takes two seconds and 75 MB, and most workers never need it.
            from scipy.signal import resample_poly

            up, down = self._resampling(rate)
            if max(up, down) > _MAX_RESAMPLING:
                raise Unusable(self.refusal((len(samples), rate)))
            samples = resample_poly(samples, up, down, window=_low_pass(max(up, down))).astype(np.float32)
        return self._media_of(samples)

    def _media_of(self, samples: Float32Array) -> Media:
        """The frames of samples at sampling_rate."""
        num_frames = max(-(-len(samples) // self.hop_length), 1)
        values = self._log_mel(np.pad(samples, (0, num_frames * self.hop_length - len(samples))), num_frames)
        return Media(values, np.array([num_frames], dtype=np.int64))

    def _log_mel(self, samples: Float32Array, num_frames: int) -> Float32Array:
        """The first frames of samples, with their mirror image before and behind them, [num_frames, num_mels]."""
        samples = np.pad(samples, self.n_fft // 2, mode="reflect")
        windows = np.lib.stride_tricks.sliding_window_view(samples, self.n_fft)[:: self.hop_length][:num_frames]
        hann, filters = _hann(self.n_fft), _mel_filters(self.sampling_rate, self.n_fft, self.num_mels)
        log_mel = np.empty((num_frames, self.num_mels), dtype=np.float32)
        for start in range(0, num_frames, _FRAMES_AT_ONCE):
            part = slice(start, start + _FRAMES_AT_ONCE)
            spectrum = np.fft.rfft(windows[part] * hann)
            power = spectrum.real**2 + spectrum.imag**2
            log_mel[part] = np.log10(np.maximum(power @ filters, _POWER_FLOOR))
        np.maximum(log_mel, log_mel.max() - 8, out=log_mel)
        log_mel += 4
        log_mel /= 4
        return log_mel

    def _resampling(self, rate: int) -> tuple[int, int]:
        """(up, down) in lowest terms: up / down = sampling_rate / rate."""
        divisor = math.gcd(rate, self.sampling_rate)
        return self.sampling_rate // divisor, rate // divisor

    def _max_samples(self, rate: Int64Array) -> Int64Array:
        samples: Int64Array = np.maximum(np.floor(self.max_seconds * rate), 1).astype(np.int64)
        return samples


def _read_mono(clip: SoundFile, num_samples: int) -> Float32Array:
    """The first samples of a clip, channels averaged, float32 [num_samples]. Raises Unusable.

    It reads blocks, so that no memory is allocated for samples that only the header promises.
    """
    blocks: list[Float32Array] = []
    done = 0
    while done < num_samples:
        block = clip.read(min(num_samples - done, _SAMPLES_AT_ONCE), dtype="float32", always_2d=True).mean(axis=1)
        if not len(block):
            raise Unusable(f"is cut off: it holds {done:,} of {clip.frames:,} samples")
        check_finite(block, done, clip.samplerate)
        blocks.append(block)
        done += len(block)
    return np.concatenate(blocks)


@lru_cache(maxsize=4)
def _low_pass(max_factor: int) -> Float32Array:
    """The default filter of `resample_poly`, float32 [20 * max_factor + 1], designed once for each max_factor."""
    from scipy.signal import firwin

    half = 10 * max_factor
    return firwin(2 * half + 1, 1 / max_factor, window=("kaiser", 5.0)).astype(np.float32)


@lru_cache(maxsize=8)
def _hann(n_fft: int) -> Float32Array:
    return (0.5 - 0.5 * np.cos(2 * np.pi * np.arange(n_fft) / n_fft)).astype(np.float32)


@lru_cache(maxsize=8)
def _mel_filters(sampling_rate: int, n_fft: int, num_mels: int) -> Float32Array:
    """Triangles on Slaney's mel scale, each of area one, float32 [n_fft // 2 + 1, num_mels]."""
    frequencies = np.linspace(0, sampling_rate / 2, n_fft // 2 + 1)
    corners = _hertz(np.linspace(0, _mel(sampling_rate / 2), num_mels + 2))
    width = np.diff(corners)
    rising = (frequencies[:, None] - corners[:-2]) / width[:-1]
    falling = (corners[2:] - frequencies[:, None]) / width[1:]
    triangles = np.maximum(0, np.minimum(rising, falling))
    return (triangles * (2 / (corners[2:] - corners[:-2]))).astype(np.float32)


# Slaney's scale: linear below 1 kHz (a mel is 200/3 Hz), logarithmic above (27 mels to a factor of 6.4).
_LINEAR_HERTZ, _BREAK_HERTZ, _BREAK_MEL, _LOG_STEP = 200 / 3, 1000.0, 15.0, math.log(6.4) / 27


def _mel(hertz: float) -> float:
    return hertz / _LINEAR_HERTZ if hertz < _BREAK_HERTZ else _BREAK_MEL + math.log(hertz / _BREAK_HERTZ) / _LOG_STEP


def _hertz(mel: Float64Array) -> Float64Array:
    return np.where(mel < _BREAK_MEL, mel * _LINEAR_HERTZ, _BREAK_HERTZ * np.exp(_LOG_STEP * (mel - _BREAK_MEL)))
