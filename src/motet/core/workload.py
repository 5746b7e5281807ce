"""How long things are, a column a module, and nothing else about them: what balancing is decided from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from motet.core.arrays import BoolArray, Float64Array, Int32Array, Int64Array

BACKBONE = "backbone"
"""The name of the phase that runs the LLM on whole interleaved sequences; every other phase is an encoder's."""


@dataclass(frozen=True, eq=False)
class ItemLengths:
    """The items (images, clips) of one modality in a batch, ordered by example, then by place in the example.

    example:    int64 [num_items], position in the batch of the example that the item belongs to; ascending.
    length:     int64 [num_items], what the encoder computes on: patches, mel frames.
    num_tokens: int64 [num_items], rows that the item takes in the backbone's sequence.
    """

    example: Int64Array
    length: Int64Array
    num_tokens: Int64Array

    @property
    def num_items(self) -> int:
        return len(self.example)

    def take(self, examples: Int64Array) -> ItemLengths:
        """The items of these examples, int64 [n], which become examples 0 ... n - 1."""
        first = np.searchsorted(self.example, examples)
        counts = np.searchsorted(self.example, examples, side="right") - first
        taken = np.arange(counts.sum()) + np.repeat(first - (np.cumsum(counts) - counts), counts)
        return ItemLengths(np.repeat(np.arange(len(examples)), counts), self.length[taken], self.num_tokens[taken])


@dataclass(frozen=True, eq=False)
class BatchLengths:
    """The lengths of one microbatch over all ranks: all that a balancer needs to know of it.

    sequence:    int64 [num_examples], tokens of the whole interleaved sequence, media included (OrchMLLM section 6).
    num_targets: int64 [num_examples], tokens on which loss is taken.
    home:        int32 [num_examples], the rank that computes the example when nothing is balanced.
    items:       per encoder phase, the items of all examples.
    """

    sequence: Int64Array
    num_targets: Int64Array
    home: Int32Array
    items: dict[str, ItemLengths]

    @property
    def num_examples(self) -> int:
        return len(self.sequence)

    @classmethod
    def joined(cls, parts: Sequence[BatchLengths]) -> BatchLengths:
        """The examples of several batches of the same phases, one batch after the other. parts: at least one."""
        firsts = np.cumsum([0, *(part.num_examples for part in parts)])
        items = {}
        for name in parts[0].items:
            columns = [part.items[name] for part in parts]
            items[name] = ItemLengths(
                np.concatenate([column.example + first for column, first in zip(columns, firsts)]),
                np.concatenate([column.length for column in columns]),
                np.concatenate([column.num_tokens for column in columns]),
            )
        return cls(
            np.concatenate([part.sequence for part in parts]),
            np.concatenate([part.num_targets for part in parts]),
            np.concatenate([part.home for part in parts]),
            items,
        )

    def of(self, phase: str) -> ItemLengths:
        """The items of a phase; those of the backbone are the examples, whose sequences it computes and takes in."""
        if phase == BACKBONE:
            return ItemLengths(np.arange(self.num_examples), self.sequence, self.sequence)
        return self.items[phase]

    def keep(self, kept: BoolArray) -> BatchLengths:
        """The batch without the examples where `kept`, bool [num_examples], is False; examples are renumbered."""
        return self.take(np.flatnonzero(kept))

    def take(self, examples: Int64Array) -> BatchLengths:
        """The batch of these examples, int64 [n], in this order and as often as they are named; renumbered.

        O(n + items taken).
        """
        items = {name: column.take(examples) for name, column in self.items.items()}
        return BatchLengths(self.sequence[examples], self.num_targets[examples], self.home[examples], items)


@dataclass(frozen=True, eq=False)
class Workload:
    """Examples to draw batches from: those of a manifest or of a table of lengths, or sampled.

    source:      where they are from, for messages. examples: all of them, as one batch.
    weight:      float64 [num_examples], how often each is drawn, in proportion; None is all alike.
    assumptions: sentences: what was assumed to get the lengths.
    """

    source: str
    examples: BatchLengths
    weight: Float64Array | None = None
    assumptions: tuple[str, ...] = ()

    def draw(self, num_examples: int, rng: np.random.Generator) -> BatchLengths:
        """A batch, drawn with replacement; home is rank 0. O(num_examples + items drawn)."""
        return self.examples.take(self.choose(num_examples, rng))

    def choose(self, num_examples: int, rng: np.random.Generator) -> Int64Array:
        """Which examples `draw` takes, int64 [num_examples]."""
        share = None if self.weight is None else self.weight / self.weight.sum()
        return rng.choice(self.examples.num_examples, num_examples, p=share).astype(np.int64)


def home_ranks(num_examples: int, num_ranks: int) -> Int32Array:
    """Where the examples of a batch are computed when nothing is balanced: consecutive, equal counts to within one."""
    return (np.arange(num_examples) * num_ranks // max(num_examples, 1)).astype(np.int32)
