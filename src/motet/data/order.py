"""The global order of examples: the i-th example that the whole job trains on, for any number of ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from motet.core.arrays import Int64Array
from motet.data.permutation import permute


class StepExamples(NamedTuple):
    """The examples of a step. ids: int64 [num_examples].

    group: int64 [num_examples], ascending: the group of each, from 0, where the order is one of groups; else None.
    """

    ids: Int64Array
    group: Int64Array | None = None


class ExampleOrder(Protocol):
    """The order in which a job takes its examples: `GlobalOrder`, `ListedOrder` or `groups.GroupedOrder`."""

    def step(self, position: int, batch_size: int) -> StepExamples:
        """The step that begins at a position, which counts examples. batch_size: its examples, or its groups."""


@dataclass(frozen=True)
class GlobalOrder:
    """The examples of all epochs, a pure function of (num_examples, seed, shuffle).

    Each epoch is a permutation of 0 ... num_examples - 1; without `shuffle` it is the identity. The only state to save
    is the position.

    Example:
        >>> GlobalOrder(num_examples=3, shuffle=False).take(position=1, count=4).tolist()
        [1, 2, 0, 1]
        >>> sorted(GlobalOrder(num_examples=3, seed=7).take(0, 3).tolist())
        [0, 1, 2]
    """

    num_examples: int
    seed: int = 0
    shuffle: bool = True

    def __post_init__(self) -> None:
        if self.num_examples < 1:
            raise ValueError(f"an order needs at least one example, not {self.num_examples}")

    def take(self, position: int, count: int) -> Int64Array:
        """Example ids at [position, position + count), int64 [count], over the ends of epochs. O(count)."""
        if position < 0 or count < 0:
            raise ValueError(f"position and count must not be negative: {position}, {count}")
        epochs, ids = np.divmod(np.arange(position, position + count, dtype=np.int64), self.num_examples)
        if not self.shuffle or not count:
            return ids
        for epoch in range(int(epochs[0]), int(epochs[-1]) + 1):
            in_epoch = epochs == epoch
            ids[in_epoch] = permute(ids[in_epoch], self.num_examples, (self.seed, epoch))
        return ids

    def step(self, position: int, batch_size: int) -> StepExamples:
        """The step of batch_size examples that begins at a position."""
        return StepExamples(self.take(position, batch_size))

    def epoch(self, position: int) -> int:
        """The epoch of the example at `position`, counted from 0."""
        return position // self.num_examples


@dataclass(frozen=True, eq=False)
class ListedOrder:
    """An order of given examples, int64 [num_examples], each once; it is used in place of a `GlobalOrder`.

    group: int64 [num_examples], ascending: the group of each, where a step is of groups.
    """

    examples: Int64Array
    group: Int64Array | None = None

    def take(self, position: int, count: int) -> Int64Array:
        """Example ids at [position, position + count), int64 [count]."""
        return self.examples[position : position + count]

    def step(self, position: int, batch_size: int) -> StepExamples:
        """The step of batch_size examples, or groups, that begins at a position. Empty where none are left."""
        if self.group is None or position >= len(self.group):
            return StepExamples(self.take(position, batch_size))
        first = self.group[position]
        end = int(np.searchsorted(self.group, first + batch_size))
        return StepExamples(self.examples[position:end], self.group[position:end] - first)
