"""The rows of packed sequences that each context-parallel rank has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from motet.core.arrays import BoolArray, Float64Array, Int64Array
from motet.core.attention_table import AttentionTable
from motet.core.errors import UserError
from motet.core.words import counted_words

Rows = TypeVar("Rows", float, Float64Array)
"""A number of rows, or numbers of several."""


@dataclass(frozen=True, eq=False)
class ContextRows:
    """Rows of packed sequences on ranks that share them.

    lengths: int64 [num_sequences], rows of each.
    owner:   int [num_rows], the rank that has each row, from 0.

    Example:
        >>> ContextRows(np.array([3, 2]), np.array([0, 1, 1, 0, 1]), num_ranks=2).rows[1].tolist()
        [1, 2, 4]
    """

    lengths: Int64Array
    owner: NDArray[np.integer]
    num_ranks: int

    @property
    def num_rows(self) -> int:
        """Rows of all sequences."""
        return len(self.owner)

    @cached_property
    def rows(self) -> tuple[Int64Array, ...]:
        """By rank: its rows, ascending, int64."""
        return tuple(np.flatnonzero(self.owner == rank) for rank in range(self.num_ranks))

    @cached_property
    def starts(self) -> Int64Array:
        """The first row of each sequence, int64 [num_sequences]."""
        starts: Int64Array = np.cumsum(self.lengths) - self.lengths
        return starts

    @cached_property
    def positions(self) -> Int64Array:
        """The position of each row in its sequence, from 0, int64 [num_rows]."""
        return np.arange(self.num_rows) - np.repeat(self.starts, self.lengths)

    def num_rows_of(self, rank: int) -> Int64Array:
        """How many rows a rank has of each sequence, int64 [num_sequences]."""
        of_row = np.repeat(np.arange(len(self.lengths)), self.lengths)
        return np.bincount(of_row[self.rows[rank]], minlength=len(self.lengths))

    def runs_of(self, rank: int) -> tuple[Int64Array, Int64Array]:
        """The rows that a rank has of each sequence where these are a run: the first, and how many; int64
        [num_sequences] each. The first of none is 0.

        Example:
            >>> ContextRows(np.array([3, 2]), np.array([0, 1, 1, 0, 0]), num_ranks=2).runs_of(1)
            (array([1, 0]), array([2, 0]))
        """
        counts, own = self.num_rows_of(rank), self.positions[self.rows[rank]]
        first = np.zeros_like(counts)
        first[counts > 0] = own[(np.cumsum(counts) - counts)[counts > 0]]
        return first, counts

    def after(self, num_sequences: int) -> ContextRows:
        """The rows of the sequences behind the first `num_sequences`, numbered anew."""
        first = int(self.lengths[:num_sequences].sum())
        return ContextRows(self.lengths[num_sequences:], self.owner[first:], self.num_ranks)

    def wanted(self, table: AttentionTable) -> list[Int64Array]:
        """By rank, the rows whose keys its own rows see. table: of all rows against all keys."""
        return [table.of(own, table.keys).seen if len(own) else own for own in self.rows]

    def most_moved(self, wanted: Sequence[Int64Array]) -> int:
        """The most rows that a rank gives or gets, its own left out. wanted: as of `moves`."""
        moved = np.array([np.bincount(self.owner[rows], minlength=self.num_ranks) for rows in wanted])
        np.fill_diagonal(moved, 0)
        return int(max(moved.sum(axis=0).max(), moved.sum(axis=1).max()))

    def moves(self, rank: int, wanted: Sequence[Int64Array]) -> RowMoves:
        """How one rank gets and gives copies of rows. wanted: by rank, the rows that it is to have, ascending."""
        own, mine = self.rows[rank], wanted[rank]
        index = np.zeros(self.num_rows, dtype=np.int64)
        index[own] = np.arange(len(own))
        sent = [index[rows[self.owner[rows] == rank]] for rows in wanted]
        senders = self.owner[mine]
        order = np.empty(len(mine), dtype=np.int64)
        order[np.argsort(senders, kind="stable")] = np.arange(len(mine))
        return RowMoves(
            np.concatenate(sent),
            tuple(map(len, sent)),
            tuple(np.bincount(senders, minlength=self.num_ranks).tolist()),
            order,
        )


def moved_heads(of_keys: Rows, of_all: Rows, num_ranks: int, heads: int, kv_heads: int) -> tuple[Rows, Rows]:
    """Rows of heads that the busiest rank moves in a layer's attention: by group-cast, and by Ulysses.

    of_keys, of_all: rows that it moves if ranks get the rows that they see, and if they get all (`most_moved`).
    Under Ulysses a rank gets all rows of its heads of queries, keys and values, and gives back as many of queries. It
    is infinite where ranks do not divide the heads. Keys whose heads they do not divide are repeated for each query.
    """
    by_heads = of_all * 0 + float("inf")
    if heads and heads % num_ranks == 0:
        sent_kv_heads = kv_heads if kv_heads % num_ranks == 0 else heads
        by_heads = of_all * 2 * (heads + sent_kv_heads) / num_ranks
    return of_keys * 2.0 * kv_heads, by_heads


def exchanged_heads(
    method: str,
    of_keys: Float64Array,
    of_all: Float64Array,
    own_rows: Float64Array,
    num_ranks: int,
    heads: int,
    kv_heads: int,
) -> tuple[Float64Array, Float64Array, BoolArray]:
    """Rows of heads that the busiest rank moves in a layer's attention; those that backward finds on it beside what
    attention keeps of whole sequences, about; and whether it has all rows of some heads.

    method: as of `dispatch.context.ContextShare`; "auto" is the way that moves fewer. own_rows: of the rank. Others: as
    of `moved_heads`. Under an all-gather a rank has all keys, also those that its rows do not see. Under Ulysses keys
    that are repeated stay, and what is attended to stays twice: by heads, and by rows. Raises UserError for Ulysses
    where ranks do not divide the heads.
    """
    if method == "ulysses" and (not heads or heads % num_ranks):
        raise UserError(
            f"context.exchange is 'ulysses', and {num_ranks} context-parallel ranks do not divide the "
            f"{counted_words(heads, 'head')} of a rank"
        )
    by_cast, by_heads = moved_heads(of_keys, of_all, num_ranks, heads, kv_heads)
    sent_kv_heads = kv_heads if kv_heads % num_ranks == 0 else heads
    kept_by_heads = own_rows * (heads + 2.0 * (sent_kv_heads - kv_heads))
    if method == "all_gather":
        return of_all * 2.0 * kv_heads, of_all * 2.0 * kv_heads, np.zeros(of_all.shape, dtype=np.bool_)
    is_by_heads = by_heads < by_cast if method == "auto" else np.full(by_cast.shape, method == "ulysses")
    return np.where(is_by_heads, by_heads, by_cast), np.where(is_by_heads, kept_by_heads, by_cast), is_by_heads


@dataclass(frozen=True, eq=False)
class RowMoves:
    """How one rank gets copies of rows of others, and gives copies of its own; itself included.

    send:         int64 [n], which of its rows it gives, by receiver.
    num_sent, num_received: rows to each rank, and from each.
    order:        int64 [num_wanted], where each row stands in what it gets, which comes by sender.

    Example:
        >>> rows = ContextRows(np.array([4]), np.array([0, 1, 1, 0]), num_ranks=2)
        >>> moves = rows.moves(0, [np.arange(4), np.arange(3)])
        >>> moves.send.tolist(), moves.num_sent, moves.num_received, moves.order.tolist()
        ([0, 1, 0], (2, 1), (2, 2), [0, 2, 3, 1])
    """

    send: Int64Array
    num_sent: tuple[int, ...]
    num_received: tuple[int, ...]
    order: Int64Array
