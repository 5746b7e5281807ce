"""Which rank has which rows of packed sequences, decided from how many keys each row sees.

Context-parallel ranks share the sequences of a replica. Replicas share those that are cut (`core/cuts.py`), and then
the context-parallel ranks of a replica share its fragments.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from motet.assign.step import ModuleAssignment
from motet.balance import Segments, distribute_tokens
from motet.core.arrays import Int32Array, Int64Array
from motet.core.attention_table import AttentionTable
from motet.core.context_rows import ContextRows
from motet.core.cuts import ItemCuts
from motet.core.sight import CAUSAL, Sight

BLOCK = 128
"""The most rows of a block: what an attention kernel works on at once (Cornstarch section 4.3.2)."""
_BLOCKS_A_RANK = 4
"""The fewest blocks of a rank: short packs have shorter blocks, so that each rank has about as much work."""


def context_rows(lengths: Int64Array, num_ranks: int, pairs: Int64Array | None = None) -> ContextRows:
    """Deal out the rows of sequences of these lengths, int64 [num_sequences], in blocks.

    Ranks get equally many blocks, by one, with about as many pairs of (query, key): memory and all work outside of
    attention goes with rows. The same on all ranks that know the lengths, and the pairs.

    pairs: int64 [num_rows], how many keys each row sees (`core.sight.Sight.pairs`); None: those before it in its
           sequence, and itself.
    """
    if num_ranks == 1:
        return ContextRows(lengths, np.zeros(lengths.sum(), dtype=np.int32), 1)
    if pairs is None:
        return _dealt(tuple(lengths.tolist()), num_ranks)
    return ContextRows(lengths, _owners(pairs, len(pairs), num_ranks), num_ranks)


def rows_of_replica(
    whole: Int64Array,
    cut: Int64Array,
    items: Int64Array,
    cuts: ItemCuts,
    replica: int,
    num_replicas: int,
    cp: int,
    pairs: Int64Array | None = None,
) -> ContextRows:
    """Rows of the sequences of one replica on all ranks of the replicas, where these share some; a rank is its replica
    * cp + c.

    whole: int64 [n], lengths of those that the replica has whole. cut: int64 [m], of those behind them, of which it has
    rows. items: int64 [m], their numbers in `cuts`, whose ranks are replicas. pairs: as of `context_rows`, of all rows.
    """
    fragments, num_whole = cuts.over(cp) if len(items) else cuts, whole.sum()
    shared = zip(
        items.tolist(), cut.tolist(), pairs_by_sequence(cut, None if pairs is None else pairs[num_whole:]), strict=True
    )
    owners = [fragments.owner(*sequence) for sequence in shared]
    alone = context_rows(whole, cp, None if pairs is None else pairs[:num_whole])
    of_whole = replica * cp + alone.owner.astype(np.int32)
    return ContextRows(np.concatenate([whole, cut]), np.concatenate([of_whole, *owners]), num_replicas * cp)


def pairs_by_sequence(lengths: Int64Array, pairs: Int64Array | None) -> list[Int64Array | None]:
    """The pairs of each of some sequences. pairs: as of `context_rows`, of all of their rows."""
    if pairs is None:
        return [None] * len(lengths)
    return [pairs[stop - length : stop] for length, stop in zip(lengths.tolist(), np.cumsum(lengths).tolist())]


def rows_of_replicas(sequences: ModuleAssignment, microbatch: int, cp: int, sight: Sight) -> ContextRows:
    """Rows of all sequences of a microbatch on all ranks of all replicas, as of `rows_of_replica`: of each replica the
    whole ones, then those that replicas share. sight: of their rows, as far as lengths say it.
    """
    cuts = sequences.cuts
    assert cuts is not None, "replicas share sequences"
    cut = cuts.items[sequences.microbatch[cuts.items] == microbatch]
    none, whole = np.zeros(0, np.int64), []
    for replica in range(sequences.num_replicas):
        lengths = sequences.length[sequences.whole_items_of(replica, microbatch)]
        pairs = sight.pairs(lengths) if cp > 1 else None
        whole.append(rows_of_replica(lengths, none, none, cuts, replica, sequences.num_replicas, cp, pairs))
    lengths = sequences.length[cut]
    shared = rows_of_replica(none, lengths, cut, cuts, 0, sequences.num_replicas, cp, sight.pairs(lengths))
    every = (*whole, shared)
    lengths, owner = (np.concatenate([getattr(rows, name) for rows in every]) for name in ("lengths", "owner"))
    return ContextRows(lengths, owner, shared.num_ranks)


def moved_rows(lengths: Int64Array, num_ranks: int, window: int = 0, sight: Sight = CAUSAL) -> tuple[int, int]:
    """The most rows that a rank moves in attention: if ranks get the keys that their rows see, and if they get all.

    lengths: as of `context_rows`. window: rows that a row of this layer sees at most; 0 is all before it. sight: of all
    layers, by which rows are dealt out, as far as lengths say it.
    """
    return _moved(tuple(lengths.tolist()), num_ranks, window, sight)


@lru_cache(maxsize=4096)
def _moved(lengths: tuple[int, ...], num_ranks: int, window: int, sight: Sight) -> tuple[int, int]:
    of_sequences = np.array(lengths, dtype=np.int64)
    rows = context_rows(of_sequences, num_ranks, sight.pairs(of_sequences))
    table = AttentionTable.packed(of_sequences).windowed(window or None)
    return rows.most_moved(rows.wanted(table)), rows.most_moved([table.keys] * num_ranks)


def num_runs(lengths: Int64Array, num_ranks: int, sight: Sight = CAUSAL) -> float:
    """How many runs of rows a rank has, in the mean: rows that stand side by side in a sequence.

    lengths: as of `context_rows`. sight: as of `moved_rows`.

    Example:
        >>> num_runs(np.array([8]), 2)  # A rank has the rows 0, 3, 4 and 7, the other one 1, 2, 5 and 6.
        2.5
    """
    rows = context_rows(lengths, num_ranks, sight.pairs(lengths))
    first = np.diff(rows.owner, prepend=-1) != 0
    first[rows.starts[lengths > 0]] = True
    return int(first.sum()) / num_ranks


@lru_cache(maxsize=256)
def _dealt(lengths: tuple[int, ...], num_ranks: int) -> ContextRows:
    segments = Segments.of_documents([[("text", length)] for length in lengths])
    return ContextRows(np.array(lengths, dtype=np.int64), _owners(segments, sum(lengths), num_ranks), num_ranks)


def _owners(pairs: Segments | Int64Array, num_rows: int, num_ranks: int) -> Int32Array:
    block = int(np.clip(num_rows // (_BLOCKS_A_RANK * num_ranks), 1, BLOCK))
    owner = distribute_tokens(pairs, num_ranks, block, equal_counts=True).ranks
    return np.repeat(owner, block)[:num_rows]
