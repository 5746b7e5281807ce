"""Seconds and bytes of the layers of a Plan for the examples of a step, from a cost model.

Each distinct layer of a module is priced once, for all replicas and microbatches of its unit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from motet.assign.step import ModuleAssignment, StepAssignment
from motet.core.arrays import Float64Array
from motet.core.plan import Plan, Unit
from motet.core.spec import Layer
from motet.core.workload import BACKBONE
from motet.cost.flops import expert_shares
from motet.cost.memory import StageLayer, kept_bytes, plan_precision
from motet.cost.model import Beyond, CostModel, LayerSeconds, Runs, Work
from motet.simulate.predict.context_pricing import ContextPrice, ContextPricing
from motet.simulate.predict.exchange_seconds import even_exchanges_s
from motet.simulate.predict.layer_work import LayerWork


@dataclass(frozen=True, eq=False)
class LayerPrice:
    """The price of one layer: columns [num_replicas * num_microbatches] of its unit, replica by replica.

    whole:     what all ranks compute that share a replica's work. work: what the busiest of them does.
    tensor_s:  communication of ranks that share products and experts, in one pass.
    beside_s:  of it, that beside which other work can run (`pass_parts.py`): the sums of products.
    context:   the exchange of rows between context-parallel ranks in attention.
    """

    whole: Work
    work: Work
    seconds: LayerSeconds
    tensor_s: Float64Array
    beside_s: Float64Array
    context: ContextPrice


class LayerPricing:
    """Prices the layers of one Plan for one assigned batch.

    cost: of the Plan's schedule (`CostModel.unwrapped`). exchange: as of `ContextPricing`.
    beyond: by module, how far what was priced is beyond what was measured.
    """

    def __init__(self, plan: Plan, assignment: StepAssignment, cost: CostModel, exchange: str) -> None:
        self.plan, self.assignment, self.cost = plan, assignment, cost
        self.precision = plan_precision(plan)
        self.work = LayerWork(plan, assignment)
        self.beyond: dict[str, Beyond] = {}
        self._context = ContextPricing(self.work, cost, exchange)
        self._known: dict[tuple[str, Layer], LayerPrice] = {}
        self._known_passes: dict[tuple[StageLayer, int], dict[str, Float64Array]] = {}

    def price(self, name: str, layer: Layer) -> LayerPrice:
        """The price of a layer of a module, in all microbatches of all replicas of its unit. Kept."""
        key = name, layer
        if key not in self._known:
            self._known[key] = self._price(name, layer)
        return self._known[key]

    def of_passes(self, placed: StageLayer, tp: int) -> dict[str, Float64Array]:
        """What a layer of a stage takes and keeps, by field of StagePrices, flat; without what is 0 throughout.

        Kept: stages consist of the same few layers.
        """
        key = placed, tp
        if key not in self._known_passes:
            passes = self._passes(placed, tp)
            self._known_passes[key] = {name: prices for name, prices in passes.items() if prices.any()}
        return self._known_passes[key]

    def largest_rows(self, name: str, layer: Layer) -> float:
        """The most rows of a layer on any rank in any microbatch, times the context-parallel ranks of its unit."""
        return float(self.price(name, layer).work.rows.max(initial=0.0)) * self.plan.unit_of(name).cp

    def largest_copies(self, name: str, layer: Layer) -> float:
        """The most bytes of copies of other ranks' rows that attention takes in a layer on any rank."""
        return float(self.price(name, layer).context.copied_bytes.max(initial=0.0))

    def _passes(self, placed: StageLayer, tp: int) -> dict[str, Float64Array]:
        """`of_passes` with what is 0. Gradients are as in `cost.model.backward_seconds`."""
        layer, priced = placed.layer, self.price(placed.module, placed.layer)
        forward_s, input_s, weight_s = priced.seconds
        context_s = priced.context.seconds
        passes = {"forward": forward_s, "forward_tensor": priced.tensor_s + context_s}
        if share := layer.input_share(placed.needs_input):
            passes["input"] = share * input_s
        if layer.trainable:
            half = "weight" if layer.defers_weights else "input"
            passes[half] = passes.get(half, 0.0) + weight_s
        if placed.recomputed:
            passes["recompute"] = forward_s
        if placed.has_backward:
            # Backward keeps the keys and values that it got, and sends their gradients back.
            passes["backward_tensor"] = (priced.tensor_s + context_s) * (2 if placed.recomputed else 1)
            row_bytes = kept_bytes(placed, 1.0, tp, self.precision.compute)
            copied_bytes = 0.0 if placed.recomputed else priced.context.copied_bytes
            passes["held"] = priced.work.rows * row_bytes[placed.recomputed] + copied_bytes
        return passes

    def _price(self, name: str, layer: Layer) -> LayerPrice:
        unit, items = self.plan.unit_of(name), self.assignment.modules[name]
        work = self.work.of_busiest(name, layer)
        tensor_s = np.zeros(len(work.rows))
        if unit.tp > 1:
            groups = self.plan.cluster.unlike(unit.ranks, unit.tp)
            tensor_s = np.max([self.cost.tensor_seconds(layer, work, ranks) for ranks in groups], axis=0)
        # Sums of a backbone take as long as gathers of rows. Encoders whose sums are apart have all-reduces alone.
        beside_s = 0.5 * tensor_s if name == BACKBONE else tensor_s
        if unit.ep > 1 and layer.num_experts:
            tensor_s = tensor_s + self._experts_s(unit, layer, work.rows)
        context = self._context.price(name, layer)
        beyond = self.cost.beyond(name, layer, work, unit.tp)
        self.beyond[name] = self.beyond.get(name, Beyond()).or_further(beyond)
        if work.runs is not None and context.by_heads.any():
            by_rows = ~context.by_heads
            work = replace(work, runs=Runs(*(column * by_rows for column in work.runs)))
        seconds = self.cost.layer_seconds(name, layer.with_experts_of(unit.ep), work, unit.tp)
        if layer.num_experts and unit.expert_replicas > 1 and items.num_replicas == unit.dp:
            seconds, tensor_s = self._with_experts_shared(unit, layer, work, seconds, tensor_s)
        if layer.attention is not None and items.cuts is not None:
            seconds = self._met(seconds, items)
        return LayerPrice(self.work.of_replicas(name, layer), work, seconds, tensor_s, beside_s, context)

    def _met(self, seconds: LayerSeconds, items: ModuleAssignment) -> LayerSeconds:
        """Seconds of a layer in whose attention all replicas wait for each other where they share sequences."""
        shape = items.num_replicas, self.assignment.num_microbatches
        is_met = np.isin(np.arange(shape[1]), items.microbatch[items.cuts.items] if items.cuts is not None else ())
        forward, backward = (
            np.where(is_met, column.reshape(shape).max(axis=0), column.reshape(shape)).ravel()
            for column in (seconds.forward_s, seconds.input_s)
        )
        return seconds._replace(forward_s=forward, input_s=backward)

    def _with_experts_shared(
        self, unit: Unit, layer: Layer, work: Work, seconds: LayerSeconds, tensor_s: Float64Array
    ) -> tuple[LayerSeconds, Float64Array]:
        """Seconds of a layer of which replicas share experts: each computes as much of these as any other of them.

        In data parallelism each takes what the slowest of them does; in a pipeline they run passes together
        (`met_passes.py`).
        """
        groups = -1, unit.expert_replicas, self.assignment.num_microbatches

        def over_all(column: Float64Array, of_all: Callable[..., Float64Array]) -> Float64Array:
            """The mean, say, over the replicas of each group, in place of a column of them."""
            of_groups = column.reshape(groups)
            return np.broadcast_to(of_all(of_groups, axis=1, keepdims=True), of_groups.shape).ravel()

        passes = [
            column * (1 - share) + over_all(column * share, np.mean)
            for column, share in zip(seconds, expert_shares(layer, work), strict=True)
        ]
        if self.plan.schedule == "data_parallel":
            *passes[:2], tensor_s = (over_all(column, np.max) for column in (*passes[:2], tensor_s))
        return LayerSeconds(*passes), tensor_s

    def _experts_s(self, unit: Unit, layer: Layer, rows: Float64Array) -> Float64Array:
        """Seconds in which rows go to the ranks of their experts and back, in one pass of a layer, [len(rows)].

        Routers are taken to choose all experts equally often, so that each rank gets as many rows as it has.
        """
        # Each tensor-parallel rank sends rows to its own part of each one's experts.
        to_each = rows * layer.experts_per_row * layer.output_width * self.precision.compute / (unit.ep * unit.tp)
        cluster = self.plan.cluster
        groups = cluster.unlike(unit.ranks, unit.ep, apart=unit.tp)
        slowest: Float64Array = np.max(
            [even_exchanges_s(self.cost, cluster, to_each, ranks) for ranks in groups], axis=0
        )
        return 2 * slowest
