"""Which rank has which rows of packed sequences, decided from their lengths alone.

Context-parallel ranks share the sequences of a replica. Replicas share those that are cut (`core/cuts.py`), and then
the context-parallel ranks of a replica share its fragments.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from motet.assign.step import ModuleAssignment
from motet.balance import Segments, distribute_tokens
from motet.core.arrays import Int64Array
from motet.core.attention_table import AttentionTable
from motet.core.context_rows import ContextRows
from motet.core.cuts import ItemCuts

BLOCK = 128
"""The most rows of a block: what an attention kernel works on at once (Cornstarch section 4.3.2)."""
_BLOCKS_A_RANK = 4
"""The fewest blocks of a rank: short packs have shorter blocks, so that each rank has about as much work."""


def context_rows(lengths: Int64Array, num_ranks: int) -> ContextRows:
    """Deal out the rows of causal sequences of these lengths, int64 [num_sequences], in blocks.

    Ranks get equally many blocks, by one, with about as many pairs of (query, key): memory and all work outside of
    attention goes with rows. The same on all ranks that know the lengths.
    """
    if num_ranks == 1:
        return ContextRows(lengths, np.zeros(lengths.sum(), dtype=np.int32), 1)
    return _dealt(tuple(lengths.tolist()), num_ranks)


def rows_of_replica(
    whole: Int64Array, cut: Int64Array, items: Int64Array, cuts: ItemCuts, replica: int, num_replicas: int, cp: int
) -> ContextRows:
    """Rows of the sequences of one replica on all ranks of the replicas, where these share some; a rank is its replica
    * cp + c.

    whole: int64 [n], lengths of those that the replica has whole. cut: int64 [m], of those behind them, of which it has
    rows. items: int64 [m], their numbers in `cuts`, whose ranks are replicas.
    """
    fragments = cuts.over(cp) if len(items) else cuts
    owners = [fragments.owner(item, length) for item, length in zip(items.tolist(), cut.tolist(), strict=True)]
    of_whole = replica * cp + context_rows(whole, cp).owner.astype(np.int32)
    return ContextRows(np.concatenate([whole, cut]), np.concatenate([of_whole, *owners]), num_replicas * cp)


def rows_of_replicas(sequences: ModuleAssignment, microbatch: int, cp: int) -> ContextRows:
    """Rows of all sequences of a microbatch on all ranks of all replicas, as of `rows_of_replica`: of each replica the
    whole ones, then those that replicas share."""
    cuts = sequences.cuts
    assert cuts is not None, "replicas share sequences"
    cut = cuts.items[sequences.microbatch[cuts.items] == microbatch]
    none, whole = np.zeros(0, np.int64), []
    for replica in range(sequences.num_replicas):
        lengths = sequences.length[sequences.whole_items_of(replica, microbatch)]
        whole.append(rows_of_replica(lengths, none, none, cuts, replica, sequences.num_replicas, cp))
    shared = rows_of_replica(none, sequences.length[cut], cut, cuts, 0, sequences.num_replicas, cp)
    every = (*whole, shared)
    lengths, owner = (np.concatenate([getattr(rows, name) for rows in every]) for name in ("lengths", "owner"))
    return ContextRows(lengths, owner, shared.num_ranks)


def num_rows_here(sequences: ModuleAssignment, replica: int, microbatch: int, c: int, cp: int) -> int:
    """How many rows of its sequences one of the ranks of a replica of the backbone runs in a microbatch."""
    cuts, whole = sequences.cuts, sequences.length[sequences.whole_items_of(replica, microbatch)]
    if cuts is None or not sequences.is_shared(replica, microbatch, sequences.num_replicas):
        return int(whole.sum()) if cp == 1 else len(context_rows(whole, cp).rows[c])
    shared = sequences.shared_items_of(replica, microbatch)
    rows = rows_of_replica(whole, sequences.length[shared], shared, cuts, replica, sequences.num_replicas, cp)
    return len(rows.rows[replica * cp + c])


def moved_rows(lengths: Int64Array, num_ranks: int, window: int = 0) -> tuple[int, int]:
    """The most rows that a rank moves in attention: if ranks get the keys that their rows see, and if they get all.

    lengths: as of `context_rows`. window: rows that a row sees at most; 0 is all before it.
    """
    return _moved(tuple(lengths.tolist()), num_ranks, window)


@lru_cache(maxsize=4096)
def _moved(lengths: tuple[int, ...], num_ranks: int, window: int) -> tuple[int, int]:
    rows, table = _dealt(lengths, num_ranks), AttentionTable.packed(lengths).windowed(window or None)
    return rows.most_moved(rows.wanted(table)), rows.most_moved([table.keys] * num_ranks)


def num_runs(lengths: Int64Array, num_ranks: int) -> float:
    """How many runs of rows a rank has, in the mean: rows that stand side by side in a sequence. lengths: as of
    `context_rows`.

    Example:
        >>> num_runs(np.array([8]), 2)  # A rank has the rows 0, 3, 4 and 7, the other one 1, 2, 5 and 6.
        2.5
    """
    rows = context_rows(lengths, num_ranks)
    first = np.diff(rows.owner, prepend=-1) != 0
    first[rows.starts[lengths > 0]] = True
    return int(first.sum()) / num_ranks


@lru_cache(maxsize=256)
def _dealt(lengths: tuple[int, ...], num_ranks: int) -> ContextRows:
    num_rows = sum(lengths)
    block = int(np.clip(num_rows // (_BLOCKS_A_RANK * num_ranks), 1, BLOCK))
    segments = Segments.of_documents([[("text", length)] for length in lengths])
    owner = distribute_tokens(segments, num_ranks, block, equal_counts=True).ranks
    return ContextRows(np.array(lengths, dtype=np.int64), np.repeat(owner, block)[:num_rows], num_ranks)
