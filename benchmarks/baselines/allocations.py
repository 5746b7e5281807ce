"""Ranks in proportion to operations: the strawman of MMScale, sections 4.2 and 7.2."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from motet.planner.disaggregated.allocate import check_units
from motet.planner.disaggregated.allocation import Allocation, Limits, UnitOptions
from motet.planner.disaggregated.allocation_search import fastest


def proportional(units: Sequence[UnitOptions], flops: Mapping[str, float], limits: Limits) -> Allocation | None:
    """The fastest parallelism of units that get ranks in proportion to their operations; None if none fits.

    flops: by the name of the unit.
    """
    total = sum(flops[unit.name] for unit in check_units(units, limits))
    most = [max(int(limits.num_ranks * flops[unit.name] / total), 1) for unit in units]
    return fastest(units, limits, [np.ones(len(unit.tp), dtype=np.bool_) for unit in units], most)
