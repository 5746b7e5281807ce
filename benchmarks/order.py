"""What grouping, dealing out and ordering the examples of a step gain in simulated step time, on real lengths.

    python benchmarks/order.py [--seed N] [--json benchmarks/results/order.json] [--only MLLM-10B]

One pipeline Plan a case, found by the planner with what the papers say of degrees, and simulated on batches of which
the first is the one that it was planned for. Ways: as they come, as many examples in each microbatch ("given"); the
same padded to the longest of a microbatch, as OmniBal's baseline is; groups under caps (OmniBal section 4.1); dealt
out, ordered, or both (MMScale sections 5.1, 5.2). Gains are medians over batches. Nothing is measured, so any machine
gives the same. Without the table of lengths there is nothing to show.
"""

from __future__ import annotations

import csv
import gzip
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from rows import Row, finish, options
from trials import with_any_tp

from motet.analyze.lengths import read_lengths
from motet.core.arrays import Int64Array
from motet.core.plan import Plan
from motet.core.workload import BatchLengths, ItemLengths, Workload
from motet.cost.model import CostModel
from motet.planner.candidate import Candidate, Pins, Strategy
from motet.planner.chain.propose import propose_chain
from motet.planner.disaggregated.propose import propose_disaggregated
from motet.planner.job import Job
from motet.planner.modality_parallel.propose import propose_modality_parallel
from motet.planner.order import caps_for
from motet.planning.cluster import ClusterOptions
from motet.planning.job import JobOptions, job_of_recipe
from motet.schedule import planned
from motet.simulate.predict.predict import assign_batch, predict_assigned

RECIPES = Path(__file__).parent.parent / "recipes"
NUM_BATCHES = 5
SEQUENCE = 8192
"""Tokens, MMScale section 7."""
PATCH = 16
MERGED = 28
"""Pixels a side: of MMScale's tokens of images, and of those that the table counts."""


@dataclass(frozen=True)
class Case:
    """published: what the paper reports for it. padded: whether its baseline pads."""

    name: str
    job: Job
    strategy: Strategy
    pins: Pins
    published: str = ""
    padded: bool = False


def rows_of(path: Path) -> list[dict[str, str]]:
    with gzip.open(path, "rt") as table:
        return list(csv.DictReader(table))


def internvl(rows: list[dict[str, str]]) -> Workload:
    """InternVL's examples as its model takes them: tiles of 1,024 patches, 256 tokens each, and text."""
    own = [(int(row["num_images"]), int(row["text_tokens"])) for row in rows if row["source"].startswith("internvl")]
    num_tiles, text = np.array(own).T
    return _workload("InternVL", text, {"image": (num_tiles, np.full(num_tiles.sum(), 1024), 4)})


def sequences(rows: list[dict[str, str]], rng: np.random.Generator, *, generated: bool) -> Workload:
    """Images and text of the table, an equal share of examples of each kind, interleaved to sequences as MMScale does.

    An example that does not fit begins the next sequence; what is left is padding. generated: each image is also one to
    be generated, in 4,096 patches of latents; otherwise one is, of each sequence.
    """
    kinds = {
        "caption": [row for row in rows if row["image_width"]],
        "image_chat": [row for row in rows if row["task"] == "image_chat"],
        "text": [row for row in rows if row["task"] == "text"],
    }
    packed: list[list[int]] = [[]]
    used = 0
    for _ in range(40_000):
        kind = kinds[list(kinds)[rng.integers(3)]]
        image, text = _patches(row := kind[rng.integers(len(kind))]), int(row["text_tokens"])
        size = image + text
        if size > SEQUENCE:
            continue
        if used + size > SEQUENCE:
            packed.append([])
            used = 0
        used += size
        packed[-1] += [image] if image else []
    counts = np.array([len(images) for images in packed])
    lengths = np.array([image for images in packed for image in images])
    made = counts if generated else np.ones_like(counts)
    columns = {"image": (counts, lengths, 1), "generated": (made, np.full(made.sum(), 4096), 4096)}
    padding = SEQUENCE - np.bincount(np.repeat(np.arange(len(counts)), counts), lengths, len(counts)) - made
    return _workload("images and text in sequences", padding.astype(np.int64), columns)


def _patches(row: dict[str, str]) -> int:
    if row["image_width"]:
        return -(-int(row["image_width"]) // PATCH) * -(-int(row["image_height"]) // PATCH)
    return round(int(row["image_tokens"] or 0) * (MERGED / PATCH) ** 2)


def _workload(source: str, text: Int64Array, columns: dict[str, tuple[Any, Any, int]]) -> Workload:
    """columns: per module, items of each example, the length of each item, and lengths a token."""
    items, sequence = {}, text.copy()
    for name, (counts, lengths, per_token) in columns.items():
        example = np.repeat(np.arange(len(text)), counts)
        items[name] = ItemLengths(example, lengths, -(-lengths // per_token))
        sequence += np.bincount(example, items[name].num_tokens, len(text)).astype(np.int64)
    return Workload(source, BatchLengths(sequence, text, np.zeros(len(text), np.int32), items))


def cases(path: Path, seed: int = 0) -> Iterator[Case]:
    rows, rng = rows_of(path), np.random.default_rng(seed)
    degrees = Pins(tp=2, pp=4, dp=4, microbatch_size=4, schedule="1f1b")
    yield Case(
        "InternVL-20B (OmniBal), 32 A100",
        replace(with_any_tp(_job("internvl_20b")), workload=internvl(rows)),
        propose_chain,
        degrees,
        "Table 3: groups over padded minibatches 1.46 (42.2 to 29.0 GPU-days) with balanced stages, 1.19 without",
        padded=True,
    )
    for name, generated in (("an image made", False), ("all images made", True)):
        workload = sequences(rows, rng, generated=generated)
        for nodes, batch_size in ((162, 1920), (12, 40)):
            job = _job("mllm_72b", f"cluster.nodes={nodes}", f"run.batch_size={batch_size}")
            yield Case(
                f"MLLM-72B (MMScale), {name}, {8 * nodes:,} A800, batch {batch_size:,}",
                replace(job, workload=workload),
                propose_disaggregated,
                Pins(tp=8, microbatch_size=1),
                "Figure 18: both 1.03 to 1.11 over random order, least for the largest model",
            )
    mixed = read_lengths(path).workload(even=True)
    for strategy, name in ((propose_chain, "chain"), (propose_modality_parallel, "modality parallel")):
        job = _job("orchmllm_10b", "cluster.nodes=8", "run.batch_size=2560")
        pins = Pins(schedule="1f1b")
        yield Case(f"MLLM-10B, {name}, 64 H100", replace(job, workload=mixed), strategy, pins)


def _job(recipe: str, *overrides: str) -> Job:
    return job_of_recipe(RECIPES / f"{recipe}.toml", JobOptions(ClusterOptions()), overrides)


def ways(job: Job, plan: Plan, *, padded: bool) -> Iterator[tuple[str, Plan]]:
    yield "given", plan
    if padded:
        modules = tuple(replace(module, padded=True) for module in plan.model.modules)
        yield "given, padded", replace(plan, model=replace(plan.model, modules=modules))
    for order in ("intra", "inter", "both"):
        yield order, replace(plan, order=order)
    if caps := caps_for(job, plan):
        yield "groups", replace(plan, microbatch_caps=caps)
        yield "groups, both", replace(plan, microbatch_caps=caps, order="both")


def step_s(plan: Plan, batch: BatchLengths, cost: CostModel) -> tuple[float, float]:
    """Seconds, and bytes of the fullest rank."""
    found = predict_assigned(plan, planned(plan), assign_batch(plan, batch, cost), cost)
    return found.step_s, float(found.peak_bytes.max())


def run(case: Case, seed: int) -> dict[str, Any]:
    """The gains of a case, on the batches of the seeds from `seed * NUM_BATCHES` on."""
    job = case.job
    leader = next(one for one in case.strategy(job, case.pins) if isinstance(one, Candidate))
    seeds = range(seed * NUM_BATCHES, (seed + 1) * NUM_BATCHES)
    batches = [job.workload.draw(job.batch_size, np.random.default_rng(each)) for each in seeds]
    rows: dict[str, dict[str, Any]] = {}
    given_s: list[float] = []
    for name, plan in ways(job, leader.plan, padded=case.padded):
        found = [step_s(plan, batch, job.cost) for batch in batches]
        steps = [step for step, _ in found]
        given_s = given_s or steps
        ratios = np.divide(given_s, steps)
        rows[name] = {
            "step_s": float(f"{np.median(steps):.4g}"),
            "given / this": [round(float(value), 4) for value in (np.median(ratios), ratios.min(), ratios.max())],
            "memory_gbytes": round(max(size for _, size in found) / 1e9, 1),
            **({"caps": dict(plan.microbatch_caps)} if plan.microbatch_caps else {}),
        }
    return {"case": case.name, "plan": leader.what, "published": case.published, "ways": rows}


def table_of(found: list[dict[str, Any]]) -> Table:
    table = Table("case", "way")
    for name in ("step, s", "given / this", "least", "most", "GB"):
        table.add_column(name, justify="right")
    for each in found:
        table.add_section()
        heads = ["\n".join(filter(None, (each[key] for key in ("case", "plan", "published"))))]
        for name, row in each["ways"].items():
            ratios = [f"{value:.3f}" for value in row["given / this"]]
            table.add_row(
                heads.pop() if heads else "", name, f"{row['step_s']:.4g}", *ratios, f"{row['memory_gbytes']}"
            )
    return table


def main() -> None:
    asked = options(__doc__, "a part of a case's name").parse_args()
    if not asked.lengths.exists():
        print(f"{asked.lengths} is not there: --lengths must name the table of lengths on which gains are to be shown.")
        return
    found = [run(case, asked.seed) for case in cases(asked.lengths, asked.seed) if asked.only in case.name]
    Console(width=150).print(table_of(found))
    rows = [
        Row(f"{case['case']}, {way}: gain", figures["given / this"][0])
        for case in found
        for way, figures in case["ways"].items()
    ]
    finish(rows, asked.json, seed=asked.seed, num_batches=NUM_BATCHES, cases=found)


if __name__ == "__main__":
    main()
