"""Where an example that is too long is cut, and how long it is then: `data.too_long = "truncate"`.

An example is cut behind the last learned token within the bound, as nothing behind it is learned from. It is never cut
between the tokens of one item (its marks and its rows), so that an item is whole or gone. This is a pure function of
the example, so lengths are known before anything is loaded, and are the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

import numpy as np

from motet.core.arrays import BoolArray, Int64Array
from motet.core.example import TokenSequence


@dataclass(frozen=True, eq=False)
class Truncated:
    """The examples that are cut, and what is left of each.

    numbers: int64 [num_truncated], ascending. num_tokens, num_targets, num_items: int64 [num_truncated].

    Example:
        >>> cut = Truncated(*np.array([[2, 7], [10, 20], [3, 4], [0, 1]]))
        >>> cut.find(np.array([7, 5, 2]))
        (array([0, 2]), array([1, 0]))
    """

    numbers: Int64Array
    num_tokens: Int64Array
    num_targets: Int64Array
    num_items: Int64Array

    def find(self, numbers: Int64Array) -> tuple[Int64Array, Int64Array]:
        """The places in `numbers` of the examples that are cut, and their places here, int64 [n] each. O(n log)."""
        if not len(self.numbers):
            return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
        here = np.minimum(np.searchsorted(self.numbers, numbers), len(self.numbers) - 1)
        places = np.flatnonzero(self.numbers[here] == numbers)
        return places, here[places]


def num_kept_tokens(text: TokenSequence, item_rows: Int64Array, item_tokens: Set[int], max_rows: int) -> int:
    """How many tokens of an example are kept, at most all; 0 if nothing that is learned is within the bound.

    item_rows:   rows of the sequence that each item takes, int64 [num_items].
    item_tokens: ids of the tokens that stand for items and around them, which are not parted.
    max_rows:    the bound of the sequence, rows of items included.
    O(num_tokens).
    """
    rows = np.ones(len(text.tokens), dtype=np.int64)
    rows[text.media_positions] = item_rows
    is_end = text.targets & (np.cumsum(rows) <= max_rows)
    # Nothing predicts the first token.
    is_end[:1] = False
    is_end[:-1] &= ~_is_inside_item(text, item_tokens)
    ends = np.flatnonzero(is_end)
    return int(ends[-1]) + 1 if len(ends) else 0


def truncated(text: TokenSequence, num_tokens: int) -> TokenSequence:
    """The first tokens of an example, with the items among them."""
    num_items = int(np.searchsorted(text.media_positions, num_tokens))
    return TokenSequence(
        text.tokens[:num_tokens],
        text.targets[:num_tokens],
        text.media[:num_items],
        text.media_positions[:num_items],
        turns=None if text.turns is None else text.turns[:num_items],
    )


def _is_inside_item(text: TokenSequence, item_tokens: Set[int]) -> BoolArray:
    """Whether a token and the next one belong to one run of tokens of items, bool [num_tokens - 1]."""
    of_item = np.isin(text.tokens, np.array(sorted(item_tokens), dtype=np.int64))
    of_item[text.media_positions] = True
    return of_item[:-1] & of_item[1:]
