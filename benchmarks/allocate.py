"""How long it takes to allocate ranks to units, beside MMScale's Table 2, and what allocation gains.

    python benchmarks/allocate.py [--repeats 5] [--json FILE] [--only 112]

MLLM-72B (MMScale Table 1 and section 7): ViT-Huge, Llama3-70B, and for Stable Diffusion 2.1 a transformer of as many
parameters (0.9 billion), on A800. As in the paper, encoder and generator are not divided in their TP groups: each rank
has a copy and takes a share of the images. The paper does not give its mixture; here every sequence has 8,192 tokens,
with 8 images of 4,096 patches, and 2 that are generated from 4,096 patches of a latent. Times are the processor's, of
one core, the best of the repeats; the tables of options are made before, as the paper's profile is. "Rigid" is
Megatron-LM as the paper runs it, TP 8 and PP 10; "proportional" is by operations.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from baselines.allocations import proportional
from rich.console import Console
from rich.table import Table
from rows import Row, finish
from rows import options as command_line

from motet.core.sampler import Distribution, Items, Sampler, Task
from motet.core.shapes import Transformer, connect, language_model, multimodal, vit
from motet.core.spec import ModelSpec
from motet.core.workload import BACKBONE
from motet.cost.analytic import Analytic
from motet.cost.catalogue import cluster
from motet.cost.flops import batch_flops
from motet.planner.disaggregated.allocate import allocate, rigid
from motet.planner.disaggregated.allocation import Allocation, Limits, UnitOptions
from motet.planner.disaggregated.placed_units import side_of
from motet.planner.disaggregated.unit_options import microbatch_sizes, unit_options
from motet.planner.job import Job

PUBLISHED = {1296: (1920, 922), 648: (960, 641), 324: (480, 441), 112: (240, 133)}
"""Table 2: GPUs -> (global batch size, milliseconds)."""


@dataclass(frozen=True)
class Allocated:
    """Table 2's job on so many ranks: how long allocating takes, and what three ways find."""

    num_ranks: int
    batch_size: int
    published_ms: float
    ours_ms: float
    num_options: int
    found: Allocation | None
    stiff: Allocation | None
    shared: Allocation | None


def model() -> ModelSpec:
    llm = Transformer(8192, 28672, 64, 8, gated=True, norm="rms", biases=(), causal=True)
    return multimodal(
        "MLLM-72B",
        language_model(llm, 80, 128_256),
        [connect(vit("image", Transformer(1280, 5120, 16), 32), 8192)],
        [vit("generator", Transformer(1536, 6144, 24), 31)],
    )


def job(num_ranks: int, batch_size: int) -> Job:
    image = Items(length=Distribution(value=4096), count=Distribution(value=8), length_per_token=8)
    picture = Items(length=Distribution(value=4096), count=Distribution(value=2), length_per_token=1 << 20)
    task = Task(name="interleaved", text=Distribution(value=4094), items={"image": image, "generator": picture})
    a800 = cluster("a800", num_ranks // 8)
    return Job(model(), a800, Sampler(task=(task,)).workload(num_examples=64), batch_size, Analytic(a800))


def options(planned: Job) -> list[UnitOptions]:
    """Microbatches of one, nothing recomputed, as in the paper."""
    found = []
    for module in planned.model.modules:
        own = module.name == BACKBONE
        sizes = (1,) if own else microbatch_sizes(planned)
        unit = unit_options(planned, module.name, side_of(planned.model, module.name), sizes, (0.0,))
        found.append(unit if own else copied(unit))
    return found


def copied(unit: UnitOptions) -> UnitOptions:
    """With a copy on each rank of a TP group, which takes its share of the images."""
    whole = unit.take(unit.tp == 1)
    degrees = np.array([1, 2, 4, 8])
    columns = {name: np.tile(own, len(degrees)) for name, own in vars(whole).items() if isinstance(own, np.ndarray)}
    columns["tp"] = np.repeat(degrees, len(whole.tp))
    for name in ("pass_s", "stage_s", "kept_bytes"):
        columns[name] = columns[name] / columns["tp"]
    return UnitOptions(unit.name, unit.side, **columns)


def best_ms(run: Callable[[], object], repeats: int) -> float:
    taken = []
    for _ in range(repeats):
        start = time.process_time()
        run()
        taken.append(time.process_time() - start)
    return 1e3 * min(taken)


def measure(num_ranks: int, batch_size: int, published_ms: float, repeats: int) -> Allocated:
    planned = job(num_ranks, batch_size)
    units = options(planned)
    limits = Limits(num_ranks, batch_size, planned.capacity_bytes)
    found = allocate(units, limits)
    as_paper = [unit.take((unit.tp == 8) & (unit.pp == 10)) if unit.side == 0 else unit for unit in units]
    flops = {name: float(count) for name, count in batch_flops(planned.model, planned.batch).items()}
    return Allocated(
        num_ranks,
        batch_size,
        published_ms,
        best_ms(lambda: allocate(units, limits), repeats),
        int(np.sum([len(unit.tp) for unit in units])),
        found,
        rigid(as_paper, limits),
        proportional(units, flops, limits),
    )


def text(found: Allocation | None) -> str:
    if found is None:
        return "does not fit"
    each = "; ".join(f"{share.name} {share.tp}x{share.dp}x{share.pp}" for share in found.shares)
    return f"{found.time_s:.2f} s on {found.num_ranks:,}: {each}"


def main() -> None:
    sizes = [str(num_ranks) for num_ranks in PUBLISHED]
    parser = command_line(__doc__, sizes, reads_lengths=False, draws=False)
    parser.add_argument("--repeats", type=int, default=5)
    asked = parser.parse_args()
    rows = []
    table = Table(
        "GPUs", "batch", "MMScale ms", "ours ms", "options", "step: TP x DP x PP of each unit, rigid, proportional"
    )
    for num_ranks, (batch_size, published_ms) in PUBLISHED.items():
        if asked.only not in ("", str(num_ranks)):
            continue
        row = measure(num_ranks, batch_size, published_ms, asked.repeats)
        rows.append(Row(f"{num_ranks} GPUs: ms to allocate", row.ours_ms))
        rows += [
            Row(f"{num_ranks} GPUs: seconds of a step, {way}", one.time_s)
            for way, one in (("found", row.found), ("rigid", row.stiff), ("proportional", row.shared))
            if one is not None
        ]
        steps = "\n".join(text(one) for one in (row.found, row.stiff, row.shared))
        table.add_row(
            f"{num_ranks:,}",
            f"{batch_size:,}",
            f"{published_ms:.0f}",
            f"{row.ours_ms:.0f}",
            f"{row.num_options:,}",
            steps,
        )
    Console().print(table)
    finish(rows, asked.json, seed=asked.seed)


if __name__ == "__main__":
    main()
