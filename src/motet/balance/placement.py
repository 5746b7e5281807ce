"""One phase: which rank computes which item, decided from the items' lengths alone.

`assign` balances a cost (`Packed`: a sum over items; `Padded`: count times longest) over ranks and gives an Assignment
with each rank's load and a proven lower bound. `score` gives the same for a placement made elsewhere. Every result is a
pure function of its arguments, the same on every rank.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from motet.balance.backend import Backend, algorithms
from motet.balance.checks import checked_integers, checked_num_ranks, checked_ranks
from motet.balance.costs import Cost, Packed
from motet.balance.home import assign_from_home, check_unused
from motet.core.assignment import Assignment, csr_from_ranks

_DEFAULT_COST = Packed()


def assign(
    lengths: ArrayLike,
    num_ranks: int,
    cost: Cost = _DEFAULT_COST,
    *,
    home: ArrayLike | None = None,
    ranks_per_node: int | None = None,
    backend: Backend = "native",
) -> Assignment:
    """Place items of the given lengths, int [num_items], >= 0, on ranks so that the largest load is small.

    Packed: LPT and swaps, at the bound or near it. Padded: the optimum. The items of a rank are in item order.

    home: int [num_items], the rank that holds each item; with it few items leave their node of `ranks_per_node` ranks
    (None: each rank is a node of its own), and the largest load is at most 0.1 % above that without it. Packed only.
    The nodes are ranks in their order; the last is smaller if ranks_per_node does not divide num_ranks.

    Raises ArgumentError for lengths that are negative or not whole, num_ranks < 1, and costs that do not fit int64.
    """
    weights = cost.weights(checked_integers(lengths, "lengths"))
    num_ranks = checked_num_ranks(num_ranks)
    if home is not None:
        return assign_from_home(weights, num_ranks, cost, home, ranks_per_node, backend)
    check_unused(ranks_per_node=ranks_per_node)
    core = algorithms(backend)
    place = core.packed if isinstance(cost, Packed) else core.padded
    return Assignment(*place(weights, num_ranks))


def score(ranks: ArrayLike, lengths: ArrayLike, num_ranks: int, cost: Cost = _DEFAULT_COST) -> Assignment:
    """Any placement, ranks int [num_items], as an Assignment with its loads and the bound; items in item order.

    Raises ArgumentError as `assign` does, and for ranks outside 0 .. num_ranks - 1 or not one for each item.
    """
    weights = cost.weights(checked_integers(lengths, "lengths"))
    num_ranks = checked_num_ranks(num_ranks)
    checked = checked_ranks(ranks, "ranks", len(weights), num_ranks)
    items, offsets = csr_from_ranks(checked, num_ranks)
    if isinstance(cost, Packed):
        before = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(weights[items])])
        loads = before[offsets[1:]] - before[offsets[:-1]]
    else:
        longest = np.zeros(num_ranks, dtype=np.int64)
        np.maximum.at(longest, checked, weights)
        loads = longest * np.diff(offsets)
    return Assignment(checked, items, offsets, loads, _bound(weights, num_ranks, cost))


def lower_bound(lengths: ArrayLike, num_ranks: int, cost: Cost = _DEFAULT_COST) -> int:
    """A maximum load that no placement of whole items undercuts; for Padded, one that the best placement reaches.

    Packed: the largest of the mean, the longest item and the pigeonhole bound (see reference/bound.py).
    """
    return _bound(cost.weights(checked_integers(lengths, "lengths")), checked_num_ranks(num_ranks), cost)


def _bound(weights: NDArray[np.int64], num_ranks: int, cost: Cost) -> int:
    core = algorithms("native")
    bound: int = (core.packed_bound if isinstance(cost, Packed) else core.padded_bound)(weights, num_ranks)
    return bound
