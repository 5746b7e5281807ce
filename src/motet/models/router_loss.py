"""The loss that keeps experts equally busy (a balancing loss of MoE), for each document by itself.

Of a layer with E experts and a document of n rows, it is (Fedus et al. 2021, Switch Transformers, equations 4 to 6)

    E * sum over experts of (choices of the expert / n) * (mean probability of the expert)

and the mean over the layers with experts. A document counts as often as it has targets. So the loss of a step, over
its targets, is a mean over documents of what each would have alone, whatever ranks and microbatches they are on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class RouterLoss:
    """The router loss of one pass through some layers. Each layer adds its part, and gives it a graph.

    weight:    of the mean probability of one layer: the coefficient / number of layers with experts.
    documents: of each row the number of its document, int64 [num_rows].
    lengths:   rows of each document, int64 [num_documents].
    targets:   targets of each document, int64 [num_documents].
    summed:    sums what experts were chosen in documents, int64 [num_documents, num_experts], over the ranks that have
               rows of them, in place; None: this rank has all rows.
    gradient:  that of the sum of the loss. None: it is what comes back to the sum that `added_to` returned.

    Example:
        >>> two_rows = torch.tensor([0, 0])
        >>> loss = RouterLoss(1.0, two_rows, torch.tensor([2]), torch.tensor([1]))
        >>> probabilities = torch.tensor([[0.75, 0.25], [0.25, 0.75]], requires_grad=True)
        >>> hidden = loss.through(0, torch.zeros(2, 8), probabilities, torch.tensor([[0], [1]]))
        >>> loss.added_to(torch.tensor(5.0))  # as often chosen as each other: 2 * (0.5 * 0.5 + 0.5 * 0.5)
        tensor(6.)
    """

    def __init__(
        self,
        weight: float,
        documents: Tensor,
        lengths: Tensor,
        targets: Tensor,
        summed: Callable[[Tensor], None] | None = None,
        gradient: float | None = None,
    ) -> None:
        self._documents, self._summed = documents, summed
        self._per_choice = weight * targets.double() / lengths.double() ** 2
        self.gradient: Tensor | float | None = gradient
        self._values: dict[int, Tensor] = {}

    def through(self, layer: int, hidden: Tensor, probabilities: Tensor, chosen: Tensor) -> Tensor:
        """The hidden states, with the loss of a layer in their graph; backward of a layer runs it again alike.

        hidden: [num_rows, width]. probabilities: [num_rows, num_experts], float32 or float64.
        chosen: the experts of each row, int64 [num_rows, experts_per_token].
        """
        num_experts, documents = probabilities.shape[1], self._documents
        choices = torch.zeros(len(self._per_choice), num_experts, dtype=torch.int64, device=hidden.device)
        places = (documents[:, None] * num_experts + chosen).view(-1)
        choices.view(-1).scatter_add_(0, places, torch.ones_like(places))
        if self._summed is not None:
            self._summed(choices)
        factors = (num_experts * self._per_choice[:, None] * choices).to(probabilities.dtype)
        value = (probabilities * factors[documents]).sum()
        self._values[layer] = value.detach()
        return _Beside.apply(hidden, value, self)

    @property
    def value(self) -> Tensor | float:
        """The sum of the layers so far, without a graph."""
        return sum(self._values.values(), start=0.0)

    def added_to(self, loss: Tensor) -> Tensor:
        """The sum of the loss, a scalar, and of this one; its gradient becomes that of this one."""
        return _Sum.apply(loss, self)


class _Beside(torch.autograd.Function):
    """(hidden states, a layer's loss) -> the hidden states. In backward the layer's loss gets its gradient.

    So it needs no output of its own: a layer that is sharded, recomputed or on another stage than the loss gives it.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, value: Tensor, loss: RouterLoss) -> Tensor:
        ctx.loss, ctx.like = loss, value.detach()
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        of_loss = ctx.loss.gradient
        if isinstance(of_loss, float):  # A number fills a tensor; a tensor of the host would be waited for.
            of_loss = torch.full_like(ctx.like, of_loss)
        return gradient, None if of_loss is None else of_loss.to(ctx.like), None


class _Sum(torch.autograd.Function):
    """The loss and that of routers. Backward comes here before it comes to any layer, and notes its gradient."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, routers: RouterLoss) -> Tensor:
        ctx.routers = routers
        return loss + routers.value

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        ctx.routers.gradient = gradient
        return gradient, None
