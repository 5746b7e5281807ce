"""Images and videos as Qwen3-VL's processors prepare them: the volume of a video is bounded, and frames say their time.

Frames are those that transformers' Qwen3VLVideoProcessor samples. Each is resized as its PIL processor of images does,
to the sides that `smart_resize` of that processor finds for the whole video. Before the rows of each frame (of two
pictures) its second stands as text, as Qwen3VLProcessor writes it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from motet.core.arrays import BoolArray, Int64Array
from motet.data.area_images import AreaImages
from motet.data.area_videos import AreaVideos
from motet.data.videos import is_video, video_rates, video_shapes


@dataclass(frozen=True)
class VolumeFrames(AreaImages):
    """Frames of a video of which all together have a volume between two bounds.

    num_frames: of the video. grid: of which so many make one. min_area, max_area: pixels of all its frames.

    Example:
        >>> transform = VolumeFrames(patch_size=16, merge_size=2, num_frames=8, min_area=2**17, max_area=2**19)
        >>> transform.pixels(np.array([[640, 480]])).tolist()
        [[288, 192]]
    """

    num_frames: int = 2
    grid: int = 2

    def pixels(self, raw: Int64Array) -> Int64Array:
        """(width, height) of the frames of each video, int64 [n, 2]."""
        sides = self._whole_blocks(raw).astype(np.float64)
        nearest = np.rint(sides / self.block) * self.block
        volume = self.num_frames * sides.prod(axis=1, keepdims=True)
        made = np.rint(self.num_frames / self.grid) * self.grid * nearest.prod(axis=1, keepdims=True)
        shrink, grow = np.sqrt(volume / self.max_area), np.sqrt(self.min_area / volume)
        smaller = np.maximum(self.block, np.floor(sides / shrink / self.block) * self.block)
        larger = np.ceil(sides * grow / self.block) * self.block
        chosen = np.where(made > self.max_area, smaller, np.where(made < self.min_area, larger, nearest))
        pixels: Int64Array = chosen.astype(np.int64)
        return pixels

    def _whole_blocks(self, raw: Int64Array) -> Int64Array:
        """The sides, grown so that each has a block at least, int64 [n, 2]."""
        scale = (self.block / raw).max(axis=1, keepdims=True)
        return np.where((raw < self.block).any(axis=1, keepdims=True), (raw * scale).astype(np.int64), raw)


@dataclass(frozen=True)
class TimedVideos(AreaVideos):
    """An image or a video to the patch rows of Qwen3-VL. Options are those of `AreaVideos`, but for areas.

    min_video_area, max_video_area: pixels of all frames of a video.
    cap_tokens: bound of a frame in blocks, which then has an even share of `max_video_area` at most; None: there is no
                such bound.

    Example:
        >>> from motet.core.frame_sampling import EvenSampling
        >>> from motet.data.videos import VideoHeader
        >>> transform = TimedVideos(patch_size=16, merge_size=2, temporal_patch_size=2, sampling=EvenSampling(fps=1.0))
        >>> raw = np.array([VideoHeader(100, 640, 480, 25).raw, (640, 480)])
        >>> transform.sizes(raw).tolist()  # 4 pictures of a video of 4 s, and an image
        [[2, 20, 28], [1, 30, 40]]
        >>> [transform.times(tuple(key)) for key in transform.text_keys(raw).tolist()]
        [[0.66, 3.3], []]
    """

    def accepts(self, raw: Int64Array) -> BoolArray:
        """As of `AreaVideos`; a video has two frames at least."""
        accepted, videos = super().accepts(raw), is_video(raw)
        counts = self.sampling.counts(
            video_shapes(raw[videos])[:, 0], video_rates(raw[videos]), self.temporal_patch_size
        )
        accepted[videos] &= counts >= self.temporal_patch_size
        return accepted

    def text_keys(self, raw: Int64Array) -> Int64Array:
        """What the times of each item's frames depend on, int64 [n, 2]: its frames and their rate; 0 of an image."""
        keys = np.stack([video_shapes(raw)[:, 0], raw[:, 1]], axis=1)
        return np.where(is_video(raw)[:, None], keys, 0)

    def times(self, key: tuple[int, ...]) -> list[float]:
        """The second of each frame of an item, the middle between its pictures; none of an image."""
        frames, rate = key
        if not frames:
            return []
        rate_of = float(video_rates(np.array([[0, rate]]))[0])
        numbers = self.sampling.numbers(frames, rate_of, grid := self.temporal_patch_size).tolist()
        seconds = [number / rate_of for number in [*numbers, *numbers[-1:] * (-len(numbers) % grid)]]
        return [(seconds[first] + seconds[first + grid - 1]) / 2 for first in range(0, len(seconds), grid)]

    def _bounds_of(self, counts: Int64Array) -> Int64Array:
        """What bounds the frames of videos: how many there are."""
        return counts

    def _of_frames(self, bound: int) -> AreaImages:
        """The transform of the frames of a video. bound: their number."""
        most = self.max_video_area
        if self.cap_tokens is not None:
            share = min(self.cap_tokens * self.block**2, most // bound)
            most = bound * max(share, int(self.min_video_area * 1.05))
        return VolumeFrames(
            patch_size=self.patch_size,
            merge_size=self.merge_size,
            mean=self.video_mean,
            std=self.video_std,
            min_area=self.min_video_area,
            max_area=most,
            resample=self.video_resample,
            num_frames=bound,
            grid=self.temporal_patch_size,
        )
