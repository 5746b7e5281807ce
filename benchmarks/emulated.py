"""Measured steps of Plans beside simulated ones; compute is emulated, order, messages and overlap are real.

    python benchmarks/emulated.py [--steps 5] [--seed 0] [--json FILE] [--only NAME]

Ranks outnumber cores here, so a pass sleeps in place of a large model's work: seconds a row of the stage's blocks, with
20 % noise from a seed of its own. The simulator gets the mean of each pass, not the noise. The model itself is tiny and
runs; what it takes is part of the sleep. Goals: the makespan within 5 % of the simulated one, the share of bubbles
within 2 points.

Each step runs twice, the second time with the noise of the first one turned round, and the mean of both counts: so the
passes of a rank are as long as the simulator believes, and what it must foresee is when they come. With noise of one
sign, the sum of a step's passes alone is off by 5 % (one standard deviation). Rows are medians over such pairs. Beside
them stand the makespan over that of a simulation with the seconds that were drawn, which is what the executor and its
messages add without what noise does; and makespan and bubbles against simulations that know how large the noise is, and
draw their own (`motet simulate --jitter`): ranks wait for the latest of several passes, so noise makes steps longer.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rank_step import rank_step
from rows import Row, finish, options, show
from transformers import Qwen2Config, Qwen2ForCausalLM, SiglipVisionConfig, SiglipVisionModel

from motet.assign.plan import assign_step
from motet.assign.planned_step import decide_planned_step
from motet.assign.whole_step import DecidedStep
from motet.core.example import Media, TokenSequence
from motet.core.plan import Plan, Unit
from motet.core.workload import BACKBONE, BatchLengths, ItemLengths
from motet.cost.catalogue import cluster
from motet.dispatch import LoadedExample, RankBatch
from motet.models.attention import ATTENTION
from motet.models.backbone import Backbone
from motet.models.families.siglip import SiglipEncoder
from motet.models.mllm import MLLM
from motet.models.module import ModalityModule
from motet.models.projector import Projector, ProjectorConfig
from motet.models.spec import model_spec
from motet.runtime import planned_step
from motet.runtime.executor import Executor
from motet.runtime.place import Place
from motet.runtime.planned_step import PlannedStep
from motet.schedule import PlannedStage
from motet.schedule.coordinates import replica_of
from motet.schedule.program import Action, Kind
from motet.simulate import StageTimes, bubbles, simulate
from motet.train.input.planned import StageNeeds, stages_of_examples

DIM, VOCABULARY, NUM_BLOCKS, IMAGE_BLOCKS = 16, 40, 12, 4
NUM_MICROBATCHES, NOISE = 8, 0.2
NUM_SEEDS = 32
"""Simulations with noise, of which the mean counts."""
ROW_S = {"image": 1e-3, BACKBONE: 5e-4}
"""Seconds of a forward pass of a row through one block."""
SHARES = {Kind.F: 1.0, Kind.B: 2.0, Kind.R: 1.0, Kind.I: 1.0, Kind.W: 1.0}
"""Of the seconds of a forward pass."""
OFF, POINTS = 0.05, 0.02


@dataclass(frozen=True)
class Case:
    """A Plan by its units and schedule."""

    name: str
    units: tuple[Unit, ...]
    schedule: str

    @property
    def num_ranks(self) -> int:
        return max(unit.ranks.stop for unit in self.units)


def chain(num_ranks: int, stages_a_rank: int = 1) -> tuple[Unit, ...]:
    """All modules in one chain: the image encoder's blocks count half of the backbone's."""
    blocks = ["image"] * IMAGE_BLOCKS + [BACKBONE] * NUM_BLOCKS
    cuts = np.linspace(0, len(blocks), num_ranks * stages_a_rank + 1).astype(int)
    spans = [blocks[first:stop] for first, stop in pairwise(cuts)]
    stages = tuple({name: span.count(name) for name in dict.fromkeys(span)} for span in spans)
    return (Unit("all", stages, pp=num_ranks, zero=0),)


def beside(pp: int) -> tuple[Unit, ...]:
    """The encoder on a rank of its own, beside a pipeline of the backbone."""
    stages = ({BACKBONE: NUM_BLOCKS // pp},) * pp
    return Unit("image", ({"image": IMAGE_BLOCKS},), zero=0), Unit("llm", stages, first_rank=1, pp=pp, zero=0)


def disaggregated(pp: int) -> tuple[Unit, ...]:
    """Two replicas of the encoder share the items of each microbatch, beside a pipeline of the backbone."""
    stages = ({BACKBONE: NUM_BLOCKS // pp},) * pp
    return Unit("image", ({"image": IMAGE_BLOCKS},), dp=2, zero=0), Unit("llm", stages, first_rank=2, pp=pp, zero=0)


def replicated(pp: int) -> tuple[Unit, ...]:
    """A copy of the encoder before each stage of the backbone."""
    return (Unit("llm", ({BACKBONE: NUM_BLOCKS // pp},) * pp, pp=pp, zero=0, replicated=("image",)),)


def in_bubbles(pp: int) -> tuple[Unit, ...]:
    """A pipeline of the encoder on each rank of the backbone; without fills, it runs before the backbone and after."""
    stages = ({BACKBONE: NUM_BLOCKS // pp},) * pp
    return Unit("llm", stages, pp=pp, zero=0), Unit("image", ({"image": IMAGE_BLOCKS},), dp=pp, zero=0)


CASES = [
    Case("chain of 2, gpipe", chain(2), "gpipe"),
    Case("chain of 2, 1f1b", chain(2), "1f1b"),
    Case("chain of 4, gpipe", chain(4), "gpipe"),
    Case("chain of 4, 1f1b", chain(4), "1f1b"),
    Case("chain of 2, 2 stages a rank, interleaved_1f1b", chain(2, 2), "interleaved_1f1b"),
    Case("chain of 4, 2 stages a rank, interleaved_1f1b", chain(4, 2), "interleaved_1f1b"),
    Case("chain of 2, zb_h1", chain(2), "zb_h1"),
    Case("chain of 4, zb_h1", chain(4), "zb_h1"),
    Case("chain of 2, 2 stages a rank, zb_v", chain(2, 2), "zb_v"),
    Case("chain of 4, 2 stages a rank, zb_v", chain(4, 2), "zb_v"),
    Case("modality parallel, 1 and 1", beside(1), "1f1b"),
    Case("modality parallel, 1 and 3", beside(3), "1f1b"),
    Case("disaggregated, 2 replicas and 2", disaggregated(2), "1f1b"),
    Case("encoder replicated on 2", replicated(2), "1f1b"),
    Case("encoder replicated on 4", replicated(4), "gpipe"),
    Case("encoder in bubbles of 2, coarse", in_bubbles(2), "1f1b"),
    Case("encoder in bubbles of 4, coarse", in_bubbles(4), "1f1b"),
]


def build_model(
    dim: int = DIM,
    num_blocks: int = NUM_BLOCKS,
    image_blocks: int = IMAGE_BLOCKS,
    key_heads: int = 1,
    image_dim: int = 8,
) -> MLLM:
    """The same weights in every call. key_heads: heads of keys and values of the backbone."""
    torch.manual_seed(0)
    sizes = {"hidden_size": image_dim, "intermediate_size": 3 * image_dim // 2}
    sizes |= {"num_attention_heads": 2, "attn_implementation": ATTENTION}
    image = SiglipVisionConfig(
        num_hidden_layers=image_blocks, image_size=8, patch_size=2, vision_use_head=False, **sizes
    )
    backbone = Qwen2Config(
        vocab_size=VOCABULARY, hidden_size=dim, intermediate_size=24, num_hidden_layers=num_blocks,
        num_attention_heads=2, num_key_value_heads=key_heads, attn_implementation=ATTENTION,
    )  # fmt: skip
    encoder = ModalityModule(SiglipEncoder(SiglipVisionModel(image)), Projector(image_dim, dim, ProjectorConfig()))
    return MLLM({"image": encoder}, Backbone(Qwen2ForCausalLM(backbone)))


def lengths_of(rng: np.random.Generator) -> BatchLengths:
    """An example a microbatch: text of 4 to 40 tokens, and none to three images of 4 to 16 patches."""
    text = rng.integers(4, 40, NUM_MICROBATCHES)
    example = np.repeat(np.arange(NUM_MICROBATCHES), rng.integers(0, 4, NUM_MICROBATCHES))
    rows = rng.choice([4, 8, 16], len(example))
    images = np.bincount(example, rows, NUM_MICROBATCHES).astype(np.int64)
    items = ItemLengths(example, rows, rows)
    return BatchLengths(text + images, text - 1, np.zeros(NUM_MICROBATCHES, np.int32), {"image": items})


def batches_of(
    plan: Plan, place: Place, lengths: BatchLengths, decide: Callable[[BatchLengths], DecidedStep] | None = None
) -> list[RankBatch]:
    """The microbatches of a step, as far as the rank needs them. decide: by default with the Plan's own fills."""
    examples, needs = [made_example(lengths, number) for number in range(lengths.num_examples)], StageNeeds.of(place)
    parts = (decide or partial(decide_planned_step, plan))(lengths).microbatches
    return [stages_of_examples(number, part, examples, needs) for number, part in enumerate(parts)]


def made_example(lengths: BatchLengths, number: int) -> LoadedExample:
    """An example of these lengths: its images, two patches high, and then text, all but its first token targets."""
    items, total = lengths.items["image"], int(lengths.sequence[number])
    own = items.example == number
    sizes = [np.array([2, rows // 2]) for rows in items.length[own].tolist()]
    num_images, text = len(sizes), total - int(items.num_tokens[own].sum())
    tokens = np.arange(text + num_images) % VOCABULARY
    sequence = TokenSequence(
        tokens, np.arange(len(tokens)) > num_images, ("image",) * num_images, np.arange(num_images)
    )
    return LoadedExample(sequence, tuple(Media(np.ones((int(size.prod()), 12), np.float32), size) for size in sizes))


def passes_s(place: Place, lengths: BatchLengths) -> np.ndarray:
    """Mean seconds of forward passes, float64 [stages, microbatches]; a microbatch is an example."""
    layout = place.program.layout
    step = assign_step(layout.plan, lengths)

    def rows(stage: PlannedStage, name: str) -> np.ndarray:
        items = step.modules[name]
        own = items.replica == replica_of(layout, stage, place.island)
        return np.bincount(items.microbatch[own], items.length[own], NUM_MICROBATCHES)

    return np.array(
        [
            sum(ROW_S[name] * (stop - first) * rows(stage, name) for name, (first, stop) in stage.layers.items())
            for stage in place.program.stages
        ]
    )


def simulated(plan: Plan, place: Place, forward_s: np.ndarray) -> tuple[float, float, float, float]:
    """Makespan in seconds, and share of bubbles; then both with noise, which are means over draws."""
    seconds = {kind: forward_s * share for kind, share in SHARES.items()}
    noisy = [simulated_as(plan, place, seconds, NOISE, seed) for seed in range(NUM_SEEDS)]
    return (*simulated_as(plan, place, seconds), *np.mean(noisy, axis=0).tolist())


def simulated_as(
    plan: Plan, place: Place, seconds: Mapping[Kind, np.ndarray], jitter: float = 0.0, seed: int = 0
) -> tuple[float, float]:
    """Makespan and share of bubbles with seconds by kind of pass, [stages, microbatches] each."""
    has_halves = any(action.kind is Kind.W for row in place.program.program.actions for action in row)
    backward = (seconds[Kind.I], seconds[Kind.W]) if has_halves else (seconds[Kind.B], np.zeros((1, 1)))
    times = StageTimes(seconds[Kind.F], *backward)
    overlaps = plan.cluster.device.overlaps
    timeline = simulate(place.program.program, times, overlap=overlaps, jitter=jitter, seed=seed)
    return timeline.makespan_s, bubbles(timeline).total_share


def drawn(forward_s: np.ndarray, seed: tuple[int, ...], sign: int) -> dict[Kind, np.ndarray]:
    """Seconds with noise by kind of pass, [stages, microbatches]. sign: -1 turns the noise of 1 round."""
    noise = np.random.default_rng(seed)
    return {
        kind: forward_s * share * np.clip(1 + sign * NOISE * noise.normal(size=forward_s.shape), 0.2, 1.8)
        for kind, share in SHARES.items()
    }


class Emulated(Executor):
    """Passes last as long as `seconds` says: kind -> seconds, [stages, microbatches].

    sleeps: whether what a pass runs sleeps by itself, so that it lasts as long as it takes.
    """

    seconds: Mapping[Kind, np.ndarray]
    sleeps: Callable[[Action], bool] = staticmethod(lambda action: False)
    busy_s = 0.0

    def __init__(self, program, handlers, clock, **others) -> None:
        slow = {kind: self._lasting(handler) if kind in SHARES else handler for kind, handler in handlers.items()}
        super().__init__(program, slow, clock, **others)

    @classmethod
    def _lasting(cls, handler):
        def run(action: Action) -> None:
            start_s = time.perf_counter()
            left_s = 0.0 if cls.sleeps(action) else cls.seconds[action.kind][action.stage, action.microbatch]
            end_s = start_s + left_s
            handler(action)
            if (left_s := end_s - time.perf_counter()) > 0:
                time.sleep(left_s)
            cls.busy_s += time.perf_counter() - start_s

        return run


def run_rank(rank: int, num_ranks: int, rendezvous: str, case: Case, num_steps: int, seed: int, out: Path) -> None:
    """Run pairs of steps of a case; rank 0 writes a `Figures` of each pair."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=num_ranks, init_method=rendezvous)
    model = build_model()
    plan = Plan(
        model_spec(model),
        cluster("h100", 1, num_ranks),
        case.units,
        NUM_MICROBATCHES,
        1,
        case.schedule,
        precision="fp32",
    )
    step = rank_step(plan, model, rank)
    place = step.place
    planned_step.Executor = Emulated
    figures = []
    for number in range(num_steps + 1):
        lengths = lengths_of(np.random.default_rng((seed, number)))
        batches, forward_s = batches_of(plan, place, lengths), passes_s(place, lengths)
        pair = []
        for sign in (1, -1) if number else (1,):
            Emulated.seconds = drawn(forward_s, (seed, number, 1), sign)
            pair.append((*measured_step(step, batches, number), simulated_as(plan, place, Emulated.seconds)[0]))
        measured_s, share, as_drawn_s = np.mean(pair, axis=0).tolist()
        if number:
            figures.append(Figures(measured_s, share, as_drawn_s, *simulated(plan, place, forward_s)))
    if rank == 0:
        out.write_text(json.dumps(figures), encoding="utf-8")
    dist.destroy_process_group()


class Figures(NamedTuple):
    """Of a pair of steps, in the mean: seconds and share of bubbles as measured; seconds as simulated with what was
    drawn; seconds and share of bubbles as simulated with the means of passes, and with noise around them.
    """

    measured_s: float
    share: float
    as_drawn_s: float
    simulated_s: float
    simulated_share: float
    noisy_s: float
    noisy_share: float


def measured_step(step: PlannedStep, batches: list[RankBatch], number: int) -> tuple[float, float]:
    """Seconds of a step on the slowest rank, and the share of bubbles of all ranks."""
    Emulated.busy_s = 0.0
    dist.barrier()
    start_s = time.perf_counter()
    step.run(batches, number)
    taken = torch.tensor([time.perf_counter() - start_s, Emulated.busy_s], dtype=torch.float64)
    every = [torch.zeros(2, dtype=torch.float64) for _ in range(dist.get_world_size())]
    dist.all_gather(every, taken)
    measured_s = max(float(each[0]) for each in every)
    return measured_s, 1 - sum(float(each[1]) for each in every) / (len(every) * measured_s)


def main() -> None:
    parser = options(__doc__, "a part of a case's name, e.g. 1f1b", reads_lengths=False)
    parser.add_argument("--steps", type=int, default=5)
    asked = parser.parse_args()
    rows: list[Row] = []
    for case in CASES:
        if asked.only not in case.name:
            continue
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "figures.json"
            given = case.num_ranks, f"file://{folder}/rendezvous", case, asked.steps, asked.seed, out
            mp.spawn(run_rank, given, nprocs=case.num_ranks)
            figures = [Figures(*each) for each in json.loads(out.read_text(encoding="utf-8"))]
        ratio = statistics.median(each.measured_s / each.simulated_s for each in figures)
        added = statistics.median(each.measured_s / each.as_drawn_s for each in figures)
        apart = statistics.median(each.share - each.simulated_share for each in figures)
        noisy = statistics.median(each.measured_s / each.noisy_s for each in figures)
        noisy_apart = statistics.median(each.share - each.noisy_share for each in figures)
        for row in (
            Row(f"{case.name}: makespan, measured over simulated", ratio, 1 + OFF, abs(ratio - 1) <= OFF),
            Row(f"{case.name}: share of bubbles, measured less simulated", apart, POINTS, abs(apart) <= POINTS),
            Row(f"{case.name}: makespan, measured over simulated as drawn", added, 1 + OFF, abs(added - 1) <= OFF),
            Row(f"{case.name}: makespan, measured over simulated with noise", noisy, 1 + OFF, abs(noisy - 1) <= OFF),
            Row(
                f"{case.name}: share of bubbles, measured less simulated with noise",
                noisy_apart,
                POINTS,
                abs(noisy_apart) <= POINTS,
            ),
        ):
            show(row)
            rows.append(row)
    finish(rows, asked.json, seed=asked.seed, emulated=True)


if __name__ == "__main__":
    main()
