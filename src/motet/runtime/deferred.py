"""Gradients of weights that wait: backward in two halves, I and W, for zero-bubble schedules (Qi et al. 2024).

I is an ordinary backward pass in which linear layers give the gradient of their input at once, and keep their input and
the gradient of their output, and so do routed experts. W multiplies the two. All else that backward makes comes in I:
gradients of biases, norms, routers, embeddings, convolutions, and of linear layers that a module does not call as
`nn.Linear`, or that have a `forward` of their own. So no graph is walked twice, recomputation runs once, and W needs no
weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

from motet.chunked import ColumnLinear
from motet.grouped import GroupedLinear, add_weight_gradients
from motet.tensor_parallel import RowLinear
from motet.transposed import TransposedLinear, is_transposed, out_first


@dataclass(frozen=True)
class WeightProduct:
    """The gradient of a weight [out, in] from one pass, not yet computed: gradient^T rows.

    rows: [n, in], the input of the layer. gradient: [n, out], that of its output. Of a weight that is stored as
    [in, out] (`transposed.py`), each is in the other's place.
    counts: of rows by expert, where the weight has those of several, [num_experts, out, in]; (): it is one matrix.
    """

    weight: nn.Parameter
    rows: Tensor
    gradient: Tensor
    counts: Sequence[int] = ()

    def add(self) -> None:
        """Compute it, and add it to the weight's gradient."""
        with torch.no_grad():
            if self.counts:
                if self.weight.grad is None:
                    self.weight.grad = torch.zeros_like(self.weight)
                add_weight_gradients(self.weight.grad, self.rows, self.gradient, self.counts)
            elif self.weight.grad is None:
                self.weight.grad = self.gradient.t() @ self.rows
            else:
                self.weight.grad.addmm_(self.gradient.t(), self.rows)


class DeferredWeights:
    """Linear layers whose weights' gradients wait if a backward pass says so; in all other passes nothing waits.

    modules: their linear layers get another `forward`, with the same result, in place.

    Example:
        >>> layer, rows = nn.Linear(2, 3), torch.ones(4, 2)
        >>> deferred, products = DeferredWeights([layer]), []
        >>> with deferred.into(products):
        ...     layer(rows).sum().backward()
        >>> layer.bias.grad.tolist(), layer.weight.grad, len(products)
        ([4.0, 4.0, 4.0], None, 1)
        >>> products[0].add()
        >>> layer.weight.grad.tolist()
        [[4.0, 4.0], [4.0, 4.0], [4.0, 4.0]]
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._products: list[WeightProduct] | None = None
        for module in modules:
            for child in module.modules():
                # A forward of its own may compute something else.
                if isinstance(child, GroupedLinear):
                    child.waits = self.waits
                elif isinstance(child, ColumnLinear | RowLinear):
                    child.product = partial(_forward, child, self, isinstance(child, ColumnLinear))
                    child.waits = self.waits
                elif isinstance(child, nn.Linear) and _is_plain(child):
                    child.forward = partial(_forward, child, self, True)  # type: ignore[method-assign]

    @contextmanager
    def into(self, products: list[WeightProduct] | None) -> Iterator[None]:
        """In the block, backward passes add what waits to `products`; None: nothing waits."""
        before, self._products = self._products, products
        try:
            yield
        finally:
            self._products = before

    def waits(self, weight: nn.Parameter, rows: Tensor, gradient: Tensor, counts: Sequence[int] = ()) -> bool:
        """Keep a product, if the running backward pass says so."""
        if self._products is None:
            return False
        self._products.append(WeightProduct(weight, rows, gradient, counts))
        return True


def _is_plain(layer: nn.Linear) -> bool:
    """Whether its `forward` is torch's, or one of this module: neither that of a subclass nor one set on the layer."""
    own = vars(layer).get("forward", None)
    is_ours = isinstance(own, partial) and own.func is _forward
    return type(layer).forward in (nn.Linear.forward, TransposedLinear.forward) and (own is None or is_ours)


def _forward(layer: nn.Linear, deferred: DeferredWeights, has_bias: bool, x: Tensor) -> Tensor:
    weight, bias = layer.weight, layer.bias if has_bias else None
    # The gradient of a weight that is computed from others (parametrizations) goes on into their graph, and autocast
    # multiplies copies in another type.
    if not (torch.is_grad_enabled() and weight.requires_grad and weight.is_leaf) or torch.is_autocast_enabled(
        x.device.type
    ):
        return linear(x, out_first(layer), bias)
    return _DeferredLinear.apply(x, weight, bias, layer, deferred)


class _DeferredLinear(torch.autograd.Function):
    """x [..., in] -> the output of a layer [..., out]; backward may leave the gradient of its weight for later."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: nn.Parameter, bias: Tensor | None, layer: nn.Linear, deferred: DeferredWeights
    ) -> Tensor:
        ctx.save_for_backward(x)
        # By reference: torch.utils.checkpoint would give back a copy, whose gradient is nobody's.
        ctx.weight, ctx.layer, ctx.deferred = weight, layer, deferred
        return linear(x, out_first(layer, weight), bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (x,), weight = ctx.saved_tensors, ctx.weight
        matrix = out_first(ctx.layer, weight)
        num_out, num_in = matrix.shape
        of_x = gradient @ matrix if ctx.needs_input_grad[0] else None
        rows, of_rows = x.reshape(-1, num_in), gradient.reshape(-1, num_out)
        of_bias = of_rows.sum(0) if ctx.needs_input_grad[2] else None
        read, made = (of_rows, rows) if is_transposed(ctx.layer) else (rows, of_rows)
        of_weight = None if ctx.deferred.waits(weight, read, made) else made.t() @ read
        return of_x, of_weight, of_bias, None, None
