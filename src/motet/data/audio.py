"""A clip to log-mel frames as Whisper makes them, without padding to 30 seconds.

Source: Radford et al., "Robust Speech Recognition via Large-Scale Weak Supervision" (2022), section 2.2, and the
        published
feature extractor: power spectrum under a Hann window, mel bands on Slaney's scale with Slaney's norm up to half the
rate, log10, at most 8 below the clip's maximum, (x + 4) / 4. The clip is filled with zeros to a whole hop, so that
frames are ceil(samples / hop_length).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from motet.core.example import Media
from motet.data.media import AUDIO, MediaRef

_FRAMES_AT_ONCE = 4096
_POWER_FLOOR = 1e-10


@dataclass(frozen=True)
class AudioTransform:
    """What a clip becomes before its encoder; the options are these fields, unknown ones are refused.

    sampling_rate: Hz that clips are resampled to (polyphase, scipy); channels are averaged.
    num_mels:      mel bands, the row dimension.
    n_fft, hop_length: samples of a window and between two windows.
    max_seconds:   the longest clip.
    longer:        what happens to longer ones: "refuse" leaves their examples out (counted and reported), "cut" keeps
                   the first max_seconds.
    """

    sampling_rate: int = 16_000
    num_mels: int = 80
    n_fft: int = 400
    hop_length: int = 160
    max_seconds: float = 30.0
    longer: Literal["refuse", "cut"] = "refuse"

    # Read by pydantic where this class is a field of a recipe; it needs no import of pydantic here.
    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}
    modality: ClassVar[str] = AUDIO

    def __post_init__(self) -> None:
        if min(self.sampling_rate, self.num_mels, self.hop_length) < 1 or self.n_fft < 2:
            raise ValueError("sampling_rate, num_mels and hop_length must be at least 1, n_fft at least 2")
        if self.max_seconds <= 0:
            raise ValueError(f"max_seconds must be positive, not {self.max_seconds}")
        if self.longer not in ("refuse", "cut"):
            raise ValueError(f"longer must be 'refuse' or 'cut', not {self.longer!r}")

    @property
    def row_dim(self) -> int:
        return self.num_mels

    def accepts(self, raw: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which clips are used, bool [n], for raw [n, 2] (samples, rate)."""
        accepted: NDArray[np.bool_] = raw[:, 0] <= self._max_samples(raw[:, 1])
        return accepted | (self.longer == "cut")

    def sizes(self, raw: NDArray[np.int64]) -> NDArray[np.int64]:
        """Frames of each clip, int64 [n, 1], from raw [n, 2] (samples, rate) alone."""
        samples, rate = np.minimum(raw[:, 0], self._max_samples(raw[:, 1])), raw[:, 1]
        divisor = np.gcd(rate, self.sampling_rate)
        resampled = -(-samples * (self.sampling_rate // divisor) // (rate // divisor))
        frames: NDArray[np.int64] = np.maximum(-(-resampled // self.hop_length), 1)
        return frames[:, None]

    def load(self, ref: MediaRef) -> Media:
        """Decode and transform one clip. Raises whatever soundfile raises on a damaged file."""
        import soundfile

        with ref.open() as file, soundfile.SoundFile(file) as clip:
            at_most = int(self._max_samples(np.array([clip.samplerate]))[0])
            samples = clip.read(min(clip.frames, at_most), dtype="float32", always_2d=True)
            return self(samples.mean(axis=1), clip.samplerate)

    def __call__(self, samples: NDArray[np.float32], rate: int) -> Media:
        """Frames [num_frames, num_mels] of mono samples [n], -1 to 1, at `rate` Hz; size (frames,)."""
        samples = samples[: int(self._max_samples(np.array([rate]))[0])]
        if rate != self.sampling_rate:
            # Imported here: it takes two seconds and 75 MB, which most workers never need.
            from scipy.signal import resample_poly

            divisor = math.gcd(rate, self.sampling_rate)
            samples = resample_poly(samples, self.sampling_rate // divisor, rate // divisor).astype(np.float32)
        values = self._log_mel(samples)
        return Media(values, np.array([len(values)], dtype=np.int64))

    def _log_mel(self, samples: NDArray[np.float32]) -> NDArray[np.float32]:
        num_frames = max(-(-len(samples) // self.hop_length), 1)
        samples = np.pad(samples, (0, num_frames * self.hop_length - len(samples)))
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

    def _max_samples(self, rate: NDArray[np.int64]) -> NDArray[np.int64]:
        samples: NDArray[np.int64] = np.maximum(np.floor(self.max_seconds * rate), 1).astype(np.int64)
        return samples


@lru_cache(maxsize=8)
def _hann(n_fft: int) -> NDArray[np.float32]:
    return (0.5 - 0.5 * np.cos(2 * np.pi * np.arange(n_fft) / n_fft)).astype(np.float32)


@lru_cache(maxsize=8)
def _mel_filters(sampling_rate: int, n_fft: int, num_mels: int) -> NDArray[np.float32]:
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


def _hertz(mel: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.where(mel < _BREAK_MEL, mel * _LINEAR_HERTZ, _BREAK_HERTZ * np.exp(_LOG_STEP * (mel - _BREAK_MEL)))
