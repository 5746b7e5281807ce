"""Predicted bytes of a rank (`motet.cost.memory`) against those that torch holds, by kind.

    python benchmarks/memory.py [--ranks 2] [--json memory.json]

One rank: each module runs a microbatch while the gradients of an earlier one are there, with and without recomputation.
Activations are what its forward pass leaves; the peak, of forward and backward, has the transients on top of them. On a
GPU, in bfloat16, the allocator tells (`torch.cuda.max_memory_allocated`); on a CPU, in float32, every storage that an
operation of torch returns is counted until it is freed.

What a CPU holds beyond the prediction: each packed sequence is attended to by itself, so that its output is kept once
more, and keys and values are repeated for grouped queries; a GPU's kernel does neither. Qwen2-VL's values are views
that keep its queries and keys alive. The backbone's log-softmax is predicted as a transient, as the loss comes last.
What it holds less: widths are those of 16-bit training, where float32 rows of norms count twice.

Several ranks (gloo): what each holds after a step of AdamW, sharded by FSDP2 over all ranks and over none.
"""

from __future__ import annotations

import json
import os
import tempfile
import weakref
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.console import Console
from rich.table import Table
from rows import OF_ROWS, Row, finish, options
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from motet.core.plan import Unit
from motet.core.spec import Layer, ModelSpec
from motet.core.workload import BACKBONE
from motet.cost.flops import work_of
from motet.cost.memory import FSDP_BF16, FSDP_FP32, MixedPrecision, StageMemory, stage_layers, stage_memory
from motet.models.build import BackboneConfig, EncoderConfig, ModelConfig, build_mllm
from motet.models.mllm import MLLM
from motet.models.spec import model_spec
from motet.runtime.fsdp import FSDPConfig, shard
from motet.runtime.mesh import build_mesh

VOCABULARY, PATCH, MEL_BINS = 2048, 14, 80
TEXT, IMAGES, CLIPS = (500, 300, 700), ((16, 16),) * 3, (800, 1000)
"""Tokens of the sequences of a microbatch, patches of its images, frames of its clips; more of each on a GPU."""
GPU_TIMES = 8
BF16 = MixedPrecision(compute=2, stored=2, gradient=2, optimizer=4)


@dataclass(frozen=True)
class Bytes:
    """What a module, or a rank, holds of one kind in a case."""

    case: str
    module: str
    kind: str
    predicted_bytes: int
    measured_bytes: int


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of storages that operations return, from then on until they are freed."""

    def __init__(self) -> None:
        super().__init__()
        self.current = self.peak = 0
        self._live: dict[int, weakref.ref] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                key, size = storage._cdata, storage.nbytes()
                if key not in self._live and key not in given:
                    self._live[key] = weakref.ref(storage, lambda _, key=key, size=size: self._forget(key, size))
                    self.current += size
        self.peak = max(self.peak, self.current)
        return out

    def _forget(self, key: int, size: int) -> None:
        del self._live[key]
        self.current -= size


def config(times: int) -> ModelConfig:
    """Widths of a small model, `times` as large on a GPU."""
    vision, heads = 192 * times, 4 * times
    return ModelConfig(
        backbone=BackboneConfig(
            family="qwen2",
            config={
                "hidden_size": 256 * times, "intermediate_size": 704 * times, "num_hidden_layers": 4,
                "num_attention_heads": heads, "num_key_value_heads": heads // 2,
            },
        ),
        encoders={
            "siglip": EncoderConfig(
                family="siglip",
                config={
                    "hidden_size": vision, "intermediate_size": 4 * vision, "num_hidden_layers": 4,
                    "num_attention_heads": heads, "image_size": 16 * PATCH, "patch_size": PATCH,
                },
            ),
            "qwen2_vl": EncoderConfig(
                family="qwen2_vl",
                config={
                    "depth": 4, "embed_dim": vision, "hidden_size": vision, "num_heads": heads, "patch_size": PATCH,
                    "mlp_ratio": 4,
                },
            ),
            "whisper": EncoderConfig(
                family="whisper",
                config={
                    "d_model": vision, "encoder_layers": 4, "encoder_attention_heads": heads,
                    "encoder_ffn_dim": 4 * vision, "num_mel_bins": MEL_BINS,
                },
            ),
        },
    )  # fmt: skip


class Microbatch:
    """The items of each module, as their lengths and as a loss to be computed on them."""

    def __init__(self, mllm: MLLM, device: torch.device, dtype: torch.dtype, times: int) -> None:
        self.device, self.dtype, self.times = device, dtype, times
        self.modules: dict[str, nn.Module] = {**mllm.encoders, BACKBONE: mllm.backbone}
        self.sizes = {
            name: torch.tensor([[n] for n in CLIPS] if name == "whisper" else IMAGES).repeat(times, 1)
            for name in mllm.encoders
        }
        self.lengths = {name: mllm.encoders[name].lengths(sizes.numpy()) for name, sizes in self.sizes.items()}
        self.lengths[BACKBONE] = np.array(TEXT * times)
        self.num_targets = int(self.lengths[BACKBONE].sum()) // 8

    def loss(self, name: str) -> Tensor:
        if name == BACKBONE:
            return self.modules[name](self._sequences(), {})[0]
        frames = {"whisper": MEL_BINS, "siglip": 3 * PATCH**2, "qwen2_vl": 6 * PATCH**2}
        values = torch.randn(int(self.sizes[name].prod(1).sum()), frames[name], dtype=self.dtype, device=self.device)
        return self.modules[name](values, self.sizes[name]).sum()

    def rows(self, spec: ModelSpec) -> Callable[[str, Layer], float]:
        return lambda name, layer: float(
            work_of(
                layer, self.lengths[name], padded=spec.module(name).padded,
                num_targets=self.num_targets if name == BACKBONE else None,
            ).rows[0]
        )  # fmt: skip

    def _sequences(self) -> SimpleNamespace:
        lengths = self.lengths[BACKBONE]
        total = int(lengths.sum())
        targets = torch.zeros(total, dtype=torch.bool)
        targets[1 : 8 * self.num_targets : 8] = True
        offsets = torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
        tokens = torch.randint(0, VOCABULARY, (total,), device=self.device)
        return SimpleNamespace(tokens=tokens, targets=targets.to(self.device), offsets=offsets, feature_positions={})


def predicted(
    spec: ModelSpec, name: str, batch: Microbatch, precision: MixedPrecision, recompute: bool = False, **unit: int
) -> StageMemory:
    num_blocks = len(spec.module(name).blocks)
    placed = Unit(name, ({name: num_blocks},), **unit)
    layers = stage_layers(spec, {name: (0, num_blocks)}, {name: num_blocks if recompute else 0})
    return stage_memory(placed, layers, batch.rows(spec), 1, precision)


def one_rank(device: torch.device) -> Iterator[Bytes]:
    """Activations and transients of each module."""
    on_gpu = device.type == "cuda"
    dtype, precision, times = (torch.bfloat16, BF16, GPU_TIMES) if on_gpu else (torch.float32, FSDP_FP32, 1)
    mllm = build_mllm(config(times), VOCABULARY, dtype).to(device)
    spec, batch = model_spec(mllm), Microbatch(mllm, device, dtype, times)
    measure = on_allocator if on_gpu else on_storages
    for recompute in (False, True):
        case = "recomputed" if recompute else "kept"
        for name, module in batch.modules.items():
            for block in module.blocks:
                block.recompute = recompute
            batch.loss(name).backward()
            activations, peak = measure(lambda name=name: batch.loss(name))
            found = predicted(spec, name, batch, precision, recompute, zero=0)
            yield Bytes(case, name, "activations", found.activations, activations)
            yield Bytes(case, name, "peak", found.activations + found.transient, peak)
            module.zero_grad()


def on_storages(loss: Callable[[], Tensor]) -> tuple[int, int]:
    with LiveBytes() as live:
        value = loss()
        activations = live.current
        value.backward()
    return activations, live.peak


def on_allocator(loss: Callable[[], Tensor]) -> tuple[int, int]:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    value = loss()
    activations = torch.cuda.memory_allocated() - before
    value.backward()
    return activations, torch.cuda.max_memory_allocated() - before


def several_ranks(rank: int, num_ranks: int, folder: str) -> None:
    """Parameters, gradients and optimizer state of each module after a step, on every rank alike; rank 0 writes."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=num_ranks, init_method=f"file://{folder}/rendezvous")
    device, rows = torch.device("cpu"), []
    for case, fsdp, precision, shard_size in (
        ("sharded", FSDPConfig(), FSDP_FP32, num_ranks),
        ("sharded, bf16", FSDPConfig(param_dtype="bfloat16", reduce_dtype="float32"), FSDP_BF16, num_ranks),
        ("replicated", FSDPConfig(shard_size=1), FSDP_FP32, 1),
    ):
        mllm = build_mllm(config(1), VOCABULARY)
        spec, batch = model_spec(mllm), Microbatch(mllm, device, torch.float32, 1)
        shard(mllm, build_mesh(device, shard_size=fsdp.shard_size), fsdp)
        for name, module in batch.modules.items():
            batch.loss(name).backward()
            trainable = [parameter for parameter in module.parameters() if parameter.requires_grad]
            optimizer = torch.optim.AdamW(trainable)
            optimizer.step()
            found = predicted(spec, name, batch, precision, zero=3, dp=num_ranks, shard_size=shard_size)
            held = {
                "parameters": module.parameters(),
                "gradients": (p.grad for p in trainable if p.grad is not None),
                "optimizer": (t for state in optimizer.state.values() for k, t in state.items() if k != "step"),
            }
            for kind, tensors in held.items():
                rows.append(asdict(Bytes(case, name, kind, getattr(found, kind), sum(map(local_bytes, tensors)))))
    if rank == 0:
        Path(folder, "rows.json").write_text(json.dumps(rows))
    dist.destroy_process_group()


def local_bytes(tensor: Tensor) -> int:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.numel() * local.element_size()


def show(rows: list[Bytes]) -> None:
    table = Table(title="MB of a rank")
    for heading in ("case", "module", "what"):
        table.add_column(heading, no_wrap=True)
    for heading in ("predicted", "measured", "differs"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        difference = row.predicted_bytes / row.measured_bytes - 1
        figures = (f"{row.predicted_bytes / 1e6:.2f}", f"{row.measured_bytes / 1e6:.2f}", f"{difference:+.1%}")
        table.add_row(row.case, row.module, row.kind, *figures)
    Console().print(table)


def main() -> None:
    on_gpu = torch.cuda.is_available()
    name = torch.cuda.get_device_name().replace(" ", "-") if on_gpu else f"{os.cpu_count()}-cpu-cores"
    parser = options(__doc__, OF_ROWS, reads_lengths=False)
    parser.add_argument("--ranks", type=int, default=2, help="ranks to shard over, on the CPU")
    given = parser.parse_args()
    torch.manual_seed(given.seed)
    held = list(one_rank(torch.device("cuda" if on_gpu else "cpu")))
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(several_ranks, (given.ranks, folder), nprocs=given.ranks)
        held += [Bytes(**row) for row in json.loads(Path(folder, "rows.json").read_text())]
    show(held)
    rows = [
        Row(f"{one.case}, {one.module}, {one.kind}: predicted over measured", one.predicted_bytes / one.measured_bytes)
        for one in held
    ]
    about = {"device": name, "torch": torch.__version__, "num_ranks": given.ranks, "seed": given.seed}
    finish([row for row in rows if given.only in row.name], given.json, **about, held=[asdict(each) for each in held])


if __name__ == "__main__":
    main()
