"""Images that the ranks of `cp` cut: real steps on two ranks beside those of the same Plan with images whole.

    python benchmarks/shared_images.py [--steps 5] [--seed 0] [--json FILE]

A tower and a language model on both ranks, which share sequences (`cp` 2). Both Plans take the same examples, a
microbatch each, and take turns step by step, so that what else the machine does meets both. Rows: the step with whole
images over that with cut ones, medians over steps, and how far the simulated ratio is from the measured one (goal:
10 %). Where each example has two images of one size, none is cut, and nothing is gained.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from in_turns import predicted_step_s, steps_in_turns
from rows import Row, finish, options, show
from transformers import Qwen2Config, Qwen2ForCausalLM, SiglipVisionConfig, SiglipVisionModel

import motet
from motet.core.example import Media, TokenSequence
from motet.core.plan import Unit
from motet.core.workload import BACKBONE
from motet.dispatch import LoadedExample
from motet.models.mllm import MLLM

NUM_RANKS, BATCH_SIZE, FIRST = 2, 4, 1
"""FIRST steps are not counted."""
VOCABULARY, PATCH = 512, 4
BLOCKS = {"image": 6, BACKBONE: 2}
SIDES = {
    "one image of 32 x 32 patches": (32,),
    "one of 32 x 32, four of 8 x 8": (32, 8, 8, 8, 8),
    "two of 24 x 24": (24, 24),
}
"""The sides of the images of each example, in patches."""
SHARED = Unit("all", (BLOCKS,), cp=NUM_RANKS, zero=0)
OFF = 0.1


def build() -> MLLM:
    torch.manual_seed(0)
    tower = SiglipVisionModel(
        SiglipVisionConfig(
            hidden_size=192, intermediate_size=768, num_hidden_layers=BLOCKS["image"], num_attention_heads=4,
            image_size=32 * PATCH, patch_size=PATCH, vision_use_head=False,
        )
    )  # fmt: skip
    llm = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=VOCABULARY, hidden_size=128, intermediate_size=256, num_hidden_layers=BLOCKS[BACKBONE],
            num_attention_heads=4, num_key_value_heads=4, tie_word_embeddings=False,
        )
    )  # fmt: skip
    return motet.compose(llm, {"image": tower}).train()


def examples(seed: int, step: int, sides: tuple[int, ...]) -> list[LoadedExample]:
    """Images of these sides, and 64 tokens of text, in each example."""
    rng = np.random.default_rng((seed, step))
    return [_example(rng, sides) for _ in range(BATCH_SIZE)]


def _example(rng: np.random.Generator, sides: tuple[int, ...]) -> LoadedExample:
    items = [Media(rng.standard_normal((side**2, 3 * PATCH**2), np.float32), np.array([side, side])) for side in sides]
    num_tokens = len(sides) + 64
    is_answer = np.arange(num_tokens) >= num_tokens // 2
    names, places = ("image",) * len(sides), np.arange(len(sides))
    return LoadedExample(TokenSequence(rng.integers(0, VOCABULARY, num_tokens), is_answer, names, places), tuple(items))


def run_rank(rank: int, folder: str, seed: int, num_steps: int) -> None:
    """Measure all mixtures on one rank; rank 0 stores (measured, simulated) ratios by mixture."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/met", rank=rank, world_size=NUM_RANKS)
    found = {
        name: ratios([examples(seed, step, sides) for step in range(FIRST + num_steps)])
        for name, sides in SIDES.items()
    }
    if rank == 0:
        torch.save(found, Path(folder) / "found")
    dist.destroy_process_group()


def ratios(batches: list[list[LoadedExample]]) -> tuple[float, float]:
    """The step with whole images over that with cut ones: (measured, simulated)."""
    optimizer = partial(torch.optim.SGD, lr=1e-3)
    any_plan = motet.apply(build(), {}, optimizer, batch=batches[0]).plan
    cut = replace(
        any_plan, units=(SHARED,), schedule="1f1b", microbatch_size=1, fills=(), filling="static", balance="off"
    )
    model = replace(cut.model, modules=tuple(replace(module, shareable=False) for module in cut.model.modules))
    plans = replace(cut, model=model), cut
    ways = [motet.apply(build(), plan, optimizer) for plan in plans]
    whole_s, cut_s = (statistics.median(seconds[FIRST:]) for seconds in steps_in_turns(ways, batches))
    expected = [predicted_step_s(plan, batches[-1], build()) for plan in plans]
    return whole_s / cut_s, expected[0] / expected[1]


def rows(seed: int, num_steps: int) -> Iterator[Row]:
    """Of each mixture the measured gain, the simulated one, and how far they are from each other."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run_rank, (folder, seed, num_steps), NUM_RANKS)
        found: dict[str, tuple[float, float]] = torch.load(Path(folder) / "found", weights_only=False)
    for name, (gain, expected) in found.items():
        yield Row(f"{name}: whole over cut, measured", gain)
        yield Row(f"{name}: whole over cut, simulated", expected)
        yield Row(f"{name}: error of the simulated ratio", abs(expected / gain - 1), OFF)


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--steps", type=int, default=5)
    asked = parser.parse_args()
    measured = []
    for row in rows(asked.seed, asked.steps):
        show(row)
        measured.append(row)
    finish(measured, asked.json, seed=asked.seed, steps=asked.steps)


if __name__ == "__main__":
    main()
