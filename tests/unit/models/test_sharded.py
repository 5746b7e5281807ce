"""FSDP2 over ranks of which some have nothing: HF modules of every family, gradients as in one process."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from motet.models.build import ModelConfig, build_mllm
from motet.models.mllm import MLLM
from motet.models.projector import ProjectorConfig
from ranks import run_ranks

SIZES = {"image": [[2, 4], [4, 4], [6, 2]], "audio": [[7], [40], [12]]}


def documents(config: ModelConfig, rank: int, num_ranks: int):
    """Of six documents with an item of each modality, those of a rank: the last rank has none, the first no audio."""
    mllm = build_mllm(config, 50, torch.float64)
    tokens, places, media, offsets, start = [], {n: [] for n in mllm.encoders}, {n: [] for n in mllm.encoders}, [0], 0
    generator = torch.Generator().manual_seed(0)
    for i in range(3):
        for only in ("image", "audio"):
            owner = (i if only == "image" else i + 1) % max(num_ranks - 1, 1)
            length = 4
            for name, module in mllm.encoders.items():
                kind = "audio" if module.cost == "padded" or name == "qwen2_5_omni_audio" else "image"
                size = torch.tensor([SIZES[kind][i]])
                row_dim = 8 if kind == "audio" else 48 * (2 if name in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl") else 1)
                values = torch.randn(int(size.prod()), row_dim, generator=generator)
                if kind != only:
                    continue
                count = int(module.num_tokens(size.numpy())[0])
                if owner == rank or num_ranks == 1:
                    places[name] += range(start + length, start + length + count)
                    media[name].append((values, size))
                length += count
            ids = torch.randint(0, 50, (length + 5,), generator=generator)
            if owner == rank or num_ranks == 1:
                tokens.append(ids)
                start += len(ids)
                offsets.append(start)
    tokens = torch.cat(tokens) if tokens else torch.empty(0, dtype=torch.int64)
    positions = {name: torch.tensor(p, dtype=torch.int64) for name, p in places.items()}
    targets = torch.ones(len(tokens), dtype=torch.bool)
    for p in positions.values():
        targets[p] = False
    packed = SimpleNamespace(tokens=tokens, targets=targets, offsets=torch.tensor(offsets), feature_positions=positions)
    stacked = {n: (torch.cat([v for v, _ in m]), torch.cat([s for _, s in m])) for n, m in media.items() if m}
    return mllm, packed, stacked


def shard(mllm: MLLM, num_ranks: int, **options) -> None:
    mesh = init_device_mesh("cpu", (num_ranks,))
    for module in (*mllm.encoders.values(), mllm.backbone):
        for unit in (*module.blocks, module):
            fully_shard(unit, mesh=mesh, **options)


def sharded_gradients(rank: int, num_ranks: int, config: ModelConfig, recompute: bool):
    mllm, packed, media = documents(config, rank, num_ranks)
    shard(mllm, num_ranks)
    for module in (*mllm.encoders.values(), mllm.backbone):
        for block in module.blocks:
            block.recompute = recompute
    loss, num_targets = mllm(packed, media)
    (loss * num_ranks).backward()
    totals = torch.tensor([loss.item(), num_targets], dtype=torch.float64)
    dist.all_reduce(totals)
    whole = {n: p.grad.full_tensor() if p.grad is not None else None for n, p in mllm.named_parameters()}
    nothing = SimpleNamespace(
        tokens=packed.tokens[:0], targets=packed.targets[:0], offsets=torch.tensor([0]), feature_positions={}
    )
    assert mllm.backbone.next_tokens(nothing if rank else packed_text(), {}).shape == (0 if rank else 1,)
    return totals.tolist(), whole


def packed_text():
    tokens = torch.arange(5)
    return SimpleNamespace(tokens=tokens, targets=tokens > 0, offsets=torch.tensor([0, 5]), feature_positions={})


def config_of(tiny, train=True, family="qwen3", **frozen) -> ModelConfig:
    encoders = {
        f: {"family": f, "config": c, "projector": {"downsample": 4}} | frozen for f, c in tiny.encoders.items()
    }
    return ModelConfig(backbone={"family": family, "config": tiny.backbone_options, "train": train}, encoders=encoders)


@pytest.mark.parametrize(
    ("num_ranks", "train", "frozen", "recompute"),
    [
        pytest.param(3, True, {}, True, marks=pytest.mark.slow),
        pytest.param(2, True, {"train_encoder": False}, False, marks=pytest.mark.slow),
        pytest.param(2, False, {"train_projector": False}, False, marks=pytest.mark.slow),
    ],
)
def test_gradients_equal_one_process(tiny, num_ranks, train, frozen, recompute):
    config = config_of(tiny, train, **frozen)
    mllm, packed, media = documents(config, 0, 1)
    loss, num_targets = mllm(packed, media)
    loss.backward()
    for totals, gradients in run_ranks(sharded_gradients, num_ranks, config, recompute):
        np.testing.assert_allclose(totals, [loss.item(), num_targets], rtol=1e-12)
        for name, parameter in mllm.named_parameters():
            assert (gradients[name] is None) == (parameter.grad is None), name
            if parameter.grad is not None:
                # The floor is for biases of keys: softmax does not see them, their gradients are rounding alone.
                bound = 1e-10 * parameter.grad.norm() + 1e-14
                assert (gradients[name] - parameter.grad).norm() <= bound, name


@pytest.mark.parametrize(
    "family", ["gemma3", *(pytest.param(name, marks=pytest.mark.slow) for name in ("phi3", "olmo2"))]
)
def test_gradients_of_other_backbones_projectors_and_of_a_layer_equal_one_process(tiny, family):
    config = config_of(tiny, family=family)
    layered = ("siglip", "clip", "dinov2")
    for name in [*config.encoders]:
        if name not in (*layered, "whisper"):
            del config.encoders[name]
    for name in layered:
        config.encoders[name].feature_layer = -2
    config.encoders["dinov2"].config |= {"hidden_size": tiny.dim}
    forms = (
        {"pool": 4, "norm": "rms"},
        {"kind": "linear", "downsample": 4, "norm": "layer"},
        {"kind": "none", "pool": 4},
    )
    for name, form in zip(layered, forms, strict=True):
        config.encoders[name].projector = ProjectorConfig(**form)
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    config.backbone.config |= {
        "gemma3": {"head_dim": 8, "sliding_window": 5},
        "phi3": {"rope_parameters": rope, "original_max_position_embeddings": 10},
        "olmo2": {"tie_word_embeddings": True},
    }[family]
    mllm, packed, media = documents(config, 0, 1)
    mllm(packed, media)[0].backward()
    for _, gradients in run_ranks(sharded_gradients, 3, config, True):
        for name, parameter in mllm.named_parameters():
            assert (gradients[name] is None) == (parameter.grad is None), name
            if parameter.grad is not None:
                assert (gradients[name] - parameter.grad).norm() <= 1e-10 * parameter.grad.norm() + 1e-14, name


def run_mixed(rank: int, num_ranks: int, config: ModelConfig):
    mllm, packed, media = documents(config, rank, num_ranks)
    mllm = build_mllm(config, 50, torch.float32)
    shard(mllm, num_ranks, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    features = {
        n: m(*media.get(n, (torch.empty(0, 0), torch.empty(0, 0, dtype=torch.int64)))) for n, m in mllm.encoders.items()
    }
    assert {f.dtype for f in features.values()} == {torch.bfloat16}
    loss, _ = mllm.backbone(packed, features)
    loss.backward()
    assert loss.dtype == torch.float32
    assert all(isinstance(p.grad, DTensor) and p.grad.dtype == p.dtype for p in mllm.parameters() if p.grad is not None)
    return loss.item()


@pytest.mark.slow
def test_mixed_precision_runs_with_and_without_items(tiny):
    config = config_of(tiny)
    mllm, packed, media = documents(config, 0, 1)
    assert sum(run_ranks(run_mixed, 2, config)) == pytest.approx(mllm(packed, media)[0].item(), rel=0.02)
