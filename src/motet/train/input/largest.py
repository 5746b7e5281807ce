"""Which steps of a run keep most memory, known before the first one: from lengths and the order of examples alone.

What a rank keeps follows from how a step is decided, so the steps are to be decided as training will. Of a run with few
steps, all are taken, and the largest microbatch among them is a bound: files that cannot be used only make one smaller.
Of a run with many steps, those are taken that keep most as a whole, or by their largest example. That is a sample:
balancing might place the items of another step worse.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import numpy as np

from motet.core.arrays import Float64Array, Int64Array
from motet.core.workload import BatchLengths
from motet.data.order import ExampleOrder, StepExamples

MAX_LARGEST_STEPS = 32
"""Steps that are taken, at the most."""
_MAX_EXAMPLES, _MAX_STEPS = 1 << 20, 1 << 14
"""Examples and steps of the run, from its first on, among which large steps are looked for."""
_CHUNK = 1 << 16
"""Examples, or groups of them, whose lengths are read at a time."""

LengthsOf = Callable[[Int64Array], BatchLengths]
"""Numbers of examples, int64 [n] -> their lengths."""


def largest_steps(
    num_steps: int, batch_size: int, order: ExampleOrder, held: Mapping[str, int], lengths_of: LengthsOf
) -> list[StepExamples]:
    """The steps of a run, in their order, among which the largest microbatch is looked for; all if they are few.

    batch_size: of a step, as `order` takes it. A listed order may end before num_steps.
    held: by module, what a unit of an item's length keeps for backward (`cost.memory.held_elements`).
    O(examples), for at most about a million examples.
    """
    steps = list(_steps(num_steps, batch_size, order))
    if len(steps) <= MAX_LARGEST_STEPS:
        return steps
    totals, largest = np.zeros((2, len(steps)))
    a_chunk = max(_CHUNK // batch_size, 1)
    for first in range(0, len(steps), a_chunk):
        chunk = steps[first : first + a_chunk]
        by_example = _held_by_example(lengths_of(np.concatenate([step.ids for step in chunk])), held)
        starts = np.cumsum([0, *(len(step.ids) for step in chunk[:-1])])
        totals[first : first + a_chunk] = np.add.reduceat(by_example, starts)
        largest[first : first + a_chunk] = np.maximum.reduceat(by_example, starts)
    most = [np.argsort(-column, kind="stable")[: MAX_LARGEST_STEPS // 2].tolist() for column in (totals, largest)]
    return [steps[number] for number in sorted({number for numbers in most for number in numbers})]


def _steps(num_steps: int, batch_size: int, order: ExampleOrder) -> Iterator[StepExamples]:
    """The first steps of a run, as many as are looked at."""
    position = 0
    for number in range(min(num_steps, _MAX_STEPS)):
        step = order.step(position, batch_size)
        position += len(step.ids)
        if not len(step.ids) or (position > _MAX_EXAMPLES and number >= MAX_LARGEST_STEPS):
            return
        yield step


def _held_by_example(lengths: BatchLengths, held: Mapping[str, int]) -> Float64Array:
    total = np.zeros(lengths.num_examples)
    for name, each in held.items():
        items = lengths.of(name)
        total += each * np.bincount(items.example, items.length, lengths.num_examples)
    return total
