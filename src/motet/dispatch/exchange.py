"""Rows move between ranks along a Route: one all-to-all, or no collective where no rank has rows for another.

Along a GatherRoute, one all-gather moves them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from motet.dispatch.route import GatherRoute, Route


def exchange_rows(rows: Tensor, route: Route | GatherRoute, group: dist.ProcessGroup | None) -> Tensor:
    """Rows [route.num_rows_in, ...] -> rows [route.num_rows_out, ...] of the same dtype; no autograd.

    A collective over `group`: every rank calls it with its own Route of the same move, the same dtype and the same
    trailing dimensions, also a rank without rows. A local Route communicates nothing, and `group` may be None.
    Raises ValueError if `rows` has not route.num_rows_in rows, or if a Route that is not local has no group.
    """
    if len(rows) != route.num_rows_in:
        raise ValueError(f"the route moves {route.num_rows_in} rows, {len(rows)} were given")
    if isinstance(route, GatherRoute):
        gather = route.there
        return all_gathered(rows, gather.share_rows, _given(group)).index_select(0, gather.index)
    sent = rows if route.send_index is None else rows.index_select(0, route.send_index)
    if route.is_local:
        received = sent
    else:
        received = rows.new_empty(route.num_rows_out, *rows.shape[1:])
        dist.all_to_all_single(received, sent.contiguous(), route.recv_splits, route.send_splits, group=_given(group))
    return received if route.recv_index is None else received.index_select(0, route.recv_index)


def all_gathered(rows: Tensor, share_rows: int, group: dist.ProcessGroup) -> Tensor:
    """The rows of all ranks, [num_ranks * share_rows, ...], rank by rank; what a rank lacks of its share is undefined.

    A collective. share_rows: the same on all ranks, and at least len(rows).
    """
    share = rows.new_empty(share_rows, *rows.shape[1:])
    share[: len(rows)] = rows
    gathered = rows.new_empty(group.size() * share_rows, *rows.shape[1:])
    dist.all_gather_single(gathered, share, group=group)
    return gathered


def _given(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    if group is None:
        raise ValueError("the route moves rows between ranks and no process group was given")
    return group


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, route: Route | GatherRoute, group: dist.ProcessGroup | None) -> Tensor:
        ctx.route, ctx.group = route, group
        return exchange_rows(rows, route, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return exchange_rows(grad, ctx.route.transpose, ctx.group), None, None


def exchange(rows: Tensor, route: Route | GatherRoute, group: dist.ProcessGroup | None) -> Tensor:
    """`exchange_rows` with autograd: the backward pass returns gradients along the transposed Route.

    The result requires grad on every rank, also where `rows` does not (a rank that encoded nothing), so that every rank
    takes part in the collective of the backward pass. Therefore the result must be part of every rank's loss, even if
    it has zero rows. For an encoder without trainable parameters use `exchange_rows`: it has no backward pass.
    """
    if torch.is_grad_enabled() and not rows.requires_grad:
        rows = rows.detach().requires_grad_()
    return _Exchange.apply(rows, route, group)
