"""What moves between ranks in exchange mode, by communicator and with and without regard to nodes.

    python benchmarks/exchange.py [--seed N] [--json FILE] [--lengths FILE] [--steps N]

Real lengths (../shared/data/lengths.csv.gz, or --lengths FILE) divided by 8, each kind of example equally often; 4 gloo
ranks of this machine in two emulated nodes of 2, 8 examples a rank, the small model of step_time.py. Every step is
taken in three ways, in turns, in one run (OrchMLLM section 5.2, Figures 12 and 13). Bytes are those that the metrics of
training count, summed over ranks and steps; both are checked by tests against what collectives are given. Losses must
agree.

overhead: processor seconds that deciding and the exchange of inputs take, beside those of the step, on all ranks. They
are spent in the prefetch thread, a step ahead. The paper's clusters are larger, so its ratios have no place here.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rows import Row, finish, options, show
from step_time import MEL_BINS, MODEL, PATCH_DIM, VOCABULARY, Batch, read_table

from motet.core.workload import home_ranks
from motet.dispatch import BalanceConfig, ItemExchange, LoadedExample, assemble
from motet.models.build import build_mllm
from motet.runtime.fsdp import FSDPConfig, shard
from motet.runtime.mesh import build_mesh
from motet.runtime.step import TrainStep
from motet.train.balancing import build_orchestrator

NUM_RANKS, RANKS_PER_NODE, PER_RANK, SHRINK = 4, 2, 8, 8
WAYS = {
    "all-to-all, node-wise": {},
    "all-to-all": {"node_wise": False},
    "all-gather, node-wise": {"communicator": "all_gather"},
}
FIGURES = ("input", "input_crossing", "output", "output_crossing", "bring_s", "step_s", "loss")


def run_rank(rank: int, rendezvous: str, path: Path, seed: int, num_steps: int, out: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=NUM_RANKS, init_method=rendezvous)
    device, rng = torch.device("cpu"), np.random.default_rng(seed)
    mesh = build_mesh(device)
    groups, model = read_table(str(path)), build_mllm(MODEL, VOCABULARY)
    pools = {
        "image": rng.standard_normal((1 << 16, PATCH_DIM), np.float32),
        "audio": rng.standard_normal((1 << 14, MEL_BINS), np.float32),
    }
    exchanges = {}
    for way, stated in WAYS.items():
        config = BalanceConfig(mode="exchange", method="per_phase", **stated)
        orchestrator = build_orchestrator(
            config, model, NUM_RANKS, device, torch.float32, ranks_per_node=RANKS_PER_NODE
        )
        exchanges[way] = ItemExchange(mesh.host_group, orchestrator, dict(model.encoders.items()))
    shard(model, mesh, FSDPConfig())
    step = TrainStep(model, mesh, torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0), max_grad_norm=1.0)
    home = home_ranks(NUM_RANKS * PER_RANK, NUM_RANKS)
    figures = np.zeros((num_steps + 1, len(WAYS), len(FIGURES)))
    for number in range(num_steps + 1):
        kinds = rng.integers(0, len(groups), len(home))
        batch = Batch(
            [groups[kind][rng.integers(len(groups[kind]))] for kind in kinds], model, NUM_RANKS, SHRINK, pools
        )
        examples = [loaded(batch, int(index)) for index in np.flatnonzero(home == rank)]
        for place, way in list(enumerate(WAYS))[:: 1 if number % 2 else -1]:
            dist.barrier(mesh.group)
            start_s = time.process_time()
            items = exchanges[way](examples)
            part = assemble(items.decision, items.lengths, rank, items.sequences, items.media)
            brought_s = time.process_time()
            result = step.run([part], number)
            ended_s = time.process_time()
            figures[number, place] = (
                items.moved_bytes,
                items.crossing_bytes,
                result.moved_bytes,
                result.crossing_bytes,
                brought_s - start_s,
                ended_s - brought_s,
                result.loss,
            )
    everywhere = [torch.zeros(figures.shape, dtype=torch.float64) for _ in range(NUM_RANKS)]
    dist.all_gather(everywhere, torch.from_numpy(figures), group=mesh.host_group)
    if rank == 0:
        np.save(out, torch.stack(everywhere).numpy()[:, 1:])  # The first step warms up.
    dist.destroy_process_group()


def loaded(batch: Batch, index: int) -> LoadedExample:
    """An example with its items, in the order of its placeholders."""
    sequence, met, items = batch.sequence(index), dict.fromkeys(batch.items, 0), []
    for phase in sequence.media:
        of_example = [number for number, (example, _) in enumerate(batch.items[phase]) if example == index]
        items.append(batch.media(phase, of_example[met[phase]]))
        met[phase] += 1
    return LoadedExample(sequence, tuple(items))


def measured(path: Path, seed: int, num_steps: int) -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "figures.npy"
        mp.spawn(run_rank, (f"file://{folder}/rendezvous", path, seed, num_steps, out), nprocs=NUM_RANKS)
        figures = np.load(out)
    of = {
        way: dict(zip(FIGURES, np.moveaxis(figures[:, :, place], -1, 0), strict=True)) for place, way in enumerate(WAYS)
    }
    total = {way: {name: float(column[0].sum()) for name, column in columns.items()} for way, columns in of.items()}
    for way in WAYS:
        for kind in ("input", "output"):
            yield Row(f"{way}: {kind} MB a step", total[way][kind] / num_steps / 1e6)
            yield Row(
                f"{way}: {kind} MB a step that leave their node", total[way][f"{kind}_crossing"] / num_steps / 1e6
            )
        seconds = {name: float(of[way][name].sum()) for name in ("bring_s", "step_s")}
        yield Row(f"{way}: overhead beside the step", seconds["bring_s"] / seconds["step_s"])
    first, blind, gather = (total[way] for way in WAYS)
    for kind in ("input", "output"):
        crossing = f"{kind}_crossing"
        yield Row(f"{kind} that leaves its node, node-wise over without", first[crossing] / blind[crossing], 1.0)
        yield Row(f"{kind} moved, all-to-all over all-gather", first[kind] / gather[kind], 1.0)
    losses = np.stack([of[way]["loss"][0] for way in WAYS])
    yield Row("largest relative difference of losses", float(np.abs(losses / losses[0] - 1).max()), 1e-5)


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--steps", type=int, default=8, help="steps that are taken in every way")
    asked = parser.parse_args()
    rows = []
    for row in measured(asked.lengths, asked.seed, asked.steps):
        show(row)
        rows.append(row)
    finish(rows, asked.json, seed=asked.seed, nodes="emulated")


if __name__ == "__main__":
    main()
