"""What filling bubbles gains: none, fills of the Plan, fills inside passes, sums of encoders apart, and fills that each
step decides.

    python benchmarks/filling.py [--steps 7] [--seed 0] [--json FILE] [--only NAME]

Compute is emulated, as in emulated.py: a pass lasts as long as the figures of the device predict for its lengths, with
20 % noise from a seed that neither planner nor decision knows; order, messages and overlap are real. The device is so
slow that what the tiny model itself takes is part of the sleep. Lengths are log-normal, a third of the examples text.

- none: the encoder runs before the backbone's passes, and backward after them.
- static: the fills that the planner places, for microbatches that are alike.
- by step: `"filling": "by_step"`.
- inside: static fills of which some are inside passes of a backbone with tensor parallelism, beside its collectives,
  which take about half of a pass (emulated_halves.py). Lengths are about alike: such fills are placed for the mean.

- sums apart: static fills of an encoder with tensor parallelism, whose sums are beside the backbone and other passes.

All of a case run the same steps with the same noise, in turns; rows are medians over steps. Decisions are timed by the
processor's time of this process, on Plans of 8 pipeline ranks with 4 encoder pipelines.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from emulated import NOISE, OFF, SHARES, Emulated, batches_of, build_model, measured_step
from emulated_halves import EncoderPart, PassSeconds, computing, emulate_halves, passing, sleep_until
from rank_step import rank_step
from rows import Row, finish, options, show

from motet.assign.plan import assign_step
from motet.core.cluster import Cluster, Device, Link
from motet.core.module_degrees import ModuleDegrees
from motet.core.plan import Fill, Plan, Unit
from motet.core.sampler import Sampler
from motet.core.shapes import Transformer, connect, language_model, multimodal, vit
from motet.core.workload import BACKBONE, BatchLengths, ItemLengths, Workload
from motet.cost.catalogue import cluster
from motet.cost.source import cost_model
from motet.models.mllm import MLLM
from motet.models.spec import model_spec
from motet.planner.bubble_filling.fills import is_inside_pass
from motet.planner.bubble_filling.propose import propose_bubble_filling
from motet.planner.candidate import Candidate, Pins
from motet.planner.job import Job
from motet.runtime import planned_step
from motet.runtime.place import Place
from motet.runtime.planned_step import PlannedStep
from motet.schedule import PlannedStage, coarse_fills, fillable, planned
from motet.schedule.layout import LAYER_PARTS
from motet.schedule.program import Action, Kind
from motet.simulate.filling.step_filler import StepFiller
from motet.simulate.predict.pass_parts import share_beside
from motet.simulate.predict.stage_pricing import Pricing
from motet.train.input.planned import StepDecider

GAIN = 1.0
"""Goal of each ratio: what is more elaborate is not slower."""
DECISION_MS = 5.0


@dataclass(frozen=True)
class Case:
    """Ways to fill the bubbles of a pipeline, on as many examples as microbatches.

    step_s: seconds of a step without fills, to which the speed of the device is set.
    tp:     of the backbone; above 1, fills inside passes are measured, and lengths are about alike.
    encoder_tp: above 1, sums of the encoder apart are measured in place of fills inside passes.
    sizes:  of the model.
    """

    num_ranks: int
    num_microbatches: int
    step_s: float = 3.0
    tp: int = 1
    encoder_tp: int = 1
    sizes: Mapping[str, int] = field(default_factory=dict)

    def model(self) -> MLLM:
        return build_model(**self.sizes)

    def lengths_of(self, rng: np.random.Generator, num: int) -> BatchLengths:
        """Text of 4 to 200 tokens, and in two thirds of the examples one to three images of 16 to 400 patches; or,
        about alike, text of some 37 and two images of some 80.
        """
        if self.tp > 1:
            text, count = rng.lognormal(3.6, 0.1, num), np.full(num, 2)
        else:
            text, count = rng.lognormal(3.2, 0.9, num), rng.integers(1, 4, num) * (rng.random(num) < 2 / 3)
        text = np.clip(text, 4, 200).astype(np.int64)
        example = np.repeat(np.arange(num), count)
        rows = rng.lognormal(3.0, 0.1 if self.tp > 1 else 0.8, len(example))
        rows = 4 * np.clip(rows, 4, 100).astype(np.int64)
        images = np.bincount(example, rows, num).astype(np.int64)
        return BatchLengths(
            text + images, text - 1, np.zeros(num, np.int32), {"image": ItemLengths(example, rows, rows)}
        )

    def cluster(self, speed: float = 1.0) -> Cluster:
        """A node for each stage of the backbone, whose links are as slow as its devices. speed: of both."""
        device = Device("cpu", {"fp32": 1e6 * speed}, 10**12, 1e15)
        within = Link(6e3 * speed if self.tp > 1 else 1e12, 0.0)
        return Cluster(device, self.num_ranks // self.tp, self.tp, within, Link(1e12, 0.0))

    @property
    def pins(self) -> Pins:
        """Beside TP, the encoder has TP, too, or as many pipeline ranks as the backbone, which share its items."""
        pp = self.num_ranks // self.tp
        of_image = ModuleDegrees(tp=1, pp=pp) if self.encoder_tp == 1 else ModuleDegrees(tp=self.encoder_tp, pp=1)
        modules = {"image": of_image} if self.tp > 1 else {}
        recompute = "none" if self.tp > 1 else None  # Where layers are recomputed, ranks have all rows.
        return Pins(tp=self.tp, pp=pp, dp=1, microbatch_size=1, schedule="1f1b", recompute=recompute, modules=modules)


CASES = {
    "2 ranks, 8 microbatches": Case(2, 8),
    "4 ranks, 12 microbatches": Case(4, 12),
    "4 ranks, TP 2, 6 microbatches": Case(
        4, 6, step_s=12.0, tp=2, sizes={"dim": 64, "num_blocks": 4, "image_blocks": 8, "key_heads": 2}
    ),
    "4 ranks, TP 2, encoder too, 6 microbatches": Case(
        4,
        6,
        step_s=12.0,
        tp=2,
        encoder_tp=2,
        sizes={"dim": 64, "num_blocks": 4, "image_dim": 64, "image_blocks": 4, "key_heads": 2},
    ),
}


def plans(case: Case, seed: int) -> dict[str, Plan]:
    """The Plans by name, the plainest first, on a device with which a step without fills takes as long as it is to."""
    rng, speed, model = np.random.default_rng((seed, 1)), 1.0, model_spec(case.model())
    workload = Workload("drawn", case.lengths_of(rng, 512))
    for _ in range(3):
        where = case.cluster(speed)
        job = Job(model, where, workload, case.num_microbatches, cost_model(where, "fp32"), "fp32")
        found = [one for one in propose_bubble_filling(job, case.pins) if isinstance(one, Candidate)]
        placed = [replace(one.plan, units=tuple(replace(unit, zero=0) for unit in one.plan.units)) for one in found]
        none = replace(placed[0], fills=())
        lengths = [case.lengths_of(rng, case.num_microbatches) for _ in range(5)]
        speed *= statistics.median(predicted_s(none, each) for each in lengths) / case.step_s
    if case.tp == 1:
        return {"none": none, "static": placed[0], "by step": replace(placed[0], filling="by_step")}
    if case.encoder_tp > 1:
        has_sums = [any(stage.has_sums for stage in planned(plan).stages) for plan in placed]
        return {"none": none, "static": placed[0], "sums apart": placed[has_sums.index(True)]}
    inside, between = placed[:2]
    assert [any(map(is_inside_pass, plan.fills)) for plan in (inside, between)] == [True, False]
    return {"none": none, "static": between, "inside": inside}


def predicted_s(plan: Plan, lengths: BatchLengths) -> float:
    from motet.simulate.predict.predict import predict_assigned

    return predict_assigned(plan, planned(plan), assign_step(plan, lengths), cost_model(plan.cluster, "fp32")).step_s


class EmulatedParts(Emulated):
    """Parts of a pass take their shares of its seconds, communication included; passes of a backbone with tensor
    parallelism sleep in halves of layers. `seconds` are without communication.

    tensor_s: of that, as `seconds` are. shares: of a pass by kind and stage: of its parts, or of its communication each
              collective of a layer.
    """

    tensor_s: Mapping[Kind, np.ndarray]
    shares: Mapping[tuple[Kind, int], Sequence[float]]
    stages: Sequence[PlannedStage]

    @classmethod
    def begin(cls, place: Place, lengths: BatchLengths, rng: np.random.Generator) -> None:
        """A step on these examples. rng: of the noise."""
        plan, program = place.program.layout.plan, place.program
        pricing = Pricing(plan, program, assign_step(plan, lengths), cost_model(plan.cluster, "fp32"))
        prices = [pricing.stage(stage, place.island) for stage in program.stages]
        seconds = {
            Kind.F: np.stack([one.forward for one in prices]),
            Kind.B: np.stack([one.input + one.weight + one.recompute for one in prices]),
        }
        assert set(seconds) <= set(SHARES)
        Emulated.seconds = {
            kind: each * np.clip(1 + NOISE * rng.normal(size=each.shape), 0.2, 1.8) for kind, each in seconds.items()
        }
        cls.tensor_s = {
            Kind.F: np.stack([one.forward_tensor for one in prices]),
            Kind.B: np.stack([one.backward_tensor for one in prices]),
        }
        cls.stages = program.stages
        cls.shares = {
            (kind, number): [share_beside(pricing, stage, kind is Kind.B) / num_halves(stage)]
            if in_halves(stage)
            else [part.share for part in pricing.parts(stage, backward=kind is Kind.B)]
            for kind in seconds
            for number, stage in enumerate(program.stages)
        }

    @classmethod
    def _lasting(cls, handler):
        def run(action: Action) -> None:
            start_s = time.perf_counter()
            stage, shares = cls.stages[action.stage], cls.shares[action.kind, action.stage]
            compute_s = cls.seconds[action.kind][action.stage, action.microbatch]
            tensor_s = cls.tensor_s[action.kind][action.stage, action.microbatch]
            if in_halves(stage):
                with passing(PassSeconds(compute_s / num_halves(stage), shares[0] * tensor_s, tensor_s)):
                    handler(action)
                return
            if stage.has_sums and action.part >= 0:
                if action.part % 2 == 0:
                    held_s = max(1 - sum(shares[1::2]), 0.0) * tensor_s
                    sum_s = (*shares, 0.0)[action.part + 1] * tensor_s
                    with computing(EncoderPart(shares[action.part] * (compute_s + held_s), sum_s)):
                        handler(action)
                return
            handler(action)
            sleep_until(start_s + (shares[action.part] if action.part >= 0 else 1) * (compute_s + tensor_s))

        return run


def in_halves(stage: PlannedStage) -> bool:
    return BACKBONE in stage.layers and stage.unit.tp > 1


def num_halves(stage: PlannedStage) -> int:
    return LAYER_PARTS // 2 * stage.num_layers


def built(case: Case, plan: Plan, rank: int) -> tuple[PlannedStep, StepDecider]:
    step = rank_step(plan, case.model(), rank)
    return step, StepDecider(step.place)


def run_rank(rank: int, rendezvous: str, case: Case, ways: dict[str, Plan], num_steps: int, seed: int, out: Path):
    """Run each step under each Plan; rank 0 writes, per step and Plan, measured and predicted seconds."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=case.num_ranks, init_method=rendezvous)
    emulate_halves()
    steps = {name: built(case, plan, rank) for name, plan in ways.items()}
    planned_step.Executor = EmulatedParts
    figures = []
    for number in range(num_steps + 1):
        taken = {}
        for name, (step, decide) in steps.items():
            lengths = case.lengths_of(np.random.default_rng((seed, number)), case.num_microbatches)
            batches = batches_of(ways[name], step.place, lengths, decide)
            EmulatedParts.begin(step.place, lengths, np.random.default_rng((seed, number, 1)))
            taken[name] = measured_step(step, batches, number)[0], predicted_s(ways[name], lengths)
        figures.append(taken)
    if rank == 0:
        out.write_text(json.dumps(figures[1:]), encoding="utf-8")
    dist.destroy_process_group()


def gains(name: str, case: Case, num_steps: int, seed: int) -> list[Row]:
    ways = plans(case, seed)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "figures.json"
        mp.spawn(run_rank, (f"file://{folder}/rendezvous", case, ways, num_steps, seed, out), nprocs=case.num_ranks)
        figures = json.loads(out.read_text(encoding="utf-8"))
    rows = []
    plainest, static, last = ways
    for ours, theirs in ((static, plainest), (last, static), (last, plainest)):
        measured, predicted = (
            statistics.median(step[ours][index] / step[theirs][index] for step in figures) for index in (0, 1)
        )
        rows.append(Row(f"{name}: {ours} over {theirs}, measured", measured, GAIN))
        rows.append(Row(f"{name}: {ours} over {theirs}, predicted", predicted, GAIN))
        if case.tp > 1:
            off = measured / predicted
            rows.append(
                Row(f"{name}: {ours} over {theirs}, measured over predicted", off, 1 + OFF, abs(off - 1) <= OFF)
            )
    for which in ways:
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
    for name, case in CASES.items():
        if asked.only in name:
            rows += gains(name, case, asked.steps, asked.seed)
    if asked.only in "decisions":
        rows += [row for num_microbatches in (8, 32) for row in decisions(num_microbatches)]
    for row in rows:
        show(row)
    finish(rows, asked.json, seed=asked.seed, emulated=True)


if __name__ == "__main__":
    main()
