"""Floating-point operations of layers and modules on items of given lengths, forward and backward.

A matrix product of a row with w weights is 2 w operations; attention, for each pair of a query and a key that the mask
leaves, is two products over all heads: 4 * width operations (Kaplan et al. 2020, section 2.1; PaLM, appendix B). Norms,
activations, softmax and look-ups are not counted. Backward is each product again for its weights' gradient, where they
are trained, and again for its input's, where a gradient must pass (Cornstarch section 4.2, with the erratum on
recomputation). What a model needs, without recomputation and padding, gives MFU; what the hardware does, HFU: Optimus
(section 5) calls the second by the first's name. Megatron's formula, which it uses, counts all pairs of a causal mask.

Counted in integers, so that all ranks count the same.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from motet.core.arrays import Float64Array, Int64Array
from motet.core.spec import Attention, Layer, ModelSpec, Module
from motet.core.workload import BACKBONE, BatchLengths
from motet.cost.model import Work


class LayerFlops(NamedTuple):
    """Operations, float64 [num_microbatches] each: forward; input, for the gradient of the input and of all that is
    within; weight, for those of the weights. All as if they were needed.
    """

    forward: Float64Array
    input: Float64Array
    weight: Float64Array


def work_of(
    layer: Layer,
    lengths: Int64Array,
    microbatch: Int64Array | None = None,
    num_microbatches: int = 1,
    *,
    padded: bool = False,
    num_targets: Int64Array | int | None = None,
) -> Work:
    """Rows and pairs of a layer in each microbatch. O(num_items).

    lengths, microbatch: int64 [num_items], of each item its length and its microbatch, by default the first.
    padded:              every item is computed as if it were as long as the longest of its microbatch.
    num_targets:         int64 [num_microbatches], the rows of a layer that sees targets only; by default all rows.
    """
    rows, pairs = _work(layer, lengths, microbatch, num_microbatches, padded, num_targets)
    return Work(rows.astype(np.float64), pairs.astype(np.float64))


def layer_flops(layer: Layer, work: Work) -> LayerFlops:
    """Operations of one layer on given work."""
    products = 2.0 * layer.weights * work.rows
    attention = 4.0 * (layer.attention.width if layer.attention else 0) * work.pairs
    return LayerFlops(products + attention, products + 2 * attention, products)


def step_flops(
    module: Module,
    lengths: Int64Array,
    num_targets: int | None = None,
    *,
    reached: bool = False,
    recomputed: bool = False,
    microbatch: Int64Array | None = None,
) -> int:
    """Operations of forward and backward. O(num_items), once for all layers that see the same rows.

    num_targets: rows that the output layer sees; by default all.
    reached:     something before the module learns, so that its input needs a gradient.
    recomputed:  transformer layers that have a backward pass run forward again in it, whole, as in Megatron's formula
                 (torch leaves out the last product of each).
    microbatch:  int64 [num_items]; if given, a padded module's padding is counted, to the longest of each microbatch
                 (its projector's too, which is then some per cent above what Motet's encoders compute).
    """
    per_work = {like: (own.row, own.pair) for like, own in _operations(module, reached, recomputed).items()}
    return _total(module, per_work, lengths, num_targets, microbatch)


def batch_flops(
    spec: ModelSpec,
    lengths: BatchLengths,
    *,
    recomputed: Collection[str] = (),
    computed_on: Mapping[str, Int64Array] = MappingProxyType({}),
) -> dict[str, int]:
    """Operations of forward and backward of each phase of a microbatch, over all ranks.

    recomputed:  modules whose transformer layers are recomputed.
    computed_on: per padded module whose padding is to count, int64 [num_items], the rank that computes each item.
    """
    flops = {}
    for module in spec.modules:
        backbone = module.name == BACKBONE
        flops[module.name] = step_flops(
            module,
            lengths.sequence if backbone else lengths.items[module.name].length,
            int(lengths.num_targets.sum()) if backbone else None,
            reached=spec.input_gradients[module.name][0],
            recomputed=module.name in recomputed,
            microbatch=computed_on.get(module.name),
        )
    return flops


def mfu(spec: ModelSpec, batches: Iterable[BatchLengths], time_s: float, peak_flops: float) -> float:
    """Model FLOPs utilisation: the share of what all ranks could do in time_s that the model itself needs.

    peak_flops: operations a second, of all ranks together.
    """
    return sum(sum(batch_flops(spec, batch).values()) for batch in batches) / time_s / peak_flops


def hfu(
    spec: ModelSpec,
    batches: Iterable[tuple[BatchLengths, Mapping[str, Int64Array]]],
    time_s: float,
    peak_flops: float,
    recomputed: Collection[str] = (),
) -> float:
    """Hardware FLOPs utilisation: as MFU, but with recomputation and padding.

    batches: the lengths of each, and where the items of padded modules are computed, as in `batch_flops`.
    """
    total = 0
    for lengths, computed_on in batches:
        total += sum(batch_flops(spec, lengths, recomputed=recomputed, computed_on=computed_on).values())
    return total / time_s / peak_flops


class LikeOperations(NamedTuple):
    """Operations for each row, and for each pair, of all layers that are given the same work."""

    forward_row: int = 0
    forward_pair: int = 0
    row: int = 0
    pair: int = 0


def operations_by_work(layers: Iterable[tuple[Layer, bool, bool]]) -> dict[Layer, LikeOperations]:
    """By a layer that stands for all that are given the same work: layers are mostly alike.

    layers: each with whether a gradient must pass through it to what learns before it, and whether it is recomputed.
    """
    found: dict[Layer, LikeOperations] = {}
    for layer, returns, recomputed in layers:
        attention = layer.attention
        # A transformer layer is several products: gradients pass between them even if none leaves it.
        inner = returns or (layer.trainable and attention is not None)
        like = _representative(layer)
        old = found.get(like, LikeOperations())
        products, pairs = 2 * layer.weights, 4 * attention.width if attention else 0
        found[like] = LikeOperations(
            old.forward_row + products,
            old.forward_pair + pairs,
            old.row + products * (1 + inner + layer.trainable + recomputed),
            old.pair + pairs * (1 + 2 * inner + recomputed),
        )
    return found


@cache
def _operations(module: Module, reached: bool, recomputed: bool) -> dict[Layer, LikeOperations]:
    def layers() -> Iterator[tuple[Layer, bool, bool]]:
        for layer, returns in zip(module.layers, module.input_gradients(reached), strict=True):
            yield layer, returns, recomputed and layer.attention is not None and (returns or layer.trainable)

    return operations_by_work(layers())


def _representative(layer: Layer) -> Layer:
    attention = replace(layer.attention, width=0, kv_width=0) if layer.attention else None
    like = replace(layer, kind="", weights=0, parameters=0, output_width=0, activation_width=0)
    return replace(like, attention=attention, trainable=False)


def _total(
    module: Module,
    per_work: Mapping[Layer, tuple[int, int]],
    lengths: Int64Array,
    num_targets: int | None,
    microbatch: Int64Array | None,
) -> int:
    total = 0
    num_microbatches = 1 if microbatch is None else int(microbatch.max(initial=0)) + 1
    padded = module.padded and microbatch is not None
    for like, (row, pair) in per_work.items():
        if row or pair:
            rows, pairs = _work(like, lengths, microbatch, num_microbatches, padded, None)
            given = num_targets if like.targets_only and num_targets is not None else sum(rows.tolist())
            total += row * given + pair * sum(pairs.tolist())
    return total


def _work(
    layer: Layer,
    lengths: Int64Array,
    microbatch: Int64Array | None,
    num_microbatches: int,
    padded: bool,
    num_targets: Int64Array | int | None,
) -> tuple[Int64Array, Int64Array]:
    """Rows and pairs, integers [num_microbatches]: int64, or Python's own where those would overflow."""
    rows = rows_of(layer, np.asarray(lengths, dtype=np.int64))
    if len(rows) * int(rows.max(initial=0)) ** 2 >= 2**62:
        rows = rows.astype(object)
    place = np.zeros(len(rows), dtype=np.int64) if microbatch is None else microbatch
    if padded:
        longest = np.zeros(num_microbatches, dtype=rows.dtype)
        np.maximum.at(longest, place, rows)
        rows = longest[place]
    summed = np.zeros((2, num_microbatches), dtype=rows.dtype)
    np.add.at(summed[0], place, rows)
    if layer.attention:
        np.add.at(summed[1], place, pairs_of(layer.attention, rows))
        if layer.attention.density != 1:
            summed[1] = np.rint(summed[1].astype(np.float64) * layer.attention.density).astype(rows.dtype)
    if layer.targets_only and num_targets is not None:
        summed[0] = num_targets
    return summed[0], summed[1]


def rows_of(layer: Layer, lengths: Int64Array) -> Int64Array:
    """Rows that items of `lengths` have in a layer, int64 [num_items] each."""
    rows = lengths if layer.divisor == 1 else -(-lengths // layer.divisor)
    return rows + layer.extra_rows if layer.extra_rows else rows


def pairs_of(attention: Attention, rows: Int64Array) -> Int64Array:
    """Pairs of a query and a key in items of `rows`, int64 [num_items] each, whatever the density."""
    if not attention.window:
        pairs: Int64Array = rows * (rows + 1) // 2 if attention.causal else rows * rows
    elif attention.causal:
        within = np.minimum(rows, attention.window)
        pairs = within * (within + 1) // 2 + (rows - within) * attention.window
    else:
        last = rows % attention.window
        pairs = (rows - last) * attention.window + last * last
    return pairs
