"""Where every row of an encoder's output goes: Pi_M o Pi_E^-1 as one move (OrchMLLM section 6, Rearrangement
Composition).

Rows leave the rank that encoded their item, in the order in which it encoded them, and arrive on the rank that runs
their example's sequence, in the order in which its packed sequences take them. Gradients go back by the transpose.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from motet.assign.rows import row_order
from motet.core.arrays import Int64Array
from motet.core.assignment import Assignment
from motet.core.workload import ItemLengths


@dataclass(frozen=True, eq=False)
class Route:
    """The part of one rank in one move of rows; ranks that call a collective with their Routes complete each other.

    send_index:    LongTensor [rows sent], the row sent at each place: by receiving rank, then in its order. None: as
                   is.
    send_splits:   rows for each rank. recv_splits: rows from each rank. Own rows count on both sides.
    recv_index:    LongTensor [rows received], the place in what arrived (by sending rank) of each row. None: as is.
    moved_rows:    rows that leave their rank, over all ranks. crossing_rows: those of them that leave their node.
    moved_rows is the same on all ranks, so all agree on whether there is anything to communicate.
    """

    send_index: Tensor | None
    send_splits: list[int]
    recv_splits: list[int]
    recv_index: Tensor | None
    moved_rows: int
    crossing_rows: int

    @property
    def is_local(self) -> bool:
        """True where no rank has a row for another: no collective is needed, on any rank."""
        return self.moved_rows == 0

    @property
    def num_rows_in(self) -> int:
        return sum(self.send_splits)

    @property
    def num_rows_out(self) -> int:
        return sum(self.recv_splits)

    @cached_property
    def transpose(self) -> Route:
        """The way back: `exchange_rows(exchange_rows(x, route), route.transpose)` is x."""
        return Route(
            send_index=_inverse(self.recv_index),
            send_splits=self.recv_splits,
            recv_splits=self.send_splits,
            recv_index=_inverse(self.send_index),
            moved_rows=self.moved_rows,
            crossing_rows=self.crossing_rows,
        )

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Route:
        """The same Route with its indices on the device on which the rows are."""
        return self._with_indices(lambda index: index.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Route:
        return self._with_indices(lambda index: index.pin_memory())

    def _with_indices(self, change: Callable[[Tensor], Tensor]) -> Route:
        send, recv = (None if index is None else change(index) for index in (self.send_index, self.recv_index))
        return replace(self, send_index=send, recv_index=recv)


def compose_route(
    encoder: Assignment, backbone: Assignment, items: ItemLengths, rank: int, *, ranks_per_node: int | None = None
) -> Route:
    """The Route of one rank from an encoder's outputs to the backbone's packed sequences.

    encoder:  Assignment of the items, whose slot order is the order of the rows that enter.
    backbone: Assignment of the examples; the rows that come out are in the order of their examples' slots, then of the
              items in the example.
    ranks_per_node: ranks r with the same r // ranks_per_node are on one node; None means that all are.
    O(num_items log num_items) on every rank, for all items: nothing is asked of other ranks.
    """
    destination, arrival = backbone.follow(items.example)
    arrival_slot = np.empty(items.num_items, dtype=np.int64)
    arrival_slot[arrival] = np.arange(items.num_items)
    rows = items.num_tokens

    leaving = encoder.on_rank(rank)
    sent = leaving[np.argsort(arrival_slot[leaving], kind="stable")]
    arriving = arrival[destination[arrival] == rank]
    # What arrives lies by sending rank first; each sender's part is in arrival order already.
    received = arriving[np.argsort(encoder.ranks[arriving], kind="stable")]

    moves = encoder.ranks != destination
    crosses = (
        moves & False if ranks_per_node is None else encoder.ranks // ranks_per_node != destination // ranks_per_node
    )
    return Route(
        send_index=_index(row_order(leaving, sent, rows)),
        send_splits=_rows_by_rank(destination[sent], rows[sent], encoder.num_ranks),
        recv_splits=_rows_by_rank(encoder.ranks[received], rows[received], encoder.num_ranks),
        recv_index=_index(row_order(received, arriving, rows)),
        moved_rows=int(rows[moves].sum()),
        crossing_rows=int(rows[crosses].sum()),
    )


def _rows_by_rank(ranks: NDArray, rows: Int64Array, num_ranks: int) -> list[int]:
    # Exact: bincount weighs in float64, and no rank has 2**53 rows.
    return np.bincount(ranks, weights=rows, minlength=num_ranks).astype(np.int64).tolist()


def _index(order: Int64Array) -> Tensor | None:
    return None if np.array_equal(order, np.arange(len(order))) else torch.from_numpy(order)


def _inverse(index: Tensor | None) -> Tensor | None:
    if index is None:
        return None
    inverse = torch.empty_like(index)
    inverse[index] = torch.arange(len(index), device=index.device)
    return inverse
