"""Images and videos as LLaVA-OneVision's processors prepare them (Li et al. 2024, section 3.2): a frame is one tile.

Frames are those that transformers' BaseVideoProcessor samples. Each is squeezed into a tile, as its PIL processor of
images does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from motet.core.arrays import BoolArray, Int64Array
from motet.core.example import Media
from motet.core.frame_sampling import ALL_FRAMES, FrameSampling
from motet.core.modalities import VIDEO
from motet.core.words import counted_words
from motet.data.anyres_images import AnyResImages
from motet.data.media import MediaRef
from motet.data.processed_images import ProcessedImages
from motet.data.videos import VideoHeader, frames_at, is_video, read_video_header, video_rates, video_shapes


@dataclass(frozen=True)
class AnyResVideos(AnyResImages):
    """An image or a video to the patch rows of its tiles, one tile after the other.

    A size is that of `AnyResImages`; of a video it is (frames, 0, 0, 0).

    sampling: which frames are taken. video_mean, video_std, video_resample: as `mean`, `std` and `resample`.

    Example:
        >>> from motet.core.frame_sampling import UniformSampling
        >>> transform = AnyResVideos(patch_size=14, tile=336, sampling=UniformSampling(num_frames=8))
        >>> transform.sizes(np.array([VideoHeader(100, 640, 480, 25).raw, (640, 480)])).tolist()
        [[8, 0, 0, 0], [1, 1, 18, 24]]
    """

    sampling: FrameSampling = ALL_FRAMES
    video_mean: tuple[float, ...] = (0.5,)
    video_std: tuple[float, ...] = (0.5,)
    video_resample: int = 3

    also: ClassVar[tuple[str, ...]] = (VIDEO,)

    def accepts(self, raw: Int64Array) -> BoolArray:
        """Which items can be used, bool [n]: images that fit a canvas, and videos with enough frames."""
        videos, accepted = is_video(raw), np.ones(len(raw), dtype=bool)
        accepted[~videos] = super().accepts(raw[~videos])
        accepted[videos] = self._counts(raw[videos]) <= video_shapes(raw[videos])[:, 0]
        return accepted

    def refusal(self, raw: tuple[int, int]) -> str:
        """Why an item is not accepted."""
        if not is_video(items := np.array([raw]))[0]:
            return super().refusal(raw)
        return (
            f"has {counted_words(VideoHeader.of(raw).num_frames, 'frame')}, and the model's processor takes "
            f"{self._counts(items)[0]}"
        )

    def sizes(self, raw: Int64Array) -> Int64Array:
        """The size of each item, int64 [n, 4], from headers alone."""
        videos, sizes = is_video(raw), np.zeros((len(raw), 4), dtype=np.int64)
        sizes[~videos] = super().sizes(raw[~videos])
        sizes[videos, 0] = self._counts(raw[videos])
        return sizes

    def load(self, ref: MediaRef) -> Media:
        """Decode and transform an image or a video. Raises Unusable, and whatever Pillow raises on a damaged file."""
        if ref.modality != VIDEO:
            return super().load(ref)
        header = VideoHeader.of(ref.raw or read_video_header(ref))
        numbers = self.sampling.numbers(header.num_frames, float(header.rate), 1)
        frame = ProcessedImages(
            patch_size=self.patch_size,
            size=(self.tile, self.tile),
            mean=self.video_mean,
            std=self.video_std,
            resample=self.video_resample,
        )
        patches = np.concatenate([frame.patches_of(picture) for picture in frames_at(ref, numbers)])
        pixels = frame._pixels()
        return Media(pixels.rows(patches), np.array([len(numbers), 0, 0, 0]), pixels, patches)

    def _counts(self, raw: Int64Array) -> Int64Array:
        """Frames that are taken of each video, int64 [n]."""
        return self.sampling.counts(video_shapes(raw)[:, 0], video_rates(raw), 1)
