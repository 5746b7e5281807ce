"""The backbones that encoders may run beside: degrees, microbatches and chunks, with an estimate of the step each.

The estimates are in closed form: of hundreds of shapes a few are simulated and filled, the best first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import NamedTuple

from motet.core.plan import ScheduleKind
from motet.core.workload import BACKBONE
from motet.planner.candidate import Pins
from motet.planner.degrees import divisors, most_replicas
from motet.planner.infeasible import tensor_degrees
from motet.planner.job import BlockCosts, Job
from motet.schedule.check.fit import undivided_parts

_MICROBATCH_SIZES = (1, 2, 4, 8)
_UNHIDDEN_MICROBATCHES = 2.0
"""The encoders' passes of so many microbatches lie outside the bubbles: those of the first and the last ones. Fitted to
placements of ViT-22B beside GPT-175B on 1,536 and 2,048 GPUs."""
_NO_ROOM = 1e3
"""Factor on the estimate of a backbone without room for its own parameters: it comes last."""


@dataclass(frozen=True)
class PipelineShape:
    """A 3D-parallel backbone.

    num_chunks: stages of each pipeline rank. num_microbatches: of each replica.
    estimate_s: estimate of the step. bound_s: least seconds that some rank computes for backbone and encoders.
    """

    tp: int
    pp: int
    dp: int
    num_chunks: int
    microbatch_size: int
    num_microbatches: int
    estimate_s: float = 0.0
    bound_s: float = 0.0

    @property
    def num_passes(self) -> int:
        """Forward passes of a replica's step."""
        return self.pp * self.num_chunks * self.num_microbatches

    @property
    def schedule(self) -> ScheduleKind:
        """Interleaved where a rank has several chunks."""
        return "interleaved_1f1b" if self.num_chunks > 1 else "1f1b"

    def __str__(self) -> str:
        chunks = f", {self.num_chunks} chunks" if self.num_chunks > 1 else ""
        return f"backbone TP {self.tp}, PP {self.pp}{chunks}, DP {self.dp}, microbatches of {self.microbatch_size}"


def backbone_shapes(job: Job, pins: Pins) -> Iterator[PipelineShape]:
    """Every TP, PP and microbatch size that divides the ranks and the batch, with the most replicas and the number of
    chunks that is estimated best."""
    num_ranks, num_blocks = job.cluster.num_ranks, len(job.model.module(BACKBONE).blocks)
    for tp, pp in product(tensor_degrees(job, BACKBONE), divisors(num_ranks)):
        dp = 0 if num_ranks % (tp * pp) else most_replicas(job, tp * pp, pins)
        if not dp or not 2 <= pp <= num_blocks or not pins.allow(tp=tp, pp=pp):
            continue
        for microbatch_size in _MICROBATCH_SIZES:
            count, remainder = divmod(job.batch_size, dp * microbatch_size)
            if remainder or not count or not pins.allow(microbatch_size=microbatch_size):
                continue
            chunks = [n for n in range(1, num_blocks // pp + 1) if num_blocks % (pp * n) == 0 or n == 1]
            shapes = [PipelineShape(tp, pp, dp, n, microbatch_size, count) for n in chunks]
            if not all(encoder_degrees(job, shapes[0], name) for name in encoders_of(job)):
                continue
            shapes = [_estimated(job, shape) for shape in shapes if pins.allow(schedule=shape.schedule)]
            yield from sorted(shapes, key=lambda shape: shape.estimate_s)[:1]


def encoders_of(job: Job) -> list[str]:
    """The names of all modules but the backbone."""
    return [module.name for module in job.model.modules if module.name != BACKBONE]


class EncoderDegrees(NamedTuple):
    """Ranks of a group that share products, and groups that share items."""

    tp: int
    cp: int


def encoder_degrees(job: Job, shape: PipelineShape, name: str) -> list[EncoderDegrees]:
    """The degrees of an encoder on the tensor-parallel ranks of a backbone, with whole heads on each rank.

    Where its items can be cut, groups share them by `cp`: they deal them out, and cut those that dominate. Groups may
    be replicas too (cp 1), with whole examples for each.
    """
    module, found = job.model.module(name), []
    for tp in (tp for tp in divisors(shape.tp) if not undivided_parts(module, tp)):
        num_groups = shape.tp // tp
        if module.shareable and num_groups > 1:
            found.append(EncoderDegrees(tp, num_groups))
        if shape.microbatch_size % num_groups == 0:
            found.append(EncoderDegrees(tp, 1))
    return found


def _estimated(job: Job, shape: PipelineShape) -> PipelineShape:
    """The shape with its estimate: passes + max(bubbles, encoders) + what no bubble hides of the encoders.

    If memory is too small for the activations of a whole model in flight, the missing part is recomputed.
    """
    costs = job.block_costs(BACKBONE, shape.microbatch_size, shape.tp)
    encoders = [job.block_costs(name, shape.microbatch_size, shape.tp) for name in encoders_of(job)]
    # 1. The share of the activations that is recomputed.
    state_bytes = _state_bytes(job, shape, [costs, *encoders])
    lacking_bytes = state_bytes + float(costs.kept_bytes.sum()) - job.capacity_bytes
    recomputed = min(max(lacking_bytes / max(float(costs.saved_bytes.sum()), 1.0), 0.0), 1.0)
    # 2. A rank's passes of one microbatch, and its bubbles.
    pass_s = float((costs.forward_s + costs.backward_s + recomputed * costs.recompute_s).sum()) / shape.pp
    warmup_s = (shape.pp - 1) * pass_s / shape.num_chunks
    bubbles_s = warmup_s + _collectives_s(job, shape, costs) + _sends_s(job, shape, costs)
    # 3. The encoders, in the bubbles as far as these reach.
    encoder_s = sum(costs.passes_s for costs in encoders)
    step_s = shape.num_microbatches * pass_s + max(bubbles_s, shape.num_microbatches * encoder_s / shape.pp)
    step_s += _UNHIDDEN_MICROBATCHES * encoder_s
    # 4. The least that a rank computes: each encoder with the TP that is best for it, and nothing recomputed.
    least_s = costs.passes_s
    for name in encoders_of(job):
        of_degrees = [
            job.block_costs(name, shape.microbatch_size * tp / shape.tp, tp)
            for tp, _ in encoder_degrees(job, shape, name)
        ]
        least_s += min(each.passes_s - float(each.sums_s.sum()) for each in of_degrees)
    estimate_s = step_s * (1 if state_bytes < job.capacity_bytes else _NO_ROOM)
    return replace(shape, estimate_s=estimate_s, bound_s=shape.num_microbatches * least_s / shape.pp)


def _state_bytes(job: Job, shape: PipelineShape, modules: Sequence[BlockCosts]) -> float:
    """Parameters, gradients and optimizer state on a rank, if stages hold the same share of all of them (ZeRO-1)."""
    precision = job.mixed_precision(pipeline=True)
    trainable_bytes = precision.gradient + precision.optimizer / shape.dp
    return sum(
        float((precision.stored * costs.parameters + trainable_bytes * costs.trainable).sum()) / shape.pp
        for costs in modules
    )


def _collectives_s(job: Job, shape: PipelineShape, costs: BlockCosts) -> float:
    """Gathering the parameters and reducing the gradients of one chunk: the rest hides behind passes. What is frozen
    is neither gathered nor reduced."""
    precision = job.mixed_precision(pipeline=True)
    num_parameters = float(costs.trainable.sum()) / (shape.pp * shape.num_chunks)
    ranks = range(0, shape.dp * shape.tp, shape.tp)
    gather_s = job.cost.gather_seconds(num_parameters * precision.compute, ranks)
    return gather_s + job.cost.reduce_scatter_seconds(num_parameters * precision.gradient, ranks)


def _sends_s(job: Job, shape: PipelineShape, costs: BlockCosts) -> float:
    """Messages of one microbatch through all stages, forward and backward."""
    ends = 0, (shape.pp - 1) * shape.dp * shape.tp
    send_s = float(job.cost.send_seconds(costs.output_bytes.max(keepdims=True), ends)[0])
    return 2 * shape.pp * shape.num_chunks * send_s
