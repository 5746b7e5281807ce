"""Seconds of what a Plan's Program sends: from stage to stage, and between phases."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from motet.assign.rows import sent_shares
from motet.core.arrays import Float64Array
from motet.schedule.coordinates import replica_of
from motet.schedule.edges import consumers_in
from motet.simulate.predict.collectives import Collectives
from motet.simulate.predict.stage_pricing import Pricing


class Traffic:
    """The messages of the stages that `pricing` prices. collectives: those of parameters, gradients and totals."""

    def __init__(self, pricing: Pricing) -> None:
        self.pricing, self.cost = pricing, pricing.cost
        self.plan, self.planned, self.assignment = pricing.plan, pricing.planned, pricing.assignment
        self.precision = pricing.precision
        self.collectives = Collectives(pricing)
        self._shares: dict[tuple[str, str, int], Float64Array] = {}

    def send_s(self, islands: Sequence[int], *, gradient: bool = False) -> Float64Array:
        """Seconds of sending outputs or gradients; 0 if both ends are on one rank.

        [len(islands), num_edges, num_microbatches].
        """
        num_edges = len(self.planned.program.edges)
        seconds = np.zeros((len(islands), num_edges, self.assignment.num_microbatches))
        for edge in range(num_edges):
            seconds[:, edge] = self.edge_s(edge, islands, gradient=gradient)
        return seconds

    def edge_s(self, edge: int, islands: Sequence[int], *, gradient: bool = False) -> Float64Array | float:
        """The seconds of `send_s` on one edge, [len(islands), num_microbatches]; 0.0 if both ends are on one rank."""
        source, sink = (self.planned.stages[end] for end in self.planned.program.edges[edge])
        ends = source.ranks[0], sink.ranks[0]
        if ends[0] == ends[1]:
            return 0.0
        return self.cost.send_seconds(self._sent_bytes(edge, islands, gradient=gradient), ends)

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

    def _sent_bytes(self, edge: int, islands: Sequence[int], *, gradient: bool) -> Float64Array:
        """Bytes that one tensor-parallel rank of a stage sends along an edge, or gets back: each sends all rows whole.

        [len(islands), num_microbatches].
        """
        source, sink = (self.planned.stages[end] for end in self.planned.program.edges[edge])
        total, model = np.zeros((len(islands), self.assignment.num_microbatches)), self.plan.model
        layout = self.planned.layout
        for name, stop in self.planned.outputs(edge):
            module = model.module(name)
            index, layer = module.blocks[stop - 1][-1], module.sent(stop)
            if gradient and not (layer.trainable or model.input_gradients[name][index]):
                continue
            rows = self.pricing.rows(name, layer, source, islands)
            if sink.unit is not source.unit:
                (taker, *_) = consumers_in(layout, name, sink)
                senders = [replica_of(layout, source, island) for island in islands]
                rows = rows * self._sent_shares(name, taker, replica_of(layout, sink, 0))[senders]
            total += rows * layer.output_width * self.precision.compute
        return total

    def _sent_shares(self, name: str, taker: str, receiver: int) -> Float64Array:
        """`sent_shares`. receiver: the replica of the first island that takes the rows in. Cached."""
        key = name, taker, receiver
        if key not in self._shares:
            self._shares[key] = sent_shares(self.assignment, name, taker, receiver, self.pricing.num_islands)
        return self._shares[key]
