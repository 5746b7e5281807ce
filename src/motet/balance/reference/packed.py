"""Packed items on ranks: the largest sum of weights is made small by LPT, then by swaps.

LPT is the greedy rule of OrchMLLM Algorithm 1: longest item first, to the rank with the smallest sum (its `top().push`
means pop, add and push). It is within 4/3 - 1/(3 num_ranks) of the optimum. With a quadratic cost it is Algorithm 4,
but by the true weight of each item: the paper compares with a tolerance, which is no order for a heap. LPT leaves an
imbalance of a part of an item; swaps.py removes it. From about twenty items a rank on, the result is at the bound.

Equal counts: the ranks with the fewest items come first. So each round gives every rank one item, the heaviest item to
the lightest rank, and swaps exchange one item for one.
"""

from __future__ import annotations

import heapq

import numpy as np

from motet.balance.reference.bound import packed_bound
from motet.balance.reference.result import AssignmentFields, placement
from motet.balance.reference.swaps import Swaps
from motet.core.arrays import Int64Array


def packed(weights: Int64Array, num_ranks: int, equal_counts: bool, num_steps: int) -> AssignmentFields:
    """Balance sums of weights, int64 [num_items], >= 0; their sum must fit int64.

    equal_counts: the item counts of two ranks differ by at most one.
    num_steps: steps of the swaps; more steps never give a larger load.
    O(num_items log num_items + num_steps).
    """
    order = np.argsort(-weights, kind="stable")
    descending = weights[order].tolist()
    swaps = Swaps(descending, longest_first(descending, num_ranks, equal_counts), num_ranks, equal_counts)
    bound = packed_bound(weights, num_ranks)
    swaps.run(bound, num_steps)
    ranks = np.empty(len(weights), dtype=np.int32)
    ranks[order] = swaps.ranks
    return placement(ranks, np.array(swaps.loads, dtype=np.int64), bound)


def longest_first(descending: list[int], num_ranks: int, equal_counts: bool) -> list[int]:
    """LPT: the rank of each weight. A tie goes to the lowest rank; items without weight go to the ranks in turn."""
    ranks = []
    queue = [(0, 0, rank) for rank in range(num_ranks)]  # count, where counts must be equal; load; rank
    for weight in descending:
        if weight == 0 and not equal_counts:
            break
        count, load, rank = queue[0]
        ranks.append(rank)
        heapq.heapreplace(queue, (count + equal_counts, load + weight, rank))
    return ranks + [index % num_ranks for index in range(len(descending) - len(ranks))]
