"""Four ways to form minibatches, as in OmniBal's Table 3, and how long the grouping of 1.2 million samples takes.

    .venv/bin/python benchmarks/grouping.py [--seed N] [--json FILE] [--only NAME] [--num-devices 32]

Samples are InternVL's where the table of lengths is at hand, else sampled ones of that shape: images are tiles of 1,025
tokens to the vision encoder, and tokens of the sequence to the LLM. Random, length-grouped and device-grouped
minibatches have four samples, padded to the longest; groups are packed. PadRatio VIT is what padding all samples of a
minibatch to as many tiles would cost.
"""

from __future__ import annotations

import csv
import gzip
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table
from rows import OF_ROWS, Row, finish, options

from motet.balance import dist_ratio, group, pad_ratio, suggest_caps
from motet.core.arrays import Int64Array

TILE_TOKENS = 1025
BATCH_SIZE = 4

Samples = Int64Array  # [num_samples, 2]: tiles and tokens


def internvl(path: Path) -> Samples:
    """The InternVL rows of a table of lengths."""
    with gzip.open(path, "rt") as table:
        rows = [row for row in csv.DictReader(table) if row["source"].startswith("internvl")]
    return np.array([(int(row["num_images"]), int(row["image_tokens"]) + int(row["text_tokens"])) for row in rows])


def sampled(num_samples: int, rng: np.random.Generator) -> Samples:
    tiles = rng.choice([0, 1, 3, 5, 7], num_samples, p=[0.15, 0.15, 0.3, 0.3, 0.1])
    return np.stack([tiles, 256 * tiles + np.clip(rng.lognormal(4.6, 0.9, num_samples), 16, 2048).astype(int)], axis=1)


def random_batches(samples: Samples, num_devices: int, rng: np.random.Generator) -> Int64Array:
    """Sample numbers of each minibatch, int [num_batches, BATCH_SIZE]; devices take batches in turn."""
    count = len(samples) // (BATCH_SIZE * num_devices) * BATCH_SIZE * num_devices
    return rng.permutation(len(samples))[:count].reshape(-1, BATCH_SIZE)


def length_grouped(samples: Samples, num_devices: int, rng: np.random.Generator) -> Int64Array:
    """Neighbours by size in a minibatch; minibatches in random order."""
    count = len(samples) // (BATCH_SIZE * num_devices) * BATCH_SIZE * num_devices
    by_size = np.lexsort((samples[:, 1], samples[:, 0]))[:count]
    return rng.permutation(by_size.reshape(-1, BATCH_SIZE))


def device_grouped(samples: Samples, num_devices: int, rng: np.random.Generator) -> Int64Array:
    """Neighbours by size at the same place of all devices' minibatches; a minibatch holds what comes."""
    count = len(samples) // (BATCH_SIZE * num_devices) * BATCH_SIZE * num_devices
    by_size = np.lexsort((samples[:, 1], samples[:, 0]))[:count]
    rows = rng.permutation(by_size.reshape(-1, num_devices))
    return rows.reshape(-1, BATCH_SIZE, num_devices).transpose(0, 2, 1).reshape(-1, BATCH_SIZE)


@dataclass(frozen=True)
class Minibatches:
    """Minibatches formed in one way; of each pair the first figure is of the vision encoder, the second of the LLM.

    longest: tokens of the longest. pads: PadRatio. waits: DistRatio.
    """

    name: str
    size: float
    longest: tuple[int, int]
    pads: tuple[float, float]
    waits: tuple[float, float]

    def cells(self) -> list[str]:
        """A line of the table."""
        longest = [f"{size / 1024:.1f} K" for size in self.longest]
        return [self.name, f"{self.size:.2f}", *longest, *(f"{each:.3f}" for each in (*self.pads, *self.waits))]

    def rows(self) -> list[Row]:
        """Its ratios as rows."""
        figures = {"PadRatio": self.pads, "DistRatio": self.waits}
        return [
            Row(f"{self.name}: {what} {part}", value)
            for what, pair in figures.items()
            for part, value in zip(("VIT", "LLM"), pair, strict=True)
        ]


def padded(name: str, samples: Samples, batches: Int64Array, num_devices: int) -> Minibatches:
    offsets = np.arange(0, batches.size + 1, BATCH_SIZE)
    tiles, tokens = samples[batches, 0], samples[batches, 1]
    pads = (pad_ratio(tiles.ravel(), offsets), pad_ratio(tokens.ravel(), offsets))
    totals = [tiles.sum(axis=1) * TILE_TOKENS, tokens.max(axis=1) * BATCH_SIZE]
    return minibatches(name, BATCH_SIZE, totals, pads, num_devices)


def grouped(samples: Samples, num_devices: int, rng: np.random.Generator) -> tuple[Minibatches, str]:
    caps = suggest_caps(samples[:, 0], samples[:, 1])
    found = group(samples[:, 0], samples[:, 1], caps.max_vision, caps.max_text)
    order = rng.permutation(found.num_groups)[: found.num_groups // num_devices * num_devices]
    totals = [found.totals(samples[:, 0])[order] * TILE_TOKENS, found.totals(samples[:, 1])[order]]
    size = len(samples) / found.num_groups
    return minibatches("groups (ISF)", size, totals, (0.0, 0.0), num_devices), (
        f"{caps}: {found.num_groups} groups, {found.num_full} full, {len(found.leftover)} leftover"
    )


def minibatches(
    name: str, size: float, totals: list[Int64Array], pads: tuple[float, float], num_devices: int
) -> Minibatches:
    """totals: tokens of each minibatch, of the vision encoder and of the LLM."""
    vision, text = totals
    waits = (dist_ratio(vision.reshape(-1, num_devices)), dist_ratio(text.reshape(-1, num_devices)))
    return Minibatches(name, size, (int(vision.max()), int(text.max())), pads, waits)


def seconds_of_grouping(samples: Samples, num_samples: int, rng: np.random.Generator) -> float:
    drawn = samples[rng.integers(0, len(samples), num_samples)]
    vision, text = drawn[:, 0].copy(), drawn[:, 1].copy()
    caps = suggest_caps(vision, text)
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        group(vision, text, caps.max_vision, caps.max_text)
        seconds.append(time.perf_counter() - start)
    return float(np.median(seconds))


def main() -> None:
    parser = options(__doc__, OF_ROWS)
    parser.add_argument("--num-devices", type=int, default=32, help="data-parallel devices that wait for each other")
    asked = parser.parse_args()
    rng = np.random.default_rng(asked.seed)
    source = asked.lengths if asked.lengths.exists() else "sampled lengths"
    samples = internvl(asked.lengths) if asked.lengths.exists() else sampled(60_000, rng)
    columns = ("AVE-BS", "longest VIT", "longest LLM", "PadRatio VIT", "PadRatio LLM", "DistRatio VIT", "DistRatio LLM")
    table = Table("minibatches", *columns)
    ways = []
    for name, batches in (
        ("random", random_batches), ("length-grouped", length_grouped), ("device-grouped", device_grouped)
    ):  # fmt: skip
        ways.append(padded(name, samples, batches(samples, asked.num_devices, rng), asked.num_devices))
    last, groups = grouped(samples, asked.num_devices, rng)
    rows: list[Row] = []
    for way in (*ways, last):
        table.add_row(*way.cells())
        rows += way.rows()
    console = Console(width=130)
    console.print(table)
    console.print(f"{len(samples)} samples of {source}; {groups}")
    rows.append(Row("seconds to group 1,200,000 samples", seconds_of_grouping(samples, 1_200_000, rng)))
    console.print(f"grouping 1,200,000 samples: {rows[-1].value:.3f} s, median of 5")
    finish([row for row in rows if asked.only in row.name], asked.json, seed=asked.seed)


if __name__ == "__main__":
    main()
