"""Lower bounds: no placement of whole items on ranks has a smaller maximum load."""

from __future__ import annotations

import numpy as np

from motet.core.arrays import Int64Array


def packed_bound(weights: Int64Array, num_ranks: int) -> int:
    """The largest of three bounds on the maximum over ranks of the sum of weights, int64 [num_items].

    O(num_items log num_items).

    - Mean: some rank gets at least the mean, rounded up, and as all sums are multiples of the weights' greatest common
      divisor, up to one of these (image tokens often come in tiles).
    - Longest: some rank gets the heaviest item.
    - Pigeonhole: of the k * num_ranks + 1 heaviest items some rank gets k + 1, at least the k + 1 lightest of them.
    """
    divisor = int(np.gcd.reduce(weights)) if len(weights) else 0
    if divisor == 0:
        return 0
    mean = -(-int(weights.sum()) // (num_ranks * divisor)) * divisor
    descending = np.sort(weights)[::-1]
    before = np.concatenate([[0], np.cumsum(descending)])  # before[i] = sum of the i heaviest
    last = np.arange(0, len(weights), num_ranks)  # k * num_ranks; k = 0 is the longest item
    pigeonhole = before[last + 1] - before[last - np.arange(len(last))]
    return max(mean, int(pigeonhole.max()))
