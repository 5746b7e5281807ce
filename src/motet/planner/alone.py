"""What a rank needs for one example alone in its microbatch: an example that needs more than a rank has fits no step.

Counted as in `simulate.predict.memory`, but for a single example, so it is the least that any microbatch with it takes.
Where items are placed by themselves, a rank has its longest item or its sequence, else all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType

import numpy as np

from motet.assign.item_shares import FULLEST
from motet.core.arrays import BoolArray, Float64Array
from motet.core.context_rows import exchanged_heads
from motet.core.plan import Plan, Unit
from motet.core.spec import Layer
from motet.core.workload import BACKBONE, BatchLengths
from motet.cost.flops import work_of_items
from motet.cost.memory import LayerBytes, StageLayer, plan_precision, stage_layers, stage_memory, taken_bytes
from motet.schedule import PlannedStage, planned
from motet.schedule.plan_units import (
    cuts_beside_sequences,
    cuts_over_replicas,
    joins_all_replicas,
    moves_items,
    on_backbone_ranks,
    shares_items,
    sharing_ranks,
)
from motet.simulate.predict.memory import MAX_LOGITS
from motet.simulate.predict.tied import tied_apart, untied

_WHOLE: Mapping[str, int] = MappingProxyType({})


def bytes_alone(
    plan: Plan,
    lengths: BatchLengths,
    *,
    shared_by: Mapping[str, int] = _WHOLE,
    exchange: str = "auto",
    trains: bool = True,
) -> Float64Array:
    """The bytes that the fullest rank needs for each example, alone in its microbatch, float64 [num_examples].

    shared_by: module -> the ranks that share an item of it; the larger of this and the `cp` of its unit counts, of the
               backbone and of encoders whose items ranks can share. Items of other encoders are whole.
    trains:    False: in an evaluation, of which no backward pass keeps anything; the model's state is there all the
               same.
    exchange:  how these ranks get rows of each other, as of `dispatch.context.ContextShare.method`.
    Of what is gathered and reduced a rank has as much as in any microbatch. O(kinds of layers * (examples + items)).
    """
    needed: Float64Array = np.zeros(lengths.num_examples)
    precision = plan_precision(plan)
    rows = _Rows(plan, lengths, shared_by, exchange)
    for stages in on_ranks(plan):
        fixed = fixed_bytes(plan, stages)
        kept = {name: np.zeros(lengths.num_examples) for stage in stages for name in stage.layers}
        working: dict[str, Float64Array] = {name: np.zeros(lengths.num_examples) for name in kept}
        for stage in stages:
            layers = list(stage_layers(plan.model, stage.layers, stage.recomputed, whole_rows=stage.has_sums))
            for placed in dict.fromkeys(layers):
                own, tp = rows.of(placed.module, placed.layer, stage), stage.unit.tp
                copied = rows.copied(placed.module, placed.layer, stage) * precision.compute
                once, beside = layer_bytes(
                    placed, LayerBytes.of(placed, 1.0, tp, precision), own, copied, trains=trains
                )
                kept[placed.module] += layers.count(placed) * once
                working[placed.module] = np.maximum(working[placed.module], beside)
            by_stage = plan.schedule != "data_parallel"
            taken = taken_bytes(plan.model, stage.layers, precision.compute, by_stage=by_stage) if trains else {}
            for name, row_bytes in taken.items():
                kept[BACKBONE] += row_bytes * rows.taken_in(name, stage)
        if _is_together(plan, stages[0].unit):
            needed_here = sum(kept.values()) + np.max(list(working.values()), axis=0)
        else:
            needed_here = np.max([kept[name] + working[name] for name in kept], axis=0)
        needed = np.maximum(needed, needed_here + fixed)
    return needed


def fixed_bytes(plan: Plan, stages: list[PlannedStage]) -> int:
    """What a rank with these stages has whatever its items are: state, and what is gathered and reduced."""
    state, gathered, by_stage = 0, 0, plan.schedule != "data_parallel"
    precision, tied = plan_precision(plan), tied_apart(plan)
    if tied is not None and any(map(tied.is_on, stages)):
        state += sum(tied.state(precision))
    for stage in stages:
        unit = replace(stage.unit, zero=stage.zero, shard_size=stage.shard_size)
        layers = untied(
            tied, stage, stage_layers(plan.model, stage.layers, stage.recomputed, whole_rows=stage.has_sums)
        )
        memory = stage_memory(unit, layers, lambda *_: 0.0, 0, precision, by_stage=by_stage)
        state, gathered = state + memory.held_bytes, max(gathered, memory.transient)
    return state + gathered


def layer_bytes(
    placed: StageLayer, size: LayerBytes, rows: Float64Array, copied: Float64Array, *, trains: bool = True
) -> tuple[Float64Array, Float64Array]:
    """What a layer keeps of rows for backward, and what it has beside that while it runs; in bytes, as rows have shape.

    size: of one row. copied: bytes of copies of other ranks' rows in its attention. trains: as of `bytes_alone`.
    """
    has_backward = placed.has_backward and trains
    saved = size.saved * rows + copied
    once = (size.input * rows if placed.recomputed else saved) if has_backward else 0.0 * rows
    # An evaluation has logits too, with their copies.
    has_gradients = has_backward or (placed.layer.targets_only and placed.has_backward)
    gradients = 2 * copied + (size.gradients * rows if has_gradients else 0.0)
    return once, saved - once + gradients


def on_ranks(plan: Plan) -> Iterator[list[PlannedStage]]:
    """The stages of each program rank, where they differ in kind from those of another."""
    seen, program = set(), planned(plan)
    for rank in range(program.program.num_ranks):
        stages = [program.stages[number] for number in program.stages_on(rank)]
        if (kinds := tuple(stage.key for stage in stages)) not in seen:
            seen.add(kinds)
            yield stages


def _is_together(plan: Plan, unit: Unit) -> bool:
    """Whether all items of an example are on one rank, or on the ranks of one replica."""
    moves = moves_items(plan) or (joins_all_replicas(plan) and any(shares_items(plan, name) for name in unit.modules))
    return not moves and unit.dp <= plan.unit_of(BACKBONE).dp


class _Rows:
    """Rows of each example in a layer, on the rank of a stage that has most of them."""

    def __init__(self, plan: Plan, lengths: BatchLengths, shared_by: Mapping[str, int], exchange: str) -> None:
        self._plan, self._lengths, self._shared_by, self._exchange = plan, lengths, shared_by, exchange
        self._known: dict[tuple[str, Layer], Float64Array] = {}

    def of(self, name: str, layer: Layer, stage: PlannedStage) -> Float64Array:
        """[num_examples]. Ranks share the rows of a sequence, and the items of an encoder: whole, or their rows."""
        items = self._lengths.of(name)
        if (name, layer) not in self._known:
            count, targets = items.num_items, self._lengths.num_targets if name == BACKBONE else None
            work = work_of_items(layer, items, np.arange(count), count, num_targets=targets)
            self._known[name, layer] = work.rows
        rows, num_examples = self._known[name, layer], self._lengths.num_examples
        if name == BACKBONE:
            is_whole = layer.makes_keys or self._plan.model.takes_whole(name, layer)
            share = rows if is_whole else rows / self._num_sharing(name, stage)
            return np.minimum(share, MAX_LOGITS / layer.output_width) if layer.targets_only else share
        longest = np.zeros(num_examples)
        if not _is_together(self._plan, stage.unit):
            np.maximum.at(longest, items.example, self._fragment(name, rows, self._num_sharing(name, stage)))
            return longest
        np.maximum.at(longest, items.example, self._fragment(name, rows, self._num_cutting(name, stage)))
        num_sharing = sharing_ranks(self._plan, stage.unit)
        return np.maximum(longest, np.bincount(items.example, rows, num_examples) / num_sharing)

    def taken_in(self, name: str, stage: PlannedStage) -> Float64Array:
        """Rows of an encoder that the rank takes in which takes in most of them, [num_examples].

        Data parallelism takes rows to the ranks of their places, or all to the one that merges their sequence. A row of
        several side by side is on one rank.
        """
        plan, items, num_sharing = self._plan, self._lengths.of(name), self._num_sharing(BACKBONE, stage)
        rows = items.num_tokens.astype(np.float64)
        every = np.bincount(items.example, rows, self._lengths.num_examples).astype(np.float64)
        is_whole, longest = plan.model.module(name).token_parts > 1, np.zeros(len(every))
        if plan.schedule == "data_parallel" and not is_whole:
            return every if plan.model.merges else every / num_sharing
        if plan.schedule != "data_parallel" and stage.unit.cp == 1 and not cuts_beside_sequences(plan, name):
            return every
        is_cut = name in on_backbone_ranks(plan) and not is_whole
        own = self._fragment(name, rows, self._num_sharing(name, stage)) if is_cut else rows
        np.maximum.at(longest, items.example, own)
        return np.maximum(longest, every / num_sharing)

    def _fragment(self, name: str, rows: Float64Array, num_ranks: int) -> Float64Array:
        """The rows of the largest fragment of each item over so many ranks, [num_items]; of whole tiles, where it has
        some.
        """
        module, items = self._plan.model.module(name), self._lengths.of(name)
        tile_rows, tokens = module.tile_rows, items.num_tokens
        if not tile_rows:
            most = np.maximum(module.cut_rows.num_rows(tokens, items.length), 1)
            return rows / np.minimum(num_ranks, most)
        tiles = np.maximum(tokens // tile_rows, 1)
        return rows * np.ceil(tiles / num_ranks) / tiles

    def copied(self, name: str, layer: Layer, stage: PlannedStage) -> Float64Array:
        """Elements of copies of other ranks' rows in a layer's attention, [num_examples].

        Of the rank with the last row, which sees all, or in a window those of one row.
        """
        unit, attention, cp = stage.unit, layer.attention, self._num_sharing(name, stage)
        if attention is None or cp == 1 or self._plan.model.module(name).tile_rows:
            return np.zeros(self._lengths.num_examples)
        own = self.of(name, layer, stage)
        others = own * (cp - 1)
        if name != BACKBONE:
            whole, others = self._known[name, layer], np.zeros(len(own))
            np.maximum.at(others, self._lengths.of(name).example, whole - self._fragment(name, whole, cp))
            others = others * self._is_cut(name, stage) if self._num_cutting(name, stage) > 1 else others
        seen = np.minimum(others, attention.window) if attention.window else others
        heads, kv_heads = attention.num_heads // unit.tp, max(attention.num_kv_heads // unit.tp, 1)
        exchange = self._exchange if name == BACKBONE else "group_cast"
        _, copied, _ = exchanged_heads(exchange, seen, others, own, cp, heads, kv_heads)
        return copied * (attention.kv_width / unit.tp / kv_heads)

    def _is_cut(self, name: str, stage: PlannedStage) -> BoolArray:
        """Whether one item of an encoder is more than the share of a rank that can have some, bool [num_examples]."""
        items, longest = self._lengths.of(name), np.zeros(self._lengths.num_examples)
        np.maximum.at(longest, items.example, items.length)
        return longest * self._num_cutting(name, stage) > FULLEST * np.bincount(
            items.example, items.length, len(longest)
        )

    def _num_sharing(self, name: str, stage: PlannedStage) -> int:
        """The ranks that share an item of a module."""
        return max(self._num_cutting(name, stage), self._shared_by.get(name, 1))

    def _num_cutting(self, name: str, stage: PlannedStage) -> int:
        """Of these, those that do whatever is beside it: context-parallel ones, and replicas of an encoder's unit."""
        if name != BACKBONE and not self._plan.model.module(name).shareable:
            return 1
        return stage.unit.cp * (stage.unit.dp if name != BACKBONE and cuts_over_replicas(self._plan, name) else 1)
