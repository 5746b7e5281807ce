"""Lengths of items, a column a module. Balancing needs nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from motet.core.arrays import BoolArray, Float64Array, Int32Array, Int64Array, rows_of_runs
from motet.core.errors import ArgumentError, UserError
from motet.core.item_segments import ItemSegments

BACKBONE = "backbone"
"""The name of the phase that runs the LLM on whole interleaved sequences. Every other phase is an encoder's."""


@dataclass(frozen=True, eq=False)
class ItemLengths:
    """The items (images, clips) of one modality, ordered by example, then by position in the example.

    example:    int64 [num_items], the index of the example that the item belongs to; ascending.
    length:     int64 [num_items], what the encoder computes on: patches, mel frames.
    num_tokens: int64 [num_items], the number of the item's rows in the backbone's sequence; of one that a generator
                makes, of the rows that it is given of it, which may be those of a turn.
    segments:   the parts that the encoder computes like items of their own (tiles, frames, windows), which add up to
                `length`; None: each item is one.
    num_media:  int64 [num_items], of sequences: how many images and clips stand in each; None of all other items.
    Raises ArgumentError for segments that do not add up to the lengths.

    Example:
        Example 0 has one image, example 2 has two; four patches make a token:
        >>> images = ItemLengths(np.array([0, 2, 2]), length=np.array([40, 8, 8]), num_tokens=np.array([10, 2, 2]))
        >>> images.take(np.array([2])).length.tolist()
        [8, 8]
    """

    example: Int64Array
    length: Int64Array
    num_tokens: Int64Array
    segments: ItemSegments | None = None
    num_media: Int64Array | None = None

    def __post_init__(self) -> None:
        if self.segments is not None and not np.array_equal(self.segments.summed(self.segments.length), self.length):
            raise ArgumentError("the segments of an item must add up to its length.")

    @property
    def num_items(self) -> int:
        """The number of items of all examples."""
        return len(self.example)

    @classmethod
    def joined(cls, parts: Sequence[ItemLengths]) -> ItemLengths:
        """The items of all parts, one part after the other; examples keep their numbers. parts: at least one."""
        segments = None
        if any(part.segments is not None for part in parts):
            segments = ItemSegments.joined([part.segments or ItemSegments.whole(part.length) for part in parts])
        return cls(
            np.concatenate([part.example for part in parts]),
            np.concatenate([part.length for part in parts]),
            np.concatenate([part.num_tokens for part in parts]),
            segments,
            _joined_media(parts),
        )

    def take(self, examples: Int64Array) -> ItemLengths:
        """The items of these examples, int64 [n], which become examples 0 ... n - 1."""
        starts = self._starts
        first = starts[np.minimum(examples, len(starts) - 1)]
        counts = starts[np.minimum(examples + 1, len(starts) - 1)] - first
        example = np.repeat(np.arange(len(examples)), counts)
        # As `rows_of_runs`, by what is repeated already.
        items = np.arange(len(example)) + (first - (np.cumsum(counts) - counts))[example]
        return replace(self.take_items(items), example=example)

    @cached_property
    def _starts(self) -> Int64Array:
        """The first item of each example up to the last one that has any, and the number of items, int64."""
        starts: Int64Array = np.append(0, np.bincount(np.asarray(self.example, np.int64)).cumsum())
        return starts

    def take_items(self, items: Int64Array) -> ItemLengths:
        """The given items, int64 [n], in this order; their examples keep their numbers."""
        return ItemLengths(
            self.example[items],
            self.length[items],
            self.num_tokens[items],
            None if self.segments is None else self.segments.take(items),
            None if self.num_media is None else self.num_media[items],
        )

    def summed(self, of_length: Callable[[Int64Array], Int64Array]) -> Int64Array:
        """A figure of each item, [num_items]: that of its length, or the sum of those of its segments.

        of_length: lengths, int64 [n] -> figures, [n].
        """
        if self.segments is None:
            return of_length(self.length)
        return self.segments.summed(of_length(self.segments.length))


def _joined_media(parts: Sequence[ItemLengths]) -> Int64Array | None:
    counts = [part.num_media for part in parts if part.num_media is not None]
    return np.concatenate(counts) if len(counts) == len(parts) else None


@dataclass(frozen=True, eq=False)
class BatchLengths:
    """The lengths of one microbatch over all ranks: all that a balancer needs of it.

    sequence:    int64 [num_examples], tokens of the whole interleaved sequence, media included (OrchMLLM section 6).
    num_targets: int64 [num_examples], tokens on which loss is taken.
    home:        int32 [num_examples], the rank that computes the example if nothing is balanced.
    items:       per encoder phase, the items of all examples.
    group:       int64 [num_examples], the group of each example in its step, where the order of examples is one of
                 groups (`motet.data.groups`). Group g is what rank g % num_ranks computes in microbatch g // num_ranks
                 if nothing is balanced. None: there are no groups.

    Example:
        Two examples; the second has an image of 64 patches, which become 16 of its 20 tokens:
        >>> images = ItemLengths(example=np.array([1]), length=np.array([64]), num_tokens=np.array([16]))
        >>> lengths = BatchLengths(np.array([7, 20]), np.array([3, 2]), np.array([0, 1], np.int32), {"image": images})
        >>> lengths.of("image").length.tolist(), lengths.of("backbone").length.tolist()
        ([64], [7, 20])
    """

    sequence: Int64Array
    num_targets: Int64Array
    home: Int32Array
    items: dict[str, ItemLengths]
    group: Int64Array | None = None

    @property
    def num_examples(self) -> int:
        """The number of examples over all ranks."""
        return len(self.sequence)

    @classmethod
    def joined(cls, parts: Sequence[BatchLengths]) -> BatchLengths:
        """The examples of several microbatches of the same phases, one after the other, without groups.

        parts: at least one.
        """
        if len(parts) == 1:
            return replace(parts[0], group=None)
        firsts = np.cumsum([0, *(part.num_examples for part in parts)])
        items = {}
        for name in parts[0].items:
            columns = [
                replace(part.items[name], example=part.items[name].example + n) for part, n in zip(parts, firsts)
            ]
            items[name] = ItemLengths.joined(columns)
        return cls(
            np.concatenate([part.sequence for part in parts]),
            np.concatenate([part.num_targets for part in parts]),
            np.concatenate([part.home for part in parts]),
            items,
        )

    def of(self, phase: str) -> ItemLengths:
        """The items of a phase. Those of the backbone are the sequences of the examples."""
        if phase == BACKBONE:
            return ItemLengths(np.arange(self.num_examples), self.sequence, self.sequence, num_media=self._num_media)
        return self.items[phase]

    @cached_property
    def _num_media(self) -> Int64Array:
        """Items of all phases but the backbone, int64 [num_examples]."""
        counts: Int64Array = np.zeros(self.num_examples, dtype=np.int64)
        for column in self.items.values():
            counts += np.bincount(column.example, minlength=self.num_examples)
        return counts

    def has_any(self, phases: Iterable[str]) -> BoolArray:
        """Whether an example has an item of any of these phases, bool [num_examples]."""
        found = np.zeros(self.num_examples, dtype=np.bool_)
        for phase in phases:
            found[self.of(phase).example] = True
        return found

    def keep(self, kept: BoolArray) -> BatchLengths:
        """The examples where `kept`, bool [num_examples], is True, renumbered."""
        return self.take(np.flatnonzero(kept))

    def take(self, examples: Int64Array) -> BatchLengths:
        """The given examples, int64 [n], in this order and as often as given, renumbered. O(n + items taken)."""
        items = {name: column.take(examples) for name, column in self.items.items()}
        group = None if self.group is None else self.group[examples]
        return BatchLengths(self.sequence[examples], self.num_targets[examples], self.home[examples], items, group)


@dataclass(frozen=True, eq=False)
class Workload:
    """Examples to draw steps from: of a manifest, of a table of lengths, or sampled.

    source:      where the examples are from, for messages.
    examples:    the lengths of all examples. If they have groups, these are of an epoch, one after the other.
    weight:      float64 [num_examples], proportional to how often each is drawn; None is all equal.
    assumptions: sentences that say what was assumed about the lengths.

    Example:
        >>> lengths = BatchLengths(np.arange(1, 5), np.ones(4, int), np.zeros(4, np.int32), {})
        >>> workload = Workload("four sequences", lengths, weight=np.array([0.0, 0.0, 1.0, 1.0]))
        >>> sorted(set(workload.draw(100, np.random.default_rng(0)).sequence.tolist()))
        [3, 4]
    """

    source: str
    examples: BatchLengths
    weight: Float64Array | None = None
    assumptions: tuple[str, ...] = ()

    def draw(self, num_examples: int, rng: np.random.Generator) -> BatchLengths:
        """The lengths of a step, drawn with replacement; every home is rank 0. O(num_examples + items drawn).

        Raises UserError for a step without a token, of which nothing can be said.
        """
        return self._with_tokens(replace(self.examples.take(self.choose(num_examples, rng)), group=None))

    def draw_groups(self, num_groups: int, rng: np.random.Generator) -> BatchLengths:
        """The lengths of a step of groups, which follow each other in the epoch, from its end on to its beginning.

        Raises UserError as `draw`.
        """
        group = self.examples.group
        assert group is not None, "a workload without groups"
        count = int(group[-1]) + 1
        first = int(rng.integers(-(-count // num_groups))) * num_groups
        return self._with_tokens(self.groups((first + np.arange(num_groups)) % count))

    def _with_tokens(self, drawn: BatchLengths) -> BatchLengths:
        """The lengths of a step. Raises UserError if it has examples and no token."""
        if not drawn.num_examples or drawn.sequence.any():
            return drawn
        if not self.examples.sequence.any():
            raise UserError(f"{self.source} has no tokens: the sequence of every example is empty.")
        raise UserError(
            f"A batch of {drawn.num_examples} drawn from {self.source} has no tokens: leave out examples without any, "
            "or make the batch larger."
        )

    def groups(self, numbers: Int64Array) -> BatchLengths:
        """The lengths of a step of some groups of the epoch, int64 [num_groups], which get the numbers 0, 1, ... ."""
        group = self.examples.group
        assert group is not None, "a workload without groups"
        starts, ends = (np.searchsorted(group, numbers, side=side) for side in ("left", "right"))
        counts = ends - starts
        examples = rows_of_runs(starts, counts)
        return replace(self.examples.take(examples), group=np.repeat(np.arange(len(numbers)), counts))

    def choose(self, num_examples: int, rng: np.random.Generator) -> Int64Array:
        """The examples that `draw` takes, int64 [num_examples]."""
        share = None if self.weight is None else self.weight / self.weight.sum()
        return rng.choice(self.examples.num_examples, num_examples, p=share).astype(np.int64)


def total_lengths(batch: BatchLengths, name: str) -> Int64Array:
    """The summed length of each example's items of a phase, int64 [num_examples]."""
    items = batch.of(name)
    totals: Int64Array = np.bincount(items.example, items.length, batch.num_examples).astype(np.int64)
    return totals


def home_ranks(num_examples: int, num_ranks: int) -> Int32Array:
    """The rank of each example if nothing is balanced, int32 [num_examples]: consecutive, in equal shares."""
    return (np.arange(num_examples) * num_ranks // max(num_examples, 1)).astype(np.int32)
