"""Images that the ranks of `cp` cut: real steps on two ranks beside those of the same Plan with images whole.

    python benchmarks/shared_images.py [--steps 5] [--seed 0] [--json FILE]

A tower and a language model on both ranks, which share sequences (`cp` 2). Both Plans take the same examples, a
microbatch each, and take turns step by step, so that what else the machine does meets both. Rows: the step with whole
images over that with cut ones, medians over steps, and how far the simulated ratio is from the measured one (goal:
10 %). Where each example has two images of one size, none is cut, and nothing is gained.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import torch
from in_turns import compare_ways, medians_in_turns, predicted_step_s
from transformers import Qwen2Config, Qwen2ForCausalLM, SiglipVisionConfig, SiglipVisionModel

import motet
from motet.core.example import Media, TokenSequence
from motet.core.plan import Unit
from motet.core.workload import BACKBONE
from motet.dispatch import LoadedExample
from motet.models.mllm import MLLM

NUM_RANKS, BATCH_SIZE = 2, 4
VOCABULARY, PATCH = 512, 4
BLOCKS = {"image": 6, BACKBONE: 2}
SIDES = {
    "one image of 32 x 32 patches": (32,),
    "one of 32 x 32, four of 8 x 8": (32, 8, 8, 8, 8),
    "two of 24 x 24": (24, 24),
}
"""The sides of the images of each example, in patches."""
SHARED = Unit("all", (BLOCKS,), cp=NUM_RANKS, zero=0)


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


def ratios(sides: tuple[int, ...], seed: int, num_steps: int) -> tuple[float, float]:
    """The step with whole images over that with cut ones: (measured, simulated)."""
    batches = [examples(seed, step, sides) for step in range(num_steps)]
    optimizer = partial(torch.optim.SGD, lr=1e-3)
    any_plan = motet.apply(build(), {}, optimizer, batch=batches[0]).plan
    cut = replace(
        any_plan, units=(SHARED,), schedule="1f1b", microbatch_size=1, fills=(), filling="static", balance="off"
    )
    model = replace(cut.model, modules=tuple(replace(module, shareable=False) for module in cut.model.modules))
    plans = replace(cut, model=model), cut
    whole_s, cut_s = medians_in_turns([motet.apply(build(), plan, optimizer) for plan in plans], batches)
    expected = [predicted_step_s(plan, batches[-1], build()) for plan in plans]
    return whole_s / cut_s, expected[0] / expected[1]


if __name__ == "__main__":
    compare_ways(__doc__, "whole over cut", NUM_RANKS, SIDES, ratios)
