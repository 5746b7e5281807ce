"""The native core, csrc/: the same results as motet.balance.reference, item for item, with the GIL released.

Weights and lengths must be C-contiguous, >= 0 and checked for overflow (motet.balance.costs).
"""

import numpy as np
from numpy.typing import NDArray

_Placement = tuple[NDArray[np.int32], NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], int]
"""ranks, items, offsets, loads, bound: the fields of core.Assignment."""

_JointPlacement = tuple[NDArray[np.int32], NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]
"""The same, with loads [num_ranks, num_phases] and bound [num_phases]."""

def packed(weights: NDArray[np.int64], num_ranks: int, equal_counts: bool, num_steps: int) -> _Placement: ...
def padded(lengths: NDArray[np.int64], num_ranks: int) -> _Placement: ...
def joint(costs: NDArray[np.int64], num_ranks: int, max_pairs: int) -> _JointPlacement: ...
def packed_bound(weights: NDArray[np.int64], num_ranks: int) -> int: ...
def padded_bound(lengths: NDArray[np.int64], num_ranks: int) -> int: ...

_Pieces = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.int32]]
"""item, begin, end, rank of each fragment; what finds no room is left out."""

def pour(
    costs: NDArray[np.int64],
    overheads: NDArray[np.int64],
    units: NDArray[np.int64],
    parts: NDArray[np.int64],
    turns: NDArray[np.int64],
    phases: NDArray[np.int64],
    limits: NDArray[np.int64],
    num_ranks: int,
) -> _Pieces: ...
