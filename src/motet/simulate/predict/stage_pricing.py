"""Seconds and bytes of the stages of a Plan's Program for the examples of a step, from a cost model.

A stage is the sum of its layers (`layer_pricing.py`). Backward is priced by which parameters are trainable (Cornstarch
section 4.2, and its erratum on recomputation).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from motet.assign.step import StepAssignment
from motet.core.arrays import BoolArray, Float64Array, Int64Array
from motet.core.plan import SPLITS_BACKWARD, Plan
from motet.core.spec import Layer
from motet.core.workload import BACKBONE
from motet.cost.flops import operations_by_work
from motet.cost.memory import StageLayer, stage_layers, taken_bytes
from motet.cost.model import CostModel
from motet.schedule import PlannedProgram, PlannedStage, parts_of
from motet.schedule.coordinates import host_of, replica_of, replicas_of
from motet.schedule.from_plan import StageKind
from motet.schedule.plan_units import gathering_ranks, is_wrapped
from motet.schedule.program import AlikeItems
from motet.simulate.engine.stage_times import Part
from motet.simulate.predict.given_seconds import given_seconds
from motet.simulate.predict.layer_pricing import LayerPricing
from motet.simulate.predict.pass_parts import is_finer, parts_of_pass
from motet.simulate.predict.skipped_flops import skipped_flops

_ZERO = np.zeros(())
_FEW = 8
"""Prices of so many times fewer replicas than there are count as few."""

Recomputed = Mapping[str, Int64Array]
"""Module -> recomputed blocks, int64 [num_replicas, num_microbatches]; for Plans of data parallelism."""
Recomputes = Callable[[StepAssignment], Recomputed]
"""What training decides to recompute in each microbatch of an assigned step."""


class StagePrices(NamedTuple):
    """Prices of one stage, [num_replicas, num_microbatches] each: seconds, and `held`, bytes kept for backward."""

    forward: Float64Array
    input: Float64Array
    weight: Float64Array
    recompute: Float64Array
    forward_tensor: Float64Array
    backward_tensor: Float64Array
    held: Float64Array


class PassPrices(NamedTuple):
    """Seconds of the passes of one stage, [len(islands), num_microbatches]. backward: recomputation included."""

    forward: Float64Array
    backward: Float64Array


class Pricing:
    """Prices the stages of one Plan for one assigned batch.

    recomputed: in place of the Plan's numbers.
    exchange: as of `ContextPricing`.
    like: a Pricing of another batch of the same Plan, with which it shares what does not depend on lengths.
    """

    def __init__(
        self,
        plan: Plan,
        planned: PlannedProgram,
        assignment: StepAssignment,
        cost: CostModel,
        recomputed: Recomputed | None = None,
        like: Pricing | None = None,
        exchange: str = "auto",
    ) -> None:
        measured = cost.as_measured(plan.model)
        plan = plan if measured is plan.model else replace(plan, model=measured)
        self.plan, self.planned, self.assignment = plan, planned, assignment
        splits = plan.schedule in SPLITS_BACKWARD
        self.cost = cost if is_wrapped(plan) else cost.unwrapped(waits=splits)
        self.layer_pricing = LayerPricing(plan, assignment, self.cost, exchange)
        self.precision = self.layer_pricing.precision
        self.backbone = plan.unit_of(BACKBONE)
        self.layout = planned.layout
        # Not `functools.cache` of own methods: what holds itself, and large arrays, waits for the garbage collector.
        self._known_stages: dict[object, StagePrices] = {}
        self._known_sums: dict[object, StagePrices] = {}
        self._known_busy: dict[object, Float64Array] = {}
        self._known_held: dict[object, Float64Array] = {}
        self._known_flops: dict[StageLayer, float] = {}
        self._known_passes: dict[tuple[StageLayer, int], Float64Array] = {}
        self._known_parts: dict[object, tuple[Part, ...]] = {}
        self._known_totals: dict[object, StagePrices] = {}
        self._first = {kind.stage.key: kind.stage for kind in planned.kinds}
        self.recomputed = recomputed or {}
        self._layers: dict[tuple[object, ...], Counter[StageLayer]] = {} if like is None else like._layers

    @property
    def num_islands(self) -> int:
        """Number of islands of the job."""
        return self.layout.num_islands

    def stage(self, stage: PlannedStage, island: int) -> StagePrices:
        """The prices of a stage in one island, [num_microbatches] each."""
        replica = replica_of(self.layout, stage, island)
        return StagePrices(*(table[replica] for table in self._seconds(stage.key)))

    def islands(self, stage: PlannedStage) -> StagePrices:
        """The prices of a stage in all islands, [num_islands, num_microbatches] each. Nothing may be written there."""
        first, apart = replica_of(self.layout, stage, 0), self.layout.num_replicas(host_of(self.layout, stage.unit))
        return StagePrices(*(table[first::apart] for table in self._seconds(stage.key)))

    def passes(self, stage: PlannedStage, islands: Sequence[int]) -> PassPrices:
        """What the passes of a stage of a pipeline take, [len(islands), num_microbatches] each. It is not kept."""
        ((layers, _),) = self._cases(stage)
        (entered, again), (given, back) = self._entries(stage), given_seconds(self, stage)
        passes = np.stack([entered + given, again + back])
        for placed, count in layers.items():
            passes += count * self._layer_passes(placed, stage)
        return PassPrices(*passes[:, replicas_of(self.layout, stage, islands)])

    def in_islands(self, islands: Sequence[int]) -> StagePrices:
        """The prices of all stages in some islands, [len(islands), num_stages, num_microbatches] each."""
        shape = len(islands), len(self.planned.stages), self.assignment.num_microbatches
        tables = StagePrices(*(np.zeros(shape) for _ in StagePrices._fields))
        for kind, replicas in self._replicas(islands):
            for table, of_kind in zip(tables, self._seconds_of(kind.stage.key, replicas)):
                table[:, kind.numbers] = of_kind
        return tables

    def held(self) -> Float64Array:
        """`StagePrices.held` of all stages in all islands, [num_islands, num_stages, num_microbatches]."""
        islands = range(self.num_islands)
        held = np.zeros((len(islands), len(self.planned.stages), self.assignment.num_microbatches))
        for kind, replicas in self._replicas(islands):
            held[:, kind.numbers] = self._held_bytes(kind.stage)[replicas]
        return held

    def busiest_rank_s(self) -> Float64Array:
        """For each island, the sum over microbatches of the seconds on the busiest rank, [num_islands]."""
        total_s = np.zeros((self.num_islands, self.planned.program.num_ranks, self.assignment.num_microbatches))
        for kind, replicas in self._replicas(range(self.num_islands)):
            total_s[:, kind.ranks] += self._busy_s(kind.stage)[replicas]
        busiest_s: Float64Array = total_s.max(axis=1).sum(axis=1)
        return busiest_s

    def layers(self, stage: PlannedStage) -> list[StageLayer]:
        """The layers of a stage, in execution order."""
        return list(stage_layers(self.plan.model, stage.layers, stage.recomputed, whole_rows=stage.has_sums))

    def of_layers(self, stage: PlannedStage, layers: Sequence[StageLayer]) -> StagePrices:
        """The prices of some layers of a stage of a pipeline, [num_replicas, num_microbatches] each."""
        return self._sum(stage, Counter(layers))

    def rows(self, name: str, layer: Layer, stage: PlannedStage, islands: Sequence[int]) -> Float64Array:
        """Rows of a layer of a module on one of the ranks that share the stage's work.

        [len(islands), num_microbatches].
        """
        rows = self.layer_pricing.price(name, layer).work.rows
        by_replica = rows.reshape(-1, self.assignment.num_microbatches)
        replica_rows: Float64Array = by_replica[replicas_of(self.layout, stage, islands)]
        return replica_rows

    def sent_rows(self, name: str, layer: Layer, stage: PlannedStage, islands: Sequence[int]) -> Float64Array:
        """As `rows`, behind the last block of an encoder that sends them to another unit: they may have come together.

        layer: the last one.
        """
        rows = self.rows(name, layer, stage, islands)
        if (num_ranks := gathering_ranks(self.plan, stage.unit)) == 1:
            return rows
        by_replica = self.layer_pricing.price(name, layer).whole.rows.reshape(-1, self.assignment.num_microbatches)
        # The fullest rank has the most rows, and no context-parallel rank of the backbone more than all.
        return np.minimum(by_replica[replicas_of(self.layout, stage, islands)], num_ranks * rows)

    def parts(self, stage: PlannedStage, *, backward: bool = False) -> tuple[Part, ...]:
        """`parts_of_pass`, kept."""
        key = stage.key, backward
        if key not in self._known_parts:
            self._known_parts[key] = parts_of_pass(self, self._first[stage.key], backward)
        return self._known_parts[key]

    def pass_s(self, stage: PlannedStage, layers: Mapping[StageLayer, int], backward: bool) -> tuple[float, ...]:
        """Seconds of layers: in forward, or in backward for the input, for the weights, and of recomputation."""
        key = stage.unit.name, tuple(layers.items())
        if key not in self._known_totals:
            self._known_totals[key] = StagePrices(*(table.sum() for table in self._sum(stage, layers)))
        total = self._known_totals[key]
        passes = (total.input, total.weight, total.recompute) if backward else (total.forward,)
        return tuple(map(float, passes))

    def hardware_flops(self) -> int:
        """Operations of all ranks, with padding, recomputation and replicated encoders, less those of passes that data
        parallelism leaves out.
        """
        stages = self.planned.stages
        every = stages.first if isinstance(stages, AlikeItems) else stages
        distinct = {(stage.unit.name, stage.index, stage.modules): stage for stage in every}
        return round(sum(self._stage_flops(stage) for stage in distinct.values())) - skipped_flops(self)

    def none(self, stage: PlannedStage) -> Float64Array:
        """Zeros of all replicas and microbatches, of which nothing can be written, without memory of their own."""
        return np.broadcast_to(_ZERO, self._shape(stage))

    def _replicas(self, islands: Sequence[int]) -> Iterator[tuple[StageKind, Int64Array]]:
        """Each kind of stage, and the replicas whose items its stages compute, int64 [len(islands), num_alike]."""
        first = np.array(islands)[:, None]
        for kind in self.planned.kinds:
            yield kind, first * self.layout.num_replicas(host_of(self.layout, kind.stage.unit)) + kind.replicas

    def _seconds(self, key: tuple[object, ...]) -> StagePrices:
        if key not in self._known_stages:
            self._known_stages[key] = self._of_stage(self._first[key])
        return self._known_stages[key]

    def _seconds_of(self, key: tuple[object, ...], replicas: Int64Array) -> StagePrices:
        """The prices of a stage for some replicas, [*replicas.shape, num_microbatches] each.

        Of few replicas no table of all is made, and so nothing is kept: of each kind of stage it would be as long as
        the batch.
        """
        if key in self._known_stages or _FEW * replicas.size > self._shape(self._first[key])[0]:
            return StagePrices(*(table[replicas] for table in self._seconds(key)))
        return self._of_stage(self._first[key], replicas)

    def _busy_s(self, stage: PlannedStage) -> Float64Array:
        """Seconds of all passes of a stage of a pipeline, [num_replicas, num_microbatches]."""
        ((layers, _),) = self._cases(stage)
        key = (stage.unit.name, *layers.items())
        if key not in self._known_busy:
            busy_s = np.zeros(self._shape(stage))
            for placed, count in layers.items():
                forward, backward = self._layer_passes(placed, stage)
                busy_s += count * (forward + backward)
            self._known_busy[key] = busy_s
        return _added(self._known_busy[key], *self._entries(stage), *given_seconds(self, stage))

    def _held_bytes(self, stage: PlannedStage) -> Float64Array:
        """`StagePrices.held` of a stage, [num_replicas, num_microbatches]."""
        if stage.key in self._known_stages or self.recomputed:
            return self._seconds(stage.key).held
        ((layers, _),) = self._cases(stage)
        key = (stage.unit.name, *layers.items())
        if key not in self._known_held:
            held = np.zeros(self._shape(stage))
            for placed, count in layers.items():
                kept = self.layer_pricing.of_passes(placed, stage.unit.tp).get("held")
                if kept is not None:
                    held += count * kept.reshape(held.shape)
            self._known_held[key] = held
        return _added(self._known_held[key], self._held_inside(stage) + self._held_rows(stage))

    def _stage_flops(self, stage: PlannedStage) -> float:
        """Operations of a stage, over all replicas of its unit."""
        total = 0.0
        for layers, chosen in self._cases(stage):
            which = None if chosen.all() else chosen.ravel()
            for placed, count in layers.items():
                total += count * self._flops_of(placed, which)
        return total

    def _flops_of(self, placed: StageLayer, chosen: BoolArray | None) -> float:
        """Operations of a layer in all microbatches, or those chosen, bool [num_replicas * num_microbatches]."""
        if chosen is not None or placed not in self._known_flops:
            work = self.layer_pricing.price(placed.module, placed.layer).whole
            (each,) = operations_by_work([placed[1:4]]).values()
            total = float(each.row) * work.rows + float(each.pair) * work.pairs
            if chosen is not None:
                return float(total[chosen].sum())
            self._known_flops[placed] = float(total.sum())
        return self._known_flops[placed]

    def _shape(self, stage: PlannedStage) -> tuple[int, int]:
        return self.assignment.modules[stage.modules[0]].num_replicas, self.assignment.num_microbatches

    def _cases(self, stage: PlannedStage) -> Iterator[tuple[Mapping[StageLayer, int], BoolArray]]:
        """The layers of a stage, and the microbatches, [num_replicas, num_microbatches], that recompute so."""
        numbers = self.recomputed.get(stage.modules[0])
        if numbers is None:
            if stage.key not in self._layers:
                self._layers[stage.key] = Counter(self.layers(stage))
            yield self._layers[stage.key], np.ones(self._shape(stage), dtype=np.bool_)
            return
        (name,) = stage.modules
        for number in np.unique(numbers).tolist():
            yield Counter(stage_layers(self.plan.model, stage.layers, {name: number})), numbers == number

    def _of_stage(self, stage: PlannedStage, replicas: Int64Array | None = None) -> StagePrices:
        """The prices of a stage, of all replicas if none are given. Stages with the same layers, beside which there is
        nothing, then share one result."""
        cases = [
            (self._sum_of_all(stage, layers) if replicas is None else self._sum(stage, layers, replicas), chosen)
            for layers, chosen in self._cases(stage)
        ]
        of = slice(None) if replicas is None else replicas
        prices = cases[0][0]
        if len(cases) > 1:
            which = [chosen[of] for _, chosen in cases]
            prices = StagePrices(*(np.select(which, columns) for columns in zip(*(each for each, _ in cases))))
        (entered, again), (given, back) = self._entries(stage), given_seconds(self, stage)
        beside = {
            "forward": entered,
            "recompute": again,
            "forward_tensor": given,
            "backward_tensor": back,
            "held": self._held_inside(stage) + self._held_rows(stage),
        }
        return prices._replace(**{name: _added(getattr(prices, name), table[of]) for name, table in beside.items()})

    def _entries(self, stage: PlannedStage) -> tuple[Float64Array, Float64Array]:
        """What forward and recomputation take where they begin inside modules (`CostModel.entry_seconds`).

        A stage of a pipeline runs the blocks of a module that it recomputes apart from others. In data parallelism they
        run inside the one pass, and what is cut finer than stages, in bubbles, is not counted.
        """
        forward = recompute = self.none(stage)
        for name, (first, stop) in stage.layers.items() if self.plan.schedule != "data_parallel" else ():
            entry_s, number = self.cost.entry_seconds(name), stage.recomputed.get(name, 0)
            if entry_s and first < stop:
                module = self.plan.model.module(name)
                priced = self.layer_pricing.price(name, module.layers[module.blocks[first].start])
                has_rows = priced.work.rows.reshape(forward.shape) > 0
                forward = forward + entry_s * ((first > 0) + (0 < number < stop - first)) * has_rows
                recompute = recompute + entry_s * (number > 0) * has_rows
        return forward, recompute

    def _held_inside(self, stage: PlannedStage) -> Float64Array:
        """Bytes that a part keeps which begins inside a recomputed block: its input, which the block would not keep."""
        held = self.none(stage)
        if (
            not any(stage.recomputed.values())
            or stage.num_parts <= stage.num_layers
            or is_finer(stage, self.plan.model)
        ):
            return held
        for part in parts_of(stage, self.plan.model):
            if part.begins_inside and part.recomputed[part.modules[0]]:
                module = self.plan.model.module(part.modules[0])
                begin = part.layers[module.name][0]
                placed = self.layers(part)[module.halved_layer(begin) - module.blocks[begin].start]
                kept = self.layer_pricing.of_passes(placed, stage.unit.tp).get("held", 0.0 * held.ravel())
                held = held + kept.reshape(held.shape)
        return held

    def _held_rows(self, stage: PlannedStage) -> Float64Array:
        """Bytes of rows of encoders that a stage of the backbone has taken in."""
        held, by_stage = self.none(stage), self.plan.schedule != "data_parallel"
        taken = taken_bytes(self.plan.model, stage.layers, self.precision.compute, by_stage=by_stage)
        for name, row_bytes in taken.items():
            held = held + row_bytes * self.layer_pricing.work.taken_in(name).reshape(held.shape)
        return held

    def _sum(
        self, stage: PlannedStage, layers: Mapping[StageLayer, int], replicas: Int64Array | slice = slice(None)
    ) -> StagePrices:
        """What is 0 throughout has no memory of its own."""
        shape = self._shape(stage)
        of_some = (*replicas.shape, shape[1]) if isinstance(replicas, np.ndarray) else shape
        none: Float64Array = np.broadcast_to(_ZERO, of_some)
        total: dict[str, Float64Array] = {}
        for placed, count in layers.items():
            for name, prices in self.layer_pricing.of_passes(placed, stage.unit.tp).items():
                added = count * prices.reshape(shape)[replicas]
                total[name] = np.add(total[name], added, out=total[name]) if name in total else added
        return StagePrices(*(total.get(name, none) for name in StagePrices._fields))

    def _sum_of_all(self, stage: PlannedStage, layers: Mapping[StageLayer, int]) -> StagePrices:
        """`_sum` of all replicas, kept for stages with the same layers."""
        key = (stage.unit.name, *layers.items())
        if key not in self._known_sums:
            self._known_sums[key] = self._sum(stage, layers)
        return self._known_sums[key]

    def _layer_passes(self, placed: StageLayer, stage: PlannedStage) -> Float64Array:
        """`PassPrices` of a layer of a stage, [2, num_replicas, num_microbatches]."""
        key = placed, stage.unit.tp
        if key not in self._known_passes:
            none, found = self.none(stage), self.layer_pricing.of_passes(*key)
            shaped = {name: prices.reshape(none.shape) for name, prices in found.items()}
            prices = StagePrices(*(shaped.get(name, none) for name in StagePrices._fields))
            forward = prices.forward + prices.forward_tensor
            self._known_passes[key] = np.stack([forward, np.sum(prices[:-1], axis=0) - forward])
        return self._known_passes[key]


def _added(column: Float64Array, *others: Float64Array) -> Float64Array:
    """The column with others added to it; itself, where they are 0."""
    for other in others:
        if any(other.strides) and other.any():  # What is 0 throughout has no memory of its own.
            column = column + other
    return column
