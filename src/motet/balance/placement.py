"""Which rank computes which item of one phase, decided from the items' lengths alone.

`assign` places items so that the largest load is small; costs.py defines loads. `score` computes the loads of any
placement. Both return an Assignment with the load of each rank and a proven lower bound. Every result is a pure
function of the arguments, so it is the same on every rank.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from motet.balance.backend import Backend, algorithms
from motet.balance.checks import checked_num_ranks, checked_ranks, steps_of_budget
from motet.balance.costs import Cost, Packed, Padded, PaddedAttention
from motet.balance.home import assign_from_home, check_unused
from motet.balance.weights import LengthsLike, item_weights
from motet.core.arrays import Int64Array
from motet.core.assignment import Assignment, csr_from_ranks
from motet.core.errors import ArgumentError
from motet.core.nodes import RanksPerNode

_DEFAULT_COST = Packed()

STEPS_PER_S = 250_000_000
"""Steps of the swaps in a second of `time_budget_s`; a step looks at one item."""


def assign(
    lengths: LengthsLike,
    num_ranks: int,
    cost: Cost = _DEFAULT_COST,
    *,
    equal_counts: bool = False,
    home: ArrayLike | None = None,
    ranks_per_node: RanksPerNode | None = None,
    time_budget_s: float | None = None,
    backend: Backend = "native",
) -> Assignment:
    """Place items on ranks so that the largest load is small. The items of a rank are in item order.

    lengths: int [num_items], >= 0. With Packed an item may have several lengths (frames, windows, images), whose costs
        add up: [num_items, max_parts] padded with zeros, or a list of sequences.
    cost: Packed: LPT and swaps; the bound is reached from about 20 items a rank on; never worse than LPT.
        Padded: the optimum. PaddedAttention: first fit decreasing under a searched limit; within 2 % of the bound from
        64 ranks and 60 items a rank on.
    equal_counts: the item counts of two ranks differ by at most one (Packed).
    home: int [num_items], the rank that holds each item (Packed). Few items leave their node, and the largest load is
        at most 0.1 % above that without home.
    ranks_per_node: with home, as of `place_on_nodes`; None makes each rank a node.
    time_budget_s: time of the swaps on one core, counted in steps at a nominal rate (Packed); the result does not
        depend on the machine. A larger budget is never worse. None: 0.4 ms plus 6 us for each rank. Swaps stop at the
        bound.

    Raises ArgumentError for lengths that are negative or not whole, num_ranks < 1, costs that do not fit int64, a
    negative budget, and for options that the cost, or `home`, does not take.
    """
    weights = item_weights(lengths, cost)
    num_ranks = checked_num_ranks(num_ranks)
    for name, is_given in (("equal_counts", equal_counts), ("time_budget_s", time_budget_s is not None)):
        if is_given and not isinstance(cost, Packed):
            raise ArgumentError(f"{name} is given with {cost}; it is for Packed alone.")
        if is_given and home is not None:
            raise ArgumentError(f"{name} is given with home; leave out one of the two.")
    if home is not None:

        def unconstrained() -> Assignment:
            return assign(lengths, num_ranks, cost, backend=backend)

        return assign_from_home(weights, num_ranks, cost, home, ranks_per_node, unconstrained, backend)
    check_unused(ranks_per_node=ranks_per_node)
    core = algorithms(backend)
    if isinstance(cost, Packed):
        return Assignment(*core.packed(weights, num_ranks, equal_counts, _num_steps(time_budget_s, num_ranks)))
    if isinstance(cost, PaddedAttention):
        return Assignment(*core.padded_attention(weights, num_ranks, cost.linear, cost.quadratic))
    return Assignment(*core.padded(weights, num_ranks, cost.linear, cost.quadratic))


def score(
    ranks: ArrayLike, lengths: LengthsLike, num_ranks: int, cost: Cost = _DEFAULT_COST, *, bound: int | None = None
) -> Assignment:
    """The Assignment of any placement, ranks int [num_items], with its loads and the bound; items in item order.

    bound: `lower_bound` of these items, which takes as long as all else here, if it is known.
    Raises ArgumentError as `assign` does, and for ranks outside 0 .. num_ranks - 1 or not one for each item.
    """
    weights = item_weights(lengths, cost)
    num_ranks = checked_num_ranks(num_ranks)
    checked = checked_ranks(ranks, "ranks", len(weights), num_ranks)
    items, offsets = csr_from_ranks(checked, num_ranks)
    if isinstance(cost, Packed):
        loads: Int64Array = np.zeros(num_ranks, dtype=np.int64)
        np.add.at(loads, checked, weights)
    else:
        longest = np.zeros(num_ranks, dtype=np.int64)
        np.maximum.at(longest, checked, weights)
        counts = np.diff(offsets)
        if isinstance(cost, PaddedAttention):
            sums = np.zeros(num_ranks, dtype=np.int64)
            np.add.at(sums, checked, weights)
            loads = cost.linear * sums + cost.quadratic * counts * longest * longest
        else:
            loads = counts * longest * (cost.linear + cost.quadratic * longest)
    return Assignment(checked, items, offsets, loads, _bound(weights, num_ranks, cost) if bound is None else bound)


def lower_bound(lengths: LengthsLike, num_ranks: int, cost: Cost = _DEFAULT_COST) -> int:
    """A proven lower bound of the largest load, for all placements of whole items.

    Packed: the largest of the mean, the longest item and the pigeonhole bound (reference/bound.py).
    Padded: the optimum. PaddedAttention: a fractional relaxation (reference/padded_attention_bound.py).
    Raises ArgumentError as `assign` does.
    """
    return _bound(item_weights(lengths, cost), checked_num_ranks(num_ranks), cost)


def _num_steps(time_budget_s: float | None, num_ranks: int) -> int:
    """Steps of the swaps; the default is enough for about ten swaps of each rank."""
    return steps_of_budget(time_budget_s, STEPS_PER_S, default=100_000 + 1_500 * num_ranks)


def _bound(weights: Int64Array, num_ranks: int, cost: Cost) -> int:
    core = algorithms("native")
    if isinstance(cost, Packed):
        return int(core.packed_bound(weights, num_ranks))
    if isinstance(cost, Padded):
        return int(core.padded_bound(weights, num_ranks, cost.linear, cost.quadratic))
    return int(core.padded_attention(weights, num_ranks, cost.linear, cost.quadratic)[-1])
