"""What adaptive recomputation gains: step times with nothing, all, one number and each microbatch's own recomputed.

    python benchmarks/recompute.py [--seed N] [--json FILE] [--only NAME] [--lengths FILE] [--steps N] [--memory SHARE]

2 gloo ranks of this machine, 4 microbatches of 2 examples a rank, the small model of step_time.py, and real lengths
(../shared/data/lengths.csv.gz, or --lengths FILE), each kind of example equally often, divided by 8. The memory that a
rank may fill is stated, and not filled: at --memory 0 it is what the largest microbatch of all steps takes with
everything recomputed, at 1 what it takes with nothing recomputed. "one number" recomputes in every microbatch what the
largest one needs, as OmniBal does (section 4.3); "each its own" is `[fsdp] recompute = "auto"`. Each step is run in all
ways, in turns, in one run; ratios of the slowest rank's times are medians over steps, with an interval that holds the
true one with a probability of 95 %. Losses must agree. On a machine that does other work as well, the processor time of
the busiest rank tells more than step times. It takes a few minutes on two idle cores.

OmniBal (Tables 5 and 7): from 29.0 to 21.3 GPU-days with memory balance, a ratio of 0.73, beside everything recomputed;
there in a pipeline on GPUs, whose microbatches ISF has made alike.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from executor import interval
from rows import Row, finish, options, show
from step_choice import parts_of
from step_time import MEL_BINS, MODEL, PATCH_DIM, VOCABULARY, Batch, read_table

from motet.assign.step import joined
from motet.assign.whole_step import DecidedStep, decide_step
from motet.core.cluster import Cluster, Device, Link
from motet.core.plan import Unit
from motet.core.workload import Workload, home_ranks
from motet.cost.analytic import Analytic
from motet.cost.memory import USABLE_MEMORY
from motet.dispatch import BalanceConfig, RankBatch
from motet.models.build import build_mllm
from motet.models.spec import model_spec
from motet.planner.data_parallel.loads import load_of, state_of
from motet.planner.data_parallel.recomputation import fit_recomputation
from motet.planner.job import Job
from motet.runtime.fsdp import FSDPConfig, shard
from motet.runtime.mesh import build_mesh
from motet.runtime.step import TrainStep
from motet.train.balancing import build_orchestrator
from motet.train.recompute import AutoRecompute

NUM_RANKS, MICROBATCHES, PER_RANK, SHRINK = 2, 4, 2, 8
WAYS = ("nothing", "all", "one number", "each its own")
PUBLISHED = 21.3 / 29.0


def job_with(spec: Any, batch: Batch, memory_bytes: float) -> Job:
    device = Device("cpu", {"fp32": 4e10}, int(memory_bytes / USABLE_MEMORY), 2e8)
    nodes = Cluster(device, 1, NUM_RANKS, Link(1e9, 0.0), Link(1e9, 0.0))
    return Job(spec, nodes, Workload("drawn", batch.lengths), 1, Analytic(nodes, "fp32"), "fp32")


def chosen(spec: Any, batch: Batch, steps: Sequence[DecidedStep], share: float) -> AutoRecompute:
    """The recomputation for a memory between what all and nothing recomputed take in the largest microbatch."""
    unit = Unit("all", (spec.num_blocks,), dp=NUM_RANKS, zero=3)
    parts = [part for step in steps for part in step.microbatches]
    assignment = joined([part.lengths for part in parts], [part.decision.assignments for part in parts])

    def fit(memory_bytes: float, mode: Any) -> Any:
        job = job_with(spec, batch, memory_bytes)
        return job, fit_recomputation(load_of(job, assignment, unit), state_of(job, unit), job.capacity_bytes, mode)

    least, most = (fit(1e12, mode)[1].peak_bytes for mode in ("full", "none"))
    job, largest = fit(least + share * (most - least) + 1, "least")
    return AutoRecompute(None, job, unit, largest, len(steps), len(steps))  # type: ignore[arg-type]


def in_way(way: str, batch: RankBatch, auto: AutoRecompute, rank: int) -> RankBatch:
    if way == "each its own":
        return auto.of_rank(batch, rank)
    numbers: Mapping[str, Mapping[str, int]] = {
        "nothing": {},
        "all": auto.job.model.num_blocks,
        "one number": auto.num_blocks,
    }
    return replace(batch, recompute=numbers[way])


def run_rank(
    rank: int, num_ranks: int, rendezvous: str, path: Path, seed: int, num_steps: int, share: float, out: Path
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=num_ranks, init_method=rendezvous)
    device = torch.device("cpu")
    mesh, rng = build_mesh(device), np.random.default_rng(seed)
    groups, model = read_table(str(path)), build_mllm(MODEL, VOCABULARY)
    pools = {
        "image": rng.standard_normal((1 << 16, PATCH_DIM), np.float32),
        "audio": rng.standard_normal((1 << 14, MEL_BINS), np.float32),
    }
    deciding = build_orchestrator(BalanceConfig(defer="off"), model, num_ranks, device, torch.float32)
    spec = model_spec(model)
    shard(model, mesh, FSDPConfig())
    step = TrainStep(model, mesh, torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0), max_grad_norm=1.0)
    home = np.tile(home_ranks(num_ranks * PER_RANK, num_ranks), MICROBATCHES)
    batches, steps = [], []
    for _ in range(num_steps + 1):
        kinds = rng.integers(0, len(groups), num_ranks * PER_RANK * MICROBATCHES)
        rows = [groups[kind][rng.integers(len(groups[kind]))] for kind in kinds]
        batches.append(Batch(rows, model, num_ranks, SHRINK, pools))
        steps.append(decide_step(deciding, replace(batches[-1].lengths, home=home), MICROBATCHES))
    auto = chosen(spec, batches[0], steps, share)
    figures, decide_s, own = [], [], []
    for number, (batch, decided) in enumerate(zip(batches, steps, strict=True)):
        loaded = list(parts_of(batch, replace(batch.lengths, home=home), decided, mesh))
        figure = {}
        for way in WAYS[number % len(WAYS) :] + WAYS[: number % len(WAYS)]:
            start_s = time.perf_counter()
            parts = [in_way(way, part, auto, rank) for part in loaded]
            if way == "each its own":
                decide_s.append(time.perf_counter() - start_s)
                own += [sum((part.recompute or {}).values()) for part in parts]
            dist.barrier(mesh.group)
            start_s, start_busy_s = time.perf_counter(), time.process_time()
            result = step.run(parts, number)
            figure[way] = (time.perf_counter() - start_s, time.process_time() - start_busy_s, result.loss)
        figures.append(figure)
        if rank == 0:
            print(f"step {number} of {num_steps}: load {os.getloadavg()[0]:.1f}", flush=True)
    everywhere: list[Any] = [None] * num_ranks
    dist.all_gather_object(everywhere, (figures, decide_s, own), group=mesh.host_group)
    if rank == 0:
        taken = np.array([[[figure[way] for way in WAYS] for figure in one] for one, _, _ in everywhere])
        np.savez(
            out,
            taken=taken[:, 1:],  # The first step warms up.
            decide_s=np.array([seconds[1:] for _, seconds, _ in everywhere]),
            one_share=sum(auto.num_blocks.values()) / sum(spec.num_blocks.values()),
            own_share=np.mean([counts for _, _, counts in everywhere]) / sum(spec.num_blocks.values()),
        )
    dist.destroy_process_group()


def measured(path: Path, seed: int, num_steps: int, share: float) -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "figures.npz"
        arguments = (NUM_RANKS, f"file://{folder}/rendezvous", path, seed, num_steps, share, out)
        mp.spawn(run_rank, arguments, nprocs=NUM_RANKS)
        found = dict(np.load(out))
    yield from rows_of(**found)


def rows_of(taken: Any, decide_s: Any, one_share: float, own_share: float) -> Iterator[Row]:
    """taken: [ranks, steps, ways, (step seconds, processor seconds, loss)]. decide_s: [ranks, steps]."""
    slowest = dict(zip(("step", "processor"), taken.max(axis=0)[..., :2].transpose(2, 1, 0), strict=True))
    for base in ("nothing", "all"):
        for kind, by_way in slowest.items():
            for way in WAYS[WAYS.index(base) + 1 :]:
                ratios = (by_way[WAYS.index(way)] / by_way[WAYS.index(base)]).tolist()
                name = f"{kind}: {way} recomputed, over {base}"
                yield Row(name, float(np.median(ratios)), 1.0 if base == "all" else None)
                for end, value in zip(("low", "high"), interval(ratios), strict=True):
                    yield Row(f"{name}: 95 % interval, {end}", value)
    yield Row("published: memory balance of OmniBal, over all", PUBLISHED)
    yield Row("blocks: share recomputed, one number", float(one_share))
    yield Row("blocks: share recomputed, each its own", float(own_share), float(one_share))
    deciding = decide_s.max(axis=0) / np.median(slowest["step"][WAYS.index("each its own")])
    yield Row("deciding: seconds of a step's microbatches over the step's", float(np.median(deciding)))
    losses = taken[0, :, :, 2]
    yield Row("losses: largest relative difference", float(np.abs(losses / losses[:, :1] - 1).max()), 1e-5)


def main() -> None:
    parser = options(__doc__, "the start of the rows' names")
    parser.add_argument("--steps", type=int, default=20, help="steps that are measured in all ways, 6 or more")
    parser.add_argument(
        "--memory", type=float, default=0.5, help="between what all (0) and nothing (1) recomputed take"
    )
    asked = parser.parse_args()
    if asked.steps < 6:
        parser.error("--steps must be 6 or more: fewer have no interval of 95 %.")
    rows = [
        row for row in measured(asked.lengths, asked.seed, asked.steps, asked.memory) if row.name.startswith(asked.only)
    ]
    if not rows:
        parser.error(f"--only {asked.only}: no row has a name that starts so")
    for row in rows:
        show(row)
    finish(rows, asked.json, seed=asked.seed, memory=asked.memory)


if __name__ == "__main__":
    main()
