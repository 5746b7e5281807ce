"""Loads and bounds of any placement, over one or several phases."""

from __future__ import annotations

import numpy as np

from motet.balance.placement import lower_bound
from motet.core.arrays import Int32Array, Int64Array
from motet.core.assignment import Assignment, csr_from_ranks


def scored(ranks: Int32Array, costs: Int64Array, num_ranks: int) -> Assignment:
    """The Assignment of items to the given ranks, int32 [num_items]; loads are sums of costs.

    costs: int64 [num_items] or [num_items, num_phases].
    """
    loads = np.zeros((num_ranks, *costs.shape[1:]), dtype=np.int64)
    np.add.at(loads, ranks, costs)
    bound: int | Int64Array
    if costs.ndim == 1:
        bound = lower_bound(costs, num_ranks)
    else:
        bound = np.array([lower_bound(column, num_ranks) for column in costs.T], dtype=np.int64)
    return Assignment(ranks, *csr_from_ranks(ranks, num_ranks), loads, bound)
