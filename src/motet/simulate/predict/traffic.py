"""What a Plan's Program sends, in seconds: from stage to stage, between phases, and over data-parallel ranks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np

from motet.core.arrays import Float64Array
from motet.core.spec import Layer
from motet.schedule import PlannedStage
from motet.schedule.edges import under_way
from motet.simulate.predict.stage_pricing import Pricing

_TOTALS_BYTES = 3 * 8


class CollectiveSeconds(NamedTuple):
    """Seconds. gather_s: of the parameters, over the ranks that share one copy. reduce_s: of the gradients, within a
    copy; where no rank shares one, over all. replicas_s: of one rank's share of the gradients, over copies.
    """

    gather_s: float
    reduce_s: float
    replicas_s: float


class _Size(NamedTuple):
    """Parameters of one tensor-parallel rank: all, those that learn, and those of them that it updates itself."""

    total: float
    trainable: float
    updated: float


class Traffic:
    """The messages of the stages that `pricing` prices."""

    def __init__(self, pricing: Pricing) -> None:
        self.pricing, self.cost = pricing, pricing.cost
        self.plan, self.planned, self.assignment = pricing.plan, pricing.planned, pricing.assignment
        self.precision = pricing.precision
        first = {stage.key: stage for stage in self.planned.stages}
        self._collectives = cache(lambda key: self._priced(first[key]))
        self._sizes = cache(lambda key: self._size(first[key]))

    def send_s(self, island: int, *, gradient: bool = False) -> Float64Array:
        """[num_edges, num_microbatches], of outputs, or of their gradients; 0 where both ends are on one rank."""
        stages, edges = self.planned.stages, self.planned.program.edges
        seconds = np.zeros((len(edges), self.assignment.num_microbatches))
        for number, ((source, sink), share) in enumerate(zip(edges, self.planned.shares, strict=True)):
            ends = stages[source].ranks[0], stages[sink].ranks[0]
            if ends[0] != ends[1]:
                sent = self._sent_bytes(stages[source], stages[sink], island, gradient=gradient)
                seconds[number] = self.cost.send_seconds(sent * float(share), ends)
        return seconds

    def exchange_s(self) -> Float64Array:
        """[num_edges, num_microbatches]: outputs of encoders, to the ranks that run their examples' sequences."""
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

    def collectives(self, stage: PlannedStage) -> CollectiveSeconds:
        """Of a stage's parameters and gradients."""
        found: CollectiveSeconds = self._collectives(stage.key)
        return found

    def step_s(self) -> Float64Array:
        """The optimizer, [num_ranks] of the Program: each updates its share of what learns."""
        held = np.zeros(self.planned.program.num_ranks)
        for stage in self.planned.stages:
            held[stage.rank] += self._sizes(stage.key).updated
        seconds = {number: self.cost.step_seconds(round(number)) for number in set(held.tolist())}
        return np.array([seconds[number] for number in held.tolist()])

    def norm_s(self) -> Float64Array:
        """The sum of the gradient's norm, the loss and the targets over all ranks, [1]: pipelines have no NORM."""
        if self.plan.schedule != "data_parallel":
            return np.zeros(1)
        return np.array([self.cost.all_reduce_seconds(_TOTALS_BYTES, self.planned.stages[0].data_ranks)])

    def _size(self, stage: PlannedStage) -> _Size:
        return self._size_of([placed.layer for placed in self.pricing.layers(stage)], stage)

    def _units(self, stage: PlannedStage) -> list[_Size]:
        """What is gathered and reduced by a message each: in data parallelism the transformer layers, and the rest."""
        layers = [placed.layer for placed in self.pricing.layers(stage)]
        units = sharded_units(layers) if self.plan.schedule == "data_parallel" else [layers]
        return [self._size_of(unit, stage) for unit in units]

    def _size_of(self, layers: Sequence[Layer], stage: PlannedStage) -> _Size:
        total = sum(layer.parameters for layer in layers) / stage.unit.tp
        trainable = sum(layer.parameters for layer in layers if layer.trainable) / stage.unit.tp
        return _Size(total, trainable, trainable / len(self._sharing(stage)[0]))

    def _priced(self, stage: PlannedStage) -> CollectiveSeconds:
        """In a pipeline, one reduction is over all ranks; in data parallelism the sum over copies is one of its own.

        Frozen parameters are gathered only where they are sharded: under ZeRO 3, and by FSDP.
        """
        colocated = self.plan.schedule == "data_parallel"
        (shards, replicas), units, cost = self._sharing(stage), self._units(stage), self.cost
        replicas_s = 0.0
        if len(replicas) > 1:
            shares = (one.trainable * self.precision.gradient / len(shards) for one in units)
            replicas_s = sum(cost.all_reduce_seconds(size_bytes, replicas) for size_bytes in shares)
        if len(shards) == 1:
            return CollectiveSeconds(0.0, replicas_s, replicas_s)
        gathered = (one.total if colocated or stage.zero == 3 else one.trainable for one in units)
        gather_s = sum(cost.gather_seconds(number * self.precision.compute, shards) for number in gathered)
        reduce_s = sum(cost.reduce_scatter_seconds(one.trainable * self.precision.gradient, shards) for one in units)
        if not colocated:
            reduce_s += replicas_s
        return CollectiveSeconds(gather_s, reduce_s, replicas_s)

    def _sharing(self, stage: PlannedStage) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The ranks that share one copy of the stage's state with its first, and those that hold the same share."""
        ranks = stage.data_ranks
        return ranks[: stage.shard_size], ranks[:: stage.shard_size]

    def _sent_bytes(self, source: PlannedStage, sink: PlannedStage, island: int, *, gradient: bool) -> Float64Array:
        """What one tensor-parallel rank of a stage sends to another stage, or gets back, [num_microbatches]."""
        total, model = np.zeros(self.assignment.num_microbatches), self.plan.model
        for name, stop in under_way(self.planned.layout, source, sink):
            module = model.module(name)
            place = module.blocks[stop - 1][-1]
            layer = module.layers[place]
            if gradient and not (layer.trainable or model.input_gradients[name][place]):
                continue
            rows = self.pricing.rows(name, layer, source, island)
            total += rows * layer.output_width * self.precision.compute / source.unit.tp
        return total


def sharded_units(layers: Sequence[Layer]) -> list[tuple[Layer, ...]]:
    """The layers of a module that FSDP gathers and reduces by one message each: transformer layers, and the rest."""
    blocks = [(layer,) for layer in layers if layer.attention is not None]
    return [*blocks, tuple(layer for layer in layers if layer.attention is None)]
