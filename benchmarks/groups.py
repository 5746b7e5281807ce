"""What `data.group` does to steps of real lengths, beside OmniBal's own figures (its Tables 2, 3 and 14).

    python benchmarks/groups.py [--seed N] [--json FILE] [--only NAME]

InternVL's lengths (../shared/data/lengths.csv.gz, or --lengths FILE; without the table nothing is measured) on
InternVL-Chat-1.5 (recipes/internvl_20b.toml) under ZeRO-3 on 32 ranks, an epoch in steps of one microbatch. "random" is
four samples a rank, OmniBal's baseline; "groups" are those that training takes with data.group = "auto" and
balance.phases = "off"; "balanced groups" with the default balance. Its samples are not OmniBal's 1.2 million, which are
not published, and it does not state over how many devices its Dist Ratio is: goals are its figures all the same.
A step is predicted by operations: each phase takes as long as its busiest rank. Nothing is trained.
"""

from __future__ import annotations

import csv
import gzip
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
from rows import ROOT, Row, finish, options, show

from motet.assign.balancing import operation_costs
from motet.assign.orchestrator import Decision, Orchestrator
from motet.assign.whole_step import decide_step
from motet.balance import ASSUMED_SPEEDS, Packed, Padded, dist_ratio, pad_ratio, score
from motet.core.arrays import Int64Array
from motet.core.workload import BACKBONE, BatchLengths, ItemLengths, total_lengths
from motet.data.groups import GroupedOrder, group_caps
from motet.planning.planned_recipe import read_job_recipe

NUM_RANKS, PER_RANK, RANKS_PER_NODE = 32, 4, 8
TILE = 1025
PHASES = {"image": "VIT", BACKBONE: "LLM"}
PAPER = {"image": 0.02, BACKBONE: 0.14}
SPEED_UP = 1.54
"""OmniBal's Table 2, 6+20B under DeepSpeed: ZeRO-3, where grouping is all that OmniBal does."""


def internvl(path: Path) -> BatchLengths:
    """The InternVL rows of a table of lengths; an item is a tile."""
    with gzip.open(path, "rt") as table:
        rows = [row for row in csv.DictReader(table) if row["source"].startswith("internvl")]
    tiles, image, text = (
        np.array([int(row[column] or 0) for row in rows]) for column in ("num_images", "image_tokens", "text_tokens")
    )
    example = np.repeat(np.arange(len(rows)), tiles)
    items = ItemLengths(example, np.full(len(example), TILE), (image // np.maximum(tiles, 1))[example])
    return BatchLengths(image + text, text, np.zeros(len(rows), np.int32), {"image": items})


def random_steps(lengths: BatchLengths, rng: np.random.Generator) -> Iterator[BatchLengths]:
    count = lengths.num_examples // (NUM_RANKS * PER_RANK)
    group = np.repeat(np.arange(NUM_RANKS), PER_RANK)
    for ids in rng.permutation(lengths.num_examples)[: count * len(group)].reshape(count, -1):
        yield replace(lengths.take(ids), group=group)


def grouped_steps(lengths: BatchLengths, order: GroupedOrder, num_groups: int) -> Iterator[BatchLengths]:
    """The whole steps of the first groups of the first epoch."""
    position = 0
    for _ in range(num_groups // NUM_RANKS):
        step = order.step(position, NUM_RANKS)
        position += len(step.ids)
        yield replace(lengths.take(step.ids), group=step.group)


def by_rank(decision: Decision, lengths: BatchLengths, phase: str, *, padded: bool = False) -> Int64Array:
    """The length that each rank computes of a phase, int64 [NUM_RANKS]. padded: each sequence as the longest there."""
    kind = Padded() if padded and phase == BACKBONE else Packed()
    return score(decision.assignments[phase].ranks, lengths.of(phase).length, NUM_RANKS, kind).loads


def step_over_mean(decision: Decision, *, padded: BatchLengths | None = None) -> float:
    """The predicted step over what it would take if all ranks had the same work and none were padding."""
    took = needed = 0.0
    for phase, placed in decision.assignments.items():
        loads = placed.loads.astype(float)
        needed += loads.mean()
        if padded is not None:
            loads *= by_rank(decision, padded, phase, padded=True) / np.maximum(by_rank(decision, padded, phase), 1)
        took += loads.max()
    return took / needed


def measured(name: str, orchestrator: Orchestrator, steps: list[BatchLengths], *, padded: bool = False) -> list[Row]:
    decided = [(decide_step(orchestrator, lengths, 1).microbatches[0].decision, lengths) for lengths in steps]
    is_ours = name.startswith(("groups", "balanced"))
    rows = []
    for phase, called in PHASES.items():
        totals = np.stack([by_rank(decision, lengths, phase, padded=padded) for decision, lengths in decided])
        rows.append(Row(f"{name}: Dist Ratio {called}", dist_ratio(totals), PAPER[phase] if is_ours else None))
    over = [step_over_mean(decision, padded=lengths if padded else None) for decision, lengths in decided]
    rows.append(Row(f"{name}: predicted step over mean work", float(np.mean(over))))
    return rows


def measure(path: Path, seed: int, only: str) -> list[Row]:
    lengths, rng = internvl(path), np.random.default_rng(seed)
    model = read_job_recipe(ROOT / "recipes" / "internvl_20b.toml").model
    costs = operation_costs(model, {}, ASSUMED_SPEEDS["cuda"], 2, RANKS_PER_NODE)
    as_it_is = Orchestrator(costs.costs, NUM_RANKS, (), work=costs.work)
    names = [module.name for module in model.modules]
    balanced = Orchestrator(costs.costs, NUM_RANKS, names, work=costs.work, times=costs.times)
    totals = {name: total_lengths(lengths, name) for name in PHASES}
    start_s = time.perf_counter()
    order = GroupedOrder(totals, group_caps("auto", totals), seed)
    epoch = order.epoch(0)
    seconds = time.perf_counter() - start_s
    at_random = list(random_steps(lengths, rng))
    offsets = np.arange(0, len(at_random) * NUM_RANKS * PER_RANK + 1, PER_RANK)
    padding = pad_ratio(np.concatenate([step.sequence for step in at_random]), offsets)
    ways = {
        "random, padded": lambda: measured("random, padded", as_it_is, at_random, padded=True),
        "random, packed": lambda: measured("random, packed", as_it_is, at_random),
        "groups": lambda: measured("groups", as_it_is, list(grouped_steps(lengths, order, epoch.num_groups))),
        "groups, full ones": lambda: measured(
            "groups, full ones", as_it_is, list(grouped_steps(lengths, order, epoch.num_full))
        ),
        "balanced groups": lambda: measured(
            "balanced groups", balanced, list(grouped_steps(lengths, order, epoch.num_groups))
        ),
    }
    about = [
        Row("random, padded: Pad Ratio LLM", padding),
        Row("groups: samples in the mean", lengths.num_examples / epoch.num_groups),
        Row("groups: share of full ones", epoch.num_full / epoch.num_groups),
        Row(f"groups: seconds for {lengths.num_examples:,} samples", seconds),
    ]
    rows = [row for row in about if only in row.name]
    rows += [row for name, way in ways.items() if only in name for row in way()]
    over = {row.name: row.value for row in rows if row.name.endswith("over mean work")}
    for ours in ("groups", "balanced groups"):
        ends = [f"{name}: predicted step over mean work" for name in ("random, padded", ours)]
        if over.keys() >= set(ends):
            speed_up = over[ends[0]] / over[ends[1]]
            rows.append(
                Row(f"{ours}: predicted speed-up over random, padded", speed_up, SPEED_UP, speed_up >= SPEED_UP)
            )
    return rows


def main() -> None:
    parser = options(__doc__, "ways whose name holds this")
    asked = parser.parse_args()
    if not asked.lengths.exists():
        print(f"{asked.lengths} is not there, so nothing is measured; --lengths names a table.")
        return
    rows = measure(asked.lengths, asked.seed, asked.only)
    for row in rows:
        show(row)
    finish(rows, asked.json, seed=asked.seed, emulated=True)


if __name__ == "__main__":
    main()
