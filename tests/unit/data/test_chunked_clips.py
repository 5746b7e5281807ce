"""Frames of clips in a chunk of silence: those of transformers' WhisperFeatureExtractor, up to the last one."""

import numpy as np
import pytest

from motet.data.chunked_clips import ChunkedClips

LENGTHS = [1, 159, 160, 161, 4000, 4001, 15_599, 15_600, 15_601, 15_840, 15_841, 15_999, 16_000]


@pytest.mark.parametrize(("num_mels", "n_fft", "hop"), [(20, 400, 160), (80, 512, 200)])
def test_frames_are_those_of_transformers(num_mels, n_fft, hop):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.WhisperFeatureExtractor(feature_size=num_mels, chunk_length=1, n_fft=n_fft, hop_length=hop)
    ours = ChunkedClips(num_mels=num_mels, n_fft=n_fft, hop_length=hop, max_seconds=1.0, margin=2)
    rng = np.random.default_rng(7)
    for length in LENGTHS:
        # Loudest at the end, so that a frame behind the clip may be the loudest of all.
        samples = (rng.normal(0, 0.3, length) * np.linspace(0.01, 1, length) ** 4).astype(np.float32)
        made, expected = (
            ours(samples, 16_000),
            theirs(samples, sampling_rate=16_000, return_attention_mask=True, return_tensors="np"),
        )
        frames = expected["input_features"][0].T
        own = int(made.size[0])
        assert own == ours.sizes(np.array([[length, 16_000]]))[0, 0] == expected["attention_mask"].sum()
        assert len(made.values) == min(own + 2, len(frames)) == min(own + 2, ours.max_frames)
        np.testing.assert_allclose(made.values, frames[: len(made.values)], rtol=0, atol=1e-5)


def test_silence_has_frames_too():
    made = ChunkedClips(num_mels=20, max_seconds=1.0, margin=2)(np.zeros(800, dtype=np.float32), 16_000)
    np.testing.assert_allclose(made.values, np.full((7, 20), -1.5), rtol=0, atol=1e-6)
