"""Products of rows with several matrices, each of which multiplies its own run of rows: the experts of a mixture.

Their weights' gradients may wait, as those of linear layers do (`runtime/deferred.py`). On CUDA, in bfloat16, all are
one kernel (`torch.nn.functional.grouped_mm`) where its layouts allow it; elsewhere each matrix has its own product.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import grouped_mm, linear

from motet.on_device import on_device

_ALIGNED = 16
"""Bytes of which the kernel's addresses and widths must be multiples."""
_Waits = Callable[[nn.Parameter, Tensor, Tensor, Sequence[int]], bool]
"""(weights, rows, gradient of the products, counts) -> whether the gradient of the weights is computed later."""


class GroupedLinear(nn.Module):
    """(rows [n, in], weights [num_matrices, out, in], counts) -> products [n, out]. It has no parameters of its own.

    The first counts[0] rows are multiplied by the first matrix, and so on; the counts add up to n.
    waits: asked in backward whether the gradient of the weights waits; None: it never does.

    Example:
        >>> weights = torch.tensor([[[1.0]], [[10.0]]])
        >>> GroupedLinear()(torch.tensor([[1.0], [2.0], [3.0]]), weights, [1, 2])[:, 0].tolist()
        [1.0, 20.0, 30.0]
    """

    def __init__(self) -> None:
        super().__init__()
        self.waits: _Waits | None = None

    def forward(self, rows: Tensor, weights: Tensor, counts: Sequence[int]) -> Tensor:
        # As for linear layers: the gradient of what is computed from others goes on into their graph, and autocast
        # multiplies copies in another type.
        can_wait = self.waits is not None and torch.is_grad_enabled() and weights.requires_grad and weights.is_leaf
        if torch.is_autocast_enabled(rows.device.type) or not (can_wait or is_one_kernel(rows, weights)):
            return _multiplied(rows, weights, counts)
        return _Grouped.apply(rows, weights, counts, self.waits if can_wait else None)


def is_one_kernel(rows: Tensor, weights: Tensor) -> bool:
    """Whether products of rows with weights [num_matrices, out, in] are computed by one kernel."""
    if rows.device.type != "cuda" or not rows.dtype == weights.dtype == torch.bfloat16 or not len(rows):
        return False
    widths = (size * weights.element_size() for size in weights.shape[1:])
    is_aligned = not any(number % _ALIGNED for number in (*widths, rows.data_ptr(), weights.data_ptr()))
    return is_aligned and torch.cuda.get_device_capability(rows.device) >= (8, 0)


def _ends(counts: Sequence[int], device: torch.device) -> Tensor:
    return on_device(torch.tensor(list(accumulate(counts)), dtype=torch.int32), device)


def _multiplied(rows: Tensor, weights: Tensor, counts: Sequence[int]) -> Tensor:
    if is_one_kernel(rows, weights):
        return grouped_mm(rows.contiguous(), weights.transpose(1, 2), offs=_ends(counts, rows.device))
    parts = zip(rows.split(list(counts)), weights.unbind(), strict=True)
    made = [linear(part, weight) for part, weight in parts if len(part)]
    return torch.cat(made) if made else linear(rows, weights[0])


def add_weight_gradients(to: Tensor, rows: Tensor, gradient: Tensor, counts: Sequence[int]) -> None:
    """Add the gradient of the weights to `to` [num_matrices, out, in], in place. gradient: of the products [n, out]."""
    if is_one_kernel(rows, to) and is_one_kernel(gradient, to):
        made = grouped_mm(gradient.contiguous().t(), rows.contiguous(), offs=_ends(counts, rows.device))
        if empty := [number for number, count in enumerate(counts) if not count]:
            made.index_fill_(0, on_device(torch.tensor(empty), made.device), 0)  # No sum of no rows is written.
        to.add_(made)
        return
    for of_matrix, own, of_own in zip(to, rows.split(list(counts)), gradient.split(list(counts)), strict=True):
        if len(own):
            of_matrix.addmm_(of_own.t(), own)


class _Grouped(torch.autograd.Function):
    """Grouped products whose backward may leave the gradient of the weights for later. waits: None: it does not."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: nn.Parameter, counts: Sequence[int], waits: _Waits | None) -> Tensor:
        # What waits, by reference: torch.utils.checkpoint would give back a copy, whose gradient is nobody's.
        ctx.save_for_backward(rows, *([weights] if waits is None else []))
        ctx.weights, ctx.counts, ctx.waits = None if waits is None else weights, counts, waits
        return _multiplied(rows, weights, counts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (rows, *saved), counts = ctx.saved_tensors, ctx.counts
        weights = saved[0] if saved else ctx.weights
        of_rows = _multiplied(gradient, weights.transpose(1, 2), counts) if ctx.needs_input_grad[0] else None
        if not ctx.needs_input_grad[1] or (ctx.waits is not None and ctx.waits(weights, rows, gradient, counts)):
            return of_rows, None, None, None
        add_weight_gradients(of_weights := torch.zeros_like(weights), rows, gradient, counts)
        return of_rows, of_weights, None, None
