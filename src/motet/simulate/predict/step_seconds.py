"""Seconds of a pipeline's examples and operations from a cost model: `assign.ordering.StepSeconds`, by which examples
are assigned to microbatches.
"""

from __future__ import annotations

from functools import cached_property, partial

import numpy as np

from motet.assign.ordering import lanes
from motet.assign.step import ModuleAssignment, StepAssignment
from motet.balance.step_graph import StepGraph
from motet.core.arrays import Int64Array
from motet.core.exchange import NS_PER_S
from motet.core.plan import Plan
from motet.core.workload import BatchLengths
from motet.cost.model import CostModel
from motet.schedule.from_plan import PlannedProgram, unscheduled
from motet.schedule.from_plan import planned as program_of_plan
from motet.schedule.layout import Layout
from motet.simulate.predict.stage_pricing import Pricing
from motet.simulate.predict.step_operations import StepOperations

_MAX_PRICED = 1 << 15
"""Examples that are priced at once: prices of all layers are kept meanwhile."""


class PricedSteps:
    """The steps of a Plan that fits, priced as they are simulated. What does not depend on lengths is computed once.

    planned: the Plan's Program, if it is at hand.
    """

    def __init__(self, plan: Plan, cost: CostModel, planned: PlannedProgram | None = None) -> None:
        self.plan, self.cost, self._given = plan, cost, planned
        self._last: tuple[BatchLengths, Int64Array] | None = None

    @cached_property
    def planned(self) -> PlannedProgram:
        """The Plan's Program."""
        return self._given or program_of_plan(self.plan)

    @property
    def layout(self) -> Layout:
        """The Layout of the Plan."""
        return self.planned.layout

    @cached_property
    def graph(self) -> StepGraph:
        """The graph of a step."""
        return self._operations.graph

    @cached_property
    def lane_rows(self) -> Int64Array:
        """How often each lane computes each row of the graph in a microbatch, int64 [num_lanes, num_rows]."""
        return self._operations.rows_of_ranks[[stage.rank for stage in lanes(self.layout)]]

    def of_examples(self, batch: BatchLengths) -> Int64Array:
        """Nanoseconds of each example by itself on each lane, int64 [num_lanes, num_examples].

        Those of the last batch are kept: several orders of a batch are tried.
        """
        if self._last is None or self._last[0] is not batch:
            starts = range(0, max(batch.num_examples, 1), _MAX_PRICED)
            parts = (np.arange(start, min(start + _MAX_PRICED, batch.num_examples)) for start in starts)
            self._last = batch, np.concatenate([self._example_ns(batch.take(part)) for part in parts], axis=1)
        return self._last[1]

    def _example_ns(self, batch: BatchLengths) -> Int64Array:
        modules = {}
        for module in self.plan.model.modules:
            items = batch.of(module.name)
            alone = items.example.astype(np.int32)
            modules[module.name] = ModuleAssignment(
                items.example,
                items.length,
                items.num_tokens,
                np.zeros_like(alone),
                alone,
                partial(_position_in_run, items.example),
                1,
                items.segments,
                items.num_media,
            )
        assignment = StepAssignment(batch, batch.num_examples, modules)
        pricing = Pricing(self.plan, unscheduled(self.layout), assignment, self.cost)
        lane = {stage.rank: number for number, stage in enumerate(lanes(self.layout))}
        taken_s = np.zeros((len(lane), batch.num_examples))
        for stage in self.layout.stages:
            if stage.replica == 0:
                taken_s[lane[stage.rank]] += np.sum(pricing.passes(stage, [0]), axis=0)[0]
        return np.rint(taken_s * NS_PER_S).astype(np.int64)

    def of_operations(self, assignment: StepAssignment) -> Int64Array:
        """As `StepOperations.durations`: int64 [num_islands * num_microbatches, num_rows]."""
        return self._operations.durations(assignment)

    def together(self, assignment: StepAssignment, durations: Int64Array, groups: Int64Array) -> Int64Array:
        """As `StepOperations.together`: nanoseconds of each island's step, int64 [num_islands]."""
        return self._operations.together(assignment, durations, groups)

    @cached_property
    def _operations(self) -> StepOperations:
        return StepOperations(self.planned, self.cost)


def _position_in_run(numbers: Int64Array) -> Int64Array:
    """The position of each of ascending numbers among those that equal it, int64 [n]."""
    position: Int64Array = np.arange(len(numbers)) - np.searchsorted(numbers, numbers)
    return position
