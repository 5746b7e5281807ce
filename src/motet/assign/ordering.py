"""The replica and microbatch of each example of a pipeline's step, where the Plan's `order` is not "given".

The loss and the gradients of a step are sums over its examples. So an example may go to any microbatch and index of its
step, but to no other step. The decision uses the seconds of every stage, which the caller passes in (`StepSeconds`).

1. Make microbatches. With caps they are groups under the caps (OmniBal section 4.1). Without caps each takes the same
   number of examples, in the given order.
2. "intra" (MMScale Algorithm 2, corrected: longest first): `assign` gives islands equal counts of microbatches, of even
   load. The paper assigns single examples; here, examples are first put into microbatches of even load, and these are
   assigned. The two are the same with one example a microbatch; with more, this is faster.
   With caps, the groups are assigned; microbatches of even load are tried too if they keep to the caps.
   If several replicas of a unit share a microbatch, microbatches of examples with like load are tried too.
   The load of an example is its seconds on all ranks, or its seconds on the busiest rank; both are tried.
3. "inter" (MMScale Algorithm 3, corrected: balance/reordering.py): the microbatches of an island get the order that
   leaves the shortest bubbles in a 1F1B pipeline. Islands that end before the slowest one keep their order.
4. Take the candidate whose slowest island ends first in a 1F1B pipeline, the given batching included. Messages take no
   time here. Ranks that a microbatch reaches at the same time count as the slowest of them; the chunks of a rank
   (interleaved) count together.

Encoders in bubbles: a fill names a microbatch by its number in the step, so any examples may be in it. The backbone's
passes alone decide the order. GPipe and zero-bubble schedules are ordered as if they were 1F1B.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np

from motet.assign.groups import batching_in_groups
from motet.assign.pipeline import Batching, assign_batching, batching_as_given
from motet.assign.step import StepAssignment
from motet.balance import assign, order_microbatches, pipeline_makespan
from motet.core.arrays import Float64Array, Int64Array
from motet.core.plan import Plan
from motet.core.workload import BatchLengths, total_lengths
from motet.schedule.layout import Layout, PlannedStage

NUM_ORDERED = 2
"""The number of batchings of step 2, fastest first, that step 3 orders. The given batching is ordered too."""
ASSIGN_BUDGET_S = 0.02
"""The limit of `assign`'s time for one batching; fewer microbatches get proportionally less."""


class StepSeconds(Protocol):
    """Prices the examples and passes of one step in a pipeline by a cost model; the same on every rank."""

    def of_examples(self) -> Int64Array:
        """Nanoseconds of each example by itself, forward and backward, int64 [num_lanes, num_examples] (`lanes`)."""

    def of_passes(self, assignment: StepAssignment) -> tuple[Float64Array, Float64Array]:
        """Seconds of forward and of backward passes, [num_depths, num_islands, num_microbatches] each.

        Ranks that a microbatch reaches at the same time have one depth, which takes as long as the slowest of them.
        """


def given_batching(plan: Plan, batch: BatchLengths) -> Batching:
    """The batching of step 1: groups in their order if the Plan has caps, else examples in the given order."""
    return batching_in_groups(plan, batch) if plan.microbatch_caps else batching_as_given(plan)


def ordered_batching(plan: Plan, batch: BatchLengths, seconds: StepSeconds) -> Batching:
    """The batching of a step by the Plan's `order` and `microbatch_caps`; the same on every rank.

    In the time predicted here, "intra", "inter" and "both" are no slower than "given" with the same caps.
    Raises UserError for a Plan that does not fit. O(num_examples * num_layers) for each of at most seven candidates,
    plus `assign` and `order_microbatches`.
    """
    given, step = given_batching(plan, batch), _Step(plan, batch, seconds)
    candidates = [_Candidate(step, given)]
    if plan.order in ("intra", "both"):
        balanced = [_Candidate(step, batching) for batching in step.balanced(given)]
        candidates += sorted(balanced, key=lambda candidate: candidate.slowest_s)[:NUM_ORDERED]
    if plan.order in ("inter", "both"):
        candidates = [candidate.ordered() for candidate in candidates]
    return min(candidates, key=lambda candidate: candidate.slowest_s).batching


def lanes(layout: Layout) -> list[PlannedStage]:
    """One stage of each rank that an example passes through, in the first replica of every unit."""
    return list({stage.rank: stage for stage in layout.stages if stage.replica == 0}.values())


@dataclass(frozen=True)
class _Sizes:
    """The numbers of islands, of microbatches of an island, and of examples of one of these microbatches.

    replicas: in an island, of the unit that has most.
    """

    islands: int
    microbatches: int
    examples: int
    replicas: int

    @property
    def groups(self) -> int:
        """Microbatches of all islands."""
        return self.islands * self.microbatches


class _Step:
    """A step of a Plan, with its seconds. A group here is the content of one microbatch of one island."""

    def __init__(self, plan: Plan, batch: BatchLengths, seconds: StepSeconds) -> None:
        self.plan, self.batch, self.seconds = plan, batch, seconds
        self.layout = layout = Layout(plan)
        self.widest = max(layout.units, key=layout.num_replicas)
        sizes = layout.num_islands, layout.num_microbatches, layout.num_examples
        self.sizes = _Sizes(*sizes, layout.num_replicas(self.widest))
        self.lanes = lanes(layout)

    def balanced(self, given: Batching) -> Iterator[Batching]:
        """The batchings of step 2: one or two for each of two weights of an example."""
        replicas = [self.layout.num_replicas(stage.unit) for stage in self.lanes]
        busiest = int(np.argmax(self._example_ns.sum(axis=1) / replicas))
        for weights in (self._example_ns.sum(axis=0), self._example_ns[busiest]):
            if self.plan.microbatch_caps:
                given_groups = given.microbatch * self.sizes.islands + given.index // self.sizes.examples
                yield self._over_islands(given_groups, weights)
                if self._keeps_to_caps(even := self._even_groups(weights, equal_counts=False)):
                    yield self._over_islands(even, weights)
            else:
                yield self._over_islands(self._even_groups(weights, equal_counts=True), weights)
                if self.sizes.replicas > 1:
                    yield self._over_islands(self._like_groups(weights), weights)

    def _even_groups(self, weights: Int64Array, *, equal_counts: bool) -> Int64Array:
        """The group of each example, int64 [num_examples], so that groups have even loads."""
        sizes = self.sizes
        if sizes.examples == 1:
            return np.arange(sizes.groups)
        budget_s = min(ASSIGN_BUDGET_S, 1e-3 + 6e-6 * sizes.groups)
        return assign(weights, sizes.groups, equal_counts=equal_counts, time_budget_s=budget_s).ranks.astype(np.int64)

    def _like_groups(self, weights: Int64Array) -> Int64Array:
        """The group of each example, int64 [num_examples], so that the examples of a group have like weights."""
        groups = np.empty(len(weights), dtype=np.int64)
        groups[np.argsort(-weights, kind="stable")] = np.arange(len(weights)) // self.sizes.examples
        return groups

    def _over_islands(self, groups: Int64Array, weights: Int64Array) -> Batching:
        """The batching that gives islands equally many groups of even load. groups: int64 [num_examples]."""
        sizes = self.sizes
        loads = np.bincount(groups, weights, sizes.groups).astype(np.int64)
        slots = assign(loads, sizes.islands, equal_counts=True).slots
        island, microbatch = np.divmod(slots[groups], sizes.microbatches)
        index_in_island = np.zeros(len(groups), dtype=np.int64)
        if sizes.replicas > 1:
            examples = np.argsort(groups, kind="stable").reshape(sizes.groups, sizes.examples)
            index_in_island[examples] = self._indexes(examples)
        return Batching(microbatch, island * sizes.examples + index_in_island)

    def _indexes(self, examples: Int64Array) -> Int64Array:
        """The index of each example in its group, so that replicas get even parts of a group.

        examples: [num_groups, examples of a group]; the result has the same shape.
        """
        sizes = self.sizes
        if sizes.replicas == sizes.examples or sizes.examples % sizes.replicas:
            return np.broadcast_to(np.arange(sizes.examples), examples.shape)
        lanes_of_widest = [number for number, stage in enumerate(self.lanes) if stage.unit is self.widest]
        weights = self._example_ns[lanes_of_widest].sum(axis=0)
        rows = (assign(weights[row], sizes.replicas, equal_counts=True, time_budget_s=0.0).slots for row in examples)
        return np.stack(list(rows))

    def _keeps_to_caps(self, groups: Int64Array) -> bool:
        lengths = {name: total_lengths(self.batch, name) for name in self.plan.microbatch_caps}
        return all(np.bincount(groups, lengths[name]).max() <= cap for name, cap in self.plan.microbatch_caps.items())

    @cached_property
    def _example_ns(self) -> Int64Array:
        return self.seconds.of_examples()

    def pass_seconds(self, batching: Batching) -> tuple[Float64Array, Float64Array]:
        """As `StepSeconds.of_passes`."""
        return self.seconds.of_passes(assign_batching(self.plan, self.batch, batching))


class _Candidate:
    """A batching, and the seconds that each island takes with it."""

    def __init__(self, step: _Step, batching: Batching) -> None:
        self.step, self.batching = step, batching
        self.passes_s = step.pass_seconds(batching)
        self.island_s = [self._makespan_s(island) for island in range(step.sizes.islands)]

    @property
    def slowest_s(self) -> float:
        """Seconds of the slowest island."""
        return max(self.island_s)

    def ordered(self) -> _Candidate:
        """The candidate of step 3. Islands are ordered slowest first, as long as the next one is the slowest."""
        ordered, slowest_s = copy(self), 0.0
        ordered.island_s = list(self.island_s)
        sizes = self.step.sizes
        number = np.tile(np.arange(sizes.microbatches), (sizes.islands, 1))  # of each microbatch, once ordered
        for island in sorted(range(len(self.island_s)), key=lambda island: -self.island_s[island]):
            if self.island_s[island] <= slowest_s:
                break
            order = order_microbatches(*self._seconds(island), len(self.passes_s[0]))
            ordered.island_s[island] = self._makespan_s(island, order)
            slowest_s = max(slowest_s, ordered.island_s[island])
            number[island] = np.argsort(order)
        batching = self.batching
        ordered.batching = Batching(number[batching.index // sizes.examples, batching.microbatch], batching.index)
        return ordered

    def _makespan_s(self, island: int, order: Int64Array | None = None) -> float:
        return pipeline_makespan(*self._seconds(island), len(self.passes_s[0]), order)

    def _seconds(self, island: int) -> tuple[Float64Array, Float64Array]:
        forward, backward = self.passes_s
        return forward[:, island], backward[:, island]
