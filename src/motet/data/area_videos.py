"""Images and videos as Qwen's processors prepare them for one encoder: frames in pairs, areas between two bounds.

Frames are those that transformers' Qwen2VLVideoProcessor samples. Each is resized as its PIL processor of images does,
with the bounds of the video processor. A grid has `temporal_patch_size` frames; those that lack are the last once more.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from motet.core.arrays import BoolArray, Int64Array
from motet.core.example import Media
from motet.core.frame_sampling import ALL_FRAMES, FrameSampling
from motet.core.grid_positions import step_bits
from motet.core.modalities import VIDEO
from motet.core.words import counted_words
from motet.data.area_images import AreaImages
from motet.data.media import MediaRef
from motet.data.videos import VideoHeader, frames_at, is_video, read_video_header, video_rates, video_shapes


@dataclass(frozen=True)
class AreaVideos(AreaImages):
    """An image or a video to the patch rows of a model whose processors bound areas.

    min_video_area, max_video_area: pixels of a frame. sampling: which frames are taken.
    cap_tokens:  bound of a whole video: its frames share 0.9 of so many blocks; None: there is no such bound.
    video_mean, video_std: as `mean` and `std`.
    tokens_per_second: positions of a second, where positions of frames follow their time (Qwen2.5-VL); None: they are
                 counted.

    Sizes are (frames, patch rows, patch columns), a frame of `temporal_patch_size` pictures; an image has one.

    Example:
        >>> transform = AreaVideos(patch_size=14, merge_size=2, temporal_patch_size=2, sampling=FrameSampling(fps=2.0))
        >>> raw = np.array([VideoHeader(100, 640, 480, 25).raw, (640, 480)])
        >>> transform.sizes(raw).tolist()  # 8 pictures of a video of 4 s, and an image
        [[4, 34, 46], [1, 34, 46]]
    """

    min_video_area: int = 128 * 28 * 28
    max_video_area: int = 28 * 28 * 768
    sampling: FrameSampling = ALL_FRAMES
    cap_tokens: int | None = None
    video_mean: tuple[float, ...] = (0.5,)
    video_std: tuple[float, ...] = (0.5,)
    video_resample: int = 3
    tokens_per_second: float | None = None

    also: ClassVar[tuple[str, ...]] = (VIDEO,)

    def accepts(self, raw: Int64Array) -> BoolArray:
        """Which items can be used, bool [n]: those that are not too long for their width, and have enough frames."""
        videos, accepted = is_video(raw), np.ones(len(raw), dtype=bool)
        accepted[~videos] = super().accepts(raw[~videos])
        shapes = video_shapes(raw[videos])
        counts = self.sampling.counts(shapes[:, 0], video_rates(raw[videos]), self.temporal_patch_size)
        is_there = (counts >= 1) & (counts <= shapes[:, 0])
        accepted[videos] = is_there & super().accepts(shapes[:, 1:])
        return accepted

    def refusal(self, raw: tuple[int, int]) -> str:
        """Why an item is not accepted."""
        if not is_video(np.array([raw]))[0]:
            return super().refusal(raw)
        header = VideoHeader.of(raw)
        if not super().accepts(np.array([[header.width, header.height]]))[0]:
            return super().refusal((header.width, header.height)).replace("has", "has frames of", 1)
        needed = self.temporal_patch_size if self.sampling.num_frames is None else self.sampling.num_frames
        return f"has {counted_words(header.num_frames, 'frame')}, of which the model's processor cannot take {needed}"

    def sizes(self, raw: Int64Array) -> Int64Array:
        """(frames, patch rows, patch columns) of each item, int64 [n, 3], from headers alone."""
        videos, sizes = is_video(raw), np.ones((len(raw), 3), dtype=np.int64)
        sizes[~videos, 1:] = super().sizes(raw[~videos])
        shapes = video_shapes(raw[videos])
        counts = self.sampling.counts(shapes[:, 0], video_rates(raw[videos]), self.temporal_patch_size)
        sizes[videos, 0] = -(-counts // self.temporal_patch_size)
        for bound in np.unique(bounds := self._bounds_of(counts)).tolist():
            alike = np.flatnonzero(videos)[bounds == bound]
            sizes[alike, 1:] = self._of_frames(bound).sizes(shapes[bounds == bound, 1:])
        return sizes

    def time_steps(self, raw: Int64Array) -> Int64Array:
        """The positions between two frames of each item, int64 [n], as `step_bits` has them."""
        videos, steps = is_video(raw), np.ones(len(raw), dtype=np.float32)
        if self.tokens_per_second is not None:
            frames, rates = video_shapes(raw[videos])[:, 0], video_rates(raw[videos])
            taken = self.sampling.taken_rates(frames, rates, self.temporal_patch_size)
            # transformers holds the seconds as float32, and multiplies there.
            seconds = (self.temporal_patch_size / taken).astype(np.float32)
            steps[videos] = np.float32(self.tokens_per_second) * seconds
        return step_bits(steps)

    def load(self, ref: MediaRef) -> Media:
        """Decode and transform an image or a video. Raises Unusable, and whatever Pillow raises on a damaged file."""
        if ref.modality != VIDEO:
            media = super().load(ref)
            return replace(media, size=np.insert(media.size, 0, 1))
        return self._video(ref, VideoHeader.of(ref.raw or read_video_header(ref)))

    def _video(self, ref: MediaRef, header: VideoHeader) -> Media:
        """The rows of a video, a grid after the other; rows are (channel, time, y, x)."""
        numbers = self.sampling.numbers(header.num_frames, float(header.rate), self.temporal_patch_size)
        numbers = numbers[numbers < header.num_frames]
        (bound,) = self._bounds_of(np.array([len(numbers)])).tolist()
        frame, grid = self._of_frames(bound), self.temporal_patch_size
        pictures = [frame.patches_of(picture) for picture in frames_at(ref, numbers)]
        pictures += [pictures[-1]] * (-len(pictures) % grid)
        num_patches = len(pictures[0])
        # [grids, time, patches, channel, area] -> [grids, patches, channel, time, area]
        stacked = np.stack(pictures).reshape(-1, grid, num_patches, self.channels, self.patch_size**2)
        patches = np.ascontiguousarray(stacked.transpose(0, 2, 3, 1, 4)).reshape(len(stacked) * num_patches, -1)
        pixels, side = frame._pixels(), frame.sizes(np.array([[header.width, header.height]]))[0]
        return Media(pixels.rows(patches), np.insert(side, 0, len(stacked)), pixels, patches)

    def _bounds_of(self, counts: Int64Array) -> Int64Array:
        """What bounds the frames of videos of which so many are taken, int64 [n]: the largest area of one."""
        if self.cap_tokens is None:
            return np.full(len(counts), self.max_video_area, dtype=np.int64)
        of_all = int(self.cap_tokens * self.block**2 * 0.9)
        share = np.minimum(self.max_video_area, of_all * self.temporal_patch_size // np.maximum(counts, 1))
        return np.maximum(share, int(self.min_video_area * 1.05))

    def _of_frames(self, bound: int) -> AreaImages:
        """The transform of the frames of a video. bound: one of `_bounds_of`."""
        return AreaImages(
            patch_size=self.patch_size,
            merge_size=self.merge_size,
            mean=self.video_mean,
            std=self.video_std,
            min_area=self.min_video_area,
            max_area=bound,
            resample=self.video_resample,
        )
