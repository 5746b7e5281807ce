"""What filling bubbles gains: none, fills of the Plan, and fills that each step decides by its lengths.

    python benchmarks/filling.py [--steps 7] [--seed 0] [--json FILE] [--only NAME]

Compute is emulated, as in emulated.py: a pass lasts as long as the figures of the device predict for its lengths, with
20 % noise from a seed that neither planner nor decision knows; order, messages and overlap are real. The device is so
slow that what the tiny model itself takes is part of the sleep. Lengths are log-normal, a third of the examples text.

- none: the encoder runs before the backbone's passes, and backward after them.
- static: the fills that the planner places, for microbatches that are alike.
- by step: `"filling": "by_step"`.

All three run the same steps with the same noise, in turns; rows are medians over steps. Decisions are timed by the
processor's time of this process, on Plans of 8 pipeline ranks with 4 encoder pipelines.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from emulated import NOISE, SHARES, Emulated, batches_of, build_model, measured_step
from rank_step import rank_step
from rows import Row, finish, options, show

from motet.assign.plan import assign_step
from motet.core.cluster import Cluster, Device, Link
from motet.core.plan import Fill, Plan, Unit
from motet.core.sampler import Sampler
from motet.core.shapes import Transformer, connect, language_model, multimodal, vit
from motet.core.workload import BatchLengths, ItemLengths, Workload
from motet.cost.catalogue import cluster
from motet.cost.source import cost_model
from motet.models.mllm import MLLM
from motet.models.spec import model_spec
from motet.planner.bubble_filling.propose import propose_bubble_filling
from motet.planner.candidate import Candidate, Pins
from motet.planner.job import Job
from motet.runtime import planned_step
from motet.runtime.place import Place
from motet.runtime.planned_step import PlannedStep
from motet.schedule import coarse_fills, fillable, planned
from motet.schedule.program import Action, Kind
from motet.simulate.filling.step_filler import StepFiller
from motet.simulate.predict.stage_pricing import Pricing
from motet.train.input.planned import StepDecider

STEP_S = 3.0
"""Seconds of a step without fills, to which the speed of the device is set."""
NUM_RANKS = {"2 ranks, 8 microbatches": (2, 8), "4 ranks, 12 microbatches": (4, 12)}
GAIN = 1.0
"""Goal of each ratio: what is more elaborate is not slower."""
DECISION_MS = 5.0


def lengths_of(rng: np.random.Generator, num: int) -> BatchLengths:
    """An example a microbatch: 4 to 200 tokens of text, and in two thirds of them one to three images of 16 to 400."""
    text = np.clip(rng.lognormal(3.2, 0.9, num), 4, 200).astype(np.int64)
    count = rng.integers(1, 4, num) * (rng.random(num) < 2 / 3)
    example = np.repeat(np.arange(num), count)
    rows = 4 * np.clip(rng.lognormal(3.0, 0.8, len(example)), 4, 100).astype(np.int64)
    images = np.bincount(example, rows, num).astype(np.int64)
    return BatchLengths(text + images, text - 1, np.zeros(num, np.int32), {"image": ItemLengths(example, rows, rows)})


def device(flops: float) -> Device:
    return Device("cpu", {"fp32": flops}, 10**12, 1e15)


def plans(model: MLLM, num_ranks: int, num_microbatches: int, seed: int) -> dict[str, Plan]:
    """The Plans by name, on a device with which a step without fills takes STEP_S."""
    where = Cluster(device(1e6), 1, num_ranks, Link(1e12, 0.0), Link(1e12, 0.0))
    rng = np.random.default_rng((seed, 1))
    workload = Workload("drawn", lengths_of(rng, 512))
    for _ in range(3):
        job = Job(model_spec(model), where, workload, num_microbatches, cost_model(where, "fp32"), "fp32")
        pins = Pins(tp=1, pp=num_ranks, dp=1, microbatch_size=1, schedule="1f1b")
        found = next(one for one in propose_bubble_filling(job, pins) if isinstance(one, Candidate))
        units = tuple(replace(unit, zero=0) for unit in found.plan.units)
        static = replace(found.plan, units=units)
        none = replace(static, fills=())
        step_s = statistics.median(predicted_s(none, lengths_of(rng, num_microbatches)) for _ in range(5))
        where = replace(where, device=device(where.device.peak_flops["fp32"] * step_s / STEP_S))
    return {"none": none, "static": static, "by step": replace(static, filling="by_step")}


def predicted_s(plan: Plan, lengths: BatchLengths) -> float:
    from motet.simulate.predict.predict import predict_assigned

    return predict_assigned(plan, planned(plan), assign_step(plan, lengths), cost_model(plan.cluster, "fp32")).step_s


def passes_s(place: Place, lengths: BatchLengths) -> dict[Kind, np.ndarray]:
    """Predicted seconds of passes by kind, [stages, microbatches]."""
    plan = place.program.layout.plan
    pricing = Pricing(plan, place.program, assign_step(plan, lengths), cost_model(plan.cluster, "fp32"))
    prices = [pricing.stage(stage, place.island) for stage in place.program.stages]
    forward = np.stack([one.forward for one in prices])
    backward = np.stack([one.input + one.weight + one.recompute for one in prices])
    return {Kind.F: forward, Kind.B: backward}


class EmulatedParts(Emulated):
    """Parts of a pass share its seconds evenly. num_parts: of each stage."""

    num_parts: list[int]

    @classmethod
    def _lasting(cls, handler):
        def run(action: Action) -> None:
            start_s = time.perf_counter()
            share = 1 if action.part < 0 else 1 / cls.num_parts[action.stage]
            end_s = start_s + share * Emulated.seconds[action.kind][action.stage, action.microbatch]
            handler(action)
            if (left_s := end_s - time.perf_counter()) > 0:
                time.sleep(left_s)
            Emulated.busy_s += time.perf_counter() - start_s

        return run


def built(plan: Plan, rank: int) -> tuple[PlannedStep, StepDecider]:
    step = rank_step(plan, build_model(), rank)
    return step, StepDecider(step.place)


def run_rank(rank: int, num_ranks: int, rendezvous: str, case: dict[str, Plan], num_steps: int, seed: int, out: Path):
    """Run each step under each Plan; rank 0 writes, per step and Plan, measured and predicted seconds."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=num_ranks, init_method=rendezvous)
    steps = {name: built(plan, rank) for name, plan in case.items()}
    planned_step.Executor = EmulatedParts
    figures = []
    for number in range(num_steps + 1):
        taken = {}
        for name, (step, decide) in steps.items():
            plan = case[name]
            lengths = lengths_of(np.random.default_rng((seed, number)), plan.batch_size)
            batches = batches_of(plan, step.place, lengths, decide)
            noise = np.random.default_rng((seed, number, 1))
            Emulated.seconds = {
                kind: seconds * np.clip(1 + NOISE * noise.normal(size=seconds.shape), 0.2, 1.8)
                for kind, seconds in passes_s(step.place, lengths).items()
            }
            EmulatedParts.num_parts = [stage.num_parts for stage in step.place.program.stages]
            assert set(Emulated.seconds) <= set(SHARES)
            taken[name] = measured_step(step, batches, number)[0], predicted_s(plan, lengths)
        figures.append(taken)
    if rank == 0:
        out.write_text(json.dumps(figures[1:]), encoding="utf-8")
    dist.destroy_process_group()


def gains(name: str, case: dict[str, Plan], num_steps: int, seed: int) -> list[Row]:
    num_ranks = max(unit.ranks.stop for unit in case["none"].units)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "figures.json"
        given = num_ranks, f"file://{folder}/rendezvous", case, num_steps, seed, out
        mp.spawn(run_rank, given, nprocs=num_ranks)
        figures = json.loads(out.read_text(encoding="utf-8"))
    rows = []
    for ours, theirs in (("static", "none"), ("by step", "static"), ("by step", "none")):
        for index, how in enumerate(("measured", "predicted")):
            ratio = statistics.median(step[ours][index] / step[theirs][index] for step in figures)
            rows.append(Row(f"{name}: {ours} over {theirs}, {how}", ratio, GAIN))
    for which in case:
        ratio = statistics.median(step[which][0] / step[which][1] for step in figures)
        rows.append(Row(f"{name}: {which}, measured over predicted", ratio))
    return rows


def decisions(num_microbatches: int) -> list[Row]:
    """Milliseconds of the processor for deciding a step of a ViT of 48 blocks beside an LLM of 32, TP 1 and PP 8."""
    image = connect(vit("image", Transformer(1664, 8192, 16), 48), 4096, downsample=4)
    llm = language_model(Transformer(4096, 14336, 32, causal=True), 32, 32_000)
    units = (
        Unit("llm", ({"backbone": 4},) * 8, pp=8, zero=1),
        Unit("image", ({"image": 24},) * 2, pp=2, dp=4, zero=1),
    )
    spec = multimodal("VLM", llm, [image])
    plan = Plan(spec, cluster("h100", 1, 8), units, batch_size=num_microbatches, filling="by_step")
    unfilled, encoders = fillable(plan)
    fills = coarse_fills(unfilled.program, encoders)
    plan = replace(plan, fills=tuple(Fill(f.rank, f"{f.action}.{part}", f.before) for f in fills for part in range(24)))
    images = {
        "image": {"count": {"value": 2}, "length": {"median": 1500, "spread": 0.9, "max": 9000}, "length_per_token": 4}
    }
    tasks = [{"name": "both", "text": {"median": 600, "spread": 1.0, "max": 8192}, "items": images}]
    workload = Sampler.model_validate({"task": tasks}).workload(num_examples=2048)
    filler, decide_ms, whole_ms = StepFiller(planned(plan)), [], []
    for seed in range(9):
        step = assign_step(plan, workload.draw(num_microbatches, np.random.default_rng(seed)))
        start_s = time.process_time()
        filler.runs(Pricing(plan, filler.own, step, cost_model(plan.cluster, plan.precision)), [0])
        decide_ms.append(1e3 * (time.process_time() - start_s))
        start_s = time.process_time()
        filler.program(step, 0)
        whole_ms.append(1e3 * (time.process_time() - start_s))
    name = f"{num_microbatches} microbatches, 4 encoder pipelines, PP 8"
    return [
        Row(f"{name}: decision, ms", statistics.median(decide_ms), DECISION_MS),
        Row(f"{name}: decision, memory, Program and its simulation, ms", statistics.median(whole_ms)),
    ]


def main() -> None:
    parser = options(__doc__, "a part of a case's name, e.g. '4 ranks', or 'decisions'", reads_lengths=False)
    parser.add_argument("--steps", type=int, default=7)
    asked = parser.parse_args()
    rows: list[Row] = []
    for name, (num_ranks, num_microbatches) in NUM_RANKS.items():
        if asked.only in name:
            case = plans(build_model(), num_ranks, num_microbatches, asked.seed)
            rows += gains(name, case, asked.steps, asked.seed)
    if asked.only in "decisions":
        rows += [row for num_microbatches in (8, 32) for row in decisions(num_microbatches)]
    for row in rows:
        show(row)
    finish(rows, asked.json, seed=asked.seed, emulated=True)


if __name__ == "__main__":
    main()
