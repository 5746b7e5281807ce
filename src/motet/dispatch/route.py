"""Where every row of an encoder's output goes: Pi_M o Pi_E^-1 as one move (OrchMLLM section 6, Rearrangement
Composition).

A row leaves the rank that encoded its item and arrives on the rank that runs its example's sequence. The sender holds
rows in the order of encoding; the receiver gets them in the order of its packed sequences. Gradients return along the
transpose.
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
    """One rank's part of a move of rows between all ranks.

    send_index:    LongTensor [rows sent]; sent[i] = rows[send_index[i]], ordered by receiving rank, then in the
                   receiver's order. None is the identity.
    send_splits:   rows for each rank, rows that stay included.
    recv_splits:   rows from each rank, rows that stay included.
    recv_index:    LongTensor [rows received]; result[i] = received[recv_index[i]], where `received` is ordered by
                   sending rank. None is the identity.
    moved_rows:    rows that leave their rank, summed over all ranks; so all ranks agree on whether to communicate.
    crossing_rows: rows that leave their node, summed over all ranks.

    Example:
        >>> from motet.balance import score
        >>> encoder = score([1, 0], [16, 8], num_ranks=2)  # rank 1 encodes item 0
        >>> backbone = score([0, 1], [9, 7], num_ranks=2)  # rank 0 runs example 0, to which item 0 belongs
        >>> items = ItemLengths(np.array([0, 1]), np.array([16, 8]), np.array([4, 2]))
        >>> route = compose_route(encoder, backbone, items, rank=0)
        >>> route.send_splits, route.recv_splits, route.moved_rows
        ([0, 2], [0, 4], 6)
    """

    send_index: Tensor | None
    send_splits: list[int]
    recv_splits: list[int]
    recv_index: Tensor | None
    moved_rows: int
    crossing_rows: int

    @property
    def is_local(self) -> bool:
        """Whether no rank has a row for another, so that no rank needs a collective."""
        return self.moved_rows == 0

    @property
    def num_rows_in(self) -> int:
        """Rows that this rank holds before the move."""
        return sum(self.send_splits)

    @property
    def num_rows_out(self) -> int:
        """Rows that this rank holds after the move."""
        return sum(self.recv_splits)

    @cached_property
    def transpose(self) -> Route:
        """The reverse move: `exchange_rows(exchange_rows(x, route), route.transpose)` is x."""
        return Route(
            send_index=_inverse(self.recv_index),
            send_splits=self.recv_splits,
            recv_splits=self.send_splits,
            recv_index=_inverse(self.send_index),
            moved_rows=self.moved_rows,
            crossing_rows=self.crossing_rows,
        )

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Route:
        """The same Route with its indices on `device`, where the rows are."""
        return self._with_indices(lambda index: index.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Route:
        """The same Route with its indices in pinned memory."""
        return self._with_indices(lambda index: index.pin_memory())

    def _with_indices(self, change: Callable[[Tensor], Tensor]) -> Route:
        send, recv = (None if index is None else change(index) for index in (self.send_index, self.recv_index))
        return replace(self, send_index=send, recv_index=recv)


def compose_route(
    encoder: Assignment, backbone: Assignment, items: ItemLengths, rank: int, *, ranks_per_node: int | None = None
) -> Route:
    """The Route of one rank from an encoder's outputs to the backbone's packed sequences.

    encoder:  Assignment of the items; rows enter in the order of the items on their rank.
    backbone: Assignment of the examples; rows leave in the order of the examples on their rank, then of the items in
              the example.
    ranks_per_node: ranks r with the same r // ranks_per_node are on one node; None: all ranks are on one node.
    O(num_items log num_items) on every rank, for all items; no communication.
    """
    destination, arrival = backbone.follow(items.example)
    arrival_position = np.empty(items.num_items, dtype=np.int64)
    arrival_position[arrival] = np.arange(items.num_items)
    rows = items.num_tokens

    leaving = encoder.on_rank(rank)
    sent = leaving[np.argsort(arrival_position[leaving], kind="stable")]
    arriving = arrival[destination[arrival] == rank]
    # Received rows are ordered by sending rank first; each sender's part is in arrival order already.
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
