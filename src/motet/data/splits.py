"""Training examples in splits, of which each rank reads its own alone: local shards, files that others cannot read.

Examples are numbered through all splits, those of split 0 first. Rank r has the splits r, r + num_ranks, ... As long as
the splits are the same, their order is the same on any number of ranks.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

import numpy as np

from motet.core.arrays import Int32Array, Int64Array
from motet.core.example import TokenSequence
from motet.data.dataset import Dataset
from motet.data.left_out import LeftOut
from motet.data.media import MediaRef
from motet.data.order import StepExamples
from motet.data.permutation import permute
from motet.data.transforms import Transform


@dataclass(frozen=True)
class SplitOrder:
    """The examples of all epochs, a pure function of (sizes, seed, shuffle); used in place of a `GlobalOrder`.

    An epoch is every example of every split once. Any stretch of it takes from each split in proportion to the split's
    size, so that ranks load evenly: of splits of equal size, each in turn. Each split is shuffled by itself.

    sizes: examples of each split.

    Example:
        >>> SplitOrder(sizes=(4, 2), shuffle=False).take(position=0, count=8).tolist()  # split 1 has examples 4 and 5
        [0, 4, 1, 2, 5, 3, 0, 4]
    """

    sizes: tuple[int, ...]
    seed: int = 0
    shuffle: bool = True

    def __post_init__(self) -> None:
        if not self.sizes or min(self.sizes) < 1:
            raise ValueError(f"each split must have an example; the sizes are {self.sizes}")

    def take(self, position: int, count: int) -> Int64Array:
        """Example ids at [position, position + count), int64 [count], over the ends of epochs.

        O((count + num_splits) log) for each epoch that the stretch touches.
        """
        if position < 0 or count < 0:
            raise ValueError(f"position and count must not be negative: {position}, {count}")
        num_examples, taken = sum(self.sizes), [np.zeros(0, dtype=np.int64)]
        while count:
            epoch, start = divmod(position, num_examples)
            stop = min(start + count, num_examples)
            taken.append(self._in_epoch(epoch, start, stop))
            position, count = position + stop - start, count - (stop - start)
        return np.concatenate(taken)

    def step(self, position: int, batch_size: int) -> StepExamples:
        """The step of batch_size examples that begins at a position."""
        return StepExamples(self.take(position, batch_size))

    def taken_in(self, epochs: Fraction) -> int:
        """As of `EpochOrder`."""
        return math.ceil(epochs * sum(self.sizes))

    def taken_before(self, position: int) -> int:
        """As of `EpochOrder`."""
        return position

    def _in_epoch(self, epoch: int, start: int, stop: int) -> Int64Array:
        """Example ids at [start, stop) of an epoch."""
        split, index = self._merged(start, stop)
        firsts = np.cumsum((0, *self.sizes))
        ids = firsts[split] + index
        if self.shuffle:
            for number in np.unique(split).tolist():
                own = split == number
                ids[own] = firsts[number] + permute(index[own], self.sizes[number], (self.seed, epoch, number))
        return ids

    def _merged(self, start: int, stop: int) -> tuple[Int64Array, Int64Array]:
        """Split of each place in [start, stop) of an epoch, and index in the split: an even merge of all splits.

        The example with index i of a split of n has its turn at time (i + 1/2) / n of the epoch; of equal times the
        first split comes first. So by any time t a split has given t * n examples, to within 1/2 (Webster's method).
        """
        sizes = np.array(self.sizes, dtype=np.int64)
        # At most num_splits / 2 more or fewer examples than t * num_examples have had their turn by a time t.
        slack = len(sizes) / 2 + 1
        begin, end = (start - slack) / sizes.sum(), (stop + slack) / sizes.sum()
        first = np.clip(np.floor(begin * sizes).astype(np.int64) - 1, 0, sizes)
        last = np.clip(np.ceil(end * sizes).astype(np.int64) + 1, first, sizes)
        counts = last - first
        split = np.repeat(np.arange(len(sizes)), counts)
        index = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts - first, counts)
        # Stable: equal times stay in the order of splits.
        by_time = np.argsort((2 * index + 1) / sizes[split], kind="stable")
        chosen = by_time[start - first.sum() : stop - first.sum()]
        return split[chosen], index[chosen]


@dataclass(frozen=True, eq=False)
class OwnSplits:
    """The examples of all splits, seen from one rank, which can read its own; used in place of a `Dataset`.

    datasets:     number of a split -> its examples, for the splits of this rank.
    sizes:        examples of each split.
    fingerprints: of each split's dataset.
    left_out:     over all splits.
    num_in_manifests: over all splits, left-out ones included.

    Example: with `sizes = (100, 80)`, rank 1 of two has `datasets = {1: Dataset.open(["rank-1.jsonl"], ...)}`, whose
    first example is number 100 on all ranks.
    """

    datasets: Mapping[int, Dataset]
    sizes: tuple[int, ...]
    fingerprints: tuple[str, ...]
    left_out: LeftOut
    num_in_manifests: int

    @property
    def num_examples(self) -> int:
        """Over all splits."""
        return sum(self.sizes)

    @cached_property
    def fingerprint(self) -> str:
        """Equal only if each number means the same example of the same lengths; the same on all ranks."""
        return hashlib.blake2b(" ".join(self.fingerprints).encode(), digest_size=16).hexdigest()

    def home(self, example_ids: Int64Array, num_ranks: int) -> Int32Array:
        """The rank that can load each example, int32 [num_examples]."""
        return (self._split(example_ids) % num_ranks).astype(np.int32)

    def tokens(self, example_id: int) -> TokenSequence:
        """As `Dataset.tokens`. Raises KeyError for an example of another rank."""
        dataset, own_id = self._own(example_id)
        return dataset.tokens(own_id)

    def media_refs(self, example_id: int) -> list[MediaRef]:
        """As `Dataset.media_refs`. Raises KeyError for an example of another rank."""
        dataset, own_id = self._own(example_id)
        return dataset.media_refs(own_id)

    def readers_of(self, ref: MediaRef) -> tuple[str, ...]:
        """As `Dataset.readers_of`; the same for all splits."""
        return next(iter(self.datasets.values())).readers_of(ref)

    def where(self, example_id: int) -> str:
        """The position of an example in its manifest, for messages; "" if another rank has it."""
        if int(self._split(np.array([example_id]))[0]) not in self.datasets:
            return ""
        dataset, own_id = self._own(example_id)
        return dataset.where(own_id)

    @property
    def transforms(self) -> dict[str, Transform]:
        """The transform of each phase, as `Decoder` takes them."""
        return next(iter(self.datasets.values())).transforms

    def _split(self, example_ids: Int64Array) -> Int64Array:
        """The split of each example, int64 [num_examples]."""
        return np.searchsorted(np.cumsum(self.sizes), example_ids, side="right")

    def _own(self, example_id: int) -> tuple[Dataset, int]:
        """The dataset of this rank that has an example, and the example's number there."""
        split = int(self._split(np.array([example_id]))[0])
        return self.datasets[split], example_id - sum(self.sizes[:split])
