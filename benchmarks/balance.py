"""How long `motet.balance.assign` takes and how close to the bound it ends; one core, fixed seeds.

    .venv/bin/python benchmarks/balance.py [--lengths lengths.csv.gz] [--repeats 50]

Without a table of real lengths they are sampled. Times are of the whole call from Python, medians over fresh batches;
"over mean" is the largest load less the mean rounded up, "max/bound" the largest load over the proven lower bound.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from motet.balance import Cost, Packed, Padded, assign

SIZES = [(2560, 80), (512, 60), (128, 75), (64, 60), (64, 4)]  # ranks, items a rank
COSTS: list[tuple[str, Cost]] = [
    ("packed", Packed()),
    ("packed + quadratic", Packed(linear=6 * 1152, quadratic=1)),
    ("padded", Padded()),
]
Sampler = Callable[[int, np.random.Generator], NDArray[np.int64]]


def sampled() -> dict[str, Sampler]:
    """Shapes of real data: chat sequences with a long tail, clips of speech, images of whole tiles."""
    return {
        "sequences": lambda n, rng: np.clip(rng.lognormal(6.3, 1.1, n), 16, 4096).astype(np.int64),
        "audio frames": lambda n, rng: np.clip(rng.normal(1100, 400, n), 300, 3000).astype(np.int64),
        "image tiles": lambda n, rng: 256 * rng.integers(1, 13, n),
    }


def real(path: Path) -> dict[str, Sampler]:
    """A third text, a third image, a third audio, drawn from a table of lengths; sequences are cut at 4096 tokens."""
    by_modality: dict[str, list[tuple[int, int]]] = {"text": [], "image": [], "audio": []}
    with gzip.open(path, "rt") as table:
        for row in csv.DictReader(table):
            image_tokens, frames = int(row["image_tokens"] or 0), int(100 * float(row["audio_seconds"] or 0))
            modality = "audio" if frames else "image" if image_tokens else "text"
            tokens = int(row["text_tokens"] or 0) + image_tokens + frames // 8
            by_modality[modality].append((tokens, frames or image_tokens))
    columns = {modality: np.array(rows, dtype=np.int64) for modality, rows in by_modality.items()}

    def draw(modality: str, column: int, n: int, rng: np.random.Generator) -> NDArray[np.int64]:
        return rng.choice(columns[modality][:, column], n)

    def sequences(n: int, rng: np.random.Generator) -> NDArray[np.int64]:
        thirds = [draw(modality, 0, -(-n // 3), rng) for modality in columns]
        return np.minimum(rng.permutation(np.concatenate(thirds))[:n], 4096)

    return {
        "sequences": sequences,
        "audio frames": lambda n, rng: draw("audio", 1, n, rng),
        "image tokens": lambda n, rng: np.minimum(draw("image", 1, n, rng), 4096),
    }


def measure(sample: Sampler, num_items: int, num_ranks: int, cost: Cost, repeats: int) -> list[str]:
    seconds, over_mean, ratio = [], [], []
    for seed in range(repeats):
        lengths = sample(num_items, np.random.default_rng(seed))
        start = time.perf_counter()
        found = assign(lengths, num_ranks, cost)
        seconds.append(time.perf_counter() - start)
        over_mean.append(int(found.loads.max()) + -int(found.loads.sum()) // num_ranks)
        ratio.append(found.imbalance)
    over = f"{np.median(over_mean):.0f} / {max(over_mean)}" if isinstance(cost, Packed) else ""
    return [f"{1e3 * np.median(seconds):.3f}", over, f"{np.mean(ratio):.6f} / {max(ratio):.6f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=Path, help="a CSV table of real lengths, gzipped")
    parser.add_argument("--repeats", type=int, default=50, help="batches of each kind")
    options = parser.parse_args()
    table = Table("ranks x items", "lengths", "cost", "median ms", "over mean (median / max)", "max/bound (mean / max)")
    samplers = real(options.lengths) if options.lengths else sampled()
    for num_ranks, items_a_rank in SIZES:
        for name, sample in samplers.items():
            for cost_name, cost in COSTS:
                cells = measure(sample, num_ranks * items_a_rank, num_ranks, cost, options.repeats)
                table.add_row(f"{num_ranks} x {items_a_rank}", name, cost_name, *cells)
    Console(width=130).print(table)


if __name__ == "__main__":
    main()
