"""Motet's training step beside that of transformers' Trainer, on the same LLaVA, examples and optimizer; 2 gloo ranks.

    python benchmarks/trainers.py [--peers-python peers/bin/python] [--only equal packed] [--sides whole sharded]
        [--pairs 8] [--rounds 12] [--lengths FILE] [--json FILE]

The model (9.5 million parameters) is a SigLIP tower, an MLP and Qwen2: transformers' own LlavaForConditionalGeneration
for the Trainer, which runs accelerate's DDP in an environment of its own (--peers-python needs accelerate beside torch
and transformers), and what a recipe with the same words makes for Motet, from the same weights. Cases: examples of
equal lengths; and real lengths, of text and of images, divided by 16 as a whole, for which the Trainer pads, pads
examples that its own sampler has grouped by length, or packs. Motet runs twice, or as --sides says: with whole copies
(fsdp.shard_size = 1, as DDP has them), and sharded as it is by default. With --sides whole --pairs 6 --rounds 6, all
cases take about a quarter of an hour on two idle cores, and 6 pairs are the fewest that have an interval.

A step of Motet decides and assembles the next batch in a thread, as training does, runs, and reads its loss; one of the
Trainer collates, runs and zeroes gradients. Neither logs. A pair is a number of rounds in fresh processes; in a round
each side trains one step on one batch, and who is first changes from round to round. The figure of a pair is the median
of its rounds' ratios; the result is the median over pairs, with an interval that holds the true one with a probability
of 95 %. The first round warms up, and is told by itself.

Losses of all sides must agree in every step, or the comparison is void, and the exit code 1.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from executor import NUM_RANKS, Ranks, interval
from rows import Row, finish, options, show
from step_time import read_table, sample_table
from trainers_work import (
    BETAS,
    CLIP_NORM,
    EPS,
    LEARNING_RATE,
    PATCH,
    TEXT,
    TILE,
    TILE_TOKENS,
    VISION,
    VOCABULARY,
    Example,
    Work,
    taken_since,
)

SHRINK, TILE_OF_TABLE = 16, 256
"""What lengths are divided by, and the tokens of an image's tile in the table, which become TILE_TOKENS."""
EXAMPLES_A_RANK, NUM_BATCHES = 16, 6
EQUAL = Example(48, 1)
POOL = 100 * EXAMPLES_A_RANK * NUM_RANKS
"""Examples that the Trainer's sampler groups, 50 batches of a rank at a time."""
SAME = 1e-6
"""Relative difference of the losses of one step: all sides add up the same numbers in float32, in another order."""
TRAINER, WHOLE, SHARDED = "Trainer", "Motet, whole copies", "Motet, sharded"
SIDES = {"whole": WHOLE, "sharded": SHARDED}
TO_TRAINER = {
    "model.vision_tower": "encoders.image.encoder.model",
    "model.multi_modal_projector.linear_1": "encoders.image.projector.layers.0",
    "model.multi_modal_projector.linear_2": "encoders.image.projector.layers.2",
    "model.language_model": "backbone.causal_lm.model",
    "lm_head": "backbone.causal_lm.lm_head",
}
"""What begins the name of a weight of the Trainer's model, and of Motet's."""


@dataclass(frozen=True)
class Case:
    """words: what the lengths are, and what the Trainer does with them."""

    words: str
    is_real: bool
    is_grouped: bool = False
    collator: str = "padded"


CASES = {
    "equal": Case("equal lengths", False),
    "padded": Case("real lengths, padded", True),
    "grouped": Case("real lengths, padded, grouped by length", True, is_grouped=True),
    "packed": Case("real lengths, packed", True, collator="packed"),
}


def draw(case: Case, lengths: Path, seed: int) -> list[list[Example]]:
    """The batches of a case; those of real lengths are drawn from one pool of examples."""
    size = EXAMPLES_A_RANK * NUM_RANKS
    if not case.is_real:
        return [[EQUAL] * size] * NUM_BATCHES
    rng = np.random.default_rng(seed)
    text, image, _ = read_table(str(lengths)) if lengths.is_file() else sample_table(rng)
    pool = []
    for kind in rng.permutation(POOL) % 2:
        table = (text, image)[kind]
        row = table[rng.integers(len(table))]
        # A picture of which pixels are known is one tile, as the tower takes images of one size.
        num_tiles = sum(max(round(tokens / TILE_OF_TABLE), 1) for tokens in row.image_tokens)
        pool.append(Example(max(row.text_tokens // SHRINK, 4), num_tiles))
    if case.is_grouped:
        pool = [pool[place] for place in grouped(pool, seed)]
    batches = [pool[start : start + size] for start in range(0, POOL, size)]
    # Of an order by length, the first batches would be the longest.
    return [batches[number] for number in rng.permutation(len(batches))[:NUM_BATCHES]]


def grouped(pool: list[Example], seed: int) -> list[int]:
    """The order of the Trainer's sampler that groups by length; it is given the batch of one rank."""
    import torch
    from transformers.trainer_pt_utils import get_length_grouped_indices

    generator = torch.Generator().manual_seed(seed)
    return get_length_grouped_indices([each.num_tokens for each in pool], EXAMPLES_A_RANK, generator=generator)


def work(rank: int, given: Path, meeting: str, shard_size: int | None) -> None:
    """What a rank of Motet does: a step for each number that comes in."""
    import torch
    import torch.distributed as dist

    from motet.runtime.fsdp import FSDPConfig, shard
    from motet.runtime.mesh import build_mesh
    from motet.runtime.step import TrainStep
    from motet.train.optimizer import OptimizerConfig, build_optimizer

    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=NUM_RANKS, init_method=f"file://{meeting}/rendezvous")
    mesh = build_mesh(torch.device("cpu"), shard_size=shard_size)
    told = Work.read(given)
    model = build_model(told.weights)
    batches = Batches(told, model, rank)
    shard(model, mesh, FSDPConfig(shard_size=shard_size))
    config = OptimizerConfig.model_validate({"lr": LEARNING_RATE, "betas": BETAS, "eps": EPS, "weight_decay": 0.0})
    step = TrainStep(model, mesh, build_optimizer(model, config), max_grad_norm=CLIP_NORM)
    print(json.dumps({"side": "Motet"}), flush=True)
    with ThreadPoolExecutor(1) as prefetch:
        coming = prefetch.submit(batches.prepare, 0)
        for line in sys.stdin:
            number = int(line)
            dist.barrier(mesh.group)
            begun = time.perf_counter(), time.process_time()
            batch = coming.result()
            coming = prefetch.submit(batches.prepare, number + 1)
            loss = step.run([batch], number).loss
            print(json.dumps(taken_since(*begun) | {"loss": loss}), flush=True)
    dist.destroy_process_group()


def build_model(weights: str):
    """The model of a recipe, with the Trainer's weights."""
    from safetensors.torch import load_file

    from motet.models.block import plain_names
    from motet.models.build import BackboneConfig, EncoderConfig, ModelConfig, build_mllm

    image = EncoderConfig(family="siglip", config=VISION, feature_layer=-1)
    config = ModelConfig(backbone=BackboneConfig(family="qwen2", config=TEXT), encoders={"image": image})
    model = build_mllm(config, VOCABULARY)
    held = {}
    for name, tensor in load_file(weights).items():
        theirs = next(theirs for theirs in TO_TRAINER if name.startswith(theirs))
        held[TO_TRAINER[theirs] + name.removeprefix(theirs)] = tensor
    model.load_state_dict({name: held[plain] for name, plain in plain_names(model).items()})
    return model


class Batches:
    """A rank's part of any batch, decided and assembled when it is asked for."""

    def __init__(self, told: Work, model, rank: int) -> None:
        import torch

        from motet.core.example import Media, TokenSequence
        from motet.dispatch import BalanceConfig
        from motet.train.balancing import build_orchestrator

        self.rank, self.told = rank, told
        self.orchestrator = build_orchestrator(
            BalanceConfig(), model, told.num_ranks, torch.device("cpu"), torch.float32
        )
        self.lengths = [self._lengths(batch, model.encoders["image"]) for batch in told.batches]
        self.sequences, self.media = [], []
        size = np.array([TILE // PATCH] * 2)
        for number, batch in enumerate(told.batches):
            sequences, media = [], []
            for place, example in enumerate(batch):
                count = example.num_images
                tokens = np.concatenate([np.zeros(count, np.int64), told.text(number, place)])
                targets = np.arange(len(tokens)) >= len(tokens) - example.num_targets
                sequences.append(TokenSequence(tokens, targets, ("image",) * count, np.arange(count)))
                media += [Media(rows, size) for rows in patch_rows(told.pixels(number, place))]
            self.sequences.append(sequences)
            self.media.append(media)

    def _lengths(self, batch: list[Example], module):
        from motet.core.workload import BatchLengths, ItemLengths, home_ranks

        counts = np.array([example.num_images for example in batch])
        sizes = np.full((counts.sum(), 2), TILE // PATCH)
        items = ItemLengths(np.repeat(np.arange(len(batch)), counts), module.lengths(sizes), module.num_tokens(sizes))
        return BatchLengths(
            np.array([example.num_tokens for example in batch]),
            np.array([example.num_targets for example in batch]),
            home_ranks(len(batch), self.told.num_ranks),
            {"image": items},
        )

    def prepare(self, number: int):
        from motet.dispatch import assemble

        number %= len(self.told.batches)
        decision = self.orchestrator.decide(self.lengths[number])
        sequences = [self.sequences[number][place] for place in decision.backbone.on_rank(self.rank)]
        media = [self.media[number][item] for item in decision.assignments["image"].on_rank(self.rank)]
        return assemble(decision, self.lengths[number], self.rank, sequences, {"image": media})


def patch_rows(images: np.ndarray) -> np.ndarray:
    """Images [n, 3, TILE, TILE] to patches [n, TILE_TOKENS, 3 * PATCH ** 2], as Motet's transform cuts them."""
    across = TILE // PATCH
    cut = images.reshape(len(images), 3, across, PATCH, across, PATCH)
    return np.ascontiguousarray(cut.transpose(0, 2, 4, 1, 3, 5)).reshape(len(images), TILE_TOKENS, 3 * PATCH**2)


def run_pair(
    peers_python: str, told: Work, ours: list[str], number: int, num_rounds: int
) -> list[dict[str, dict[str, float]]]:
    """All rounds of a pair, the first one too: what each side took in each.

    ours: the sides of Motet. number: of the pair.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        told.write(folder / "work.json")
        sides: dict[str, Ranks] = {}
        for side in in_turn([TRAINER, *ours], number):
            (meeting := folder / side.split()[-1]).mkdir()
            sides[side] = Ranks(lambda rank, side=side, meeting=meeting: command(peers_python, side, rank, meeting))
            stack.callback(sides[side].close)
        return [
            agreeing({side: sides[side].run(step) for side in in_turn(list(sides), step + step // NUM_BATCHES)})
            for step in range(1 + num_rounds)
        ]


def command(peers_python: str, side: str, rank: int, meeting: Path) -> list[str]:
    given = str(meeting.parent / "work.json")
    if side == TRAINER:
        return [peers_python, str(Path(__file__).with_name("trainers_peer.py")), str(rank), given, str(meeting)]
    shard_size = "1" if side == WHOLE else str(NUM_RANKS)
    about = {"--rank": str(rank), "--work": given, "--meeting": str(meeting), "--shard-size": shard_size}
    return [sys.executable, __file__, *(word for pair in about.items() for word in pair)]


def in_turn(names: list[str], number: int) -> list[str]:
    start = number % len(names)
    return [*names[start:], *names[:start]]


def agreeing(taken: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    losses = {side: figures["loss"] for side, figures in taken.items()}
    told = np.array(list(losses.values()))
    if not np.ptp(told) <= SAME * told.min():  # Nor where one is not a number.
        raise SystemExit(f"losses differ, {losses}: the sides do not run the same steps, and nothing is compared.")
    return taken


def rows_of(case: Case, pairs: list[list[dict[str, dict[str, float]]]], tokens: list[int]) -> list[Row]:
    """Figures of pairs of rounds. tokens: real ones of each batch. More than 1.00 of the Trainer is faster than it."""
    rows, steady, sides = [], [taken for pair in pairs for taken in pair[1:]], sorted(pairs[0][0], reverse=True)
    for side in sides[1:]:
        for name, words in (("step_s", "real tokens/s"), ("processor_s", "real tokens a second of processor time")):
            ratios = [
                statistics.median(taken[TRAINER][name] / taken[side][name] for taken in pair[1:]) for pair in pairs
            ]
            value, (low, high) = statistics.median(ratios), interval(ratios)
            about = f"{case.words}: {side}, {words} of the Trainer's"
            # DDP does not shard: against it, sharding is shown, and has no goal.
            goal = 1.0 if side == WHOLE and name == "step_s" else None
            rows.append(Row(about, value, goal, goal is None or value >= goal))
            rows += [Row(f"{about}: 95 % interval, {end}", it) for end, it in (("low", low), ("high", high))]
    for side in sides:
        seconds = statistics.median(taken[side]["step_s"] for taken in steady)
        per_second = sum(tokens[1:]) * len(pairs) / sum(taken[side]["step_s"] for taken in steady)
        first = [pair[0][side] for pair in pairs]
        rows += [
            Row(f"{case.words}: {side}, seconds of a step", seconds),
            Row(f"{case.words}: {side}, real tokens/s", per_second),
            Row(f"{case.words}: {side}, seconds of the first step", statistics.median(it["step_s"] for it in first)),
            Row(
                f"{case.words}: {side}, processor seconds from its start to the end of the first step",
                statistics.median(it["since_start_s"] for it in first),
            ),
        ]
    losses = [[figures["loss"] for figures in taken.values()] for pair in pairs for taken in pair]
    furthest = max(max(losses_of) / min(losses_of) - 1 for losses_of in losses)
    return [*rows, Row(f"{case.words}: losses differ by at most", furthest, SAME)]


def save_weights(seed: int, path: Path) -> None:
    import torch
    from safetensors.torch import save_file
    from trainers_peer import build_llava

    torch.manual_seed(seed)
    save_file(build_llava().state_dict(), path)


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES), help="cases to run")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES), help="ways in which Motet runs")
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=2 * NUM_BATCHES, help="steps of a pair, each on every side")
    parser.add_argument("--peers-python", default=sys.executable, help="the Python that has accelerate installed")
    for name, kind in (("--rank", int), ("--work", Path), ("--meeting", str), ("--shard-size", int)):
        parser.add_argument(name, type=kind, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank is not None:
        work(given.rank, given.work, given.meeting, given.shard_size)
        return
    if shutil.which(given.peers_python) is None:
        parser.error(f"--peers-python {given.peers_python}: there is no such program; it must be a Python")
    if given.pairs < 6:
        parser.error("--pairs must be 6 or more: fewer have no interval of 95 %.")
    if given.rounds < NUM_BATCHES or given.rounds % NUM_BATCHES:
        parser.error(f"--rounds is {given.rounds}; it must be a multiple of the {NUM_BATCHES} batches.")
    if not given.lengths.is_file():
        print(f"No table of real lengths at {given.lengths}: sampled ones only.")
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        weights = Path(folder) / "weights.safetensors"
        save_weights(given.seed, weights)
        for name in given.only:
            case = CASES[name]
            batches = draw(case, given.lengths, given.seed)
            told = Work(batches, NUM_RANKS, case.collator, str(weights), given.seed)
            tokens = [sum(map(num_tokens, batches[step % len(batches)])) for step in range(1 + given.rounds)]
            pairs = []
            for number in range(given.pairs):
                ours = [side for name, side in SIDES.items() if name in given.sides]
                pairs.append(run_pair(given.peers_python, told, ours, number, given.rounds))
                print(f"{name}: pair {number + 1} of {given.pairs}: load {os.getloadavg()[0]:.1f}", flush=True)
            for row in rows_of(case, pairs, tokens):
                show(row)
                rows.append(row)
    finish(rows, given.json, seed=given.seed, lengths=given.lengths.name if given.lengths.is_file() else None)


def num_tokens(example: Example) -> int:
    return example.num_tokens


if __name__ == "__main__":
    main()
