"""Which ranks share which sequences of a microbatch, and which of their rows each of them has.

A sequence is cut into fragments, each of two runs of rows: one from its front half, and its mirror image from its back
half (zigzag, as in ring attention of Llama 3). A causal row sees all rows before it, so a row and its mirror image
together see as many rows as any other such pair. A fragment's share of rows, of memory and of work is the same.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from motet.core.arrays import BoolArray, Int32Array, Int64Array
from motet.core.errors import ArgumentError


@dataclass(frozen=True, eq=False)
class SequenceCuts:
    """The fragments of those sequences of a microbatch that several ranks share; all others are whole.

    example:    int64 [num_fragments], ascending, the example of each fragment; at least two of an example.
    rank:       int32 [num_fragments], on different ranks.
    begin, end: int64 [num_fragments]; of its sequence a fragment has the units begin .. end - 1, in order.
    units:      int64 [num_fragments], units of the whole sequence; a unit is some rows and their mirror images.

    Example:
        Ranks 2 and 0 share a sequence of 7 rows: rank 2 has a quarter of it.
        >>> cuts = SequenceCuts(*(np.array(x) for x in ([4, 4], [2, 0], [0, 1], [1, 4], [4, 4])))
        >>> cuts.owner(4, num_rows=7).tolist(), cuts.degrees
        ([2, 0, 0, 0, 0, 0, 2], {4: 2})
    """

    example: Int64Array
    rank: Int32Array
    begin: Int64Array
    end: Int64Array
    units: Int64Array

    def __post_init__(self) -> None:
        for example in self.examples.tolist():
            own = self.example == example
            joined = np.append(self.begin[own], self.units[own][-1]), np.append(0, self.end[own])
            if len(np.unique(self.rank[own])) != own.sum() or own.sum() < 2 or not np.array_equal(*joined):
                raise ArgumentError(
                    f"the fragments of example {example} must have all of its units, in order, on two or more ranks."
                )

    @cached_property
    def examples(self) -> Int64Array:
        """The examples that are cut, ascending, int64 [num_cut]."""
        return np.unique(self.example)

    @property
    def degrees(self) -> dict[int, int]:
        """Example -> the number of ranks that share it."""
        return dict(zip(*(each.tolist() for each in np.unique(self.example, return_counts=True)), strict=True))

    def on_rank(self, rank: int) -> Int64Array:
        """The examples of which a rank has a fragment, ascending, int64 [n]."""
        own: Int64Array = self.example[self.rank == rank]
        return own

    def owner(self, example: int, num_rows: int) -> Int32Array:
        """The rank of each row of a cut sequence, int32 [num_rows]."""
        own, half = self.example == example, -(-num_rows // 2)
        front = np.repeat(self.rank[own], np.diff(half * self.end[own] // self.units[own], prepend=0))
        owner: Int32Array = np.concatenate([front, front[: num_rows - half][::-1]])
        return owner

    def share_of(self, amounts: Int64Array) -> Int64Array:
        """What each fragment has of amounts of whole sequences, int64 [num_fragments]. amounts: int64 [num_examples].

        The fragments of a sequence have all of its amount; a product is one of Python's integers, which have no limit.
        """
        whole = amounts[self.example].astype(object)
        shares: Int64Array = (whole * self.end // self.units - whole * self.begin // self.units).astype(np.int64)
        return shares

    def keep(self, kept: BoolArray) -> SequenceCuts | None:
        """Without examples that are left out; None if no other is cut. kept: bool [num_examples]."""
        own = kept[self.example]
        if not own.any():
            return None
        renumbered = np.cumsum(kept) - 1
        columns = {name: getattr(self, name)[own] for name in ("rank", "begin", "end", "units")}
        return replace(self, example=renumbered[self.example[own]], **columns)
