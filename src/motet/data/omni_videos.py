"""Images and videos as Qwen2.5-Omni's processors prepare them: as Qwen2.5-VL's, but for the times of frames.

Frames may alternate with rows of the video's sound, in chunks of time.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from motet.core.arrays import Int64Array
from motet.core.errors import UserError
from motet.core.grid_positions import step_bits
from motet.data.area_videos import AreaVideos
from motet.data.videos import is_video

_RATE = 2.0
"""Frames a second that transformers' Qwen2_5OmniProcessor takes videos to have, unless it is asked for others."""


@dataclass(frozen=True)
class OmniVideos(AreaVideos):
    """An image or a video to the patch rows of Qwen2.5-Omni.

    Frames stand as if `sampling.fps` were taken a second, or 2 where it says none, however many there are.

    sound_chunk: positions of a chunk, where frames alternate with rows of the video's sound; None: it is not read.

    Example:
        >>> transform = OmniVideos(patch_size=14, merge_size=2, temporal_patch_size=2, tokens_per_second=25.0)
        >>> transform.time_steps(np.array([[640, 480]])).astype(np.int32).view(np.float32).tolist()  # an image
        [1.0]
    """

    sound_chunk: int | None = None

    def __post_init__(self) -> None:
        """Raises UserError for times that transformers rounds otherwise, as it multiplies in another order.

        Also for frames of which transformers would cut one, where a chunk ends in it.
        """
        super().__post_init__()
        frames, seconds = np.arange(2**12, dtype=np.float32), self._seconds
        if self.tokens_per_second is not None:
            rate = np.float32(self.tokens_per_second)
            if not np.array_equal((frames * seconds * rate).astype(np.int64), (frames * (seconds * rate)).astype(int)):
                raise UserError(
                    f"model.video.fps is {self.sampling.fps:g}, for which positions of frames are not known to be "
                    "those of transformers; take 1, 2, 4, 5 or 8."
                )
            if self.sound_chunk is not None:
                # Its processor counts chunks in float64, and its model by whole positions.
                positions, chunk = (frames * seconds * rate).astype(np.int64), self.sound_chunk
                exact = np.arange(len(frames)) * (self.temporal_patch_size / (self.sampling.fps or _RATE))
                chunks = exact * self.tokens_per_second // chunk
                if seconds * rate > chunk or not np.array_equal(chunks, positions // chunk):
                    raise UserError(
                        f"model.video.fps is {self.sampling.fps or _RATE:g}, with which transformers cuts frames where "
                        f"chunks of sound end; beside model.video.sound take 1, 2, 4, 5 or 8."
                    )

    @property
    def _seconds(self) -> np.float32:
        """Between two frames."""
        return np.float32(self.temporal_patch_size / (self.sampling.fps or _RATE))

    def time_steps(self, raw: Int64Array) -> Int64Array:
        """As of `AreaVideos`."""
        steps = np.ones(len(raw), dtype=np.float32)
        if self.tokens_per_second is not None:
            steps[is_video(raw)] = np.float32(self.tokens_per_second) * self._seconds
        return step_bits(steps)
