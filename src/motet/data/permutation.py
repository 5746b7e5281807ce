"""A pseudorandom permutation of 0 ... size - 1 that is computed for each index by itself.

The algorithm is a Feistel network over the smallest power of four that is at least `size`, with cycle walking to stay
below `size` (Black & Rogaway, "Ciphers with Arbitrary Finite Domains", 2002). Nothing is stored, and any index is
reached at once.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from motet.core.arrays import Int64Array

_NUM_ROUNDS = 8


def permute(indices: Int64Array, size: int, seed: tuple[int, ...]) -> Int64Array:
    """The images of `indices` under the permutation of range(size) that `seed` selects, int64 [num_indices].

    O(num_indices): the domain is at most four times `size`, so that cycle walking takes at most four rounds on average.
    """
    keys = np.random.SeedSequence(seed).generate_state(_NUM_ROUNDS, np.uint64).astype(np.uint64)
    half_bits = np.uint64(max(((size - 1).bit_length() + 1) // 2, 1))
    values = _feistel(indices.astype(np.uint64), keys, half_bits)
    while (outside := values >= size).any():
        values[outside] = _feistel(values[outside], keys, half_bits)
    return values.astype(np.int64)


def _feistel(values: NDArray[np.uint64], keys: NDArray[np.uint64], half_bits: np.uint64) -> NDArray[np.uint64]:
    """A permutation of range(4**half_bits), a round for each key: (left, right) -> (right, left ^ mix(right + key))."""
    mask = (np.uint64(1) << half_bits) - np.uint64(1)
    left, right = values >> half_bits, values & mask
    for key in keys:
        left, right = right, left ^ (_mix(right + key) & mask)
    return (left << half_bits) | right


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of splitmix64 (Steele, Lea & Flood, 2014)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
