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

import numpy as np

from motet.core.arrays import Int64Array

_MASK = 2**64 - 1

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
    is_oversized = (vision > max_vision) | (text > max_text)
    oversized = [[sample] for sample in np.flatnonzero(is_oversized).tolist()]
    left: list[int] = np.flatnonzero(~is_oversized).tolist()
    full: list[list[int]] = []
    rejected: list[list[int]] = []
    state = seed
    for _ in range(num_iterations):
        state = _shuffle(left, state)
        rejected = []
        for group, is_full in _cut(
            left, vision.tolist(), text.tolist(), (max_vision, max_text), (min_vision, min_text)
        ):
            (full if is_full else rejected).append(group)
        left = [sample for group in rejected for sample in group]
    groups = full + oversized + rejected
    items = np.array([sample for group in groups for sample in group], dtype=np.int64)
    offsets = np.cumsum([0] + [len(group) for group in groups], dtype=np.int64)
    return items, offsets, len(full), len(oversized)


def _cut(
    samples: list[int], vision: list[int], text: list[int], most: tuple[int, int], enough: tuple[int, int]
) -> list[tuple[list[int], bool]]:
    """Groups in order, with sums of at most `most` (vision, text), and whether a sum of each is `enough`."""
    groups: list[tuple[list[int], bool]] = []
    group: list[int] = []
    num_vision = num_text = 0
    for sample in samples:
        if num_vision + vision[sample] > most[0] or num_text + text[sample] > most[1]:
            groups.append((group, num_vision >= enough[0] or num_text >= enough[1]))
            group, num_vision, num_text = [], 0, 0
        group.append(sample)
        num_vision += vision[sample]
        num_text += text[sample]
    if group:
        groups.append((group, num_vision >= enough[0] or num_text >= enough[1]))
    return groups


def _shuffle(samples: list[int], state: int) -> int:
    """Shuffle in place (Fisher-Yates) with splitmix64 numbers, as the native core does; returns the next state."""
    for i in range(len(samples), 1, -1):
        state = (state + 0x9E3779B97F4A7C15) & _MASK
        bits = state
        bits = ((bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        bits = ((bits ^ (bits >> 27)) * 0x94D049BB133111EB) & _MASK
        other = ((bits ^ (bits >> 31)) * i) >> 64
        samples[i - 1], samples[other] = samples[other], samples[i - 1]
    return state
