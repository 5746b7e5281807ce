"""Cornstarch, Table 4: attention of one layer on 8 context-parallel ranks, by who gets which tokens. Used by papers.py.

The paper has milliseconds of a GPU; here are (query, key) pairs of the busiest rank, over those under LPT. Attention
takes some time whatever its pairs, so that published ratios are nearer to 1. Its masks are drawn at random, and how is
not said. Here media are half of a sequence, and isolated (section 4.3.1). LPT places blocks of 128 tokens (section
4.3.2); "random" single tokens, as section 5.3 says: blocks at random are up to 1.4 times as uneven.

EP: an image and a clip, prepended to text. EE: four to twelve of either, embedded in text. MP: two to eight packed
documents, each with up to three embedded.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from published import Row

from motet.balance import Segments, distribute_tokens
from motet.balance.tokens import TokenMethod

SOURCE = "Cornstarch, Table 4"
NUM_RANKS, NUM_MASKS, BLOCK = 8, 10, 128
METHODS: tuple[TokenMethod, ...] = ("lpt", "random", "ring", "zigzag")
PUBLISHED_MS = {
    ("EP", 16384): (3.92, 3.93, 4.24, 3.96),
    ("EE", 16384): (4.31, 4.32, 4.86, 4.37),
    ("MP", 16384): (3.00, 2.99, 3.12, 3.08),
    ("EP", 32768): (10.01, 10.07, 11.76, 10.21),
    ("EE", 32768): (11.12, 11.12, 13.43, 11.60),
    ("MP", 32768): (6.09, 6.18, 6.76, 6.57),
    ("EP", 65536): (25.43, 25.48, 32.24, 28.17),
    ("EE", 65536): (36.99, 37.12, 46.67, 37.36),
    ("MP", 65536): (14.18, 14.15, 16.56, 15.33),
}
"""By mask and tokens: under each of METHODS."""

Document = list[tuple[str, int]]


def rows() -> Iterator[Row]:
    for (mask, num_tokens), published_ms in PUBLISHED_MS.items():
        found = pairs(mask, num_tokens)
        for method, own_ms in list(zip(METHODS, published_ms))[1:]:
            what = f"{mask}, {num_tokens // 1024} k tokens: {method} over LPT"
            published, ratio = round(own_ms / published_ms[0], 4), float(np.mean(found[method] / found["lpt"]))
            yield Row(SOURCE, what, "", published, ratio, 0.03 if method == "random" else None)


def pairs(mask: str, num_tokens: int) -> dict[str, np.ndarray]:
    """Pairs of the busiest rank under each method, [NUM_MASKS]."""
    rng = np.random.default_rng(0)
    masks = [Segments.of_documents(documents(mask, num_tokens, rng)) for _ in range(NUM_MASKS)]
    return {method: np.array([busiest(own, method, seed) for seed, own in enumerate(masks)]) for method in METHODS}


def busiest(mask: Segments, method: TokenMethod, seed: int) -> int:
    block = 1 if method == "random" else BLOCK
    return int(distribute_tokens(mask, NUM_RANKS, block, method, seed=seed).loads[:, 0].max())


def documents(mask: str, num_tokens: int, rng: np.random.Generator) -> list[Document]:
    if mask == "EP":
        image, clip = parts(num_tokens // 2, 2, rng)
        return [[("image", image), ("audio", clip), ("text", num_tokens - image - clip)]]
    if mask == "EE":
        return [embedded(num_tokens, int(rng.integers(4, 13)), rng)]
    sizes = parts(num_tokens, int(rng.integers(2, 9)), rng)
    return [embedded(size, int(rng.integers(0, 4)), rng) for size in sizes]


def embedded(num_tokens: int, num_media: int, rng: np.random.Generator) -> Document:
    """Text around so many images and clips, which are half of the tokens."""
    if not num_media:
        return [("text", num_tokens)]
    media = parts(num_tokens // 2, num_media, rng)
    text = parts(num_tokens - num_tokens // 2, num_media + 1, rng)
    found: Document = [("text", text[0])]
    for length, after in zip(media, text[1:]):
        found += [(("image", "audio")[int(rng.integers(2))], length), ("text", after)]
    return found


def parts(total: int, count: int, rng: np.random.Generator) -> list[int]:
    """The total in so many parts, cut at random."""
    cuts = np.sort(rng.integers(0, total + 1, count - 1))
    return np.diff(np.concatenate([[0], cuts, [total]])).tolist()
