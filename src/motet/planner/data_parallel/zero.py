"""What sharding over data-parallel ranks takes: which ZeRO stages and group sizes there are, and their collectives.

Parameters are gathered within a group that shares one copy, gradients reduced in it for every microbatch and, where
there are several groups, summed over them once a step (hybrid sharding: PyTorch FSDP, Zhao et al. 2023, section 3.2;
OrchMLLM section 8 has groups of 256 among 2,560). A layer is a message, so that in large groups latencies count, as in
`simulate.predict.collectives`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from motet.core.arrays import Float64Array
from motet.core.plan import Unit
from motet.planner.data_parallel.loads import Load
from motet.planner.job import Job
from motet.schedule.layout import MAX_PARTS
from motet.simulate.predict.collectives import fsdp_slices

Zero = Literal[0, 1, 2, 3]


class ZeroSharding(NamedTuple):
    """zero: the ZeRO stage. shard_size: ranks that share one copy; 0 is all."""

    zero: Zero
    shard_size: int


class ZeroSeconds(NamedTuple):
    """Seconds of one module: gathering its parameters once, reducing its gradients in a group, and over groups."""

    gather_s: float
    reduce_s: float
    replicas_s: float


@dataclass(frozen=True, eq=False)
class Sharded:
    """A unit's collectives by module, and the optimizer's step."""

    unit: Unit
    collectives: Mapping[str, ZeroSeconds]
    step_s: float

    @classmethod
    def of(cls, job: Job, unit: Unit) -> Sharded:
        precision, cost = job.mixed_precision(pipeline=False), job.cost
        ranks = range(0, unit.dp * unit.tp, unit.tp)
        size = (unit.shard_size or unit.dp) if unit.zero else 1
        shards, replicas = ranks[:size], ranks[::size]
        found, updated = {}, 0.0
        for name in unit.modules:
            gather_s = reduce_s = replicas_s = 0.0
            for layers, count in Counter(fsdp_slices(job.model.module(name).layers)).items():
                total = sum(layer.parameters for layer in layers) / unit.tp
                trainable = sum(layer.parameters for layer in layers if layer.trainable) / unit.tp
                updated += count * trainable / size
                if size > 1:
                    gather_s += count * cost.gather_seconds(total * precision.compute, shards)
                    reduce_s += count * cost.reduce_scatter_seconds(trainable * precision.gradient, shards)
                if len(replicas) > 1:
                    replicas_s += count * cost.all_reduce_seconds(trainable * precision.gradient / size, replicas)
            found[name] = ZeroSeconds(gather_s, reduce_s, replicas_s)
        return cls(unit, found, cost.step_seconds(round(updated)))

    def communication_s(self, num_microbatches: int) -> float:
        """Of a step, hidden or not."""
        gathers = 2 if self.unit.zero == 3 else 1
        return sum(
            num_microbatches * (gathers * own.gather_s + own.reduce_s) + own.replicas_s
            for own in self.collectives.values()
        )


def shardings(job: Job, dp: int, tp: int) -> Iterator[ZeroSharding]:
    """All that can be told apart: over all ranks, and in groups of whole nodes, in powers of two; and none."""
    node = max(job.cluster.ranks_per_node // tp, 1)
    sizes = [size for power in range(dp.bit_length()) if 1 < (size := node << power) < dp and dp % size == 0]
    if dp > 1:
        for size in (0, *reversed(sizes)):
            yield ZeroSharding(3, size)
            yield ZeroSharding(2, size)
    yield ZeroSharding(0, 0)


def step_s(load: Load, sharded: Sharded, recompute: Mapping[str, int], *, exchanged: bool) -> float:
    """A step's seconds in closed form.

    Ranks wait for each other in every pass of every module. A module is gathered in parts, each while the one before
    computes, and its gradients are reduced while the next part computes, so that a pass takes the longer of the two
    but for its first gather and its last reduction, which nothing hides.
    exchanged: outputs of encoders, and their gradients, move between ranks; nothing is gathered meanwhile.
    """
    total = np.zeros(next(iter(load.modules.values())).forward_s.shape[1])
    last = np.zeros_like(total)
    last[-1] = 1.0
    for name, own in load.modules.items():
        gather_s, reduce_s, replicas_s = sharded.collectives[name]
        num_parts = min(len(own.num_again) - 1, MAX_PARTS)
        forward_s = load.seconds(name, recompute, backward=False).max(axis=0)
        backward_s = load.seconds(name, recompute, backward=True).max(axis=0)
        total += _pass_s(forward_s, np.full_like(total, gather_s), num_parts) + gather_s / num_parts
        if backward_s.any():
            regather_s = gather_s if sharded.unit.zero == 3 or not reduce_s else 0.0
            reduced_s = reduce_s + last * replicas_s
            total += _pass_s(backward_s, regather_s + reduced_s, num_parts) + (regather_s + reduced_s) / num_parts
        if exchanged and own.moved_bytes is not None:
            moved_s = load.job.cost.exchange_seconds(own.moved_bytes, sharded.unit.ranks[:: load.tp])
            total += moved_s * (2 if load.job.model.module(name).trainable else 1)
    return float(total.sum()) + sharded.step_s


def _pass_s(compute_s: Float64Array, moved_s: Float64Array, num_parts: int) -> Float64Array:
    """All parts, of which every one but the last hides what is moved for the next."""
    longer: Float64Array = (num_parts - 1) / num_parts * np.maximum(compute_s, moved_s) + compute_s / num_parts
    return longer
