"""Conditions of different lengths, packed and padded: the rows that generators are given of turns."""

from __future__ import annotations

import numpy as np
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from motet.core.arrays import Int64Array


def in_rows(conditions: Tensor, counts: Int64Array) -> Tensor:
    """Packed conditions item by item, with rows of zeros behind: [num_items, the most rows, condition_dim].

    conditions: [sum(counts), condition_dim]. counts: int64 [num_items], at least one.
    """
    return pad_sequence(list(conditions.split(counts.tolist())), batch_first=True)


def numbers_in(counts: Int64Array) -> Int64Array:
    """The number of each packed row in its item, int64 [sum(counts)]."""
    return np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
