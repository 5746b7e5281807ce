"""How much longer a sequence 4 ranks train than one, in the same memory each.

    python benchmarks/longest.py [--ranks 4] [--json longest.json]

One rank trains a sequence of --rows rows; the most bytes that it holds in its second step are what each rank may fill.
Then --ranks ranks share a sequence, `balance.method = "split"`, of more and more times these rows, until one of them
fills more. The same model, proportioned as Llama 3 8B, in float32, whole on every rank (ZeRO 0), the same recomputation
and AdamW in both. On a CPU every storage that an operation of torch returns is counted until it is freed
(memory.py: LiveBytes), and so are parameters. Beside what is measured stands what the memory model says.

Gradients of whole copies stay in buckets from step to step where several ranks sum them (`runtime/replicas.py`), and
one rank frees them; so sequences are to be long enough that activations are most of the memory.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from memory import LiveBytes
from rich.console import Console
from rich.table import Table
from rows import OF_ROWS, Row, finish, options

from motet.balance import Link
from motet.core.cluster import Cluster, Device
from motet.core.example import TokenSequence
from motet.core.plan import Plan, Unit
from motet.core.workload import BatchLengths
from motet.dispatch import BalanceConfig, assemble
from motet.models.build import BackboneConfig, ModelConfig, build_mllm
from motet.models.spec import model_spec
from motet.planner.alone import bytes_alone
from motet.runtime.fsdp import FSDPConfig, shard
from motet.runtime.mesh import build_mesh
from motet.runtime.step import TrainStep
from motet.train.balancing import build_orchestrator

VOCABULARY = 4096
LAYERS = 4
MODEL = ModelConfig(
    backbone=BackboneConfig(
        family="llama",
        config={
            "hidden_size": 128, "intermediate_size": 448, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
            "num_key_value_heads": 1, "max_position_embeddings": 1 << 16,
        },
    )
)  # fmt: skip
TIMES = 3.0, 3.25, 3.5, 3.75, 4.0


@dataclass(frozen=True)
class Filled:
    """Bytes of the fullest rank in a step with one sequence. recomputed: every block is."""

    recomputed: bool
    num_ranks: int
    rows: int
    measured_bytes: int
    predicted_bytes: int


def run_rank(
    rank: int, num_ranks: int, rendezvous: str, rows: tuple[int, ...], limits: dict[bool, int], out: str
) -> None:
    """Measure sequences of these lengths on all ranks, each no further than to the first beyond the limit."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=num_ranks, init_method=rendezvous)
    found = []
    for recomputed in (False, True):
        for length in rows:
            found.append(measured(length, num_ranks, recomputed))
            if found[-1].measured_bytes > limits.get(recomputed, 1 << 62):
                break
    if rank == 0:
        Path(out).write_text(json.dumps([asdict(row) for row in found]))
    dist.destroy_process_group()


def measured(length: int, num_ranks: int, recomputed: bool) -> Filled:
    """One sequence on all ranks. A collective."""
    device, mesh = torch.device("cpu"), build_mesh(torch.device("cpu"), shard_size=1)
    model = build_mllm(MODEL, VOCABULARY)
    spec, parameters = model_spec(model), sum(p.numel() * p.element_size() for p in model.parameters())
    tokens = np.arange(length) % VOCABULARY
    sequence = TokenSequence(tokens, np.arange(length) > 0, (), np.zeros(0, dtype=np.int64))
    lengths = BatchLengths(np.array([length]), np.array([length - 1]), np.zeros(1, dtype=np.int32), {})
    balance = BalanceConfig(method="split") if num_ranks > 1 else BalanceConfig()
    decision = build_orchestrator(balance, model, num_ranks, device, torch.float32).decide(lengths)
    if num_ranks > 1 and (decision.cuts is None or decision.cuts.degrees != {0: num_ranks}):
        raise SystemExit(f"the sequence is not shared by {num_ranks} ranks: {decision.why}")
    batch = assemble(decision, lengths, mesh.rank, [sequence] * len(decision.sequences_on(mesh.rank)), {})
    shard(model, mesh, FSDPConfig(shard_size=1, recompute=recomputed))
    step = TrainStep(model, mesh, torch.optim.AdamW(model.parameters(), fused=True), max_grad_norm=1.0)
    with LiveBytes() as live:
        for number in range(2):
            step.run([batch], number)
    sizes: list[int | None] = [None] * num_ranks
    dist.all_gather_object(sizes, live.peak, group=mesh.host_group)
    most = max(size for size in sizes if size is not None)
    return Filled(recomputed, num_ranks, length, most + parameters, predicted(spec, lengths, num_ranks, recomputed))


def predicted(spec, lengths: BatchLengths, num_ranks: int, recomputed: bool) -> int:
    """What the memory model says of the sequence, shared by all ranks."""
    link = Link(1e9, 0.0)
    cluster = Cluster(Device("cpu", {"fp32": 1e9}, 1 << 60, 1e9), 1, num_ranks, link, link)
    blocks = {"backbone": LAYERS}
    unit = Unit("all", (blocks,), dp=num_ranks, zero=0, recompute=(blocks,) if recomputed else ())
    plan = Plan(spec, cluster, (unit,), num_ranks, schedule="data_parallel", precision="fp32", balance="auto")
    return int(bytes_alone(plan, lengths, shared_by={"backbone": num_ranks})[0])


def rows_of(num_ranks: int, rows: tuple[int, ...], limits: dict[bool, int]) -> list[Filled]:
    """Measure in processes of their own."""
    with tempfile.TemporaryDirectory() as folder:
        out = f"{folder}/rows.json"
        mp.spawn(run_rank, (num_ranks, f"file://{folder}/rendezvous", rows, limits, out), nprocs=num_ranks)
        return [Filled(**row) for row in json.loads(Path(out).read_text())]


def longest(found: list[Filled], limits: dict[bool, int], recomputed: bool) -> float:
    """The most rows that fill no more than the limit: between the measured ones, bytes are taken to be even."""
    rows = [row for row in found if row.recomputed == recomputed]
    fits = [row for row in rows if row.measured_bytes <= limits[recomputed]]
    beyond = next((row for row in rows if row.measured_bytes > limits[recomputed]), None)
    if not fits:
        return 0.0
    if beyond is None:
        return float(fits[-1].rows)
    last = fits[-1]
    share = (limits[recomputed] - last.measured_bytes) / (beyond.measured_bytes - last.measured_bytes)
    return last.rows + share * (beyond.rows - last.rows)


def table_of(rows: list[Filled], limits: dict[bool, int], alone_rows: int) -> Iterator[str]:
    """Print all rows; a sentence for each kind of recomputation."""
    table = Table("blocks", "ranks", "rows", "times", "most on a rank, MB", "predicted", "measured / predicted")
    for row in rows:
        table.add_row(
            "recomputed" if row.recomputed else "kept", str(row.num_ranks), f"{row.rows:,}",
            f"{row.rows / alone_rows:.2f}", f"{row.measured_bytes / 1e6:.1f}", f"{row.predicted_bytes / 1e6:.1f}",
            f"{row.measured_bytes / row.predicted_bytes:.2f}",
        )  # fmt: skip
    Console().print(table)
    shared = [row for row in rows if row.num_ranks > 1]
    for recomputed in (False, True):
        times = longest(shared, limits, recomputed) / alone_rows
        yield f"blocks {'recomputed' if recomputed else 'kept'}: {times:.2f} times as long as one rank"


def main() -> None:
    parser = options(__doc__, OF_ROWS, reads_lengths=False, draws=False)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rows", type=int, default=2048, help="of the sequence that one rank trains")
    given = parser.parse_args()
    alone = rows_of(1, (given.rows,), {})
    limits = {row.recomputed: row.measured_bytes for row in alone}
    shared = rows_of(given.ranks, tuple(round(times * given.rows) for times in TIMES), limits)
    sentences = list(table_of([*alone, *shared], limits, given.rows))
    print(*sentences, sep="\n")
    rows = [
        Row(f"times as long as one rank, blocks {name}", longest(shared, limits, recomputed) / given.rows)
        for name, recomputed in (("kept", False), ("recomputed", True))
    ]
    about = {"torch": torch.__version__, "alone_rows": given.rows, "seed": given.seed}
    sequences = [asdict(row) for row in (*alone, *shared)]
    finish([row for row in rows if given.only in row.name], given.json, **about, sequences=sequences)


if __name__ == "__main__":
    main()
