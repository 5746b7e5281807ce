"""The true global gradient norm, whatever meshes the parameters live on, and clipping by it.

torch's `clip_grad_norm_` fails for parameters on different meshes. Here every rank adds up the squares of what it
holds, each divided by the number of ranks that hold the same, and one sum over all ranks, which the step makes, gives
the square of the norm.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


@torch.no_grad()
def square_sum(parameters: Iterable[nn.Parameter], num_ranks: int, device: torch.device) -> Tensor:
    """This rank's part of the squared norm of all gradients, a float64 scalar; the sum over all ranks is the whole.

    A gradient that is no DTensor is taken to be the same on all `num_ranks` ranks.
    """
    total = torch.zeros((), dtype=torch.float64, device=device)
    for parameter in parameters:
        if parameter.grad is not None:
            local, copies = _local(parameter.grad, num_ranks)
            total += torch.linalg.vector_norm(local, dtype=torch.float64).square() / copies
    return total


@torch.no_grad()
def scale_gradients(parameters: Iterable[nn.Parameter], factor: Tensor) -> None:
    """Multiply all gradients by a scalar tensor, in place."""
    gradients = [_local(parameter.grad, 1)[0] for parameter in parameters if parameter.grad is not None]
    if gradients:
        torch._foreach_mul_(gradients, factor)


def clip_factor(norm: Tensor, max_norm: float) -> Tensor:
    """What gradients of a norm are multiplied by so that it is at most max_norm: 1 where it is already.

    1 for a norm that is not finite: no factor would mend it, and each would hide which gradient it comes from.
    """
    return torch.where(torch.isfinite(norm), (max_norm / norm).clamp(max=1.0), 1.0)


def _local(gradient: Tensor, num_ranks: int) -> tuple[Tensor, int]:
    """What this rank holds of a gradient, and how many ranks hold the same."""
    if not isinstance(gradient, DTensor):
        return gradient, num_ranks
    copies = 1
    for axis, placement in enumerate(gradient.placements):
        if placement.is_partial():
            raise ValueError("a gradient that is not yet summed over ranks has no norm")
        if placement.is_replicate():
            copies *= gradient.device_mesh.size(axis)
    return gradient.to_local(), copies
