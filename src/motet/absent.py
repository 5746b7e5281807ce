"""Parameters of a module that has no input on this rank."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn


class _ZeroGradients(torch.autograd.Function):
    """x -> x, with zero gradients for the parameters that are given beside it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *params: Tensor) -> Tensor:
        # Shapes, not tensors: FSDP frees the storage of gathered parameters between forward and backward.
        ctx.like = [(p.shape, p.dtype, p.device) for p in params]
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        zeros = (torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.like)
        return (grads[0], *zeros)


def take_part(x: Tensor, parameters: Iterable[nn.Parameter]) -> Tensor:
    """Return x, so that a backward pass through it gives zero gradients to those of `parameters` that train.

    DDP and FSDP reduce gradients over ranks, and wait for each parameter on every rank. A rank that has nothing to
    compute for a module (an encoder without images) calls this instead of the module: it computes nothing, needs no
    dummy input, and no other rank waits. x: any tensor that the rank's loss depends on, also one of zero rows.

    Example:
        >>> encoder = nn.Linear(2, 3)
        >>> rows = take_part(torch.zeros(0, 3), encoder.parameters())  # instead of encoder(images)
        >>> rows.sum().backward()
        >>> encoder.bias.grad
        tensor([0., 0., 0.])
    """
    return _ZeroGradients.apply(x, *(p for p in parameters if p.requires_grad))
