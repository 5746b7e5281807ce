"""The parallelism that encoders may have beside a backbone's pipeline (Optimus sections 3.1 and 4.1).

PP_enc divides PP_llm and TP_enc divides TP_llm, which gives m = DP_enc / DP_llm pipelines of encoders to each of the
backbone's. In the paper each takes microbatches of its own. Here PP_llm / PP_enc pipelines do, and TP_llm / TP_enc
groups of ranks deal out the items of a microbatch (`assign/item_shares.py`), so that one pass is of all of them. An
item stays whole, so there are at most as many groups as a microbatch has examples. The encoders of one plan have the
same PP, and TPs of their own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Literal

import numpy as np

from motet.assign.step import StepAssignment
from motet.balance import assign
from motet.core.plan import Fill, Plan, Unit
from motet.core.workload import BACKBONE
from motet.planner.bubble_filling.backbone_shapes import PipelineShape, encoder_degrees, encoders_of
from motet.planner.degrees import divisors
from motet.planner.job import BlockCosts, Job
from motet.planner.stages.partition import partition
from motet.schedule import fillable
from motet.schedule.from_plan import unscheduled
from motet.schedule.layout import Layout
from motet.simulate.predict.predict import assign_batch
from motet.simulate.predict.stage_pricing import Pricing

_MAX_DEALT = 64
"""Microbatches whose items are dealt out to see how evenly that can be done."""


@dataclass(frozen=True)
class EncoderPlan:
    """Degrees of the encoders. pp: of all of them. tp: of each, by name."""

    pp: int
    tp: Mapping[str, int]

    def __str__(self) -> str:
        return ", ".join(f"{name} TP {tp}" for name, tp in self.tp.items()) + f", encoders PP {self.pp}"


class EncoderPlans:
    """All plans of encoders beside one backbone, their units and their costs. mode: what is recomputed."""

    def __init__(self, job: Job, shape: PipelineShape, mode: Literal["none", "least", "full"] = "least") -> None:
        self.job, self.shape, self.mode = job, shape, mode
        self.encoders = encoders_of(job)
        costs = job.block_costs(BACKBONE, shape.microbatch_size, shape.tp)
        counts = partition((costs.forward_s + costs.backward_s).tolist(), shape.pp, num_chunks=shape.num_chunks)
        stages = tuple({BACKBONE: count} for count in counts)
        self.backbone = Unit(BACKBONE, stages, dp=shape.dp, pp=shape.pp, tp=shape.tp)
        self._has_backward: dict[int, Mapping[str, tuple[bool, ...]]] = {}
        self._shares: dict[tuple[str, int], float] = {}

    def __iter__(self) -> Iterator[EncoderPlan]:
        """The plans that divide the backbone's degrees, and leave a block to each stage, a microbatch to each pipeline,
        and whole examples to each rank."""
        shape, num_blocks = self.shape, [len(self.job.model.module(name).blocks) for name in self.encoders]
        for pp in divisors(shape.pp):
            if pp <= min(num_blocks) and shape.pp // pp <= shape.num_microbatches:
                for degrees in product(*(encoder_degrees(self.job, shape, name) for name in self.encoders)):
                    yield EncoderPlan(pp, dict(zip(self.encoders, degrees)))

    def degrees(self, plan: EncoderPlan) -> dict[str, dict[str, int]]:
        """Encoder -> its degrees by name."""
        num_ranks = self.backbone.num_ranks // plan.pp
        return {name: {"tp": tp, "pp": plan.pp, "dp": num_ranks // tp} for name, tp in plan.tp.items()}

    def units(self, plan: EncoderPlan) -> tuple[Unit, ...]:
        """The backbone's unit and those of the encoders beside it; nothing is recomputed."""
        units = [self.backbone]
        for name, tp in plan.tp.items():
            costs = self._block_costs(name, tp)
            counts = partition((costs.forward_s + costs.backward_s).tolist(), plan.pp)
            stages = tuple({name: count} for count in counts)
            degrees = self.degrees(plan)[name]
            units.append(Unit(name, stages, dp=degrees["dp"], pp=plan.pp, tp=tp))
        return tuple(units)

    def plan(self, units: tuple[Unit, ...], fills: tuple[Fill, ...] = ()) -> Plan:
        """The Plan of these units, the backbone's first, in the shape of this backbone."""
        job = self.job
        return Plan(
            job.model,
            job.cluster,
            units,
            job.batch_size,
            self.shape.microbatch_size,
            self.shape.schedule,
            deferred_warmup=self.shape.num_chunks > 1,
            precision=job.precision,
            moments=job.moments,
            fills=fills,
        )

    def costs(self, unit: Unit) -> BlockCosts:
        """Costs of the blocks of a unit, for the part of a microbatch that its busiest group of ranks computes."""
        (name,) = unit.modules
        return self._block_costs(name, unit.tp)

    def _block_costs(self, name: str, tp: int) -> BlockCosts:
        return self.job.block_costs(name, self.shape.microbatch_size * self.busiest_share(name, tp), tp)

    def busiest_share(self, name: str, tp: int) -> float:
        """What the busiest group of ranks has of an encoder's items of a microbatch, mean of some microbatches."""
        num_groups = self.shape.tp // tp
        if num_groups == 1:
            return 1.0
        if (name, num_groups) not in self._shares:
            items = self.job.batch.items[name]
            microbatch = items.example // self.shape.microbatch_size
            chosen = np.unique(microbatch)
            chosen = chosen[:: math.ceil(len(chosen) / _MAX_DEALT) or 1]
            dealt = (assign(items.length[microbatch == number], num_groups).loads for number in chosen)
            busiest, total = np.sum([(loads.max(), loads.sum()) for loads in dealt] or [(1, 1)], axis=0)
            self._shares[name, num_groups] = float(busiest / total)
        return self._shares[name, num_groups]

    @cached_property
    def example(self) -> Plan:
        """The Plan of the first encoder plan, without recomputation: for what all of them have in common."""
        return self.plan(self.units(next(iter(self))))

    @cached_property
    def unscheduled_pricing(self) -> Pricing:
        """Prices of the backbone's stages without a schedule."""
        return Pricing(self.example, unscheduled(Layout(self.example)), self._assignment, self.job.cost)

    def priced(self, units: tuple[Unit, ...]) -> Pricing:
        """Prices of the backbone's stages alone, in their schedule."""
        plan = self.plan(units)
        return Pricing(plan, fillable(plan)[0], self._assignment, self.job.cost)

    def pricing_of(self, backbone: Unit) -> Pricing:
        """Prices of the stages of a backbone's unit without a schedule."""
        plan = self.plan((backbone, *self.example.units[1:]))
        return Pricing(plan, unscheduled(Layout(plan)), self._assignment, self.job.cost)

    def least_s(self, backbone: Unit) -> float:
        """Seconds that a step of the backbone takes at least, without messages, over all replicas. Rounded down.

        A rank computes all of its passes, in turn. Before the first, the ranks before it compute theirs of the first
        microbatch; behind the last, they do so for the last one. So no step that fills its bubbles takes less either.
        """
        pricing = self.pricing_of(backbone)
        busy_s, passing_s = np.zeros((2, self.shape.pp, pricing.num_islands))
        for kind in pricing.planned.kinds:
            passes = pricing.passes(kind.stage, range(pricing.num_islands))
            busy_s[kind.ranks] += np.sum(passes, axis=(0, 2))
            first_chunk = kind.ranks[kind.numbers < self.shape.pp]
            passing_s[first_chunk] = passes.forward[:, 0] + passes.backward[:, -1]
        waited_s = passing_s.cumsum(axis=0) - passing_s
        return float((waited_s + busy_s).max()) * (1 - 1e-9)

    def has_backward(self, pp: int) -> Mapping[str, tuple[bool, ...]]:
        """Which stages of each encoder have backward passes, in plans of this PP."""
        if pp not in self._has_backward:
            plan = self.plan(self.units(next(one for one in self if one.pp == pp)))
            has_backward = Layout(plan).has_backward
            self._has_backward[pp] = {name: has_backward[name] for name in self.encoders}
        return self._has_backward[pp]

    @cached_property
    def _assignment(self) -> StepAssignment:
        """The same whatever is recomputed, and beside whichever encoders."""
        return assign_batch(self.example, self.job.batch, self.job.cost)
