"""Who sees whom: extents that are made once a microbatch, and rows of documents that see each other in both directions.

Rows of an image do so in Gemma 3, and all rows of a prefix do in PaliGemma; other text sees what stands before it.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from motet.ahead import found
from motet.core.arrays import BoolArray, Int64Array
from motet.models.contract import Sequences, on_host

if TYPE_CHECKING:
    from motet.models.context_items import SharedAttention


def extents_of(module: Any, sizes: Int64Array, shared: SharedAttention | tuple[SharedAttention, ...] | None) -> Any:
    """`module.who_sees(sizes, shared)`, which is made once for all passes of a microbatch (`motet/ahead.py`).

    sizes: of items, as the module is given them. shared: the rows that are here, where ranks share items.
    """
    key = id(module), sizes.shape, sizes.tobytes(), _key_of(shared)
    return found(key, lambda: module.who_sees(sizes, shared))


def _key_of(shared: SharedAttention | tuple[SharedAttention, ...] | None) -> Hashable:
    """What extents follow from of shared rows. It is of their contents: each pass makes the object anew."""
    if shared is None or isinstance(shared, tuple):
        return tuple(map(_key_of, shared or ()))
    rows = shared.rows
    return rows.lengths.tobytes(), rows.owner.tobytes(), rows.num_ranks, shared.rank, shared.num_whole, shared.method


def rows_together(sequences: Sequences, bidirectional: Sequence[str], prefix: bool) -> Int64Array:
    """Runs of rows that see each other in both directions, int64 [n, 2]: from row to row (exclusive), ascending.

    sequences:     with all of their rows.
    bidirectional: encoders of which rows that follow each other without a token between are a run.
    prefix:        whether the rows of a document before its first target are one.
    Reads what the host has, else waits for the device. Raises ValueError where tokens were not read, as rows have no
    known places then.
    """
    if not (bidirectional or prefix):
        return np.zeros((0, 2), dtype=np.int64)
    sequences = on_host(sequences)
    offsets = sequences.offsets.numpy().astype(np.int64)
    if len(sequences.tokens) != offsets[-1]:
        raise ValueError("this rank did not read the tokens, and so does not know where rows stand that see each other")
    is_inside = _of_prefixes(sequences, offsets) if prefix else np.zeros(offsets[-1], dtype=np.bool_)
    for name in bidirectional:
        if name in sequences.feature_positions:
            is_inside[sequences.feature_positions[name].cpu().numpy()] = True
    places = np.flatnonzero(is_inside)
    begins = np.diff(places, prepend=-2) > 1
    begins |= np.isin(places, offsets[:-1])  # a run ends with its document
    first = np.flatnonzero(begins)
    ends = places[np.append(first[1:], len(places)) - 1] + 1 if len(places) else places
    return np.stack([places[first], ends], axis=1)


def _of_prefixes(sequences: Sequences, offsets: Int64Array) -> BoolArray:
    """Which rows stand before the first target of their document, bool [total]; first rows are no targets."""
    is_target = sequences.targets.cpu().numpy().copy()
    starts, lengths = offsets[:-1], np.diff(offsets)
    is_target[starts[lengths > 0]] = False
    before = np.concatenate([[0], np.cumsum(is_target)])
    in_prefix: BoolArray = before[1:] == np.repeat(before[starts], lengths)
    return in_prefix
