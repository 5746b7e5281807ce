"""Four ways to form minibatches, as in OmniBal's Table 3, and how long the grouping of 1.2 million samples takes.

    .venv/bin/python benchmarks/grouping.py [--lengths ../shared/data/lengths.csv.gz] [--num-devices 32]

Samples are InternVL's where the table of lengths is at hand, else sampled ones of that shape: images are tiles of 1,025
tokens to the vision encoder, and tokens of the sequence to the LLM. Random, length-grouped and device-grouped
minibatches have four samples, padded to the longest; groups are packed. PadRatio VIT is what padding all samples of a
minibatch to as many tiles would cost.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import time
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

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


def padded_row(name: str, samples: Samples, batches: Int64Array, num_devices: int) -> list[str]:
    offsets = np.arange(0, batches.size + 1, BATCH_SIZE)
    tiles, tokens = samples[batches, 0], samples[batches, 1]
    pads = [pad_ratio(sizes.ravel(), offsets) for sizes in (tiles, tokens)]
    totals = [tiles.sum(axis=1) * TILE_TOKENS, tokens.max(axis=1) * BATCH_SIZE]
    return row(name, BATCH_SIZE, totals, pads, num_devices)


def group_row(samples: Samples, num_devices: int, rng: np.random.Generator) -> tuple[list[str], str]:
    caps = suggest_caps(samples[:, 0], samples[:, 1])
    found = group(samples[:, 0], samples[:, 1], caps.max_vision, caps.max_text)
    order = rng.permutation(found.num_groups)[: found.num_groups // num_devices * num_devices]
    totals = [found.totals(samples[:, 0])[order] * TILE_TOKENS, found.totals(samples[:, 1])[order]]
    size = len(samples) / found.num_groups
    return row("groups (ISF)", size, totals, [0.0, 0.0], num_devices), (
        f"{caps}: {found.num_groups} groups, {found.num_full} full, {len(found.leftover)} leftover"
    )


def row(name: str, size: float, totals: list[Int64Array], pads: list[float], num_devices: int) -> list[str]:
    longest = [f"{sizes.max() / 1024:.1f} K" for sizes in totals]
    waits = [f"{dist_ratio(sizes.reshape(-1, num_devices)):.3f}" for sizes in totals]
    return [name, f"{size:.2f}", *longest, *(f"{pad:.3f}" for pad in pads), *waits]


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
    lengths = Path(__file__).parents[2] / "shared" / "data" / "lengths.csv.gz"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", default=str(lengths) if lengths.exists() else "", help="table of lengths (csv.gz)")
    parser.add_argument("--num-devices", type=int, default=32, help="data-parallel devices that wait for each other")
    options = parser.parse_args()
    rng = np.random.default_rng(0)
    samples = internvl(Path(options.lengths)) if options.lengths else sampled(60_000, rng)
    columns = ("AVE-BS", "longest VIT", "longest LLM", "PadRatio VIT", "PadRatio LLM", "DistRatio VIT", "DistRatio LLM")
    table = Table("minibatches", *columns)
    for name, batches in (
        ("random", random_batches), ("length-grouped", length_grouped), ("device-grouped", device_grouped)
    ):  # fmt: skip
        table.add_row(*padded_row(name, samples, batches(samples, options.num_devices, rng), options.num_devices))
    last_row, groups = group_row(samples, options.num_devices, rng)
    table.add_row(*last_row)
    console = Console(width=130)
    console.print(table)
    console.print(f"{len(samples)} samples of {options.lengths or 'sampled lengths'}; {groups}")
    console.print(f"grouping 1,200,000 samples: {seconds_of_grouping(samples, 1_200_000, rng):.3f} s, median of 5")


if __name__ == "__main__":
    main()
