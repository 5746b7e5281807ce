"""The executor of Plans against torch.distributed.pipelining, and what it costs by itself: 2 gloo ranks, a core each.

    python benchmarks/runtime.py [--pairs 15] [--seed 0] [--json FILE] [--only NAME] [--lengths FILE]

equal:    the same blocks, the same fixed shapes, in each schedule that both have. A pair is one step of each side; who
          is first changes from pair to pair. The result is the median of ours over theirs.
ragged:   sequences of real lengths (../shared/data/lengths.csv.gz, or --lengths FILE). torch's stages take one shape,
          so its sequences are padded to the longest of the run; Motet's are not.
overhead: time of an action in which no module works, microseconds: all of rank 0's step but the passes of modules, over
          its actions. Processor time of its thread says what is done; waiting for the other rank takes none. By the
          clock there are also waits for the sums at the end of a step, which stand beside, and not those for messages.
          Part of it is torch's own, whoever calls: messages and their memory, graphs that are let go, the norm, a sum.
          A loop that makes the same calls and nothing else runs the same steps by hand, in turn, and tells that part.
          What is above it is the executor's own; the goal for that is 1 % of an action of 10 ms. torch's schedules
          have neither sums nor the gradients' norm.

Both sides run the same parts of one HF Qwen2 model (runtime_work.py), with equal weights, and their losses must agree.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch.multiprocessing as mp
from executor import interval
from rows import Row, finish, options, show
from runtime_work import IN_HALVES, SCHEDULES, Work, lengths_of, run_rank

NUM_RANKS = 2
MOST = 1.02
"""Of torch's step time."""
ACTION_S = 0.01
OVERHEAD = 0.01


def measured(work: Work) -> dict[str, list[float]]:
    """Figures of `runtime_work.run_rank`."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "figures.json"
        mp.spawn(run_rank, (NUM_RANKS, f"file://{folder}/rendezvous", work, out), nprocs=NUM_RANKS)
        return json.loads(out.read_text(encoding="utf-8"))


def compared(name: str, figures: dict[str, list[float]], most: float) -> Iterator[Row]:
    """Rows of pairs of steps."""
    ratios = [ours / theirs for ours, theirs in zip(figures["ours_s"], figures["theirs_s"])]
    low, high = interval(ratios)
    yield Row(f"{name}: step time, of torch's", statistics.median(ratios), most)
    yield Row(f"{name}: 95 % interval, low", low)
    yield Row(f"{name}: 95 % interval, high", high)
    processor = [ours / theirs for ours, theirs in zip(figures["ours_processor_s"], figures["theirs_processor_s"])]
    yield Row(f"{name}: processor time, of torch's", statistics.median(processor))


def overhead(schedule: str, figures: dict[str, list[float]]) -> Iterator[Row]:
    """Rows of what an action takes outside modules."""
    microseconds = {name: 1e6 * statistics.median(each) for name, each in figures.items()}
    goal = 1e6 * ACTION_S * OVERHEAD
    name = f"{schedule}, overhead: microseconds an action"
    own = [1e6 * (ours - by_hand) for ours, by_hand in zip(figures["ours_outside_s"], figures["by_hand_outside_s"])]
    low, high = interval(own)
    yield Row(f"{name}, of the processor, own", statistics.median(own), goal)
    yield Row(f"{name}, of the processor, own: 95 % interval, low", low)
    yield Row(f"{name}, of the processor, own: 95 % interval, high", high)
    yield Row(f"{name}, of the processor, torch's calls by hand", microseconds["by_hand_outside_s"])
    yield Row(f"{name}, of the processor, both", microseconds["ours_outside_s"])
    yield Row(f"{name}, of the processor, of these in isend and irecv", microseconds["messages_s"])
    yield Row(f"{name}, of the processor, of these in the norm of gradients", microseconds["norm_s"])
    yield Row(f"{name}, of the processor, torch's schedules", microseconds["theirs_outside_s"])
    yield Row(f"{name}, by the clock, with sums", microseconds["overhead_s"])
    yield Row(f"{name}, by the clock, of these in sums over ranks", microseconds["sums_s"])


def main() -> None:
    parser = options(__doc__, "a part of the name of a row, e.g. equal or '1f1b, ragged'")
    parser.add_argument("--pairs", type=int, default=15, help="steps of each side; 6 or more")
    asked = parser.parse_args()
    if asked.pairs < 6:
        parser.error("--pairs must be 6 or more: fewer have no interval of 95 %.")
    ragged = lengths_of(asked.lengths, asked.seed) if asked.lengths.exists() else None
    rows: list[Row] = []
    for schedule in SCHEDULES:
        subjects = {f"{schedule}, equal lengths": (None, MOST), f"{schedule}, ragged lengths": (ragged, 1.0)}
        for name, (lengths, most) in subjects.items():
            has_overhead = lengths is None and schedule not in IN_HALVES
            if asked.only not in name and not (has_overhead and asked.only in f"{schedule}, overhead"):
                continue
            if lengths is None and "ragged" in name:
                print(f"{name}: there is no table {asked.lengths}; left out")
                continue
            figures = measured(Work(schedule, asked.pairs, asked.seed, lengths))
            found = list(compared(name, figures, most)) if asked.only in name else []
            if has_overhead:
                found += overhead(schedule, figures)
            for row in found:
                show(row)
                rows.append(row)
    finish(rows, asked.json, seed=asked.seed, pairs=asked.pairs)


if __name__ == "__main__":
    main()
