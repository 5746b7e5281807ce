"""A plain DDP loop with Motet: how long it waits for its batches, prefetched and not, on 2 gloo ranks.

    python benchmarks/loops.py [--steps 24] [--examples-a-rank 16] [--seed 0] [--json loops.json] [--only exchange]

The model and the examples are those of examples/, the model wider. "In the loop" loads, exchanges and assembles each
batch between two steps, as a loop does that calls ItemExchange itself; "prefetched" is `motet.dispatch.prefetched`. A
share is the time that the loop waits for a batch over the time of the step, medians over steps without the first
quarter, of the worst rank. All three train on the same batches, or the comparison is void.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rows import ROOT, Row, finish, options, show
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from motet.core.workload import BACKBONE
from motet.dispatch import ItemExchange, Orchestrator, Packed, RankBatch, assemble, prefetched

NUM_RANKS, DIM, NUM_LAYERS = 2, 256, 6
IN_THE_LOOP, WAYS = "in the loop", ("exchange", "index")
GOAL = 0.005
"""The share of a step that all of balancing may take on the critical path."""


class Waited(NamedTuple):
    """Medians over the steps of one rank, and its last loss."""

    wait_s: float
    step_s: float
    loss: float


def collated(loader: DataLoader, measures: dict) -> Iterator[RankBatch]:
    """Batches that the loop's own thread loads, decides, exchanges and assembles."""
    orchestrator = Orchestrator({BACKBONE: Packed(), "image": Packed()}, dist.get_world_size(), {BACKBONE, "image"})
    bring = ItemExchange(dist.new_group(backend="gloo"), orchestrator, measures)
    group, rank = dist.new_group(), dist.get_rank()
    for examples in loader:
        items = bring(examples)
        batch = assemble(items.decision, items.lengths, rank, items.sequences, items.media)
        yield replace(batch, group=group)


def work(rank: int, folder: str, way: str, num_steps: int, batch_size: int, seed: int, queue) -> None:
    sys.path.insert(0, str(ROOT / "examples"))
    from vlm import VLM, Examples, Tiles

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=NUM_RANKS)
    torch.manual_seed(seed)
    model = DistributedDataParallel(VLM(DIM, NUM_LAYERS))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    data = Examples(num_steps * batch_size * NUM_RANKS)
    sampler = DistributedSampler(data, shuffle=True, seed=seed)
    loader = DataLoader(data, batch_size, sampler=sampler, collate_fn=list, num_workers=0 if way == IN_THE_LOOP else 1)
    measures = {"image": Tiles()}
    batches = (
        collated(loader, measures)
        if way == IN_THE_LOOP
        else prefetched(loader, measures if way == "exchange" else None)
    )
    waits, steps, iterator = [], [], iter(batches)
    while True:
        begun_s = time.perf_counter()
        batch = next(iterator, None)
        if batch is None:
            break
        waits.append(time.perf_counter() - begun_s)
        loss = batch.scale_sum(model(batch))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        steps.append(time.perf_counter() - begun_s)
    first = len(steps) // 4
    total = loss.detach()
    dist.all_reduce(total)
    queue.put(Waited(statistics.median(waits[first:]), statistics.median(steps[first:]), total.item()))
    dist.barrier()
    dist.destroy_process_group()


def ranks(*given) -> list[Waited]:
    queue = mp.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        context = mp.start_processes(work, (folder, *given, queue), nprocs=NUM_RANKS, join=False, start_method="spawn")
        found = [queue.get() for _ in range(NUM_RANKS)]
        context.join()
    return found


def measure(ways: tuple[str, ...], num_steps: int, batch_size: int, seed: int) -> Iterator[Row]:
    whole = ranks(IN_THE_LOOP, num_steps, batch_size, seed)
    yield Row("in the loop: ms a step", 1e3 * max(each.step_s for each in whole))
    yield Row("in the loop: share of the step that waits for a batch", max(each.wait_s / each.step_s for each in whole))
    for way in ways:
        found = ranks(way, num_steps, batch_size, seed)
        if abs(found[0].loss - whole[0].loss) > 1e-3 * abs(whole[0].loss):
            raise SystemExit(f"{way}: the last loss is {found[0].loss}, and {whole[0].loss} without prefetching")
        yield Row(f"prefetched, {way} mode: ms a step", 1e3 * max(each.step_s for each in found))
        share = max(each.wait_s / each.step_s for each in found)
        yield Row(f"prefetched, {way} mode: share of the step that waits for a batch", share, GOAL)


def main() -> None:
    parser = options(__doc__, WAYS, reads_lengths=False)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--examples-a-rank", type=int, default=16)
    given = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    rows = []
    for row in measure((given.only,) if given.only else WAYS, given.steps, given.examples_a_rank, given.seed):
        rows.append(row)
        show(row)
    finish(rows, given.json, seed=given.seed, steps=given.steps)


if __name__ == "__main__":
    main()
