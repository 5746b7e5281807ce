"""Copies of rows that go from rank to rank, beside what is computed in between.

A copy is two nodes of the autograd graph. Forward, the first starts an uneven all-to-all, and the second waits for it;
in backward the second starts the way back of gradients, and the first waits. Of the nodes that can run, autograd takes
the one that was made last, so that backward is forward in reverse: what was computed beside the way there is so beside
the way back, and ranks that make nodes in one order call collectives in one order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from motet.core.arrays import Int64Array
from motet.core.context_rows import RowMoves
from motet.on_device import Staged, on_device

if TYPE_CHECKING:
    from motet.models.context_items import SharedAttention, SharedItemRows, SharedRows


class RowCopies:
    """Copies of rows that go from rank to rank. moves: which rows. share: has their group, and counts their bytes."""

    def __init__(self, moves: RowMoves, share: SharedRows | SharedAttention, device: torch.device) -> None:
        # Which row goes back at each place of what has come: to pick rows is faster than to put them somewhere.
        back = np.argsort(moves.order)
        self._index = Staged([moves.send, moves.order, back], device)
        self.num_sent, self.num_received = list(moves.num_sent), list(moves.num_received)
        self.share = share

    @property
    def send(self) -> Tensor:
        """Which rows it gives, as of `RowMoves`, on the device."""
        return self._index.there[0]

    @property
    def order(self) -> Tensor:
        """Where each row stands in what it gets, on the device."""
        return self._index.there[1]

    @property
    def back(self) -> Tensor:
        """The inverse of `order`."""
        return self._index.there[2]

    def of(self, rows: Tensor) -> Tensor:
        """rows [n, ...] of this rank -> the rows that it gets, [num_wanted, ...]. A collective, in backward too."""
        return self.started(rows).arrived()

    def started(self, rows: Tensor) -> RowsUnderWay:
        """As `of`, whose rows are on their way from here on."""
        return RowsUnderWay(self, rows)

    def one_ahead(self, parts: Sequence[Tensor]) -> Iterator[Tensor]:
        """As `of`, part by part: the first is on its way from here on, and the next while one is in use.

        In backward gradients of one are on their way while those of the part before it are computed. Ranks take each.
        """
        return self._behind(self.started(parts[0]), parts[1:])

    def _behind(self, under_way: RowsUnderWay, parts: Sequence[Tensor]) -> Iterator[Tensor]:
        for part in parts:
            now, under_way = under_way, self.started(part)
            yield now.arrived()
        yield under_way.arrived()


def rows_wanted(rows: Tensor, shared: SharedItemRows, wanted: Callable[[int], Int64Array]) -> Tensor:
    """Of rows of items some of which ranks share, those that this rank wants, which others may have: [num_wanted, ...].

    rows:   [len(shared.own), ...], those that it has. wanted: rank -> rows of the items here, ascending, int64.
    A collective, in backward too. Nothing of items that this rank has whole goes out.
    """
    of_shared, own = shared.rows.after(shared.num_whole), wanted(shared.rank)
    num_whole = shared.rows.num_rows - of_shared.num_rows
    of_whole = on_device(own[own < num_whole], rows.device)
    beyond = [_from(wanted(rank), num_whole) for rank in range(of_shared.num_ranks)]
    copies = RowCopies(of_shared.moves(shared.rank, beyond), shared, rows.device)
    return torch.cat([rows[:num_whole].index_select(0, of_whole), copies.of(rows[num_whole:])])


def _from(rows: Int64Array, first: int) -> Int64Array:
    return rows[rows >= first] - first


class RowsUnderWay:
    """Rows that go to other ranks, and then their gradients, which go back."""

    def __init__(self, copies: RowCopies, rows: Tensor) -> None:
        self.copies = copies
        self._moving: tuple[dist.Work, Tensor, Tensor] | None = None
        self._started: list[Tensor] = [_Start.apply(rows, self)]

    def arrived(self) -> Tensor:
        """The rows that this rank gets, once they are here. Called once."""
        return _Arrive.apply(self._started.pop(), self)  # Kept, it would keep the graph, which keeps this.

    def leave(self, rows: Tensor, *, backward: bool) -> None:
        """Start: rows to each rank, one after the other. backward: they go back."""
        copies, share = self.copies, self.copies.share
        if (group := share.group) is None:
            raise ValueError("rows that several ranks share need the process group of these ranks")
        splits = (copies.num_sent, copies.num_received) if backward else (copies.num_received, copies.num_sent)
        rows, moved = rows.contiguous(), rows.new_empty(sum(splits[0]), *rows.shape[1:])
        work = dist.all_to_all_single(moved, rows, *splits, group=group, async_op=True)
        row_bytes = rows.shape[1:].numel() * rows.element_size()
        share.count_bytes((len(rows) - splits[1][share.rank]) * row_bytes)
        self._moving = work, rows, moved  # A device reads what is sent until they are there.

    def wait(self) -> Tensor:
        """Rows from each rank, one after the other, of what has left last."""
        assert self._moving is not None, "nothing has left"
        (work, _, moved), self._moving = self._moving, None
        work.wait()
        return moved


class _Start(torch.autograd.Function):
    """rows [n, ...] -> an empty tensor, by which `_Arrive` stands behind this in the graph."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, under_way: RowsUnderWay) -> Tensor:
        ctx.under_way, ctx.num_rows = under_way, len(rows)
        under_way.leave(rows.index_select(0, under_way.copies.send), backward=False)
        return rows.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:
        returned = ctx.under_way.wait()
        total = returned.new_zeros(ctx.num_rows, *returned.shape[1:])
        return total.index_add_(0, ctx.under_way.copies.send, returned), None


class _Arrive(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, _: Tensor, under_way: RowsUnderWay) -> Tensor:
        ctx.under_way = under_way
        return under_way.wait().index_select(0, under_way.copies.order)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        under_way: RowsUnderWay = ctx.under_way
        under_way.leave(gradient.index_select(0, under_way.copies.back), backward=True)
        return gradient.new_empty(0), None
