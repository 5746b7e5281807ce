"""Seconds and bytes of the stages of a Plan's Program for the examples of a step, from a cost model.

Each distinct layer of a module is priced once, for all replicas and microbatches of its unit. A stage is the sum of its
layers. Backward is priced by which parameters are trainable (Cornstarch section 4.2, and its erratum on recomputation).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from motet.assign.context_rows import moved_rows, rows_of_replicas
from motet.assign.item_shares import shares_of_cells
from motet.assign.rows import num_given_rows
from motet.assign.step import ModuleAssignment, StepAssignment
from motet.core.arrays import BoolArray, Float64Array, Int64Array
from motet.core.attention_table import AttentionTable
from motet.core.context_rows import exchanged_heads
from motet.core.cuts import rows_between_cuts, shares_between
from motet.core.exchange import Moved
from motet.core.plan import SPLITS_BACKWARD, Plan, Unit
from motet.core.spec import Layer
from motet.core.workload import BACKBONE
from motet.cost.flops import attention_shares, expert_shares, like_layer, operations_by_work, work_of_items
from motet.cost.memory import (
    StageLayer,
    kept_bytes,
    plan_precision,
    stage_layers,
)
from motet.cost.model import Beyond, CostModel, LayerSeconds, Work
from motet.schedule import PlannedProgram, PlannedStage, parts_of, pieces_of
from motet.schedule.coordinates import host_of, replica_of, replicas_of
from motet.schedule.from_plan import StageKind
from motet.schedule.layout import LAYER_PARTS
from motet.schedule.plan_units import cuts_beside_sequences, gathering_ranks, is_wrapped, sharing_ranks
from motet.schedule.program import AlikeItems
from motet.simulate.engine.stage_times import Part
from motet.simulate.predict.merge_prices import merge_seconds

_MAX_DEALT = 32
"""Packs of a step whose rows are dealt out to be priced, where context-parallel ranks share them."""

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


_FIELDS = {name: number for number, name in enumerate(StagePrices._fields)}


class PassPrices(NamedTuple):
    """Seconds of the passes of one stage, [len(islands), num_microbatches]. backward: recomputation included."""

    forward: Float64Array
    backward: Float64Array


class ContextPrice(NamedTuple):
    """Seconds of one exchange of rows in a layer's attention, and bytes of the copies that backward reads again."""

    seconds: Float64Array
    copied_bytes: Float64Array


@dataclass(frozen=True, eq=False)
class _Shares:
    """Items of an encoder on the ranks that share those of a replica.

    Ranks are numbered by replica, microbatch and context-parallel rank.

    whole, rank:    int64 [num_whole], items, and the rank of each.
    item, cut_rank: int64 [num_fragments], of items that are cut. share: float64, of the item's rows. is_first: bool.
    """

    whole: Int64Array
    rank: Int64Array
    item: Int64Array
    cut_rank: Int64Array
    share: Float64Array
    is_first: BoolArray


@dataclass(frozen=True, eq=False)
class _Priced:
    """The price of one layer: columns [num_replicas * num_microbatches] of its unit, replica by replica.

    whole:     what all ranks compute that share a replica's work. work: what the busiest of them does.
    context:   the exchange of rows between context-parallel ranks in attention.
    """

    whole: Work
    work: Work
    seconds: LayerSeconds
    tensor_s: Float64Array
    context: ContextPrice


class Pricing:
    """Prices the stages of one Plan for one assigned batch.

    recomputed: in place of the Plan's numbers.
    exchange: how context-parallel ranks get rows of each other, as of `dispatch.context.ContextShare.method`.
    like: a Pricing of another batch of the same Plan, with which it shares what does not depend on lengths.
    beyond: by module, how far what was priced is beyond what was measured.
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
        self.plan, self.planned, self.assignment, self.exchange = plan, planned, assignment, exchange
        splits = plan.schedule in SPLITS_BACKWARD
        self.cost = cost if is_wrapped(plan) else cost.unwrapped(waits=splits)
        self.precision = plan_precision(plan)
        self.backbone = plan.unit_of(BACKBONE)
        self.layout = planned.layout
        # Not `functools.cache` of own methods: what holds itself, and large arrays, waits for the garbage collector.
        self._known_layers: dict[tuple[str, Layer], _Priced] = {}
        self._known_work: dict[tuple[str, Layer], Work] = {}
        self._known_stages: dict[object, StagePrices] = {}
        self._known_sums: dict[object, StagePrices] = {}
        self._known_flops: dict[StageLayer, float] = {}
        self._known_prices: dict[tuple[StageLayer, int], dict[str, Float64Array]] = {}
        self._known_passes: dict[tuple[StageLayer, int], Float64Array] = {}
        self._known_parts: dict[object, tuple[Part, ...]] = {}
        self._known_totals: dict[object, StagePrices] = {}
        self._known_shares: dict[str, _Shares] = {}
        self._known_items: dict[tuple[str, Layer], Work] = {}
        self.beyond: dict[str, Beyond] = {}
        self._first = {kind.stage.key: kind.stage for kind in planned.kinds}
        self._recomputed = recomputed or {}
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
        (entered, again), (given, back) = self._entries(stage), self._given(stage)
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
            held[:, kind.numbers] = self._seconds(kind.stage.key).held[replicas]
        return held

    def busiest_rank_s(self) -> Float64Array:
        """For each island, the sum over microbatches of the seconds on the busiest rank, [num_islands]."""
        shape = self.num_islands, self.planned.program.num_ranks, self.assignment.num_microbatches
        total_s, known = np.zeros(shape), dict[int, Float64Array]()  # By the prices, which alike stages share.
        for kind, replicas in self._replicas(range(self.num_islands)):
            prices = self._seconds(kind.stage.key)
            if id(prices) not in known:
                known[id(prices)] = np.sum(prices[:-1], axis=0)
            total_s[:, kind.ranks] += known[id(prices)][replicas]
        busiest_s: Float64Array = total_s.max(axis=1).sum(axis=1)
        return busiest_s

    def _replicas(self, islands: Sequence[int]) -> Iterator[tuple[StageKind, Int64Array]]:
        """Each kind of stage, and the replicas whose items its stages compute, int64 [len(islands), num_alike]."""
        first = np.array(islands)[:, None]
        for kind in self.planned.kinds:
            yield kind, first * self.layout.num_replicas(host_of(self.layout, kind.stage.unit)) + kind.replicas

    def layers(self, stage: PlannedStage) -> list[StageLayer]:
        """The layers of a stage, in execution order."""
        return list(stage_layers(self.plan.model, stage.layers, stage.recomputed))

    def of_layers(self, stage: PlannedStage, layers: Sequence[StageLayer]) -> StagePrices:
        """The prices of some layers of a stage of a pipeline, [num_replicas, num_microbatches] each."""
        return self._sum(stage, Counter(layers))

    def rows(self, name: str, layer: Layer, stage: PlannedStage, islands: Sequence[int]) -> Float64Array:
        """Rows of a layer of a module on one of the ranks that share the stage's work.

        [len(islands), num_microbatches].
        """
        rows = self._priced(name, layer).work.rows
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
        by_replica = self._priced(name, layer).whole.rows.reshape(-1, self.assignment.num_microbatches)
        # The fullest rank has the most rows, and no context-parallel rank of the backbone more than all.
        return np.minimum(by_replica[replicas_of(self.layout, stage, islands)], num_ranks * rows)

    def largest_rows(self, name: str, layer: Layer) -> float:
        """The most rows of a layer on any rank in any microbatch, times the context-parallel ranks of its unit."""
        return float(self._priced(name, layer).work.rows.max(initial=0.0)) * self.plan.unit_of(name).cp

    def largest_of_replica(self, name: str, layer: Layer) -> float:
        """The most rows of a layer in any replica in any microbatch, over all ranks that share them."""
        return float(self._whole(name, like_layer(layer)).rows.max(initial=0.0))

    def largest_copies(self, name: str, layer: Layer) -> float:
        """The most bytes of copies of other ranks' rows that attention takes in a layer on any rank."""
        return float(self._priced(name, layer).context.copied_bytes.max(initial=0.0))

    def parts(self, stage: PlannedStage, *, backward: bool = False) -> tuple[Part, ...]:
        """The parts of a stage's pass, in execution order.

        A part is a group of blocks in data parallelism, and of blocks or halves of blocks of encoders in bubbles; it
        is a half of a layer or its communication in a backbone whose bubbles are filled. In backward, a part takes no
        time if it is frozen and passes no gradient on. Finer parts of encoders, which training refuses, are equal.
        """
        key = stage.key, backward
        if key not in self._known_parts:
            self._known_parts[key] = self._slices(self._first[stage.key], backward)
        return self._known_parts[key]

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

    def _priced(self, name: str, layer: Layer) -> _Priced:
        key = name, layer
        if key not in self._known_layers:
            self._known_layers[key] = self._price(name, layer)
        return self._known_layers[key]

    def _slices(self, stage: PlannedStage, backward: bool) -> tuple[Part, ...]:
        in_bubbles = host_of(self.layout, stage.unit) is not stage.unit
        if in_bubbles and self._is_finer(stage):
            return (Part(1 / stage.num_parts),) * stage.num_parts
        if self.plan.schedule != "data_parallel" and not in_bubbles:
            num_halves = 2 * (stage.num_parts // LAYER_PARTS)
            return (Part(1 / num_halves, "tensor"), Part(1 / num_halves)) * num_halves
        seconds = [self._part_s(stage, part, backward) for part in parts_of(stage, self.plan.model)]
        shares = [second / sum(seconds) if sum(seconds) else 1 / len(seconds) for second in seconds]
        return tuple(Part(share) for share in (reversed(shares) if backward else shares))

    def _part_s(self, stage: PlannedStage, part: PlannedStage, backward: bool) -> float:
        """Seconds of a part of a stage's pass, over all microbatches and replicas.

        The halves of a layer divide what it takes by their operations: profiles time whole layers.
        """
        layers = self.layers(part)
        first, last = (self.plan.model.module(part.modules[end]) for end in (0, -1))
        begin, stop = part.layers[part.modules[0]][0], part.layers[part.modules[-1]][1] - 1
        num_before = first.halved_layer(begin) - first.blocks[begin].start if part.begins_inside else 0
        num_behind = last.blocks[stop].stop - 1 - last.halved_layer(stop) if part.ends_inside else 0
        layers = layers[num_before : len(layers) - num_behind]
        total_s = sum(self._pass_s(stage, Counter(layers), backward))
        if part.begins_inside:
            total_s -= self._attention_s(stage, layers[0], backward)
        if part.ends_inside:
            total_s -= sum(self._pass_s(stage, {layers[-1]: 1}, backward))
            total_s += self._attention_s(stage, layers[-1], backward)
        return max(total_s, 0.0)

    def _pass_s(self, stage: PlannedStage, layers: Mapping[StageLayer, int], backward: bool) -> tuple[float, ...]:
        """Seconds of layers: in forward, or in backward for the input, for the weights, and of recomputation."""
        key = stage.unit.name, tuple(layers.items())
        if key not in self._known_totals:
            self._known_totals[key] = StagePrices(*(table.sum() for table in self._sum(stage, layers)))
        total = self._known_totals[key]
        passes = (total.input, total.weight, total.recompute) if backward else (total.forward,)
        return tuple(map(float, passes))

    def _attention_s(self, stage: PlannedStage, placed: StageLayer, backward: bool) -> float:
        """What the attention of a layer takes of its pass."""
        shares = attention_shares(placed.layer, self._priced(placed.module, placed.layer).work)
        of_passes = (shares.input, shares.weight, shares.forward) if backward else (shares.forward,)
        return sum(share * s for share, s in zip(of_passes, self._pass_s(stage, {placed: 1}, backward), strict=True))

    def hardware_flops(self) -> int:
        """Operations of all ranks, with padding, recomputation and replicated encoders."""
        stages = self.planned.stages
        every = stages.first if isinstance(stages, AlikeItems) else stages
        distinct = {(stage.unit.name, stage.index, stage.modules): stage for stage in every}
        return round(sum(self._stage_flops(stage) for stage in distinct.values()))

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
            work = self._priced(placed.module, placed.layer).whole
            (each,) = operations_by_work([placed[1:4]]).values()
            total = float(each.row) * work.rows + float(each.pair) * work.pairs
            if chosen is not None:
                return float(total[chosen].sum())
            self._known_flops[placed] = float(total.sum())
        return self._known_flops[placed]

    def _none(self, stage: PlannedStage) -> Float64Array:
        """Zeros of all replicas and microbatches, of which nothing can be written, without memory of their own."""
        return np.broadcast_to(_ZERO, self._shape(stage))

    def _shape(self, stage: PlannedStage) -> tuple[int, int]:
        return self.assignment.modules[stage.modules[0]].num_replicas, self.assignment.num_microbatches

    def _cases(self, stage: PlannedStage) -> Iterator[tuple[Mapping[StageLayer, int], BoolArray]]:
        """The layers of a stage, and the microbatches, [num_replicas, num_microbatches], that recompute so."""
        numbers = self._recomputed.get(stage.modules[0])
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
        if len(cases) == 1:
            prices, (entered, again), (given, back) = cases[0][0], self._entries(stage), self._given(stage)
            beside = {
                "forward": entered,
                "recompute": again,
                "forward_tensor": given,
                "backward_tensor": back,
                "held": self._held_inside(stage),
            }
            added = {name: getattr(prices, name) + table[of] for name, table in beside.items() if table.any()}
            return prices._replace(**added) if added else prices
        which = [chosen[of] for _, chosen in cases]
        return StagePrices(*(np.select(which, columns) for columns in zip(*(prices for prices, _ in cases))))

    def _entries(self, stage: PlannedStage) -> tuple[Float64Array, Float64Array]:
        """What forward and recomputation take where they begin inside modules (`CostModel.entry_seconds`).

        A stage of a pipeline runs the blocks of a module that it recomputes apart from others. In data parallelism they
        run inside the one pass, and what is cut finer than stages, in bubbles, is not counted.
        """
        forward = recompute = self._none(stage)
        for name, (first, stop) in stage.layers.items() if self.plan.schedule != "data_parallel" else ():
            entry_s, number = self.cost.entry_seconds(name), stage.recomputed.get(name, 0)
            if entry_s and first < stop:
                module = self.plan.model.module(name)
                priced = self._priced(name, module.layers[module.blocks[first].start])
                has_rows = priced.work.rows.reshape(forward.shape) > 0
                forward = forward + entry_s * ((first > 0) + (0 < number < stop - first)) * has_rows
                recompute = recompute + entry_s * (number > 0) * has_rows
        return forward, recompute

    def _given(self, stage: PlannedStage) -> tuple[Float64Array, Float64Array]:
        """Seconds in which ranks give rows to each other at a stage, in forward and in backward: those that share
        sequences the rows of encoders, before blocks that take them in, and what generators are given, behind the last;
        and those that share items of encoders in bubbles what they made. Rows are taken to lie evenly on the ranks,
        but those that move for a merge of the user's own (`merge_prices.py`).
        """
        forward = backward = self._none(stage)
        unit, model = stage.unit, self.plan.model
        if BACKBONE in stage.layers and (unit.cp > 1 or self.assignment.modules[BACKBONE].cuts is not None):
            first, stop = stage.layers[BACKBONE]
            merges = model.merges and first == 0
            times = {
                name: sum(first + merges <= block < stop for block in model.entries(name, BACKBONE))
                for name in model.sources(BACKBONE)
            }
            for name, seconds in merge_seconds(self).items() if merges else ():
                forward = forward + seconds
                backward = backward + seconds * (name == BACKBONE or model.moved(name)[1])
            times |= dict.fromkeys(model.generators, int(stop == model.num_blocks[BACKBONE]))
            for name in (name for name, number in times.items() if number):
                rows, width = num_given_rows(self.assignment, name, None), model.moved(name)[0].output_width
                seconds = times[name] * self.evenly_moved_s(rows, width * self.precision.compute)
                forward = forward + seconds
                backward = backward + seconds * model.moved(name)[1]
        if gathering_ranks(self.plan, unit) > 1 and stage.index == len(unit.stages) - 1:
            for name in unit.modules:
                forward = forward + self._gathered_s(name, unit).reshape(forward.shape)
        return forward, backward

    def evenly_moved_s(self, rows: Int64Array, row_bytes: int) -> Float64Array:
        """Seconds in which the ranks that share sequences exchange rows that lie evenly on them, by replica of the
        backbone and microbatch. Replicas that share some of a microbatch exchange those of all.

        rows: int64 [num_replicas, num_microbatches].
        """
        moved_bytes, unit = rows * row_bytes, self.backbone
        seconds, cp = np.zeros(moved_bytes.shape), unit.cp
        if cp > 1:
            ranks = [unit.rank(0, 0, c) for c in range(cp)]
            seconds += self._even_exchange_s(moved_bytes.ravel() / cp**2, ranks).reshape(seconds.shape)
        if (cuts := self.assignment.modules[BACKBONE].cuts) is not None:
            together = [unit.rank(0, d, c) for d in range(unit.dp) for c in range(cp)]
            shared = np.unique(self.assignment.modules[BACKBONE].microbatch[cuts.items])
            seconds[:, shared] = self._even_exchange_s(moved_bytes.sum(axis=0)[shared] / len(together) ** 2, together)
        return seconds

    def _gathered_s(self, name: str, unit: Unit) -> Float64Array:
        """Seconds in which the rows of an encoder in bubbles come together, by replica and microbatch.

        Ranks give as many rows as the one with the most of them (`dispatch/gathered_rows.py`). Gradients do not move.
        """
        layer, _ = self.plan.model.moved(name)
        first, num_ranks = unit.first_rank, gathering_ranks(self.plan, unit)
        ranks = range(first, first + num_ranks * unit.tp, unit.tp)
        rows = self._priced(name, layer).work.rows
        return self._gather_s(rows * num_ranks * layer.output_width * self.precision.compute, ranks)

    def _gather_s(self, size_bytes: Float64Array, ranks: Sequence[int]) -> Float64Array:
        """Seconds of all-gathers, [n]. size_bytes: [n]; 0: none. Of many items few are of lengths that differ."""
        sizes, of_size = np.unique(size_bytes, return_inverse=True)
        seconds = [self.cost.gather_seconds(size, ranks) if size else 0.0 for size in sizes.tolist()]
        return np.array(seconds, dtype=np.float64)[of_size]

    def _held_inside(self, stage: PlannedStage) -> Float64Array:
        """Bytes that a part keeps which begins inside a recomputed block: its input, which the block would not keep."""
        held = self._none(stage)
        if not any(stage.recomputed.values()) or stage.num_parts <= stage.num_layers or self._is_finer(stage):
            return held
        for part in parts_of(stage, self.plan.model):
            if part.begins_inside and part.recomputed[part.modules[0]]:
                module = self.plan.model.module(part.modules[0])
                begin = part.layers[module.name][0]
                placed = self.layers(part)[module.halved_layer(begin) - module.blocks[begin].start]
                priced = self._priced(placed.module, placed.layer)
                kept = self._passes(placed, priced, stage.unit.tp).get("held", 0.0 * held.ravel())
                held = held + kept.reshape(held.shape)
        return held

    def _is_finer(self, stage: PlannedStage) -> bool:
        """Whether the passes of a stage are in parts that are finer than halves of blocks."""
        return stage.num_parts > len(pieces_of(stage, self.plan.model))

    def _sum(
        self, stage: PlannedStage, layers: Mapping[StageLayer, int], replicas: Int64Array | slice = slice(None)
    ) -> StagePrices:
        shape = len(StagePrices._fields), *self._shape(stage)
        total = np.zeros((shape[0], *np.shape(replicas), shape[2]) if isinstance(replicas, np.ndarray) else shape)
        for placed, count in layers.items():
            for name, prices in self._prices(placed, stage.unit.tp).items():
                total[_FIELDS[name]] += count * prices.reshape(shape[1:])[replicas]
        return StagePrices(*total)

    def _sum_of_all(self, stage: PlannedStage, layers: Mapping[StageLayer, int]) -> StagePrices:
        """`_sum` of all replicas, kept for stages with the same layers."""
        key = (stage.unit.name, *layers.items())
        if key not in self._known_sums:
            self._known_sums[key] = self._sum(stage, layers)
        return self._known_sums[key]

    def _prices(self, placed: StageLayer, tp: int) -> dict[str, Float64Array]:
        """`_passes` of a layer without those that are 0 throughout, kept: stages consist of the same few layers."""
        key = placed, tp
        if key not in self._known_prices:
            passes = self._passes(placed, self._priced(placed.module, placed.layer), tp)
            self._known_prices[key] = {name: prices for name, prices in passes.items() if prices.any()}
        return self._known_prices[key]

    def _layer_passes(self, placed: StageLayer, stage: PlannedStage) -> Float64Array:
        """`PassPrices` of a layer of a stage, [2, num_replicas, num_microbatches]."""
        key = placed, stage.unit.tp
        if key not in self._known_passes:
            none, found = self._none(stage), self._prices(*key)
            shaped = {name: prices.reshape(none.shape) for name, prices in found.items()}
            prices = StagePrices(*(shaped.get(name, none) for name in StagePrices._fields))
            forward = prices.forward + prices.forward_tensor
            self._known_passes[key] = np.stack([forward, np.sum(prices[:-1], axis=0) - forward])
        return self._known_passes[key]

    def _passes(self, placed: StageLayer, priced: _Priced, tp: int) -> dict[str, Float64Array]:
        """The prices of a layer by field of StagePrices, flat. Gradients are as in `cost.model.backward_seconds`."""
        layer, (forward_s, input_s, weight_s) = placed.layer, priced.seconds
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

    def _price(self, name: str, layer: Layer) -> _Priced:
        unit, num = self.plan.unit_of(name), self.assignment.num_microbatches
        items = self.assignment.modules[name]
        size = items.num_replicas * num
        whole = self._whole(name, like_layer(layer))
        num_ranks = self._num_ranks(name)
        work = whole if num_ranks == 1 else Work(whole.rows / num_ranks, whole.pairs / num_ranks)
        if name != BACKBONE and num_ranks > 1:
            dealt = self._dealt(name, layer)
            work = Work(*(column.reshape(size, num_ranks).max(axis=1) for column in (dealt.rows, dealt.pairs)))
        tensor_s = np.zeros(size)
        if unit.tp > 1:
            tensor_s = self.cost.tensor_seconds(layer, work, range(unit.first_rank, unit.first_rank + unit.tp))
        if unit.ep > 1 and layer.num_experts:
            tensor_s = tensor_s + self._experts_s(unit, layer, work.rows)
        context = self._context(name, unit, layer)
        beyond = self.cost.beyond(name, layer, work, unit.tp)
        self.beyond[name] = self.beyond.get(name, Beyond()).or_further(beyond)
        seconds = self.cost.layer_seconds(name, layer.with_experts_of(unit.ep), work, unit.tp)
        if layer.num_experts and unit.expert_replicas > 1 and items.num_replicas == unit.dp:
            seconds, tensor_s = self._with_experts_shared(unit, layer, work, seconds, tensor_s)
        if layer.attention is not None and items.cuts is not None:
            seconds = self._met(seconds, items)
        return _Priced(whole, work, seconds, tensor_s, context)

    def _num_ranks(self, name: str) -> int:
        """The ranks that share a replica's items of a module, or its sequences."""
        return sharing_ranks(self.plan, self.plan.unit_of(name))

    def _whole(self, name: str, like: Layer) -> Work:
        """`_Priced.whole` of all layers of a module that are like this one (`like_layer`)."""
        if (name, like) not in self._known_work:
            num, items = self.assignment.num_microbatches, self.assignment.modules[name]
            size, batch_index, targets = items.num_replicas * num, items.batch_index(num), None
            if name == BACKBONE:
                targets = np.bincount(batch_index, self.assignment.batch.num_targets, size).astype(np.int64)
            self._known_work[name, like] = (
                work_of_items(
                    like, items, batch_index, size, padded=self.plan.model.module(name).padded, num_targets=targets
                )
                if items.cuts is None
                else self._of_fragments(name, like)
            )
        return self._known_work[name, like]

    def _of_fragments(self, name: str, like: Layer) -> Work:
        """`_whole` where replicas share some sequences: a fragment has its share of the rows and pairs of all."""
        items, num = self.assignment.modules[name], self.assignment.num_microbatches
        cuts, of_each = items.cuts, self._of_each(name, like)
        assert cuts is not None, "replicas share sequences"
        whole = cuts.whole_among(np.arange(len(items.example)))
        cell = np.concatenate([items.batch_index(num)[whole], cuts.rank * num + items.microbatch[cuts.item]])
        item = np.concatenate([whole, cuts.item])
        share = np.concatenate([np.ones(len(whole)), (cuts.end - cuts.begin) / cuts.units])
        columns = (column[item] * share for column in (of_each.rows, of_each.pairs))
        size = items.num_replicas * num
        return Work(*(np.bincount(cell, column, size).astype(np.float64) for column in columns))

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
        return 2 * self._even_exchange_s(to_each, unit.expert_ranks(unit.first_rank))

    def _even_exchange_s(self, to_each: Float64Array, ranks: Sequence[int]) -> Float64Array:
        """Seconds of exchanges in which each rank gives each other one as many bytes, [n]. to_each: these, [n]."""
        nodes = [self.plan.cluster.node_of(rank) for rank in ranks]
        here = np.array([nodes.count(node) - 1 for node in nodes])
        inside, crossing = (
            np.repeat((to_each[:, None] * num)[:, None, :], 2, axis=1) for num in (here, len(ranks) - 1 - here)
        )
        return self.cost.exchange_seconds(Moved(inside, crossing), ranks)

    def _shares(self, name: str) -> _Shares:
        """Which of the ranks that share a replica's items has what of each item of an encoder, as training deals it."""
        if name not in self._known_shares:
            items, module = self.assignment.modules[name], self.plan.model.module(name)
            num_ranks, cp = self._num_ranks(name), self.plan.unit_of(name).cp
            if (cuts := items.cuts) is not None and cuts_beside_sequences(self.plan, name):
                num, whole = self.assignment.num_microbatches, cuts.whole_among(np.arange(len(items.example)))
                cell = items.batch_index(num)
                share = cuts.share_of(items.num_tokens) / items.num_tokens[cuts.item]
                rank = cuts.rank * num + items.microbatch[cuts.item]
                shared = _Shares(whole, cell[whole], cuts.item, rank.astype(np.int64), share, cuts.begin == 0)
                return self._known_shares.setdefault(name, shared)
            cell = items.batch_index(self.assignment.num_microbatches)
            dealt = shares_of_cells(
                cell,
                items.length,
                rows_between_cuts(items.num_tokens, items.length, module.read_by),
                cp,
                can_cut=module.shareable,
                tile_rows=module.tile_rows,
                num_groups=num_ranks // cp,
            )
            whole = np.flatnonzero(~np.isin(np.arange(len(cell)), dealt.item))
            rows = items.num_tokens[dealt.item]
            self._known_shares[name] = _Shares(
                whole,
                cell[whole] * num_ranks + dealt.ranks[whole],
                dealt.item,
                cell[dealt.item] * num_ranks + dealt.rank,
                shares_between(rows, dealt.begin, dealt.end, dealt.units) / rows,
                dealt.begin == 0,
            )
        return self._known_shares[name]

    def _of_each(self, name: str, like: Layer) -> Work:
        """Work of each item of a module in layers that are like this one, [num_items] each."""
        if (name, like) not in self._known_items:
            items = self.assignment.modules[name]
            count, targets = len(items.example), self.assignment.batch.num_targets if name == BACKBONE else None
            self._known_items[name, like] = work_of_items(like, items, np.arange(count), count, num_targets=targets)
        return self._known_items[name, like]

    def _fragments(self, name: str, layer: Layer) -> tuple[Float64Array, Float64Array]:
        """(rows of each fragment of a cut item in a layer, rows of the whole item), about.

        The first one has class rows; segments, such as tiles, have some each, and all fragments have queries.
        """
        shares, rows = self._shares(name), self._of_each(name, like_layer(layer)).rows
        whole = rows[shares.item]
        is_read = layer.attention is not None and layer.attention.queries > 0
        if is_read or self.assignment.modules[name].segments is not None:
            return whole * shares.share, whole
        return (whole - layer.extra_rows) * shares.share + layer.extra_rows * shares.is_first, whole

    def _dealt(self, name: str, layer: Layer) -> Work:
        """Work of the ranks that share items of an encoder, by replica, microbatch and rank."""
        items, shares = self.assignment.modules[name], self._shares(name)
        size = items.num_replicas * self.assignment.num_microbatches * self._num_ranks(name)
        if not len(shares.item):
            padded = self.plan.model.module(name).padded
            return work_of_items(layer, items, shares.rank, size, padded=padded)
        of_each, (own, whole) = self._of_each(name, like_layer(layer)), self._fragments(name, layer)
        rank = np.concatenate([shares.rank, shares.cut_rank])
        rows = np.concatenate([of_each.rows[shares.whole], own])
        # A row of a fragment attends to as many as any of its item.
        pairs = np.concatenate([of_each.pairs[shares.whole], of_each.pairs[shares.item] * own / np.maximum(whole, 1)])
        return Work(*(np.bincount(rank, column, size).astype(np.float64) for column in (rows, pairs)))

    def _moved_of_items(self, name: str, layer: Layer) -> Float64Array:
        """The most rows that a rank gives or gets in a layer's attention over items that ranks share, by replica and
        microbatch. Where rows attend within segments or windows, about: those of two of them, at the fragment's ends.
        """
        items, shares, num_ranks = self.assignment.modules[name], self._shares(name), self._num_ranks(name)
        own, whole = self._fragments(name, layer)
        others = np.bincount(shares.item, minlength=len(items.example))[shares.item] - 1
        got, given = whole - own, own * others
        attention, segments, within = layer.attention, items.segments, 0
        if attention is not None and not attention.whole:
            longest = 0 if segments is None else int(segments.length.max(initial=0)) // layer.divisor
            within = min(filter(None, (attention.window, longest)), default=0)
        if within:
            got, given = (np.minimum(rows, 2 * within) for rows in (got, given))
        size = items.num_replicas * self.assignment.num_microbatches * num_ranks
        moved = np.maximum(*(np.bincount(shares.cut_rank, rows, size) for rows in (got, given)))
        most: Float64Array = moved.reshape(-1, num_ranks).max(axis=1)
        return most

    def _context(self, name: str, unit: Unit, layer: Layer) -> ContextPrice:
        """The exchange of rows between ranks in a layer's attention, [replicas * microbatches] each.

        As executed (`models/context_items.py`): the busiest rank moves what `exchanged_heads` says, of an encoder for
        the items that ranks share, and by group-cast where replicas share sequences.
        """
        items, attention, cp = self.assignment.modules[name], layer.attention, unit.cp
        num = self.assignment.num_microbatches
        seconds, copied = np.zeros((2, items.num_replicas * num))
        if attention is None or (cp == 1 and items.cuts is None):
            return ContextPrice(seconds, copied)
        ranks = [unit.rank(0, 0, c) for c in range(cp)]
        # Where the description has no heads, all keys of a row count as one.
        heads, kv_heads = attention.num_heads // unit.tp, max(attention.num_kv_heads // unit.tp, 1)
        head_bytes = attention.kv_width / unit.tp / kv_heads * self.precision.compute
        if self.plan.model.module(name).tile_rows:
            return ContextPrice(seconds, copied)
        if name != BACKBONE:
            of_keys = self._moved_of_items(name, layer)
            if cp == 1:  # Replicas share items beside sequences.
                ranks = [unit.rank(0, d) for d in range(unit.dp)]
            return self._exchanged(2.0 * kv_heads * of_keys, 2.0 * kv_heads * of_keys, head_bytes, ranks)
        if cp > 1:
            seconds, copied = self._context_of_replicas(items, attention.window, ranks, heads, kv_heads, head_bytes)
        if items.cuts is None:
            return ContextPrice(seconds, copied)
        together = [unit.rank(0, d, c) for d in range(unit.dp) for c in range(cp)]
        for microbatch in np.unique(items.microbatch[items.cuts.items]).tolist():
            rows = rows_of_replicas(items, microbatch, cp)
            table = AttentionTable.packed(rows.lengths).windowed(attention.window or None)
            sent = np.array([2.0 * kv_heads * rows.most_moved(rows.wanted(table))])
            price = self._exchanged(sent, sent, head_bytes, together)
            for prices, of_all in zip((seconds, copied), price, strict=True):
                prices.reshape(items.num_replicas, num)[:, microbatch] = of_all[0]
        return ContextPrice(seconds, copied)

    def _context_of_replicas(
        self,
        items: ModuleAssignment,
        window: int,
        ranks: Sequence[int],
        heads: int,
        kv_heads: int,
        head_bytes: float,
    ) -> ContextPrice:
        """`_context` of the backbone, of sequences that the ranks of a replica share. ranks: of one replica."""
        num, cp = self.assignment.num_microbatches, len(ranks)
        cells = [items.length[items.items_of(*divmod(index, num))] for index in range(items.num_replicas * num)]
        rows = np.array([lengths.sum() for lengths in cells])
        # Dealing out a pack takes 2 ms; beyond some, packs move the same share of their rows.
        dealt = cells[:: -(-len(cells) // _MAX_DEALT)]
        moved = np.array([moved_rows(lengths, cp, window) for lengths in dealt])
        if len(dealt) < len(cells):
            moved = np.outer(rows, moved.sum(axis=0) / max(sum(lengths.sum() for lengths in dealt), 1))
        of_keys, of_all = moved.T.astype(np.float64)
        sent, kept = exchanged_heads(self.exchange, of_keys, of_all, rows / cp, cp, heads, kv_heads)
        return self._exchanged(sent, kept, head_bytes, ranks)

    def _exchanged(
        self, sent: Float64Array, kept: Float64Array, head_bytes: float, ranks: Sequence[int]
    ) -> ContextPrice:
        """The price of exchanges. sent, kept: rows of heads that the busiest rank moves, and that backward finds."""
        cp = len(ranks)
        # As of an all-gather in which each rank gets as much.
        return ContextPrice(self._gather_s(sent * head_bytes * cp / max(cp - 1, 1), ranks), kept * head_bytes)
