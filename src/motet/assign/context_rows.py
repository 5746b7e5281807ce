"""Which context-parallel rank has which rows of packed sequences, decided from their lengths alone."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from motet.balance import Segments, distribute_tokens
from motet.core.arrays import Int64Array
from motet.core.attention_table import AttentionTable
from motet.core.context_rows import ContextRows

BLOCK = 128
"""The most rows of a block: what an attention kernel works on at once (Cornstarch section 4.3.2)."""
_BLOCKS_A_RANK = 4
"""The fewest blocks of a rank: short packs have shorter blocks, so that each rank has about as much work."""


def context_rows(lengths: Int64Array, num_ranks: int) -> ContextRows:
    """Deal out the rows of causal sequences of these lengths, int64 [num_sequences], in blocks.

    Ranks get equally many blocks, by one, with about as many pairs of (query, key): memory and all work outside of
    attention goes with rows. The same on all ranks that know the lengths.
    """
    return _dealt(tuple(lengths.tolist()), num_ranks)


def moved_rows(lengths: Int64Array, num_ranks: int, window: int = 0) -> tuple[int, int]:
    """The most rows that a rank moves in attention: if ranks get the keys that their rows see, and if they get all.

    lengths: as of `context_rows`. window: rows that a row sees at most; 0 is all before it.
    """
    return _moved(tuple(lengths.tolist()), num_ranks, window)


@lru_cache(maxsize=4096)
def _moved(lengths: tuple[int, ...], num_ranks: int, window: int) -> tuple[int, int]:
    rows, table = _dealt(lengths, num_ranks), AttentionTable.packed(lengths).windowed(window or None)
    return rows.most_moved(rows.wanted(table)), rows.most_moved([table.keys] * num_ranks)


@lru_cache(maxsize=256)
def _dealt(lengths: tuple[int, ...], num_ranks: int) -> ContextRows:
    num_rows = sum(lengths)
    block = int(np.clip(num_rows // (_BLOCKS_A_RANK * num_ranks), 1, BLOCK))
    segments = Segments.of_documents([[("text", length)] for length in lengths])
    owner = distribute_tokens(segments, num_ranks, block, equal_counts=True).ranks
    return ContextRows(np.array(lengths, dtype=np.int64), np.repeat(owner, block)[:num_rows], num_ranks)
