"""The global order of examples: the i-th example that the whole job trains on, for any number of ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import NamedTuple, Protocol

import numpy as np

from motet.core.arrays import Int64Array
from motet.data.permutation import permute

MAX_TURNS = 10**6
"""The most examples after which the manifests of a mixture come in the same turns again."""


class StepExamples(NamedTuple):
    """The examples of a step. ids: int64 [num_examples].

    group: int64 [num_examples], ascending: the group of each, from 0, where the order is one of groups; else None.
    """

    ids: Int64Array
    group: Int64Array | None = None


class ExampleOrder(Protocol):
    """The order in which a job takes its examples: `GlobalOrder`, `MixedOrder`, `ListedOrder`, `groups.GroupedOrder`
    or `splits.SplitOrder`.
    """

    def step(self, position: int, batch_size: int) -> StepExamples:
        """The step that begins at a position, which counts examples. batch_size: its examples, or its groups."""


class EpochOrder(ExampleOrder, Protocol):
    """An order of the examples of all epochs: each of the above but `ListedOrder`."""

    def taken_in(self, epochs: Fraction) -> int:
        """How many examples, or groups, a run takes until it has taken each example so often.

        Of a part of an epoch it is that share of its examples.
        """

    def taken_before(self, position: int) -> int:
        """The examples, or the groups, before a position, which is where one of them begins."""


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

    def taken_in(self, epochs: Fraction) -> int:
        """As of `EpochOrder`."""
        return math.ceil(epochs * self.num_examples)

    def taken_before(self, position: int) -> int:
        """As of `EpochOrder`."""
        return position


@dataclass(frozen=True)
class MixedOrder:
    """An order over several manifests in which each has a share of the examples, a pure function as `GlobalOrder` is.

    num_examples: of each manifest; examples are numbered one manifest after the other.
    weights:      whole numbers (`whole_weights`). Of every sum(weights) examples, weights[i] are of manifest i, evenly
                  spread.
    Each manifest has epochs of its own, one after the other: all of its examples once, then all again in another order.

    Example:
        >>> MixedOrder((2, 9), weights=(1, 3), shuffle=False).take(position=0, count=12).tolist()
        [2, 0, 3, 4, 5, 1, 6, 7, 8, 0, 9, 10]
    """

    num_examples: tuple[int, ...]
    weights: tuple[int, ...]
    seed: int = 0
    shuffle: bool = True

    def __post_init__(self) -> None:
        if len(self.weights) != len(self.num_examples) or min(*self.weights, *self.num_examples) < 1:
            raise ValueError(f"a mixture needs a weight for each manifest: {self.weights} for {self.num_examples}")

    @cached_property
    def _turns(self) -> tuple[Int64Array, Int64Array]:
        """The manifest of each of sum(weights) examples, and the number of those of it before: int64 each.

        The j-th of w examples is due at (j + 1/2) / w of the way.
        """
        manifest = np.repeat(np.arange(len(self.weights)), self.weights)
        number = np.concatenate([np.arange(weight) for weight in self.weights])
        due = np.argsort((2 * number + 1) / np.repeat(self.weights, self.weights), kind="stable")
        return manifest[due], number[due]

    def take(self, position: int, count: int) -> Int64Array:
        """Example ids at [position, position + count), int64 [count]. O(count), after O(sum(weights)) once."""
        if position < 0 or count < 0:
            raise ValueError(f"position and count must not be negative: {position}, {count}")
        rounds, turn = np.divmod(np.arange(position, position + count, dtype=np.int64), sum(self.weights))
        manifests, numbers = (column[turn] for column in self._turns)
        first, ids = 0, np.empty(count, dtype=np.int64)
        for manifest, (weight, size) in enumerate(zip(self.weights, self.num_examples, strict=True)):
            mine = np.flatnonzero(manifests == manifest)
            epochs, inside = np.divmod(rounds[mine] * weight + numbers[mine], size)
            for epoch in np.unique(epochs).tolist() if self.shuffle else ():
                of_epoch = epochs == epoch
                inside[of_epoch] = permute(inside[of_epoch], size, (self.seed, epoch, manifest))
            ids[mine] = first + inside
            first += size
        return ids

    def step(self, position: int, batch_size: int) -> StepExamples:
        """The step of batch_size examples that begins at a position."""
        return StepExamples(self.take(position, batch_size))

    def taken_in(self, epochs: Fraction) -> int:
        """As of `EpochOrder`: until the manifest that takes longest has had its turns; others have more epochs.

        Example:
            >>> MixedOrder((2, 9), weights=(1, 3)).taken_in(Fraction(1))  # The ninth example of the second manifest.
            12
        """
        manifests, numbers = self._turns
        taken = 0
        for manifest, (weight, size) in enumerate(zip(self.weights, self.num_examples, strict=True)):
            rounds, number = divmod(math.ceil(epochs * size) - 1, weight)
            turn = int(np.flatnonzero((manifests == manifest) & (numbers == number))[0])
            taken = max(taken, rounds * sum(self.weights) + turn + 1)
        return taken

    def taken_before(self, position: int) -> int:
        """As of `EpochOrder`."""
        return position


def whole_weights(weights: Sequence[float]) -> tuple[int, ...]:
    """The least whole numbers in the same proportion, of decimal numbers above 0. Raises ValueError if too large.

    Example:
        >>> whole_weights([0.7, 0.3]), whole_weights([2, 4])
        ((7, 3), (1, 2))
    """
    exact = [Fraction(repr(weight)) for weight in weights]
    whole = [int(each * math.lcm(*(each.denominator for each in exact))) for each in exact]
    whole = [each // math.gcd(*whole) for each in whole]
    if sum(whole) > MAX_TURNS:
        raise ValueError(
            f"weights {list(weights)} are {whole} in whole numbers, which add up to more than {MAX_TURNS:,}; round them"
        )
    return tuple(whole)


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
