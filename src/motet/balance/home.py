"""Placements that start from the rank that holds each item (its home), so that few items leave their node.

With few items, such a placement can end well above the unconstrained one, which ignores homes. Then the unconstrained
placement is taken, and `place_on_nodes` renames its ranks so that little moves.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike

from motet.balance.backend import Backend, algorithms
from motet.balance.checks import check_sum, checked_integers, checked_node_sizes, checked_ranks
from motet.balance.costs import Cost, Packed
from motet.core.arrays import Int32Array, Int64Array
from motet.core.assignment import Assignment, csr_from_ranks, max_sum
from motet.core.errors import ArgumentError
from motet.core.nodes import RanksPerNode, node_of_ranks


def assign_from_home(
    weights: Int64Array,
    num_ranks: int,
    cost: Cost,
    home: ArrayLike,
    ranks_per_node: RanksPerNode | None,
    unconstrained: Callable[[], Assignment],
    backend: Backend = "native",
) -> Assignment:
    """`assign` with `home`; weights, int64 [num_items], and num_ranks are checked already.

    unconstrained: computes the placement without home, which is taken if its largest load is smaller by more than
    2^-10 (0.1 %). It is called only if the bound leaves room for that.
    Raises ArgumentError for another cost than Packed: a balanced padded placement puts items of like length together
    from all ranks, so it cannot be reached by few exchanges.
    """
    if not isinstance(cost, Packed):
        raise ArgumentError(
            f"home is given with {cost}; it must go with Packed (rename padded batches: place_on_nodes)."
        )
    checked = checked_ranks(home, "home", len(weights), num_ranks)
    node_sizes = checked_node_sizes(ranks_per_node, num_ranks)
    near = Assignment(*algorithms(backend).packed_home(weights, checked, node_sizes))
    return _near_or_unconstrained(near, unconstrained, 10, checked, weights, ranks_per_node, backend)


def assign_jointly_from_home(
    costs: Int64Array,
    num_ranks: int,
    home: ArrayLike,
    sizes_bytes: ArrayLike | None,
    ranks_per_node: RanksPerNode | None,
    unconstrained: Callable[[], Assignment],
    backend: Backend = "native",
) -> Assignment:
    """`assign_jointly` with `home`; costs, int64 [num_examples, num_phases], and num_ranks are checked already.

    unconstrained: computes the placement without home, which is taken if its sum over phases of the largest load is
    smaller by more than 2^-6 (1.6 %). It is called only if the bound leaves room for that.
    """
    checked = checked_ranks(home, "home", len(costs), num_ranks)
    sizes = checked_integers(np.ones(len(costs)) if sizes_bytes is None else sizes_bytes, "bytes")
    if sizes.shape != (len(costs),):
        raise ArgumentError(f"bytes has shape {sizes.shape}; it must be one size for each of {len(costs)} examples.")
    check_sum(sizes, "bytes")
    node_sizes = checked_node_sizes(ranks_per_node, num_ranks)
    near = Assignment(*algorithms(backend).joint_home(costs, checked, sizes, node_sizes))
    return _near_or_unconstrained(near, unconstrained, 6, checked, sizes, ranks_per_node, backend)


def _near_or_unconstrained(
    near: Assignment,
    unconstrained: Callable[[], Assignment],
    slack_bits: int,
    home: Int32Array,
    sizes: Int64Array,
    ranks_per_node: RanksPerNode | None,
    backend: Backend,
) -> Assignment:
    """`near`, unless it is more than 2^-slack_bits above the unconstrained placement; then that one, renamed."""
    near_load = max_sum(near.loads)
    bound = int(np.sum(near.bound))
    if near_load <= bound + (bound >> slack_bits):
        return near
    lowest = unconstrained()
    lowest_load = max_sum(lowest.loads)
    if near_load <= lowest_load + (lowest_load >> slack_bits):
        return near
    return renamed(lowest, home, sizes, ranks_per_node, backend)


def renamed(
    placed: Assignment,
    home: Int32Array,
    sizes: Int64Array,
    ranks_per_node: RanksPerNode | None,
    backend: Backend = "native",
) -> Assignment:
    """The same placement with ranks renamed by `place_on_nodes`, so that little leaves its node.

    home: int32 [num_items], the home rank of each item. sizes: int64 [num_items], what moves with it.
    ranks_per_node: as of `place_on_nodes`; None makes each rank a node.
    """
    # From the items alone: of many ranks, a matrix of what each holds of each batch would take gigabytes.
    nodes = checked_node_sizes(ranks_per_node, placed.num_ranks)
    new_rank = algorithms(backend).place_on_nodes(home, placed.ranks, sizes, nodes)
    ranks = new_rank[placed.ranks].astype(np.int32)
    loads = np.empty_like(placed.loads)
    loads[new_rank] = placed.loads
    return Assignment(ranks, *csr_from_ranks(ranks, placed.num_ranks), loads, placed.bound)


def check_unused(**options: object) -> None:
    """Raises ArgumentError for an option that is given although it has no effect without `home`."""
    for name, value in options.items():
        if value is not None:
            raise ArgumentError(f"{name} is given without home; it must go with home, the rank that holds each item.")


def crossing(
    assignment: Assignment,
    home: ArrayLike,
    weights: ArrayLike | None = None,
    ranks_per_node: RanksPerNode | None = None,
) -> float:
    """The share of `weights` that leaves its node, from 0 (nothing) to 1 (everything).

    home: int [num_items], the rank that holds each item.
    weights: int [num_items], >= 0, tokens or bytes of each item; None counts items.
    ranks_per_node: as of `place_on_nodes`; None makes each rank a node.
    O(num_items). Raises ArgumentError for ranks out of range and for shapes that disagree.
    """
    checked = checked_ranks(home, "home", assignment.num_items, assignment.num_ranks)
    node = node_of_ranks(1 if ranks_per_node is None else ranks_per_node, assignment.num_ranks)
    amounts = np.ones(assignment.num_items) if weights is None else weights
    amounts = checked_integers(amounts, "weights").astype(np.float64)
    if amounts.shape != checked.shape:
        raise ArgumentError(f"weights has shape {amounts.shape}; it must be one for each of {len(checked)} items.")
    crossed = amounts[node[assignment.ranks] != node[checked]].sum()
    return float(crossed / amounts.sum()) if amounts.any() else 0.0
