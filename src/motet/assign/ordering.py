"""Which replica and microbatch of a pipeline takes which example of a step, where the Plan has them dealt out anew.

Loss and gradients of a step are sums over its examples, whichever replica and microbatch computes them; so any example
may go to any microbatch and index of its step, and none to another step. Decided from the seconds of every stage, which
the caller hands in (`StepSeconds`):

1. Microbatches. With caps (OmniBal section 4.1), groups up to them; else as many examples in each, as they come.
2. "intra" (MMScale Algorithm 2, corrected: longest first): replicas get equal counts of even load, by `assign`. The
   paper deals out examples; here, microbatches, which are made even before. With one example each that is the same;
   with more it is faster. With caps, groups are dealt out, and even microbatches tried that keep to the caps. Where
   several replicas of a unit share a microbatch, also such are tried whose examples are alike.
   An example counts with its seconds on all ranks, or on the rank that all of them together take longest on.
3. "inter" (MMScale Algorithm 3, corrected: balance/reordering.py): the microbatches of a replica in the order that
   leaves a 1F1B pipeline the shortest bubbles. Replicas that end before the slowest one does stay as they are.
4. Of all these and what was given, the one whose slowest replica ends first in a 1F1B pipeline, messages aside. Ranks
   that a microbatch reaches at the same time count as the slowest of them; chunks of a rank (interleaved), together.

Encoders in bubbles: fills are places in the step, and what is in the microbatches that they name is free. The order is
decided from the backbone's passes alone. GPipe and zero-bubble schedules are ordered as if they were 1F1B.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np

from motet.assign.groups import batching_in_groups, total_lengths
from motet.assign.pipeline import Batching, assign_batching, batching_as_given
from motet.assign.step import StepAssignment
from motet.balance import assign, order_microbatches, pipeline_makespan
from motet.core.arrays import Float64Array, Int64Array
from motet.core.plan import Plan
from motet.core.workload import BatchLengths
from motet.schedule.layout import Layout, PlannedStage

NUM_ORDERED = 2
"""Ways of dealing out, the best by their seconds as they are, whose microbatches are ordered, beside what was given."""
ASSIGN_BUDGET_S = 0.02
"""At most, for swaps between microbatches; of fewer, in proportion."""


class StepSeconds(Protocol):
    """What the examples of one step take in a pipeline, as a cost model has it: the same on every rank."""

    def of_examples(self) -> Int64Array:
        """Nanoseconds of each example by itself, forward and backward, int64 [num_lanes, num_examples] (`lanes`)."""

    def of_passes(self, assignment: StepAssignment) -> tuple[Float64Array, Float64Array]:
        """Forward and backward, [num_places, num_islands, num_microbatches] each. Ranks that a microbatch reaches at
        the same time are at one place, which takes as long as the slowest of them."""


def given_batching(plan: Plan, batch: BatchLengths) -> Batching:
    """Before anything is moved: groups in their order where the Plan has caps, else examples in theirs."""
    return batching_in_groups(plan, batch) if plan.microbatch_caps else batching_as_given(plan)


def ordered_batching(plan: Plan, batch: BatchLengths, seconds: StepSeconds) -> Batching:
    """The batching of a step by the Plan's `order` and `microbatch_caps`; the same on every rank.

    As predicted here, "intra", "inter" and "both" are no slower than "given" with the same caps.
    Raises UserError for a Plan that does not fit. O(examples * layers) to price a way of dealing out, of which there
    are at most seven, beside `assign` and `order_microbatches`.
    """
    first, step = given_batching(plan, batch), _Step(plan, batch, seconds)
    ways = [_Candidate(step, first)]
    if plan.order in ("intra", "both"):
        dealt = [_Candidate(step, batching) for batching in step.dealt(first)]
        ways += sorted(dealt, key=lambda way: way.slowest_s)[:NUM_ORDERED]
    if plan.order in ("inter", "both"):
        ways = [way.ordered() for way in ways]
    return min(ways, key=lambda way: way.slowest_s).batching


def lanes(layout: Layout) -> list[PlannedStage]:
    """A stage of each rank that an example passes: of one replica of every unit."""
    return list({stage.rank: stage for stage in layout.stages if stage.replica == 0}.values())


@dataclass(frozen=True)
class _Sizes:
    """islands: those parts of a job that do not speak to each other. microbatches: of each. examples: of one of these.
    replicas: of the unit that has most of them, in an island."""

    islands: int
    microbatches: int
    examples: int
    replicas: int

    @property
    def groups(self) -> int:
        """Microbatches of all islands."""
        return self.islands * self.microbatches


class _Step:
    """A batch on a Plan, with its seconds."""

    def __init__(self, plan: Plan, batch: BatchLengths, seconds: StepSeconds) -> None:
        self.plan, self.batch, self.seconds = plan, batch, seconds
        self.layout = layout = Layout(plan)
        self.widest = max(layout.units, key=layout.num_replicas)
        sizes = layout.num_islands, layout.num_microbatches, layout.num_examples
        self.sizes = _Sizes(*sizes, layout.num_replicas(self.widest))
        self.lanes = lanes(layout)

    def dealt(self, first: Batching) -> Iterator[Batching]:
        """Even microbatches, dealt evenly to islands. An example has one weight; two kinds of it are tried."""
        own, seconds = self.sizes, self._of_examples
        replicas = [self.layout.num_replicas(stage.unit) for stage in self.lanes]
        longest = int(np.argmax(seconds.sum(axis=1) / replicas))
        for weights in (seconds.sum(axis=0), seconds[longest]):
            if self.plan.microbatch_caps:
                yield self._dealt(first.microbatch * self.sizes.islands + first.index // self.sizes.examples, weights)
                if self._within_caps(even := self._even(weights, equal_counts=False)):
                    yield self._dealt(even, weights)
            else:
                yield self._dealt(self._even(weights, equal_counts=True), weights)
                if own.replicas > 1:
                    yield self._dealt(self._alike(weights), weights)

    def _even(self, weights: Int64Array, *, equal_counts: bool) -> Int64Array:
        """The microbatch of each example, so that they are even."""
        own = self.sizes
        if own.examples == 1:
            return np.arange(own.groups)
        budget_s = min(ASSIGN_BUDGET_S, 1e-3 + 6e-6 * own.groups)
        return assign(weights, own.groups, equal_counts=equal_counts, time_budget_s=budget_s).ranks.astype(np.int64)

    def _alike(self, weights: Int64Array) -> Int64Array:
        """The microbatch of each example, so that those of one are alike."""
        groups = np.empty(len(weights), dtype=np.int64)
        groups[np.argsort(-weights, kind="stable")] = np.arange(len(weights)) // self.sizes.examples
        return groups

    def _dealt(self, groups: Int64Array, weights: Int64Array) -> Batching:
        """Microbatches, int64 [num_examples], dealt to islands."""
        own = self.sizes
        loads = np.bincount(groups, weights, own.groups).astype(np.int64)
        island, microbatch = np.divmod(assign(loads, own.islands, equal_counts=True).slots[groups], own.microbatches)
        within = np.zeros(len(groups), dtype=np.int64)
        if own.replicas > 1:
            of_group = np.argsort(groups, kind="stable").reshape(own.groups, own.examples)
            within[of_group] = self._within(of_group)
        return Batching(microbatch, island * own.examples + within)

    def _within(self, of_group: Int64Array) -> Int64Array:
        """Where in its microbatch each example stands, [num_groups, num_examples]: replicas get even parts of it."""
        own = self.sizes
        if own.replicas == own.examples:
            return np.broadcast_to(np.arange(own.examples), of_group.shape)
        lanes = [number for number, stage in enumerate(self.lanes) if stage.unit is self.widest]
        weights = self._of_examples[lanes].sum(axis=0)
        rows = (assign(weights[row], own.replicas, equal_counts=True, time_budget_s=0.0).slots for row in of_group)
        return np.stack(list(rows))

    def _within_caps(self, groups: Int64Array) -> bool:
        sizes = {name: total_lengths(self.batch, name) for name in self.plan.microbatch_caps}
        return all(np.bincount(groups, sizes[name]).max() <= cap for name, cap in self.plan.microbatch_caps.items())

    @cached_property
    def _of_examples(self) -> Int64Array:
        return self.seconds.of_examples()

    def passes(self, batching: Batching) -> tuple[Float64Array, Float64Array]:
        return self.seconds.of_passes(assign_batching(self.plan, self.batch, batching))


class _Candidate:
    """A batching, and what each island then takes."""

    def __init__(self, step: _Step, batching: Batching) -> None:
        self.step, self.batching = step, batching
        self.passes_s = step.passes(batching)
        self.island_s = [self._makespan_s(island) for island in range(step.sizes.islands)]

    @property
    def slowest_s(self) -> float:
        return max(self.island_s)

    def ordered(self) -> _Candidate:
        """With the microbatches of the slowest islands in their best order, as long as that makes the step faster."""
        found, slowest_s = copy(self), 0.0
        found.island_s = list(self.island_s)
        island, microbatch = self.batching.index // self.step.sizes.examples, self.batching.microbatch.copy()
        for number in sorted(range(len(self.island_s)), key=lambda number: -self.island_s[number]):
            if self.island_s[number] <= slowest_s:
                break
            order = order_microbatches(*self._seconds(number), len(self.passes_s[0]))
            found.island_s[number] = self._makespan_s(number, order)
            slowest_s = max(slowest_s, found.island_s[number])
            own = island == number
            microbatch[own] = np.argsort(order)[microbatch[own]]
        found.batching = Batching(microbatch, self.batching.index)
        return found

    def _makespan_s(self, island: int, order: Int64Array | None = None) -> float:
        return pipeline_makespan(*self._seconds(island), len(self.passes_s[0]), order)

    def _seconds(self, island: int) -> tuple[Float64Array, Float64Array]:
        forward, backward = self.passes_s
        return forward[:, island], backward[:, island]
