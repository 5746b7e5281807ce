"""How many ranks each unit of a disaggregated job gets, and with which parallelism, so that a step is shortest.

MMScale sections 4.2 and 4.3. Each encoder, the backbone and each generator is a parallelism unit of tp * dp * pp ranks;
all take the same number of microbatches, one of the backbone's examples being shared evenly among a unit's replicas.
A step is the time in which the first microbatch passes through all units, forward and backward (encoders side by side,
then the backbone, then generators), and that of the slowest stage for each other microbatch, T = W + (M - 1) * max S.
As corrected: a stage takes C / PP, by which equation 2 divides twice; z is the generator's ranks; Algorithm 1 records
the parallelism only where the time is better. PP is an integer from the start, so nothing is rounded, and memory and
time are those of what is returned.

The paper solves a convex problem for every choice of TP and DP. Here every way to run a unit is a row of a table, with
its measured or priced seconds, and the best combination is found by branch and bound (`allocation_search.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from motet.core.errors import ArgumentError
from motet.planner.disaggregated.allocation import Allocation, Limits, UnitOptions
from motet.planner.disaggregated.allocation_search import fastest


def allocate(units: Sequence[UnitOptions], limits: Limits) -> Allocation | None:
    """The fastest allocation that fits ranks and memory; None if there is none.

    Exact: no choice of rows, one a unit, is faster. In what is returned no unit alone could do with fewer ranks and be
    as fast. Raises ArgumentError unless one unit is the backbone, and for counts below 1. O(rows log rows) for every
    divisor of the batch, and what bounds leave of the combinations.
    """
    return fastest(checked(units, limits), limits, [np.ones(len(unit.tp), dtype=np.bool_) for unit in units])


def rigid(units: Sequence[UnitOptions], limits: Limits) -> Allocation | None:
    """As Megatron-LM allocates (MMScale section 2.1): every other unit is one stage with the backbone's TP and DP.

    The fastest such allocation, over all TP, DP and PP of the backbone.
    """
    backbone = next(unit for unit in checked(units, limits) if unit.side == 0)
    found = []
    for tp, size in sorted(set(zip(backbone.tp.tolist(), backbone.num_examples.tolist()))):
        alike = [(unit.tp == tp) & (unit.num_examples == size) & ((unit.pp == 1) | (unit.side == 0)) for unit in units]
        found.append(fastest(units, limits, alike))
    return min((one for one in found if one), key=lambda one: (one.time_s, one.num_ranks), default=None)


def checked(units: Sequence[UnitOptions], limits: Limits) -> Sequence[UnitOptions]:
    """The units. Raises ArgumentError unless one is the backbone, and for counts below 1."""
    if [unit.side for unit in units].count(0) != 1:
        raise ArgumentError("Of the units, exactly one must be the backbone (side 0).")
    if min(limits.num_ranks, limits.batch_size, limits.num_chunks) < 1:
        raise ArgumentError(
            f"num_ranks is {limits.num_ranks}, batch_size {limits.batch_size} and num_chunks {limits.num_chunks}; "
            "all must be at least 1."
        )
    return units
