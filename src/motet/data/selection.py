"""Which examples of manifests are used, and why others are left out: by the indexes and the options alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from motet.core.arrays import BoolArray, IndexArray, Int32Array, Int64Array
from motet.core.errors import UserError
from motet.core.words import counted_words
from motet.core.workload import ItemLengths
from motet.data.example_lengths import ExampleLengths
from motet.data.index_entries import TextEncoder
from motet.data.indexes import Indexes
from motet.data.item_phases import ItemPhases
from motet.data.left_out import MAX_NAMED, LeftOut, LeftOutExample
from motet.data.truncation import Truncated, num_kept_tokens, truncated

_SCAN_EXAMPLES = 1 << 16

LengthRule = Literal["drop", "truncate", "error"]
"""What becomes of an example that is longer than `max_sequence_length`."""


class Selection(NamedTuple):
    """The examples that are used.

    kept: their numbers through all manifests, ascending, [num_examples]; None: all are used.
    """

    kept: Int32Array | Int64Array | None
    truncated: Truncated
    left_out: LeftOut


@dataclass(frozen=True, eq=False)
class Selector:
    """What decides which examples are used: those without a bad or refused file, and not longer than allowed.

    Example: `Selector(indexes, phases, tokenizer, max_sequence_length=4096, too_long="truncate").select()`.
    """

    indexes: Indexes
    phases: ItemPhases
    text: TextEncoder
    max_sequence_length: int | None
    too_long: LengthRule

    def select(self) -> Selection:
        """Read all lengths. Raises UserError for an example that is too long where that is an error, and for rows that
        are to be added and not equally many.
        """
        usable = np.ones(len(self.indexes), dtype=bool)
        named, num_bad = self._leave_out_bad(usable)
        refused, dropped, cuts = self._scan(usable)
        # The first ones of each reason by name.
        named += [self._name_refused(number) for number in refused[:MAX_NAMED].tolist()]
        too_long_named = [self._name_too_long(number) for number in dropped[:MAX_NAMED]]
        if self.too_long == "error" and too_long_named:
            raise UserError(
                f'{too_long_named[0]} (data.too_long = "error"; {len(dropped):,} of {len(usable):,} examples are '
                'too long): shorten them, raise the bound, or set data.too_long to "truncate" or "drop"'
            )
        named += too_long_named
        left_out = LeftOut(num_bad, len(refused), len(dropped), len(cuts), tuple(named))
        kept: Int32Array | Int64Array | None = None
        if not usable.all():
            kept = np.flatnonzero(usable)
            kept = kept.astype(np.int32) if len(usable) <= np.iinfo(np.int32).max else kept
        return Selection(kept, Truncated(*cuts.T.copy()), left_out)

    def _leave_out_bad(self, usable: BoolArray) -> tuple[list[LeftOutExample], int]:
        """Examples whose files were bad when the index was built: the first by name, and how many there are."""
        named: list[LeftOutExample] = []
        num_bad = 0
        for start, index in zip(self.indexes.starts, self.indexes):
            for bad in index.bad_examples():
                usable[int(start) + bad.example] = False
                num_bad += 1
                if num_bad <= MAX_NAMED:
                    named.append(LeftOutExample(index.where(bad.example), bad.path, bad.reason))
        return named, num_bad

    def _scan(self, usable: BoolArray) -> tuple[Int64Array, Int64Array, Int64Array]:
        """The numbers of usable examples that a transform refuses, and of those that are too long, which are usable no
        more, and what is left of those that are truncated (`_cuts`). In parts, to bound the memory.
        """
        refused, dropped = [np.zeros(0, dtype=np.int64)], [np.zeros(0, dtype=np.int64)]
        cuts = [np.zeros((0, 4), dtype=np.int64)]
        for start in range(0, len(usable), _SCAN_EXAMPLES):
            numbers = start + np.flatnonzero(usable[start : start + _SCAN_EXAMPLES])
            columns = self.indexes.columns(numbers)
            is_refused = self._refused(columns)
            if "sum" in self.phases.combine.values():
                self._check_added(numbers[~is_refused])
            if any(modality.max_turn for modality in self.phases.modalities.values()):
                places = np.flatnonzero(~is_refused)
                of_rest = self.indexes.columns(numbers[places])
                is_refused[places] = self._wrong_turns(of_rest)
            usable[numbers[is_refused]] = False
            refused.append(numbers[is_refused])
            if self.max_sequence_length is not None:
                _, sequence, rows = self.phases.item_lengths(columns)
                is_too_long = ~is_refused & (sequence > self.max_sequence_length)
                if self.too_long == "truncate":
                    places = np.flatnonzero(is_too_long)
                    cuts.append(self._cuts(numbers, places, columns, rows, self.max_sequence_length))
                    is_too_long &= ~np.isin(numbers, cuts[-1][:, 0])
                usable[numbers[is_too_long]] = False
                dropped.append(numbers[is_too_long])
        return np.concatenate(refused), np.concatenate(dropped), np.concatenate(cuts)

    def _check_added(self, numbers: Int64Array) -> None:
        """Raise UserError for the first of some examples with an item whose rows are added and not equally many."""
        items, _, _ = self.phases.item_lengths(self.indexes.columns(numbers))
        for phase in filter(self.phases.is_added, items):
            modality = self.phases.modalities[phase].transform.modality
            first = self.phases.readers[modality][0]
            if (unequal := np.flatnonzero(items[phase].num_tokens != items[first].num_tokens)).size:
                item = unequal[0]
                index, example = self.indexes.at(int(numbers[items[phase].example[item]]))
                counts = (
                    f"{counted_words(items[first].num_tokens[item], 'row')} and {phase} "
                    f"{items[phase].num_tokens[item]:,}"
                )
                raise UserError(
                    f'model.combine.{modality} = "sum" adds the rows of {first} and {phase}, but of an item of '
                    f"{index.where(example)} {first} makes {counts}; give them transforms and projectors that make as "
                    'many, or set it to "rows".'
                )

    def _cuts(
        self, numbers: Int64Array, places: IndexArray, columns: ExampleLengths, rows: Int64Array, max_rows: int
    ) -> Int64Array:
        """What is left of examples that are too long: number, num_tokens, num_targets, num_items, int64 [n, 4].

        places: of the examples that are too long in `numbers`. Those of which nothing learned is left are not returned.
        O(tokens of these examples), which are read from the index.
        """
        first = np.cumsum(columns.num_items) - columns.num_items
        item_tokens: dict[str, frozenset[int]] = {}
        cuts = []
        for place in places.tolist():
            index, example = self.indexes.at(int(numbers[place]))
            text = index.tokens(example)
            for modality in set(text.media) - item_tokens.keys():
                item_tokens[modality] = self.text.item_tokens(modality)
            of_items = frozenset[int]().union(*(item_tokens[modality] for modality in text.media))
            own_rows = rows[first[place] : first[place] + columns.num_items[place]]
            if num_tokens := num_kept_tokens(text, own_rows, of_items, max_rows):
                left = truncated(text, num_tokens)
                cuts.append((int(numbers[place]), num_tokens, int(left.targets[1:].sum()), len(left.media)))
        return np.array(cuts, dtype=np.int64).reshape(-1, 4)

    def _name_refused(self, number: int) -> LeftOutExample:
        index, example = self.indexes.at(number)
        for ref in self.indexes.told(index.media_refs(example)):
            for transform in (self.phases.modalities[phase].transform for phase in self.phases.of_item(ref)):
                if ref.raw is not None and not transform.accepts(np.array([ref.raw], dtype=np.int64))[0]:
                    return LeftOutExample(index.where(example), ref.name, transform.refusal(ref.raw))
        columns = self.indexes.columns(np.array([number]))
        for name, column in self.phases.item_lengths(columns)[0].items():
            if most := self.phases.modalities[name].max_turn:
                rows = int(column.num_tokens[_wrong_items(column, most)][0])
                reason = (
                    f"the turn before what {name} is to make has {counted_words(rows, 'row')}, more than "
                    f"model.generators.{name}.max_turn = {most:,}"
                    if rows
                    else f"no turn that the tokenizer's chat template tells apart is before what {name} is to make"
                )
                return LeftOutExample(index.where(example), "", reason)
        raise ValueError(f"no item of example {number} is refused")

    def _name_too_long(self, number: int) -> LeftOutExample:
        columns = self.indexes.columns(np.array([number]))
        num_tokens = int(self.phases.item_lengths(columns)[1][0])
        index, example = self.indexes.at(number)
        reason = f"takes {num_tokens:,} tokens, more than max_sequence_length = {self.max_sequence_length:,}"
        if self.too_long == "truncate":
            reason += ", and nothing that is learned is within it"
        return LeftOutExample(index.where(example), "", reason)

    def _wrong_turns(self, columns: ExampleLengths) -> BoolArray:
        """Which examples have an item that would be made of a turn that is too long, or of none, bool [num_examples].

        No item of theirs is refused by its transform.
        """
        wrong = np.zeros(len(columns.num_tokens), dtype=bool)
        for name, column in self.phases.item_lengths(columns)[0].items():
            if most := self.phases.modalities[name].max_turn:
                wrong[column.example[_wrong_items(column, most)]] = True
        return wrong

    def _refused(self, columns: ExampleLengths) -> BoolArray:
        """Which examples have an item that its transform refuses, bool [num_examples]."""
        refused = np.zeros(len(columns.num_tokens), dtype=bool)
        for modality in self.phases.modalities.values():
            items = self.phases.items_of(columns, modality)
            if len(items):
                refused[columns.example[items[~modality.transform.accepts(columns.raw[items])]]] = True
        return refused


def _wrong_items(items: ItemLengths, most: int) -> BoolArray:
    """Which items would be made of a turn of more than `most` rows, or of none, bool [num_items]."""
    wrong: BoolArray = (items.num_tokens == 0) | (items.num_tokens > most)
    return wrong
