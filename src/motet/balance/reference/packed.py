"""Items on ranks so that the largest sum of weights is small: LPT, then swaps.

The greedy of OrchMLLM Algorithm 1 (longest item first, to the rank with the smallest sum; its `top().push` is to be
read as pop, add and push) is the LPT rule, within 4/3 - 1/(3 num_ranks) of the optimum. With a quadratic cost it is
Algorithm 4 by the true weight of each item, in place of a comparison with a tolerance, by which no heap can be ordered.
What LPT leaves, some part of an item a rank, swaps.py removes. From some twenty items a rank on, this ends at the
bound itself.

Equal counts: the ranks with the fewest items come before all others, so that every round gives each rank one item, the
heaviest to the lightest rank. Swaps then trade one item for one.
"""

from __future__ import annotations

import heapq

import numpy as np

from motet.balance.reference.bound import packed_bound
from motet.balance.reference.result import AssignmentFields, placement
from motet.balance.reference.swaps import Swaps
from motet.core.arrays import Int64Array


def packed(weights: Int64Array, num_ranks: int, equal_counts: bool, num_steps: int) -> AssignmentFields:
    """Balance sums of weights, int64 [num_items], >= 0 and with a sum that fits int64.

    equal_counts: the numbers of items of two ranks differ by at most one.
    num_steps: how much the swaps may look at; with more of them the largest load is the same or smaller.
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
    """LPT: the rank of each weight. Of ranks that are alike the lowest is next; items without weight go in turn."""
    ranks = []
    queue = [(0, 0, rank) for rank in range(num_ranks)]  # count, where counts must be equal; load; rank
    for weight in descending:
        if weight == 0 and not equal_counts:
            break
        count, load, rank = queue[0]
        ranks.append(rank)
        heapq.heapreplace(queue, (count + equal_counts, load + weight, rank))
    return ranks + [place % num_ranks for place in range(len(descending) - len(ranks))]
