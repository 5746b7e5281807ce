"""Mixed batches of real or sampled lengths, on which tests and benchmarks measure balancing."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from motet.analyze.lengths import Lengths
from motet.core.arrays import Int64Array
from motet.data.media import AUDIO, IMAGE

PHASES = ("backbone", IMAGE, AUDIO)

MFLOP_PER_LENGTH = (14_000, 4_000, 1_200)
"""Forward MFLOPs of a token, a patch and an audio frame.

The backbone has 7 B parameters, the image encoder 2 B, the audio encoder 0.6 B. The numbers bring all phases to one
unit; the balance of a single phase does not depend on them."""


@dataclass(frozen=True)
class Caps:
    """The lengths that longer examples are cut to."""

    tokens: int = 8192
    patches: int = 8192
    audio_s: float = 35.0


@dataclass(frozen=True, eq=False)
class Mixture:
    """Examples of three kinds, to draw batches with equal shares of each.

    text, image, speech: int64 [n, 3], the tokens of the whole sequence, patches and audio frames of each example.
    """

    text: Int64Array
    image: Int64Array
    speech: Int64Array

    @staticmethod
    def of(lengths: Lengths) -> Mixture:
        """The examples of a table of lengths or of a manifest. An example with images and audio counts as image."""
        batch = lengths.batch
        columns = [batch.sequence]
        for phase in (IMAGE, AUDIO):
            items = batch.items[phase]
            columns.append(np.bincount(items.example, items.length, batch.num_examples).astype(np.int64))
        rows = np.stack(columns, axis=1)
        image, speech = rows[:, 1] > 0, (rows[:, 1] == 0) & (rows[:, 2] > 0)
        return Mixture(rows[~image & ~speech], rows[image], rows[speech])

    @staticmethod
    def sampled(seed: int, num_examples: int = 20_000) -> Mixture:
        """Sampled examples with the distributions of public sets: long-tailed chats, tiled and native images, clips."""
        rng = np.random.default_rng(seed)
        none = np.zeros(num_examples, dtype=np.int64)
        text = _lognormal(rng, 1000, 1.0, (12, 16_000), num_examples)
        tiles = 1025 * rng.choice([1, 3, 5], num_examples, p=[0.1, 0.5, 0.4])
        native = _lognormal(rng, 1700, 0.7, (64, 90_000), num_examples)
        patches = np.where(rng.random(num_examples) < 0.6, tiles, native)
        frames = np.clip(rng.normal(1200, 450, num_examples), 110, 3500).astype(np.int64)
        prompt = _lognormal(rng, 70, 0.8, (8, 5000), num_examples)
        return Mixture(
            np.stack([text, none, none], axis=1),
            np.stack([prompt + patches // 4, patches, none], axis=1),
            np.stack([prompt // 2 + frames // 4, none, frames], axis=1),
        )

    def draw(self, num_examples: int, rng: np.random.Generator, caps: Caps | None) -> Int64Array:
        """The lengths of a batch with a third of each kind, shuffled: int64 [num_examples, 3], columns as in `PHASES`.

        caps: the lengths that longer examples are cut to; None cuts nothing.
        """
        parts = []
        for index, kind in enumerate((self.text, self.image, self.speech)):
            share = (num_examples + 2 - index) // 3
            parts.append(kind[rng.integers(0, len(kind), share)])
        rows = rng.permutation(np.concatenate(parts))
        if caps is not None:
            rows = np.minimum(rows, [caps.tokens, caps.patches, round(100 * caps.audio_s)])
        return rows


def _lognormal(
    rng: np.random.Generator, median: float, spread: float, limits: tuple[int, int], count: int
) -> Int64Array:
    return np.clip(rng.lognormal(np.log(median), spread, count), *limits).astype(np.int64)
