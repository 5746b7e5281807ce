"""How many ranks each unit of a disaggregated job gets, and with which parallelism, so that a step is shortest.

MMScale sections 4.2 and 4.3. Each encoder, the backbone and each generator is a parallelism unit of tp * dp * pp ranks.
All units take the same M global microbatches; the replicas of a unit share the examples of one evenly, unless so many
are asked for that they cannot. A step takes
T = W + (M - 1) * max S. W is the time in which the first microbatch passes through all units, forward and backward:
encoders side by side, then the backbone, then generators. S is the time of a stage.

Corrections to the paper: a stage takes C / PP (equation 2 divides by PP twice); z is the generator's ranks; Algorithm 1
records the parallelism only where the time is better. PP is an integer from the start, so nothing is rounded, and
memory and time are those of what is returned.

The paper solves a convex problem for every choice of TP and DP. Here every way to run a unit is a row of a table, with
its measured or priced seconds, and branch and bound finds the best combination (`allocation_search.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from motet.core.errors import ArgumentError
from motet.planner.disaggregated.allocation import Allocation, Limits, UnitOptions
from motet.planner.disaggregated.allocation_search import fastest


def allocate(units: Sequence[UnitOptions], limits: Limits) -> Allocation | None:
    """The fastest allocation that fits ranks and memory; None if there is none.

    Exact: no choice of one row for each unit is faster. No unit of the allocation could do with fewer ranks while the
    others stay and the step takes as long. Raises ArgumentError unless one unit is the backbone, and for counts below
    1. O(rows log rows) for every divisor of the batch, and the combinations that bounds leave.

    Example: a backbone whose pass takes 8 s and an encoder whose takes 2 s, each in 1, 2 or 4 stages, on 6 ranks.
        >>> def unit(name, side, pass_s):
        ...     pp, ones, none = np.array([1, 2, 4]), np.ones(3, dtype=np.int64), np.zeros(3)
        ...     return UnitOptions(name, side, ones, ones, pp, pass_s * ones, pass_s / pp, none, none, none, none)
        >>> found = allocate([unit("image", -1, 2.0), unit("backbone", 0, 8.0)], Limits(num_ranks=6, batch_size=16))
        >>> [(share.name, share.pp, share.dp) for share in found.shares], found.time_s
        ([('image', 1, 2), ('backbone', 2, 2)], 38.0)
    """
    return fastest(check_units(units, limits), limits, [np.ones(len(unit.tp), dtype=np.bool_) for unit in units])


def rigid(units: Sequence[UnitOptions], limits: Limits) -> Allocation | None:
    """The fastest allocation as Megatron-LM makes them (MMScale section 2.1), over all TP, DP and PP of the backbone.

    Every other unit is one stage with the backbone's TP and DP.
    """
    backbone = next(unit for unit in check_units(units, limits) if unit.side == 0)
    allocations = []
    for tp, size in sorted(set(zip(backbone.tp.tolist(), backbone.num_examples.tolist()))):
        alike = [(unit.tp == tp) & (unit.num_examples == size) & ((unit.pp == 1) | (unit.side == 0)) for unit in units]
        allocations.append(fastest(units, limits, alike))
    # Where replicas are asked for that do not share examples evenly, units of as many examples have other DPs.
    same = [one for one in allocations if one and len({share.dp for share in one.shares}) == 1]
    return min(same, key=lambda one: (one.time_s, one.num_ranks), default=None)


def check_units(units: Sequence[UnitOptions], limits: Limits) -> Sequence[UnitOptions]:
    """The units as they are. Raises ArgumentError unless one is the backbone, and for counts below 1."""
    if [unit.side for unit in units].count(0) != 1:
        raise ArgumentError("exactly one of the units must be the backbone (side 0).")
    if min(limits.num_ranks, limits.batch_size, limits.num_chunks) < 1:
        raise ArgumentError(
            f"num_ranks is {limits.num_ranks}, batch_size {limits.batch_size} and num_chunks {limits.num_chunks}; "
            "all must be at least 1."
        )
    return units
