"""Columns of several indexes, gathered for chosen examples."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from motet.core.arrays import Int64Array
from motet.core.modalities import IMAGE, modalities
from motet.data.index import Index
from motet.data.media import IN_ANSWER, OF_SEVERAL
from motet.data.truncation import Truncated


@dataclass(frozen=True, eq=False)
class ExampleLengths:
    """The indexes' columns of chosen examples.

    num_tokens, num_targets, num_items: [num_examples]; columns of `index.LengthColumns`.
    example:  int64 [num_items], the position of each item's example among the chosen ones; ascending.
    modality: int8 [num_items], as `index.LengthColumns` has them.
    raw:      int64 [num_items, 2], as headers hold it.
    turn:     int64 [num_items, 3], as `index.LengthColumns` has it.
    """

    num_tokens: Int64Array
    num_targets: Int64Array
    num_items: Int64Array
    example: Int64Array
    modality: NDArray[np.int8]
    raw: Int64Array
    turn: Int64Array

    @classmethod
    def of(
        cls, indexes: list[Index], starts: Int64Array, numbers: Int64Array, *, tells_several: bool = False
    ) -> ExampleLengths:
        """Gather examples int64 [num_examples], numbered through all indexes. starts: each index's first number.

        tells_several: `raw` has `OF_SEVERAL` of images beside others.
        """
        # 1. Examples: their columns, and the first item of each in its index.
        index_of = np.searchsorted(starts, numbers, side="right") - 1
        num_tokens, num_targets, num_items = (np.zeros(len(numbers), dtype=np.int64) for _ in range(3))
        first_item = np.zeros(len(numbers), dtype=np.int64)
        for i, index in enumerate(indexes):
            examples = np.flatnonzero(index_of == i)
            rows = numbers[examples] - int(starts[i])
            columns = index.lengths
            num_tokens[examples], num_targets[examples] = columns.num_tokens[rows], columns.num_targets[rows]
            first_item[examples] = columns.item_offsets[rows]
            num_items[examples] = columns.item_offsets[rows + 1] - columns.item_offsets[rows]
        # 2. The row of each item in its index: the first item of its example + its position in the example.
        example = np.repeat(np.arange(len(numbers)), num_items)
        item = np.arange(len(example)) - np.repeat(np.cumsum(num_items) - num_items - first_item, num_items)
        # 3. Items: their columns.
        modality = np.zeros(len(item), dtype=np.int8)
        raw, turn = (np.zeros((len(item), width), dtype=np.int64) for width in (2, 3))
        for i, index in enumerate(indexes):
            items = np.flatnonzero(index_of[example] == i)
            modality[items] = index.lengths.modality[item[items]]
            for into, columns_of in ((raw, index.lengths.raw), (turn, index.lengths.turn)):
                for axis, column in enumerate(columns_of):
                    into[items, axis] = column[item[items]]
        if tells_several:
            images = np.flatnonzero(modality % IN_ANSWER == modalities().index(IMAGE))
            counts = np.bincount(example[images], minlength=len(numbers))
            raw[images, 1] += OF_SEVERAL * (counts[example[images]] > 1)
        return cls(num_tokens, num_targets, num_items, example, modality, raw, turn)

    def turn_rows(self, rows: Int64Array) -> Int64Array:
        """The rows of the turn before that of each item, int64 [num_items]; 0 where there is none.

        rows: what each item takes in the sequence, int64 [num_items].
        """
        first = (np.cumsum(self.num_items) - self.num_items)[self.example] + self.turn[:, 1]
        ends = np.concatenate([[0], np.cumsum(rows)])
        of_turns: Int64Array = self.turn[:, 0] + ends[first + self.turn[:, 2]] - ends[first]
        return of_turns

    def truncated(self, numbers: Int64Array, cuts: Truncated) -> ExampleLengths:
        """The columns of what is left of the same examples, int64 [num_examples]."""
        places, of_cut = cuts.find(numbers)
        if not len(places):
            return self
        num_tokens, num_targets, num_items = (
            column.copy() for column in (self.num_tokens, self.num_targets, self.num_items)
        )
        num_tokens[places], num_targets[places] = cuts.num_tokens[of_cut], cuts.num_targets[of_cut]
        num_items[places] = cuts.num_items[of_cut]
        first = np.cumsum(self.num_items) - self.num_items
        is_kept = np.arange(len(self.example)) - first[self.example] < num_items[self.example]
        of_items = (column[is_kept] for column in (self.example, self.modality, self.raw, self.turn))
        return ExampleLengths(num_tokens, num_targets, num_items, *of_items)
