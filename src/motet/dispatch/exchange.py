"""Moves rows between ranks as a Route says: one all-to-all, or none where no rank has anything for another."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from motet.dispatch.route import Route


def exchange_rows(rows: Tensor, route: Route, group: dist.ProcessGroup | None) -> Tensor:
    """Rows [route.num_rows_in, ...] to rows [route.num_rows_out, ...] of the same dtype; no autograd.

    A collective over `group`, which every rank must call with its own Route of the same move; a local Route calls none
    and may have no group. Every rank must give the same dtype and the same trailing dimensions, also one without rows.
    Raises ValueError where the number of rows is not the Route's.
    """
    if len(rows) != route.num_rows_in:
        raise ValueError(f"the route moves {route.num_rows_in} rows, {len(rows)} were given")
    sent = rows if route.send_index is None else rows.index_select(0, route.send_index)
    if route.is_local:
        received = sent
    else:
        if group is None:
            raise ValueError("the route moves rows between ranks and no process group was given")
        received = rows.new_empty(route.num_rows_out, *rows.shape[1:])
        dist.all_to_all_single(received, sent.contiguous(), route.recv_splits, route.send_splits, group=group)
    return received if route.recv_index is None else received.index_select(0, route.recv_index)


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, route: Route, group: dist.ProcessGroup | None) -> Tensor:
        ctx.route, ctx.group = route, group
        return exchange_rows(rows, route, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return exchange_rows(grad, ctx.route.transpose, ctx.group), None, None


def exchange(rows: Tensor, route: Route, group: dist.ProcessGroup | None) -> Tensor:
    """`exchange_rows` for a loop that calls `loss.backward()`: gradients come back by the transposed Route.

    The result requires grad on every rank, also where `rows` does not (a rank that encoded nothing), so that no rank
    leaves out the collective of the backward pass. For that the result must be part of every rank's loss, if with zero
    rows. For an encoder without trainable parameters use `exchange_rows`: it has no backward pass.
    """
    if torch.is_grad_enabled() and not rows.requires_grad:
        rows = rows.detach().requires_grad_()
    return _Exchange.apply(rows, route, group)
