"""What a step gains if its microbatches are decided at once: as it comes, dealt evenly by work, and with `defer`.

    python benchmarks/step_choice.py [--seed N] [--json FILE] [--only NAME] [--lengths FILE] [--pairs N]

Real lengths (../shared/data/lengths.csv.gz, or --lengths FILE), each kind of example equally often.

predicted: 16 ranks, 8 microbatches, 2 examples a rank and microbatch, on MLLM-10B of OrchMLLM. Predicted seconds of the
           step over the mean of the ranks' work, the median of 20 steps. Nothing is run. `held` is the most activations
           of a rank in a microbatch, over that of the step as it comes, or of one example alone if that is more.
measured:  2 gloo ranks of this machine, 8 microbatches, 1 example a rank and microbatch, a small model (that of
           step_time.py), and the lengths divided by 8. Each step is run as it comes and as decided, in turns, in one
           run; the ratio of the slowest ranks' times is the median over pairs. Losses must agree.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rows import ROOT, Row, finish, options, show
from step_time import MEL_BINS, MODEL, PATCH_DIM, VOCABULARY, Batch, read_table

from motet.analyze.lengths import read_lengths
from motet.assign.balancing import operation_costs
from motet.assign.orchestrator import Orchestrator
from motet.assign.whole_step import DecidedStep, decide_step
from motet.balance import ASSUMED_SPEEDS, METHODS, StepCosts, assign_jointly
from motet.balance.phases import joint_costs
from motet.core.workload import BatchLengths, home_ranks
from motet.dispatch import BalanceConfig, RankBatch, assemble
from motet.models.build import build_mllm
from motet.planning.planned_recipe import read_job_recipe
from motet.runtime.fsdp import FSDPConfig, shard
from motet.runtime.mesh import Mesh, build_mesh
from motet.runtime.step import TrainStep
from motet.train.balancing import build_orchestrator

NUM_STEPS = 20
WAYS = {"as it comes": "off", "decided": "auto"}
SHRINK, MICROBATCHES, PER_RANK = 8, 8, 1


def predicted(path: Path, seed: int) -> Iterator[Row]:
    num_ranks, count, per_rank = 16, 8, 2
    model = read_job_recipe(ROOT / "recipes" / "orchmllm_10b.toml").model
    costs = operation_costs(model, {}, ASSUMED_SPEEDS["cuda"], 2)
    workload, rng = read_lengths(path).workload(even=True), np.random.default_rng(seed)
    found: dict[str, list[float]] = {}
    for _ in range(NUM_STEPS):
        drawn = workload.draw(num_ranks * count * per_rank, rng)
        lengths = replace(drawn, home=np.tile(home_ranks(num_ranks * per_rank, num_ranks), count))
        for methods in (("joint",), METHODS):
            deciding = {
                defers: Orchestrator(
                    costs.costs,
                    num_ranks,
                    costs.costs,
                    work=costs.work,
                    times=costs.times,
                    methods=methods,
                    defers=defers,
                )
                for defers in (False, True)
            }
            for way, figure in of_step(deciding, costs, lengths, count).items():
                found.setdefault(f"{way}, {'joint' if methods == ('joint',) else 'auto'}", []).append(figure)
    for name, figures in found.items():
        goal = {"deferred, auto": 1.6, "held, deferred, auto": 1.0}.get(name)
        yield Row(f"predicted: {name}", float(np.median(figures)), goal)


def of_step(
    deciding: dict[bool, Orchestrator], costs: StepCosts, lengths: BatchLengths, count: int
) -> dict[str, float]:
    """deciding: by whether it defers."""
    weights, unit_s = joint_costs(costs.phases(lengths))
    mean_s = float(weights.sum()) * unit_s / deciding[True].num_ranks
    microbatch = assign_jointly(weights, count).ranks
    as_it_comes, decided = (decide_step(deciding[defers], lengths, count) for defers in (False, True))
    evenly = [deciding[False].decide(lengths.take(np.flatnonzero(microbatch == index))) for index in range(count)]
    return {
        "as it comes": decided.predicted_s["stay"] / mean_s,
        "dealt evenly": sum(decision.predicted_s[decision.method] for decision in evenly) / mean_s,
        "deferred": min(decided.predicted_s.values()) / mean_s,
        "held, deferred": held(costs, decided) / max(held(costs, as_it_comes), held_alone(costs, lengths)),
    }


def held(costs: StepCosts, step: DecidedStep) -> int:
    """Elements that the fullest rank keeps in a microbatch."""
    most = 0
    for part in step.microbatches:
        on_rank = np.zeros(part.decision.backbone.num_ranks, dtype=np.int64)
        for phase in costs.phases(part.lengths):
            np.add.at(on_rank, part.decision.assignments[phase.name].ranks, phase.held)
        most = max(most, int(on_rank.max()))
    return most


def held_alone(costs: StepCosts, lengths: BatchLengths) -> int:
    """Elements that the largest example keeps."""
    held = np.zeros(lengths.num_examples, dtype=np.int64)
    for phase in costs.phases(lengths):
        np.add.at(held, phase.owner, phase.held)
    return int(held.max())


def parts_of(batch: Batch, lengths: BatchLengths, step: DecidedStep, mesh: Mesh) -> Iterator[RankBatch]:
    """This rank's parts of the microbatches."""
    for part in step.microbatches:
        items = {
            phase: np.flatnonzero(np.isin(column.example, part.examples)) for phase, column in lengths.items.items()
        }
        placed = part.decision.assignments
        yield assemble(
            part.decision,
            part.lengths,
            mesh.rank,
            [batch.sequence(int(part.examples[i])) for i in part.decision.backbone.on_rank(mesh.rank)],
            {p: [batch.media(p, int(items[p][i])) for i in placed[p].on_rank(mesh.rank)] for p in items},
        )


def run_rank(rank: int, num_ranks: int, rendezvous: str, path: Path, seed: int, pairs: int, out: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=num_ranks, init_method=rendezvous)
    device = torch.device("cpu")
    mesh, rng = build_mesh(device), np.random.default_rng(seed)
    groups, model = read_table(str(path)), build_mllm(MODEL, VOCABULARY)
    pools = {
        "image": rng.standard_normal((1 << 16, PATCH_DIM), np.float32),
        "audio": rng.standard_normal((1 << 14, MEL_BINS), np.float32),
    }
    deciding = {
        way: build_orchestrator(BalanceConfig(defer=defer), model, num_ranks, device, torch.float32)
        for way, defer in WAYS.items()
    }
    shard(model, mesh, FSDPConfig())
    step = TrainStep(model, mesh, torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0), max_grad_norm=1.0)
    home = np.tile(home_ranks(num_ranks * PER_RANK, num_ranks), MICROBATCHES)
    figures = []
    for number in range(pairs + 1):
        kinds = rng.integers(0, len(groups), num_ranks * PER_RANK * MICROBATCHES)
        rows = [groups[kind][rng.integers(len(groups[kind]))] for kind in kinds]
        batch = Batch(rows, model, num_ranks, SHRINK, pools)
        lengths = replace(batch.lengths, home=home)
        figure = {}
        for way in list(WAYS)[:: 1 if number % 2 else -1]:
            decided = decide_step(deciding[way], lengths, MICROBATCHES)
            loaded = list(parts_of(batch, lengths, decided, mesh))
            dist.barrier(mesh.group)
            start_s = time.perf_counter()
            result = step.run(loaded, number)
            figure[way] = (time.perf_counter() - start_s, result.loss, decided)
        figures.append(figure)
    everywhere: list = [None] * num_ranks
    mine = [{way: (step_s, loss) for way, (step_s, loss, _) in figure.items()} for figure in figures]
    dist.all_gather_object(everywhere, mine, group=mesh.host_group)
    if rank == 0:
        # The first pair warms up.
        slowest = {way: np.max([[f[way][0] for f in ranks[1:]] for ranks in everywhere], axis=0) for way in WAYS}
        losses = {way: np.array([f[way][1] for f in mine[1:]]) for way in WAYS}
        decisions = [figure["decided"][2] for figure in figures[1:]]
        foreseen = [min(d.predicted_s.values()) / d.predicted_s["stay"] for d in decisions]
        figure_of = {
            "ratio": float(np.median(slowest["decided"] / slowest["as it comes"])),
            "foreseen": float(np.median(foreseen)),
            "off": float(np.abs(losses["decided"] / losses["as it comes"] - 1).max()),
            "deferred": float(np.mean([d.method == "defer" for d in decisions])),
        }
        np.save(out, np.array(list(figure_of.values())))
    dist.destroy_process_group()


def measured(path: Path, seed: int, pairs: int) -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "figures.npy"
        mp.spawn(run_rank, (2, f"file://{folder}/rendezvous", path, seed, pairs, out), nprocs=2)
        ratio, foreseen, off, deferred = np.load(out).tolist()
    yield Row("measured: step time as decided over as it comes", ratio, 1.0)
    yield Row("measured: the same ratio, predicted", foreseen)
    yield Row("measured: share of steps that are deferred", deferred)
    yield Row("measured: largest relative difference of losses", off, 1e-5)


def main() -> None:
    parser = options(__doc__, "predicted or measured, or a part of the word")
    parser.add_argument("--pairs", type=int, default=12, help="steps that are measured both ways")
    asked = parser.parse_args()
    rows: list[Row] = []
    if asked.only in "predicted":
        rows += predicted(asked.lengths, asked.seed)
    if asked.only in "measured":
        rows += measured(asked.lengths, asked.seed, asked.pairs)
    if not rows:
        parser.error(f"--only {asked.only}: it is no part of predicted or of measured")
    for row in rows:
        show(row)
    finish(rows, asked.json, seed=asked.seed)


if __name__ == "__main__":
    main()
