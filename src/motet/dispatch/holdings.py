"""What all ranks hold before items are exchanged, as two integer tables, and which parcels go from where to where.

Nothing here communicates. From the same tables every rank lists the same parcels, so that each knows the size of all
that it will receive without being told.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from motet.assign.orchestrator import Decision
from motet.core.arrays import BoolArray, Int64Array
from motet.core.example import Media, TokenSequence
from motet.core.workload import BACKBONE, BatchLengths, ItemLengths
from motet.dispatch.message import example_bytes, media_bytes

# Columns of the table of examples, and of the table of items (whose examples are counted on their rank).
_LOADED, _TEXT_TOKENS, _TARGETS, _EXAMPLE_COLUMNS = range(4)
_EXAMPLE, _PHASE, _LENGTH, _NUM_TOKENS, _ROWS, _ROW_DIM, _SIZE_DIM, _ITEM_COLUMNS = range(8)


class Measure(Protocol):
    """What turns sizes of items, int64 [num_items, size_dim], into int64 [num_items]."""

    def lengths(self, sizes: Int64Array) -> Int64Array:
        """What the encoder computes on."""

    def num_tokens(self, sizes: Int64Array) -> Int64Array:
        """Rows that the items take in the backbone's sequence."""


@dataclass(frozen=True, eq=False)
class LoadedExample:
    """One example as its rank has loaded it: its text, and its items in the order of their placeholders."""

    sequence: TokenSequence
    media: tuple[Media, ...]


def tables_of(
    examples: Sequence[LoadedExample | None], phases: Sequence[str], measures: Mapping[str, Measure]
) -> Int64Array:
    """The tables of one rank as one vector, int64 [2 + 3 * num_examples + 7 * num_items]: counts, examples, items.

    An example that is None is listed as not loaded, without items. Raises ValueError for an example whose media do not
    fit its placeholders.
    """
    example_table = np.zeros((len(examples), _EXAMPLE_COLUMNS), dtype=np.int64)
    rows: list[tuple[int, ...]] = []
    media: list[Media] = []
    for i, example in enumerate(examples):
        if example is None:
            continue
        sequence = example.sequence
        if len(example.media) != len(sequence.media):
            raise ValueError(f"example {i} has {len(sequence.media)} placeholders and {len(example.media)} items")
        example_table[i] = True, len(sequence.tokens), 0
        for phase, item in zip(sequence.media, example.media, strict=True):
            rows.append((i, phases.index(phase), 0, 0, *item.values.shape, len(item.size)))
            media.append(item)
    item_table = np.array(rows, dtype=np.int64).reshape(-1, _ITEM_COLUMNS)
    for number, phase in enumerate(phases):
        chosen = np.flatnonzero(item_table[:, _PHASE] == number)
        if chosen.size:
            sizes = np.stack([media[k].size for k in chosen]).astype(np.int64)
            item_table[chosen, _LENGTH] = measures[phase].lengths(sizes)
            item_table[chosen, _NUM_TOKENS] = measures[phase].num_tokens(sizes)
    for i, example in enumerate(examples):
        if example is not None:
            rows_of_items = item_table[item_table[:, _EXAMPLE] == i, _NUM_TOKENS]
            example_table[i, _TARGETS] = _count_targets(example.sequence, rows_of_items)
    return np.concatenate([[len(examples), len(item_table)], example_table.ravel(), item_table.ravel()])


def _count_targets(sequence: TokenSequence, num_tokens: Int64Array) -> int:
    """Targets by the rules of `pack`: not the first token of the packed sequence, and no placeholder."""
    repeats = np.ones(len(sequence.tokens), dtype=np.int64)
    repeats[sequence.media_positions] = num_tokens
    counted = sequence.targets.copy()
    counted[sequence.media_positions] = False
    counted[: np.flatnonzero(np.append(repeats, 1))[0] + 1] = False
    return int(counted.sum())


@dataclass(frozen=True, eq=False)
class Parcels:
    """Every sequence and every item of the microbatch: from where, to where, how many bytes. Sequences come first, then
    the items of each phase, both in the slot order of the decision, which is the order in which they lie in a message.

    kind: int64 [num_parcels], 0 for a sequence, 1 + i for an item of phase i.
    row:  int64 [num_parcels], its row in the table of examples or items.
    """

    kind: Int64Array
    row: Int64Array
    source: Int64Array
    destination: Int64Array
    size_bytes: Int64Array

    def sent_by(self, rank: int) -> Int64Array:
        """Parcel numbers in the order in which the rank sends them: by receiving rank, what it keeps left out."""
        mine = np.flatnonzero((self.source == rank) & (self.destination != rank))
        return mine[np.argsort(self.destination[mine], kind="stable")]

    def received_by(self, rank: int) -> Int64Array:
        """Parcel numbers in the order in which the rank receives them: by sending rank."""
        mine = np.flatnonzero((self.destination == rank) & (self.source != rank))
        return mine[np.argsort(self.source[mine], kind="stable")]

    def bytes_by_rank(self, parcels: Int64Array, ranks: Int64Array, num_ranks: int) -> list[int]:
        """The splits of an all-to-all: bytes of the given parcels for each of `ranks`."""
        sizes = np.zeros(num_ranks, dtype=np.int64)
        np.add.at(sizes, ranks[parcels], self.size_bytes[parcels])
        return sizes.tolist()


@dataclass(frozen=True, eq=False)
class Holdings:
    """The tables of all ranks, those of rank 0 first.

    lengths: of the examples that were loaded. kept: bool [num_examples], which those are.
    example_rank, item_rank: the rank that holds each row.
    """

    phases: tuple[str, ...]
    examples: Int64Array
    items: Int64Array
    example_rank: Int64Array
    item_rank: Int64Array
    lengths: BatchLengths

    @classmethod
    def read(cls, descriptions: Sequence[Int64Array], phases: tuple[str, ...]) -> Holdings:
        """From what `tables_of` gave on each rank; anything behind a description's end is ignored."""
        examples: list[Int64Array] = []
        items: list[Int64Array] = []
        example_counts: list[int] = []
        item_counts: list[int] = []
        for words in descriptions:
            num_examples, num_items = int(words[0]), int(words[1])
            split = 2 + _EXAMPLE_COLUMNS * num_examples
            examples.append(words[2:split].reshape(num_examples, _EXAMPLE_COLUMNS))
            table = words[split : split + _ITEM_COLUMNS * num_items].reshape(num_items, _ITEM_COLUMNS).copy()
            table[:, _EXAMPLE] += sum(example_counts)
            items.append(table)
            example_counts.append(num_examples)
            item_counts.append(num_items)
        ranks = np.arange(len(descriptions))
        example_table, item_table = np.concatenate(examples), np.concatenate(items)
        example_rank = np.repeat(ranks, example_counts)
        return cls(
            phases,
            example_table,
            item_table,
            example_rank,
            np.repeat(ranks, item_counts),
            _lengths(example_table, item_table, example_rank, phases),
        )

    @property
    def kept(self) -> BoolArray:
        return self.examples[:, _LOADED].astype(np.bool_)

    @property
    def input_bytes(self) -> Int64Array:
        """What each example that was loaded takes in messages, with its media, int64 [num_examples kept]."""
        sequence_bytes, item_bytes = self._sizes()
        np.add.at(sequence_bytes, self.items[:, _EXAMPLE], item_bytes)
        return sequence_bytes[self.kept]

    def _sizes(self) -> tuple[Int64Array, Int64Array]:
        """Bytes of each sequence, and of each item."""
        num_items = np.bincount(self.items[:, _EXAMPLE], minlength=len(self.examples))
        sequence_bytes = example_bytes(self.examples[:, _TEXT_TOKENS], num_items)
        return sequence_bytes, media_bytes(self.items[:, _ROWS], self.items[:, _ROW_DIM], self.items[:, _SIZE_DIM])

    def media_of(self, example_row: int) -> tuple[str, ...]:
        """The phases of an example's placeholders, in order."""
        first, last = np.searchsorted(self.items[:, _EXAMPLE], [example_row, example_row + 1])
        return tuple(self.phases[number] for number in self.items[first:last, _PHASE])

    def num_text_tokens(self, example_row: int) -> int:
        return int(self.examples[example_row, _TEXT_TOKENS])

    def media_shape(self, item_row: int) -> tuple[int, int, int]:
        """Rows, row_dim and size_dim of an item."""
        return tuple(self.items[item_row, [_ROWS, _ROW_DIM, _SIZE_DIM]].tolist())

    def parcels(self, decision: Decision) -> Parcels:
        """All sequences and items, from the rank that holds them to the rank that the decision puts them on."""
        sequence_bytes, item_bytes = self._sizes()
        columns = []
        for kind, phase in enumerate((BACKBONE, *self.phases)):
            is_sequence = kind == 0
            rows = np.flatnonzero(self.kept if is_sequence else self.items[:, _PHASE] == kind - 1)
            placed = decision.assignments[phase]
            rows = rows[placed.items]
            columns.append(
                np.stack(
                    [
                        np.full(len(rows), kind),
                        rows,
                        (self.example_rank if is_sequence else self.item_rank)[rows],
                        placed.ranks[placed.items],
                        (sequence_bytes if is_sequence else item_bytes)[rows],
                    ]
                )
            )
        return Parcels(*np.concatenate(columns, axis=1))


def _lengths(
    examples: Int64Array, items: Int64Array, example_rank: Int64Array, phases: tuple[str, ...]
) -> BatchLengths:
    sequence = examples[:, _TEXT_TOKENS].copy()
    np.add.at(sequence, items[:, _EXAMPLE], items[:, _NUM_TOKENS] - 1)
    columns = {}
    for number, phase in enumerate(phases):
        rows = items[items[:, _PHASE] == number]
        columns[phase] = ItemLengths(rows[:, _EXAMPLE], rows[:, _LENGTH], rows[:, _NUM_TOKENS])
    everything = BatchLengths(sequence, examples[:, _TARGETS], example_rank.astype(np.int32), columns)
    return everything.keep(examples[:, _LOADED].astype(np.bool_))
