"""Any mix of present and absent modalities over ranks and microbatches, with HF encoders: no hang, and exact gradients.

Parameters' gradients are held against one process that runs one example at a time, as in tests/parity.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.distributed as dist

from motet.core.workload import home_ranks
from motet.dispatch import ItemExchange, LoadedExample, assemble
from motet.models.build import BackboneConfig, EncoderConfig, ModelConfig, build_mllm
from motet.models.mllm import MLLM
from motet.runtime.fsdp import FSDPConfig, shard
from motet.runtime.mesh import Mesh, build_mesh
from motet.runtime.step import TrainStep
from parity.test_gradients import Case, local, orchestrator_of, relative, whole
from parity.tiny import VOCABULARY, draw_example, reference_step
from ranks import run_ranks

TRANSFORMER = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 16, "intermediate_size": 24}
IMAGE = {
    "siglip": TRANSFORMER | {"patch_size": 2, "image_size": 16, "num_channels": 1},
    "qwen2_vl": {
        "depth": 2, "embed_dim": 16, "hidden_size": 16, "num_heads": 2, "mlp_ratio": 2,
        "patch_size": 2, "temporal_patch_size": 1, "in_channels": 1, "spatial_merge_size": 2,
    },
}  # fmt: skip
ROW_DIMS = {"image": 4, "audio": 4}
WHISPER = {
    "d_model": 16, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 24,
    "num_mel_bins": 4, "max_source_positions": 16,
}  # fmt: skip


def build(image_family: str) -> MLLM:
    backbone = TRANSFORMER | {"num_key_value_heads": 1}
    config = ModelConfig(
        backbone=BackboneConfig(family="qwen2", config=backbone),
        encoders={
            "image": EncoderConfig(family=image_family, config=IMAGE[image_family]),
            "audio": EncoderConfig(family="whisper", config=WHISPER),
        },
    )
    return build_mllm(config, VOCABULARY, torch.float64)


@dataclass(frozen=True)
class Scenario:
    """Microbatches of examples, each given by the media that it contains, spread over ranks in this order."""

    name: str
    microbatches: tuple[tuple[tuple[str, ...], ...], ...]
    balanced: tuple[str, ...] = ("backbone", "image", "audio")


IMG, AUD = "image", "audio"
SCENARIOS = [
    Scenario("a rank without image", (((IMG, IMG), (IMG,), (AUD,), (), (AUD, IMG), (IMG,)),), balanced=()),
    Scenario("only one rank has images", (((IMG, IMG), (IMG, IMG), (), (), (), (AUD,)),), balanced=()),
    Scenario("only one rank has audio", (((IMG,), (IMG,), (IMG,), (IMG,), (IMG,), (AUD, AUD, AUD)),), balanced=()),
    Scenario("no rank has audio", (((IMG,), (), (IMG, IMG), (IMG,), ()),)),
    Scenario("text only", (((), (), (), (), ()),)),
    Scenario("more ranks than items", (((IMG,), (AUD,), (), (), ()),)),
    Scenario("one item, one example", (((AUD,),),)),
    Scenario("one text, no item", (((),),)),
    Scenario("ranks without an example", (((IMG, AUD), (IMG,)),), balanced=()),
    Scenario(
        "microbatches in turn",
        (((IMG,), (IMG, IMG), ()), ((AUD,), (AUD,), (AUD,)), ((), ()), ((IMG, AUD), (AUD, IMG), (AUD,), ())),
    ),
    Scenario("an empty microbatch between", (((IMG, AUD), (AUD,)), (), ((IMG,), ()))),
]


def check_scenarios(
    rank: int, num_ranks: int, image_family: str, fsdp: FSDPConfig, numbers: Sequence[int]
) -> list[str]:
    mesh = build_mesh(torch.device("cpu"), shard_size=fsdp.shard_size)
    wrong = []
    for number in numbers:
        scenario = SCENARIOS[number]
        rng = np.random.default_rng(number)
        microbatches = [[draw(rng, media) for media in examples] for examples in scenario.microbatches]
        wrong += check(scenario, microbatches, image_family, fsdp, mesh)
        dist.barrier()
    return wrong


def draw(rng: np.random.Generator, media: tuple[str, ...]) -> LoadedExample:
    example = draw_example(rng, media, ROW_DIMS)
    # Qwen2-VL joins two by two patches.
    items = [
        type(m)(np.repeat(m.values, 4, axis=0), m.size * 2) if phase == IMG else m
        for phase, m in zip(media, example.media)
    ]
    return LoadedExample(example.sequence, tuple(items))


def check(
    scenario: Scenario, microbatches: list[list[LoadedExample]], image_family: str, fsdp: FSDPConfig, mesh: Mesh
) -> list[str]:
    in_bf16 = fsdp.param_dtype == "bfloat16"
    dtype, limit = (torch.float32, 2e-2) if in_bf16 else (torch.float64, 1e-10)
    model = build(image_family).to(dtype)
    shard(model, mesh, fsdp)
    orchestrator = orchestrator_of(model, mesh.num_ranks, Case(phases=scenario.balanced))
    exchange = ItemExchange(mesh.host_group, orchestrator, dict(model.encoders.items()))
    batches = []
    for examples in microbatches:
        home = home_ranks(len(examples), mesh.num_ranks)
        got = exchange([example for example, rank in zip(examples, home) if rank == mesh.rank])
        batch = assemble(got.decision, got.lengths, mesh.rank, got.sequences, got.media)
        batches.append(batch.to("cpu", dtype=dtype))
    result = TrainStep(model, mesh).run(batches)
    gradients = whole({n: None if p.grad is None else local(p.grad) for n, p in model.named_parameters()}, mesh)
    loss = result.loss
    if mesh.rank:
        return []
    expected = build(image_family)
    expected_loss = reference_step(expected, [example for examples in microbatches for example in examples])
    wrong = [] if abs(loss - expected_loss) < limit * expected_loss else [f"loss {loss} instead of {expected_loss}"]
    norm = torch.stack([p.grad.norm() for p in expected.parameters() if p.grad is not None]).norm()
    for name, parameter in expected.named_parameters():
        found = gradients[name]
        if (found is None) != (parameter.grad is None):
            wrong.append(f"{name}: gradient is {found} instead of {parameter.grad}")
        elif found is None:
            continue
        # In bf16 a small gradient is all rounding: there its error counts as a part of the whole gradient.
        elif (off := (found - parameter.grad).norm() / norm if in_bf16 else relative(found, parameter.grad)) > limit:
            wrong.append(f"{name}: off by {off:.1e}")
    return [f"{scenario.name}: {line}" for line in wrong]


WAYS = {
    "fsdp": (3, FSDPConfig()),
    "hybrid": (4, FSDPConfig(shard_size=2, recompute=True)),
    "replicated": (3, FSDPConfig(shard_size=1)),
    "bf16": (3, FSDPConfig(param_dtype="bfloat16", reduce_dtype="float32")),
    "bf16 replicated": (3, FSDPConfig(param_dtype="bfloat16", reduce_dtype="float32", shard_size=1)),
}
FIRST = (1, 3, 4, 8, 10)
"""Scenarios of `make test`: one rank has all items, none has some, none has any, one has no example, a step pauses."""


@pytest.mark.parametrize(
    ("image_family", "way", "numbers"),
    [
        pytest.param("qwen2_vl", "fsdp", FIRST, id="first"),
        *(
            pytest.param(family, way, range(len(SCENARIOS)), id=f"{way}-{family}", marks=pytest.mark.slow)
            for family in ("siglip", "qwen2_vl")
            for way in WAYS
        ),
    ],
)
def test_absent_modalities_are_ordinary(image_family, way, numbers):
    num_ranks, fsdp = WAYS[way]
    wrong = run_ranks(check_scenarios, num_ranks, image_family, fsdp, numbers)[0]
    assert not wrong, "\n".join(wrong)
