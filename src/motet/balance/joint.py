"""One assignment of whole examples to ranks that balances all phases, so that no encoder output moves."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from motet.balance.backend import Backend, algorithms
from motet.balance.checks import check_sum, checked_integers, checked_num_ranks, steps_of_budget
from motet.balance.home import assign_jointly_from_home, check_unused
from motet.balance.placement import assign
from motet.core.assignment import Assignment
from motet.core.errors import ArgumentError
from motet.core.nodes import RanksPerNode

PAIRS_PER_EXAMPLE = 1_000
MIN_PAIRS = 1_000_000
"""Pairs of examples that the search compares by default: PAIRS_PER_EXAMPLE for each, at least MIN_PAIRS in all."""

PAIRS_PER_S = 500_000_000
"""Pairs of examples that the search compares in a second of `time_budget_s`."""


def assign_jointly(
    costs: ArrayLike,
    num_ranks: int,
    *,
    home: ArrayLike | None = None,
    bytes: ArrayLike | None = None,
    ranks_per_node: RanksPerNode | None = None,
    time_budget_s: float | None = None,
    backend: Backend = "native",
) -> Assignment:
    """Place whole examples so that the sum over phases of the largest load is small.

    costs: int [num_examples, num_phases], >= 0, in one unit for all phases (FLOPs, nanoseconds); 0 where an example
        has no item in a phase.
    home: int [num_examples], the rank that holds each example. Few bytes leave their node, and the sum of the largest
        loads is at most 1.6 % above that without home.
    bytes: with home, int [num_examples], what moves with each example; None counts examples.
    ranks_per_node: with home, as of `place_on_nodes`; None makes each rank a node.
    time_budget_s: time of the search that improves the first placements, counted in comparisons at a nominal rate. The
        search stops within 2^-11 of the sum of the bounds. 0: where it would begin, without longest first over vectors.

    The Assignment has loads [num_ranks, num_phases], bound [num_phases] and imbalance [num_phases]. The examples of a
    rank are in example order. Without home, the sum of the largest loads is within 2^-11 of the sum of the bounds, or
    no larger than that of longest first over vectors and of longest first over sums. One phase alone is balanced by
    `assign`. Source and complexity: reference/joint.py, reference/joint_home.py.

    Raises ArgumentError for costs that are negative or not whole, that add up past 2^63 - 1 or have no phase, for
    num_ranks < 1, a negative time_budget_s, `bytes` or `ranks_per_node` without home, and time_budget_s with home.
    """
    checked = checked_integers(costs, "costs", 2)
    num_ranks = checked_num_ranks(num_ranks)
    if checked.shape[1] == 0:
        raise ArgumentError(f"costs has shape {checked.shape}; it must have at least one phase.")
    check_sum(checked, "costs")
    if home is not None:
        if time_budget_s is not None:
            raise ArgumentError("time_budget_s is given with home; leave out one of the two.")

        def unconstrained() -> Assignment:
            return assign_jointly(checked, num_ranks, backend=backend)

        return assign_jointly_from_home(checked, num_ranks, home, bytes, ranks_per_node, unconstrained, backend)
    check_unused(bytes=bytes, ranks_per_node=ranks_per_node)
    default_pairs = max(MIN_PAIRS, PAIRS_PER_EXAMPLE * len(checked))
    max_pairs = steps_of_budget(time_budget_s, PAIRS_PER_S, default_pairs)
    if checked.shape[1] == 1:
        one = assign(checked[:, 0], num_ranks, time_budget_s=time_budget_s, backend=backend)
        return Assignment(one.ranks, one.items, one.offsets, one.loads[:, None], np.array([one.bound], dtype=np.int64))
    return Assignment(*algorithms(backend).joint(checked, num_ranks, max_pairs))
