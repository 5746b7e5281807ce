"""All phases at once: one example -> rank assignment that balances every phase, so that no encoder output moves."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from motet.balance.backend import Backend, algorithms
from motet.balance.checks import checked_integers, checked_num_ranks
from motet.balance.costs import INT64_MAX
from motet.balance.placement import assign
from motet.core.assignment import Assignment
from motet.core.errors import ArgumentError

PAIRS_PER_EXAMPLE = 1_000
MIN_PAIRS = 1_000_000
"""Pairs of examples that the search may compare by default: so many for each example, and no fewer in all."""

NOMINAL_PAIRS_PER_S = 500_000_000
"""What a time budget is counted in, so that all ranks decide the same however fast they are."""


def assign_jointly(
    costs: ArrayLike, num_ranks: int, *, time_budget_s: float | None = None, backend: Backend = "native"
) -> Assignment:
    """Place whole examples so that the sum over phases of the largest load is small.

    costs: int [num_examples, num_phases], >= 0, in one unit for all phases (FLOPs, nanoseconds); 0 where an example
        has nothing for a phase.
    time_budget_s: of the search that follows the starts, counted in comparisons at a nominal rate and never measured.
        The search ends earlier within 2^-11 of the summed bounds.

    The Assignment has loads [num_ranks, num_phases], bound [num_phases] and so an imbalance for each phase; the
    examples of a rank are in example order. Its sum of largest loads is never above that of longest first over vectors
    or over sums, unless it is within 2^-11 of the summed bounds. One phase is balanced as by `assign`.
    Source and complexity: reference/joint.py.

    Raises ArgumentError for costs that are negative or not whole, that add up past 2^63 - 1 or have no phase, for
    num_ranks < 1 and a negative time_budget_s.
    """
    checked = checked_integers(costs, "costs", 2)
    num_ranks = checked_num_ranks(num_ranks)
    max_pairs = _max_pairs(len(checked), time_budget_s)
    _check_sum(checked)
    if checked.shape[1] == 1:
        one = assign(checked[:, 0], num_ranks, backend=backend)
        return Assignment(one.ranks, one.items, one.offsets, one.loads[:, None], np.array([one.bound], dtype=np.int64))
    return Assignment(*algorithms(backend).joint(checked, num_ranks, max_pairs))


def _max_pairs(num_examples: int, time_budget_s: float | None) -> int:
    if time_budget_s is None:
        return max(MIN_PAIRS, PAIRS_PER_EXAMPLE * num_examples)
    if not 0 <= time_budget_s <= INT64_MAX // NOMINAL_PAIRS_PER_S:
        raise ArgumentError(f"time_budget_s is {time_budget_s}; it must be a number of seconds of 0 or more.")
    return int(time_budget_s * NOMINAL_PAIRS_PER_S)


def _check_sum(costs: NDArray[np.int64]) -> None:
    if costs.shape[1] == 0:
        raise ArgumentError(f"costs has shape {costs.shape}; it must have at least one phase.")
    if int(costs.max(initial=0)) * costs.size > INT64_MAX:
        exact = sum(costs.ravel().tolist())
        if exact > INT64_MAX:
            raise ArgumentError(f"costs add up to {exact}, past 2^63 - 1.")
