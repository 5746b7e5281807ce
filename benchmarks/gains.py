"""What order, groups, deferred warm-up, frozen-aware stages and cut sequences gain, measured; compute is emulated.

    python benchmarks/gains.py [--steps 4] [--seed 0] [--json FILE] [--only NAME] [--lengths FILE]

Each row is the step of one Plan over that of another on the same examples: the median over steps, which 2 or 4 gloo
ranks take in turns. Beside it stand the simulator's ratio and the paper's figure. As in emulated.py a pass sleeps, here
for the seconds that its rows take, on real lengths (../shared/data/lengths.csv.gz) that are scaled down as a whole.
Where replicas run a pass together, as they share a sequence, its blocks sleep one by one, each before its replicas wait
for each other. Goal: within 5 % of the simulated ratio.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from emulated import IMAGE_BLOCKS, NUM_BLOCKS, OFF, ROW_S, Emulated, batches_of, build_model, measured_step
from order import rows_of
from rank_step import rank_step
from rows import Row, finish, options, show

from motet.assign.plan import assign_step
from motet.assign.planned_step import decide_planned_step
from motet.core.arrays import Float64Array
from motet.core.plan import Plan, Unit
from motet.core.workload import BACKBONE, BatchLengths, ItemLengths
from motet.cost.analytic import Analytic
from motet.cost.catalogue import cluster
from motet.cost.model import LayerSeconds
from motet.models.block import Block
from motet.models.mllm import MLLM
from motet.models.spec import model_spec
from motet.runtime import planned_step
from motet.schedule.program import MEETING_KINDS, Action, Kind
from motet.simulate.engine.meetings import MetPasses
from motet.simulate.predict.met_passes import met_passes
from motet.simulate.predict.predict import predict_assigned
from motet.simulate.predict.program_times import stage_times_of
from motet.simulate.predict.stage_pricing import Pricing
from motet.simulate.predict.step_seconds import PricedSteps
from motet.simulate.predict.traffic import Traffic

LONG_STEP_S = 8.0
"""Ranks that share a sequence exchange keys and values in each layer, which takes milliseconds on CPU ranks, however
little they send: of steps of 1.2 s, with layers of 3 ms, cutting gains 1.14 and 1.04 where 1.28 and 1.45 is simulated.
"""
SHRUNK = 1 / 32
"""Of real lengths."""
BLOCKS = ["image"] * IMAGE_BLOCKS + [BACKBONE] * NUM_BLOCKS
FULL = np.array([ROW_S[name] for name in BLOCKS])
"""The cost of blocks; a microbatch has about as many rows in both modules."""


@dataclass(frozen=True)
class Way:
    """A Plan by its units, and what else it says."""

    units: tuple[Unit, ...]
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Case:
    """Two Plans; the second is to be faster by a factor that a paper publishes.

    step_s:    seconds of the first step under the first Plan, as simulated; rows take as long as makes it so.
    dominated: of batches drawn, also of text alone, those whose longest sequence is more than a replica's share.
    """

    name: str
    published: str
    before: Way
    after: Way
    frozen: bool = False
    dominated: str = ""
    step_s: float = 1.2

    @property
    def num_ranks(self) -> int:
        return max(unit.ranks.stop for unit in self.before.units)


def cut(weights: Float64Array, num_stages: int, pp: int, **options: Any) -> tuple[Unit, ...]:
    """The chain whose heaviest stage is lightest."""
    cuts = min(
        ((0, *inner, len(BLOCKS)) for inner in combinations(range(1, len(BLOCKS)), num_stages - 1)),
        key=lambda ends: max(float(weights[first:stop].sum()) for first, stop in pairwise(ends)),
    )
    spans = [BLOCKS[first:stop] for first, stop in pairwise(cuts)]
    stages = tuple({name: span.count(name) for name in dict.fromkeys(span)} for span in spans)
    return (Unit("all", stages, pp=pp, zero=0, **options),)


def beside(pp: int, chunks: int) -> tuple[Unit, ...]:
    stages = ({BACKBONE: NUM_BLOCKS // (pp * chunks)},) * (pp * chunks)
    return Unit("image", ({"image": IMAGE_BLOCKS},), zero=0), Unit("llm", stages, first_rank=1, pp=pp, zero=0)


def cases() -> Iterator[Case]:
    for name, units, schedule in (
        ("chain of 2, dp 2, 1f1b", cut(FULL, 2, 2, dp=2), "1f1b"),
        ("chain of 4, 1f1b", cut(FULL, 4, 4), "1f1b"),
        ("chain of 2, dp 2, 2 stages a rank", cut(FULL, 4, 2, dp=2), "interleaved_1f1b"),
        ("chain of 2, 2 stages a rank", cut(FULL, 4, 2), "interleaved_1f1b"),
    ):
        given = Way(units, {"schedule": schedule, "microbatch_size": 2})
        for order in ("intra", "both"):
            after = replace(given, options={**given.options, "order": order})
            yield Case(f"order {order}, {name}", "MMScale Figure 18: 1.03 to 1.11", given, after)
    for name, units in (("chain of 2", cut(FULL, 4, 2)), ("encoder beside 3 ranks", beside(3, 2))):
        plain = Way(units, {"schedule": "interleaved_1f1b"})
        deferred = replace(plain, options={**plain.options, "deferred_warmup": True})
        yield Case(f"deferred warm-up, {name}, 2 stages a rank", "Optimus Figure 12: no delay", plain, deferred)
    fixed = Way(cut(FULL, 2, 2, dp=2), {"schedule": "1f1b", "microbatch_size": 4})
    grouped = replace(fixed, options={**fixed.options, "microbatch_caps": {"image": 0, BACKBONE: 0}})
    yield Case("groups, chain of 2, dp 2", "OmniBal Table 3: 1.19", fixed, grouped)
    for pp, dp in ((2, 2), (1, 4)):
        whole = Way(cut(FULL, pp, pp, dp=dp), {"schedule": "1f1b"})
        split = replace(whole, options={**whole.options, "balance": "split"})
        name = f"sequences cut over replicas, chain of {pp}, dp {dp}"
        yield Case(name, "no paper has it", whole, split, dominated=BACKBONE, step_s=LONG_STEP_S)
        ordered = replace(split, options={**split.options, "order": "both"})
        yield Case(f"order both, {name}", "no paper has it", split, ordered, dominated=BACKBONE, step_s=LONG_STEP_S)
    llm = Unit("llm", ({BACKBONE: NUM_BLOCKS // 2},) * 2, first_rank=2, pp=2, zero=0)
    apart = Way((Unit("image", ({"image": IMAGE_BLOCKS},), dp=2, zero=0), llm), {"balance": "per_phase"})
    shared = replace(apart, options={"balance": "split"})
    name = "images cut over 2 replicas, beside a chain of 2"
    yield Case(name, "no paper has it", apart, shared, dominated="image", step_s=LONG_STEP_S)
    frozen = np.where(np.array(BLOCKS) == "image", 1.0, 3.0) * FULL
    for pp in (2, 4):
        even, aware = Way(cut(FULL, pp, pp)), Way(cut(frozen, pp, pp))
        published = "Cornstarch Table 3: 1.00 to 1.17"
        yield Case(f"frozen-aware stages, chain of {pp}", published, even, aware, frozen=True)


class Rows(Analytic):
    """Seconds of rows of blocks alone; messages take what they take between devices of one node."""

    scale, in_blocks = 1.0, False

    def layer_seconds(self, module, layer, work, tp=1):
        seconds = work.rows * ROW_S[module] * self.scale * layer.in_block
        return LayerSeconds(seconds, seconds, seconds)

    def step_seconds(self, *numbers):
        return 0.0


def drawn(path: Path, case: Case, num_examples: int, rng: np.random.Generator) -> BatchLengths:
    """Examples of the table, scaled down: those with images, none much longer than others; or a dominated batch."""
    if not case.dominated:
        table = [row for row in rows_of(path) if row["image_tokens"] and int(row["num_images"] or 0) in range(1, 5)]
        return scaled([table[index] for index in rng.integers(0, len(table), num_examples)])
    table = [row for row in rows_of(path) if not row["audio_seconds"]]
    while True:
        lengths = scaled([table[index] for index in rng.integers(0, len(table), num_examples)], longest=None)
        own, unit = lengths.of(case.dominated).length, next(u for u in case.before.units if case.dominated in u.modules)
        if own.max(initial=0) * unit.dp > own.sum():
            return lengths


def scaled(chosen: Sequence[Mapping[str, str]], longest: int | None = 128) -> BatchLengths:
    """Lengths of rows of the table. longest: the most text of an example, and twice the most rows of an image."""
    counts = np.array([int(row["num_images"] or 0) for row in chosen])
    each = np.array([int(row["image_tokens"] or 0) for row in chosen]) / np.maximum(counts, 1) * SHRUNK
    rows = np.repeat(2 * np.clip(np.rint(each / 2), 1, longest and longest // 2).astype(np.int64), counts)
    text = np.clip(np.rint([int(row["text_tokens"] or 0) * SHRUNK for row in chosen]), 2, longest).astype(np.int64)
    example = np.repeat(np.arange(len(chosen)), counts)
    images = np.bincount(example, rows, len(chosen)).astype(np.int64)
    items = {"image": ItemLengths(example, rows, rows)}
    return BatchLengths(text + images, text - 1, np.zeros(len(chosen), np.int32), items)


def plan_of(model: MLLM, way: Way, num_ranks: int, first: BatchLengths) -> Plan:
    """The Plan; caps are a third above the mean of a group."""
    made = dict(way.options)
    plan = Plan(
        model_spec(model), cluster("h100", 1, num_ranks), way.units, first.num_examples, precision="fp32", **made
    )
    if not made.get("microbatch_caps"):
        return plan
    totals = {"image": int(first.items["image"].length.sum()), BACKBONE: int(first.sequence.sum())}
    num_groups = first.num_examples // plan.microbatch_size
    return replace(plan, microbatch_caps={name: 4 * total // (3 * num_groups) for name, total in totals.items()})


class Side:
    """One of the two Plans on this rank."""

    def __init__(self, case: Case, way: Way, rank: int, first: BatchLengths) -> None:
        model = build_model()
        if case.frozen:
            model.encoders["image"].requires_grad_(False)
        self.plan = plan_of(model, way, case.num_ranks, first)
        self.step = rank_step(self.plan, model, rank)
        # A rank's model has no backbone where its stages are all of encoders.
        held = {**model.encoders, **({} if model.backbone is None else {BACKBONE: model.backbone})}
        for name, module in held.items():
            for block in module.blocks:
                block.register_forward_pre_hook(partial(sleep_before, name))
                block.register_forward_hook(partial(sleep_in_backward, name))
        self.place = self.step.place
        self.cost = Rows(self.plan.cluster, "fp32")
        self.seconds = PricedSteps(self.plan, self.cost, self.place.program)

    def simulated_s(self, lengths: BatchLengths) -> float:
        assignment = assign_step(self.plan, lengths, seconds=self.seconds)
        return predict_assigned(self.plan, self.place.program, assignment, self.cost).step_s

    def measured_s(self, lengths: BatchLengths, number: int) -> float:
        program = self.place.program
        pricing = Pricing(self.plan, program, assign_step(self.plan, lengths, seconds=self.seconds), self.cost)
        times = stage_times_of(pricing, Traffic(pricing), self.place.island)
        both = times.input_s + times.weight_s
        Emulated.seconds = {Kind.F: times.forward_s, Kind.B: both, Kind.I: times.input_s, Kind.W: times.weight_s}
        Emulated.sleeps = partial(is_met, met_passes(pricing, [self.place.island]))
        decide = partial(decide_planned_step, self.plan, seconds=self.seconds)
        return measured_step(self.step, batches_of(self.plan, self.place, lengths, decide), number)[0]


def is_met(meeting: MetPasses | None, action: Action) -> bool:
    """Whether replicas run a pass together. meeting: of the rank's island."""
    is_any = meeting is not None and meeting.number[0, action.stage, action.microbatch] >= 0
    Rows.in_blocks = is_any and action.kind in MEETING_KINDS
    return Rows.in_blocks


class Slow(torch.autograd.Function):
    """What it is given; backward, it sleeps first."""

    @staticmethod
    def forward(ctx, hidden, seconds):
        ctx.seconds = seconds
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(ctx.seconds)
        return gradient, None


def sleep_before(name: str, block: Block, given: tuple[torch.Tensor, ...]) -> None:
    """Sleep for the rows of a block of a module."""
    if Rows.in_blocks and not block.skipped:
        time.sleep(given[0].shape[-2] * ROW_S[name] * Rows.scale)


def sleep_in_backward(name: str, block: Block, given: object, hidden: torch.Tensor) -> torch.Tensor:
    """The output of a block, whose backward pass sleeps as `Rows` prices it."""
    if not Rows.in_blocks or block.skipped:
        return hidden
    return Slow.apply(hidden, 2 * hidden.shape[-2] * ROW_S[name] * Rows.scale)


def run_rank(rank: int, rendezvous: str, case: Case, path: Path, num_steps: int, seed: int, out: Path) -> None:
    """Run both Plans in turns; rank 0 writes (measured ratio, simulated ratio) of each step."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=case.num_ranks, init_method=rendezvous)
    dp, size = case.before.units[-1].dp, case.before.options.get("microbatch_size", 1)
    generators = [np.random.default_rng((seed, number)) for number in range(num_steps + 1)]
    batches = [drawn(path, case, 8 * dp * size, rng) for rng in generators]
    sides = [Side(case, way, rank, batches[0]) for way in (case.before, case.after)]
    Rows.scale = case.step_s / sides[0].simulated_s(batches[0])
    planned_step.Executor = Emulated
    figures = []
    for number, lengths in enumerate(batches):
        expected = [side.simulated_s(lengths) for side in sides]
        measured = [side.measured_s(lengths, number) for side in sides]
        if number:
            figures.append((measured[0] / measured[1], expected[0] / expected[1]))
    if rank == 0:
        out.write_text(json.dumps(figures), encoding="utf-8")
    dist.destroy_process_group()


def main() -> None:
    parser = options(__doc__, "a part of a case's name, e.g. order")
    parser.add_argument("--steps", type=int, default=4)
    asked = parser.parse_args()
    if not asked.lengths.exists():
        print(f"{asked.lengths} is not there: --lengths must name the table of lengths.")
        return
    rows: list[Row] = []
    for case in cases():
        if asked.only not in case.name:
            continue
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "figures.json"
            given = f"file://{folder}/rendezvous", case, asked.lengths, asked.steps, asked.seed, out
            mp.spawn(run_rank, given, nprocs=case.num_ranks)
            measured, expected = map(statistics.median, zip(*json.loads(out.read_text(encoding="utf-8"))))
        for row in (
            Row(f"{case.name}: measured ({case.published})", measured, expected, abs(measured / expected - 1) <= OFF),
            Row(f"{case.name}: simulated", expected),
        ):
            show(row)
            rows.append(row)
    finish(rows, asked.json, seed=asked.seed, emulated=True)


if __name__ == "__main__":
    main()
