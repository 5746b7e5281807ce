"""The gradient norm over parameters that live on different meshes, sharded, replicated or plain."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from motet.runtime.clip import clip_factor, scale_gradients, square_sum, square_sum_of_share
from ranks import run_ranks


def gradients() -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(shape, dtype=torch.float64) for shape in ((7, 3), (5,), (2, 2), (1,), (6, 4))]


def norm_and_clipped(rank: int, num_ranks: int):
    everyone = init_device_mesh("cpu", (4,), mesh_dim_names=("shard",))
    hybrid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    halves = hybrid["shard"]
    placed = [
        distribute_tensor(gradients()[0], everyone, [Shard(0)]),
        distribute_tensor(gradients()[1], hybrid, [Replicate(), Shard(0)]),
        gradients()[2],
        distribute_tensor(gradients()[3], everyone, [Shard(0)]),  # three ranks hold nothing of it
    ]
    if rank in (0, 1):  # a module that lives on half of the ranks
        placed.append(distribute_tensor(gradients()[4], halves, [Shard(0)]))
    parameters = []
    for gradient in placed:
        parameter = nn.Parameter(torch.zeros_like(gradient))
        parameter.grad = gradient
        parameters.append(parameter)
    parameters.append(nn.Parameter(torch.zeros(9)))  # one without a gradient
    total = square_sum(parameters, num_ranks, torch.device("cpu"))
    dist.all_reduce(total)
    scale_gradients(parameters, clip_factor(total.sqrt(), 1.5))
    whole = [
        p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for p in parameters[:5] if p.grad is not None
    ]
    return total.sqrt(), whole


def test_norm_counts_every_gradient_once():
    expected = torch.cat([gradient.flatten() for gradient in gradients()]).norm()
    for norm, clipped in run_ranks(norm_and_clipped, 4):
        torch.testing.assert_close(norm, expected, rtol=1e-14, atol=0)
        for gradient, original in zip(clipped, gradients()):
            torch.testing.assert_close(gradient, original * 1.5 / expected, rtol=1e-14, atol=0)


def test_small_gradients_are_left_as_they_are():
    assert clip_factor(torch.tensor(0.5), 1.0) == 1
    assert clip_factor(torch.tensor(0.0), 1.0) == 1


@pytest.mark.parametrize("size", [1e-25, 1e-18, 1.0, 1e18, 3e38])
@pytest.mark.parametrize("num_elements", [0, 9, 2**16, 200_001])
def test_the_norm_of_float32_is_added_up_in_float64(size, num_elements):
    gradient = torch.rand(num_elements, generator=torch.Generator().manual_seed(0)) * size
    parameter = nn.Parameter(torch.zeros_like(gradient))
    parameter.grad = gradient
    expected = gradient.double().square().sum()
    torch.testing.assert_close(square_sum([parameter], 1, gradient.device), expected, rtol=1e-13, atol=0)
    shares = [square_sum_of_share([gradient], rank, 3, gradient.device) for rank in range(3)]
    torch.testing.assert_close(sum(shares), expected, rtol=1e-13, atol=0)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_the_norm_of_what_is_not_finite_is_not(bad):
    gradient = torch.ones(200_000)
    gradient[123] = bad
    assert not square_sum_of_share([gradient], 0, 1, gradient.device).isfinite()
