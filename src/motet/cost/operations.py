"""What each item of a microbatch costs in operations: what balancing weighs items by, unless a recipe says otherwise.

Counted from the model's own layers, as `flops.py` counts a whole phase: attention over the pairs that the mask leaves,
the output layer on targets alone, no gradient of what is frozen, none for an input that nothing needs, and what is
recomputed twice. Nothing is fitted: windows, strides and targets are exact. An item of a padded phase counts by itself;
as its operations grow with its length, those of a rank are the number of its items times those of the longest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from motet.core.arrays import Int64Array
from motet.core.limits import INT64_MAX
from motet.core.spec import Layer, ModelSpec
from motet.core.workload import BACKBONE, BatchLengths
from motet.cost.flops import LikeOperations, operations_by_work, pairs_of, rows_of
from motet.cost.memory import stage_layers

OPERATION_UNITS = ("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP")
_UNITS_A_ROW = 1000
"""At least, in the module that takes most: so its items are rounded by less than a thousandth, and no batch comes near
2^63 units."""


@dataclass(frozen=True)
class Operations:
    """`balance.ItemWork`: operations of forward and backward of each item, in whole units, as the model trains.

    recompute: per module, of how many of its blocks the activations are recomputed, as `cost.memory.stage_layers`.
    """

    model: ModelSpec
    recompute: Mapping[str, int] = field(default_factory=dict)

    def __call__(self, lengths: BatchLengths) -> dict[str, Int64Array]:
        """Per module, int64 [num_items] in units. O(num_items), once for all layers that see the same rows."""
        found = {}
        for name, layers in self._by_work.items():
            column = lengths.of(name).length
            flops = _flops(layers, column, lengths.num_targets if name == BACKBONE else column)
            found[name] = self._in_units(flops)
        return found

    def unit(self, phase: str) -> str:
        """The same for all phases, so that their loads can be compared."""
        return OPERATION_UNITS[self._exponent]

    @property
    def unit_flops(self) -> int:
        """Operations of a unit: a power of 1,000, by what a row takes."""
        return int(1000**self._exponent)

    @cached_property
    def _exponent(self) -> int:
        most = max(sum(each.row for each in layers.values()) for layers in self._by_work.values())
        fitting = [exponent for exponent in range(len(OPERATION_UNITS)) if most >= _UNITS_A_ROW * 1000**exponent]
        return max(fitting, default=0)

    @cached_property
    def _by_work(self) -> dict[str, dict[Layer, LikeOperations]]:
        found = {}
        for module in self.model.modules:
            span = {module.name: (0, len(module.blocks))}
            layers = operations_by_work(each[1:] for each in stage_layers(self.model, span, self.recompute))
            found[module.name] = {like: each for like, each in layers.items() if each.row or each.pair}
        return found

    def _in_units(self, flops: Int64Array) -> Int64Array:
        if self.unit_flops == 1:
            return flops.astype(np.int64)
        return ((flops + self.unit_flops // 2) // self.unit_flops).astype(np.int64)


def _flops(layers: Mapping[Layer, LikeOperations], lengths: Int64Array, num_targets: Int64Array) -> Int64Array:
    """Operations of each item, [num_items]: int64, or Python's own integers where those would overflow."""
    longest, most_targets = (np.array([int(column.max(initial=0))], dtype=object) for column in (lengths, num_targets))
    # Half of the range, as a unit is yet to be rounded to.
    if int(_summed(layers, longest, most_targets)[0]) > INT64_MAX // 2:
        lengths, num_targets = lengths.astype(object), num_targets.astype(object)
    return _summed(layers, lengths, num_targets)


def _summed(layers: Mapping[Layer, LikeOperations], lengths: Int64Array, num_targets: Int64Array) -> Int64Array:
    total = np.zeros_like(lengths)
    for like, operations in layers.items():
        rows = num_targets if like.targets_only else rows_of(like, lengths)
        total += operations.row * rows
        if like.attention:
            # Of the whole layer, as part of a pair is no whole number.
            total += round(operations.pair * like.attention.density) * pairs_of(like.attention, rows)
    return total
