"""Lower bounds: no placement of whole items on ranks has a smaller maximum load."""

from __future__ import annotations

import numpy as np

from motet.core.arrays import Int64Array


def packed_bound(weights: Int64Array, num_ranks: int) -> int:
    """The largest of three lower bounds of the largest load, from weights, int64 [num_items].

    - Mean: some rank gets at least the mean. Loads are multiples of the greatest common divisor of all weights, so the
      mean is rounded up to a multiple (image tokens often come in tiles).
    - Longest: some rank gets the heaviest item.
    - Pigeonhole: some rank gets k + 1 of the k * num_ranks + 1 heaviest items. Its load is at least the sum of the
      k + 1 lightest of these.

    O(num_items log num_items).
    """
    divisor = int(np.gcd.reduce(weights)) if len(weights) else 0
    if divisor == 0:
        return 0
    mean = -(-int(weights.sum()) // (num_ranks * divisor)) * divisor
    descending = np.sort(weights)[::-1]
    before = np.concatenate([[0], np.cumsum(descending)])  # before[i] = sum of the i heaviest
    last = np.arange(0, len(weights), num_ranks)  # k * num_ranks, for k = 0, 1, ...; k = 0 is the longest item
    pigeonhole = before[last + 1] - before[last - np.arange(len(last))]
    return max(mean, int(pigeonhole.max()))
