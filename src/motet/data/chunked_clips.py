"""A clip as the extractor of a whole audio model prepares it: in a chunk of silence, of which few frames are kept.

Frames are those of transformers' WhisperFeatureExtractor, up to the last one, which sees the silence behind the clip.
So do the convolutions of the model's encoder: the clip's own frames are followed by those of silence that these see.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from motet.core.arrays import Float32Array, Int64Array
from motet.core.example import Media
from motet.data.audio import AudioTransform


@dataclass(frozen=True)
class ChunkedClips(AudioTransform):
    """A clip's file to the log-mel frames of a model that pads all clips to max_seconds.

    margin: frames of silence behind the clip's own, fewer where the chunk ends. An item's size does not count them.

    Example:
        >>> media = ChunkedClips(margin=2)(np.zeros(1600, dtype=np.float32), 16_000)
        >>> media.size.tolist(), media.values.shape
        ([10], (12, 80))
    """

    margin: int = 0

    @property
    def max_frames(self) -> int:
        """Frames of the chunk."""
        return int(self.max_seconds * self.sampling_rate) // self.hop_length

    def sizes(self, raw: Int64Array) -> Int64Array:
        """The clip's own frames, int64 [n, 1]."""
        return np.minimum(super().sizes(raw), self.max_frames)

    def _media_of(self, samples: Float32Array) -> Media:
        own = min(max(-(-len(samples) // self.hop_length), 1), self.max_frames)
        # As many frames behind the clip's own as see any of it: the loudest decides about all of them.
        heard = min(own + max(-(-self.n_fft // self.hop_length), self.margin), self.max_frames)
        chunk = self.max_frames * self.hop_length
        samples = samples[:chunk]
        length = min(heard * self.hop_length + self.n_fft, chunk)
        values = self._log_mel(np.pad(samples, (0, length - len(samples))), heard)
        return Media(values[: min(own + self.margin, self.max_frames)], np.array([own], dtype=np.int64))
