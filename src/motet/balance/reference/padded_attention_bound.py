"""A lower bound of the largest load in reference/padded_attention.py; from 64 ranks on, loads are within 2 % of it.

Write a and q for linear and quadratic, T for a limit. A rank under the limit with c items, the sum s of their
lengths and the longest m keeps a s + q c m^2 <= T. To show that T is too small, number the ranks by their longest item,
descending, and let M_k be a length with m_k >= M_k. For any weight r_k >= 0 of a token, rank k has

    c + r_k s  <=  H_k  :=  max of c' + r_k s' over all (c', s', m') under the limit with m' >= M_k:

- A rank of c' <= c0 := T // (a M_k + q M_k^2) items has s' <= c' m', so a s' + q s'^2 / c' <= T; the largest such s',
  and with it c' + r_k s', grows with c'. It is taken at c0, and is at most c0 times the longest length.
- A rank of more items has s' <= (T - q c' M_k^2) / a. That is linear in c', so one end is largest: c0 + 1, or F, the
  most items that fit if all but one are as short as the shortest.

Now let r_1 <= r_2 <= ... . Let two ranks j < k hold fractions of items, with some of an item u on k and some of a
shorter item v on j, and exchange them so that j's c + r_j s stays: as (1 + r_j u) / (1 + r_j v) is at most
(1 + r_k u) / (1 + r_k v), k's does not grow. So no k ranks cover more of the longest items than ranks 1 to k filled
up to H_1, ..., H_k in this order with fractions of items, longest first. If these reach position p, the real ones hold
at most the first floor(p) items whole, which gives the next M_{k+1}: the length at floor(p). Where they do not reach
the end, T is too small.

The weight r_k = steepness * a / (q M_k^2) grows as M_k falls. Steepness 0 counts items, which is the exact bound of
padded sizes; 1 is the load itself, with fractions of items; those in between and beyond cut such fractions off.
Floats serve: a limit counts as too small only where a billionth of the items or more is left over.
"""

from __future__ import annotations

import math
from typing import NamedTuple, Self

import numpy as np

from motet.core.arrays import Int64Array

STEEPNESSES = (3.0, 10.0, 1.0, 0.0)
"""Each steepness gives a bound; the first bound is most often the largest."""


class Classes(NamedTuple):
    """Items grouped by length (a class has one length), longest first. A position counts items in this order."""

    lengths: list[int]  # [num_classes], descending
    starts: list[int]  # [num_classes + 1], the first position of each class
    sums: list[int]  # [num_classes + 1], the lengths of all earlier positions, summed

    @classmethod
    def of(cls, lengths: Int64Array) -> Self:
        """The classes of lengths, int64 [num_items]."""
        ascending, counts = np.unique(lengths, return_counts=True)
        starts = np.concatenate([[0], np.cumsum(counts[::-1])])
        sums = np.concatenate([[0], np.cumsum((ascending * counts)[::-1])])
        return cls(ascending[::-1].tolist(), starts.tolist(), sums.tolist())


def padded_attention_bound(classes: Classes, num_ranks: int, linear: int, quadratic: int, low: int, high: int) -> int:
    """A lower bound of the largest load. low: a known lower bound; high: the largest load of some placement.

    O(15 (num_classes + num_ranks)).
    """
    for steepness in STEEPNESSES:
        step = max(low >> 11, 1)
        if high - low < step or reaches_end(classes, num_ranks, linear, quadratic, low + step - 1, steepness):
            continue
        low, enough = low + step, high
        while enough - low > step:
            middle = low + (enough - low) // 2
            if reaches_end(classes, num_ranks, linear, quadratic, middle, steepness):
                enough = middle
            else:
                low = middle + 1
    return low


def reaches_end(classes: Classes, num_ranks: int, linear: int, quadratic: int, limit: int, steepness: float) -> bool:
    """Whether ranks filled with fractions of items, as above, cover all items. False: the limit is too small."""
    lengths, starts, sums = classes
    num_items, shortest = starts[-1], float(lengths[-1])
    position, index = 0.0, 0  # index: the class of the position
    for _ in range(num_ranks):
        longest = float(lengths[index])
        if longest == 0:
            return True
        attention = quadratic * longest * longest
        token_weight = steepness * linear / attention
        most = _largest_weight(limit, linear, quadratic, longest, shortest, float(lengths[0]), token_weight)
        so_far = position + token_weight * (sums[index] + (position - starts[index]) * longest)
        until = so_far + most
        while starts[index + 1] + token_weight * sums[index + 1] <= until:
            index += 1
            if index == len(lengths):
                return True
        within = until - (starts[index] + token_weight * sums[index])
        position = starts[index] + within / (1 + token_weight * lengths[index])
    return position >= num_items * (1 - 1e-9)


def _largest_weight(
    limit: int, linear: int, quadratic: int, longest: float, shortest: float, longest_of_all: float, token_weight: float
) -> float:
    """H_k of the module's docstring: `longest` is M_k, `token_weight` is r_k."""
    attention = quadratic * longest * longest
    few = max(math.floor(limit / (attention + linear * longest)), 1)  # 1 where only rounding denies it
    most = math.floor((1 + 1e-12) * (limit - linear * (longest - shortest)) / (attention + linear * shortest))
    tokens = 2.0 * limit / (linear + math.sqrt(linear * linear + 4.0 * quadratic / few * limit))
    weight = few + token_weight * min(tokens, few * longest_of_all)
    for count in (few + 1, most):
        if few < count <= most:
            weight = max(weight, count + token_weight * (limit - attention * count) / linear)
    return weight
