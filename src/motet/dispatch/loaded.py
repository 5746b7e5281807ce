"""Two integer tables of what all ranks have loaded before the exchange, and the parcels that each rank sends.

Nothing here communicates. Every rank lists the same parcels from the same tables, so each rank knows the sizes of all
that it will receive.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from motet.assign.orchestrator import Decision
from motet.core.arrays import BoolArray, Int64Array
from motet.core.errors import UserError
from motet.core.example import Media, TokenSequence
from motet.core.exchange import Communicator, sent_in_all_gather, starts_in_all_gather
from motet.core.item_segments import ItemSegments
from motet.core.workload import BACKBONE, BatchLengths, ItemLengths
from motet.dispatch.message import MediaShape, example_bytes, media_bytes

# Columns of the table of examples, and of the table of items. `_EXAMPLE` counts the examples of the item's rank.
# `_SHARES`: the item has the placeholder of the item before it, so that its rows take no further places.
# `_PIECES`: its placeholders. `_READS`: a generator is given a turn of it, whose rows its `_NUM_TOKENS` are.
_LOADED, _TEXT_TOKENS, _TARGETS, _EXAMPLE_COLUMNS = range(4)
_EXAMPLE, _PHASE, _LENGTH, _NUM_TOKENS, _NUM_SEGMENTS, _SHARES, _PIECES, _READS, _SHAPE = range(9)
_ITEM_COLUMNS = _SHAPE + len(MediaShape._fields)


class Measure(Protocol):
    """Lengths and rows of items from their sizes, int64 [num_items, size_dim] -> int64 [num_items].

    Example:
        >>> class Patches:
        ...     def lengths(self, sizes):
        ...         return sizes.prod(axis=1)
        ...     def num_tokens(self, sizes):
        ...         return self.lengths(sizes) // 4
        >>> Patches().num_tokens(np.array([[4, 6], [2, 2]])).tolist()
        [6, 1]
    """

    def lengths(self, sizes: Int64Array) -> Int64Array:
        """How much of each item the encoder computes on: patches, frames."""

    def num_tokens(self, sizes: Int64Array) -> Int64Array:
        """Rows that each item takes in the backbone's sequence; 0 of items that read a turn."""

    # A measure may also have `segments(sizes)`, the `ItemSegments` of the items, and `max_turn`, the most rows of the
    # turn that each of its items reads.


@dataclass(frozen=True, eq=False)
class LoadedExample:
    """One example as its rank has loaded it: its text, and its items in the order of their placeholders.

    Example:
        >>> text = TokenSequence(np.array([7, 0]), np.array([False, True]), ("image",), np.array([1]))
        >>> image = Media(values=np.zeros((6, 12), np.float32), size=np.array([2, 3]))
        >>> LoadedExample(text, (image,)).media[0].values.shape  # 6 patches of 12 values
        (6, 12)
    """

    sequence: TokenSequence
    media: tuple[Media, ...]


def tables_of(
    examples: Sequence[LoadedExample | None], phases: Sequence[str], measures: Mapping[str, Measure]
) -> Int64Array:
    """The tables of one rank as one vector, int64 [2 + 3 * num_examples + 14 * num_items + num_segments].

    They are counts, examples, items, and the lengths of all segments, item by item.
    An example that could not be loaded is None; it is listed as not loaded and has no items. Raises ValueError for an
    example with more or fewer items than placeholders, and UserError for an item whose turn does not fit its phase.
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
        pieces = sequence.num_pieces
        shares = np.diff(sequence.media_positions[np.cumsum(pieces) - pieces], prepend=-1) == 0
        of_items = np.stack([shares, pieces, sequence.reads_turn], axis=1).astype(np.int64).tolist()
        for phase, item, (is_shared, num_pieces, reads) in zip(sequence.media, example.media, of_items, strict=True):
            rows.append((i, phases.index(phase), 0, 0, 0, is_shared, num_pieces, reads, *MediaShape.of(item)))
            media.append(item)
    item_table = np.array(rows, dtype=np.int64).reshape(-1, _ITEM_COLUMNS)
    segments_of_items = [np.zeros(0, dtype=np.int64)] * len(item_table)
    for index, phase in enumerate(phases):
        of_phase = np.flatnonzero(item_table[:, _PHASE] == index)
        if of_phase.size:
            sizes = np.stack([media[k].size for k in of_phase]).astype(np.int64)
            item_table[of_phase, _LENGTH] = measures[phase].lengths(sizes)
            item_table[of_phase, _NUM_TOKENS] = measures[phase].num_tokens(sizes)
            measured = getattr(measures[phase], "segments", None)
            if measured is not None and (segments := measured(sizes)) is not None:
                item_table[of_phase, _NUM_SEGMENTS] = segments.counts
                for k, own in zip(of_phase, np.split(segments.length, segments.offsets[1:-1]), strict=True):
                    segments_of_items[k] = own
    for i, example in enumerate(examples):
        if example is not None:
            of_example = item_table[:, _EXAMPLE] == i
            rows_of_items = item_table[of_example, _NUM_TOKENS]
            example_table[i, _TARGETS] = _count_targets(example.sequence, rows_of_items)
            item_table[of_example, _NUM_TOKENS] += example.sequence.turn_rows(rows_of_items)
    for index, phase in enumerate(phases):
        _check_turns(item_table[item_table[:, _PHASE] == index], phase, getattr(measures[phase], "max_turn", 0))
    counts = np.array([len(examples), len(item_table)])
    return np.concatenate([counts, example_table.ravel(), item_table.ravel(), *segments_of_items])


def _check_turns(items: Int64Array, phase: str, most: int) -> None:
    """Raise UserError where a turn is missing, too long, or of no use. items: the table of those of a phase."""
    reads, rows = items[:, _READS] == 1, items[:, _NUM_TOKENS]
    wrong = (reads != (most > 0)) | (reads & ((rows > most) | (rows == 0)))
    if (first := np.flatnonzero(wrong)).size:
        example, said = items[first[0], _EXAMPLE], "reads none, so it must be (0, 0)"
        if most:
            said = f"takes one of 1 to {most:,} rows (max_turn)"
        raise UserError(
            f"example {example} has an item of {phase!r} with a turn of {rows[first[0]] * reads[first[0]]:,} rows in "
            f"TokenSequence.turns; this module {said}."
        )


def _count_targets(sequence: TokenSequence, num_tokens: Int64Array) -> int:
    """Targets by the rules of `pack`: neither the first token of the packed sequence nor a placeholder counts."""
    repeats = sequence.token_rows(num_tokens)
    counted = sequence.targets.copy()
    counted[sequence.media_positions] = False
    counted[: np.flatnonzero(np.append(repeats, 1))[0] + 1] = False
    return int(counted.sum())


@dataclass(frozen=True, eq=False)
class Parcels:
    """Source, destination and size of every sequence and every item of the microbatch, int64 [num_parcels] each.

    Sequences come first, then the items of each phase, each in the order of the positions that the decision gives. A
    message holds its parcels in this order.

    kind:       0 for a sequence, 1 + i for an item of phase i.
    row:        the parcel's row in the table of examples or of items.
    source, destination: ranks.
    """

    kind: Int64Array
    row: Int64Array
    source: Int64Array
    destination: Int64Array
    size_bytes: Int64Array

    def held_by(self, rank: int) -> Int64Array:
        """Parcels that the rank has loaded, those that it keeps included, in their order."""
        return np.flatnonzero(self.source == rank)

    def sent_by(self, rank: int) -> Int64Array:
        """Parcels that the rank sends, not those that it keeps, in the order of sending: by receiving rank."""
        mine = np.flatnonzero((self.source == rank) & (self.destination != rank))
        return mine[np.argsort(self.destination[mine], kind="stable")]

    def received_by(self, rank: int) -> Int64Array:
        """Parcels that the rank receives, in the order of receiving: by sending rank."""
        mine = np.flatnonzero((self.destination == rank) & (self.source != rank))
        return mine[np.argsort(self.source[mine], kind="stable")]

    def starts_by_source(self, num_ranks: int) -> tuple[int, Int64Array]:
        """As `starts_in_all_gather`, if each rank gives all that it has loaded."""
        by_source = np.argsort(self.source, kind="stable")
        return starts_in_all_gather(by_source, self.source, self.size_bytes, num_ranks)

    def sent_bytes(self, communicator: Communicator, node: Int64Array) -> tuple[int, int]:
        """Bytes that ranks send, summed over all ranks, and the part of them that leaves its node.

        node: int64 [num_ranks], the node of each rank.
        """
        moves = self.source != self.destination
        if communicator == "all_gather" and moves.any():
            return sent_in_all_gather(self.source, self.size_bytes, node)
        crosses = node[self.source] != node[self.destination]
        return int(self.size_bytes[moves].sum()), int(self.size_bytes[crosses].sum())

    def bytes_by_rank(self, parcels: Int64Array, ranks: Int64Array, num_ranks: int) -> list[int]:
        """The splits of an all-to-all: the bytes of `parcels`, summed by rank. ranks: the rank of every parcel."""
        sizes = np.zeros(num_ranks, dtype=np.int64)
        np.add.at(sizes, ranks[parcels], self.size_bytes[parcels])
        return sizes.tolist()


@dataclass(frozen=True, eq=False)
class LoadedTables:
    """The tables of all ranks, one below the other, rank 0 first.

    example_rank, item_rank: the rank that has loaded each row.
    lengths: of the examples that could be loaded.
    """

    phases: tuple[str, ...]
    examples: Int64Array
    items: Int64Array
    example_rank: Int64Array
    item_rank: Int64Array
    lengths: BatchLengths

    @classmethod
    def read(cls, descriptions: Sequence[Int64Array], phases: tuple[str, ...]) -> LoadedTables:
        """Join the vectors that `tables_of` gave on each rank; words behind the end of a vector are ignored."""
        examples: list[Int64Array] = []
        items: list[Int64Array] = []
        example_counts: list[int] = []
        item_counts: list[int] = []
        segment_lengths: list[Int64Array] = []
        for words in descriptions:
            num_examples, num_items = int(words[0]), int(words[1])
            split = 2 + _EXAMPLE_COLUMNS * num_examples
            examples.append(words[2:split].reshape(num_examples, _EXAMPLE_COLUMNS))
            end = split + _ITEM_COLUMNS * num_items
            table = words[split:end].reshape(num_items, _ITEM_COLUMNS).copy()
            table[:, _EXAMPLE] += sum(example_counts)
            segment_lengths.append(words[end : end + table[:, _NUM_SEGMENTS].sum()])
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
            _lengths(example_table, item_table, np.concatenate(segment_lengths), example_rank, phases),
        )

    @property
    def kept(self) -> BoolArray:
        """Which examples could be loaded, bool [num_examples]."""
        return self.examples[:, _LOADED].astype(np.bool_)

    @property
    def input_bytes(self) -> Int64Array:
        """Bytes in messages of each example that could be loaded, media included, int64 [num_examples kept]."""
        sequence_bytes, item_bytes = self._sizes()
        np.add.at(sequence_bytes, self.items[:, _EXAMPLE], item_bytes)
        return sequence_bytes[self.kept]

    def _sizes(self) -> tuple[Int64Array, Int64Array]:
        """Bytes of each sequence, and of each item."""
        num_placeholders = np.zeros(len(self.examples), dtype=np.int64)
        np.add.at(num_placeholders, self.items[:, _EXAMPLE], self.items[:, _PIECES])
        sequence_bytes = example_bytes(self.examples[:, _TEXT_TOKENS], num_placeholders)
        return sequence_bytes, media_bytes(MediaShape(*self.items[:, _SHAPE:].T))

    def media_of(self, example_row: int) -> tuple[tuple[str, ...], Int64Array]:
        """The phases of an example's items, in order, and the placeholders of each, int64 [num_items]."""
        first, last = np.searchsorted(self.items[:, _EXAMPLE], [example_row, example_row + 1])
        return tuple(self.phases[index] for index in self.items[first:last, _PHASE]), self.items[first:last, _PIECES]

    def num_text_tokens(self, example_row: int) -> int:
        """Text tokens of an example, a placeholder counted as one."""
        return int(self.examples[example_row, _TEXT_TOKENS])

    def media_shape(self, item_row: int) -> MediaShape:
        """How an item lies in a message."""
        return MediaShape(*self.items[item_row, _SHAPE:].tolist())

    def parcels(self, decision: Decision) -> Parcels:
        """All sequences and items, from the rank that has loaded them to the rank that the decision names."""
        sequence_bytes, item_bytes = self._sizes()
        columns = []
        for kind, phase in enumerate((BACKBONE, *self.phases)):
            is_sequence = kind == 0
            rows = np.flatnonzero(self.kept if is_sequence else self.items[:, _PHASE] == kind - 1)
            assignment = decision.assignments[phase]
            rows = rows[assignment.items]
            columns.append(
                np.stack(
                    [
                        np.full(len(rows), kind),
                        rows,
                        (self.example_rank if is_sequence else self.item_rank)[rows],
                        assignment.ranks[assignment.items],
                        (sequence_bytes if is_sequence else item_bytes)[rows],
                    ]
                )
            )
        return Parcels(*np.concatenate(columns, axis=1))


def _lengths(
    examples: Int64Array,
    items: Int64Array,
    segment_lengths: Int64Array,
    example_rank: Int64Array,
    phases: tuple[str, ...],
) -> BatchLengths:
    segments = ItemSegments.counted(segment_lengths, items[:, _NUM_SEGMENTS])
    sequence = examples[:, _TEXT_TOKENS].copy()
    own_rows = np.where(items[:, _READS] == 1, 0, items[:, _NUM_TOKENS])
    np.add.at(sequence, items[:, _EXAMPLE], np.where(items[:, _SHARES] == 1, 0, own_rows - items[:, _PIECES]))
    columns = {}
    for index, phase in enumerate(phases):
        of_phase = np.flatnonzero(items[:, _PHASE] == index)
        rows = items[of_phase]
        own = segments.take(of_phase) if rows[:, _NUM_SEGMENTS].any() else None
        columns[phase] = ItemLengths(rows[:, _EXAMPLE], rows[:, _LENGTH], rows[:, _NUM_TOKENS], own)
    everything = BatchLengths(sequence, examples[:, _TARGETS], example_rank.astype(np.int32), columns)
    return everything.keep(examples[:, _LOADED].astype(np.bool_))
