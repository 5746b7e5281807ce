"""What it takes until a rank of a sharded model has its weights: bytes and seconds, against building the model whole.

    python benchmarks/start.py [--seed 0] [--json start.json] [--only drawn]

A llama of 13 layers, in float32, on 2 and on 4 gloo ranks; its weights are drawn, or read from safetensors. Bytes are
the peak of the rank's resident memory above that after imports (Linux counts it; mapped files are in it), of the worst
rank. Whole: every rank builds the whole model and shards it then, as was done before `models/materialise.py`.
The goal is the rank's own share times 1.3 and one layer.
"""

from __future__ import annotations

import gc
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rows import Row, finish, options, show
from torch.distributed.tensor import DTensor

from motet.models.build import ModelConfig, build_mllm
from motet.models.export import export_hf
from motet.models.materialise import materialise
from motet.runtime.fsdp import FSDPConfig, shard
from motet.runtime.mesh import build_mesh

CPU = torch.device("cpu")
VOCABULARY = 2048
LLAMA = {
    "num_hidden_layers": 13, "hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16,
    "num_key_value_heads": 16,
}  # fmt: skip


class Started(NamedTuple):
    """What one rank took. share_bytes: of its weights. layer_bytes: of one whole layer."""

    peak_bytes: int
    share_bytes: int
    layer_bytes: int
    start_s: float


def config_of(path: Path | None) -> ModelConfig:
    source = {"config": LLAMA} if path is None else {"path": path}
    return ModelConfig.model_validate({"backbone": {"family": "llama", **source}})


def resident_bytes(key: str) -> int:
    """VmRSS, of now, or VmHWM, the most since it was last reset."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{key}:"))


def start(rank: int, num_ranks: int, folder: str, path: Path | None, is_whole: bool, seed: int, queue) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=num_ranks)
    mesh, config = build_mesh(CPU), config_of(path)
    # What is imported, or allocated once, with the first model of any size.
    tiny = {key: 2 if "num" in key else 16 for key in LLAMA}
    shard(
        build_mllm(ModelConfig.model_validate({"backbone": {"family": "llama", "config": tiny}}), 8), mesh, FSDPConfig()
    )
    gc.collect()
    dist.barrier()
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    before_bytes, began_s = resident_bytes("VmRSS"), time.perf_counter()
    model = build_mllm(config, VOCABULARY, seed=seed, deferred=not is_whole)
    shard(model, mesh, FSDPConfig())
    materialise(model, config, seed, CPU)
    start_s = time.perf_counter() - began_s
    share = sum(each.to_local().nbytes for each in model.parameters() if isinstance(each, DTensor))
    layer = sum(each.nbytes for each in model.backbone.blocks[0].parameters())
    queue.put(Started(resident_bytes("VmHWM") - before_bytes, share, layer, start_s))
    dist.barrier()
    dist.destroy_process_group()


def worst(num_ranks: int, path: Path | None, is_whole: bool, seed: int) -> Started:
    """Of each figure, the largest of any rank."""
    queue = mp.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        given = (num_ranks, folder, path, is_whole, seed, queue)
        context = mp.start_processes(start, given, nprocs=num_ranks, join=False, start_method="spawn")
        found = [queue.get() for _ in range(num_ranks)]
        context.join()
    return Started(*(max(of_ranks) for of_ranks in zip(*found, strict=True)))


def measure(source: str, seed: int) -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as folder:
        path = None
        if source == "read":
            path = Path(folder) / "export/backbone"
            export_hf(build_mllm(config_of(None), VOCABULARY, seed=seed), path.parent)
        for num_ranks in (2, 4):
            case = f"{source}, {num_ranks} ranks"
            whole, own = (worst(num_ranks, path, is_whole, seed) for is_whole in (True, False))
            yield Row(f"{case}: MB at the most, whole", whole.peak_bytes / 1e6)
            yield Row(
                f"{case}: MB at the most, own rows",
                own.peak_bytes / 1e6,
                (1.3 * own.share_bytes + own.layer_bytes) / 1e6,
            )
            yield Row(f"{case}: seconds, whole", whole.start_s)
            yield Row(f"{case}: seconds, own rows", own.start_s)


def main() -> None:
    given = options(__doc__, ("drawn", "read"), reads_lengths=False).parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    rows = []
    for source in (given.only,) if given.only else ("drawn", "read"):
        for row in measure(source, given.seed):
            rows.append(row)
            show(row)
    finish(rows, given.json, seed=given.seed, dtype="float32")


if __name__ == "__main__":
    main()
