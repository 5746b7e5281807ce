"""Floating-point operations of layers and modules on items of given lengths, forward and backward.

- A product of a row with w weights takes 2 w operations.
- Attention takes 4 * width operations for each pair of a query and a key that the mask leaves: two products over all
  heads (Kaplan et al. 2020, section 2.1; PaLM, appendix B).
- Norms, activations, softmax and look-ups are not counted.
- Backward computes each product again for the gradient of its weights, if they are trainable, and again for the
  gradient of its input, if one is needed (Cornstarch section 4.2, with the erratum on recomputation).

MFU counts the operations that the model needs, without recomputation and padding: of an example without items of what
learns before a frozen backbone, it needs no backward pass there. HFU counts those that the hardware computes, of which
`BackwardOf` says more. Optimus (section 5) calls HFU "MFU", and uses Megatron's formula, which counts all pairs of a
causal mask.

Operations are integers, so that all ranks count the same.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from types import MappingProxyType
from typing import Literal, NamedTuple, Protocol

import numpy as np

from motet.core.arrays import BoolArray, Float64Array, Int64Array
from motet.core.errors import UserError
from motet.core.item_segments import ItemSegments
from motet.core.spec import Attention, Layer, ModelSpec, Module
from motet.core.workload import BACKBONE, BatchLengths
from motet.cost.model import Work

BackwardOf = Literal["example", "microbatch", "all"]
"""Through which items of a module gradients go back to what learns before it.

example:    those of examples with an item of it, which are those that the model needs.
microbatch: all items of a microbatch in which any example has one, as data parallelism runs.
all:        all items, as stages run.
"""


class LayerFlops(NamedTuple):
    """Operations of a layer, float64 [num_microbatches] each, whether or not they are needed.

    input:  for the gradient of the input and of all inner activations.
    weight: for the gradients of the weights.
    """

    forward: Float64Array
    input: Float64Array
    weight: Float64Array


class ItemColumns(Protocol):
    """What of items their work follows from: an `ItemLengths`, or a `ModuleAssignment`, whose columns these are."""

    @property
    def length(self) -> Int64Array: ...
    @property
    def segments(self) -> ItemSegments | None: ...
    @property
    def num_media(self) -> Int64Array | None: ...
    @property
    def num_tokens(self) -> Int64Array: ...


def work_of_items(
    layer: Layer,
    items: ItemColumns,
    microbatch: Int64Array | None = None,
    num_microbatches: int = 1,
    *,
    padded: bool = False,
    num_targets: Int64Array | int | None = None,
) -> Work:
    """As `work_of`, of items with all that is known of them."""
    return work_of(
        layer,
        items.length,
        microbatch,
        num_microbatches,
        padded=padded,
        num_targets=num_targets,
        segments=items.segments,
        num_media=items.num_media,
        num_tokens=items.num_tokens,
    )


def work_of(
    layer: Layer,
    lengths: Int64Array,
    microbatch: Int64Array | None = None,
    num_microbatches: int = 1,
    *,
    padded: bool = False,
    num_targets: Int64Array | int | None = None,
    segments: ItemSegments | None = None,
    num_media: Int64Array | None = None,
    num_tokens: Int64Array | None = None,
) -> Work:
    """Rows and pairs of a layer in each microbatch. O(num_items).

    lengths:     int64 [num_items]. segments: of these items; None: each item is one.
    num_media:   as of `ItemLengths`; None: one in each sequence.
    num_tokens:  as of `ItemLengths`; None: what lengths say of projectors counts (`Layer.of_outputs`).
    microbatch:  int64 [num_items]; by default all items are in the first.
    padded:      every item has the rows of the longest item of its microbatch.
    num_targets: int64 [num_microbatches], the rows of a layer that sees targets only; by default all rows.
    Raises UserError for segments of padded items.
    """
    if padded:
        check_padded_whole(segments)
    lengths = np.asarray(lengths, dtype=np.int64)
    items = _Items(lengths, segments, num_media, num_tokens)
    rows, pairs = _work(layer, items, microbatch, num_microbatches, padded, num_targets)
    return Work(rows.astype(np.float64), pairs.astype(np.float64))


def check_padded_whole(segments: ItemSegments | None) -> None:
    """Raise UserError for segments of items of a padded module."""
    if segments is not None:
        raise UserError("A module that is computed with padding pads whole items, so its items can have no segments.")


def layer_flops(layer: Layer, work: Work) -> LayerFlops:
    """Operations of one layer on the given work."""
    products = 2.0 * layer.weights * work.rows
    attention = 4.0 * (layer.attention.width if layer.attention else 0) * work.pairs
    return LayerFlops(products + attention, products + 2 * attention, 2.0 * layer.updated_weights * work.rows)


class HalfShares(NamedTuple):
    """The shares of a transformer layer's attention in the operations of its passes; its MLP has the rest."""

    forward: float
    input: float
    weight: float


def attention_shares(layer: Layer, work: Work) -> HalfShares:
    """The shares of attention over all microbatches, with its matrices. Of a layer without rows: by weights."""
    share = layer.attention_weights / max(layer.weights, 1)
    part = replace(
        layer, weights=layer.attention_weights, frozen_weights=int(layer.frozen_weights * share), frozen_parameters=0
    )
    whole, attention = (layer_flops(each, work) for each in (layer, part))
    sums = ((float(part.sum()), float(of_all.sum())) for part, of_all in zip(attention, whole))
    return HalfShares(*(part / of_all if of_all else layer.attention_weights / layer.weights for part, of_all in sums))


def expert_shares(layer: Layer, work: Work) -> LayerFlops:
    """The shares of its experts in the operations of the passes of a layer, float64 [n] each, n as of `work`."""
    num = layer.experts_per_row
    experts = replace(
        layer,
        attention=None,
        weights=num * layer.expert_weights,
        frozen_weights=num * layer.frozen_expert_weights,
        num_experts=0,
        expert_weights=0,
        frozen_expert_weights=0,
        idle_weights=0,
    )
    pairs = zip(layer_flops(experts, work), layer_flops(layer, work), strict=True)
    return LayerFlops(*(part / np.where(whole > 0, whole, 1.0) for part, whole in pairs))


def step_flops(
    module: Module,
    lengths: Int64Array,
    num_targets: int | None = None,
    *,
    reached: bool = False,
    recomputed: bool | int = False,
    microbatch: Int64Array | None = None,
    segments: ItemSegments | None = None,
    num_media: Int64Array | None = None,
    num_tokens: Int64Array | None = None,
) -> int:
    """Operations of a module's forward and backward. O(num_items) for each kind of layer with rows of its own.

    num_targets: rows that the output layer sees; by default all.
    reached:     a parameter before the module is trainable, so the module's input needs a gradient.
    recomputed:  backward runs the forward pass of each transformer layer again, whole, as in Megatron's formula (torch
                 leaves out the last product of each). A number: only in so many of the first blocks.
    microbatch:  int64 [num_items]; if given, the padding of a padded module counts, to the longest item of each
                 microbatch. The projector's padding counts too, some per cent above what Motet's encoders compute.
    segments, num_media, num_tokens: as of `work_of`.
    """
    num_blocks = len(module.blocks) if recomputed is True else int(recomputed)
    operations = _operations(module, reached, num_blocks)
    per_work = {like: (totals.row, totals.pair) for like, totals in operations.items()}
    items = _Items(np.asarray(lengths, dtype=np.int64), segments, num_media, num_tokens)
    return _total(module, per_work, items, num_targets, microbatch)


def batch_flops(
    spec: ModelSpec,
    lengths: BatchLengths,
    *,
    recomputed: Collection[str] | Mapping[str, int] = (),
    computed_on: Mapping[str, Int64Array] = MappingProxyType({}),
    backward_of: BackwardOf = "example",
) -> dict[str, int]:
    """Operations of forward and backward of each module on a microbatch, over all ranks.

    recomputed:  the modules whose transformer layers are recomputed, or per module the number of its first blocks.
    computed_on: per padded module whose padding counts, int64 [num_items], the rank that computes each item.
    """
    flops = {}
    for module in spec.modules:
        name, items = module.name, lengths.of(module.name)
        ranks, is_reached = computed_on.get(name), _reached(spec, name, lengths, backward_of)[items.example]
        flops[name] = 0
        for reached in np.unique(is_reached).tolist():
            chosen = np.flatnonzero(is_reached == reached)
            part = items.take_items(chosen)
            flops[name] += step_flops(
                module,
                part.length,
                int(lengths.num_targets[part.example].sum()) if name == BACKBONE else None,
                reached=reached,
                recomputed=recomputed.get(name, 0) if isinstance(recomputed, Mapping) else name in recomputed,
                microbatch=None if ranks is None else ranks[chosen],
                segments=part.segments,
                num_media=part.num_media,
                num_tokens=part.num_tokens,
            )
    return flops


def _reached(spec: ModelSpec, name: str, lengths: BatchLengths, backward_of: BackwardOf) -> BoolArray:
    """Whether a gradient goes through the items of a module to what learns before it, bool [num_examples]."""
    learners = spec.learners_before(name)
    if backward_of == "all":
        return np.full(lengths.num_examples, bool(learners))
    has_items = lengths.has_any(learners)
    return has_items if backward_of == "example" else np.full(lengths.num_examples, has_items.any())


def mfu(spec: ModelSpec, batches: Iterable[BatchLengths], time_s: float, peak_flops: float) -> float:
    """Model FLOPs utilisation: operations that the model needs / (time_s * peak_flops).

    peak_flops: operations a second of all ranks together.
    """
    return sum(sum(batch_flops(spec, batch).values()) for batch in batches) / time_s / peak_flops


def hfu(
    spec: ModelSpec,
    batches: Iterable[tuple[BatchLengths, Mapping[str, Int64Array]]],
    time_s: float,
    peak_flops: float,
    recomputed: Collection[str] | Mapping[str, int] = (),
    backward_of: BackwardOf = "microbatch",
) -> float:
    """Hardware FLOPs utilisation: as `mfu`, with recomputation, padding, and gradients that no example needs.

    batches: the lengths and `computed_on` of each microbatch, as in `batch_flops`. recomputed: as there.
    """
    total = 0
    for lengths, ranks in batches:
        done = batch_flops(spec, lengths, recomputed=recomputed, computed_on=ranks, backward_of=backward_of)
        total += sum(done.values())
    return total / time_s / peak_flops


class LikeOperations(NamedTuple):
    """Operations a row and a pair, summed over all layers that are given the same work.

    forward_row, forward_pair: of forward. row, pair: of forward and backward.
    """

    forward_row: int = 0
    forward_pair: int = 0
    row: int = 0
    pair: int = 0


def operations_by_work(layers: Iterable[tuple[Layer, bool, bool]]) -> dict[Layer, LikeOperations]:
    """Operations by representative: a layer that stands for all layers with the same rows and pairs.

    layers: (layer, whether backward needs a gradient of its input, whether it is recomputed).
    """
    totals: dict[Layer, LikeOperations] = {}
    for layer, needs_input, recomputed in layers:
        attention = layer.attention
        like = like_layer(layer)
        before = totals.get(like, LikeOperations())
        products, pairs = 2 * layer.weights, 4 * attention.width if attention else 0
        totals[like] = LikeOperations(
            before.forward_row + products,
            before.forward_pair + pairs,
            before.row
            + products * (1 + recomputed)
            + 2 * layer.input_weights(needs_input)
            + (2 * layer.updated_weights if layer.trainable else 0),
            before.pair + pairs * (1 + 2 * layer.has_inner(needs_input) + recomputed),
        )
    return totals


@cache
def _operations(module: Module, reached: bool, num_recomputed: int) -> dict[Layer, LikeOperations]:
    recomputed = {index for block in module.blocks[:num_recomputed] for index in block}

    def layers() -> Iterator[tuple[Layer, bool, bool]]:
        for index, (layer, needs_input) in enumerate(zip(module.layers, module.input_gradients(reached), strict=True)):
            yield (
                layer,
                needs_input,
                index in recomputed and layer.in_block and (needs_input or layer.trainable),
            )

    return operations_by_work(layers())


@cache
def like_layer(layer: Layer) -> Layer:
    """A layer that is equal for all layers with the same rows and pairs.

    Example:
        >>> from motet.core.shapes import Transformer, language_model
        >>> layers = language_model(Transformer(64, 256, num_heads=4), 8, 1000).layers
        >>> len(set(layers)), len({like_layer(layer) for layer in layers})
        (4, 3)
    """
    attention = replace(layer.attention, width=0, kv_width=0) if layer.attention else None
    like = replace(
        layer,
        kind="",
        weights=0,
        parameters=0,
        output_width=0,
        carried_width=0,
        activation_width=0,
        idle_weights=0,
        divided_width=0,
        weight_width=0,
        divided_weight_width=0,
        frozen_weights=0,
        frozen_parameters=0,
    )
    like = replace(like, num_experts=0, expert_weights=0, frozen_expert_weights=0, inner_weights=None)
    return replace(like, attention=attention, trainable=False, continues=False)


class _Items(NamedTuple):
    """What of items their work follows from, as of `work_of`: an `ItemColumns`."""

    length: Int64Array
    segments: ItemSegments | None = None
    num_media: Int64Array | None = None
    num_tokens: Int64Array | None = None


def _total(
    module: Module,
    per_work: Mapping[Layer, tuple[int, int]],
    items: _Items,
    num_targets: int | None,
    microbatch: Int64Array | None,
) -> int:
    total = 0
    num_microbatches = 1 if microbatch is None else int(microbatch.max(initial=0)) + 1
    padded = module.padded and microbatch is not None
    for like, (row, pair) in per_work.items():
        if row or pair:
            rows, pairs = _work(like, items, microbatch, num_microbatches, padded, None)
            num_rows = num_targets if like.targets_only and num_targets is not None else sum(rows.tolist())
            total += row * num_rows + pair * sum(pairs.tolist())
    return total


def _work(
    layer: Layer,
    items: _Items,
    microbatch: Int64Array | None,
    num_microbatches: int,
    padded: bool,
    num_targets: Int64Array | int | None,
) -> tuple[Int64Array, Int64Array]:
    """Rows and pairs, integers [num_microbatches]: int64, or Python's own where those would overflow."""
    of_parts, rows = rows_of_items(layer, *items)
    most_keys = _most_keys(layer, items.num_media)
    if len(rows) * int(rows.max(initial=0)) * max(int(rows.max(initial=0)), most_keys) >= 2**62:
        of_parts, rows = of_parts.astype(object), rows.astype(object)
    index = np.zeros(len(rows), dtype=np.int64) if microbatch is None else microbatch
    by_outputs = layer.of_outputs and items.num_tokens is not None
    if padded:
        longest = np.zeros(num_microbatches, dtype=rows.dtype)
        np.maximum.at(longest, index, rows)
        rows = of_parts = longest[index]
    summed = np.zeros((2, num_microbatches), dtype=rows.dtype)
    summed[0] = _summed(index, rows, num_microbatches)
    if layer.attention:
        pairs = pairs_of_items(layer, of_parts, items.segments, items.num_media, by_outputs=by_outputs)
        summed[1] = _summed(index, pairs, num_microbatches)
        if layer.attention.density != 1:
            summed[1] = np.rint(summed[1].astype(np.float64) * layer.attention.density).astype(rows.dtype)
    if layer.targets_only and num_targets is not None:
        summed[0] = num_targets
    return summed[0], summed[1]


def rows_of_items(
    layer: Layer,
    lengths: Int64Array,
    segments: ItemSegments | None,
    num_media: Int64Array | None,
    num_tokens: Int64Array | None,
) -> tuple[Int64Array, Int64Array]:
    """The rows of each segment in a layer, [num_segments], and of each item, [num_items]; of layers whose rows follow
    from those of the sequence (`Layer.of_outputs`), and of items without segments, the latter twice.

    Arguments are as of `work_of`, int64 or Python's own integers.
    """
    tokens = num_tokens if layer.of_outputs else None
    if tokens is not None and not (layer.attention and layer.attention.queries):
        return tokens, tokens
    of_parts = layer.rows(lengths if segments is None else segments.length, num_media)
    rows = of_parts if segments is None else segments.summed(of_parts)
    if tokens is not None:
        if layer.extra_rows:  # Queries stand among the rows.
            rows = rows + tokens - layer.extra_rows * (1 if segments is None else segments.counts)
        return rows, rows
    return of_parts, rows


def _summed(index: Int64Array, amount: Int64Array, count: int) -> Int64Array:
    """The sums of the amounts at each of `count` indices, exact. O(items)."""
    total: Int64Array = np.zeros(count, dtype=object if amount.dtype == object else np.int64)
    np.add.at(total, index, amount)  # Faster than bincount, which makes floats of them and back.
    return total


def _most_keys(layer: Layer, num_media: Int64Array | None) -> int:
    """The most keys beside its item that a row may attend to."""
    keys = layer.attention.keys if layer.attention else 0
    return keys * int(num_media.max(initial=0)) if layer.of_media and num_media is not None else keys


def pairs_of_items(
    layer: Layer,
    rows: Int64Array,
    segments: ItemSegments | None,
    num_media: Int64Array | None,
    *,
    by_outputs: bool = False,
) -> Int64Array:
    """The pairs of each item in a layer with attention, [num_items], at a density of 1: the one place where attention
    ends at segments.

    rows: of `rows_of_items`, [num_segments] or [num_items]. by_outputs: they follow from those of the sequence.
    """
    attention = layer.attention
    assert attention is not None
    if layer.of_media and num_media is not None:
        return num_media * pairs_of(attention, rows)
    if by_outputs and not attention.queries:
        return rows // layer.item_rows * pairs_of(attention, np.full_like(rows, layer.item_rows))
    if segments is None or by_outputs:
        return pairs_of(attention, rows)
    if attention.whole:
        frames = np.ones_like(segments.counts) if segments.frames is None else segments.frames
        return frames * pairs_of(attention, segments.summed(rows) // frames)
    return segments.summed(pairs_of(attention, rows))


def pairs_of(attention: Attention, rows: Int64Array) -> Int64Array:
    """The pairs of a query and a key among the given numbers of rows, int64 [n], at a density of 1."""
    if beside := attention.queries or attention.keys:
        return beside * rows
    if not attention.window:
        pairs: Int64Array = rows * (rows + 1) // 2 if attention.causal else rows * rows
    elif attention.causal:
        within = np.minimum(rows, attention.window)
        pairs = within * (within + 1) // 2 + (rows - within) * attention.window
    else:
        last = rows % attention.window
        pairs = (rows - last) * attention.window + last * last
    return pairs
