"""OrchMLLM's experiments in training (its section 8.1 to 8.3), scaled down as a whole, beside the paper's figures.

    python benchmarks/orchmllm.py [--seed N] [--json FILE] [--only NAME] [--lengths FILE] [--steps N]

Real lengths (../shared/data/lengths.csv.gz, or --lengths FILE), a third text, a third images and a third speech, each
divided by 4; the small model of step_time.py with FSDP; 8 examples a rank. Each batch is run in every way, in turns, in
one process group with the same parameters, so losses must agree.

two ranks:  a core each. Ratios are of the slowest rank's seconds, medians over batches.
four ranks: two emulated nodes of 2, which share the cores of this machine. Ratios are of the processor seconds of the
            busiest rank, as what ranks wait for is not seen where they share cores.

The paper has 128 and 2,560 H100s and models of 10 to 84 B parameters: a goal is its sign (it gains), not its size,
which stands beside it. Ablations are of `method = "per_phase"`, which is the paper's; "auto" is Motet's default.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rows import Row, finish, options, show
from step_time import Options, measure

APART = {"method": "per_phase"}
WAYS = {
    "off": {"phases": "off"},
    "backbone": {"phases": "backbone"},
    "auto": {},
    "per phase": APART,
    "all packed": APART | {"policy": "packed"},
    "all padded": APART | {"policy": "padded"},
    "all-gather": APART | {"communicator": "all_gather"},
    "not node-wise": APART | {"node_wise": False},
}
"""What a table [balance] of a recipe would hold."""
FASTER = {
    "unbalanced over balanced (Figures 8 and 9; paper: 1.4 to 2.0)": ("off", "auto"),
    "backbone alone over balanced (Figure 10; paper: above 1)": ("backbone", "auto"),
    "encoders packed over tailored (Figure 11; paper: above 1)": ("all packed", "per phase"),
    "encoders padded over tailored (Figure 11; paper: above 1)": ("all padded", "per phase"),
    "all-gather over all-to-all (Figure 12; paper: above 1)": ("all-gather", "per phase"),
}
MAX_OVERHEAD = 0.005
"""Motet's own goal for what balancing adds to the critical path; the paper's Table 2 has 0.4 to 1.3 % of the forward
pass."""


def run_rank(rank: int, num_ranks: int, rendezvous: str, options: Options, out: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=num_ranks, init_method=rendezvous)
    figures, _ = measure(torch.device("cpu"), options, WAYS)
    if rank == 0:
        out.write_text(json.dumps(figures), encoding="utf-8")
    dist.destroy_process_group()


def rows_of(name: str, num_ranks: int, options: Options) -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "figures.json"
        mp.spawn(run_rank, (num_ranks, f"file://{folder}/rendezvous", options, out), nprocs=num_ranks)
        figures = json.loads(out.read_text(encoding="utf-8"))
    has_cores = not options.ranks_per_node
    seconds = "step_s" if has_cores else "cpu_s"
    for what, (slower, faster) in FASTER.items():
        ratio = float(np.median(np.divide(figures[slower][seconds], figures[faster][seconds])))
        yield Row(f"{name}: {what}", ratio, 1.0, ratio >= 1.0)
    if has_cores:
        share = figures["auto"]["share"]
        yield Row(f"{name}: what balancing adds to the critical path, share (Table 2)", share, MAX_OVERHEAD)
    else:
        crossing = {way: figures[way]["crossing_bytes"] for way in ("per phase", "not node-wise")}
        left = crossing["per phase"] / crossing["not node-wise"]
        yield Row(
            f"{name}: outputs that leave their node, node-wise over not (Figure 13; paper: 0.28 to 0.56)", left, 1.0
        )
        moved = figures["per phase"]["moved_bytes"] / figures["all-gather"]["moved_bytes"]
        yield Row(f"{name}: bytes of outputs, all-to-all over all-gather", moved, 1.0)
    off = np.array(figures["off"]["losses"])
    worst = max(float(np.abs(figures[way]["losses"] / off - 1).max()) for way in WAYS)
    yield Row(f"{name}: largest relative difference of losses", worst, 1e-5)


def main() -> None:
    parser = options(__doc__, "'two ranks' or 'four ranks', or a part of it")
    parser.add_argument("--steps", type=int, default=12, help="batches, each run in all ways")
    asked = parser.parse_args()
    subjects = {"two ranks": (2, 0), "four ranks": (4, 2)}
    chosen = {name: sizes for name, sizes in subjects.items() if asked.only in name}
    if not chosen:
        parser.error(f"--only {asked.only}: it is no part of {' or of '.join(subjects)}")
    lengths = str(asked.lengths) if asked.lengths.exists() else ""
    rows: list[Row] = []
    for name, (num_ranks, ranks_per_node) in chosen.items():
        asked_of_steps = Options(lengths, asked.steps, 8, 4, asked.seed, ranks_per_node)
        for row in rows_of(name, num_ranks, asked_of_steps):
            show(row)
            rows.append(row)
    finish(rows, asked.json, seed=asked.seed, nodes="emulated")


if __name__ == "__main__":
    main()
