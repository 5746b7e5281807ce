"""Seconds of what a Plan's Program sends: from stage to stage, and between phases."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np

from motet.assign.rows import num_given_rows, sent_shares
from motet.core.arrays import Float64Array
from motet.core.workload import BACKBONE
from motet.schedule import PlannedProgram, PlannedStage
from motet.schedule.coordinates import farthest_ends, replica_of, replicas_of
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
        known: dict[tuple[object, ...], Float64Array | float] = {}
        for edge in range(num_edges):
            key = sent_key(self.planned, edge)
            if key not in known:
                known[key] = self.edge_s(edge, islands, gradient=gradient)
            seconds[:, edge] = known[key]
        return seconds

    def edge_s(self, edge: int, islands: Sequence[int], *, gradient: bool = False) -> Float64Array | float:
        """The seconds of `send_s` on one edge, [len(islands), num_microbatches]; 0.0 if both ends are on one rank.

        What the ends compute (`calls_s`) is not among them.
        """
        ends = farthest_ends(self.planned.layout, *self.planned.ends(edge))
        if ends[0] == ends[1]:
            return 0.0
        sent_bytes = self._sent_bytes(edge, islands, gradient=gradient)
        seconds = self.cost.send_seconds(sent_bytes, ends)
        return np.maximum(seconds - 2 * self.cost.call_seconds(sent_bytes, ends), 0) if self.has_calls else seconds

    @cached_property
    def has_calls(self) -> bool:
        """Whether ranks compute for messages, as on CPUs."""
        return bool(self.cost.call_seconds(np.ones(1), range(2)).any())

    def calls_s(self, islands: Sequence[int], *, gradient: bool = False) -> Float64Array:
        """Seconds that ranks compute for the messages before and behind forward passes of stages, or backward passes.

        [len(islands), num_stages, num_microbatches].
        """
        shape = len(islands), len(self.planned.stages), self.assignment.num_microbatches
        seconds, known = np.zeros(shape), dict[tuple[object, ...], Float64Array]()
        for edge, (source, sink) in enumerate(self.planned.program.edges) if self.has_calls else ():
            ends = [self.planned.stages[end].ranks[0] for end in (source, sink)]
            if ends[0] != ends[1]:
                key = sent_key(self.planned, edge)
                if key not in known:
                    known[key] = self.cost.call_seconds(self._sent_bytes(edge, islands, gradient=gradient), ends)
                seconds[:, [source, sink]] += known[key][:, None]
        return seconds

    def exchange_s(self) -> Float64Array:
        """Seconds of exchanges, [num_edges, num_microbatches]: rows of encoders go to the ranks of their sequences, and
        those at queries to the ranks of their items.
        """
        unit = self.pricing.backbone
        ranks = range(unit.first_rank, unit.first_rank + unit.dp * unit.tp, unit.tp)
        node = self.plan.cluster.nodes_of(ranks)
        seconds: dict[str, Float64Array] = {}
        model = self.plan.model
        for name in (module.name for module in model.modules if module.name != BACKBONE):
            row_bytes = model.moved(name)[0].output_width * self.precision.compute
            rows = self.assignment.moved_rows(name, node, merges=model.merges)
            moved_bytes = rows.in_bytes(row_bytes, unit.tp)
            seconds[name] = self.cost.exchange_seconds(moved_bytes, ranks)
        # One end of each edge is the backbone's, and the other says what moves.
        edges = self.planned.program.distinct_edges
        ends = ((self.planned.stages[stage].modules[0] for stage in edge) for edge in edges)
        names = [next(name for name in pair if name != BACKBONE) for pair in ends]
        if not names:
            return np.zeros((1, 1))
        of_all: Float64Array = np.tile(
            np.stack([seconds[name] for name in names]), (len(self.planned.program.edges) // len(edges), 1)
        )
        return of_all

    def _sent_bytes(self, edge: int, islands: Sequence[int], *, gradient: bool) -> Float64Array:
        """Bytes that one tensor-parallel rank of a stage sends along an edge, or gets back: each sends all rows whole.

        [len(islands), num_microbatches].
        """
        source, sink = self.planned.ends(edge)
        total, model = np.zeros((len(islands), self.assignment.num_microbatches)), self.plan.model
        layout = self.planned.layout
        for name, stop in self.planned.outputs(edge):
            layer, has_gradient = model.sent(name, stop)
            if gradient and not has_gradient:
                continue
            senders = replicas_of(layout, source, islands)
            if stop == 0:
                rows = self._given_rows(name, source, sink)[senders]
            elif sink.unit is source.unit:
                rows = self.pricing.rows(name, layer, source, islands)
            else:
                (taker, *_) = consumers_in(layout, name, sink)
                rows = self.pricing.sent_rows(name, layer, source, islands)
                rows = rows * self._sent_shares(name, taker, replica_of(layout, sink, 0))[senders]
            total += rows * layer.output_width * self.precision.compute
        return total

    def _given_rows(self, name: str, source: PlannedStage, sink: PlannedStage) -> Float64Array:
        """`num_given_rows` of an edge, in float64; of ranks that share sequences, an equal part of them."""
        receiver = replica_of(self.planned.layout, sink, 0) if sink.unit is not source.unit else None
        return num_given_rows(self.assignment, name, receiver, self.pricing.num_islands) / source.unit.cp

    def _sent_shares(self, name: str, taker: str, receiver: int) -> Float64Array:
        """`sent_shares`. receiver: the replica of the first island that takes the rows in. Cached."""
        key = name, taker, receiver
        if key not in self._shares:
            self._shares[key] = sent_shares(self.assignment, name, taker, receiver, self.pricing.num_islands)
        return self._shares[key]


def sent_key(planned: PlannedProgram, edge: int) -> tuple[object, ...]:
    """Equal for edges of a pipeline whose messages take the same seconds in both directions. edge: its number."""
    source, sink = planned.ends(edge)
    layout, plan = planned.layout, planned.layout.plan
    outputs = [(name, stop == 0, *plan.model.sent(name, stop)) for name, stop in planned.outputs(edge)]
    ends = [(end.unit.name, replica_of(layout, end, 0)) for end in (source, sink)]
    consumers = [consumers_in(layout, name, sink) for name, *_ in outputs] if source.unit is not sink.unit else []
    ranks, node_of = farthest_ends(layout, source, sink), plan.cluster.node_of
    link = (ranks[0] == ranks[1], node_of(ranks[0]) == node_of(ranks[1]))
    return (*outputs, *ends, *map(tuple, consumers), *link)
