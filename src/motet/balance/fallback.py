"""The replacement of a native core that is not built: packed placements in numpy, everything else from the reference.

It keeps the contract of the native core but places items differently, so all ranks must have the same backend
(`ACTIVE_BACKEND`). It works on whole arrays:

1. LPT in batches. The next items go to the lightest ranks, one to each, as long as LPT would choose the same: until a
   rank that has got an item is lighter than the next rank that has none.
2. The swaps of reference/swaps.py, between the few lightest items of each rank, for all heavy ranks in one round.
"""

from __future__ import annotations

import numpy as np

from motet.balance import reference
from motet.balance.reference import packed_bound
from motet.balance.reference.packed import longest_first
from motet.balance.reference.result import AssignmentFields, placement
from motet.core.arrays import Int64Array

_NUM_MOVABLE = 16
"""The number of items of a rank that swaps consider: its lightest."""

FEW_RANKS = 256
"""With fewer ranks, batches are so short that LPT of one item at a time is faster."""


def packed(weights: Int64Array, num_ranks: int, equal_counts: bool, num_steps: int) -> AssignmentFields:
    """As reference.packed: never worse than LPT, or with equal counts than LPT in rounds."""
    order = _lightest_first(-weights)
    descending = weights[order]
    if equal_counts:
        ranks = _in_rounds(descending, num_ranks)
    elif num_ranks < FEW_RANKS:
        ranks = np.array(longest_first(descending.tolist(), num_ranks, False), dtype=np.int64)
    else:
        ranks = _in_batches(descending, num_ranks)
    bound = packed_bound(weights, num_ranks)
    loads = _swap(descending, ranks, num_ranks, bound + (bound >> 17), num_steps)
    ranks_of_items = np.empty(len(weights), dtype=np.int32)
    ranks_of_items[order] = ranks
    return placement(ranks_of_items, loads, bound)


def _lightest_first(values: Int64Array) -> Int64Array:
    """The stable ascending order, int64 [n]. If (value, index) fits one int64, sorting these is many times faster."""
    above = values - values.min(initial=0)
    num_bits = len(values).bit_length()
    if int(above.max(initial=0)) >= 2 ** (63 - num_bits):
        return np.argsort(values, kind="stable")
    order: Int64Array = np.sort(above << num_bits | np.arange(len(values))) & (2**num_bits - 1)
    return order


def _in_rounds(descending: Int64Array, num_ranks: int) -> Int64Array:
    """LPT in rounds of one item for each rank, the heaviest item to the lightest rank: the rank of each item."""
    loads = np.zeros(num_ranks, dtype=np.int64)
    ranks = np.empty(len(descending), dtype=np.int64)
    for first in range(0, len(descending), num_ranks):
        batch = descending[first : first + num_ranks]
        lightest = _lightest_first(loads)[: len(batch)]
        ranks[first : first + len(batch)] = lightest
        loads[lightest] += batch
    return ranks


def _in_batches(descending: Int64Array, num_ranks: int) -> Int64Array:
    """LPT: the rank of each item. Items without weight go to the ranks in turn."""
    num_heavy = int(np.count_nonzero(descending))
    ranks = np.empty(len(descending), dtype=np.int64)
    ranks[num_heavy:] = np.arange(len(descending) - num_heavy) % num_ranks
    lightest, loads = np.arange(num_ranks), np.zeros(num_ranks, dtype=np.int64)  # both ordered by load
    first = 0
    while first < num_heavy:
        batch = descending[first : min(first + num_ranks, num_heavy)]
        grown = loads[: len(batch)] + batch
        overtaken = np.minimum.accumulate(grown)[:-1] < loads[1 : len(batch)]
        size = int(np.argmax(overtaken)) + 1 if overtaken.any() else len(batch)
        ranks[first : first + size] = lightest[:size]
        loads[:size] = grown[:size]
        order = _lightest_first(loads)
        lightest, loads = lightest[order], loads[order]
        first += size
    return ranks


def _swap(descending: Int64Array, ranks: Int64Array, num_ranks: int, target: int, num_steps: int) -> Int64Array:
    """Swap items one for one, in place, until no rank is above the target or no steps are left; returns the loads."""
    loads = np.zeros(num_ranks, dtype=np.int64)
    np.add.at(loads, ranks, descending)
    movable = _lightest_items(ranks, num_ranks)
    weights = np.append(descending, 0)  # index -1 stands for no item
    shift = 0
    while num_steps > 0 and loads.max() > target and shift < num_ranks - 1:
        order = _lightest_first(-loads)
        num_pairs = min(int(np.count_nonzero(loads > target)), (num_ranks - shift) // 2)
        heavy, light = order[:num_pairs], order[::-1][shift : shift + num_pairs]
        num_steps -= num_ranks + num_pairs * _NUM_MOVABLE**2
        room = (loads[heavy] - loads[light])[:, None, None]
        given, taken = movable[heavy], movable[light]
        change = weights[given][:, :, None] - weights[taken][:, None, :]  # [num_pairs, NUM_MOVABLE, NUM_MOVABLE]
        possible = (change > 0) & (change < room) & (given >= 0)[:, :, None] & (taken >= 0)[:, None, :]
        miss = np.where(possible, np.abs((room - change) - change), room).reshape(num_pairs, -1)
        best = miss.argmin(axis=1)
        pairs = np.flatnonzero(np.take_along_axis(miss, best[:, None], axis=1)[:, 0] < room[:, 0, 0])
        give, take = np.divmod(best[pairs], _NUM_MOVABLE)
        heavy_swapped, light_swapped = heavy[pairs], light[pairs]
        given, taken = given[pairs, give], taken[pairs, take]
        movable[heavy_swapped, give], movable[light_swapped, take] = taken, given
        ranks[given], ranks[taken] = light_swapped, heavy_swapped
        loads[heavy_swapped] -= descending[given] - descending[taken]
        loads[light_swapped] += descending[given] - descending[taken]
        shift = 0 if len(pairs) and pairs[0] == 0 else shift + 1
    return loads


def _lightest_items(ranks: Int64Array, num_ranks: int) -> Int64Array:
    """The lightest items of each rank, int64 [num_ranks, NUM_MOVABLE]; -1 where it has fewer.

    An item is its index in the descending order of weights, as in `ranks`.
    """
    by_rank = np.argsort(ranks.astype(np.min_scalar_type(num_ranks)), kind="stable")  # short types sort much faster
    ends = np.cumsum(np.bincount(ranks, minlength=num_ranks))
    starts = np.concatenate([[0], ends[:-1]])
    index = ends[:, None] - 1 - np.arange(_NUM_MOVABLE)
    return np.where(index >= starts[:, None], np.append(by_rank, -1)[np.maximum(index, -1)], -1)


def __getattr__(name: str) -> object:
    """All other algorithms, from the reference."""
    return getattr(reference, name)
