"""Who sees whom in packed documents: text up to itself, and some rows in both directions."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from motet.core.arrays import Int64Array
from motet.core.sight import Sight
from motet.models.contract import Sequences, on_host


def rows_together(sequences: Sequences, bidirectional: Sequence[str], prefix: bool) -> Int64Array:
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
