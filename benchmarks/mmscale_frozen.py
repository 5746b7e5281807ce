"""MMScale's frozen settings (section 7.3.1) in real steps on two ranks: a rigid Plan beside the planner's. Used by
mmscale.py.

A small model of an image tower, a language model and a diffusion transformer, in which a module more or less learns, as
in Figures 19 and 20; projectors always do. Both Plans are of stages, take the same examples, and take turns step by
step, so that what else the machine does meets both. The rigid Plan is Megatron-LM's habit on two ranks: as many blocks
on each, whatever is frozen. What is measured stands beside what the simulator predicts of both; nothing is fitted.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from in_turns import predicted_step_s, steps_in_turns
from rows import Row
from transformers import Qwen2Config, Qwen2ForCausalLM, SiglipVisionConfig, SiglipVisionModel

import motet
from motet.core.example import Media, TokenSequence
from motet.core.plan import Plan, Unit
from motet.core.workload import BACKBONE
from motet.dispatch import LoadedExample
from motet.models.generator_config import GeneratorConfig
from motet.models.mllm import MLLM

NUM_RANKS, BATCH_SIZE, STEPS, FIRST = 2, 4, 5, 1
"""STEPS are counted; FIRST are not."""
VOCABULARY, PATCH, LATENT = 512, 4, 16
BLOCKS = {"image": 4, BACKBONE: 4, "made": 4}
SETTINGS = {
    "all trained": ("image", BACKBONE, "made"),
    "all frozen": (),
    "encoder trained": ("image",),
    "LLM trained": (BACKBONE,),
    "generator trained": ("made",),
}
RIGID = Unit("all", ({"image": 4, BACKBONE: 2}, {BACKBONE: 2, "made": 4}), pp=2, zero=0)


class Setting(NamedTuple):
    """Seconds of a step, as measured and as predicted: of the rigid Plan and of the planner's."""

    rigid_s: float
    planned_s: float
    rigid_predicted_s: float
    planned_predicted_s: float
    what: str


def build(trained: tuple[str, ...]) -> MLLM:
    torch.manual_seed(0)
    heads: dict[str, Any] = {"num_attention_heads": 4}
    tower = SiglipVisionModel(
        SiglipVisionConfig(
            hidden_size=192, intermediate_size=768, num_hidden_layers=4, image_size=64, patch_size=PATCH, **heads
        )
    )
    llm = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=VOCABULARY, hidden_size=256, intermediate_size=1024, num_hidden_layers=4, num_key_value_heads=4,
            tie_word_embeddings=False, **heads,
        )
    )  # fmt: skip
    dit = {"row_dim": LATENT, "hidden": 192, "num_layers": 4, "num_heads": 4}
    made = GeneratorConfig(family="dit", config=dit, num_queries=8, drop_condition=0.0, weight=1.0)
    model = motet.compose(llm, {"image": tower}, generators={"made": made})
    model.encoders["image"].encoder.requires_grad_("image" in trained)
    model.backbone.causal_lm.requires_grad_(BACKBONE in trained)
    model.generators["made"].generator.requires_grad_("made" in trained)
    return model.train()


def examples(step: int) -> list[LoadedExample]:
    """One to four images of 64 patches and more, some text, and one picture to be made at the end of the answer."""
    return [_example(np.random.default_rng((step, number))) for number in range(BATCH_SIZE)]


def _example(rng: np.random.Generator) -> LoadedExample:
    num_images = int(rng.integers(1, 5))
    sizes = [rng.integers(8, 13, 2) for _ in range(num_images)]
    items = [Media(rng.standard_normal((size.prod(), 3 * PATCH**2), np.float32), size) for size in sizes]
    size = rng.integers(12, 17, 2)
    items.append(Media(rng.standard_normal((size.prod(), LATENT), np.float32), size))
    num_tokens = num_images + int(rng.integers(64, 129))
    is_answer = np.arange(num_tokens) >= num_tokens // 2
    is_answer[-1] = False
    places = np.array([*range(num_images), num_tokens - 1])
    names = ("image",) * num_images + ("made",)
    tokens = rng.integers(0, VOCABULARY, num_tokens)
    return LoadedExample(TokenSequence(tokens, is_answer, names, places), tuple(items))


def measured() -> dict[str, Setting]:
    """Each setting by its name; on two processes of this machine, with a thread each."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, (folder,), NUM_RANKS)
        found: dict[str, Setting] = torch.load(Path(folder) / "found", weights_only=False)
    return found


def _rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/met", rank=rank, world_size=NUM_RANKS)
    found = {name: _setting(trained) for name, trained in SETTINGS.items()}
    if rank == 0:
        torch.save(found, Path(folder) / "found")
    dist.destroy_process_group()


def _setting(trained: tuple[str, ...]) -> Setting:
    batches = [examples(step) for step in range(FIRST + STEPS)]
    optimizer = partial(torch.optim.SGD, lr=1e-3)
    planned = motet.apply(build(trained), {}, optimizer, batch=batches[0])
    model = build(trained)
    rigid = replace(planned.plan, units=(RIGID,), schedule="1f1b", microbatch_size=1, fills=(), filling="static")
    ways = motet.apply(model, rigid, optimizer), planned
    steps = [statistics.median(seconds[FIRST:]) for seconds in steps_in_turns(ways, batches)]
    whole = build(trained)
    predicted = [
        statistics.median(predicted_step_s(way.plan, batch, whole) for batch in batches[FIRST:]) for way in ways
    ]
    (rigid_s, planned_s), (rigid_predicted_s, planned_predicted_s) = steps, predicted
    return Setting(rigid_s, planned_s, rigid_predicted_s, planned_predicted_s, _words(planned.plan))


def _words(plan: Plan) -> str:
    stages = [
        " + ".join(f"{name} {count}" for name, count in stage.items()) for unit in plan.units for stage in unit.stages
    ]
    return f"{plan.schedule}, {plan.microbatch_size} a microbatch: {' | '.join(stages)}"


def rows() -> Iterator[Row]:
    """Of each setting the gain of the planner's Plan, and how far the simulator is from it."""
    found = measured()
    for name, setting in found.items():
        gain, predicted = setting.rigid_s / setting.planned_s, setting.rigid_predicted_s / setting.planned_predicted_s
        yield Row(f"2 ranks, {name}: rigid over planned, measured ({setting.what})", gain, 1.0, gain >= 1.0)
        yield Row(f"2 ranks, {name}: error of the predicted gain", abs(predicted / gain - 1), 0.1)
        if name != "all trained":
            every = found["all trained"]
            share, expected = (
                setting.planned_s / every.planned_s,
                setting.planned_predicted_s / every.planned_predicted_s,
            )
            yield Row(f"2 ranks, {name}: step over that in which all learns, measured", share)
            yield Row(f"2 ranks, {name}: error of the predicted share", abs(expected / share - 1), 0.1)
