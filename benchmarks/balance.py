"""How long each balancing algorithm takes and how even its loads are, beside what else can be installed from PyPI.

    .venv/bin/python benchmarks/balance.py [--only packed tokens] [--peers-python peers/bin/python] [--out balance.json]

One core, fixed seeds. Lengths are log-normal, and drawn from a table of real ones where it is at hand (--lengths).
Times are medians over batches, of the whole call from Python. "over" is the largest load over the proven lower bound,
less 1 (of tokens: over the mean). Peers are measured on up to 3 of the batches; one that takes longer than --limit is
stopped, and left out on larger batches. benchmarks/requirements.txt installs them.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from measure import Case, Peers, Row, measure, table_of
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import Progress

from motet.analyze.lengths import read_lengths
from motet.analyze.mixture import Caps, Mixture
from motet.balance import Cost, Packed, Padded, Segments, assign, distribute_tokens
from motet.core.assignment import Assignment

REAL = Path(__file__).parents[2] / "shared" / "data" / "lengths.csv.gz"
SIZES = ((64, 60), (128, 75), (512, 60), (2560, 80))
"""Ranks, items a rank; ascending, so that a peer that is stopped is not tried on more."""

ANY_COUNTS = (
    "heapq LPT", "verl KK", "prtpy greedy", "prtpy KK", "prtpy multifit", "numberpartitioning greedy",
    "numberpartitioning KK", "binpacking",
)  # fmt: skip

Draw = Callable[[int, np.random.Generator], NDArray[np.int64]]


@dataclass(frozen=True)
class Sources:
    """What batches of lengths are drawn from, by name."""

    sequences: dict[str, Draw]
    clips: dict[str, Draw]


def sources_of(mixture: Mixture | None) -> Sources:
    sequences: dict[str, Draw] = {
        "log-normal": lambda n, rng: np.clip(rng.lognormal(6.3, 1.1, n), 16, 4096).astype(np.int64)
    }
    clips: dict[str, Draw] = {"normal": lambda n, rng: np.clip(rng.normal(1100, 400, n), 300, 3000).astype(np.int64)}
    if mixture is not None:
        sequences["real"] = lambda n, rng: mixture.draw(n, rng, Caps())[:, 0]
        clips["real"] = lambda n, rng: rng.choice(mixture.speech[:, 2], n)
    return Sources(sequences, clips)


# One section an algorithm: what is measured, on what, beside whom.


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
    """Blocks of a context-parallel sequence; "over" the mean. heapq LPT is given the pairs, which it cannot count."""
    for num_tokens, num_ranks, block in ((2**16, 64, 128), (2**16, 64, 64), (2**20, 64, 128), (2**20, 512, 128)):
        for kind, draw in MASKS.items():
            for who, method in (("motet", "lpt"), ("zigzag", "zigzag"), ("random", "random")):
                yield Case(
                    "tokens",
                    f"{num_ranks} x {num_tokens // num_ranks // block} of {block}",
                    kind,
                    draw=lambda rng, draw=draw, n=num_tokens: Segments.of_documents(draw(n, rng)),
                    solve=lambda s, n=num_ranks, b=block, method=method: distribute_tokens(s, n, b, method),
                    over=pairs_over_mean,
                    who=who,
                    num_ranks=num_ranks,
                    peers=("heapq LPT",) if who == "motet" else (),
                    weights=lambda segments, block=block: block_pairs(segments, block),
                )


def pairs_over_mean(found: Assignment) -> float:
    pairs = found.loads.reshape(found.num_ranks, -1)[:, 0]  # a peer's loads have no second column
    return float(pairs.max() / pairs.mean()) - 1


def block_pairs(segments: Segments, block: int) -> NDArray[np.int64]:
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
    "tokens": tokens,
}


def device() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())
    return f"one core of {model or platform.machine()}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS), help="sections to run")
    parser.add_argument("--lengths", type=Path, default=REAL, help="a CSV table of real lengths, gzipped")
    parser.add_argument("--repeats", type=int, default=20, help="batches of each size and source")
    parser.add_argument("--limit", type=float, default=10, help="seconds after which a peer is stopped")
    parser.add_argument("--peers-python", default=sys.executable, help="the Python that has the peers installed")
    parser.add_argument("--out", type=Path, help="write all rows to this JSON file")
    options = parser.parse_args()
    console = Console(width=130)
    mixture = Mixture.of(read_lengths(options.lengths)) if options.lengths.is_file() else None
    if mixture is None:
        console.print(f"No table of real lengths at {options.lengths}: sampled ones only.")
    cases = [case for name in options.only for case in SECTIONS[name](sources_of(mixture))]
    peers = Peers(options.peers_python, options.limit)
    rows: list[Row] = []
    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=len(cases))
        for case in cases:

            def starts(who: str, case: Case = case) -> None:
                progress.update(task, description=f"{case.algorithm}, {case.size}, {case.source}: {who}")

            rows += measure(case, options.repeats, peers, starts)
            progress.advance(task)
    peers.close()
    console.print(table_of(rows, options.limit))
    console.print(device(), *(f"{name}: {what}" for name, what in peers.absent.items()), sep="\n")
    if options.out:
        about = {"device": device(), "python": platform.python_version(), "limit_s": options.limit}
        options.out.write_text(json.dumps(about | {"rows": [asdict(row) for row in rows]}, indent=1) + "\n")


if __name__ == "__main__":
    main()
