"""Experts that ranks share: each rank has some of the experts, and rows go to the ranks of theirs and back.

A pass of a layer has two all-to-alls in forward and two in backward (MMScale section 8; Lepikhin et al. 2021, GShard,
section 3.2). No row is dropped, and a rank without rows takes part, so that the result is that of one rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from motet.core.arrays import Int64Array

Experts = Callable[[Tensor, Sequence[int]], Tensor]
"""(rows in the order of their experts, rows of each expert of this rank) -> what these make of them, as many rows."""


@dataclass(frozen=True)
class ExpertRanks:
    """The ranks that share experts: rank `index` of `size` has as many of them as any other, in order.

    All ranks of the group call everything here alike, each with rows of its own.
    sent: gets the bytes that this rank sends to others.

    Example: alone, rows go nowhere.
        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> ranks, counts = ExpertRanks(None, 0, 1), torch.tensor([[1, 2]])
        >>> arriving, doubled = ranks.arriving(counts), lambda rows, counts: 2 * rows
        >>> ranks.through(torch.ones(3, 1), [3], arriving, arriving.numpy(), doubled).tolist()
        [[2.0], [2.0], [2.0]]
        >>> dist.destroy_process_group()
    """

    group: dist.ProcessGroup | None
    index: int
    size: int
    sent: list[float] = field(default_factory=list, compare=False)

    def __deepcopy__(self, memo: dict[int, Any]) -> ExpertRanks:
        """Itself: a copy of a model has the same ranks."""
        return self

    def arriving(self, counts: Tensor) -> Tensor:
        """Rows of each rank for each expert of this one, int64 [size, experts of a rank]. A collective.

        counts: the same of this rank for each expert, int64 [size, experts of a rank].
        """
        arriving = torch.empty_like(counts, memory_format=torch.contiguous_format)
        dist.all_to_all_single(arriving, counts.contiguous(), group=self.group)
        return arriving

    def through(
        self, rows: Tensor, sent: Sequence[int], arriving: Tensor, arrived: Int64Array, experts: Experts
    ) -> Tensor:
        """Rows [n, width] through their experts, on whichever ranks these are; the same shape. A collective.

        rows: in the order of their experts. sent: rows for each rank. arriving: what `arriving` gave.
        arrived: the same on the host, which knows it here without a wait. experts: those of this rank.
        """
        received = arrived.sum(1).tolist()
        at_experts = _Exchanged.apply(rows, self, sent, received)
        # What arrives is in the order of ranks, and of each rank in the order of experts.
        of_row = torch.arange(arriving.shape[1], device=rows.device).repeat(self.size)
        order = of_row.repeat_interleave(arriving.view(-1), output_size=len(at_experts)).argsort(stable=True)
        made = experts(at_experts[order], arrived.sum(0).tolist())
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order), device=order.device)
        return _Exchanged.apply(made[back], self, received, sent)

    def exchanged(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """What other ranks send to this one. sent, received: rows of each rank, in the order of ranks."""
        arrived = rows.new_empty(sum(received), rows.shape[1])
        self.sent.append((sum(sent) - sent[self.index]) * rows.shape[1] * rows.element_size())
        dist.all_to_all_single(arrived, rows.contiguous(), list(received), list(sent), group=self.group)
        return arrived


class _Exchanged(torch.autograd.Function):
    """`ExpertRanks.exchanged`; gradients of rows go back the same way."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, ranks: ExpertRanks, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        ctx.ranks, ctx.sent, ctx.received = ranks, sent, received
        return ranks.exchanged(rows, sent, received)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.ranks.exchanged(gradient, ctx.received, ctx.sent), None, None, None
