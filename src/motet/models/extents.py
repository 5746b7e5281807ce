"""Who sees whom: extents that are made once a microbatch, and rows of documents that see each other in both directions.

Rows of an image do so in Gemma 3, and all rows of a prefix do in PaliGemma; other text sees what stands before it.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from motet.ahead import found
from motet.core.arrays import Int64Array
from motet.core.sight import Sight
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


def runs_together(sequences: Sequences, bidirectional: Sequence[str], prefix: bool) -> Int64Array:
    """Runs of rows that see each other, as of `core.sight.Sight.together`. sequences: with all of their rows.

    Reads what the host has, else waits for the device.
    """
    if not (bidirectional or prefix):
        return np.zeros((0, 2), dtype=np.int64)
    sequences = on_host(sequences)
    places = {name: sequences.feature_positions[name] for name in bidirectional if name in sequences.feature_positions}
    return Sight(tuple(bidirectional), prefix).together(
        sequences.offsets.numpy().astype(np.int64),
        sequences.targets.cpu().numpy(),
        {name: rows.cpu().numpy() for name, rows in places.items()},
    )
