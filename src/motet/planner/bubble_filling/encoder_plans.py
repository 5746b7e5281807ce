"""The parallelism that encoders may have beside a backbone's pipeline (Optimus sections 3.1 and 4.1).

PP_enc divides PP_llm and TP_enc divides TP_llm, which gives m = DP_enc / DP_llm pipelines of encoders to each of the
backbone's. In the paper each takes microbatches of its own. Here PP_llm / PP_enc pipelines do, and TP_llm / TP_enc
groups of ranks deal out the items of a microbatch (`assign/item_shares.py`), so that one pass is of all of them.
Where groups can share items (`Module.shareable`) they do, by a `cp` of the encoder, and cut those that dominate; else
items stay whole, and there are at most as many groups as a microbatch has examples. The encoders of one plan have the
same PP, and TPs of their own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import product
from typing import Literal, NamedTuple

import numpy as np

from motet.assign.item_shares import FULLEST
from motet.assign.step import StepAssignment
from motet.balance import assign
from motet.core.arrays import Float64Array, Int64Array
from motet.core.plan import Fill, Plan, Unit
from motet.core.spec import Layer
from motet.core.workload import BACKBONE
from motet.planner.bubble_filling.backbone_shapes import (
    EncoderDegrees,
    PipelineShape,
    encoder_degrees,
    encoders_of,
)
from motet.planner.degrees import divisors
from motet.planner.job import BlockCosts, Job
from motet.planner.stages.partition import partition
from motet.schedule import fillable
from motet.schedule.from_plan import unscheduled
from motet.schedule.layout import Layout
from motet.simulate.predict.layer_pricing import LayerPricing
from motet.simulate.predict.predict import assign_batch
from motet.simulate.predict.stage_pricing import Pricing

_MAX_MICROBATCHES = 64
"""Microbatches whose items are dealt out to see how evenly that can be done."""


@dataclass(frozen=True)
class EncoderPlan:
    """Degrees of the encoders. pp: of all of them. groups: the ranks that share a pass of each, by name."""

    pp: int
    groups: Mapping[str, EncoderDegrees]

    def __str__(self) -> str:
        own = [f"{name} TP {tp}" + (f" CP {cp}" if cp > 1 else "") for name, (tp, cp) in self.groups.items()]
        return ", ".join(own) + f", encoders PP {self.pp}"


class _Dealt(NamedTuple):
    """Items of an encoder by microbatch. lengths: int64 [num_items] of each of some microbatches that have any.
    share: of the microbatches, those that have any.
    """

    lengths: tuple[Int64Array, ...]
    share: float


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
        self._shares: dict[tuple[str, EncoderDegrees], float] = {}
        self._costs: dict[tuple[str, EncoderDegrees], BlockCosts] = {}
        self._layer_pricings: dict[tuple[str, EncoderDegrees], LayerPricing] = {}
        self._known_dealt: dict[str, _Dealt] = {}
        self._known_fullest: dict[str, StepAssignment] = {}
        # Most blocks have equal layers, and plans the same degrees.
        self._got, self._got_in_blocks = cache(self._got_rows), cache(self._got_bytes)

    def __iter__(self) -> Iterator[EncoderPlan]:
        """The plans that divide the backbone's degrees, and leave a block to each stage and a microbatch to each
        pipeline; groups share items, or have whole examples each (`encoder_degrees`)."""
        shape, num_blocks = self.shape, [len(self.job.model.module(name).blocks) for name in self.encoders]
        for pp in divisors(shape.pp):
            if pp <= min(num_blocks) and shape.pp // pp <= shape.num_microbatches:
                for degrees in product(*(encoder_degrees(self.job, shape, name) for name in self.encoders)):
                    yield EncoderPlan(pp, dict(zip(self.encoders, degrees)))

    def degrees(self, plan: EncoderPlan) -> dict[str, dict[str, int]]:
        """Encoder -> its degrees by name."""
        num_ranks = self.backbone.num_ranks // plan.pp
        return {
            name: {"tp": tp, "cp": cp, "pp": plan.pp, "dp": num_ranks // (tp * cp)}
            for name, (tp, cp) in plan.groups.items()
        }

    def units(self, plan: EncoderPlan) -> tuple[Unit, ...]:
        """The backbone's unit and those of the encoders beside it; nothing is recomputed."""
        units = [self.backbone]
        for name, degrees in self.degrees(plan).items():
            costs = self._block_costs(name, plan.groups[name])
            counts = partition((costs.forward_s + costs.backward_s).tolist(), plan.pp)
            stages = tuple({name: count} for count in counts)
            units.append(Unit(name, stages, dp=degrees["dp"], pp=plan.pp, tp=degrees["tp"], cp=degrees["cp"]))
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
        return self._block_costs(name, EncoderDegrees(unit.tp, unit.cp))

    def _block_costs(self, name: str, degrees: EncoderDegrees) -> BlockCosts:
        key = name, degrees
        if key not in self._costs:
            num_examples = self.shape.microbatch_size * self.busiest_share(name, degrees)
            costs = self.job.block_costs(name, num_examples, degrees.tp)
            if degrees.cp > 1:
                exchange_s = self._exchange_s(name, degrees)
                costs = replace(
                    costs,
                    forward_s=costs.forward_s + exchange_s,
                    backward_s=costs.backward_s + exchange_s * (costs.backward_s > 0),
                    recompute_s=costs.recompute_s + exchange_s * (costs.recompute_s > 0),
                )
            self._costs[key] = costs
        return self._costs[key]

    def _exchange_s(self, name: str, degrees: EncoderDegrees) -> Float64Array:
        """Seconds in which ranks get keys and values of items that they share, of each block, [num_blocks]."""
        (tp, cp), mean_bytes = degrees, self._got_in_blocks(name, degrees)
        sizes = mean_bytes * cp / (cp - 1)  # As of an all-gather in which each rank gets as much.
        return np.array([self.job.cost.gather_seconds(size, range(0, cp * tp, tp)) for size in sizes.tolist()])

    def layer_pricing(self, unit: Unit) -> LayerPricing:
        """Prices of the layers of a unit, as of a Plan that has it; they do not depend on its stages.

        Of an encoder they are of the fullest microbatches alone: to deal out the items of all takes most of a search
        on thousands of ranks.
        """
        (name,) = unit.modules
        if name == BACKBONE:
            return self.unscheduled_pricing.layer_pricing
        key = name, EncoderDegrees(unit.tp, unit.cp)
        if key not in self._layer_pricings:
            others = [other for other in self.example.units if other.name != name]
            self._layer_pricings[key] = LayerPricing(
                self.plan((*others, unit)), self._in_fullest(name), self.job.cost, self.job.exchange
            )
        return self._layer_pricings[key]

    def _in_fullest(self, name: str) -> StepAssignment:
        """The items of an encoder alone, in the microbatches of replicas that have most, or the longest, renumbered."""
        if name not in self._known_fullest:
            items, num = self._assignment.modules[name], self._assignment.num_microbatches
            cell, size = items.batch_index(num), items.num_replicas * num
            longest = np.zeros(size, dtype=np.int64)
            np.maximum.at(longest, cell, items.length)
            is_full = np.zeros((items.num_replicas, num), dtype=np.bool_)
            for column in (np.bincount(cell, items.length, size), longest):
                is_full.flat[np.argsort(column, kind="stable")[-_MAX_MICROBATCHES:]] = True
            numbers = is_full.cumsum(axis=1) - 1
            taken = items.take(np.flatnonzero(is_full.flat[cell]))
            taken = replace(taken, microbatch=numbers[taken.replica, taken.microbatch].astype(np.int32))
            most = int(is_full.sum(axis=1).max(initial=1))
            self._known_fullest[name] = StepAssignment(self._assignment.batch, most, {name: taken})
        return self._known_fullest[name]

    def _got_bytes(self, name: str, degrees: EncoderDegrees) -> Float64Array:
        """Bytes of keys and values that a rank gets in each block, mean of all microbatches, [num_blocks]."""
        module, (tp, cp) = self.job.model.module(name), degrees
        found = np.zeros(len(module.blocks))
        for block, layers in enumerate(() if module.tile_rows else module.blocks):
            for layer in (module.layers[index] for index in layers):
                if (attention := layer.attention) is not None:
                    reach = 2 * attention.window or math.inf
                    row_bytes = 2 * attention.kv_width / tp * self.job.mixed_precision(pipeline=True).compute
                    found[block] += row_bytes * min(self._got(name, layer, cp), reach)
        return found

    def _dealt(self, name: str) -> _Dealt:
        """Lengths of an encoder's items in some microbatches that have any."""
        if name not in self._known_dealt:
            batch, size = self.job.batch, self.shape.microbatch_size
            items = batch.items[name]
            first = np.flatnonzero(np.diff(items.example // size, prepend=-1))  # Examples ascend.
            spans = zip(first.tolist(), [*first[1:].tolist(), items.num_items])
            chosen = list(spans)[:: math.ceil(len(first) / _MAX_MICROBATCHES) or 1]
            lengths = tuple([items.length[begin:end] for begin, end in chosen])
            self._known_dealt[name] = _Dealt(lengths, len(first) / math.ceil(batch.num_examples / size))
        return self._known_dealt[name]

    def _got_rows(self, name: str, layer: Layer, cp: int) -> float:
        """Rows that a rank gets in a layer of an item that it shares, mean of all microbatches: each such item is cut
        over as many ranks as bring it under a rank's share.
        """
        got, dealt = [], self._dealt(name)
        for lengths in dealt.lengths:
            over = lengths[lengths * cp > FULLEST * lengths.sum()]
            num_ranks = np.ceil(over * cp / lengths.sum())
            got.append(float((layer.rows(over) * (1 - 1 / num_ranks)).max(initial=0.0)))
        return float(np.mean(got)) * dealt.share if got else 0.0

    def busiest_share(self, name: str, degrees: EncoderDegrees) -> float:
        """What the busiest group of ranks has of an encoder's items of a microbatch, mean of some microbatches.

        Items that are more than a group's share are cut, if groups share them.
        """
        num_groups = self.shape.tp // degrees.tp
        if num_groups == 1:
            return 1.0
        if (name, degrees) not in self._shares:
            dealt = [assign(lengths, num_groups).loads for lengths in self._dealt(name).lengths]
            total = np.sum([loads.sum() for loads in dealt] or [1])
            busiest = np.sum([self._busiest(loads, degrees) for loads in dealt] or [1])
            self._shares[name, degrees] = float(busiest / total)
        return self._shares[name, degrees]

    @staticmethod
    def _busiest(loads: Int64Array, degrees: EncoderDegrees) -> float:
        """What the busiest group has. loads: int64 [num_groups], of whole items."""
        most = FULLEST * float(loads.mean())
        return min(float(loads.max()), most) if degrees.cp > 1 else float(loads.max())

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
