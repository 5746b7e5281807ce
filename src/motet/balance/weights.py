"""One integer weight for each item, from the given lengths and a cost."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from motet.balance.checks import checked_integers
from motet.balance.costs import Cost, Packed
from motet.core.arrays import Int64Array
from motet.core.errors import ArgumentError
from motet.core.item_segments import ItemSegments

LengthsLike = ArrayLike
"""int [num_items]; with several lengths an item, [num_items, max_parts] padded with zeros, or a list of sequences."""


def item_weights(lengths: LengthsLike, cost: Cost) -> Int64Array:
    """The weight of each item under `cost`, int64 [num_items]; several lengths of an item weigh the sum of each.

    So an item of frames a and b has the quadratic cost a^2 + b^2, not (a + b)^2. Raises ArgumentError for lengths that
    are negative or not whole, for sums that do not fit int64, and for several lengths with a padded cost, which pads
    whole items to one length.
    """
    if isinstance(lengths, (list, tuple)) and any(np.ndim(parts) == 1 for parts in lengths[:1]):
        segments = ItemSegments.of([checked_integers(parts, f"lengths[{item}]") for item, parts in enumerate(lengths)])
    else:
        try:
            array = np.asarray(lengths)
        except ValueError as error:
            raise ArgumentError(f"lengths cannot be read as an array of numbers and sequences: {error}") from error
        if array.ndim != 2:
            return cost.weights(checked_integers(array, "lengths"))
        flat = checked_integers(array, "lengths", 2).ravel()
        segments = ItemSegments(flat, np.arange(len(array) + 1) * array.shape[1])
    if not isinstance(cost, Packed):
        raise ArgumentError(f"lengths has several lengths an item; {cost} takes one.")
    return segments.summed(cost.weights(segments.length))
