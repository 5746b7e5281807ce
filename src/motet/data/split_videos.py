"""Images and videos as SmolVLM's processors prepare them (Marafioti et al. 2025): a frame is one tile.

Frames are those that transformers' SmolVLMVideoProcessor samples. Each is resized as its PIL processor of images does
that it does not cut. What stands before each frame is text, with the second of the frame.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from motet.core.arrays import BoolArray, Int64Array
from motet.core.example import Media
from motet.core.frame_sampling import SkippingSampling
from motet.core.modalities import VIDEO
from motet.data.media import MediaRef
from motet.data.split_images import SplitImages
from motet.data.videos import (
    VideoHeader,
    frames_at,
    is_video,
    read_video_header,
    video_rates,
    video_seconds,
    video_shapes,
)


@dataclass(frozen=True)
class SplitVideos(SplitImages):
    """An image or a video to the patch rows of its tiles, one tile after the other.

    A size is that of `SplitImages`; of a video it is (frames, 0).

    sampling: which frames are taken. video_longest: pixels that the longer side of a frame is resized to before it is
    squeezed into a tile. video_mean, video_std, video_resample: as `mean`, `std` and `resample`.

    Example:
        >>> transform = SplitVideos(patch_size=14, tile=364, longest=728, sampling=SkippingSampling(fps=2.0))
        >>> raw = np.array([VideoHeader(100, 640, 480, 25).raw, (1000, 500)])
        >>> transform.sizes(raw).tolist()  # 8 frames of a video of 4 s, and an image
        [[8, 0], [1, 2]]
        >>> [transform.times(tuple(key)) for key in transform.text_keys(raw).tolist()]
        [(4.0, [0.0, 0.56, 1.12, 1.68, 2.24, 2.8, 3.36, 3.96]), None]
    """

    sampling: SkippingSampling = field(default_factory=SkippingSampling)
    video_longest: int = 1456
    video_mean: tuple[float, ...] = (0.5,)
    video_std: tuple[float, ...] = (0.5,)
    video_resample: int = 1

    also: ClassVar[tuple[str, ...]] = (VIDEO,)

    def accepts(self, raw: Int64Array) -> BoolArray:
        """Which items can be used, bool [n]: all."""
        return np.ones(len(raw), dtype=bool)

    def sizes(self, raw: Int64Array) -> Int64Array:
        """The size of each item, int64 [n, 2], from headers alone."""
        videos, sizes = is_video(raw), np.zeros((len(raw), 2), dtype=np.int64)
        sizes[~videos] = super().sizes(raw[~videos])
        of_videos = raw[videos]
        frames, rates = video_shapes(of_videos)[:, 0], video_rates(of_videos)
        sizes[videos, 0] = self.sampling.counts(frames, rates, 1, video_seconds(of_videos))
        return sizes

    def text_keys(self, raw: Int64Array) -> Int64Array:
        """What the text of each item depends on, int64 [n, 2]: a video's frames and their rate, or an image's size."""
        videos = is_video(raw)
        keys = self.sizes(raw)
        keys[videos] = np.stack([video_shapes(raw[videos])[:, 0], raw[videos, 1]], axis=1)
        return keys

    def times(self, key: tuple[int, ...]) -> tuple[float, list[float]] | None:
        """The seconds of a video, and the second of each of its frames; None for an image."""
        frames, rate = key
        if rate < 1 << 32:
            return None
        raw = np.array([VideoHeader(frames, 1, 1, VideoHeader.rate_of(rate)).raw])
        (seconds,), (of_second,) = video_seconds(raw).tolist(), video_rates(raw).tolist()
        return seconds, (self.sampling.numbers(frames, of_second, 1, seconds) / of_second).tolist()

    def load(self, ref: MediaRef) -> Media:
        """Decode and transform an image or a video. Raises Unusable, and whatever Pillow raises on a damaged file."""
        if ref.modality != VIDEO:
            return super().load(ref)
        raw = ref.raw or read_video_header(ref)
        header = VideoHeader.of(raw)
        (seconds,) = video_seconds(np.array([raw])).tolist()
        numbers = self.sampling.numbers(header.num_frames, float(header.rate), 1, seconds)
        frame = SplitImages(
            patch_size=self.patch_size,
            mean=self.video_mean,
            std=self.video_std,
            tile=self.tile,
            longest=self.video_longest,
            splits=False,
            resample=self.video_resample,
        )
        patches = np.concatenate([frame.patches_of(picture) for picture in frames_at(ref, numbers)])
        pixels = frame._pixels()
        return Media(pixels.rows(patches), np.array([len(numbers), 0]), pixels, patches)
