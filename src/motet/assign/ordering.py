"""The replica and microbatch of each example of a pipeline's step, where the Plan's `order` is not "given".

The loss and the gradients of a step are sums over its examples. So an example may go to any microbatch and index of
its step, but to no other step. The decision uses the seconds of every operation, which the caller passes in
(`StepSeconds`), on the graph of the Plan's own Program. So interleaved and zero-bubble schedules, messages, collectives
and encoders in bubbles count as they are simulated.

1. Make microbatches. With caps they are groups under the caps (OmniBal section 4.1). Without caps each takes the same
   number of examples, in the given order.
2. "intra" (MMScale Algorithm 2, corrected: longest first): `assign` gives islands equal counts of microbatches, of even
   load. The paper assigns single examples; here, examples are first put into microbatches of even load, and these are
   assigned. The two are the same with one example a microbatch; with more, this is faster.
   With caps, the groups are assigned; microbatches of even load are tried too if they keep to the caps.
   If several replicas of a unit share a microbatch, microbatches of examples with like load are tried too.
   The load of an example is its seconds on all ranks, or its seconds on the busiest rank; both are tried.
3. "inter" (MMScale section 5.2, corrected: balance/reordering.py): the microbatches of an island get the order that
   leaves the shortest bubbles. Islands that end before the slowest one keep their order.
4. Take the candidate whose slowest island ends first. The given batching stays unless a ten-thousandth is gained.

Examples are priced once for all candidates in which the same examples share a microbatch.

Under balance "split" replicas share the sequences that are too long for one of them (`pipeline_balance.py`). Which
these are depends on what the microbatches of all islands hold together, so each candidate is cut and priced as a whole.
The given batching is dealt out as "joint" deals it, and in step 3 all islands take their microbatches in one order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Protocol

import numpy as np

from motet.assign.groups import batching_in_groups
from motet.assign.pipeline import Batching, assign_batching, batching_as_given
from motet.assign.pipeline_balance import assign_cut, dealt_with_cuts, item_work
from motet.assign.step import StepAssignment
from motet.balance import assign, island_makespans, order_islands
from motet.balance.reordering import NO_LIMIT, NUM_VISITS
from motet.balance.step_graph import StepGraph
from motet.core.arrays import Int64Array
from motet.core.plan import Plan
from motet.core.workload import BatchLengths, total_lengths
from motet.schedule.layout import Layout, PlannedStage

NUM_ORDERED = 2
"""The number of batchings of step 2, fastest first, that step 3 orders beside the given one, and of orders that swaps
make faster.
"""
REGAINED = 16
"""An order that is slower than another one by more than this part of it does not get faster by swaps."""
ASSIGN_BUDGET_S = 0.02
"""The limit of `assign`'s time for one batching; fewer microbatches get proportionally less."""


LEAST_GAIN = 1e-4
"""The share of the given batching's step that another one must gain: below, nanoseconds may be those of rounding."""


class StepSeconds(Protocol):
    """Prices the steps of a pipeline's Plan by a cost model; the same on every rank."""

    @property
    def layout(self) -> Layout:
        """The Layout of the Plan."""

    @property
    def graph(self) -> StepGraph:
        """The operations of a step."""

    @property
    def lane_rows(self) -> Int64Array:
        """How often each lane computes each row of the graph in a microbatch, int64 [num_lanes, num_rows]."""

    def of_examples(self, batch: BatchLengths) -> Int64Array:
        """Nanoseconds of each example by itself, forward and backward, int64 [num_lanes, num_examples] (`lanes`)."""

    def of_operations(self, assignment: StepAssignment) -> Int64Array:
        """Nanoseconds of the rows of the graph, int64 [num_islands * num_microbatches, num_rows], island by island."""

    def together(self, assignment: StepAssignment, durations: Int64Array, groups: Int64Array) -> Int64Array:
        """Nanoseconds of each island's step, int64 [num_islands], where replicas that share sequences of a microbatch
        run its passes together. assignment: of the groups, whose durations these are; groups: as of `_Candidate`."""


def given_batching(plan: Plan, batch: BatchLengths) -> Batching:
    """The batching of step 1: groups in their order if the Plan has caps, else examples in the given order."""
    return batching_in_groups(plan, batch) if plan.microbatch_caps else batching_as_given(plan)


def assign_ordered(plan: Plan, batch: BatchLengths, seconds: StepSeconds) -> StepAssignment:
    """The assignment of a step by the Plan's `order` and `microbatch_caps`; the same on every rank.

    In the time predicted here, "intra", "inter" and "both" are no slower than "given" with the same caps and balance.
    Raises UserError for a Plan that does not fit. O(num_examples * num_layers) for each of at most five batchings,
    plus `assign` and `order_islands`.
    """
    step = _Step(plan, batch, seconds)
    return step.assigned(step.batching())


def _fastest(step: _Step) -> _Candidate | None:
    """The fastest candidate of a step; None if the given one is about as fast."""
    order, given = step.plan.order, step.candidate(*step.given())
    candidates = [given]
    if order in ("intra", "both"):
        different = {tuple(part.tobytes() for part in parts): parts for parts in step.balanced()}
        balanced = [step.candidate(*parts) for parts in different.values()]
        candidates += sorted(balanced, key=lambda candidate: candidate.slowest_ns)[:NUM_ORDERED]
    best = min(candidates, key=lambda candidate: candidate.slowest_ns)
    if order in ("inter", "both"):
        best = min(_fastest_ordered(candidates), best, key=lambda candidate: candidate.slowest_ns)
    return best if best.slowest_ns < given.slowest_ns * (1 - LEAST_GAIN) else None


def _fastest_ordered(candidates: list[_Candidate]) -> _Candidate:
    """The fastest order of any candidate: by construction first, then, of the NUM_ORDERED fastest, by swaps."""
    fastest_first, limit_ns = sorted(candidates, key=lambda candidate: candidate.slowest_ns), NO_LIMIT
    ordered: list[_Candidate] = []
    for candidate in fastest_first:
        ordered.append(candidate.ordered(limit_ns, num_visits=0))
        limit_ns = min(limit_ns, ordered[-1].slowest_ns + ordered[-1].slowest_ns // REGAINED)
    ordered.sort(key=lambda candidate: candidate.slowest_ns)
    swapped = [candidate.ordered(NO_LIMIT, num_visits=NUM_VISITS) for candidate in ordered[:NUM_ORDERED]]
    return min(swapped, key=lambda candidate: candidate.slowest_ns)


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


@dataclass(frozen=True, eq=False)
class _Contents:
    """What microbatches hold, wherever they stand. A group is the content of one microbatch of one island.

    group:      int64 [num_examples].
    index:      int64 [num_examples], the index of each example in its island.
    assignment: of each group in its place.
    durations:  nanoseconds of each group, int64 [num_groups, num_rows].
    """

    group: Int64Array
    index: Int64Array
    assignment: StepAssignment
    durations: Int64Array


class _Step:
    """A step of a Plan, with its seconds."""

    def __init__(self, plan: Plan, batch: BatchLengths, seconds: StepSeconds) -> None:
        self.plan, self.batch, self.seconds = plan, batch, seconds
        self.shares_sequences = plan.balance == "split"
        self.meets = self.shares_sequences or any(unit.expert_replicas > 1 for unit in plan.units)
        self.layout = layout = seconds.layout
        self.widest = max(layout.units, key=layout.num_replicas)
        sizes = layout.num_islands, layout.num_microbatches, layout.num_examples
        self.sizes = _Sizes(*sizes, layout.num_replicas(self.widest))
        self.lanes = lanes(layout)
        self._contents: dict[tuple[bytes, bytes], _Contents] = {}

    def batching(self) -> Batching:
        """The batching that the step takes."""
        best = _fastest(self)
        return self.given_batching if best is None else best.batching()

    def assigned(self, batching: Batching) -> StepAssignment:
        """The assignment of a batching."""
        if self.shares_sequences:
            return assign_cut(self.plan, self.batch, batching, self._work, self._with_cuts[1])
        return assign_batching(self.plan, self.batch, batching)

    @cached_property
    def given_batching(self) -> Batching:
        """The batching of step 1."""
        return self._with_cuts[0] if self.shares_sequences else given_batching(self.plan, self.batch)

    @cached_property
    def _with_cuts(self) -> tuple[Batching, Int64Array]:
        return dealt_with_cuts(self.plan, self.batch, given_batching(self.plan, self.batch), self._work)

    @cached_property
    def _work(self) -> Mapping[str, Int64Array]:
        """Of the batch's items, for all candidates."""
        return item_work(self.plan, self.batch)

    @cached_property
    def _given_groups(self) -> Int64Array:
        groups: Int64Array = self.given_batching.microbatch * self.sizes.islands + (
            self.given_batching.index // self.sizes.examples
        )
        return groups

    def given(self) -> tuple[Int64Array, Int64Array, Int64Array]:
        """The given batching, as `candidate` takes it."""
        groups = np.arange(self.sizes.groups).reshape(self.sizes.microbatches, self.sizes.islands).T
        return self._given_groups, self.given_batching.index % self.sizes.examples, groups

    def candidate(self, group: Int64Array, index: Int64Array, groups: Int64Array) -> _Candidate:
        """group, index: as in `_Contents`. groups: as of `_Candidate`."""
        if self.meets:  # Groups are priced where they stand, and so numbered by their places.
            places = np.empty(groups.size, dtype=np.int64)
            places[groups.ravel()] = np.arange(groups.size)
            group, groups = places[group], np.arange(groups.size).reshape(groups.shape)
        return _Candidate(self, self._priced(group, index), groups)

    def _priced(self, group: Int64Array, index: Int64Array) -> _Contents:
        """Without several replicas, the index of an example does not change what its microbatch takes."""
        key = group.tobytes(), index.tobytes() if self.sizes.replicas > 1 else b""
        if key not in self._contents:
            island, microbatch = np.divmod(group, self.sizes.microbatches)
            batching = Batching(microbatch, island * self.sizes.examples + index)
            assignment = self.assigned(batching)
            durations = self.seconds.of_operations(assignment)
            self._contents[key] = _Contents(group, index, assignment, durations)
        return self._contents[key]

    def island_ns(self, contents: _Contents, groups: Int64Array) -> Int64Array:
        """Nanoseconds of each island's step, int64 [num_islands]. groups: as of `_Candidate`."""
        if self.meets:
            return self.seconds.together(contents.assignment, contents.durations, groups)
        return island_makespans(self.seconds.graph, contents.durations, groups)

    def balanced(self) -> Iterator[tuple[Int64Array, Int64Array, Int64Array]]:
        """The batchings of step 2, as `candidate` takes them: one or two for each of two weights of an example."""
        replicas = [self.layout.num_replicas(stage.unit) for stage in self.lanes]
        busiest = int(np.argmax(self._example_ns.sum(axis=1) / replicas))
        for weights in (self._example_ns.sum(axis=0), self._example_ns[busiest]):
            if self.plan.microbatch_caps:
                yield self._over_islands(self._given_groups, weights)
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

    def _over_islands(self, groups: Int64Array, weights: Int64Array) -> tuple[Int64Array, Int64Array, Int64Array]:
        """The candidate that gives islands equally many groups of even load. groups: int64 [num_examples]."""
        sizes = self.sizes
        loads = np.bincount(groups, weights, sizes.groups).astype(np.int64)
        placed = assign(loads, sizes.islands, equal_counts=True)
        index_in_island = np.zeros(len(groups), dtype=np.int64)
        if sizes.replicas > 1:
            examples = np.argsort(groups, kind="stable").reshape(sizes.groups, sizes.examples)
            index_in_island[examples] = self._indexes(examples)
        return groups, index_in_island, placed.items.reshape(sizes.islands, sizes.microbatches)

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
        """As of `StepSeconds.of_examples`; where examples are alone in their microbatches, it is known already."""
        are_alone = self.sizes.examples == self.sizes.replicas == 1 and not self.plan.microbatch_caps
        if are_alone and not self.meets:
            given = self._priced(*self.given()[:2])
            of_groups = self.seconds.lane_rows.astype(np.float64) @ given.durations.T  # whole numbers below 2^53
            return of_groups.astype(np.int64)[:, given.group]
        return self.seconds.of_examples(self.batch)


class _Candidate:
    """Contents of microbatches and where they stand: groups, int64 [num_islands, num_microbatches].

    island_ns: nanoseconds of each island's step, if they are known.
    """

    def __init__(
        self, step: _Step, contents: _Contents, groups: Int64Array, island_ns: Int64Array | None = None
    ) -> None:
        self.step, self.contents, self.groups = step, contents, groups
        self.island_ns = step.island_ns(contents, groups) if island_ns is None else island_ns

    @property
    def slowest_ns(self) -> int:
        """Nanoseconds of the slowest island."""
        return int(self.island_ns.max())

    def ordered(self, limit_ns: int, num_visits: int) -> _Candidate:
        """The candidate of step 3, as far as it may take less than the limit. num_visits: as of `order_islands`."""
        durations = self.contents.durations
        improve = partial(order_islands, self.step.seconds.graph, limit=limit_ns, num_visits=num_visits)
        if self.step.meets:
            # All islands take what they run together at a time, each microbatch as long as on the slowest of them.
            islands, microbatches = self.groups.shape
            slowest = durations.reshape(islands, microbatches, -1).max(axis=0)
            order, _ = improve(slowest, self.groups[:1])
            return _Candidate(self.step, self.contents, np.arange(islands)[:, None] * microbatches + order)
        return _Candidate(self.step, self.contents, *improve(durations, self.groups, self.island_ns))

    def batching(self) -> Batching:
        """The batching of all examples."""
        sizes, slots = self.step.sizes, np.empty(self.groups.size, dtype=np.int64)
        slots[self.groups.ravel()] = np.arange(self.groups.size)
        island, microbatch = np.divmod(slots[self.contents.group], sizes.microbatches)
        return Batching(microbatch, island * sizes.examples + self.contents.index)
