"""Step time unbalanced, with the backbone balanced, and with all phases balanced in every way, on the same examples.

    python benchmarks/step_time.py [--lengths ../shared/data/lengths.csv.gz] [--json step_time.json] [--cut]

Lengths are drawn from a table of real ones (a third text, a third images, a third speech), or from a sampler of similar
shape where there is no table, and divided by --shrink, so that a small model on a few cores sees the same spread. Every
batch is run in all ways, in turn, in one process group, with the same parameters, so that losses must agree. All ways
but "length" balance operations; max/bound is of operations in all.
Batches come from a prefetch thread that decides and assembles the next one while a step runs, as in training.

--cut compares whole items with items cut over ranks, on whole copies of the model. The lengths are those of the table,
without a cap. Each step is held against all work divided by the ranks. On CPUs, what a rank computes and exchanges in
a second is measured before, on batches of their own (host_speed.py), and stated in [balance.speed], by which ways are
chosen and predicted.

What balancing costs on the critical path is the exchange of features and gradients, and the waiting for the prefetch
thread. An exchange also waits for the slowest rank, which the step would do later otherwise; its cost is therefore what
it takes on the rank that comes last, the least over ranks. On a machine that does other work as well, the processor
time of the busiest rank tells more than step times.
"""

from __future__ import annotations

import csv
import gzip
import os
import tempfile
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import rows
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from host_speed import HostSpeed, host_speed

from motet.assign.orchestrator import with_cut_loads
from motet.balance import ASSUMED_SPEEDS, Cost, PhaseCosts, StepCosts, choose, score
from motet.core.assignment import Assignment
from motet.core.cuts import ItemCuts
from motet.core.example import Media, TokenSequence
from motet.core.workload import BatchLengths, ItemLengths, home_ranks
from motet.dispatch import BalanceConfig, Orchestrator, assemble
from motet.dispatch.cut_batch import examples_to_lay_out
from motet.models.build import BackboneConfig, EncoderConfig, ModelConfig, build_mllm
from motet.runtime.fsdp import FSDPConfig, shard
from motet.runtime.mesh import build_mesh
from motet.runtime.step import StepResult, TrainStep
from motet.train.balancing import build_orchestrator

# What a table [balance] of a recipe would hold.
WAYS = {
    "off": {"phases": "off"},
    "backbone": {"phases": "backbone"},
    "joint": {"method": "joint"},
    "per_phase": {"method": "per_phase"},
    "length": {"cost": "length"},
    "auto": {},
}
CUT_WAYS = {
    "off": {"phases": "off"},
    "joint": {"method": "joint"},
    "per_phase": {"method": "per_phase"},
    "split": {"method": "split"},
    "auto": {"split": "auto"},
}
"""With --cut: whole items, items cut wherever some are too long, and the choice among all."""
VOCABULARY, PATCH_DIM, MEL_BINS = 512, 64, 16
MODEL = ModelConfig(
    backbone=BackboneConfig(
        family="qwen2",
        config={
            "hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 6, "num_attention_heads": 4,
            "num_key_value_heads": 4, "max_position_embeddings": 1 << 16,
        },
    ),
    encoders={
        "image": EncoderConfig(
            family="qwen2_vl",
            config={
                "depth": 4, "embed_dim": 128, "hidden_size": 128, "num_heads": 4, "mlp_ratio": 4,
                "patch_size": 8, "temporal_patch_size": 1, "in_channels": 1, "spatial_merge_size": 2,
            },
        ),
        "audio": EncoderConfig(
            family="whisper",
            config={
                "d_model": 128, "encoder_layers": 4, "encoder_attention_heads": 4, "encoder_ffn_dim": 512,
                "num_mel_bins": MEL_BINS, "max_source_positions": 1 << 14,
            },
            projector={"downsample": 2},
        ),
    },
)  # fmt: skip


@dataclass(frozen=True)
class Options:
    lengths: str
    num_steps: int
    examples_per_rank: int
    shrink: int
    seed: int
    ranks_per_node: int = 0
    """Of emulated nodes; 0: all ranks of the machine are one."""
    cut: bool = False
    """Take CUT_WAYS, with whole copies of the model on all ranks."""
    dominated: bool = False
    """Take of the batches that are drawn those in which single items dominate: `whole_over_ideal` of DOMINATED."""
    repeats: int = 1
    """Times that each batch is run in all ways."""


@dataclass(frozen=True)
class Stored:
    """What is stored. only: rows whose name holds this."""

    path: Path | None
    only: str


@dataclass(frozen=True)
class Row:
    """One example of a table: tokens of text and of each image, seconds of speech."""

    text_tokens: int
    image_tokens: tuple[int, ...] = ()
    audio_seconds: float = 0.0


def read_table(path: str) -> list[list[Row]]:
    """Rows of text, of images and of speech. Columns: see the table's README."""
    groups: dict[str, list[Row]] = {"text": [], "image": [], "asr": []}
    with gzip.open(path, "rt") as table:
        for row in csv.DictReader(table):
            images: tuple[int, ...] = ()
            if count := int(row["num_images"] or 0):
                # COCO gives pixels: a token is 28 x 28 of them, as in Qwen2-VL.
                pixels = float(row["image_width"] or 0) * float(row["image_height"] or 0)
                tokens = int(row["image_tokens"] or pixels / 28**2)
                images = tuple(max(tokens // count, 1) for _ in range(count))
            group = "image" if images else "asr" if row["task"] == "asr" else "text"
            groups[group].append(Row(int(row["text_tokens"]), images, float(row["audio_seconds"] or 0)))
    return list(groups.values())


def sample_table(rng: np.random.Generator, count: int = 5000) -> list[list[Row]]:
    """Rows of a shape similar to the table's: log-normal text and speech, images of one to twelve tiles."""
    text = [Row(int(n)) for n in np.clip(rng.lognormal(5.5, 1.0, count), 4, 7000)]
    tiles = np.minimum(rng.geometric(0.3, count), 12)
    image = [Row(int(n), (256,) * int(k)) for n, k in zip(rng.lognormal(4.3, 0.8, count), tiles, strict=True)]
    speech = [Row(int(3.3 * s) + 1, (), float(s)) for s in np.clip(rng.lognormal(2.2, 0.6, count), 1, 35)]
    return [text, image, speech]


CALIBRATION = 4
"""Batches by which speed is measured, behind one that warms up; and as many steps with next to no work."""
DOMINATED = 1.5
"""Steps of whole items over the ideal, from which on single items dominate."""
SIZE_DIMS = {"image": 2, "audio": 1}
"""Numbers that say how large an item is: height and width in patches; frames."""


class Batch:
    """The lengths of one global batch, and any of its examples, made of random numbers when a rank asks for it."""

    def __init__(self, rows: Sequence[Row], model, num_ranks: int, shrink: int, pools: dict[str, np.ndarray]) -> None:
        self.pools = pools
        self.text = [max(row.text_tokens // shrink, 6) for row in rows]
        grids, frames = [], []
        for i, row in enumerate(rows):
            for tokens in row.image_tokens:
                edge = max(int((tokens / shrink) ** 0.5), 1)
                grids.append((i, [2 * edge, 2 * max(tokens // shrink // edge, 1)]))
            if row.audio_seconds:
                frames.append((i, [max(int(100 * row.audio_seconds / shrink), 2)]))
        self.items = {phase: items for phase, items in (("image", grids), ("audio", frames)) if phase in model.encoders}
        columns, sequence = {}, np.array(self.text)
        for phase, items in self.items.items():
            # A batch may have no image, or no speech.
            sizes = np.array([size for _, size in items], dtype=np.int64).reshape(len(items), SIZE_DIMS[phase])
            example = np.array([i for i, _ in items], dtype=np.int64)
            module = model.encoders[phase]
            columns[phase] = ItemLengths(example, module.lengths(sizes), module.num_tokens(sizes))
            np.add.at(sequence, example, columns[phase].num_tokens)
        targets = np.maximum(np.array(self.text) // 3, 2)
        self.lengths = BatchLengths(sequence, targets, home_ranks(len(rows), num_ranks), columns)

    def sequence(self, example: int) -> TokenSequence:
        media = [phase for phase, items in self.items.items() for i, _ in items if i == example]
        tokens = np.arange(len(media) + self.text[example]) % VOCABULARY
        targets = np.arange(len(tokens)) >= len(tokens) - self.lengths.num_targets[example]
        return TokenSequence(tokens, targets, tuple(media), np.arange(len(media)))

    def media(self, phase: str, item: int) -> Media:
        size = np.array(self.items[phase][item][1])
        return Media(self.pools[phase][: size.prod()], size)


def run_rank(rank: int, num_ranks: int, rendezvous: str | None, options: Options, stored: Stored) -> None:
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", rank % torch.cuda.device_count()) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    dist.init_process_group("nccl" if on_gpu else "gloo", rank=rank, world_size=num_ranks, init_method=rendezvous)
    figures, speed = measure(device, options, CUT_WAYS if options.cut else WAYS)
    if rank == 0:
        show(figures, options, num_ranks)
        told = [row for row in result_rows(figures) if stored.only in row.name]
        if options.cut:
            ideal = over_ideal(figures, speed.fixed_s if speed else 0.0, num_ranks)
            figures |= {"over_ideal": ideal, "speed": speed and asdict(speed)}
            show_over_ideal(ideal, speed)
        if stored.path is not None:
            about = {"options": asdict(options), "num_ranks": num_ranks, "ways": figures}
            rows.write_rows(stored.path, told, seed=options.seed, device=device.type, **about)
    dist.destroy_process_group()


def result_rows(figures: Mapping[str, dict]) -> list[rows.Row]:
    """Of each way, its step over that of unbalanced batches, and each phase's largest load over its bound."""
    found = []
    for way, own in figures.items():
        ratio = float(np.median(np.divide(own["step_s"], figures["off"]["step_s"])))
        found.append(rows.Row(f"{way}: step over unbalanced", ratio))
        found += [rows.Row(f"{way}: max / bound, {phase}", value) for phase, value in own["imbalance"].items()]
    return found


def measure(
    device: torch.device, options: Options, ways: Mapping[str, dict]
) -> tuple[dict[str, dict], HostSpeed | None]:
    """Figures of each way. ways: what a table [balance] of a recipe would hold; "off" and "auto" among them.

    And the speed that was measured before; None where ways are chosen by assumed ones.
    """
    fsdp = FSDPConfig(shard_size=1) if options.cut else FSDPConfig()
    mesh = build_mesh(device, shard_size=fsdp.shard_size)
    rng = np.random.default_rng(options.seed)
    groups = read_table(options.lengths) if options.lengths else sample_table(rng)
    model = build_mllm(MODEL, VOCABULARY).to(device)
    pools = {
        "image": rng.standard_normal((1 << 16, PATCH_DIM), np.float32),
        "audio": rng.standard_normal((1 << 14, MEL_BINS), np.float32),
    }
    on_node = {"ranks_per_node": options.ranks_per_node or None, "waits": fsdp.waits}

    def balanced(table: Mapping, speed: Mapping) -> Orchestrator:
        # Without a choice to make, a recipe states no speed.
        config = BalanceConfig(**table) if "phases" in table else BalanceConfig(**table, speed=speed)
        return build_orchestrator(config, model, mesh.num_ranks, device, torch.float32, **on_node)

    orchestrators = {way: balanced(table, {}) for way, table in ways.items()}
    counted = orchestrators["auto"].costs

    def draw() -> Batch:
        kinds = rng.integers(0, len(groups), options.examples_per_rank * mesh.num_ranks)
        rows = [groups[kind][rng.integers(len(groups[kind]))] for kind in kinds]
        return Batch(rows, model, mesh.num_ranks, options.shrink, pools)

    batches: list[Batch] = []
    while len(batches) < options.num_steps + 1:
        batch = draw()
        if not options.dominated or whole_over_ideal(orchestrators["auto"], batch.lengths) >= DOMINATED:
            batches.append(batch)
    shard(model, mesh, fsdp)
    # A learning rate of 0: the work of an optimizer, and the same parameters for every way.
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0, fused=True)
    step = TrainStep(model, mesh, optimizer, max_grad_norm=1.0)

    def prepare(batch: Batch, way: str):
        decision = orchestrators[way].decide(batch.lengths)
        sequences = [batch.sequence(i) for i in decision.sequences_on(mesh.rank)]
        media = {phase: [batch.media(phase, i) for i in decision.items_on(phase, mesh.rank)] for phase in batch.items}
        shared = {int(i): batch.sequence(i) for i in examples_to_lay_out(decision.cuts, batch.lengths)}
        return assemble(decision, batch.lengths, mesh.rank, sequences, media, shared=shared)

    speed = None
    if options.cut and device.type == "cpu":
        empty = Batch([Row(1)] * options.examples_per_rank * mesh.num_ranks, model, mesh.num_ranks, 1, pools)
        drawn = [draw() for _ in range(CALIBRATION + 1)]
        drawn += [empty] * CALIBRATION
        flops = [rank_flops(orchestrators["off"], batch.lengths, mesh.rank) for batch in drawn]
        taken_s = []
        for number, batch in enumerate(drawn):
            dist.barrier(mesh.group)
            start = time.process_time()
            step.run([prepare(batch, "off").to(device)], number)
            taken_s.append(time.process_time() - start)
        full, light = slice(1, CALIBRATION + 1), slice(CALIBRATION + 1, None)
        config = MODEL.backbone.config
        attention = config["num_key_value_heads"], config["hidden_size"] // config["num_attention_heads"]
        clock = time.perf_counter if has_cores(mesh.num_ranks) else time.process_time
        speed = host_speed(mesh, flops[full], taken_s[full], taken_s[light], *attention, clock)
        orchestrators = {way: balanced(table, speed.stated) for way, table in ways.items()}

    in_turn = deque(ways)
    jobs = []
    for batch in batches * options.repeats:
        jobs += [(batch, way) for way in in_turn]
        in_turn.rotate(-1)
    measured: dict[str, list[dict]] = {way: [] for way in ways}
    with ThreadPoolExecutor(1) as prefetch:
        coming = prefetch.submit(prepare, *jobs[0])
        for number, (_, way) in enumerate(jobs):
            dist.barrier(mesh.group)
            start, cpu_start = time.perf_counter(), time.process_time()
            batch = coming.result()
            wait_s = time.perf_counter() - start
            if number + 1 < len(jobs):
                coming = prefetch.submit(prepare, *jobs[number + 1])
            result = step.run([batch.to(device)], number)
            if device.type == "cuda":
                torch.cuda.synchronize()
            measured[way].append(
                observe(batch, result, counted, wait_s, time.perf_counter() - start, time.process_time() - cpu_start)
            )
    everywhere: list = [None] * mesh.num_ranks
    dist.all_gather_object(everywhere, measured, group=mesh.host_group)
    return {way: summarise([ranks[way] for ranks in everywhere], len(batches)) for way in ways}, speed


def has_cores(num_ranks: int) -> bool:
    """Whether each rank has a core."""
    return len(os.sched_getaffinity(0)) >= num_ranks


def rank_flops(orchestrator: Orchestrator, lengths: BatchLengths, rank: int) -> float:
    """Operations of a rank's items, which are whole."""
    assert isinstance(orchestrator.costs, StepCosts)
    placed, per_s = orchestrator.decide(lengths).assignments, ASSUMED_SPEEDS["cpu"].flops_per_s
    phases = orchestrator.costs.phases(lengths)
    return per_s * sum(int(placed[phase.name].loads[rank]) * phase.seconds_per_cost for phase in phases)


def whole_over_ideal(orchestrator: Orchestrator, lengths: BatchLengths) -> float:
    """Predicted computation of whole items, each phase balanced by itself, over all work divided by the ranks."""
    assert isinstance(orchestrator.costs, StepCosts)
    phases = orchestrator.costs.phases(lengths)
    weights = [phase.cost.weights(phase.lengths) for phase in phases]
    ideal_s = sum(int(each.sum()) * phase.seconds_per_cost for each, phase in zip(weights, phases, strict=True))
    apart = choose(phases, orchestrator.num_ranks, orchestrator.costs.times.network, methods=["per_phase"])
    placed = zip(phases, apart.assignments, strict=True)
    return sum(phase.compute_ns(each) for phase, each in placed) / 1e9 / (ideal_s / orchestrator.num_ranks)


def observe(batch, result: StepResult, counted: PhaseCosts, wait_s: float, step_s: float, cpu_s: float) -> dict:
    """counted: operations, which the loads of all ways are weighed by."""
    work, placed = counted.work(batch.lengths), batch.decision.assignments
    exchanges = [span.duration_s for span in result.timeline if span.kind.startswith("EXCHANGE")]
    return {
        "predicted_s": batch.decision.predicted_s,
        "loss": result.loss,
        "step_s": step_s,
        "cpu_s": cpu_s,
        "wait_s": wait_s,
        "exchange_s": exchanges,
        "decide_s": batch.decision.decide_s,
        "moved_bytes": result.moved_bytes,
        "crossing_bytes": result.crossing_bytes,
        "method": batch.decision.method,
        "imbalance": {
            phase: _imbalance(batch.decision.cuts_of(phase), own, work[phase], counted.costs[phase])
            for phase, own in placed.items()
        },
        "actions": result.seconds_by_action,
    }


def _imbalance(cuts: ItemCuts | None, placed: Assignment, work: np.ndarray, cost: Cost) -> float:
    """The largest load over its bound; of the fragments of items that are cut."""
    scored = score(placed.ranks, work, placed.num_ranks, cost)
    return float((scored if cuts is None else with_cut_loads(scored, cuts, cost.weights(work))).imbalance)


def summarise(ranks: list[list[dict]], num_batches: int) -> dict:
    """Figures of one way from what every rank observed in every step, of all batches in turn, some times over.

    Seconds of a batch are medians of its repeats. The first batch warms up.
    """

    def of_batches(seconds: list[float]) -> list[float]:
        return np.median(np.reshape(seconds, (-1, num_batches)), axis=0)[1:].tolist()

    every = list(zip(*ranks, strict=True))
    steps = every[1:num_batches]
    step_s = of_batches([max(rank["step_s"] for rank in step) for step in every])
    exchange_s = of_batches([sum(np.min([rank["exchange_s"] for rank in step], axis=0)) for step in every])
    wait_s = of_batches([max(rank["wait_s"] for rank in step) for step in every])
    return {
        "step_s": step_s,
        "cpu_s": of_batches([max(rank["cpu_s"] for rank in step) for step in every]),
        "exchange_s": float(np.median(exchange_s)),
        "wait_s": float(np.median(wait_s)),
        "decide_s": float(np.median([step[0]["decide_s"] for step in steps])),
        "share": float(np.median(np.add(exchange_s, wait_s) / np.array(step_s))),
        "moved_bytes": float(np.mean([step[0]["moved_bytes"] for step in steps])),
        "crossing_bytes": float(np.mean([step[0]["crossing_bytes"] for step in steps])),
        "imbalance": {p: float(np.mean([s[0]["imbalance"][p] for s in steps])) for p in steps[0][0]["imbalance"]},
        "losses": [step[0]["loss"] for step in steps],
        "mean_cpu_s": of_batches([float(np.mean([rank["cpu_s"] for rank in step])) for step in every]),
        "predicted_s": [step[0]["predicted_s"] for step in steps],
        "methods": dict(Counter(step[0]["method"] for step in steps)),
        "actions": {a: float(np.median([s[0]["actions"].get(a, 0) for s in steps])) for a in steps[0][0]["actions"]},
    }


def over_ideal(figures: dict[str, dict], fixed_s: float, num_ranks: int) -> dict:
    """Steps over the ideal, all work divided by the ranks, for each batch and way.

    The ideal is the processor time of whole items ("joint"), the mean over ranks; passes also wait for sums of
    gradients. With a core for each rank steps are held against it; with fewer, which is marked, the processor time of
    the busiest rank. That stands beside steps in any case: it is the mean of all ranks, which is what a way computes
    more, times what is left of the imbalance. What a step takes more are waits, and what else the machine does.
    predicted: seconds of a way over those of "joint", as predicted before the step, and what it takes beside its items
    (fixed_s) added to both; measured: as it turned out.
    """
    by_clock = has_cores(num_ranks)
    ideal_s = figures["joint"]["mean_cpu_s"]
    taken_s = {way: it["step_s" if by_clock else "cpu_s"] for way, it in figures.items()}
    by_batch = {way: np.divide(taken, ideal_s).tolist() for way, taken in taken_s.items()}
    is_dominated = np.array(by_batch["joint"]) >= DOMINATED
    gains = {}
    for way in ("split", "per_phase"):
        said = [predicted.get(way, np.nan) + fixed_s for predicted in figures["auto"]["predicted_s"]]
        whole = [predicted["joint"] + fixed_s for predicted in figures["auto"]["predicted_s"]]
        gains[way] = {
            "predicted": np.divide(said, whole).tolist(),
            "measured": np.divide(taken_s[way], taken_s["joint"]).tolist(),
        }
    return {
        "of": "step" if by_clock else "processor time of the busiest rank (emulated)",
        "by_batch": by_batch,
        "median": {way: float(np.median(each)) for way, each in by_batch.items()},
        "num_dominated": int(is_dominated.sum()),
        "median_of_dominated": {
            way: float(np.median(np.array(each)[is_dominated])) if is_dominated.any() else None
            for way, each in by_batch.items()
        },
        "over_joint": gains,
        "processor": {
            way: {of: float(np.median(np.divide(it[of], ideal_s))) for of in ("cpu_s", "mean_cpu_s")}
            for way, it in figures.items()
        },
    }


def show_over_ideal(found: dict, speed: HostSpeed | None) -> None:
    if speed is not None:
        print(
            f"\na rank: {speed.device_tflops:.4f} TFLOP/s and {1e3 * speed.fixed_s:.0f} ms a step; an exchange "
            f"{speed.link_latency_us:.0f} us and {speed.link_gbytes_per_s:.2f} GB/s"
        )
    print(
        f"\n{found['of']} over all work divided by the ranks, medians; of batches with {DOMINATED} or more jointly; "
        "and processor time of the busiest rank, and the mean"
    )
    for way, median in found["median"].items():
        of_dominated = found["median_of_dominated"][way]
        busiest, mean = (found["processor"][way][of] for of in ("cpu_s", "mean_cpu_s"))
        print(f"{way:10}{median:8.3f}{of_dominated or np.nan:10.3f}{busiest:10.3f}{mean:8.3f}")
    print(f"batches so dominated: {found['num_dominated']}")
    for way, gain in found["over_joint"].items():
        off = np.divide(gain["predicted"], gain["measured"])
        print(
            f"{way} over joint: predicted {np.nanmedian(gain['predicted']):.3f}, measured "
            f"{np.nanmedian(gain['measured']):.3f}; predicted over measured {np.nanmedian(off):.3f}, of single batches "
            f"{np.nanmin(off):.2f} to {np.nanmax(off):.2f}"
        )


def show(figures: dict[str, dict], options: Options, num_ranks: int) -> None:
    off = figures["off"]
    source = options.lengths or "sampled lengths"
    print(
        f"{num_ranks} ranks, {options.num_steps} batches of {options.examples_per_rank} examples a rank, "
        f"lengths of {source} divided by {options.shrink}"
    )
    print(
        f"{'balanced':10}{'step s':>8}{'off / it':>10}{'cpu s':>8}{'off / it':>10}"
        f"{'exchange ms':>13}{'wait ms':>9}{'share':>8}{'decide ms':>11}{'moved kB':>10}  max/bound"
    )
    for way, it in figures.items():
        faster, lighter = (float(np.median(np.divide(off[name], it[name]))) for name in ("step_s", "cpu_s"))
        loads = "  ".join(f"{phase} {value:.3f}" for phase, value in it["imbalance"].items())
        print(
            f"{way:10}{np.median(it['step_s']):8.3f}{faster:10.3f}{np.median(it['cpu_s']):8.3f}{lighter:10.3f}"
            f"{1e3 * it['exchange_s']:13.2f}{1e3 * it['wait_s']:9.2f}{it['share']:8.2%}{1e3 * it['decide_s']:11.2f}"
            f"{it['moved_bytes'] / 1e3:10.0f}  {loads}"
        )
    worst = max(abs(np.divide(it["losses"], off["losses"]) - 1).max() for it in figures.values())
    print(f"losses differ by at most {worst:.1e} between the ways; auto chose {figures['auto']['methods']}")


def main() -> None:
    parser = rows.options(__doc__, rows.OF_ROWS)
    parser.add_argument("--num-steps", type=int, default=20, help="batches, each run in all ways")
    parser.add_argument(
        "--repeats", type=int, default=1, help="times that each batch is run in all ways; its median counts"
    )
    parser.add_argument("--examples-per-rank", type=int, default=8)
    parser.add_argument("--shrink", type=int, default=4, help="all lengths are divided by this")
    parser.add_argument("--ranks", type=int, default=2, help="ranks to start; under torchrun, its own are taken")
    parser.add_argument("--cut", action="store_true", help="compare whole items with items cut over ranks")
    parser.add_argument(
        "--dominated", action="store_true", help=f"of batches drawn, those with whole items at {DOMINATED} of the ideal"
    )
    given = vars(parser.parse_args())
    num_ranks, stored = given.pop("ranks"), Stored(given.pop("json"), given.pop("only"))
    given["lengths"] = str(given["lengths"]) if given["lengths"].exists() else ""
    options = Options(**given)
    if "RANK" in os.environ:
        run_rank(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), None, options, stored)
        return
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run_rank, (num_ranks, f"file://{folder}/rendezvous", options, stored), nprocs=num_ranks)


if __name__ == "__main__":
    main()
