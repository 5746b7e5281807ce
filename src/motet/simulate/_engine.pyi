"""The native engine, csrc/simulate/: what simulate/engine/reference.py computes, on arrays, with the GIL released."""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

def columns(actions: Sequence[Sequence[tuple[object, ...]]], codes: Mapping[str, int]) -> NDArray[np.int32]:
    """[6, num_actions]: rank, stage, code of the kind, microbatch, part, peer."""

def run(
    stream: NDArray[np.int32],
    operation: NDArray[np.int32],
    seconds: NDArray[np.float64],
    dependent: NDArray[np.int32],
    dependency: NDArray[np.int32],
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """start_s and end_s [num_actions] of the operation of each action; NaN where it never runs.

    stream, operation: [num_actions]; seconds: [num_actions], of an operation the longest of its actions.
    dependent, dependency: [num_dependencies], the action that waits and the operation that it waits for.
    """
