"""Steps of each optimizer with clipping and decay leave the parameters of torch's in one process; phases may lack."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from motet.models.mllm import MLLM
from motet.runtime.fsdp import FSDPConfig, shard
from motet.runtime.step import TrainStep
from motet.train.optimizer import OptimizerConfig, build_optimizer, parameter_groups
from motet.train.optimizers import OPTIMIZERS
from parity.test_gradients import Case, local, mesh_of, rank_batch, whole
from parity.tiny import build_model, draw_examples, reference_step
from ranks import run_ranks
from tiers import in_tiers

# Step by step: everything, text only, images only, and everything again.
STEPS = [("image", "audio"), (), ("image",), ("image", "audio")]
MAX_GRAD_NORM = 0.5


def train(rank: int, num_ranks: int, shard_size: int | None, names: Sequence[str]) -> list[str]:
    return [f"{name}: {wrong}" for name in names for wrong in wrong_of(rank, shard_size, name)]


def wrong_of(rank: int, shard_size: int | None, name: str) -> list[str]:
    config = OptimizerConfig(name=name, lr=1e-2, weight_decay=0.1)
    case = Case(fsdp=FSDPConfig(shard_size=shard_size))
    mesh = mesh_of(shard_size)
    model = build_model()
    shard(model, mesh, case.fsdp)
    optimizer = build_optimizer(model, config)
    step = TrainStep(model, mesh, optimizer, max_grad_norm=MAX_GRAD_NORM)
    norms = []
    for number, contents in enumerate(STEPS):
        batch = rank_batch(model, draw_examples(7, number, contents), mesh, case).to("cpu", dtype=torch.float64)
        norms.append(step.run([batch], number).grad_norm)
    parameters = whole({name: local(p).detach() for name, p in model.named_parameters()}, mesh)
    if rank:
        return []
    expected = build_model()
    optimizer = torch_optimizer(expected, config)
    wrong = []
    for number, contents in enumerate(STEPS):
        optimizer.zero_grad()
        reference_step(expected, draw_examples(7, number, contents))
        gradients = [p.grad for p in expected.parameters() if p.grad is not None]
        norm = torch.stack([gradient.norm() for gradient in gradients]).norm().item()
        # Not torch's clip_grad_norm_, which adds 1e-6 to the norm.
        torch._foreach_mul_(gradients, min(1.0, MAX_GRAD_NORM / norm))
        if abs(norms[number] - norm) > 1e-10 * norm:
            wrong.append(f"norm of step {number}: {norms[number]}, expected {norm}")
        optimizer.step()
    for name, parameter in expected.named_parameters():
        if (off := (parameters[name] - parameter).abs().max()) > 1e-8 * config.lr:
            wrong.append(f"{name}: off by {off:.1e}")
    return wrong


def torch_optimizer(model: MLLM, config: OptimizerConfig) -> torch.optim.Optimizer:
    """torch's class by its own arguments, a tensor at a time."""
    kind = {"adamw": "AdamW", "nadam": "NAdam", "radam": "RAdam", "rmsprop": "RMSprop", "sgd": "SGD"}
    given = config.model_dump(include={"betas", "eps", "alpha", "nesterov", "momentum"}, exclude_none=True)
    make = getattr(torch.optim, kind.get(config.name, config.name.capitalize()))
    return make(parameter_groups(model, config), lr=config.lr, **given, foreach=False)


@pytest.mark.parametrize(("num_ranks", "shard_size"), [(3, None), pytest.param(4, 2, marks=pytest.mark.slow), (3, 1)])
def test_parameters_after_four_steps(num_ranks, shard_size):
    assert run_ranks(train, num_ranks, shard_size, ["adamw"])[0] == []


OTHERS = sorted(set(OPTIMIZERS) - {"adamw"})


@pytest.mark.parametrize(("num_ranks", "names"), in_tiers({2: OTHERS}, {2: (0,)}))
def test_parameters_of_other_optimizers(num_ranks, names):
    assert run_ranks(train, num_ranks, None, names)[0] == []
