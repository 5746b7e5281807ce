"""The global order of examples: which example is the i-th that the whole job trains on, whatever ranks there are.

Each epoch is a permutation of all examples, computed one by one: a Feistel network over a power of four just large
enough, with cycle walking to stay inside (Black & Rogaway, "Ciphers with Arbitrary Finite Domains", 2002). So nothing
is stored, any position is reached at once, and the only state to save is the position.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from motet.core.arrays import Int64Array

_NUM_ROUNDS = 8


@dataclass(frozen=True)
class GlobalOrder:
    """A pure function of (num_examples, seed, shuffle). Without `shuffle`, every epoch is 0, 1, 2, ..."""

    num_examples: int
    seed: int = 0
    shuffle: bool = True

    def __post_init__(self) -> None:
        if self.num_examples < 1:
            raise ValueError(f"an order needs at least one example, not {self.num_examples}")

    def take(self, position: int, count: int) -> Int64Array:
        """Example ids at [position, position + count), int64 [count]; goes on into the next epochs. Cost O(count)."""
        if position < 0 or count < 0:
            raise ValueError(f"position and count must not be negative: {position}, {count}")
        places = np.arange(position, position + count, dtype=np.int64)
        epochs, places = np.divmod(places, self.num_examples)
        if not self.shuffle or not count:
            return places
        for epoch in range(int(epochs[0]), int(epochs[-1]) + 1):
            inside = epochs == epoch
            places[inside] = self._permute(places[inside], epoch)
        return places

    def epoch(self, position: int) -> int:
        """The epoch, counted from 0, that the example at `position` belongs to."""
        return position // self.num_examples

    def _permute(self, places: Int64Array, epoch: int) -> Int64Array:
        keys = np.random.SeedSequence((self.seed, epoch)).generate_state(_NUM_ROUNDS, np.uint64).astype(np.uint64)
        # Halves of equal width; the domain is at most four times the examples, so a walk takes four turns on average.
        half_bits = np.uint64(max(((self.num_examples - 1).bit_length() + 1) // 2, 1))
        values = _feistel(places.astype(np.uint64), keys, half_bits)
        while (outside := values >= self.num_examples).any():
            values[outside] = _feistel(values[outside], keys, half_bits)
        return values.astype(np.int64)


@dataclass(frozen=True, eq=False)
class ListedOrder:
    """The examples that are named, int64 [num_examples], once each, in the place of a `GlobalOrder`."""

    examples: Int64Array

    def take(self, position: int, count: int) -> Int64Array:
        """Those at [position, position + count)."""
        return self.examples[position : position + count]


def _feistel(values: NDArray[np.uint64], keys: NDArray[np.uint64], half_bits: np.uint64) -> NDArray[np.uint64]:
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
