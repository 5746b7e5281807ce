"""Bytes on a rank: what parameters, gradients and the optimizer hold, what a microbatch keeps for backward, and peaks.

- State (ZeRO, Rajbhandari et al. 2020, section 5): optimizer state is divided over the ranks that share a copy from
  stage 1 on, gradients from 2, parameters at 3; hybrid sharding divides over fewer ranks. Tensor parallelism divides
  every layer, pipeline parallelism leaves a rank its stage's layers. What is frozen has no gradient and no state.
- Activations (Korthikanti et al. 2022, section 4, with sequence parallelism and fused attention): saved_width elements
  a row; or, recomputed, the layer's input alone, and the rest once, for the layer that runs. A layer without a backward
  pass keeps nothing.
- Transients, the largest of each: gathered layers (stage 3: the one that runs, and the next, which is prefetched); the
  gradient of a layer before it is reduced (from stage 2 on); what a layer that runs has beside what is kept, with the
  gradients of its output and input, or the logits with their float32 copies.

Fragmentation, buffers of communication libraries, and the temporaries of the optimizer's step, which comes when no
activations are left, are not counted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from motet.core.errors import ArgumentError
from motet.core.plan import Plan, Unit
from motet.core.spec import Layer, ModelSpec

Rows = Callable[[str, Layer], float]
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


class State(NamedTuple):
    """Bytes that a rank holds between passes."""

    parameters: int
    gradients: int
    optimizer: int


def state_bytes(
    num_parameters: int, num_trained: int, *, precision: MixedPrecision, zero: int = 0, shard_ranks: int = 1
) -> State:
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
    return State(parameters, share(precision.gradient * num_trained, 2), share(precision.optimizer * num_trained, 1))


def activation_bytes(layer: Layer, rows: float, *, element_bytes: int, tp: int = 1, recomputed: bool = False) -> int:
    """What one microbatch's forward pass of a layer keeps for backward, on one of `tp` tensor-parallel ranks.

    A layer that is recomputed keeps its input, which is taken to be as wide as its output.
    """
    width = min(layer.output_width, layer.saved_width) if recomputed else layer.saved_width
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


class _LayerBytes(NamedTuple):
    """Of one layer and microbatch. gradients: of its output and of its input; of logits, with all their copies."""

    saved: int
    input: int
    gradients: int

    @classmethod
    def of(cls, layer: Layer, num_rows: float, tp: int, precision: MixedPrecision) -> _LayerBytes:
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
    """A layer as a stage computes it. has_backward: it learns, or something before it does."""

    module: str
    layer: Layer
    has_backward: bool
    recomputed: bool


def stage_layers(model: ModelSpec, unit: Unit, stage: int) -> Iterator[StageLayer]:
    """What a stage computes, in execution order: replicated modules whole, and its own layers of the others.

    Of a module's layers that are recomputed, those with attention come first: they are what frameworks recompute.
    """
    recompute = unit.recompute[stage] if unit.recompute else {}
    counts = {name: model.module(name).num_layers for name in unit.replicated} | dict(unit.stages[stage])
    for name, count in counts.items():
        module = model.module(name)
        first = 0 if name in unit.replicated else sum(before.get(name, 0) for before in unit.stages[:stage])
        own = range(first, first + count)
        in_turn = sorted(own, key=lambda index: module.layers[index].attention is None)
        recomputed = set(in_turn[: recompute.get(name, 0)])
        for index in own:
            layer = module.layers[index]
            has_backward = layer.trained or model.input_gradients[name][index]
            yield StageLayer(name, layer, has_backward, index in recomputed)


def stage_memory(
    plan: Plan, unit: Unit, stage: int, rows: Rows, in_flight: int, precision: MixedPrecision
) -> StageMemory:
    """in_flight: microbatches whose forward pass is done and backward is not, at most; the schedule says how many.

    O(layers of the stage).
    """
    state, activations = np.zeros(3, dtype=np.int64), 0
    working, gathered, unreduced = [0], [0, 0], [0]
    for module, layer, has_backward, recomputed in stage_layers(plan.model, unit, stage):
        num_parameters = math.ceil(layer.parameters / unit.tp)
        num_trained = num_parameters if layer.trained else 0
        shard_ranks = unit.shard_size or unit.dp
        state += state_bytes(num_parameters, num_trained, precision=precision, zero=unit.zero, shard_ranks=shard_ranks)
        size = _LayerBytes.of(layer, rows(module, layer) / unit.cp, unit.tp, precision)
        kept = (size.input if recomputed else size.saved) if has_backward else 0
        activations += kept
        working.append(size.saved - kept + (size.gradients if has_backward else 0))
        gathered.append(num_parameters * precision.compute if unit.zero == 3 else 0)
        unreduced.append(num_trained * (precision.compute + precision.gradient) if unit.zero >= 2 else 0)
    transient = max(working) + sum(sorted(gathered)[-2:]) + max(unreduced)
    parameters, gradients, optimizer = state.tolist()
    return StageMemory(parameters, gradients, optimizer, activations, in_flight, transient)


def rank_memory(
    plan: Plan, rows: Rows, in_flight: Mapping[tuple[str, int], int], precision: MixedPrecision
) -> NDArray[np.int64]:
    """Peak bytes of each rank of the cluster, int64 [num_ranks]. in_flight: by (name of the unit, stage).

    A rank with several stages, or with stages of several units, holds all they hold and computes one at a time.
    """
    held = np.zeros(plan.cluster.num_ranks, dtype=np.int64)
    transient = np.zeros_like(held)
    for unit in plan.units:
        replicas = unit.dp * unit.cp * unit.tp
        for stage in range(len(unit.stages)):
            memory = stage_memory(plan, unit, stage, rows, in_flight[unit.name, stage], precision)
            first = unit.first_rank + _pipeline_rank(plan, unit, stage) * replicas
            held[first : first + replicas] += memory.held_bytes
            transient[first : first + replicas] = np.maximum(transient[first : first + replicas], memory.transient)
    return held + transient


def _pipeline_rank(plan: Plan, unit: Unit, stage: int) -> int:
    turns, place = divmod(stage, unit.pp)
    return unit.pp - 1 - place if plan.schedule == "zb_v" and turns % 2 else place
