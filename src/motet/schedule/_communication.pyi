"""The native core of passes/communication.py, csrc/schedule/: what its `place_messages` computes."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

def communicate(
    actions: tuple[Sequence[tuple[object, ...]], ...],
    kinds: tuple[str, ...],
    action: type,
    stage_rank: NDArray[np.int32],
    stage_group: NDArray[np.int32],
    stage_share: NDArray[np.float64],
    nominal: NDArray[np.float64],
    source: NDArray[np.int32],
    sink: NDArray[np.int32],
    num_microbatches: int,
    held: bool,
    at_producers: bool,
) -> tuple[tuple[object, ...], ...] | None:
    """The rows with SENDs and RECVs; None if the Program cannot run, or has an action twice or out of range.

    kinds: all, in the order of `Kind`. action: the class of new actions.
    stage_rank, stage_group, stage_share: [num_stages]; the share is of the nominal durations, [num_kinds].
    source, sink: [num_edges], stages. held: collectives hold up compute. at_producers: as ranks that block need it.
    """
