"""Bytes on a rank: parameters, gradients, optimizer state, activations that a microbatch keeps for backward, and peaks.

- State (ZeRO, Rajbhandari et al. 2020, section 5). The ranks that share a copy divide the optimizer state from ZeRO
  stage 1 on, gradients from 2 on, parameters at 3. Hybrid sharding divides over fewer ranks. Tensor parallelism divides
  matrices of transformer layers, MLPs behind encoders, embedding and output layer (`models/divided.py`). Pipeline
  parallelism leaves a rank its stage's layers. Frozen layers have no gradient and no state; in a pipeline that
  computes in 16 bits, they have what was read beside what passes compute with. Experts are divided whole, as parameters
  are divided by rows: of 8 experts, one of 16 ranks holds one or none, and the one that has one counts. What embedding
  and output layer share is whole on each rank of two stages (`simulate/predict/tied.py`).
- Activations (Korthikanti et al. 2022, section 4, with fused attention). A layer keeps activation_width elements a row;
  one whose weights are frozen, but which passes a gradient on, only those that are not for gradients of weights alone.
  A recomputed layer keeps its input alone; the rest exists once, for the running layer. A layer without a backward
  pass keeps nothing. Of tensor-parallel ranks each keeps a part of what is of heads and inner columns. The rest is
  whole on all of them, but between the branches of backbones and encoders (`StageLayer.in_parts`); there too they keep
  whole what the first products multiply, which the paper gathers again in backward.
- Transients, the largest of each. Gathered layers (ZeRO stage 3): the running one and the prefetched next one; in a
  pipeline all of the stage, as its Program gathers a stage. Gradients before their reduction (from ZeRO stage 2 on): of
  a layer; in a pipeline of the stage. The running layer's elements that are not kept, with the gradients of its output
  and input, or with the logits and their float32 copies.
- Copies (context parallelism). A layer that is not recomputed keeps the keys and values that its rows see of other
  ranks, as attention reads them again in backward; while it runs, they are in a buffer to send and one to receive.
- Merges (`ModelSpec.takes_whole`). Where a merge of the user's own takes sequences whole, one of the ranks that share a
  sequence has all of its rows in the embedding and in the merge, and all others have none. Keys of images beside a
  sequence are whole on the rank that has its first rows (`Layer.makes_keys`).
- Rows of encoders (`taken_bytes`). A stage of the backbone keeps those that it takes in, with what enters inner layers
  (DeepStack), until its backward pass: their gradient is collected there.

Not counted: fragmentation, buffers of communication libraries, messages under way, and temporaries of the optimizer's
step, which runs when no activations are left. What a stage hands on is freed once it is sent (`runtime/tensors.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import NamedTuple

from motet.core.errors import ArgumentError
from motet.core.plan import ADAM_MOMENTS, Plan, Unit, expert_shard_size
from motet.core.spec import Layer, ModelSpec
from motet.core.workload import BACKBONE

USABLE_MEMORY = 0.94
"""The share of a device's memory that a Plan may fill. Fragmentation and communication libraries take the rest."""

CopiesOfLayer = Callable[[str, Layer], float]
"""(module, layer) -> bytes that attention has of other context-parallel ranks' rows in a microbatch, on one rank."""

RowsOfLayer = Callable[[str, Layer], float]
"""(module, layer) -> rows of a microbatch in the layer, in one replica over all its context-parallel ranks.

For a layer that sees targets only, the number of rows whose logits exist at once."""


@dataclass(frozen=True)
class MixedPrecision:
    """Bytes of a number.

    compute:   of parameters and activations in products, and of logits as the output layer gives them.
    stored:    of parameters between passes. The optimizer updates the stored parameters, and they are sharded with its
               state; passes have a copy if it is another type, or if what is stored is sharded.
    gradient:  of gradients as they are summed over microbatches.
    optimizer: of a parameter's optimizer state.
    master:    of a master copy of a parameter, of which passes have one in `compute`; 0: there is none. A trainable
               parameter's is part of its optimizer state, which updates it; a frozen one has it too, as checkpoints and
               exports have its value as it was read. Copies are sharded with the optimizer's state.
    """

    compute: int
    stored: int
    gradient: int
    optimizer: int
    master: int = 0


FSDP_BF16 = MixedPrecision(compute=2, stored=4, gradient=4, optimizer=8)
"""The bytes of FSDP2 with `param_dtype` bfloat16 over float32 parameters, and AdamW."""
FSDP_FP32 = MixedPrecision(compute=4, stored=4, gradient=4, optimizer=8)
FSDP_FP64 = MixedPrecision(compute=8, stored=8, gradient=8, optimizer=16)
MEGATRON_BF16 = MixedPrecision(compute=2, stored=2, gradient=4, optimizer=12, master=4)
"""The bytes of Megatron's distributed optimizer: bfloat16 parameters; float32 gradients, master copy and moments."""


PRECISION_OF_DTYPE = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64"}
"""The names that Plans have for the types in which modules compute."""


@lru_cache
def mixed_precision(precision: str, *, pipeline: bool, moments: int = ADAM_MOMENTS) -> MixedPrecision:
    """The bytes of a job that computes in `precision` ("bf16", "fp32", ...).

    pipeline: as in Megatron's distributed optimizer; else as in FSDP2.
    moments:  numbers that the optimizer keeps of each parameter, in the type of its gradient.
    """
    found = MEGATRON_BF16 if pipeline else FSDP_BF16
    if precision in ("fp32", "tf32"):
        found = FSDP_FP32
    if precision == "fp64":
        found = FSDP_FP64
    return replace(found, optimizer=found.optimizer + (moments - ADAM_MOMENTS) * found.gradient)


def plan_precision(plan: Plan) -> MixedPrecision:
    """The bytes of a number in the job of a Plan."""
    return mixed_precision(plan.precision, pipeline=plan.schedule != "data_parallel", moments=plan.moments)


class StateBytes(NamedTuple):
    """The bytes that a rank holds between passes."""

    parameters: int
    gradients: int
    optimizer: int


def state_bytes(
    num_parameters: int, num_trainable: int, *, precision: MixedPrecision, zero: int = 0, shard_ranks: float = 1
) -> StateBytes:
    """The bytes that a rank holds for num_parameters parameters, num_trainable of them trainable.

    shard_ranks: the number of ranks that share one copy; of what they cannot share equally, 1 / the largest share.
    Raises ArgumentError for a ZeRO stage that is not 0 to 3, and for shard_ranks below 1.
    """
    if zero not in (0, 1, 2, 3) or shard_ranks < 1:
        raise ArgumentError(f"zero is {zero} over {shard_ranks} ranks; it must be 0, 1, 2 or 3, over at least 1.")

    def share(size_bytes: int, sharded_from: int) -> int:
        return math.ceil(size_bytes / shard_ranks) if zero >= sharded_from else size_bytes

    is_cast, is_shared = precision.stored > precision.compute, 0 < zero < 3 and shard_ranks > 1
    if precision.master:
        in_passes = precision.stored * num_parameters if zero < 3 else 0  # Else gathered for a pass.
        parameters = in_passes + share(precision.master * (num_parameters - num_trainable), 1)
    elif is_cast:
        copies = precision.compute * num_parameters if zero < 3 else 0
        parameters = share(precision.stored * num_parameters, 1) + copies
    else:  # What is updated in shares has a copy for passes; what is frozen is that copy.
        parameters = share(precision.stored * num_parameters, 3)
        parameters += share(precision.stored * num_trainable, 1) if is_shared else 0
    return StateBytes(
        parameters, share(precision.gradient * num_trainable, 2), share(precision.optimizer * num_trainable, 1)
    )


def activation_bytes(
    layer: Layer,
    rows: float,
    *,
    element_bytes: int,
    tp: int = 1,
    recomputed: bool = False,
    in_parts: bool = False,
    and_whole: bool = False,
) -> int:
    """Bytes that one microbatch's forward pass of a layer keeps for backward, on one of `tp` tensor-parallel ranks.

    A recomputed layer keeps its input, which counts as wide as its output, and is whole on all ranks. One that
    continues a block keeps nothing, as the input of the block is kept.
    in_parts, and_whole: as in `StageLayer`.
    """
    if recomputed and layer.continues:
        return 0
    width: float = min(layer.output_width, layer.activation_width) if recomputed else layer.kept_width
    if tp > 1 and not recomputed:
        whole = layer.kept_width - layer.kept_divided_width
        if in_parts:  # What the first products of attention and of the MLP multiply; behind a norm there are none.
            gone = 0 if layer.trainable else layer.weight_width - layer.divided_weight_width
            inputs = min(2 * layer.output_width, whole + gone) - min(2 * layer.output_width, gone)
            whole = inputs if layer.attention else 0
        width = whole + (width - whole) / tp
    if tp > 1 and and_whole:
        width += layer.output_width
    return math.ceil(rows * width * element_bytes)


def parameters_of_rank(layer: Layer, tp: int) -> int:
    """The number of a layer's parameters on one of `tp` tensor-parallel ranks."""
    return layer.parameters - layer.divided_parameters + -(-layer.divided_parameters // tp)


def updated_of_rank(layer: Layer, tp: int) -> int:
    """The parameters of a layer that one of `tp` tensor-parallel ranks holds and updates.

    Of a layer that is frozen in part, the same share on each rank.
    """
    return -(-parameters_of_rank(layer, tp) * layer.updated_parameters // max(layer.parameters, 1))


def logits_bytes(num_rows: float, vocab_size: int, *, element_bytes: int, tp: int = 1) -> int:
    """The most bytes of logits at once: the output layer's, and two copies in at least float32.

    The copies are the logits and their log-softmax in forward, the log-softmax and its gradient in backward.
    """
    wide = max(element_bytes, 4)
    return math.ceil(num_rows * vocab_size * (2 * wide + (element_bytes if element_bytes < wide else 0)) / tp)


@dataclass(frozen=True)
class StageMemory:
    """Bytes of one stage on one of its ranks.

    activations: of one microbatch; `in_flight` microbatches are kept.
    transient:   while a pass runs. shared: of that, what ZeRO 2 and 3 add to what is held: whole parameters and their
                 gradients.
    """

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    in_flight: int
    transient: int
    shared: int = 0

    @property
    def held_bytes(self) -> int:
        """Bytes without transients."""
        return self.parameters + self.gradients + self.optimizer + self.activations * self.in_flight

    @property
    def peak_bytes(self) -> int:
        """Bytes with transients."""
        return self.held_bytes + self.transient


class LayerBytes(NamedTuple):
    """Bytes of one layer and one microbatch on one rank.

    saved:     what forward keeps for backward.
    input:     what forward keeps if the layer is recomputed.
    gradients: of its output and of its input; of the output layer, the logits with all their copies.
    """

    saved: int
    input: int
    gradients: int

    @classmethod
    def of(cls, placed: StageLayer, num_rows: float, tp: int, precision: MixedPrecision) -> LayerBytes:
        """The bytes of `num_rows` rows, on one of `tp` tensor-parallel ranks, which have gradients of whole rows."""
        layer, element_bytes = placed.layer, precision.compute
        if layer.targets_only:
            gradients = logits_bytes(num_rows, layer.output_width, element_bytes=element_bytes, tp=tp)
        else:
            gradients = math.ceil(2 * num_rows * layer.output_width * element_bytes)
        return cls(*kept_bytes(placed, num_rows, tp, element_bytes), gradients)


class StageLayer(NamedTuple):
    """A layer as a stage computes it.

    needs_input:  backward needs the gradient of its input (`input_gradients`).
    in_parts:     tensor-parallel ranks have a part of the rows between its branches each (`RowParts`): in a backbone
                  into which no rows enter again, and in encoders whose sums are not apart; not in layers that
                  attend to rows of images, nor in those of generators and of queries.
    and_whole:    beside its part it keeps whole rows as wide as its output: the first of these layers those that
                  came, to whichever layer of the stage that is not recomputed, but what an encoder embeds itself; the
                  last norm of a backbone those that it hands on.
    kept_share:   what forward keeps for backward over what `Layer` says, where it was measured
                  (`with_measured_bytes`).
    """

    module: str
    layer: Layer
    needs_input: bool
    recomputed: bool
    in_parts: bool = False
    and_whole: bool = False
    kept_share: float = 1.0

    @property
    def has_backward(self) -> bool:
        """Whether the layer has a backward pass."""
        return self.needs_input or self.layer.trainable


def kept_bytes(placed: StageLayer, num_rows: float, tp: int, element_bytes: int) -> tuple[int, int]:
    """What one of `tp` ranks keeps of a layer for backward, in bytes: if it is not recomputed, and if it is."""
    of_layer = partial(
        activation_bytes,
        placed.layer,
        num_rows,
        element_bytes=element_bytes,
        tp=tp,
        in_parts=placed.in_parts,
        and_whole=placed.and_whole,
    )
    return math.ceil(placed.kept_share * of_layer()), of_layer(recomputed=True)


KeptShares = Mapping[tuple[str, Layer], float]
"""(module, layer) -> what forward was measured to keep for backward over what `Layer` says; of layers that were."""


def with_measured_bytes(model: ModelSpec, shares: KeptShares) -> ModelSpec:
    """The model whose layers keep what was measured, in all that follows from `stage_layers`. It is equal to the one
    that is given, which it is without shares.

    Example:
        >>> from motet.core.shapes import Transformer, language_model, multimodal
        >>> model = multimodal("tiny", language_model(Transformer(16, 32, 2, causal=True), 1, 100), [])
        >>> layer = model.module("backbone").layers[1]
        >>> measured = with_measured_bytes(model, {("backbone", layer): 1.5})
        >>> of_both = [stage_layers(each, {"backbone": (0, 1)}, {})[1] for each in (model, measured)]
        >>> said, found = (kept_bytes(placed, 10, tp=1, element_bytes=4)[0] for placed in of_both)
        >>> found / said, measured == model
        (1.5, True)
    """
    if not shares or measured_bytes(model) == shares:
        return model
    own = replace(model)
    own.derived["kept_shares"] = shares
    return own


def measured_bytes(model: ModelSpec) -> KeptShares:
    """The shares of `with_measured_bytes`; {} of a model without."""
    shares: KeptShares = model.derived.get("kept_shares", {})
    return shares


Spans = Mapping[str, tuple[int, int]]
"""Per module, a range of its blocks (`Module.blocks`): (first, stop)."""


def stage_layers(
    model: ModelSpec, spans: Spans, recompute: Mapping[str, int], *, whole_rows: bool = False
) -> list[StageLayer]:
    """The layers that a stage computes, in execution order.

    whole_rows: tensor-parallel ranks have all rows between branches of encoders, as where their sums are apart.
    recompute: per module, the number of blocks whose activations are recomputed: the first of its blocks in the stage.
    A recomputed block recomputes its transformer layer, as frameworks do; without one, all of its layers. A layer
    without a backward pass is not recomputed.
    """
    found: list[StageLayer] = []
    for name, (first, stop) in spans.items():
        blocks, num_recomputed = _layers_of_blocks(model, name, whole_rows), recompute.get(name, 0)
        for number, block in enumerate(blocks[first:stop]):
            found += block[number < num_recomputed, number == 0]
    return found


_BlockLayers = Mapping[tuple[bool, bool], list[StageLayer]]
"""The layers of a block, by whether it is recomputed and whether it is the first of its stage."""


def _layers_of_blocks(model: ModelSpec, name: str, whole_rows: bool) -> list[_BlockLayers]:
    """Those of each block of a module; made once for each model, as all stages consist of the same."""
    known: dict[tuple[str, bool], list[_BlockLayers]] = model.derived.setdefault("layers_of_blocks", {})
    if (name, whole_rows) not in known:
        known[name, whole_rows] = [
            {
                (recomputed, is_first): list(_block_layers(model, name, number, recomputed, is_first, whole_rows))
                for recomputed in (False, True)
                for is_first in (False, True)
            }
            for number in range(len(model.module(name).blocks))
        ]
    return known[name, whole_rows]


def _block_layers(
    model: ModelSpec, name: str, number: int, is_recomputed: bool, is_first: bool, whole_rows: bool
) -> Iterator[StageLayer]:
    module, needs = model.module(name), model.input_gradients[name]
    layers, block, is_backbone = module.layers, module.blocks[number], name == BACKBONE
    measured = measured_bytes(model)
    if is_backbone:
        entered = {block for _, sink, block in model.reentries if sink == name}
        has_parts = module.key_blocks.issuperset(entered)
    else:
        has_parts = name not in model.generators and not whole_rows
    whole = not any(layers[index].in_block for index in block)
    for index in block:
        layer, needs_input = layers[index], needs[index]
        recomputed = is_recomputed and (whole or layer.in_block) and (needs_input or layer.trainable)
        has_branches = layer.attention is not None and not layer.of_media and (is_backbone or not layer.item_rows)
        in_parts = has_parts and (has_branches or (is_backbone and layer.kind == "norm"))
        has_come = is_first and (is_backbone or number > 0)
        and_whole = in_parts and (not layer.in_block or has_come)
        share = measured.get((name, layer), 1.0)
        yield StageLayer(name, layer, needs_input, recomputed, in_parts, and_whole, share)


def taken_bytes(model: ModelSpec, spans: Spans, element_bytes: int, *, by_stage: bool) -> dict[str, int]:
    """Bytes that a stage with these blocks keeps from forward to backward of each row of an encoder that it takes in
    for the backbone, by encoder; only of those of which it keeps some. Tensor-parallel ranks have whole rows.

    by_stage: it is a stage of a pipeline, which keeps the rows of frozen encoders, too.
    However many of its blocks take the rows in, a stage has them once.
    """
    blocks = range(*spans[BACKBONE]) if BACKBONE in spans and model.learners(BACKBONE) else range(0)
    found = {}
    for name in model.sources(BACKBONE):
        (layer, has_gradient), entries = model.moved(name), model.entries(name, BACKBONE)
        are_read_again = entries[0] > 0  # Keys, which products of several layers read.
        if (by_stage or has_gradient or are_read_again) and any(block in blocks for block in entries):
            found[name] = layer.output_width * element_bytes
    return found


def held_elements(model: ModelSpec, recompute: Mapping[str, int]) -> dict[str, int]:
    """Elements that forward keeps for backward for a unit of an item's length, by module; rows added to items are not.
    What the backbone keeps of an encoder's rows is with the encoder.

    recompute: as in `stage_layers`.
    """
    held, taken = {}, taken_bytes(model, {BACKBONE: (0, model.num_blocks[BACKBONE])}, 1, by_stage=False)
    for name, count in model.num_blocks.items():
        widths = [
            kept_bytes(each, 1, 1, 1)[each.recomputed] / each.layer.divisor
            for each in stage_layers(model, {name: (0, count)}, recompute)
            if each.has_backward and not each.layer.targets_only and not each.layer.item_rows
        ]
        if name in taken and not (layer := model.moved(name)[0]).item_rows:
            widths.append(taken[name] / layer.divisor)
        held[name] = math.ceil(sum(widths))
    return held


def unit_spans(model: ModelSpec, unit: Unit, stage: int) -> Spans:
    """The blocks that a stage of a unit computes: all of replicated modules, and the stage's own of the others."""
    spans = {name: (0, len(model.module(name).blocks)) for name in unit.replicated}
    for name, count in unit.stages[stage].items():
        first = sum(before.get(name, 0) for before in unit.stages[:stage])
        spans[name] = (first, first + count)
    return spans


def stage_memory(
    unit: Unit,
    layers: Iterable[StageLayer],
    rows: RowsOfLayer,
    in_flight: int,
    precision: MixedPrecision,
    *,
    by_stage: bool = False,
    copies: CopiesOfLayer = lambda *_: 0.0,
) -> StageMemory:
    """The bytes of a stage of a unit with the given layers. O(layers).

    in_flight: the most microbatches at once whose forward pass is done and backward is not; the schedule decides it.
    copies:    beside the rows, in a stage whose context-parallel ranks share sequences.
    by_stage:  the stage is gathered and reduced as a whole, as in pipelines; else layer by layer, as by FSDP.
    """
    known: dict[tuple[object, ...], tuple[StageLayer, _LayerMemory]] = {}
    found: list[_LayerMemory] = []
    for placed in layers:
        # Hashing a layer takes longer than this; what is kept beside the answer keeps its id.
        key = placed.module, id(placed.layer), *placed[2:]
        if key not in known:
            known[key] = placed, _layer_memory(unit, placed, rows, precision, copies(placed.module, placed.layer))
        found.append(known[key][1])
    gathered, unreduced = [0, 0, *(one.gathered for one in found)], [0, *(one.unreduced for one in found)]
    together = (sum(gathered), sum(unreduced)) if by_stage else (sum(sorted(gathered)[-2:]), max(unreduced))
    shared = sum(together)
    return StageMemory(
        sum(one.state.parameters for one in found),
        sum(one.state.gradients for one in found),
        sum(one.state.optimizer for one in found),
        sum(one.kept for one in found),
        in_flight,
        max([0, *(one.working for one in found)]) + shared,
        shared,
    )


class _LayerMemory(NamedTuple):
    """Bytes of one layer of a stage: its state, what is kept of it, what it needs while it runs, and sharding's."""

    state: StateBytes
    kept: int
    working: int
    gathered: int
    unreduced: int


def _state_of_layer(
    layer: Layer, unit: Unit, num_parameters: int, num_trainable: int, precision: MixedPrecision
) -> StateBytes:
    """What the rank holds that has most of the layer.

    layer: with the experts of one rank. num_parameters, num_trainable: those of its tensor-parallel rank.
    """
    shard_ranks = unit.shard_size or unit.dp * unit.cp
    num_experts = -(-layer.num_experts // unit.tp)
    of_experts = num_experts * layer.expert_weights
    learning = num_experts * layer.updated_expert_weights
    sharing = expert_shard_size(shard_ranks, unit.ep)
    parts: list[tuple[int, int, float]] = [(num_parameters - of_experts, num_trainable - learning, shard_ranks)]
    if num_experts:
        parts.append((of_experts, learning, num_experts / -(-num_experts // sharing)))
    states = [
        state_bytes(count, trained, precision=precision, zero=unit.zero, shard_ranks=ranks)
        for count, trained, ranks in parts
    ]
    return StateBytes(*(sum(each) for each in zip(*states, strict=True)))


def _layer_memory(
    unit: Unit, placed: StageLayer, rows: RowsOfLayer, precision: MixedPrecision, copied: float
) -> _LayerMemory:
    layer = placed.layer.with_experts_of(unit.ep)
    num_parameters = parameters_of_rank(layer, unit.tp)
    num_trainable = updated_of_rank(layer, unit.tp)
    size = LayerBytes.of(placed, rows(placed.module, layer) / unit.cp, unit.tp, precision)
    copies = math.ceil(copied)
    saved = size.saved + copies
    kept = (size.input if placed.recomputed else saved) if placed.has_backward else 0
    # Copies are sent and received in buffers of their size, and so are their gradients.
    gradients = (size.gradients if placed.has_backward else 0) + 2 * copies
    return _LayerMemory(
        _state_of_layer(layer, unit, num_parameters, num_trainable, precision),
        kept,
        saved - kept + gradients,
        num_parameters * precision.compute if unit.zero == 3 else 0,
        num_trainable * (precision.compute + precision.gradient) if unit.zero >= 2 else 0,
    )
