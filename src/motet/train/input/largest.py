"""Which steps of a run keep most memory, known before the first one: from lengths and the order of examples alone.

What a rank keeps follows from how a step is decided, so the steps are to be decided as training will. Of a run with few
steps, all are taken, and the largest microbatch among them is a bound: files that cannot be used only make one smaller.
Of a run with many steps, those are taken that keep most as a whole, or by their largest example. That is a sample:
balancing might place the items of another step worse.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from motet.core.arrays import Float64Array, Int64Array
from motet.core.workload import BatchLengths
from motet.data.order import GlobalOrder, MixedOrder

MAX_LARGEST_STEPS = 32
"""Steps that are taken, at the most."""
_MAX_SCREENED = 1 << 20
"""Examples of the run, from its first on, among which large steps are looked for."""
_CHUNK = 1 << 16
"""Examples whose lengths are read at a time."""

LengthsOf = Callable[[Int64Array], BatchLengths]
"""Numbers of examples, int64 [n] -> their lengths."""


def largest_steps(
    num_steps: int,
    batch_size: int,
    order: GlobalOrder | MixedOrder,
    held: Mapping[str, int],
    lengths_of: LengthsOf,
) -> list[int]:
    """The steps of a run, ascending, among which the largest microbatch is looked for; all if they are few.

    held: by module, what a unit of an item's length keeps for backward (`cost.memory.held_elements`).
    O(examples), for at most about a million examples.
    """
    if num_steps <= MAX_LARGEST_STEPS:
        return [*range(num_steps)]
    num_screened = max(min(num_steps, _MAX_SCREENED // batch_size), MAX_LARGEST_STEPS)
    totals, largest = np.zeros((2, num_screened))
    a_chunk = max(_CHUNK // batch_size, 1)
    for first in range(0, num_screened, a_chunk):
        stop = min(first + a_chunk, num_screened)
        lengths = lengths_of(order.take(first * batch_size, (stop - first) * batch_size))
        by_step = _held_by_example(lengths, held).reshape(stop - first, batch_size)
        totals[first:stop], largest[first:stop] = by_step.sum(axis=1), by_step.max(axis=1)
    most = [np.argsort(-column, kind="stable")[: MAX_LARGEST_STEPS // 2].tolist() for column in (totals, largest)]
    return sorted({step for steps in most for step in steps})


def _held_by_example(lengths: BatchLengths, held: Mapping[str, int]) -> Float64Array:
    total = np.zeros(lengths.num_examples)
    for name, each in held.items():
        items = lengths.of(name)
        total += each * np.bincount(items.example, items.length, lengths.num_examples)
    return total
