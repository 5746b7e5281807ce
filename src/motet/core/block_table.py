"""The blocks of an AttentionTable: which blocks of keys each block of rows needs, whole or in part, and the other way.

These are the columns of torch's BlockMask, equal to those of `create_block_mask`, which evaluates a mask of rows x keys
for them. Here is no mask: only as many pairs a block as an interval adds (`AttentionTable.pairs_of_blocks`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from motet.core.arrays import BoolArray, Int32Array
from motet.core.attention_table import AttentionTable


@dataclass(frozen=True, eq=False)
class BlockLists:
    """For each of n blocks, which of m others belong to it.

    counts:  int32 [n].
    indices: int32 [n, m]: the counts[i] blocks of block i, ascending, and behind them the others, ascending.
    """

    counts: Int32Array
    indices: Int32Array

    @classmethod
    def of(cls, belongs: BoolArray) -> BlockLists:
        """belongs: bool [n, m]."""
        counts = np.count_nonzero(belongs, axis=1).astype(np.int32)
        return cls(counts, np.argsort(~belongs, axis=1, kind="stable").astype(np.int32))


@dataclass(frozen=True, eq=False)
class BlockTable:
    """Blocks of `block` rows against blocks of `block` keys, the last of which may be shorter.

    partial, full:                 of each block of rows, the blocks of keys of which it sees some, or all.
    partial_of_keys, full_of_keys: of each block of keys, the blocks of rows that see some of it, or all.
    A shorter block is never full.
    """

    block: int
    partial: BlockLists
    full: BlockLists
    partial_of_keys: BlockLists
    full_of_keys: BlockLists

    @classmethod
    def of(cls, table: AttentionTable, block: int = 128, least: int = 1) -> BlockTable:
        """The blocks of a table. O(num_rows + blocks of rows * blocks of keys).

        least: of both, at least so many blocks; those behind the table see nothing.
        """
        pairs = table.pairs_of_blocks(block)
        pairs = np.pad(pairs, [(0, max(0, least - size)) for size in pairs.shape])
        full = pairs == block * block
        partial = (pairs > 0) & ~full
        return cls(
            block,
            BlockLists.of(partial),
            BlockLists.of(full),
            BlockLists.of(np.ascontiguousarray(partial.T)),
            BlockLists.of(np.ascontiguousarray(full.T)),
        )
