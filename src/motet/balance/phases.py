"""The phases of a microbatch in one unit, seconds, and the link between ranks: all that `choose` decides from."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from motet.balance.backend import Backend
from motet.balance.checks import checked_integers, checked_ranks
from motet.balance.costs import Cost, Packed
from motet.balance.placement import assign, score
from motet.core.arrays import Int32Array, Int64Array
from motet.core.assignment import Assignment
from motet.core.errors import ArgumentError

NS_PER_S = 10**9
_JOINT_TOTAL = 2**50
"""Joint costs are quantised so that the largest phase adds up to this: sums stay exact in float64 and in int64."""


@dataclass(frozen=True, eq=False)
class Phase:
    """One phase of a microbatch: its items, what they cost, and what it takes to compute them apart from their example.

    lengths:          int64 [num_items], of which `cost` is taken: lengths, or any work that an item is.
    owner:            int64 [num_items], the example that each item belongs to; the backbone's items are the examples.
    seconds_per_cost: seconds of a rank, forward and backward, for a unit of the cost.
    output_bytes:     int64 [num_items], what an item's output takes on its way to another rank; None where nothing ever
                      moves, as in the backbone.
    num_exchanges:    how often those bytes are sent: 2, forward and as a gradient back, or 1 where nothing trains.
    """

    name: str
    lengths: Int64Array
    cost: Cost
    owner: Int64Array
    seconds_per_cost: float
    output_bytes: Int64Array | None = None
    num_exchanges: int = 2

    def compute_ns(self, assignment: Assignment) -> int:
        """Nanoseconds of the busiest rank."""
        return round(int(assignment.loads.max(initial=0)) * self.seconds_per_cost * NS_PER_S)


def scored_phase(phase: Phase, ranks: Int32Array, num_ranks: int) -> Assignment:
    """The items of a phase on the given ranks, int32 [num_items]."""
    return score(ranks, phase.lengths, num_ranks, phase.cost)


def follow(phase: Phase, backbone: Assignment) -> Assignment:
    """The items of a phase on the ranks that run their examples, in the order of the examples' slots."""
    ranks, order = backbone.follow(phase.owner)
    return replace(scored_phase(phase, ranks, backbone.num_ranks), items=order)


def assign_apart(
    lengths: Int64Array,
    cost: Cost,
    owner: Int64Array,
    backbone: Assignment,
    backend: Backend = "native",
) -> Assignment:
    """The items of an encoder balanced by themselves, so that few outputs leave the rank that runs their example.

    owner: int64 [num_items], the example of each item. Packed items start on the rank of their example, and only the
    excess leaves. Batches of padded items are made of like lengths from everywhere, so nearly all leave.
    """
    home = backbone.ranks[owner] if isinstance(cost, Packed) else None
    return assign(lengths, backbone.num_ranks, cost, home=home, backend=backend)


def joint_costs(phases: Sequence[Phase]) -> tuple[Int64Array, float]:
    """Costs of the examples in one unit, int64 [num_examples, num_phases], and the seconds of the unit.

    An item of a padded phase counts as it would by itself.
    """
    num_examples = len(phases[0].lengths)
    weights = [phase.cost.alone(phase.lengths) for phase in phases]
    totals_s = [int(w.sum()) * phase.seconds_per_cost for w, phase in zip(weights, phases, strict=True)]
    unit_s = max(totals_s) / _JOINT_TOTAL or 1.0
    columns = [
        # Whole numbers that add up to less than 2^53: the order of the sums does not matter.
        np.bincount(phase.owner, np.rint(w * (phase.seconds_per_cost / unit_s)), num_examples)
        for w, phase in zip(weights, phases, strict=True)
    ]
    return np.stack(columns, axis=1).astype(np.int64), unit_s


def check_phases(phases: Sequence[Phase]) -> None:
    """Raises ArgumentError for phases that do not belong to one microbatch, the backbone first, or are malformed."""
    if not phases:
        raise ArgumentError("phases is empty; it must hold the backbone at least.")
    num_examples = len(phases[0].lengths)
    if not np.array_equal(phases[0].owner, np.arange(num_examples)):
        raise ArgumentError(f"owner of {phases[0].name!r} must be 0, 1, 2, ...: the first phase's items are examples.")
    for phase in phases:
        num_items = len(checked_integers(phase.lengths, f"lengths of {phase.name!r}"))
        phase.cost.weights(phase.lengths)  # raises where they do not fit int64
        checked_ranks(phase.owner, f"owner of {phase.name!r}", num_items, num_examples)
        if phase.output_bytes is not None and len(phase.output_bytes) != num_items:
            raise ArgumentError(
                f"output_bytes of {phase.name!r} has {len(phase.output_bytes)} entries; it must have {num_items}."
            )
        if not 0 <= phase.seconds_per_cost < math.inf:
            raise ArgumentError(
                f"seconds_per_cost of {phase.name!r} is {phase.seconds_per_cost}; it must be finite and at least 0."
            )
