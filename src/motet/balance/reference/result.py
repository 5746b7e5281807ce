"""What an algorithm returns, in the reference as in the native core."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from motet.core.assignment import csr_from_ranks

Placement = tuple[NDArray[np.int32], NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], int | NDArray[np.int64]]
"""ranks, items, offsets, loads, bound: the fields of core.Assignment."""


def placement(ranks: NDArray[np.int32], loads: NDArray[np.int64], bound: int | NDArray[np.int64]) -> Placement:
    """With the items of each rank in item order."""
    return ranks, *csr_from_ranks(ranks, len(loads)), loads, bound
