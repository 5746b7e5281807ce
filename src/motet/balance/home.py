"""Placements that start from where the items are: few leave their node, and most stay even on their rank.

Where items are so few that this ends well above a placement that starts from nothing, that one is taken, its batches
renamed by `place_on_nodes` so that as little as can be moves.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike

from motet.balance.backend import Backend, algorithms
from motet.balance.checks import check_sum, checked_integers, checked_ranks, checked_ranks_per_node
from motet.balance.costs import Cost, Packed
from motet.core.arrays import Int32Array, Int64Array
from motet.core.assignment import Assignment, csr_from_ranks, max_sum
from motet.core.errors import ArgumentError


def assign_from_home(
    weights: Int64Array,
    num_ranks: int,
    cost: Cost,
    home: ArrayLike,
    ranks_per_node: int | None,
    anywhere: Callable[[], Assignment],
    backend: Backend = "native",
) -> Assignment:
    """`assign` with `home`; weights, int64 [num_items], and num_ranks are checked already.

    anywhere: gives the placement without home. It is taken, its batches renamed, where the largest load is more than
    2^-10 (0.1 %) smaller with it; asked for only where that can be.
    Raises ArgumentError for another cost than Packed: the size of a padded batch is the count times the longest, so
    that batches are made of items of like length from everywhere, and no small exchange mends one.
    """
    if not isinstance(cost, Packed):
        raise ArgumentError(
            f"home is given with {cost}; it must go with Packed (rename padded batches: place_on_nodes)."
        )
    checked = checked_ranks(home, "home", len(weights), num_ranks)
    size = checked_ranks_per_node(ranks_per_node, num_ranks)
    found = Assignment(*algorithms(backend).packed_home(weights, num_ranks, checked, size))
    return _unless_far(found, anywhere, 10, checked, weights, size, backend)


def assign_jointly_from_home(
    costs: Int64Array,
    num_ranks: int,
    home: ArrayLike,
    sizes_bytes: ArrayLike | None,
    ranks_per_node: int | None,
    anywhere: Callable[[], Assignment],
    backend: Backend = "native",
) -> Assignment:
    """`assign_jointly` with `home`; costs, int64 [num_examples, num_phases], and num_ranks are checked already.

    anywhere: gives the placement without home. It is taken, its batches renamed by `place_on_nodes`, where the sum over
    phases of the largest load is more than 2^-6 (1.6 %) smaller with it; asked for only where that can be.
    """
    checked = checked_ranks(home, "home", len(costs), num_ranks)
    sizes = checked_integers(np.ones(len(costs)) if sizes_bytes is None else sizes_bytes, "bytes")
    if sizes.shape != (len(costs),):
        raise ArgumentError(f"bytes has shape {sizes.shape}; it must be one size for each of {len(costs)} examples.")
    check_sum(sizes, "bytes")
    size = checked_ranks_per_node(ranks_per_node, num_ranks)
    found = Assignment(*algorithms(backend).joint_home(costs, num_ranks, checked, sizes, size))
    return _unless_far(found, anywhere, 6, checked, sizes, size, backend)


def _unless_far(
    found: Assignment,
    anywhere: Callable[[], Assignment],
    slack_bits: int,
    home: Int32Array,
    sizes: Int64Array,
    ranks_per_node: int,
    backend: Backend,
) -> Assignment:
    """`found`, or the placement `anywhere`, renamed, where `found` is more than 2^-slack_bits above it."""
    highest = max_sum(found.loads)
    bound = int(np.sum(found.bound))
    if highest <= bound + (bound >> slack_bits):
        return found
    free = anywhere()
    least = max_sum(free.loads)
    return found if highest <= least + (least >> slack_bits) else _renamed(free, home, sizes, ranks_per_node, backend)


def _renamed(
    free: Assignment, home: Int32Array, sizes: Int64Array, ranks_per_node: int, backend: Backend
) -> Assignment:
    """The same batches on the ranks where `place_on_nodes` wants them."""
    volume = np.zeros((free.num_ranks, free.num_ranks), dtype=np.int64)
    np.add.at(volume, (home, free.ranks), sizes)
    rank_of = algorithms(backend).place_on_nodes(volume, ranks_per_node)
    ranks = rank_of[free.ranks].astype(np.int32)
    loads = np.empty_like(free.loads)
    loads[rank_of] = free.loads
    return Assignment(ranks, *csr_from_ranks(ranks, free.num_ranks), loads, free.bound)


def check_unused(**options: object) -> None:
    """Raises ArgumentError for an option that would do nothing, because `home` is missing."""
    for name, value in options.items():
        if value is not None:
            raise ArgumentError(f"{name} is given without home; it must go with home, the rank that holds each item.")


def crossing(
    assignment: Assignment, home: ArrayLike, weights: ArrayLike | None = None, ranks_per_node: int | None = None
) -> float:
    """The share of `weights` that leaves its node: 0 where nothing moves, 1 where all does.

    home: int [num_items], the rank that holds each item. weights: int [num_items], >= 0, what moves with it: tokens or
    bytes; None counts items. ranks_per_node: None takes each rank as a node of its own. O(num_items).
    Raises ArgumentError for ranks out of range and where shapes disagree.
    """
    checked = checked_ranks(home, "home", assignment.num_items, assignment.num_ranks)
    size = checked_ranks_per_node(ranks_per_node, assignment.num_ranks)
    given = np.ones(assignment.num_items) if weights is None else weights
    moving = checked_integers(given, "weights").astype(np.float64)
    if moving.shape != checked.shape:
        raise ArgumentError(f"weights has shape {moving.shape}; it must be one for each of {len(checked)} items.")
    crossed = moving[assignment.ranks // size != checked // size].sum()
    return float(crossed / moving.sum()) if moving.any() else 0.0
