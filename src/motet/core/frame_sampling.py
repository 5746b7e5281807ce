"""Which frames of a video are taken: what a recipe or a model's directory asks for, as numbers of frames."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from motet.core.arrays import Float64Array, Int64Array


@dataclass(frozen=True)
class FrameSampling:
    """Which frames of a video are taken; neither `fps` nor `num_frames`: all.

    fps:        so many a second, rounded down to whole grids, between the bounds.
    min_frames: at least, as far as there are so many. max_frames: at most.
    num_frames: so many of each video, rounded to whole grids.

    Example:
        >>> FrameSampling(fps=2.0).numbers(100, 25.0, 2).tolist()  # 4 s
        [0, 12, 25, 37, 50, 62, 75, 87]
    """

    fps: float | None = None
    min_frames: int = 4
    max_frames: int = 768
    num_frames: int | None = None

    def counts(self, frames: Int64Array, rates: Float64Array, grid: int) -> Int64Array:
        """How many are taken, int64 [n]; less than 1 or more than there are: of such a video none can be.

        frames: int64 [n], of each video. rates: float64 [n], of them a second. grid: frames that make one.
        """
        if self.num_frames is not None:
            return np.full(len(frames), round(self.num_frames / grid) * grid, dtype=np.int64)
        if self.fps is None:
            return frames
        most = np.minimum(self.max_frames, frames) // grid * grid
        # transformers' expression: another order rounds otherwise.
        asked = np.minimum(np.maximum(frames / rates * self.fps, self.min_frames), np.minimum(most, frames))
        counts: Int64Array = (np.floor(asked / grid) * grid).astype(np.int64)
        return counts

    def numbers(self, frames: int, rate: float, grid: int) -> Int64Array:
        """The frames that are taken, int64 [count], from 0, ascending. They are as even as float32 has them."""
        (count,) = self.counts(np.array([frames]), np.array([rate]), grid).tolist()
        taken: Int64Array = (np.arange(count) * (frames / count)).astype(np.float32).astype(np.int64)
        return taken

    def taken_rates(self, frames: Int64Array, rates: Float64Array, grid: int) -> Float64Array:
        """Frames a second of those that are taken, float64 [n]."""
        counts = self.counts(frames, rates, grid)
        # In transformers' range a last frame may stand that there is not: a rounding error that counts here.
        listed = np.ceil(frames / (frames / np.maximum(counts, 1)))
        taken: Float64Array = listed / frames * rates
        return taken


@dataclass(frozen=True)
class EvenSampling(FrameSampling):
    """Which frames of a video are taken by Qwen3-VL: evenly from the first one to the last, whole grids or not.

    fps: so many a second, between the bounds.

    Example:
        >>> EvenSampling(fps=2.0).numbers(100, 25.0, 2).tolist()  # 4 s
        [0, 14, 28, 42, 57, 71, 85, 99]
    """

    def counts(self, frames: Int64Array, rates: Float64Array, grid: int) -> Int64Array:
        """As of `FrameSampling`."""
        if self.num_frames is not None:
            return np.full(len(frames), self.num_frames, dtype=np.int64)
        if self.fps is None:
            return frames
        asked = (frames / rates * self.fps).astype(np.int64)
        return np.minimum(np.minimum(np.maximum(asked, self.min_frames), self.max_frames), frames)

    def numbers(self, frames: int, rate: float, grid: int) -> Int64Array:
        """As of `FrameSampling`."""
        (count,) = self.counts(np.array([frames]), np.array([rate]), grid).tolist()
        return np.linspace(0, frames - 1, count).round().astype(np.int64)


@dataclass(frozen=True)
class UniformSampling(FrameSampling):
    """Which frames of a video are taken by processors that have no way of their own: at equal distances from the first.

    fps: so many a second, rounded down, between the bounds. They are wide, as transformers has none.

    Example:
        >>> UniformSampling(fps=2.0).numbers(100, 25.0, 1).tolist()  # 4 s
        [0, 12, 25, 37, 50, 62, 75, 87]
    """

    min_frames: int = 1
    max_frames: int = 2**31 - 1

    def counts(self, frames: Int64Array, rates: Float64Array, grid: int) -> Int64Array:
        """As of `FrameSampling`."""
        if self.num_frames is not None:
            return np.full(len(frames), self.num_frames, dtype=np.int64)
        if self.fps is None:
            return frames
        counts: Int64Array = (frames / rates * self.fps).astype(np.int64).clip(self.min_frames, self.max_frames)
        return counts

    def numbers(self, frames: int, rate: float, grid: int) -> Int64Array:
        """As of `FrameSampling`."""
        (count,) = self.counts(np.array([frames]), np.array([rate]), grid).tolist()
        numbers: Int64Array = np.arange(count, dtype=np.int64) * frames // count
        return numbers


@dataclass(frozen=True)
class SkippingSampling(FrameSampling):
    """Which frames of a video are taken by SmolVLM: evenly, and without the first and the last second of a long video.

    fps: so many a second, rounded, but at most `max_frames` and at least one. A video is long if it lasts more seconds
    than `max_frames * fps` and two. There are no `min_frames` and no `num_frames`.

    Example:
        >>> SkippingSampling(fps=1.0, max_frames=3).numbers(250, 25.0, 1).tolist()  # 10 s
        [25, 125, 225]
    """

    min_frames: int = 1

    def counts(
        self, frames: Int64Array, rates: Float64Array, grid: int, seconds: Float64Array | None = None
    ) -> Int64Array:
        """As of `FrameSampling`. seconds: float64 [n], of each video; None: as frames and rates have it."""
        if self.fps is None:
            return frames
        asked, starts, ends = self._ranges(frames, rates, frames / rates if seconds is None else seconds)
        # A frame is taken once.
        counts: Int64Array = np.minimum(asked, ends - starts + 1)
        return counts

    def numbers(self, frames: int, rate: float, grid: int, seconds: float | None = None) -> Int64Array:
        """As of `FrameSampling`. seconds: as of `counts`."""
        if self.fps is None:
            return np.arange(frames, dtype=np.int64)
        lasts = np.array([frames / rate if seconds is None else seconds])
        ranges = self._ranges(np.array([frames]), np.array([rate]), lasts)
        (asked,), (start,), (end,) = (each.tolist() for each in ranges)
        return np.unique(np.linspace(start, end, asked, dtype=np.int64))

    def _ranges(
        self, frames: Int64Array, rates: Float64Array, seconds: Float64Array
    ) -> tuple[Int64Array, Int64Array, Int64Array]:
        """How many are asked of each video, and the first and the last that may be taken, int64 [n] each."""
        assert self.fps is not None
        asked = np.rint(self.fps * seconds).clip(1, self.max_frames).astype(np.int64)
        is_long = seconds - 2 > self.max_frames * self.fps
        starts = np.where(is_long, rates.astype(np.int64), 0)
        ends = np.minimum(np.where(is_long, (frames - rates).astype(np.int64), frames), frames - 1)
        is_empty = starts >= ends
        return asked, np.where(is_empty, 0, starts), np.where(is_empty, frames - 1, ends)


ALL_FRAMES = FrameSampling()
