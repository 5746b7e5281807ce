"""The native core of partition.py, csrc/planner/: what its `best_bounds` and `slowest_by_sums` compute."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

def best_cut(sums: Sequence[int], num_devices: int, num_chunks: int, folded: bool) -> list[int]:
    """As `best_bounds`; raises ValueError for fewer layers than stages, and for sums that do not ascend from 0 or
    exceed 5 * 2^28 (all layers come to 2^30, but for rounding)."""

def slowest_stages(sums: NDArray[np.float64], slowest: NDArray[np.float64]) -> None:
    """Fill `slowest`, [num_rows, num_blocks], as `slowest_by_sums` does, to the bit.

    sums: [num_rows, num_blocks + 1], contiguous, ascending in each row.
    """
