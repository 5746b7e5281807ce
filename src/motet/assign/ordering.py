"""Which replica and microbatch of a pipeline takes which example of a step, where the Plan has them dealt out anew.

Loss and gradients of a step are sums over its examples, whichever replica and microbatch computes them; so any example
may go to any slot of its step, and none to another step. Decided from the cost model's seconds of every stage:

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

import numpy as np
from numpy.typing import NDArray

from motet.balance import assign, order_microbatches, pipeline_makespan
from motet.core.plan import Plan
from motet.core.workload import BatchLengths
from motet.cost.model import CostModel
from motet.schedule.dag import distances
from motet.schedule.from_plan import unscheduled
from motet.schedule.layout import Layout, PlannedStage
from motet.simulate.groups import grouped, total_lengths
from motet.simulate.placement import PlacedItems, Placement, Slots, column, place_in, slots_as_given
from motet.simulate.pricing import Pricing, Table

Ints = NDArray[np.int64]

NUM_ORDERED = 2
"""Ways of dealing out, the best by their seconds as they are, whose microbatches are ordered, beside what was given."""
ASSIGN_BUDGET_S = 0.02
"""At most, for swaps between microbatches; of fewer, in proportion."""
_NS_PER_S = 1e9


def ordered_slots(plan: Plan, batch: BatchLengths, cost: CostModel) -> Slots:
    """The slots of a batch's examples by the Plan's `order` and `microbatch_caps`; the same on every rank.

    As predicted here, "intra", "inter" and "both" are no slower than "given" with the same caps.
    Raises UserError for a Plan that does not fit. O(examples * layers) to price a way of dealing out, of which there
    are at most seven, beside `assign` and `order_microbatches`.
    """
    step = _Step(plan, batch, cost)
    ways = [_Way(step, step.first())]
    if plan.order in ("intra", "both"):
        dealt = [_Way(step, slots) for slots in step.dealt(ways[0].slots)]
        ways += sorted(dealt, key=lambda way: way.slowest_s)[:NUM_ORDERED]
    if plan.order in ("inter", "both"):
        ways = [way.ordered() for way in ways]
    return min(ways, key=lambda way: way.slowest_s).slots


@dataclass(frozen=True)
class _Sizes:
    """islands: those parts of a job that do not speak to each other. microbatches: of each. examples: of one of these.
    replicas: of the unit that has most of them, in an island."""

    islands: int
    microbatches: int
    examples: int
    replicas: int

    @property
    def slots(self) -> int:
        return self.islands * self.microbatches


class _Step:
    """A batch on a Plan, priced."""

    def __init__(self, plan: Plan, batch: BatchLengths, cost: CostModel) -> None:
        self.plan, self.batch, self.cost = plan, batch, cost
        self.layout = layout = Layout(plan)
        self.widest = max(layout.units, key=layout.num_replicas)
        sizes = layout.num_islands, layout.num_microbatches, layout.num_examples
        self.sizes = _Sizes(*sizes, layout.num_replicas(self.widest))
        self.planned = unscheduled(layout)
        self.place = _places(layout)
        self.num_places = max(self.place) + 1

    def first(self) -> Slots:
        """Before anything is moved: groups in their order, or examples in theirs."""
        if not self.plan.microbatch_caps:
            return slots_as_given(self.plan)
        groups = grouped(self.batch, self.plan.microbatch_caps, self.sizes.slots)
        microbatch, island = np.divmod(groups, self.sizes.islands)
        return Slots(microbatch, island * self.sizes.examples)

    def dealt(self, first: Slots) -> Iterator[Slots]:
        """Even microbatches, dealt evenly to islands. An example has one weight; two kinds of it are tried."""
        own, seconds = self.sizes, self._of_examples
        replicas = [self.layout.num_replicas(stage.unit) for stage in self._lanes]
        longest = int(np.argmax(seconds.sum(axis=1) / replicas))
        for weights in (seconds.sum(axis=0), seconds[longest]):
            if self.plan.microbatch_caps:
                yield self._placed(
                    first.microbatch * self.sizes.islands + first.position // self.sizes.examples, weights
                )
                if self._within_caps(even := self._even(weights, equal_counts=False)):
                    yield self._placed(even, weights)
            else:
                yield self._placed(self._even(weights, equal_counts=True), weights)
                if own.replicas > 1:
                    yield self._placed(self._alike(weights), weights)

    def _even(self, weights: Ints, *, equal_counts: bool) -> Ints:
        """The microbatch of each example, so that they are even."""
        own = self.sizes
        if own.examples == 1:
            return np.arange(own.slots)
        budget_s = min(ASSIGN_BUDGET_S, 1e-3 + 6e-6 * own.slots)
        return assign(weights, own.slots, equal_counts=equal_counts, time_budget_s=budget_s).ranks.astype(np.int64)

    def _alike(self, weights: Ints) -> Ints:
        """The microbatch of each example, so that those of one are alike."""
        groups = np.empty(len(weights), dtype=np.int64)
        groups[np.argsort(-weights, kind="stable")] = np.arange(len(weights)) // self.sizes.examples
        return groups

    def _placed(self, groups: Ints, weights: Ints) -> Slots:
        """Microbatches, int64 [num_examples], dealt to islands."""
        own = self.sizes
        loads = np.bincount(groups, weights, own.slots).astype(np.int64)
        island, microbatch = np.divmod(assign(loads, own.islands, equal_counts=True).slots[groups], own.microbatches)
        within = np.zeros(len(groups), dtype=np.int64)
        if own.replicas > 1:
            of_group = np.argsort(groups, kind="stable").reshape(own.slots, own.examples)
            within[of_group] = self._within(of_group)
        return Slots(microbatch, island * own.examples + within)

    def _within(self, of_group: Ints) -> Ints:
        """Where in its microbatch each example stands, [num_slots, num_examples]: replicas get even parts of it."""
        own = self.sizes
        if own.replicas == own.examples:
            return np.broadcast_to(np.arange(own.examples), of_group.shape)
        lanes = [number for number, stage in enumerate(self._lanes) if stage.unit is self.widest]
        weights = self._of_examples[lanes].sum(axis=0)
        rows = (assign(weights[row], own.replicas, equal_counts=True, time_budget_s=0.0).slots for row in of_group)
        return np.stack(list(rows))

    def _within_caps(self, groups: Ints) -> bool:
        sizes = {name: total_lengths(self.batch, name) for name in self.plan.microbatch_caps}
        return all(np.bincount(groups, sizes[name]).max() <= cap for name, cap in self.plan.microbatch_caps.items())

    @cached_property
    def _lanes(self) -> list[PlannedStage]:
        """A stage of each rank that an example passes: of one replica of every unit."""
        return list({stage.rank: stage for stage in self.layout.stages if stage.replica == 0}.values())

    @cached_property
    def _of_examples(self) -> Ints:
        """Nanoseconds of each example by itself, forward and backward, int64 [num_lanes, num_examples]."""
        items = {}
        for module in self.plan.model.modules:
            example, length, num_tokens = column(self.batch, module.name)
            alone = example.astype(np.int32)
            items[module.name] = PlacedItems(example, length, num_tokens, np.zeros_like(alone), alone, 1)
        pricing = self._pricing(Placement(self.batch, self.batch.num_examples, items))
        lane = {stage.rank: number for number, stage in enumerate(self._lanes)}
        taken_s = np.zeros((len(lane), self.batch.num_examples))
        for stage in self.layout.stages:
            if stage.replica == 0:
                taken_s[lane[stage.rank]] += np.sum(pricing.stage(stage, 0)[:-1], axis=0)
        return np.rint(taken_s * _NS_PER_S).astype(np.int64)

    def passes(self, slots: Slots) -> tuple[Table, Table]:
        """Seconds forward and backward, [num_places, num_islands, num_microbatches]."""
        pricing = self._pricing(place_in(self.plan, self.batch, slots))
        ranks = {stage.rank: place for stage, place in zip(self.layout.stages, self.place)}
        shape = len(ranks), self.sizes.islands, self.sizes.microbatches
        of_ranks = np.zeros((2, *shape))
        for stage in self.layout.stages:
            own = pricing.islands(stage)
            of_ranks[0, stage.rank] += own.forward + own.forward_tensor
            of_ranks[1, stage.rank] += own.input + own.weight + own.recompute + own.backward_tensor
        passes = np.zeros((2, self.num_places, *shape[1:]))
        for rank, place in ranks.items():
            passes[:, place] = np.maximum(passes[:, place], of_ranks[:, rank])
        return passes[0], passes[1]

    def _pricing(self, placement: Placement) -> Pricing:
        return Pricing(self.plan, self.planned, placement, self.cost)


class _Way:
    """Slots, and what each island then takes."""

    def __init__(self, step: _Step, slots: Slots) -> None:
        self.step, self.slots = step, slots
        self.passes_s = step.passes(slots)
        self.island_s = [self._makespan_s(island) for island in range(step.sizes.islands)]

    @property
    def slowest_s(self) -> float:
        return max(self.island_s)

    def ordered(self) -> _Way:
        """With the microbatches of the slowest islands in their best order, as long as that makes the step faster."""
        found, slowest_s = copy(self), 0.0
        found.island_s = list(self.island_s)
        island, microbatch = self.slots.position // self.step.sizes.examples, self.slots.microbatch.copy()
        for number in sorted(range(len(self.island_s)), key=lambda number: -self.island_s[number]):
            if self.island_s[number] <= slowest_s:
                break
            order = order_microbatches(*self._seconds(number), self.step.num_places)
            found.island_s[number] = self._makespan_s(number, order)
            slowest_s = max(slowest_s, found.island_s[number])
            own = island == number
            microbatch[own] = np.argsort(order)[microbatch[own]]
        found.slots = Slots(microbatch, self.slots.position)
        return found

    def _makespan_s(self, island: int, order: Ints | None = None) -> float:
        return pipeline_makespan(*self._seconds(island), self.step.num_places, order)

    def _seconds(self, island: int) -> tuple[Table, Table]:
        forward, backward = self.passes_s
        return forward[:, island], backward[:, island]


def _places(layout: Layout) -> list[int]:
    """Of each stage, how far along the pipeline its rank is: of one pipeline, the number of that rank; of several, by
    the longest way to an end."""
    if len(layout.units) == 1:
        return [stage.rank for stage in layout.stages]
    left = distances(len(layout.island.stages), layout.island.edges)
    of_rank = {stage.rank: max(left) - distance for stage, distance in zip(layout.stages, left)}
    return [of_rank[stage.rank] for stage in layout.stages]
