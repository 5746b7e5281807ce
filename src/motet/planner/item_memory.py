"""What the items of a microbatch take of a rank's memory where each rank has whole modules, and items may be cut.

By the memory model of `alone.py`, but item by item, so that a placement of many adds up (`balance/item_bytes.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from motet.balance.item_bytes import ItemBytes
from motet.core.arrays import Float64Array, Int64Array
from motet.core.plan import Plan
from motet.core.spec import Layer
from motet.core.workload import BACKBONE, BatchLengths
from motet.cost.flops import work_of_items
from motet.cost.memory import USABLE_MEMORY, LayerBytes, StageLayer, plan_precision, stage_layers, taken_bytes
from motet.planner.alone import fixed_bytes, layer_bytes, on_ranks
from motet.simulate.predict.memory import MAX_LOGITS

_NO_LIMIT = 1 << 62


class RankMemory:
    """What items take of a rank's memory under a Plan of data parallelism.

    room_bytes: what they may take: what the device may fill, without the model's state. Below 0 if that has no room.

    Example:
        >>> from motet.cost.catalogue import cluster
        >>> from motet.core.plan import Unit
        >>> from motet.core.shapes import Transformer, language_model, multimodal
        >>> shape = Transformer(hidden=64, mlp=256, num_heads=4, gated=True, causal=True)
        >>> model = multimodal("mine", language_model(shape, num_layers=2, vocab_size=100), encoders=[])
        >>> plan = Plan(model, cluster("h100", 1, 2), (Unit("all", ({BACKBONE: 2},), dp=2),), 2)
        >>> lengths = BatchLengths(np.array([1000, 2000]), np.array([1, 1]), np.zeros(2, np.int32), {})
        >>> taken = RankMemory(plan)(lengths)[BACKBONE]
        >>> bool(taken.kept[1] > taken.kept[0]), bool((taken.copied < taken.kept).all())
        (True, True)
    """

    def __init__(self, plan: Plan) -> None:
        (stages,), self._model = on_ranks(plan), plan.model
        self._tp, self._precision = plan.unit_of(BACKBONE).tp, plan_precision(plan)
        self._layers: dict[str, Counter[StageLayer]] = {module.name: Counter() for module in plan.model.modules}
        (self._spans,) = (stage.layers for stage in stages if BACKBONE in stage.layers)
        self._tiled = {module.name for module in plan.model.modules if module.tile_rows}  # Nothing is copied.
        for stage in stages:
            for placed in stage_layers(plan.model, stage.layers, stage.recomputed):
                self._layers[placed.module][placed] += 1
        self.room_bytes = int(plan.cluster.device.memory_bytes * USABLE_MEMORY) - fixed_bytes(plan, stages)

    def __call__(self, lengths: BatchLengths) -> dict[str, ItemBytes]:
        """What the items of each phase take. O(kinds of layers * items)."""
        return {name: self._of_layers(name, lengths) for name in (BACKBONE, *lengths.items)}

    def _of_layers(self, name: str, lengths: BatchLengths) -> ItemBytes:
        """What the items of a phase take: in layers that have them whole, and in all others."""
        layers, nothing = self._layers[name], np.zeros(lengths.of(name).num_items)
        taken = self._taken(lengths) if name == BACKBONE else nothing
        if name != BACKBONE or not self._model.merges:
            return self._of(name, layers, lengths, taken)
        # The rank that merges a sequence takes in the rows of all of its items.
        whole = {placed: times for placed, times in layers.items() if self._model.takes_whole(name, placed.layer)}
        others = {placed: times for placed, times in layers.items() if placed not in whole}
        return replace(self._of(name, others, lengths, nothing), whole=self._of(name, whole, lengths, taken))

    def _taken(self, lengths: BatchLengths) -> Float64Array:
        """Bytes of rows of encoders that each sequence takes in, [num_examples]."""
        taken, element_bytes = np.zeros(lengths.num_examples), self._precision.compute
        for name, row_bytes in taken_bytes(self._model, self._spans, element_bytes, by_stage=False).items():
            items = lengths.of(name)
            taken += row_bytes * np.bincount(items.example, items.num_tokens, lengths.num_examples)
        return taken

    def _of(self, name: str, layers: Mapping[StageLayer, int], lengths: BatchLengths, taken: Float64Array) -> ItemBytes:
        """In these layers. taken: bytes that each item keeps beside them, [num_items]."""
        items = lengths.of(name)
        count, targets = items.num_items, lengths.num_targets if name == BACKBONE else None
        kept, copied = taken.copy(), np.zeros(count)
        working, copied_working, most = list[Float64Array](), list[Float64Array](), list[int]()
        for placed, times in layers.items():
            layer, size = placed.layer, LayerBytes.of(placed, 1.0, self._tp, self._precision)
            work = work_of_items(layer, items, np.arange(count), count, num_targets=targets)
            at_once = MAX_LOGITS / layer.output_width if layer.targets_only else np.inf
            rows = np.minimum(work.rows, at_once)
            own = layer_bytes(placed, size, rows, np.zeros(count))
            seen = 0.0 * rows if name in self._tiled else _copied(layer, rows)
            copies = layer_bytes(placed, size, np.zeros(count), seen * self._precision.compute)
            copies = own if layer.makes_keys else copies  # A fragment has as much as the whole item.
            kept, copied = kept + times * own[0], copied + times * copies[0]
            working.append(own[1])
            copied_working.append(copies[1])
            one_row = layer_bytes(placed, size, np.ones(1), np.zeros(1))[1][0]
            most.append(int(np.ceil(one_row * at_once)) if layer.targets_only else _NO_LIMIT)
        return ItemBytes(
            _whole(kept),
            _whole(np.stack(working, axis=1)),
            np.array(most, dtype=np.int64),
            _whole(copied),
            _whole(np.stack(copied_working, axis=1)),
        )


def _copied(layer: Layer, rows: Float64Array) -> Float64Array:
    """Elements of keys and values that a rank without a row would copy of an item's rows, [num_items].

    In a window those before each of a fragment's two runs of rows.
    """
    if layer.attention is None:
        return 0.0 * rows
    seen = np.minimum(rows, 2.0 * layer.attention.window) if layer.attention.window else rows
    return 2.0 * layer.attention.kv_width * seen


def _whole(size_bytes: Float64Array) -> Int64Array:
    """Bytes rounded up to whole ones, so that all ranks decide by the same numbers."""
    rounded: Int64Array = np.ceil(size_bytes).astype(np.int64)
    return rounded
