"""Seconds of what a Plan's Program sends: from stage to stage, and between phases."""

from __future__ import annotations

import numpy as np

from motet.assign.rows import sent_share
from motet.core.arrays import Float64Array
from motet.schedule import PlannedStage
from motet.schedule.coordinates import replica_of
from motet.schedule.edges import consumers_in, edge_outputs
from motet.simulate.predict.collectives import Collectives
from motet.simulate.predict.stage_pricing import Pricing


class Traffic:
    """The messages of the stages that `pricing` prices. collectives: those of parameters, gradients and totals."""

    def __init__(self, pricing: Pricing) -> None:
        self.pricing, self.cost = pricing, pricing.cost
        self.plan, self.planned, self.assignment = pricing.plan, pricing.planned, pricing.assignment
        self.precision = pricing.precision
        self.collectives = Collectives(pricing)

    def send_s(self, island: int, *, gradient: bool = False) -> Float64Array:
        """Seconds of sending outputs or gradients, [num_edges, num_microbatches]; 0 if both ends are on one rank."""
        stages, edges = self.planned.stages, self.planned.program.edges
        seconds = np.zeros((len(edges), self.assignment.num_microbatches))
        for number, (source, sink) in enumerate(edges):
            ends = stages[source].ranks[0], stages[sink].ranks[0]
            if ends[0] != ends[1]:
                sent = self._sent_bytes(stages[source], stages[sink], island, gradient=gradient)
                seconds[number] = self.cost.send_seconds(sent, ends)
        return seconds

    def exchange_s(self) -> Float64Array:
        """Seconds of exchanges of encoder outputs, [num_edges, num_microbatches]: rows go to their sequences' ranks."""
        unit = self.pricing.backbone
        ranks = range(unit.first_rank, unit.first_rank + unit.dp * unit.tp, unit.tp)
        node = np.array([self.plan.cluster.node_of(rank) for rank in ranks])
        seconds: dict[str, Float64Array] = {}
        for module in self.plan.model.modules[:-1]:
            row_bytes = module.layers[-1].output_width * self.precision.compute
            moved_bytes = self.assignment.moved_rows(module.name, node).in_bytes(row_bytes, unit.tp)
            seconds[module.name] = self.cost.exchange_seconds(moved_bytes, ranks)
        names = [self.planned.stages[source].modules[0] for source, _ in self.planned.program.edges]
        return np.stack([seconds[name] for name in names]) if names else np.zeros((1, 1))

    def _sent_bytes(self, source: PlannedStage, sink: PlannedStage, island: int, *, gradient: bool) -> Float64Array:
        """Bytes that one tensor-parallel rank of a stage sends to another stage, or gets back, [num_microbatches]."""
        total, model = np.zeros(self.assignment.num_microbatches), self.plan.model
        layout = self.planned.layout
        replicas = replica_of(layout, source, island), replica_of(layout, sink, island)
        for name, stop in edge_outputs(layout, source, sink):
            module = model.module(name)
            index, layer = module.blocks[stop - 1][-1], module.sent(stop)
            if gradient and not (layer.trainable or model.input_gradients[name][index]):
                continue
            rows = self.pricing.rows(name, layer, source, island)
            if sink.unit is not source.unit:
                (taker, *_) = consumers_in(layout, name, sink)
                rows = rows * sent_share(self.assignment, (name, replicas[0]), (taker, replicas[1]))
            total += rows * layer.output_width * self.precision.compute / source.unit.tp
        return total
