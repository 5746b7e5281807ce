"""Types of numpy arrays by their elements, and numbers in runs. Docstrings of functions and classes state shapes."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Int64Array = NDArray[np.int64]
Int32Array = NDArray[np.int32]
Float64Array = NDArray[np.float64]
Float32Array = NDArray[np.float32]
UInt8Array = NDArray[np.uint8]
BoolArray = NDArray[np.bool_]
IndexArray = NDArray[np.intp]


def rows_of_runs(first: Int64Array, counts: Int64Array) -> Int64Array:
    """The numbers of rows, or of what else is numbered, in runs, one after the other: counts[i] from first[i] on, int64
    [sum(counts)].

    Example:
        >>> rows_of_runs(np.array([7, 0]), np.array([2, 3])).tolist()
        [7, 8, 0, 1, 2]
    """
    rows: Int64Array = np.arange(counts.sum()) + np.repeat(first - (np.cumsum(counts) - counts), counts)
    return rows
