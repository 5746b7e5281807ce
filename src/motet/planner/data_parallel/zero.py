"""Sharding over data-parallel ranks: ZeRO stages, group sizes, and the seconds of their collectives.

A group of ranks shares one copy. Parameters are gathered within the group; gradients are reduced within it for every
microbatch and, if there are several groups, summed over them once a step (hybrid sharding: PyTorch FSDP, Zhao et al.
2023, section 3.2; OrchMLLM section 8 has groups of 256 among 2,560 ranks). Each layer is a message of its own, as in
`simulate.predict.collectives`, so that latencies count in large groups.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from motet.core.arrays import Float64Array
from motet.core.plan import Unit, Zero
from motet.cost.memory import parameters_of_rank, updated_of_rank
from motet.planner.data_parallel.loads import Load
from motet.planner.job import Job
from motet.schedule.layout import MAX_PARTS
from motet.simulate.predict.collectives import fsdp_slices


class ZeroSharding(NamedTuple):
    """How a unit is sharded.

    zero: the ZeRO stage. shard_size: ranks that share one copy; 0 is all.
    """

    zero: Zero
    shard_size: int


class ZeroSeconds(NamedTuple):
    """Seconds of one gather of a module's parameters; of one reduction of its gradients, in a group and over groups."""

    gather_s: float
    reduce_s: float
    replicas_s: float


@dataclass(frozen=True, eq=False)
class ShardedUnit:
    """A unit's collectives by module, and the seconds of the optimizer's step."""

    unit: Unit
    collectives: Mapping[str, ZeroSeconds]
    step_s: float

    @classmethod
    def of(cls, job: Job, unit: Unit) -> ShardedUnit:
        """The collectives of a unit that the whole job runs on. O(layers)."""
        precision, cost = job.mixed_precision(pipeline=False), job.cost
        ranks = range(0, unit.dp * unit.tp, unit.tp)
        size = (unit.shard_size or unit.dp) if unit.zero else 1
        shards, replicas = ranks[:size], ranks[::size]
        collectives, updated = {}, 0.0
        for name in unit.modules:
            gather_s = reduce_s = replicas_s = 0.0
            for layers, count in Counter(fsdp_slices(job.model.module(name).layers)).items():
                total = sum(parameters_of_rank(layer, unit.tp) for layer in layers)
                trainable = sum(updated_of_rank(layer, unit.tp) for layer in layers)
                updated += count * trainable / size
                if size > 1:
                    gather_s += count * cost.gather_seconds(total * precision.compute, shards)
                    reduce_s += count * cost.reduce_scatter_seconds(trainable * precision.gradient, shards)
                if len(replicas) > 1:
                    replicas_s += count * cost.all_reduce_seconds(trainable * precision.gradient / size, replicas)
            collectives[name] = ZeroSeconds(gather_s, reduce_s, replicas_s)
        return cls(unit, collectives, cost.step_seconds(round(updated)))

    def communication_s(self, num_microbatches: int) -> float:
        """Seconds of all collectives of a step, hidden or not."""
        gathers = 2 if self.unit.zero == 3 else 1
        return sum(
            num_microbatches * (gathers * module.gather_s + module.reduce_s) + module.replicas_s
            for module in self.collectives.values()
        )


def shardings(job: Job, dp: int, tp: int) -> Iterator[ZeroSharding]:
    """The shardings that are tried: over all ranks, in groups of whole nodes in powers of two, and none."""
    node = max(job.cluster.ranks_per_node // tp, 1)
    sizes = [size for power in range(dp.bit_length()) if 1 < (size := node << power) < dp and dp % size == 0]
    if dp > 1:
        for size in (0, *reversed(sizes)):
            yield ZeroSharding(3, size)
            yield ZeroSharding(2, size)
    yield ZeroSharding(0, 0)


def step_s(
    load: Load, sharded: ShardedUnit, recompute: Mapping[str, int], *, exchanged: bool, num_microbatches: int = 0
) -> float:
    """Seconds of a step in closed form.

    Ranks wait for each other in every pass of every module. A pass has parts: while a part computes, the next part is
    gathered and the gradients of the one before are reduced. So a pass takes max(computation, collectives), in addition
    to its first gather and its last reduction, which nothing hides.
    exchanged: whether outputs of encoders, and their gradients, move between ranks; that hides nothing.
    num_microbatches: those of the step, if the load is of the first of them alone; 0 is those of the load.
    """
    total = np.zeros(next(iter(load.modules.values())).forward_s.shape[1])
    last_s = 0.0
    for name, module in load.modules.items():
        gather_s, reduce_s, replicas_s = sharded.collectives[name]
        num_parts = min(len(module.num_recomputed) - 1, MAX_PARTS)
        forward_s = load.seconds(name, recompute, backward=False).max(axis=0)
        backward_s = load.seconds(name, recompute, backward=True).max(axis=0)
        total += _pass_s(forward_s, gather_s, num_parts) + gather_s / num_parts
        if backward_s.any():
            regather_s = gather_s if sharded.unit.zero == 3 or not reduce_s else 0.0
            beside_s = regather_s + reduce_s
            total += _pass_s(backward_s, beside_s, num_parts) + beside_s / num_parts
            # Copies add up their gradients after the last microbatch alone.
            longer_s = _pass_s(backward_s, beside_s + replicas_s, num_parts) - _pass_s(backward_s, beside_s, num_parts)
            last_s += float(longer_s[-1]) + replicas_s / num_parts
        if exchanged and module.moved_bytes is not None:
            moved_s = load.job.cost.exchange_seconds(module.moved_bytes, sharded.unit.ranks[:: load.tp])
            total += moved_s * (2 if load.job.model.module(name).trainable else 1)
    repeated = num_microbatches / len(total) if num_microbatches else 1.0
    return float(total.sum()) * repeated + last_s + sharded.step_s


def _pass_s(compute_s: Float64Array, moved_s: float, num_parts: int) -> Float64Array:
    """[num_microbatches]: seconds of all parts of a pass; each but the last hides what is moved for the next."""
    longer: Float64Array = (num_parts - 1) / num_parts * np.maximum(compute_s, moved_s) + compute_s / num_parts
    return longer
