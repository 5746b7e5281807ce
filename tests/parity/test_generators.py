"""A step with generators equals the one-process reference: losses and gradients, float64 to 1e-10.

The reference is one process on one example at a time, and autograd through all of it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cache

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import denoiser_shapes
from motet.core.arrays import Int64Array
from motet.core.example import Media
from motet.core.plan import Unit
from motet.core.workload import BACKBONE
from motet.dispatch import BalanceConfig, ItemExchange, LoadedExample, RankBatch, SpeedConfig, assemble
from motet.dispatch.batch import pack, stacked_media
from motet.dropout import example_keys, item_keys
from motet.models.backbone import Backbone
from motet.models.diffusion import Diffusion
from motet.models.dit import DiT, DiTConfig
from motet.models.generator import GeneratorModule, OutputProjector
from motet.models.mllm import MLLM
from motet.models.noise_schedule import NoiseConfig
from motet.models.pixart import PixArt
from motet.models.projector import Projector, ProjectorConfig
from motet.models.sd3 import SD3
from motet.models.unet import UNet
from motet.runtime.fsdp import FSDPConfig, shard
from motet.runtime.mesh import build_mesh
from motet.runtime.step import TrainStep
from motet.train.balancing import build_orchestrator
from parity.planned import PlannedCase, assert_planned
from parity.planned_generators import LATENTS, tiny_vae
from parity.tiny import DIM, build_model, draw_examples, with_turns
from ranks import run_ranks
from tiers import in_tiers

TOLERANCE = 1e-10
QUERIES = {"draw": 3, "say": 2}
MAX_TURN = 200
ROW_DIMS = {"draw": 4, "say": 4}
NEAR = SpeedConfig(link_gbytes_per_s=1e9, link_latency_us=0.0, inter_node_gbytes_per_s=1e9, inter_node_latency_us=0.0)


@dataclass(frozen=True)
class Case:
    """One way to run the same step. drawn: the generators that have anything to make, a set a microbatch.

    denoiser: what draws, of `DENOISERS`; those of diffusers make items whose sides can be halved. vae: on latents of
    its pixels. turns: what draws is given turns. recomputed: blocks of it.
    """

    method: str = "per_phase"
    communicator: str = "all_to_all"
    frozen: tuple[str, ...] = ()
    fsdp: FSDPConfig = field(default_factory=FSDPConfig)
    drawn: tuple[tuple[str, ...], ...] = (("draw", "say"), ("draw",))
    num_examples: int = 7
    denoiser: str = "dit"
    vae: bool = False
    turns: bool = False
    recomputed: int = 0

    @property
    def model(self) -> tuple[tuple[str, ...], str, bool, bool]:
        """What `model_with_generators` takes."""
        return self.frozen, self.denoiser, self.vae, self.turns


def dit_of(num_queries: int, channels: int) -> DiT:
    """A tiny one of Motet's."""
    return DiT(num_queries, DiTConfig(row_dim=channels, hidden=8, num_layers=2, num_heads=2))


def sd3_of(num_queries: int, channels: int) -> SD3:
    """A tiny transformer of SD3; as `unet_of`."""
    from diffusers import SD3Transformer2DModel

    return SD3(num_queries, SD3Transformer2DModel(**denoiser_shapes.SD3, in_channels=channels, out_channels=channels))


def pixart_of(num_queries: int, channels: int) -> PixArt:
    """A tiny transformer of PixArt, which has learned the variance, too; as `unet_of`."""
    from diffusers import PixArtTransformer2DModel

    sizes = {"in_channels": channels, "out_channels": 2 * channels}
    return PixArt(num_queries, PixArtTransformer2DModel(**denoiser_shapes.PIXART, **sizes))


def unet_of(num_queries: int, channels: int) -> UNet:
    """A tiny UNet. diffusers is imported where it is needed alone: that takes seconds on each rank."""
    from diffusers import UNet2DConditionModel

    return UNet(num_queries, UNet2DConditionModel(**denoiser_shapes.UNET, in_channels=channels, out_channels=channels))


DENOISERS = {"dit": dit_of, "unet": unet_of, "sd3": sd3_of, "pixart": pixart_of}


def model_with_generators(
    frozen: tuple[str, ...] = (), kind: str = "dit", vae: bool = False, turns: bool = False
) -> MLLM:
    """The same in every call and on every rank; no weight is zero, so that a gradient flows everywhere."""
    plain = build_model(frozen=[name for name in frozen if name not in QUERIES])
    torch.manual_seed(11)
    queries = QUERIES | ({"draw": 0} if turns else {})
    given = {name: count for name, count in queries.items() if count}
    reads = [name for name, count in queries.items() if not count]
    backbone = Backbone(plain.backbone.causal_lm, train="backbone" not in frozen, queries=given, turns=reads)
    generators = {}
    for name, count in queries.items():
        latents = tiny_vae() if vae and name == "draw" else None
        denoiser = DENOISERS[kind if name == "draw" else "dit"](
            count or MAX_TURN, LATENTS if latents else ROW_DIMS[name]
        )
        noise = NoiseConfig(predicts="v" if name == "say" else "epsilon", min_snr=5.0 if name == "say" else None)
        noise = NoiseConfig(schedule="flow", times="logit_normal") if isinstance(denoiser, SD3) else noise
        entrance = OutputProjector(Projector(DIM, denoiser.condition_dim, ProjectorConfig()), count or 1, drop=0.3)
        learns, weight, most = name not in frozen, 0.5 if name == "say" else 2.0, 0 if count else MAX_TURN
        diffusion = Diffusion(denoiser, noise, latents)
        generators[name] = GeneratorModule(diffusion, entrance, count, weight, learns, learns, max_turn=most)
    model = MLLM(dict(plain.encoders), backbone, generators).to(torch.float64)
    for parameter in model.generators.parameters():
        nn.init.normal_(parameter, std=0.2)
    return model


def draw_made_examples(
    num_examples: int, drawn: tuple[str, ...], seed: int, unit: int = 1, turns: bool = False
) -> list[LoadedExample]:
    """Examples of which some have things to make, of very different sizes, at the end of the sequence.

    unit: what these sizes are multiples of. turns: "draw" is given stretches of the sequence, of any length.
    """
    rng = np.random.default_rng(seed)
    made = []
    for example in draw_examples(num_examples, seed):
        names = tuple(rng.choice(drawn, rng.integers(0, 3))) if drawn else ()
        sequence, items = example.sequence, list(example.media)
        num = len(sequence.tokens)
        sequence = replace(
            sequence,
            tokens=np.concatenate([sequence.tokens, np.full(len(names) + 1, 7)]),
            targets=np.concatenate([sequence.targets, np.zeros(len(names), bool), [True]]),
            media=(*sequence.media, *names),
            media_positions=np.concatenate([sequence.media_positions, num + np.arange(len(names))]),
        )
        for name in names:
            size = unit * rng.integers(1, 6 // unit, 2 if name == "draw" else 1)
            values = rng.standard_normal((size.prod(), ROW_DIMS[name])).astype(np.float32)
            items.append(Media(values, size.astype(np.int64)))
        sequence = with_turns(sequence, ("draw",), rng) if turns else sequence
        made.append(LoadedExample(sequence, tuple(items)))
    return made


def microbatches(case: Case) -> list[list[LoadedExample]]:
    unit = 1 if case.denoiser == "dit" else 2
    return [
        draw_made_examples(case.num_examples, drawn, seed, unit, case.turns) for seed, drawn in enumerate(case.drawn)
    ]


def keys_of(microbatch: int, num_examples: int) -> Int64Array:
    return example_keys(5, 3, np.arange(num_examples) + 100 * microbatch)


def turn_rows(example: LoadedExample, num_tokens: dict[str, Int64Array]) -> Int64Array:
    """The rows that "draw" is given of each of its items. num_tokens: rows of all items in the sequence."""
    media, left = np.array(example.sequence.media), {name: list(rows) for name, rows in num_tokens.items()}
    rows = np.array([left[name].pop(0) for name in media], dtype=np.int64)
    return example.sequence.turn_rows(rows)[media == "draw"]


@cache
def reference(case: Case) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    """Losses, and gradients by name, of one process."""
    model = model_with_generators(*case.model)
    model.train()
    sums: dict[str, list] = {BACKBONE: [], "draw": [], "say": []}
    for number, examples in enumerate(microbatches(case)):
        for place, example in enumerate(examples):
            key = keys_of(number, len(examples))[place : place + 1]
            media, num_tokens, keys = {}, {}, {}
            for name, module in model.measured.items():
                items = [item for phase, item in zip(example.sequence.media, example.media) if phase == name]
                values, sizes = stacked_media(items)
                num_tokens[name] = module.num_tokens(sizes.numpy()) if items else np.zeros(0, np.int64)
                keys[name] = item_keys(key, np.zeros(len(items), np.int64), np.arange(len(items)))
                if items:
                    media[name] = values.double(), sizes
            if case.turns:
                num_tokens["draw"] = turn_rows(example, num_tokens)
            losses = model.losses(pack([example.sequence], num_tokens), media, keys)
            for name, pair in losses.items():
                sums[name].append(pair)
    means = {name: sum(loss for loss, _ in pairs) / max(1, sum(n for _, n in pairs)) for name, pairs in sums.items()}
    total = means[BACKBONE] + sum(means[name] * module.weight for name, module in model.generators.items())
    if total.requires_grad:
        total.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {name: float(torch.as_tensor(mean).detach()) for name, mean in means.items()}, gradients


def take_steps(rank: int, num_ranks: int, cases: list[Case]):
    """What `take_step` gives of each."""
    return [take_step(rank, num_ranks, case) for case in cases]


def take_step(rank: int, num_ranks: int, case: Case):
    """The losses, and the whole gradients by name."""
    mesh = build_mesh(torch.device("cpu"), shard_size=case.fsdp.shard_size)
    model = model_with_generators(*case.model)
    model.train()
    speed = {"speed": NEAR} if case.method == "auto" else {}
    config = BalanceConfig(
        method=case.method, communicator=case.communicator, mode="exchange", node_wise=False, **speed
    )
    orchestrator = build_orchestrator(config, model, num_ranks, mesh.device, torch.float64, ranks_per_node=2)
    batches: list[RankBatch] = []
    exchange = ItemExchange(mesh.host_group, orchestrator, model.measured, capacity=16)
    moves = 0
    for number, examples in enumerate(microbatches(case)):
        home = np.sort(np.arange(len(examples)) % num_ranks)
        got = exchange([example for example, owner in zip(examples, home) if owner == rank])
        batch = assemble(got.decision, got.lengths, rank, got.sequences, got.media)
        moves += sum(not batch.routes[name].is_local for name in QUERIES)
        batch = batch.with_draws(keys_of(number, len(examples)))
        batches.append(batch.to(mesh.device, dtype=torch.float64))
    shard(model, mesh, case.fsdp.model_copy(update={"recompute": {"draw": case.recomputed}}))
    result = TrainStep(model, mesh, once_a_step=case.fsdp.once_a_step).run(batches)
    gradients = {
        name.replace(".inner.", "."): p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
        for name, p in model.named_parameters()
        if p.grad is not None
    }
    return result.losses, result.loss, result.grad_norm, gradients, moves


CASES = {
    "per phase": Case(),
    "joint": Case(method="joint"),
    "whole copies": Case(fsdp=FSDPConfig(shard_size=1)),
    "a frozen backbone": Case(frozen=("backbone",)),
    "a frozen generator, reached by its backbone": Case(frozen=("draw",)),
    "generators alone learn": Case(frozen=("backbone", "image", "audio")),
    "one is absent from the whole step": Case(drawn=(("draw",), ("draw",))),
    "all are absent from the whole step": Case(drawn=((), ())),
    "a UNet": Case(denoiser="unet"),
    "a UNet on latents of a VAE": Case(denoiser="unet", vae=True),
    "a transformer of SD3": Case(denoiser="sd3"),
    "a transformer of PixArt": Case(denoiser="pixart"),
    "a transformer of SD3, recomputed": Case(denoiser="sd3", recomputed=2),
    "a transformer of PixArt, recomputed in part": Case(denoiser="pixart", recomputed=1),
    "a frozen UNet in whole copies": Case(denoiser="unet", frozen=("draw",), fsdp=FSDPConfig(shard_size=1)),
    "turns": Case(turns=True),
    "turns, joint": Case(turns=True, method="joint", communicator="all_gather"),
    "turns, in whole copies before a frozen generator": Case(
        turns=True, frozen=("draw",), fsdp=FSDPConfig(shard_size=1)
    ),
    "turns, absent from a microbatch": Case(turns=True, drawn=(("draw",), ("say",)), num_examples=3),
    "a UNet that is given turns": Case(denoiser="unet", turns=True),
    "a transformer of SD3 that is given turns": Case(denoiser="sd3", turns=True),
    "a transformer of PixArt that is given turns": Case(denoiser="pixart", turns=True),
    "fewer items than ranks": Case(num_examples=2, drawn=(("draw",), ("say",))),
}


DITS = [name for name, case in CASES.items() if case.denoiser == "dit"]
OF_DIFFUSERS = [name for name in CASES if name not in DITS]
ABSENT = ["all are absent from the whole step", "fewer items than ranks"]


@pytest.mark.parametrize(
    ("num_ranks", "names"),
    [
        (1, DITS[:1]),
        (2, [DITS[0], "turns"]),
        (3, ABSENT),
        pytest.param(3, OF_DIFFUSERS[1:2], marks=pytest.mark.slow),
        pytest.param(3, [name for name in DITS if name not in ABSENT], marks=pytest.mark.slow),
        pytest.param(3, OF_DIFFUSERS[:1] + OF_DIFFUSERS[2:], marks=pytest.mark.slow),
    ],
)
def test_steps_with_generators(num_ranks: int, names: list[str]):
    cases = [CASES[name] for name in names]
    for of_rank in run_ranks(take_steps, num_ranks, cases):
        for name, case, step in zip(names, cases, of_rank, strict=True):
            check_step(name, case, num_ranks, step)


def check_step(name: str, case: Case, num_ranks: int, step) -> None:
    """Hold what `take_step` gives to one process."""
    losses, expected = reference(case)
    found, loss, grad_norm, gradients, moves = step
    assert found == pytest.approx(losses, abs=TOLERANCE), name
    assert loss == pytest.approx(losses[BACKBONE] + 2 * losses["draw"] + 0.5 * losses["say"], abs=TOLERANCE), name
    wanted = {plain.replace(".inner.", "."): value for plain, value in expected.items()}
    for parameter, gradient in gradients.items():
        value = wanted.pop(parameter, torch.zeros_like(gradient))
        assert torch.allclose(gradient, value, rtol=0, atol=TOLERANCE), (name, parameter)
    assert not any(value.any() for value in wanted.values()), (name, list(wanted))
    norm = sum(float(value.square().sum()) for value in gradients.values()) ** 0.5
    assert grad_norm == pytest.approx(norm, abs=TOLERANCE), name
    assert not (name == "per phase" and num_ranks > 1) or moves, "no condition moved between ranks"


BOTH = ("draw", "say")
BEHIND = Unit("all", ({"image": 3, "audio": 2, "backbone": 1}, {"backbone": 2, "draw": 1, "say": 1}), pp=2)


def apart(**options) -> tuple[Unit, ...]:
    """The backbone with its encoders on rank 0, a generator on each rank behind it."""
    return (
        Unit("llm", ({"image": 3, "audio": 2, "backbone": 3},), zero=0),
        Unit("draw", ({"draw": 1},), first_rank=1, zero=0, **options),
        Unit("say", ({"say": 1},), first_rank=2, zero=0),
    )


PLANNED = {
    2: [
        PlannedCase((BEHIND,), made=BOTH),
        PlannedCase((BEHIND,), made=BOTH, frozen=("backbone", "image", "audio"), schedule="gpipe"),
        PlannedCase((BEHIND,), made=BOTH, frozen=BOTH, schedule="zb_h1", dropout=0.2),
        PlannedCase(
            (Unit("all", ({"image": 3, "audio": 2, "backbone": 1}, {"backbone": 2, "recall": 1}), pp=2),),
            made=("recall",),
        ),
        PlannedCase(
            (
                Unit("llm", ({"image": 3, "audio": 2, "backbone": 3},)),
                Unit("made", ({"draw": 1, "recall": 1},), first_rank=1, recompute=({"recall": 1},)),
            ),
            made=("draw", "recall"),
            left_out=0.3,
        ),
        PlannedCase(
            (
                Unit("llm", ({"image": 3, "audio": 2, "backbone": 3},)),
                Unit("made", ({"draw": 1, "say": 1},), first_rank=1, recompute=({"draw": 1},)),
            ),
            made=BOTH,
            left_out=0.3,
            frozen=("draw",),
        ),
    ],
    3: [
        PlannedCase(apart(), made=BOTH),
        PlannedCase(apart(), made=BOTH, contents=(), batch_size=2, frozen=("backbone",)),
        PlannedCase(
            (
                Unit("llm", ({"image": 3, "audio": 2, "backbone": 3},)),
                Unit("made", ({"recall": 1},), first_rank=1, dp=2, zero=3),
            ),
            made=("recall",),
            balance="per_phase",
        ),
        PlannedCase(
            (
                Unit("llm", ({"image": 3, "audio": 2, "backbone": 3},)),
                Unit("made", ({"paint": 2},), first_rank=1, dp=2, zero=3, recompute=({"paint": 1},)),
            ),
            made=("paint",),
            left_out=0.3,
        ),
        PlannedCase(
            (
                Unit("llm", ({"image": 3, "audio": 2, "backbone": 3},)),
                Unit("made", ({"draw": 1, "say": 1},), first_rank=1, dp=2, zero=3),
            ),
            made=BOTH,
            balance="per_phase",
        ),
        PlannedCase(
            (Unit("all", ({"image": 3, "audio": 2, "backbone": 3}, {"draw": 1}, {"say": 1}), pp=3, zero=0),), made=BOTH
        ),
        PlannedCase(
            (
                Unit("llm", ({"image": 3, "audio": 2, "backbone": 3},), dp=2, zero=1),
                Unit("made", ({"draw": 1, "say": 1},), first_rank=2),
            ),
            made=BOTH,
        ),
        PlannedCase(
            (Unit("all", ({"image": 3, "audio": 2, "backbone": 3, "draw": 1, "say": 1},), dp=3, zero=2),),
            made=BOTH,
            balance="joint",
        ),
    ],
}


WHOLE = {"image": 3, "audio": 2, "backbone": 3}
ALL = WHOLE | {"draw": 1, "say": 1}
SHARED = {
    2: [
        PlannedCase((Unit("all", (ALL,), cp=2),), made=BOTH, has_large=True),
        PlannedCase(
            (Unit("all", (WHOLE | {"recall": 1, "say": 1},), cp=2, zero=3),), made=("recall", "say"), left_out=0.5
        ),
        PlannedCase((Unit("all", (ALL,), cp=2),), made=BOTH, contents=(), batch_size=2, frozen=("backbone", "say")),
        PlannedCase((Unit("all", (ALL,), cp=2),), made=BOTH, frozen=BOTH, microbatch_size=3, dropout=0.2),
    ],
    3: [
        PlannedCase((Unit("llm", (WHOLE,), cp=2), Unit("made", ({"draw": 1, "say": 1},), first_rank=2)), made=BOTH),
        PlannedCase(
            (Unit("llm", (WHOLE,), cp=2, zero=1), Unit("made", ({"recall": 1},), first_rank=2)),
            made=("recall",),
            frozen=("recall",),
            left_out=0.5,
        ),
        PlannedCase(
            (Unit("llm", (WHOLE,)), Unit("made", ({"draw": 1, "say": 1},), first_rank=1, cp=2, zero=2)),
            made=BOTH,
            microbatch_size=2,
        ),
    ],
    4: [
        PlannedCase((Unit("all", (WHOLE, {"draw": 1, "say": 1}), pp=2, cp=2),), "gpipe", made=BOTH),
        PlannedCase(
            (Unit("all", ({"image": 3, "audio": 2, "backbone": 2}, {"backbone": 1, "draw": 1, "say": 1}), pp=2, cp=2),),
            "zb_h1",
            made=BOTH,
        ),
        PlannedCase(
            (Unit("llm", (WHOLE,), cp=2, tp=2, zero=0), Unit("made", ({"draw": 1},), first_rank=4)), made=("draw",)
        ),
        PlannedCase(
            (Unit("llm", (WHOLE,), cp=2), Unit("made", ({"draw": 1, "say": 1},), first_rank=2, cp=2)),
            made=BOTH,
            microbatch_size=2,
        ),
        PlannedCase(
            (Unit("llm", (WHOLE,), cp=2), Unit("made", ({"draw": 1, "say": 1},), first_rank=2, dp=2)),
            made=BOTH,
            balance="per_phase",
            batch_size=4,
        ),
    ],
}
"""Ranks share the sequences, so that what an item is given lies on several, or share out items."""


LLM = Unit("llm", (WHOLE,))
CUT = {
    2: [
        PlannedCase((Unit("all", (WHOLE | {"mould": 1}, {"mould": 2}), pp=2),), made=("mould",), left_out=0.3),
        PlannedCase((Unit("all", (WHOLE | {"recast": 2}, {"recast": 1}), pp=2),), made=("recast",), left_out=0.3),
        PlannedCase((Unit("all", (WHOLE | {"recast": 3},), cp=2, zero=3),), made=("recast",)),
        PlannedCase((LLM, Unit("made", ({"mould": 3},), first_rank=1, recompute=({"mould": 2},))), made=("mould",)),
        PlannedCase((Unit("all", (WHOLE | {"mould": 3},), cp=2, zero=3),), made=("mould",)),
        PlannedCase((Unit("all", (WHOLE, {"mould": 3}), pp=2),), "zb_h1", made=("mould",), frozen=("backbone",)),
        PlannedCase((Unit("all", (WHOLE | {"etch": 1}, {"etch": 2}), pp=2),), made=("etch",)),
        PlannedCase(
            (Unit("all", (WHOLE | {"retell": 2}, {"retell": 1}), pp=2, recompute=({"retell": 1}, {"retell": 1})),),
            "gpipe",
            made=("retell",),
            left_out=0.5,
        ),
        PlannedCase(
            (Unit("all", (WHOLE, {"etch": 3, "say": 1}), pp=2, zero=3),), made=("etch", "say"), frozen=("etch",)
        ),
        PlannedCase(
            (Unit("all", (WHOLE | {"etch": 2}, {"etch": 1}), pp=2),),
            "zb_h1",
            made=("etch",),
            frozen=("backbone", "image", "audio"),
            microbatch_size=2,
        ),
    ],
    3: [
        PlannedCase(
            (LLM, Unit("made", ({"etch": 1, "say": 1}, {"etch": 2}), first_rank=1, pp=2)),
            made=("etch", "say"),
            contents=(),
        ),
        PlannedCase(
            (LLM, Unit("made", ({"mould": 1}, {"mould": 2}), first_rank=1, pp=2, recompute=({}, {"mould": 1}))),
            made=("mould",),
            contents=(),
        ),
        PlannedCase(
            (LLM, Unit("made", ({"retell": 2}, {"retell": 1}), first_rank=1, pp=2, recompute=({"retell": 1}, {}))),
            made=("retell",),
            frozen=("retell",),
        ),
    ],
    4: [
        PlannedCase(
            (
                Unit(
                    "all",
                    ({"image": 3, "audio": 2, "backbone": 2}, {"backbone": 1, "etch": 1}, {"etch": 1}, {"etch": 1}),
                    pp=2,
                ),
            ),
            "interleaved_1f1b",
            made=("etch",),
        ),
        PlannedCase((Unit("all", (WHOLE | {"etch": 2}, {"etch": 1}), pp=2, cp=2),), made=("etch",), balance="joint"),
        PlannedCase(
            (replace(LLM, dp=1), Unit("made", ({"etch": 1}, {"etch": 1}, {"etch": 1}), first_rank=1, pp=3, zero=1)),
            "gpipe",
            made=("etch",),
            batch_size=2,
        ),
        PlannedCase(
            (LLM, Unit("made", ({"etch": 1}, {"etch": 2}), first_rank=1, pp=2, dp=2, zero=2)),
            made=("etch",),
            balance="per_phase",
            batch_size=4,
        ),
    ],
}
"""Stages have some blocks of a generator each."""


@pytest.mark.parametrize(
    "num_ranks", [pytest.param(2, marks=pytest.mark.slow), 3, pytest.param(4, marks=pytest.mark.slow)]
)
def test_generators_that_are_cut(num_ranks: int):
    """In the backbone's chain and in a unit of their own; recomputed, frozen, absent, of turns, sharded."""
    for_ranks: dict[int, list[PlannedCase]] = {}
    for case in CUT[num_ranks]:
        for_ranks.setdefault(case.num_ranks, []).append(case)
    for number, cases in for_ranks.items():
        assert_planned(number, cases)


OF_DIFFUSERS_CUT = {
    2: [
        PlannedCase(
            (Unit("all", (WHOLE | {"carve": 2}, {"carve": 1}), pp=2, zero=3, recompute=({"carve": 1}, {"carve": 1})),),
            "zb_h1",
            made=("carve",),
            left_out=0.3,
        ),
        PlannedCase((Unit("all", (WHOLE | {"weave": 1}, {"weave": 2}), pp=2),), made=("weave",), frozen=("weave",)),
    ],
    3: [
        PlannedCase((Unit("all", (WHOLE, {"carve": 1}, {"carve": 2}), pp=3),), made=("carve",)),
        PlannedCase(
            (LLM, Unit("made", ({"paint": 1}, {"paint": 1}), first_rank=1, pp=2, zero=1)), made=("paint",), left_out=0.3
        ),
        PlannedCase(
            (LLM, Unit("made", ({"weave": 2}, {"weave": 1}), first_rank=1, pp=2, recompute=({"weave": 1}, {}))),
            made=("weave",),
        ),
    ],
}
"""As CUT, of transformers of diffusers."""


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_transformers_of_diffusers_that_are_cut(num_ranks: int):
    assert_planned(num_ranks, OF_DIFFUSERS_CUT[num_ranks])


@pytest.mark.parametrize("num_ranks", [2, *(pytest.param(number, marks=pytest.mark.slow) for number in (3, 4))])
def test_ranks_that_share_sequences(num_ranks: int):
    """In the backbone's stage, in a later one, in a unit of its own; frozen, absent, of turns, balanced, sharded."""
    for_ranks: dict[int, list[PlannedCase]] = {}
    for case in SHARED[num_ranks]:
        for_ranks.setdefault(case.num_ranks, []).append(case)
    for number, cases in for_ranks.items():
        assert_planned(number, cases)


DIVIDED = {
    2: [
        PlannedCase((Unit("all", (WHOLE | {"mould": 3, "recast": 3},), tp=2, zero=0),), made=("mould", "recast")),
        PlannedCase((Unit("all", (WHOLE | {"draw": 1, "say": 1},), tp=2, zero=0),), made=BOTH),
        PlannedCase((Unit("all", (WHOLE | {"etch": 3},), tp=2),), "data_parallel", made=("etch",)),
        PlannedCase(
            (Unit("all", (WHOLE | {"retell": 3},), tp=2, zero=0, recompute=({"retell": 2, "backbone": 1},)),),
            made=("retell",),
            left_out=0.5,
        ),
        PlannedCase((Unit("all", (WHOLE | {"draw": 1, "say": 1},), tp=2, zero=0),), made=BOTH, frozen=BOTH),
        PlannedCase(
            (Unit("all", (WHOLE | {"draw": 1, "say": 1},), tp=2, zero=0),), made=BOTH, contents=(), batch_size=2
        ),
    ],
    3: [
        PlannedCase((LLM, Unit("made", ({"etch": 3, "say": 1},), first_rank=1, tp=2)), made=("etch", "say")),
        PlannedCase(
            (Unit("llm", (WHOLE,), tp=2, zero=0), Unit("made", ({"retell": 3},), first_rank=2)),
            made=("retell",),
            microbatch_size=2,
        ),
    ],
    4: [
        PlannedCase((Unit("all", (WHOLE | {"etch": 1}, {"etch": 2}), pp=2, tp=2, zero=0),), "zb_h1", made=("etch",)),
        PlannedCase(
            (Unit("all", (WHOLE | {"draw": 1, "say": 1},), dp=2, tp=2, zero=3),),
            "data_parallel",
            made=BOTH,
            balance="per_phase",
            chunks=2,
        ),
        PlannedCase((Unit("all", (WHOLE | {"draw": 1, "say": 1},), dp=2, tp=2, zero=1),), made=BOTH),
    ],
}
"""Ranks share products of generators: beside the backbone, in units of their own, in stages, and under FSDP2."""

OF_DIFFUSERS_DIVIDED = {
    2: [
        PlannedCase((Unit("all", (WHOLE | {"carve": 3, "weave": 3},), tp=2, zero=0),), made=("carve", "weave")),
        PlannedCase(
            (Unit("all", (WHOLE | {"carve": 3},), tp=2, zero=0),), made=("carve",), frozen=("carve",), chunks=2
        ),
        PlannedCase((Unit("all", (WHOLE | {"weave": 3},), tp=2),), "data_parallel", made=("weave",), left_out=0.3),
    ],
    3: [
        PlannedCase(
            (LLM, Unit("made", ({"carve": 3, "weave": 3},), first_rank=1, tp=2, recompute=({"carve": 1},))),
            made=("carve", "weave"),
            chunks=2,
        ),
    ],
    4: [
        PlannedCase((Unit("all", (WHOLE | {"carve": 1}, {"carve": 2}), pp=2, tp=2, zero=0),), "zb_h1", made=("carve",)),
        PlannedCase((Unit("all", (WHOLE | {"weave": 3},), dp=2, tp=2, zero=3),), "data_parallel", made=("weave",)),
    ],
}
"""As DIVIDED, of transformers of diffusers."""


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_ranks_share_products_of_transformers_of_diffusers(num_ranks: int):
    assert_planned(num_ranks, OF_DIFFUSERS_DIVIDED[num_ranks])


@pytest.mark.parametrize(("num_ranks", "cases"), in_tiers(DIVIDED, {2: (0,)}))
def test_ranks_share_products_of_generators(num_ranks: int, cases: list[PlannedCase]):
    assert_planned(num_ranks, cases)


@pytest.mark.parametrize("num_ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_plans_with_stages(num_ranks: int):
    """In a stage of the backbone's, in a later stage, on ranks of their own; frozen, absent, balanced, sharded."""
    assert_planned(num_ranks, PLANNED[num_ranks])
