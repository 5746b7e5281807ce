"""What the stages of a Plan's Program compute and hold for a batch, in seconds and bytes, from a cost model.

Each distinct layer of a module is priced once, for all replicas and microbatches of its unit together; a stage adds up
the layers that it runs. Backward is priced by what is trained and where (Cornstarch section 4.2, with the erratum on
recomputation).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np

from motet.assign.step import StepAssignment
from motet.core.arrays import Float64Array
from motet.core.plan import Plan
from motet.core.spec import Layer
from motet.core.workload import BACKBONE
from motet.cost.flops import layer_flops, work_of
from motet.cost.memory import (
    StageLayer,
    activation_bytes,
    mixed_precision,
    stage_layers,
)
from motet.cost.model import CostModel, LayerSeconds, Work
from motet.schedule import Planned, PlannedStage, part_layers
from motet.schedule.coordinates import host_of, replica_of
from motet.schedule.layout import LAYER_PARTS
from motet.simulate.engine.stage_times import Part


class StageSeconds(NamedTuple):
    """Of one stage, [num_replicas, num_microbatches] each. held: bytes that forward keeps for backward."""

    forward: Float64Array
    input: Float64Array
    weight: Float64Array
    recompute: Float64Array
    forward_tensor: Float64Array
    backward_tensor: Float64Array
    held: Float64Array


@dataclass(frozen=True, eq=False)
class _Priced:
    """One layer, for all replicas and microbatches of its unit, flat, replica by replica."""

    work: Work
    seconds: LayerSeconds
    tensor_s: Float64Array


class Pricing:
    """Prices the stages of one Plan for one assigned batch."""

    def __init__(self, plan: Plan, planned: Planned, assignment: StepAssignment, cost: CostModel) -> None:
        self.plan, self.planned, self.assignment, self.cost = plan, planned, assignment, cost
        self.precision = mixed_precision(plan.precision, pipeline=plan.schedule != "data_parallel")
        self.backbone = plan.unit_of(BACKBONE)
        self.layout = planned.layout
        self._priced = cache(self._price)
        self._first = {stage.key: stage for stage in reversed(planned.stages)}
        self._seconds = cache(lambda key: self._sum(self._first[key], self.layers(self._first[key])))
        self._parts = cache(lambda key, backward: self._slices(self._first[key], backward))

    @property
    def num_islands(self) -> int:
        return self.layout.num_islands

    def stage(self, stage: PlannedStage, island: int) -> StageSeconds:
        """[num_microbatches] each."""
        replica = replica_of(self.layout, stage, island)
        return StageSeconds(*(table[replica] for table in self._seconds(stage.key)))

    def islands(self, stage: PlannedStage) -> StageSeconds:
        """The same of all islands, [num_islands, num_microbatches] each."""
        replicas = [replica_of(self.layout, stage, island) for island in range(self.num_islands)]
        return StageSeconds(*(table[replicas] for table in self._seconds(stage.key)))

    def busiest_rank_s(self) -> Float64Array:
        """Of each island, its microbatches' seconds on the ranks that take longest for them, [num_islands]."""
        shape = self.planned.program.num_ranks, self.num_islands, self.assignment.num_microbatches
        total_s = np.zeros(shape)
        for stage in self.planned.stages:
            total_s[stage.rank] += np.sum(self.islands(stage)[:-1], axis=0)
        found: Float64Array = total_s.max(axis=0).sum(axis=1)
        return found

    def layers(self, stage: PlannedStage) -> list[StageLayer]:
        """What a stage runs, in execution order."""
        return list(stage_layers(self.plan.model, stage.layers, stage.recomputed))

    def rows(self, name: str, layer: Layer, stage: PlannedStage, island: int) -> Float64Array:
        """Rows that a layer of a module has on one of the ranks that share the stage's work, [num_microbatches]."""
        rows = self._priced(name, layer, stage.num_shares).work.rows
        found: Float64Array = rows.reshape(-1, self.assignment.num_microbatches)[replica_of(self.layout, stage, island)]
        return found

    def largest_rows(self, name: str, layer: Layer) -> float:
        """Rows of a layer in the largest microbatch of any replica, over all its context-parallel ranks."""
        return float(self._priced(name, layer, 1).work.rows.max(initial=0.0)) * self.plan.unit_of(name).cp

    def parts(self, stage: PlannedStage, *, backward: bool = False) -> tuple[Part, ...]:
        """Slices of a pass: of blocks, in data parallelism; of halves of layers, where a pipeline's bubbles are filled.

        Backward's are numbered in its own order; what neither learns nor passes a gradient on takes no time of it.
        """
        found: tuple[Part, ...] = self._parts(stage.key, backward)
        return found

    def _slices(self, stage: PlannedStage, backward: bool) -> tuple[Part, ...]:
        if host_of(self.layout, stage.unit) is not stage.unit:
            return (Part(1 / stage.num_parts),) * stage.num_parts
        if self.plan.schedule != "data_parallel":
            num_halves = 2 * (stage.num_parts // LAYER_PARTS)
            return (Part(1 / num_halves, "tensor"), Part(1 / num_halves)) * num_halves
        layers, (name,) = self.layers(stage), stage.modules
        blocks = self.plan.model.module(name).blocks
        seconds = []
        for first, stop in part_layers(stage.num_layers, stage.num_parts):
            of_part = self._sum(stage, layers[blocks[first].start : blocks[stop - 1].stop])
            passes = (of_part.input, of_part.weight, of_part.recompute) if backward else (of_part.forward,)
            seconds.append(sum(float(table.sum()) for table in passes))
        shares = [second / sum(seconds) if sum(seconds) else 1 / len(seconds) for second in seconds]
        return tuple(Part(share) for share in (reversed(shares) if backward else shares))

    def hardware_flops(self) -> int:
        """Operations of all ranks: with padding, recomputation, and what is computed several times over."""
        places = {(stage.unit.name, stage.place, stage.modules): stage for stage in self.planned.stages}
        return round(sum(self._stage_flops(stage) for stage in places.values()))

    def _stage_flops(self, stage: PlannedStage) -> float:
        """Over all replicas of the unit."""
        total = 0.0
        for placed, count in Counter(self.layers(stage)).items():
            layer = placed.layer
            flops = layer_flops(layer, self._priced(placed.module, layer, 1).work)
            own = flops.forward * (1 + placed.recomputed) + flops.weight * layer.trainable
            if placed.needs_input or (layer.trainable and layer.attention is not None):
                own = own + flops.input
            total += count * float(own.sum()) * stage.unit.cp
        return total

    def _sum(self, stage: PlannedStage, layers: Iterable[StageLayer]) -> StageSeconds:
        shape = self.assignment.modules[stage.modules[0]].num_replicas, self.assignment.num_microbatches
        total = {name: np.zeros(shape) for name in StageSeconds._fields}
        for placed, count in Counter(layers).items():
            priced = self._priced(placed.module, placed.layer, stage.num_shares)
            for name, seconds in self._passes(placed, priced, stage.unit.tp).items():
                total[name] += count * seconds.reshape(shape)
        return StageSeconds(**total)

    def _passes(self, placed: StageLayer, priced: _Priced, tp: int) -> dict[str, Float64Array]:
        """The passes that a layer has: its gradients as `cost.model.backward_seconds` has them."""
        layer, (forward_s, input_s, weight_s) = placed.layer, priced.seconds
        passes = {"forward": forward_s, "forward_tensor": priced.tensor_s}
        if placed.needs_input or (layer.trainable and layer.attention is not None):
            passes["input"] = input_s
        if layer.trainable:
            passes["weight"] = weight_s
        if placed.recomputed:
            passes["recompute"] = forward_s
        if placed.has_backward:
            passes["backward_tensor"] = priced.tensor_s * (2 if placed.recomputed else 1)
            row_bytes = activation_bytes(
                layer, 1.0, element_bytes=self.precision.compute, tp=tp, recomputed=placed.recomputed
            )
            passes["held"] = priced.work.rows * row_bytes
        return passes

    def _price(self, name: str, layer: Layer, num_shares: int) -> _Priced:
        unit, module = self.plan.unit_of(name), self.plan.model.module(name)
        num = self.assignment.num_microbatches
        items = self.assignment.modules[name]
        size = items.num_replicas * num
        batch_index = items.batch_index(num)
        targets = None
        if name == BACKBONE:
            targets = np.bincount(batch_index, self.assignment.batch.num_targets, size).astype(np.int64)
        whole = work_of(layer, items.length, batch_index, size, padded=module.padded, num_targets=targets)
        share = 1 / (unit.cp * num_shares)
        work = Work(whole.rows * share, whole.pairs * share)
        tensor_s = np.zeros(size)
        if unit.tp > 1:
            tensor_s = self.cost.tensor_seconds(layer, work, range(unit.first_rank, unit.first_rank + unit.tp))
        return _Priced(work, self.cost.layer_seconds(name, layer, work, unit.tp), tensor_s)
