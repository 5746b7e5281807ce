"""Motet's checkpoints against torch DCP's own format, and kills while they are written.

    python benchmarks/checkpoints.py [--seed 0] [--json FILE] [--only NAME] [--ranks 2] [--pairs 15] [--kills 200]

speed: a model of 17 M parameters with AdamW's moments, 200 MB, sharded by FSDP2 over gloo ranks. Saved and loaded by
Motet and by `dcp.async_save` with its FileSystemWriter in turns, who is first changing from pair to pair; figures are
medians of the ratios of pairs, so that a machine with other work to do slows both alike. What Motet's save does more is
to compute SHA-256; what its resuming does more is to verify it. Reading is from the page cache.

kills: ranks that save without a pause, keeping one checkpoint, are killed all at once at a moment drawn by the seed.
Whole: every folder under the name of a checkpoint verifies, and there is one.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future
from itertools import count
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from rows import Row, finish, options, show
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from motet.train.checkpoint.contents import Damaged, Progress, name_of, verify
from motet.train.checkpoint.folder import checkpoints
from motet.train.checkpoint.restoring import load
from motet.train.checkpoint.saving import CheckpointConfig, Checkpointer
from motet.train.checkpoint.state import tensors_of

WIDTH, DEPTH = 1024, 16
NEVER_S = 60.0
MOST_BEFORE_KILL_S = 1.0
MOST = 1.10
"""Of DCP's time, for what training waits for and for a save as a whole."""


def build(width: int, depth: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(depth)))
    for layer in [*model, model]:
        fully_shard(layer, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters())


def join(rank: int, num_ranks: int, folder: Path) -> dist.ProcessGroup:
    """A group for saving alone, which runs in a thread, beside the default one."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=num_ranks, init_method=f"file://{folder}/rendezvous")
    return dist.new_group(backend="gloo")


class Timer:
    """Seconds that all ranks take for something, by its name, a list entry each time."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}

    def __call__(self, name: str, action: Callable[[], object]) -> None:
        dist.barrier()
        start_s = time.perf_counter()
        action()
        own_s = torch.tensor(time.perf_counter() - start_s, dtype=torch.float64)
        dist.all_reduce(own_s, op=dist.ReduceOp.MAX)
        self.seconds.setdefault(name, []).append(float(own_s))


def pairs(rank: int, num_ranks: int, folder: Path, num_pairs: int) -> None:
    """The seconds of all pairs, written by rank 0 to seconds.json."""
    saving = join(rank, num_ranks, folder)
    model, optimizer = build(WIDTH, DEPTH)
    checkpointer = Checkpointer(folder / "motet", CheckpointConfig(every_steps=0, keep=1), saving)
    timer = Timer()

    def by_motet(step: int) -> None:
        timer("motet: blocking", lambda: checkpointer.save(model, optimizer, Progress(step, 0, 0, 0, "")))
        timer("motet: rest", checkpointer.wait)
        path = folder / "motet" / name_of(step)
        timer("motet: verify", lambda: verify(path, rank, num_ranks))
        timer("motet: load", lambda: load(path, model, optimizer, dist.group.WORLD))

    def by_dcp(step: int) -> None:
        path, pending = folder / "dcp" / name_of(step), list[Future[object]]()
        writer = dcp.FileSystemWriter(path)
        timer(
            "dcp: blocking",
            lambda: pending.append(
                dcp.async_save(tensors_of(model, optimizer), storage_writer=writer, process_group=saving)
            ),
        )
        timer("dcp: rest", pending[0].result)
        reader = dcp.FileSystemReader(path)
        timer("dcp: load", lambda: dcp.load(tensors_of(model, optimizer), storage_reader=reader))
        dist.barrier()
        if rank == 0:
            shutil.rmtree(path)

    for step in range(num_pairs + 1):  # The first pair warms up.
        for save in (by_motet, by_dcp) if step % 2 else (by_dcp, by_motet):
            save(step)
    if rank == 0:
        seconds = {name: told[1:] for name, told in timer.seconds.items()}
        (folder / "seconds.json").write_text(json.dumps(seconds))
    dist.destroy_process_group()


def speed(num_ranks: int, num_pairs: int) -> list[Row]:
    with tempfile.TemporaryDirectory() as name:
        mp.spawn(pairs, (num_ranks, Path(name), num_pairs), nprocs=num_ranks)
        of: dict[str, list[float]] = json.loads(Path(name, "seconds.json").read_text())

    def added(*names: str) -> list[float]:
        return [sum(parts) for parts in zip(*(of[name] for name in names))]

    rows = []
    for what, own, other, goal in (
        ("save: what training waits for", ["blocking"], ["blocking"], MOST),
        ("save: until it is on the disk", ["blocking", "rest"], ["blocking", "rest"], MOST),
        ("load", ["load"], ["load"], MOST),
        ("verify and load", ["verify", "load"], ["load"], None),
    ):
        ours, theirs = (added(*(f"{who}: {part}" for part in parts)) for who, parts in (("motet", own), ("dcp", other)))
        ratio = statistics.median(a / b for a, b in zip(ours, theirs))
        rows.append(Row(f"{what}, seconds", statistics.median(ours)))
        rows.append(Row(f"{what}, of DCP's time", ratio, goal))
    return rows


def save_on(rank: int, num_ranks: int, folder: Path, rendezvous: Path) -> None:
    group = join(rank, num_ranks, rendezvous)
    model, optimizer = build(512, 4)
    line = [path.name for path in checkpoints(folder)]
    first = int(line[-1].removeprefix("step-")) + 1 if line else 1
    checkpointer = Checkpointer(folder, CheckpointConfig(every_steps=0, keep=1), group, line)
    for step in count(first):
        checkpointer.save(model, optimizer, Progress(step, 0, 0, 0, ""))


def kills(num_ranks: int, num_kills: int, seed: int) -> list[Row]:
    """Kill the ranks again and again, each time going on from what is left."""
    rng, whole, in_mid_save = random.Random(seed), 0, 0
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(
        ["torch", "torch._dynamo", "torch.distributed.fsdp", "motet.train.checkpoint.saving"]
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "checkpoints"
        for kill in range(num_kills):
            rendezvous = Path(name) / f"rendezvous-{kill}"
            rendezvous.mkdir()
            before = checkpoints(folder)
            ranks = [
                context.Process(target=save_on, args=(rank, num_ranks, folder, rendezvous)) for rank in range(num_ranks)
            ]
            for process in ranks:
                process.start()
            deadline = time.monotonic() + NEVER_S
            while checkpoints(folder) in ([], before) and time.monotonic() < deadline:
                time.sleep(0.001)
            time.sleep(rng.uniform(0, MOST_BEFORE_KILL_S))
            for process in ranks:
                os.kill(process.pid, signal.SIGKILL)
            for process in ranks:
                process.join()
            in_mid_save += any(folder.glob("*.tmp"))
            whole += all_whole(folder)
    return [
        Row("kills", num_kills),
        Row("kills that left an unfinished folder", in_mid_save),
        Row("share of kills that left whole checkpoints alone", whole / num_kills, 1.0, met=whole == num_kills),
    ]


def all_whole(folder: Path) -> bool:
    try:
        return bool([verify(path) for path in checkpoints(folder)])
    except Damaged as damage:
        print(damage)
        return False


def main() -> None:
    parser = options(__doc__, ["speed", "kills"], reads_lengths=False)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--kills", type=int, default=200)
    asked = parser.parse_args()
    rows = []
    if asked.only != "kills":
        rows += speed(asked.ranks, asked.pairs)
    if asked.only != "speed":
        rows += kills(asked.ranks, asked.kills, asked.seed)
    for row in rows:
        show(row)
    finish(rows, asked.json, seed=asked.seed)


if __name__ == "__main__":
    main()
