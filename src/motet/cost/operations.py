"""Operations of each item of a microbatch: the default weights of balancing.

They are counted from the model's layers, as `flops.py` counts a whole module. Attention counts the pairs that the mask
leaves, the output layer counts targets alone, frozen layers need no weight gradients, inputs that need no gradient get
none, and recomputed layers count forward twice. Nothing is fitted: windows, strides and targets are exact.
An item with segments (tiles, frames, windows) counts as its segments do, each by itself.
An item of a padded phase counts without padding. A rank's operations are then its number of items times those of its
longest item, since operations grow with length.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from motet.core.arrays import Int64Array
from motet.core.item_segments import ItemSegments
from motet.core.limits import INT64_MAX
from motet.core.spec import Layer, ModelSpec
from motet.core.workload import BACKBONE, BatchLengths, ItemLengths
from motet.cost.flops import LikeOperations, check_padded_whole, operations_by_work, pairs_of_items, rows_of_items
from motet.cost.memory import stage_layers

OPERATION_UNITS = ("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP")
_UNITS_A_ROW = 1000
"""The least number of units a row takes in the module that takes most.

Its items are then rounded by less than a thousandth, and the sum of a microbatch is far below 2^63 units."""


@dataclass(frozen=True)
class Operations:
    """`balance.ItemWork`: operations of forward and backward of each item, in whole units.

    recompute: per module, the number of recomputed blocks, as in `cost.memory.stage_layers`.

    Example:
        >>> from motet.core.shapes import Transformer, language_model, multimodal
        >>> layer = Transformer(64, 256, 4, causal=True)
        >>> work = Operations(multimodal("tiny", language_model(layer, num_layers=2, vocab_size=1000), []))
        >>> lengths = BatchLengths(np.array([10, 100]), np.array([0, 0]), np.zeros(2, np.int32), {})
        >>> work(lengths)["backbone"].tolist(), work.unit("backbone")
        ([5982720, 66739200], 'FLOP')
    """

    model: ModelSpec
    recompute: Mapping[str, int] = field(default_factory=dict)

    def __call__(self, lengths: BatchLengths) -> dict[str, Int64Array]:
        """Per module, int64 [num_items] in units. O(num_items) for each kind of layer with rows of its own."""
        work = {}
        for name, layers in self._by_work.items():
            items = lengths.of(name)
            if name in self._padded:
                check_padded_whole(items.segments)
            flops = _flops(layers, items, lengths.num_targets if name == BACKBONE else items.length)
            work[name] = self._in_units(flops)
        return work

    def unit(self, phase: str) -> str:
        """The name of the unit. All phases have the same, so that their loads can be compared."""
        return OPERATION_UNITS[self._exponent]

    @property
    def unit_flops(self) -> int:
        """Operations of a unit: a power of 1,000."""
        return int(1000**self._exponent)

    @cached_property
    def _exponent(self) -> int:
        most_a_row = max(sum(totals.row for totals in layers.values()) for layers in self._by_work.values())
        exponents = range(len(OPERATION_UNITS))
        return max((exponent for exponent in exponents if most_a_row >= _UNITS_A_ROW * 1000**exponent), default=0)

    @cached_property
    def _padded(self) -> frozenset[str]:
        return frozenset(module.name for module in self.model.modules if module.padded)

    @cached_property
    def _by_work(self) -> dict[str, dict[Layer, LikeOperations]]:
        by_module = {}
        for module in self.model.modules:
            span = {module.name: (0, len(module.blocks))}
            layers = operations_by_work(each[1:4] for each in stage_layers(self.model, span, self.recompute))
            by_module[module.name] = {like: totals for like, totals in layers.items() if totals.row or totals.pair}
        return by_module

    def _in_units(self, flops: Int64Array) -> Int64Array:
        """Rounded to the nearest unit."""
        if self.unit_flops == 1:
            return flops.astype(np.int64)
        return ((flops + self.unit_flops // 2) // self.unit_flops).astype(np.int64)


def _flops(layers: Mapping[Layer, LikeOperations], items: ItemLengths, num_targets: Int64Array) -> Int64Array:
    """Operations of each item, [num_items]: int64, or Python's own integers where those would overflow."""
    lengths, segments, num_media, most_parts = items.length, items.segments, items.num_media, 1
    num_tokens = items.num_tokens
    longest, most_targets, most_tokens = (
        np.array([int(column.max(initial=0))], dtype=object) for column in (lengths, num_targets, num_tokens)
    )
    most_media = None if num_media is None else np.array([int(num_media.max(initial=0))], dtype=object)
    if segments is not None:
        most_parts = int(segments.counts.max(initial=1))  # No segment is longer than the longest item.
    # Half of the range, as `_in_units` adds half a unit.
    if most_parts * int(_summed(layers, longest, None, most_media, most_tokens, most_targets)[0]) > INT64_MAX // 2:
        lengths, num_targets, num_tokens = (each.astype(object) for each in (lengths, num_targets, num_tokens))
        segments = segments and replace(segments, length=segments.length.astype(object))
        num_media = None if num_media is None else num_media.astype(object)
    return _summed(layers, lengths, segments, num_media, num_tokens, num_targets)


def _summed(
    layers: Mapping[Layer, LikeOperations],
    lengths: Int64Array,
    segments: ItemSegments | None,
    num_media: Int64Array | None,
    num_tokens: Int64Array,
    num_targets: Int64Array,
) -> Int64Array:
    total = np.zeros_like(lengths)
    for like, operations in layers.items():
        if like.targets_only:
            total += operations.row * num_targets
            continue
        parts, rows = rows_of_items(like, lengths, segments, num_media, num_tokens)
        total += operations.row * rows
        if like.attention:
            # Rounded once for all layers, as the operations of a share of a pair are no whole number.
            per_pair = round(operations.pair * like.attention.density)
            total += per_pair * pairs_of_items(like, parts, segments, num_media, by_outputs=like.of_outputs)
    return total
