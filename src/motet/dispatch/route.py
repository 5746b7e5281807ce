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
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from motet.assign.rows import row_order, rows_at
from motet.core.arrays import Int64Array
from motet.core.assignment import Assignment
from motet.core.exchange import Communicator, sent_in_all_gather, starts_in_all_gather
from motet.core.nodes import RanksPerNode, node_of_ranks
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
        return self.with_indices(lambda index: index.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Route:
        """The same Route with its indices in pinned memory."""
        return self.with_indices(lambda index: index.pin_memory())

    def with_indices(self, change: Callable[[Tensor], Tensor]) -> Route:
        """The same Route with both of its indices changed."""
        send, recv = (None if index is None else change(index) for index in (self.send_index, self.recv_index))
        return replace(self, send_index=send, recv_index=recv)


@dataclass(frozen=True, eq=False)
class GatherRoute:
    """One rank's part of a move of rows in which every rank gets the rows of all ranks, and takes its own.

    It moves the same rows as a `Route`, and more bytes. A row lies in what is gathered at (its rank) * (rows of the
    fullest rank) + (its index on that rank).

    there, back: the move, and the reverse one.

    Example:
        >>> from motet.balance import score
        >>> encoder, backbone = score([1, 0], [16, 8], num_ranks=2), score([0, 1], [9, 7], num_ranks=2)
        >>> items = ItemLengths(np.array([0, 1]), np.array([16, 8]), np.array([4, 2]))
        >>> route = compose_route(encoder, backbone, items, rank=0, communicator="all_gather")
        >>> route.num_rows_in, route.there.index.tolist(), route.moved_rows  # rank 1 has 4 rows, and rank 0 gets them
        (2, [4, 5, 6, 7], 8)
    """

    there: Gather
    back: Gather
    is_local: ClassVar[bool] = False

    @property
    def num_rows_in(self) -> int:
        """Rows that this rank holds before the move."""
        return len(self.back.index)

    @property
    def num_rows_out(self) -> int:
        """Rows that this rank holds after the move."""
        return len(self.there.index)

    @property
    def moved_rows(self) -> int:
        """Rows that ranks send, summed over all ranks and all hops of a ring, with those that fill up shares."""
        return self.there.moved_rows

    @property
    def crossing_rows(self) -> int:
        """The part of moved_rows that leaves its node."""
        return self.there.crossing_rows

    @property
    def transpose(self) -> GatherRoute:
        """The reverse move."""
        return GatherRoute(self.back, self.there)

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> GatherRoute:
        """The same GatherRoute with its indices on `device`, where the rows are."""
        return self.with_indices(lambda index: index.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> GatherRoute:
        """The same GatherRoute with its indices in pinned memory."""
        return self.with_indices(lambda index: index.pin_memory())

    def with_indices(self, change: Callable[[Tensor], Tensor]) -> GatherRoute:
        """The same GatherRoute with both of its indices changed."""
        there, back = (replace(gather, index=change(gather.index)) for gather in (self.there, self.back))
        return GatherRoute(there, back)


@dataclass(frozen=True, eq=False)
class Gather:
    """One direction of a GatherRoute.

    index:      LongTensor [num_rows], where the rows that this rank takes lie in what is gathered.
    share_rows: rows that each rank gives: those of the fullest rank.
    moved_rows, crossing_rows: as in `GatherRoute`.

    Example:
        >>> Gather(torch.tensor([4, 5]), share_rows=4, moved_rows=8, crossing_rows=0).index.numel()
        2
    """

    index: Tensor
    share_rows: int
    moved_rows: int
    crossing_rows: int


def compose_route(
    encoder: Assignment,
    backbone: Assignment,
    items: ItemLengths,
    rank: int,
    *,
    ranks_per_node: RanksPerNode | None = None,
    communicator: Communicator = "all_to_all",
) -> Route | GatherRoute:
    """The Route of one rank from an encoder's outputs to the backbone's packed sequences.

    encoder:  Assignment of the items; rows enter in the order of the items on their rank.
    backbone: Assignment of the examples; rows leave in the order of the examples on their rank, then of the items in
              the example.
    ranks_per_node: as of `Network`. communicator: "all_gather" gives a GatherRoute, unless no row leaves its rank.
    O(num_items log num_items) on every rank, for all items; no communication.
    """
    destination, arrival = backbone.follow(items.example)
    moves, node = encoder.ranks != destination, node_of_ranks(ranks_per_node, encoder.num_ranks)
    if communicator == "all_gather" and items.num_tokens[moves].any():
        encoded, needed = (encoder.items, encoder.ranks), (arrival, destination)
        return GatherRoute(
            _gather(*encoded, arrival[destination[arrival] == rank], items.num_tokens, node),
            _gather(*needed, encoder.on_rank(rank), items.num_tokens, node),
        )
    return route_of_parts(
        encoder.on_rank(rank),
        arrival,
        encoder.ranks,
        destination,
        items.num_tokens,
        rank,
        node,
    )


def route_of_parts(
    leaving: Int64Array,
    arrival: Int64Array,
    source: NDArray[np.integer],
    destination: NDArray[np.integer],
    rows: Int64Array,
    rank: int,
    node: Int64Array,
) -> Route:
    """The Route of one rank for parts, which are items or runs of their rows.

    leaving: the parts of this rank, in the order of its rows. arrival: all parts, by the rank that gets them, in its
    order. source, destination, rows: of each part, int [num_parts]. node: int64 [num_ranks], the node of each rank.
    """
    moves = source != destination
    arrival_position = np.empty(len(rows), dtype=np.int64)
    arrival_position[arrival] = np.arange(len(rows))

    sent = leaving[np.argsort(arrival_position[leaving], kind="stable")]
    arriving = arrival[destination[arrival] == rank]
    # Received rows are ordered by sending rank first; each sender's part is in arrival order already.
    received = arriving[np.argsort(source[arriving], kind="stable")]

    return Route(
        send_index=_index(row_order(leaving, sent, rows)),
        send_splits=_rows_by_rank(destination[sent], rows[sent], len(node)),
        recv_splits=_rows_by_rank(source[received], rows[received], len(node)),
        recv_index=_index(row_order(received, arriving, rows)),
        moved_rows=int(rows[moves].sum()),
        crossing_rows=int(rows[node[source] != node[destination]].sum()),
    )


def _gather(
    order: Int64Array, holder: NDArray[np.integer], wanted: Int64Array, rows: Int64Array, node: Int64Array
) -> Gather:
    """The Gather of a rank that takes the items `wanted`.

    order: all items as ranks hold them, by rank. holder: the rank of each item. rows: of each item. node: of each rank.
    """
    share_rows, start = starts_in_all_gather(order, holder, rows, len(node))
    index = torch.from_numpy(rows_at(start, wanted, rows))
    return Gather(index, share_rows, *sent_in_all_gather(holder, rows, node))


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
