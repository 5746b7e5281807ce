"""Seconds of a pipeline's examples and passes from a cost model: `assign.ordering.StepSeconds`, by which examples are
assigned to microbatches.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np

from motet.assign.ordering import lanes
from motet.assign.step import ModuleAssignment, StepAssignment
from motet.core.arrays import Float64Array, Int64Array
from motet.core.exchange import NS_PER_S
from motet.core.plan import Plan
from motet.core.workload import BatchLengths
from motet.cost.model import CostModel
from motet.schedule.from_plan import PlannedProgram, unscheduled
from motet.schedule.generators.dag import distances
from motet.schedule.layout import Layout
from motet.simulate.predict.stage_pricing import Pricing


class PricedStep:
    """The examples of a step on a Plan that fits, priced by the stages that compute them; messages are free."""

    def __init__(self, plan: Plan, batch: BatchLengths, cost: CostModel) -> None:
        self.plan, self.batch, self.cost = plan, batch, cost

    @cached_property
    def planned(self) -> PlannedProgram:
        """The stages to price."""
        return unscheduled(self.layout)

    @cached_property
    def layout(self) -> Layout:
        """The Layout of the Plan."""
        return Layout(self.plan)

    def of_examples(self) -> Int64Array:
        """Nanoseconds of each example by itself on each lane, int64 [num_lanes, num_examples]."""
        modules = {}
        for module in self.plan.model.modules:
            items = self.batch.of(module.name)
            alone, first = items.example.astype(np.int32), np.searchsorted(items.example, items.example)
            modules[module.name] = ModuleAssignment(
                items.example,
                items.length,
                items.num_tokens,
                np.zeros_like(alone),
                alone,
                np.arange(items.num_items) - first,
                1,
                items.segments,
            )
        pricing = self._pricing(StepAssignment(self.batch, self.batch.num_examples, modules))
        lane = {stage.rank: number for number, stage in enumerate(lanes(self.layout))}
        taken_s = np.zeros((len(lane), self.batch.num_examples))
        for stage in self.layout.stages:
            if stage.replica == 0:
                taken_s[lane[stage.rank]] += np.sum(pricing.stage(stage, 0)[:-1], axis=0)
        return np.rint(taken_s * NS_PER_S).astype(np.int64)

    def of_passes(self, assignment: StepAssignment) -> tuple[Float64Array, Float64Array]:
        """Seconds of forward and of backward, [depth, num_islands, num_microbatches] each."""
        pricing, layout, places = self._pricing(assignment), self.layout, _places(self.layout)
        ranks = {stage.rank: place for stage, place in zip(layout.stages, places)}
        shape = len(ranks), layout.num_islands, layout.num_microbatches
        of_ranks = np.zeros((2, *shape))
        for stage in layout.stages:
            own = pricing.islands(stage)
            of_ranks[0, stage.rank] += own.forward + own.forward_tensor
            of_ranks[1, stage.rank] += own.input + own.weight + own.recompute + own.backward_tensor
        passes = np.zeros((2, max(places) + 1, *shape[1:]))
        for rank, place in ranks.items():
            passes[:, place] = np.maximum(passes[:, place], of_ranks[:, rank])
        return passes[0], passes[1]

    def _pricing(self, assignment: StepAssignment) -> Pricing:
        return Pricing(self.plan, self.planned, assignment, self.cost)


def _places(layout: Layout) -> list[int]:
    """For each stage, the depth of its rank in the pipeline: the rank itself in a lone pipeline, else by the number of
    stages on the longest path to an end.
    """
    if len(layout.units) == 1:
        return [stage.rank for stage in layout.stages]
    left = distances(len(layout.island.stages), layout.island.edges)
    of_rank = {stage.rank: max(left) - distance for stage, distance in zip(layout.stages, left)}
    return [of_rank[stage.rank] for stage in layout.stages]
