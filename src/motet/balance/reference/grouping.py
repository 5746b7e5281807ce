"""Groups of samples of nearly equal vision and text size: OmniBal Algorithm 1, iterative sampling and filtering (ISF).

Corrected: a sample above a cap forms a group alone and is reported; the last group of a pass counts as a group; the
groups that the last pass rejects are kept, so that no sample is lost.

1. Set the samples above a cap aside.
2. Shuffle the others, and cut them into groups. A sample that would take its group above a cap begins the next one.
3. Accept the groups that reach a minimum, of vision or of text. The samples of the others go to the next pass.
4. After the last pass, its rejected groups are the leftover.

O(num_samples) a pass.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from motet.core.arrays import BoolArray, Int64Array
from motet.core.limits import INT64_MAX

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)

GroupsTuple = tuple[Int64Array, Int64Array, int, int]
"""(items [num_samples], offsets [num_groups + 1], number of full groups, number of oversized groups).

The groups are in this order: full, oversized, leftover."""


def isf(
    vision: Int64Array,
    text: Int64Array,
    max_vision: int,
    max_text: int,
    min_vision: int,
    min_text: int,
    num_iterations: int,
    seed: int,
) -> GroupsTuple:
    """Group samples of sizes vision and text, int64 [num_samples], under both maxima and, if possible, at a minimum."""
    return isf_of_phases((vision, text), (max_vision, max_text), (min_vision, min_text), num_iterations, seed)


def isf_of_phases(
    sizes: Sequence[Int64Array], most: Sequence[int], enough: Sequence[int], num_iterations: int, seed: int
) -> GroupsTuple:
    """`isf` of any number of phases. sizes: per phase, int64 [num_samples]. most, enough: per phase."""
    is_oversized = np.any([of_phase > cap for of_phase, cap in zip(sizes, most)], axis=0)
    oversized, left = np.flatnonzero(is_oversized), np.flatnonzero(~is_oversized)
    accepted: list[Int64Array] = []
    counts: list[Int64Array] = []  # The samples of each accepted group.
    rejected_counts = left[:0]
    for _ in range(num_iterations):
        samples, seed = _shuffled(left, seed)
        taken = [of_phase[samples] for of_phase in sizes]
        starts = _starts(taken, most)
        count = np.diff(starts, append=len(samples))
        is_full = _reaches(taken, starts, enough)
        in_full = np.repeat(is_full, count)
        accepted.append(samples[in_full])
        counts.append(count[is_full])
        left, rejected_counts = samples[~in_full], count[~is_full]
    items = np.concatenate([*accepted, oversized, left])
    ends = np.concatenate([*counts, np.ones_like(oversized), rejected_counts]).cumsum()
    return items, np.concatenate([ends[:0], [0], ends]), sum(map(len, counts)), len(oversized)


def _starts(sizes: Sequence[Int64Array], most: Sequence[int]) -> Int64Array:
    """Where each group begins, int64 [num_groups], if a group ends before the sample that would exceed a cap."""
    num_samples = len(sizes[0])
    # The end of a group that begins at each sample: before the first sample with which a sum exceeds its cap.
    ends = np.full(num_samples, num_samples)
    for of_phase, cap in zip(sizes, most):
        if num_samples * int(of_phase.max(initial=0)) > INT64_MAX // 2:
            of_phase = of_phase.astype(object)
        before = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(of_phase)])
        last = np.searchsorted(before, before[:-1] + min(cap, int(before[-1])), side="right") - 1
        ends = np.minimum(ends, last)
    next_start, starts, start = ends.tolist(), [], 0
    while start < num_samples:
        starts.append(start)
        start = next_start[start]
    return np.array(starts, dtype=np.int64)


def _reaches(sizes: Sequence[Int64Array], starts: Int64Array, enough: Sequence[int]) -> BoolArray:
    """Whether a sum of each group is `enough`, bool [num_groups]."""
    if not len(starts):
        return np.zeros(0, dtype=bool)
    reached: BoolArray = np.any(
        [np.add.reduceat(of_phase, starts) >= least for of_phase, least in zip(sizes, enough)], axis=0
    )
    return reached


def _shuffled(samples: Int64Array, state: int) -> tuple[Int64Array, int]:
    """The samples shuffled (Fisher-Yates) by splitmix64 numbers, as in the native core, and the next state."""
    counts = np.arange(len(samples), 1, -1, dtype=np.uint64)
    bits = np.uint64(state) + np.arange(1, len(counts) + 1, dtype=np.uint64) * _GOLDEN
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    bits ^= bits >> np.uint64(31)
    # The upper half of bits * counts, which has 128 bits; counts are below 2^32.
    upper, lower = bits >> np.uint64(32), bits & np.uint64(2**32 - 1)
    others = (upper * counts + (lower * counts >> np.uint64(32))) >> np.uint64(32)
    shuffled = samples.tolist()
    for last, other in zip(range(len(shuffled) - 1, 0, -1), others.tolist()):
        shuffled[last], shuffled[other] = shuffled[other], shuffled[last]
    return np.array(shuffled, dtype=np.int64), (state + len(counts) * int(_GOLDEN)) % 2**64
