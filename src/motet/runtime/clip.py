"""The norm of all gradients over all ranks, for parameters on any device meshes, and clipping by it.

torch's `clip_grad_norm_` fails for parameters on different meshes. Here

    norm^2 = sum over ranks and gradients of |the rank's part|^2 / number of ranks that hold the same part

`square_sum` gives a rank's share; the NORM action sums it over ranks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from motet.runtime.mesh import TENSOR

_AT_ONCE = 2**18
"""Elements of which a CPU takes the norm at a time; of millions at once it takes ten times as long for each."""


@torch.no_grad()
def square_sum(
    parameters: Iterable[nn.Parameter], num_ranks: int, device: torch.device, tensor_size: int = 1
) -> Tensor:
    """This rank's share of the squared norm of all gradients, a float64 scalar; the shares of all ranks add up to it.

    A gradient that is no DTensor counts as held by all `num_ranks` ranks. Raises ValueError for a partial DTensor.
    tensor_size: tensor-parallel ranks, each of which has all of a gradient that they do not cut.
    """
    by_copies: defaultdict[int, list[Tensor]] = defaultdict(list)
    for parameter in parameters:
        if parameter.grad is not None:
            local, copies = _local(parameter.grad, num_ranks, tensor_size)
            by_copies[copies].append(local)
    total = torch.zeros((), dtype=torch.float64, device=device)
    for copies, gradients in by_copies.items():
        total += _square(gradients) / copies
    return total


@torch.no_grad()
def square_sum_of_copies(gradients: Sequence[Tensor], num_copies: int, device: torch.device) -> Tensor:
    """As `square_sum`, for gradients of which `num_copies` ranks hold the same part as this rank."""
    return _square(gradients) / num_copies if gradients else torch.zeros((), dtype=torch.float64, device=device)


@torch.no_grad()
def square_sum_of_share(flat: Sequence[Tensor], rank: int, num_ranks: int, device: torch.device) -> Tensor:
    """As `square_sum`, for gradients of which all ranks hold the same whole copy, as tensors of one dimension.

    Rank r takes the r-th part of each.
    """
    ends = ([len(gradients) * edge // num_ranks for edge in (rank, rank + 1)] for gradients in flat)
    shares = [gradients[first:stop] for gradients, (first, stop) in zip(flat, ends)]
    return _square(shares) if shares else torch.zeros((), dtype=torch.float64, device=device)


@torch.no_grad()
def scale_gradients(parameters: Iterable[nn.Parameter], factor: Tensor) -> None:
    """Multiply all gradients by `factor`, a scalar tensor, in place."""
    gradients = [_local(parameter.grad, 1)[0] for parameter in parameters if parameter.grad is not None]
    if gradients:
        torch._foreach_mul_(gradients, factor)


@torch.no_grad()
def unscale_and_clip(
    parameters: Iterable[nn.Parameter], square_norm: Tensor, max_norm: float | None, scale: float = 1.0
) -> None:
    """Divide gradients of a scaled loss, and their squared norm, by the scale, in place, and clip the gradients.

    square_norm: of the scaled gradients over all ranks, a float64 scalar. scale: a power of two, so nothing is rounded.
    """
    square_norm /= scale**2
    if max_norm is not None:
        scale_gradients(parameters, clip_factor(square_norm.sqrt(), max_norm) / scale)
    elif scale != 1:
        scale_gradients(parameters, torch.full_like(square_norm, 1 / scale))


def clip_factor(norm: Tensor, max_norm: float) -> Tensor:
    """min(1, max_norm / norm): the factor after which the norm of the gradients is at most max_norm.

    1 if the norm is not finite: scaling would only spread NaN to gradients that are finite.
    """
    return torch.where(torch.isfinite(norm), (max_norm / norm).clamp(max=1.0), 1.0)


def _square(tensors: Sequence[Tensor]) -> Tensor:
    """The sum of squares of all elements in float64, a scalar. tensors: at least one."""
    pieces = [piece for tensor in tensors for piece in _pieces(tensor)]
    norms = torch._foreach_norm(pieces, 2, dtype=torch.float64)
    return torch.linalg.vector_norm(torch.stack(norms)).square()


def _pieces(tensor: Tensor) -> Sequence[Tensor]:
    if tensor.device.type != "cpu" or tensor.numel() <= _AT_ONCE:
        return (tensor,)
    return tensor.reshape(-1).split(_AT_ONCE)


def _local(gradient: Tensor, num_ranks: int, tensor_size: int = 1) -> tuple[Tensor, int]:
    """(the part of a gradient on this rank, the number of ranks that hold the same part)."""
    if not isinstance(gradient, DTensor):
        return gradient, num_ranks
    copies = 1 if TENSOR in (gradient.device_mesh.mesh_dim_names or ()) else tensor_size
    for axis, placement in enumerate(gradient.placements):
        if placement.is_partial():
            raise ValueError("a gradient that is not yet summed over ranks has no norm")
        if placement.is_replicate():
            copies *= gradient.device_mesh.size(axis)
    return gradient.to_local(), copies
