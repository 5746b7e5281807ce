"""OmniBal's data balance in training under ZeRO-3 (its Tables 2, 3 and 13), scaled down as a whole, beside its figures.

    python benchmarks/omnibal.py [--seed N] [--json FILE] [--only NAME] [--lengths FILE] [--samples N]

InternVL's lengths (../shared/data/lengths.csv.gz, or --lengths FILE; without the table nothing is measured), each
divided by 8, on the image encoder and the backbone of step_time.py under FSDP, on 2 gloo ranks with a core each. The
same samples are trained in every way, so ratios are those of GPU-days:

random, padded:   4 samples a rank, each as long as the longest there: OmniBal's baseline
random, packed:   the same without padding
length groups:    4 samples a rank of about one length, padded (its "length-group")
groups:           those of data.group = "auto" with balance.phases = "off"
balanced groups:  those with the default balance
balanced:         4 samples a rank in the mean, with the default balance and no groups

Seconds are those of the slowest rank, summed over an epoch; ways take turns, and the median of the turns counts. Losses
per target must agree over the epoch, as parameters do not change. What adaptive recomputation gains (Tables 5 and 7) is
measured by recompute.py, and what groups do to Dist Ratios at full size by groups.py.
"""

from __future__ import annotations

import csv
import gzip
import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rows import Row, finish, options, show
from step_time import MODEL, PATCH_DIM, VOCABULARY, Batch
from step_time import Row as Sample

from motet.assign.whole_step import decide_step
from motet.core.arrays import Int64Array
from motet.core.example import TokenSequence
from motet.core.workload import BACKBONE, BatchLengths, total_lengths
from motet.data.groups import GroupedOrder, group_caps
from motet.dispatch import BalanceConfig, RankBatch, assemble
from motet.models.build import build_mllm
from motet.runtime.fsdp import FSDPConfig, shard
from motet.runtime.mesh import build_mesh
from motet.runtime.step import TrainStep
from motet.train.balancing import build_orchestrator

NUM_RANKS, PER_RANK, SHRINK = 2, 4, 8
PADDED = ("random, padded", "length groups")
BALANCED = ("balanced groups", "balanced")
WAYS = ("random, padded", "random, packed", "length groups", "groups", "balanced groups", "balanced")
PAPER = {
    "groups": ("Tables 2 and 3; paper: 1.54 under ZeRO-3, and 1.19 to 1.46", 1.19),
    "balanced groups": ("beside OmniBal's 1.54", 1.54),
    "length groups": ("Table 3, length-group; paper: 1.06 to 1.14", 1.0),
    "balanced": ("Motet without groups", 1.19),
}
"""What each way gains over random, padded minibatches, in the paper, and the goal here."""


def samples_of(path: Path, count: int, rng: np.random.Generator) -> list[Sample]:
    with gzip.open(path, "rt") as table:
        rows = [row for row in csv.DictReader(table) if row["source"].startswith("internvl")]
    chosen = [rows[index] for index in rng.choice(len(rows), count, replace=False)]
    tiles = [int(row["num_images"] or 0) for row in chosen]
    return [
        Sample(int(row["text_tokens"]), (int(row["image_tokens"]) // number,) * number if number else ())
        for row, number in zip(chosen, tiles, strict=True)
    ]


class Samples(Batch):
    """All samples of the epoch; `sequence` can be longer than its sample, which pads it."""

    def padded(self, example: int, length: int) -> TokenSequence:
        own = self.sequence(example)
        more = length - int(self.lengths.sequence[example])
        return replace(
            own,
            tokens=np.concatenate([own.tokens, np.zeros(more, dtype=own.tokens.dtype)]),
            targets=np.concatenate([own.targets, np.zeros(more, dtype=bool)]),
        )


def steps_of(way: str, lengths: BatchLengths, seed: int) -> Iterator[tuple[Int64Array, Int64Array]]:
    """(samples, the group of each, which is its rank) of the steps of an epoch."""
    if way.endswith("groups") and way != "length groups":
        totals = {name: total_lengths(lengths, name) for name in ("image", BACKBONE)}
        order = GroupedOrder(totals, group_caps("auto", totals), seed)
        position = 0
        while position < lengths.num_examples:
            left = order.epoch(0).num_groups - int(np.searchsorted(order.epoch(0).offsets, position))
            step = order.step(position, min(NUM_RANKS, left))
            position += len(step.ids)
            assert step.group is not None
            yield step.ids, step.group
        return
    ids = np.random.default_rng(seed).permutation(lengths.num_examples)
    if way == "length groups":
        ids = np.argsort(lengths.sequence, kind="stable")
    minibatches = np.array_split(ids, len(ids) // PER_RANK)
    if way == "length groups":
        minibatches = [minibatches[index] for index in np.random.default_rng(seed).permutation(len(minibatches))]
    for first in range(0, len(minibatches), NUM_RANKS):
        step = minibatches[first : first + NUM_RANKS]
        yield np.concatenate(step), np.repeat(np.arange(len(step)), [len(part) for part in step])


def run_rank(rank: int, rendezvous: str, path: Path, seed: int, count: int, turns: int, out: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=NUM_RANKS, init_method=rendezvous)
    device, rng = torch.device("cpu"), np.random.default_rng(seed)
    mesh = build_mesh(device)
    config = MODEL.model_copy(update={"encoders": {"image": MODEL.encoders["image"]}})
    model = build_mllm(config, VOCABULARY)
    pools = {"image": rng.standard_normal((1 << 18, PATCH_DIM), np.float32)}
    epoch = Samples(samples_of(path, count, rng), model, NUM_RANKS, SHRINK, pools)
    orchestrators = {
        balanced: build_orchestrator(
            BalanceConfig(phases="all" if balanced else "off"), model, NUM_RANKS, device, torch.float32
        )
        for balanced in (False, True)
    }
    shard(model, mesh, FSDPConfig())
    step = TrainStep(model, mesh, torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0), max_grad_norm=1.0)

    def loaded(way: str, ids: Int64Array, group: Int64Array) -> RankBatch:
        lengths = replace(epoch.lengths.take(ids), group=group)
        longest = np.zeros(NUM_RANKS, dtype=np.int64)
        np.maximum.at(longest, group, lengths.sequence)
        if way in PADDED:
            lengths = replace(lengths, sequence=longest[group])
        decided = decide_step(orchestrators[way in BALANCED], lengths, 1).microbatches[0]
        decision = decided.decision
        first, end = (np.searchsorted(epoch.lengths.items["image"].example, ids, side) for side in ("left", "right"))
        items = np.concatenate([np.arange(a, b) for a, b in zip(first, end, strict=True)])
        sequences = [epoch.padded(int(ids[i]), int(lengths.sequence[i])) for i in decision.backbone.on_rank(rank)]
        media = {"image": [epoch.media("image", int(items[i])) for i in decision.assignments["image"].on_rank(rank)]}
        return assemble(decision, decided.lengths, rank, sequences, media)

    figures = {way: [] for way in WAYS}
    for turn in range(turns + 1):
        for way in WAYS if turn % 2 else reversed(WAYS):
            seconds = loss = targets = 0.0
            for number, (ids, group) in enumerate(steps_of(way, epoch.lengths, seed)):
                if turn == 0 and number == 3:
                    break  # The first turn warms up.
                batch = loaded(way, ids, group)
                dist.barrier(mesh.group)
                start_s = time.perf_counter()
                result = step.run([batch], number)
                dist.barrier(mesh.group)
                seconds += time.perf_counter() - start_s
                loss += result.loss * result.num_targets
                targets += result.num_targets
            if turn:
                figures[way].append((seconds, loss / targets, targets))
    if rank == 0:
        out.write_text(json.dumps(figures), encoding="utf-8")
    dist.destroy_process_group()


def rows_of(path: Path, seed: int, count: int, turns: int) -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "figures.json"
        mp.spawn(run_rank, (f"file://{folder}/rendezvous", path, seed, count, turns, out), nprocs=NUM_RANKS)
        figures = {way: np.array(of) for way, of in json.loads(out.read_text(encoding="utf-8")).items()}
    baseline = figures["random, padded"]
    yield Row("random, padded: targets of the epoch", float(baseline[0, 2]))
    for way in WAYS[1:]:
        ratio = float(np.median(baseline[:, 0] / figures[way][:, 0]))
        what, goal = PAPER.get(way, ("packing alone", 1.0))
        yield Row(f"{way}: epochs a second over random, padded ({what})", ratio, goal, ratio >= goal)
    worst = max(float(np.abs(of[:, 1] / baseline[:, 1] - 1).max()) for of in figures.values())
    yield Row("largest relative difference of the epoch's loss", worst, 1e-5)


def main() -> None:
    parser = options(__doc__, "rows whose name holds this; all are measured")
    parser.add_argument("--samples", type=int, default=96, help="of the epoch")
    parser.add_argument("--turns", type=int, default=3, help="epochs in each way")
    asked = parser.parse_args()
    if not asked.lengths.exists():
        print(f"{asked.lengths} is not there, so nothing is measured; --lengths names a table.")
        return
    rows: Sequence[Row] = [
        row for row in rows_of(asked.lengths, asked.seed, asked.samples, asked.turns) if asked.only in row.name
    ]
    for row in rows:
        show(row)
    finish(rows, asked.json, seed=asked.seed)


if __name__ == "__main__":
    main()
