"""Sections of balance.py on the items of one phase: what is measured, on what lengths, beside whom."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from measure import Case

from motet.analyze.mixture import Caps, Mixture
from motet.balance import Cost, Packed, Padded, PaddedAttention, Segments, assign, distribute_tokens, fallback
from motet.core.arrays import Int64Array
from motet.core.assignment import Assignment

SIZES = ((64, 60), (128, 75), (512, 60), (2560, 80))
"""Ranks, items a rank; ascending, so that a peer that is stopped is not tried on more."""

ANY_COUNTS = (
    "heapq LPT", "verl KK", "prtpy greedy", "prtpy KK", "prtpy multifit", "numberpartitioning greedy",
    "numberpartitioning KK", "binpacking",
)  # fmt: skip

Draw = Callable[[int, np.random.Generator], Int64Array]


@dataclass(frozen=True)
class Sources:
    """What batches of lengths are drawn from, by name; whole examples from the mixture, real or sampled."""

    sequences: dict[str, Draw]
    clips: dict[str, Draw]
    mixture: Mixture
    mixture_name: str

    @staticmethod
    def of(real: Mixture | None) -> Sources:
        sequences: dict[str, Draw] = {
            "log-normal": lambda n, rng: np.clip(rng.lognormal(6.3, 1.1, n), 16, 4096).astype(np.int64)
        }
        clips: dict[str, Draw] = {
            "normal": lambda n, rng: np.clip(rng.normal(1100, 400, n), 300, 3000).astype(np.int64)
        }
        if real is None:
            return Sources(sequences, clips, Mixture.sampled(seed=0), "sampled")
        sequences["real"] = lambda n, rng: real.draw(n, rng, Caps())[:, 0]
        clips["real"] = lambda n, rng: rng.choice(real.speech[:, 2], n)
        return Sources(sequences, clips, real, "real")


def packed(sources: Sources) -> Iterator[Case]:
    yield from whole_items("packed", sources.sequences, Packed(), ANY_COUNTS)


def packed_equal_counts(sources: Sources) -> Iterator[Case]:
    peers = ("verl KK, equal size",)
    yield from whole_items("packed, equal counts", sources.sequences, Packed(), peers, equal_counts=True)


def packed_quadratic(sources: Sources) -> Iterator[Case]:
    """Attention's share as in a layer of hidden size 1152. heapq LPT is given true costs, VeOmni lengths."""
    cost = Packed(linear=6 * 1152, quadratic=1)
    yield from whole_items("packed + quadratic", sources.sequences, cost, ("heapq LPT", "veomni, squares"))


def padded(sources: Sources) -> Iterator[Case]:
    yield from whole_items("padded", sources.clips, Padded(), ("sorted, equal counts", "heapq LPT"))


def padded_quadratic(sources: Sources) -> Iterator[Case]:
    cost = Padded(linear=6 * 1152, quadratic=1)
    yield from whole_items("padded + quadratic", sources.clips, cost, ("sorted, equal counts", "heapq LPT"))


def padded_attention(sources: Sources) -> Iterator[Case]:
    cost = PaddedAttention(linear=6 * 1152, quadratic=1)
    yield from whole_items("padded attention", sources.clips, cost, ("sorted, equal counts", "heapq LPT"))


def without_native_core(sources: Sources) -> Iterator[Case]:
    """Packed, as `assign` does it where the native core is not built."""
    for num_ranks, per_rank in SIZES:
        for source, draw in sources.sequences.items():
            yield Case(
                "packed, numpy alone",
                f"{num_ranks} x {per_rank}",
                source,
                draw=lambda rng, draw=draw, count=num_ranks * per_rank: draw(count, rng),
                solve=lambda lengths, n=num_ranks: Assignment(*fallback.packed(lengths, n, False, 100_000 + 1_500 * n)),
            )


def whole_items(algorithm, sources, cost: Cost, peers: Sequence[str], **options) -> Iterator[Case]:
    for num_ranks, per_rank in SIZES:
        for source, draw in sources.items():
            yield Case(
                algorithm,
                f"{num_ranks} x {per_rank}",
                source,
                draw=lambda rng, draw=draw, count=num_ranks * per_rank: draw(count, rng),
                solve=lambda lengths, num_ranks=num_ranks: assign(lengths, num_ranks, cost, **options),
                num_ranks=num_ranks,
                peers=peers,
                weights=cost.weights,
                cost=cost,
            )


def tokens(_: Sources) -> Iterator[Case]:
    """Blocks of a context-parallel sequence; heapq LPT is given the pairs, which it cannot count."""
    for num_tokens, num_ranks, block in ((2**16, 64, 128), (2**16, 64, 64), (2**20, 64, 128), (2**20, 512, 128)):
        for kind, draw in MASKS.items():
            for who, method in (("motet", "lpt"), ("zigzag", "zigzag"), ("random", "random")):
                yield Case(
                    "tokens",
                    f"{num_ranks} x {num_tokens // num_ranks // block} of {block}",
                    kind,
                    draw=lambda rng, draw=draw, n=num_tokens: Segments.of_documents(draw(n, rng)),
                    solve=lambda s, n=num_ranks, b=block, method=method: distribute_tokens(s, n, b, method),
                    quality=pairs_over_mean,
                    who=who,
                    num_ranks=num_ranks,
                    peers=("heapq LPT",) if who == "motet" else (),
                    weights=lambda segments, block=block: block_pairs(segments, block),
                )


def pairs_over_mean(found: Assignment, _: object) -> dict[str, float]:
    pairs = found.loads.reshape(found.num_ranks, -1)[:, 0]  # a peer's loads have no second column
    return {"max / mean - 1": float(pairs.max() / pairs.mean()) - 1}


def block_pairs(segments: Segments, block: int) -> Int64Array:
    """The pairs of each block: the load of each rank where every rank has one block."""
    return distribute_tokens(segments, -(-segments.num_tokens // block), block, "ring").loads[:, 0]


def images_in_text(num_tokens: int, rng: np.random.Generator) -> list[list[tuple[str, int]]]:
    """One document (Cornstarch figure 11b)."""
    document = []
    while num_tokens > 0:
        for kind, length in (("text", int(rng.integers(20, 400))), ("image", 256 * int(rng.integers(1, 13)))):
            document.append((kind, min(length, num_tokens)))
            num_tokens -= document[-1][1]
    return [document]


def packed_documents(num_tokens: int, rng: np.random.Generator) -> list[list[tuple[str, int]]]:
    """Documents of log-normal length (figure 11c)."""
    documents = []
    while num_tokens > 0:
        length = min(num_tokens, int(np.clip(rng.lognormal(7, 1), 64, 2**14)))
        documents += images_in_text(length, rng)
        num_tokens -= length
    return documents


MASKS = {
    "images first": lambda n, rng: [[("image", n // 16)] * 8 + [("text", n - n // 16 * 8)]],
    "images in text": images_in_text,
    "packed documents": packed_documents,
}

SECTIONS = {
    "packed": packed,
    "equal-counts": packed_equal_counts,
    "quadratic": packed_quadratic,
    "padded": padded,
    "padded-quadratic": padded_quadratic,
    "padded-attention": padded_attention,
    "tokens": tokens,
    "fallback": without_native_core,
}
