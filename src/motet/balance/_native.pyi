"""The native core, csrc/: the same results as motet.balance.reference, item for item, with the GIL released.

Weights and lengths must be C-contiguous, >= 0 and checked for overflow (motet.balance.costs).
"""

import numpy as np
from numpy.typing import NDArray

_Placement = tuple[NDArray[np.int32], NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], int]
"""ranks, items, offsets, loads, bound: the fields of core.Assignment."""

def packed(weights: NDArray[np.int64], num_ranks: int, equal_counts: bool, num_steps: int) -> _Placement: ...

_JointPlacement = tuple[NDArray[np.int32], NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]
"""The same, with loads [num_ranks, num_phases] and bound [num_phases]."""

def padded(lengths: NDArray[np.int64], num_ranks: int, linear: int, quadratic: int) -> _Placement: ...
def padded_attention(lengths: NDArray[np.int64], num_ranks: int, linear: int, quadratic: int) -> _Placement: ...
def joint(costs: NDArray[np.int64], num_ranks: int, max_pairs: int) -> _JointPlacement: ...
def packed_bound(weights: NDArray[np.int64], num_ranks: int) -> int: ...
def padded_bound(lengths: NDArray[np.int64], num_ranks: int, linear: int, quadratic: int) -> int: ...
def block_pairs(
    length: NDArray[np.int64],
    document: NDArray[np.int64],
    modality: NDArray[np.int64],
    instance: NDArray[np.int64],
    attends_to: NDArray[np.int64],
    block: int,
) -> NDArray[np.int64]: ...

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
def isf(
    vision: NDArray[np.int64],
    text: NDArray[np.int64],
    max_vision: int,
    max_text: int,
    min_vision: int,
    min_text: int,
    num_iterations: int,
    seed: int,
) -> tuple[NDArray[np.int64], NDArray[np.int64], int, int]: ...
def island_makespans(
    row: NDArray[np.int32],
    position: NDArray[np.int32],
    offsets: NDArray[np.int32],
    needs: NDArray[np.int32],
    gaps: NDArray[np.int32],
    durations: NDArray[np.int64],
    groups: NDArray[np.int64],
) -> NDArray[np.int64]: ...
def order_islands(
    row: NDArray[np.int32],
    position: NDArray[np.int32],
    offsets: NDArray[np.int32],
    needs: NDArray[np.int32],
    gaps: NDArray[np.int32],
    num_last: int,
    durations: NDArray[np.int64],
    groups: NDArray[np.int64],
    given: NDArray[np.int64],
    limit: int,
    num_visits: int,
) -> tuple[NDArray[np.int64], NDArray[np.int64]]: ...
def packed_home(weights: NDArray[np.int64], home: NDArray[np.int32], node_sizes: NDArray[np.int32]) -> _Placement: ...
def joint_home(
    costs: NDArray[np.int64], home: NDArray[np.int32], sizes: NDArray[np.int64], node_sizes: NDArray[np.int32]
) -> _JointPlacement: ...
def place_on_nodes(
    sources: NDArray[np.int32],
    batches: NDArray[np.int32],
    sizes: NDArray[np.int64],
    node_sizes: NDArray[np.int32],
) -> NDArray[np.int64]: ...
