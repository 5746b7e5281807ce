"""Gradients of whole copies: summed over ranks bucket by bucket, in the last backward pass of a step."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from motet.core.errors import UserError
from motet.runtime import replicas
from motet.runtime.replicas import ReplicatedGradients
from ranks import run_ranks


class Branches(nn.Module):
    """Four layers in a row, one of which a call may leave out, and a parameter that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(5, 5, dtype=torch.float64) for _ in range(4))
        self.unused = nn.Parameter(torch.zeros(3, dtype=torch.float64))
        self.layers[0].weight.requires_grad_(False)

    def forward(self, x: torch.Tensor, left_out: int) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            x = x if number == left_out else layer(x).tanh()
        return x.square().sum()


def check_sums(rank: int, num_ranks: int, bucket_bytes: int) -> int:
    """Two steps of three microbatches, against one backward pass of all ranks' inputs; the number of buckets."""
    replicas.BUCKET_BYTES = bucket_bytes
    model, alone = Branches(), Branches()
    gradients = ReplicatedGradients(model.parameters(), dist.group.WORLD)
    for step in range(2):
        inputs = torch.randn(num_ranks, 3, 7, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        gradients.zero()
        for number, own in enumerate(inputs[rank]):
            # Each rank leaves another layer out: it completes its buckets in an order of its own.
            loss = model(own, (rank + number) % 4)
            if number < 2:
                loss.backward()
            else:
                with gradients.summed():
                    loss.backward()
        gradients.wait()
        alone.zero_grad()
        for of_rank in range(num_ranks):
            for number, other in enumerate(inputs[of_rank]):
                alone(other, (of_rank + number) % 4).backward()
        for mine, whole in zip(model.parameters(), alone.parameters(), strict=True):
            if mine.requires_grad:
                expected = torch.zeros_like(mine) if whole.grad is None else whole.grad
                torch.testing.assert_close(mine.grad, expected, rtol=1e-12, atol=1e-12)
            else:
                assert mine.grad is None
    return len(gradients.flat)


@pytest.mark.parametrize(("bucket_bytes", "num_buckets"), [(2**20, 1), (300, 3), (1, 8)])
def test_buckets_of_any_size_hold_the_sum_of_all_ranks(bucket_bytes, num_buckets):
    assert run_ranks(check_sums, 3, bucket_bytes) == [num_buckets] * 3


def refuse_parts(rank: int, num_ranks: int) -> bool:
    model = nn.Linear(4, 4)
    gradients = ReplicatedGradients(model.parameters(), dist.group.WORLD)
    gradients.zero()
    x = torch.randn(2, 4, requires_grad=True)
    twice = checkpoint(model, checkpoint(model, x, use_reentrant=True), use_reentrant=True)
    with pytest.raises(UserError, match="more than one gradient in one backward pass"), gradients.summed():
        twice.sum().backward()
    return True


def test_a_gradient_in_parts_is_refused():
    """Or a part of it would be missing from the sum, without a word."""
    assert all(run_ranks(refuse_parts, 2))
