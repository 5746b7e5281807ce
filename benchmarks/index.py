"""What an index of a million examples costs: time to open it, and memory of a node with several processes.

    python benchmarks/index.py [--examples 1000000] [--processes 8] [--json FILE]

Writes an index of examples as long as real ones (half of them with one to three items) to a temporary folder, then
starts processes that each open it as a training rank does: the dataset with a bound on the sequence length, so that
every length is looked at; then 200 batches of 512 examples, and the tokens and media places of 500 examples. Memory is
the growth of the proportional set size (PSS: shared pages count once in the sum) over that of the imports alone, with
all processes alive.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from rows import OF_ROWS, Row, finish, options

from motet.core.example import TokenSequence
from motet.data.audio import AudioTransform
from motet.data.dataset import Dataset
from motet.data.images import ImageTransform
from motet.data.index import FORMAT_VERSION, Index, IndexRow
from motet.data.index_build import publish_index
from motet.data.index_entries import PackedColumns
from motet.data.modality import Modality
from motet.data.order import GlobalOrder

NUM_BATCHES, BATCH, NUM_READ, MAX_LENGTH = 200, 512, 500, 4096


def write_index(folder: Path, num_examples: int, seed: int) -> Path:
    """An index of `num_examples`, by drawn numbers; the rows differ in length, not in meaning."""
    rng = np.random.default_rng(seed)
    num_items = rng.choice([0, 1, 2, 3], num_examples, p=[0.5, 0.35, 0.1, 0.05])
    num_tokens = np.minimum(rng.lognormal(5, 1, num_examples), 8000).astype(np.int64) + num_items + 1
    modality = rng.integers(0, 2, num_items.sum()).astype(np.int8)
    images = rng.integers(64, 2048, (len(modality), 2))
    clips = np.stack([rng.integers(8_000, 480_000, len(modality)), np.full(len(modality), 16_000)], axis=1)
    raw = np.where(modality[:, None] == 0, images, clips)
    row_bytes = np.zeros(num_examples, dtype=np.int64)
    with (folder / "lengths.rows").open("wb") as rows:
        for example in range(num_examples):
            count = int(num_items[example])
            text = TokenSequence(
                np.zeros(num_tokens[example], dtype=np.int64),
                np.ones(num_tokens[example], dtype=bool),
                ("image",) * count,
                np.arange(count),
            )
            row = IndexRow(
                f"lengths.jsonl, line {example + 1}",
                b'{"id": "%d"}' % example,
                [("images/a.png", "", 0, -1)] * count,
                text,
            ).pack()
            row_bytes[example] = rows.write(row)
    examples = np.stack([row_bytes, num_tokens, num_tokens // 2, num_items, np.zeros_like(row_bytes)]).astype(np.int32)
    path = folder / "lengths.arrow"
    about = {"format": FORMAT_VERSION, "rows": "lengths.rows", "identity": "benchmark"}
    publish_index(path, about, [PackedColumns(examples, modality, raw, np.zeros((len(raw), 3), np.int32), [], b"")])
    return path


def memory_mb() -> float:
    fields = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in fields if line.startswith("Pss:")) / 1024


def use(path: Path) -> None:
    """One process: says what it measured, step by step, when it is told to go on."""
    modalities = {
        "image": Modality(
            ImageTransform(14, 2), lambda sizes: sizes.prod(axis=1) // 4, lambda sizes: sizes.prod(axis=1)
        ),
        "audio": Modality(AudioTransform(), lambda sizes: -(-sizes[:, 0] // 4), lambda sizes: sizes[:, 0]),
    }
    report(memory_mb=memory_mb())
    start, start_cpu = time.perf_counter(), time.process_time()
    index = Index(path, path.parent)
    open_s = time.perf_counter() - start
    dataset = Dataset([index], None, modalities, max_sequence_length=MAX_LENGTH)  # type: ignore[arg-type]
    dataset_s, dataset_cpu_s = time.perf_counter() - start, time.process_time() - start_cpu
    order = GlobalOrder(dataset.num_examples, seed=1)
    start = time.perf_counter()
    for batch in range(NUM_BATCHES):
        dataset.batch_lengths(order.take(batch * BATCH, BATCH), num_ranks=64)
    batch_s = (time.perf_counter() - start) / NUM_BATCHES
    start = time.perf_counter()
    for example in order.take(0, NUM_READ).tolist():
        dataset.tokens(example)
        dataset.media_refs(example)
    read_s = (time.perf_counter() - start) / NUM_READ
    report(
        open_s=open_s,
        dataset_s=dataset_s,
        dataset_cpu_s=dataset_cpu_s,
        batch_s=batch_s,
        read_s=read_s,
        kept=dataset.num_examples,
    )
    report(memory_mb=memory_mb())


def report(**figures: float) -> None:
    print(json.dumps(figures), flush=True)
    sys.stdin.readline()


def main() -> None:
    arguments = options(__doc__, OF_ROWS, reads_lengths=False)
    arguments.add_argument("--examples", type=int, default=1_000_000)
    arguments.add_argument("--processes", type=int, default=8)
    arguments.add_argument("--use", type=Path, help=argparse.SUPPRESS)
    asked = arguments.parse_args()
    if asked.use:
        use(asked.use)
        return
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        path = write_index(Path(folder), asked.examples, asked.seed)
        size = path.stat().st_size / 2**20
        print(f"{asked.examples:,} examples written in {time.perf_counter() - start:.0f} s: {size:.0f} MB of lengths")
        command = [sys.executable, __file__, "--use", str(path)]
        processes = [
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            for _ in range(asked.processes)
        ]
        before, measured, after = (step(processes) for _ in range(3))
        for process in processes:
            process.wait()
    grown = sum(figures["memory_mb"] for figures in after) - sum(figures["memory_mb"] for figures in before)
    worst = {name: max(figures[name] for figures in measured) for name in measured[0]}
    print(f"open the index          {worst['open_s'] * 1e3:8.1f} ms   (slowest of {asked.processes} processes)")
    print(f"open the dataset        {worst['dataset_s'] * 1e3:8.1f} ms   every length looked at")
    print(f"  of it CPU time        {worst['dataset_cpu_s'] * 1e3:8.1f} ms   {worst['kept']:,} examples kept")
    print(f"lengths of {BATCH} examples {worst['batch_s'] * 1e3:8.2f} ms")
    print(f"tokens, media of one    {worst['read_s'] * 1e3:8.3f} ms")
    print(f"memory of the node      {grown:8.1f} MB   for all {asked.processes} processes together")
    rows = [
        Row("ms to open the index", 1e3 * worst["open_s"]),
        Row("ms to open the dataset", 1e3 * worst["dataset_s"]),
        Row("ms of the processor to open the dataset", 1e3 * worst["dataset_cpu_s"]),
        Row(f"ms for lengths of {BATCH} examples", 1e3 * worst["batch_s"]),
        Row("ms for tokens and media of one", 1e3 * worst["read_s"]),
        Row("MB of memory of the node", grown),
    ]
    about = {"examples": asked.examples, "processes": asked.processes, "seed": asked.seed}
    finish([row for row in rows if asked.only in row.name], asked.json, **about)


def step(processes: list[subprocess.Popen[str]]) -> list[dict[str, float]]:
    """The next figures of each process; none goes on before all have told theirs."""
    figures = [json.loads(process.stdout.readline()) for process in processes if process.stdout]
    for process in processes:
        if process.stdin:
            process.stdin.write("\n")
            process.stdin.flush()
    return figures


if __name__ == "__main__":
    main()
