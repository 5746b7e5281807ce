"""Bytes on a rank: what parameters, gradients and the optimizer hold, what a microbatch keeps for backward, and peaks.

- State (ZeRO, Rajbhandari et al. 2020, section 5): optimizer state is divided over the ranks that share a copy from
  stage 1 on, gradients from 2, parameters at 3; hybrid sharding divides over fewer ranks. Tensor parallelism divides
  every layer, pipeline parallelism leaves a rank its stage's layers. What is frozen has no gradient and no state.
- Activations (Korthikanti et al. 2022, section 4, with sequence parallelism and fused attention):
  activation_width elements a row. A layer that is recomputed keeps its input alone, and the rest once, for the layer
  that runs. A layer without a backward pass keeps nothing.
- Transients, the largest of each: gathered layers (stage 3: the one that runs, and the next, which is prefetched); the
  gradient of a layer before it is reduced (from stage 2 on); what a layer that runs has beside what is kept, with the
  gradients of its output and input, or the logits with their float32 copies.

Fragmentation, buffers of communication libraries, and the temporaries of the optimizer's step, which comes when no
activations are left, are not counted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from motet.core.errors import ArgumentError
from motet.core.plan import Unit
from motet.core.spec import Layer, ModelSpec

RowsOfLayer = Callable[[str, Layer], float]
"""(module, layer) -> rows of a microbatch that the layer is given in one replica, over all its context-parallel ranks;
of a layer that sees targets only, those whose logits exist at once."""


@dataclass(frozen=True)
class MixedPrecision:
    """Bytes of a number.

    compute:   of parameters and activations in products, and of logits as the output layer gives them.
    stored:    of parameters between passes. Where it is more than `compute`, it is what the optimizer updates, and
               is sharded with its state; a copy for products is made when a layer is gathered.
    gradient:  of gradients as they are added up over microbatches.
    optimizer: of a parameter's optimizer state, and of its master copy if `stored` is not that.
    """

    compute: int
    stored: int
    gradient: int
    optimizer: int


FSDP_BF16 = MixedPrecision(compute=2, stored=4, gradient=4, optimizer=8)
"""FSDP2 with `param_dtype` bfloat16 over float32 parameters, AdamW."""
FSDP_FP32 = MixedPrecision(compute=4, stored=4, gradient=4, optimizer=8)
FSDP_FP64 = MixedPrecision(compute=8, stored=8, gradient=8, optimizer=16)
MEGATRON_BF16 = MixedPrecision(compute=2, stored=2, gradient=4, optimizer=12)
"""Megatron's distributed optimizer: bfloat16 parameters, float32 gradients, float32 master copy and two moments."""


def mixed_precision(precision: str, *, pipeline: bool) -> MixedPrecision:
    """Of what is computed in "bf16", "fp32" ...: as Megatron's distributed optimizer has it in a pipeline, or FSDP2."""
    if precision in ("fp32", "tf32"):
        return FSDP_FP32
    if precision == "fp64":
        return FSDP_FP64
    return MEGATRON_BF16 if pipeline else FSDP_BF16


class StateBytes(NamedTuple):
    """Bytes that a rank holds between passes."""

    parameters: int
    gradients: int
    optimizer: int


def state_bytes(
    num_parameters: int, num_trainable: int, *, precision: MixedPrecision, zero: int = 0, shard_ranks: int = 1
) -> StateBytes:
    """Of the parameters of a rank's layers, of which num_trained learn. shard_ranks: those that share one copy.

    Raises ArgumentError for a ZeRO stage that is not 0 to 3, and for shard_ranks below 1.
    """
    if zero not in (0, 1, 2, 3) or shard_ranks < 1:
        raise ArgumentError(f"zero is {zero} over {shard_ranks} ranks; it must be 0, 1, 2 or 3, over at least 1.")

    def share(size_bytes: int, sharded_from: int) -> int:
        return math.ceil(size_bytes / shard_ranks) if zero >= sharded_from else size_bytes

    if precision.stored > precision.compute:
        copies = 0 if zero == 3 else precision.compute * num_parameters
        parameters = share(precision.stored * num_parameters, 1) + copies
    else:
        parameters = share(precision.stored * num_parameters, 3)
    return StateBytes(
        parameters, share(precision.gradient * num_trainable, 2), share(precision.optimizer * num_trainable, 1)
    )


def activation_bytes(layer: Layer, rows: float, *, element_bytes: int, tp: int = 1, recomputed: bool = False) -> int:
    """What one microbatch's forward pass of a layer keeps for backward, on one of `tp` tensor-parallel ranks.

    A layer that is recomputed keeps its input, which is taken to be as wide as its output.
    """
    width = min(layer.output_width, layer.activation_width) if recomputed else layer.activation_width
    return math.ceil(rows * width * element_bytes / tp)


def logits_bytes(num_rows: float, vocab_size: int, *, element_bytes: int, tp: int = 1) -> int:
    """The most that logits take: as the output layer gives them, and, in at least float32, they and their log-softmax,
    or in backward that and its gradient."""
    wide = max(element_bytes, 4)
    return math.ceil(num_rows * vocab_size * (2 * wide + (element_bytes if element_bytes < wide else 0)) / tp)


@dataclass(frozen=True)
class StageMemory:
    """Bytes of one stage on one of its ranks. activations: of one microbatch, `in_flight` of which are kept at once."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    in_flight: int
    transient: int

    @property
    def held_bytes(self) -> int:
        return self.parameters + self.gradients + self.optimizer + self.activations * self.in_flight

    @property
    def peak_bytes(self) -> int:
        return self.held_bytes + self.transient


class LayerBytes(NamedTuple):
    """Of one layer and microbatch. gradients: of its output and of its input; of logits, with all their copies."""

    saved: int
    input: int
    gradients: int

    @classmethod
    def of(cls, layer: Layer, num_rows: float, tp: int, precision: MixedPrecision) -> LayerBytes:
        element_bytes = precision.compute
        if layer.targets_only:
            gradients = logits_bytes(num_rows, layer.output_width, element_bytes=element_bytes, tp=tp)
        else:
            gradients = math.ceil(2 * num_rows * layer.output_width * element_bytes / tp)
        return cls(
            activation_bytes(layer, num_rows, element_bytes=element_bytes, tp=tp),
            activation_bytes(layer, num_rows, element_bytes=element_bytes, tp=tp, recomputed=True),
            gradients,
        )


class StageLayer(NamedTuple):
    """A layer as a stage computes it. needs_input: a gradient must pass through it, to what learns before it."""

    module: str
    layer: Layer
    needs_input: bool
    recomputed: bool

    @property
    def has_backward(self) -> bool:
        return self.needs_input or self.layer.trainable


Spans = Mapping[str, tuple[int, int]]
"""Per module, the first of its blocks (`Module.blocks`), and the first after them."""


def stage_layers(model: ModelSpec, spans: Spans, recompute: Mapping[str, int]) -> Iterator[StageLayer]:
    """What a stage computes, in execution order. recompute: of how many of its blocks the activations are recomputed.

    A block that is recomputed is so in its transformer layer, as frameworks do it, or, without one, in all of it; of
    the blocks of a module in a stage, the first are. What has no backward pass is not.
    """
    for name, (first, stop) in spans.items():
        module = model.module(name)
        for number, block in enumerate(module.blocks[first:stop]):
            whole = all(module.layers[place].attention is None for place in block)
            for place in block:
                layer, needs_input = module.layers[place], model.input_gradients[name][place]
                recomputed = number < recompute.get(name, 0) and (whole or layer.attention is not None)
                yield StageLayer(name, layer, needs_input, recomputed and (needs_input or layer.trainable))


def unit_spans(model: ModelSpec, unit: Unit, stage: int) -> Spans:
    """What a stage of a unit computes: replicated modules whole, and its own blocks of the others."""
    spans = {name: (0, len(model.module(name).blocks)) for name in unit.replicated}
    for name, count in unit.stages[stage].items():
        first = sum(before.get(name, 0) for before in unit.stages[:stage])
        spans[name] = (first, first + count)
    return spans


def stage_memory(
    unit: Unit, layers: Iterable[StageLayer], rows: RowsOfLayer, in_flight: int, precision: MixedPrecision
) -> StageMemory:
    """Of a stage of a unit with the given layers. O(layers).

    in_flight: microbatches whose forward pass is done and backward is not, at most; the schedule says how many.
    """
    state, activations = np.zeros(3, dtype=np.int64), 0
    working, gathered, unreduced = [0], [0, 0], [0]
    for placed in layers:
        layer = placed.layer
        num_parameters = math.ceil(layer.parameters / unit.tp)
        num_trainable = num_parameters if layer.trainable else 0
        shard_ranks = unit.shard_size or unit.dp
        state += state_bytes(
            num_parameters, num_trainable, precision=precision, zero=unit.zero, shard_ranks=shard_ranks
        )
        size = LayerBytes.of(layer, rows(placed.module, layer) / unit.cp, unit.tp, precision)
        kept = (size.input if placed.recomputed else size.saved) if placed.has_backward else 0
        activations += kept
        working.append(size.saved - kept + (size.gradients if placed.has_backward else 0))
        gathered.append(num_parameters * precision.compute if unit.zero == 3 else 0)
        unreduced.append(num_trainable * (precision.compute + precision.gradient) if unit.zero >= 2 else 0)
    transient = max(working) + sum(sorted(gathered)[-2:]) + max(unreduced)
    parameters, gradients, optimizer = state.tolist()
    return StageMemory(parameters, gradients, optimizer, activations, in_flight, transient)
