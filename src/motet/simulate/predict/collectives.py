"""Seconds of the collectives of a Plan's Program over data-parallel ranks, and of the optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np

from motet.core.arrays import Float64Array
from motet.core.plan import expert_shard_size
from motet.core.spec import Layer
from motet.cost.memory import parameters_of_rank, updated_of_rank
from motet.schedule import PlannedStage
from motet.simulate.predict.stage_pricing import Pricing
from motet.simulate.predict.tied import tied_apart, untied

_TOTALS_BYTES = 3 * 8
"""Bytes that NORM sums: three float64 numbers."""


class CollectiveSeconds(NamedTuple):
    """Seconds of a stage's collectives.

    gather_s:   all-gather of the parameters over the ranks that share one copy.
    reduce_s:   reduction of the gradients within a copy; over all ranks if each holds a whole copy.
    replicas_s: sum of one rank's share of the gradients over copies.
    """

    gather_s: float
    reduce_s: float
    replicas_s: float


class _Size(NamedTuple):
    """Numbers of parameters on one tensor-parallel rank: all, the trainable ones, and those that the rank updates; and
    of the trainable ones before ranks divide them."""

    total: float
    trainable: float
    updated: float
    undivided: float


class _Shared(NamedTuple):
    """Parameters of a stage that the same ranks share.

    slices:   those that have a message each.
    shards:   the ranks that share a copy of their state: a group of each kind (`Cluster.unlike`).
    replicas: the ranks that hold the same share of them in all copies, alike.
    """

    slices: list[_Size]
    shards: list[range]
    replicas: list[range]


class Collectives:
    """The collectives of the stages that `pricing` prices. Stages that are alike are priced once."""

    def __init__(self, pricing: Pricing) -> None:
        self.pricing, self.cost = pricing, pricing.cost
        self.plan, self.planned, self.precision = pricing.plan, pricing.planned, pricing.precision
        self.tied = tied_apart(pricing.plan)
        self._known_seconds: dict[object, CollectiveSeconds] = {}
        self._known_sizes: dict[object, _Size] = {}

    def seconds(self, stage: PlannedStage) -> CollectiveSeconds:
        """Seconds of the collectives of a stage's parameters and gradients. Cached."""
        if stage.key not in self._known_seconds:
            self._known_seconds[stage.key] = self._priced(stage)
        return self._known_seconds[stage.key]

    def _sizes(self, stage: PlannedStage) -> _Size:
        if stage.key not in self._known_sizes:
            sizes = [size for shared in self._shared(stage) for size in shared.slices]
            self._known_sizes[stage.key] = _Size(*(sum(each) for each in zip(*sizes, strict=True)))
        return self._known_sizes[stage.key]

    @cached_property
    def of_stages(self) -> Float64Array:
        """The fields of `CollectiveSeconds` of all stages, [3, num_stages]."""
        table = np.zeros((len(CollectiveSeconds._fields), len(self.planned.stages)))
        for kind in self.planned.kinds:
            table[:, kind.numbers] = np.array(self.seconds(kind.stage))[:, None]
        return table

    @cached_property
    def step_s(self) -> Float64Array:
        """Seconds of the optimizer, [num_ranks] of the Program. A rank updates its share of trainable parameters.

        Before it, gradients of weights that two stages share are summed, as no REDUCE has them.
        """
        updated, held = np.zeros((2, self.planned.program.num_ranks))
        for kind in self.planned.kinds:
            size = self._sizes(kind.stage)
            np.add.at(updated, kind.ranks, size.updated)
            np.add.at(held, kind.ranks, size.undivided)
        summed_s = np.zeros(len(updated))
        if self.tied is not None and self.tied.trainable:
            holders, data_ranks = self.tied.ranks(self.planned), self.tied.data_ranks(self.planned)
            updated[holders] += self.tied.updated
            held[holders] += self.tied.weights
            if len(data_ranks) > 1:
                size_bytes = self.tied.updated * self.precision.gradient
                summed_s[holders] = self.cost.all_reduce_seconds(size_bytes, data_ranks)
        stacks = [stack for module in self.plan.model.modules for stack in module.stacks]
        whole = max(sum(stack.layer.updated_parameters * stack.count for stack in stacks), 1)
        pairs = list(zip(np.rint(updated).tolist(), (held / whole).tolist()))
        seconds = {pair: self.cost.step_seconds(int(pair[0]), pair[1]) for pair in set(pairs)}
        return np.array([seconds[pair] for pair in pairs]) + summed_s

    def norm_s(self) -> Float64Array:
        """Seconds of NORM, [1]; 0 in pipelines, whose Programs have none."""
        if self.plan.schedule != "data_parallel":
            return np.zeros(1)
        return np.array([self.cost.all_reduce_seconds(_TOTALS_BYTES, self.planned.stages[0].data_ranks)])

    def _shared(self, stage: PlannedStage) -> list[_Shared]:
        """All that a stage holds; its experts apart where ranks share them (`Unit.ep`).

        FSDP has a message for each of its slices in data parallelism; a pipeline has one for the whole stage.
        """
        ep, size = stage.unit.ep, stage.shard_size
        placed = untied(self.tied, stage, self.pricing.layers(stage))
        layers = [each.layer.with_experts_of(ep) for each in placed]
        slices = fsdp_slices(layers) if self.plan.schedule == "data_parallel" else [layers]
        whole = [_size_of(slice_, stage.unit.tp, size) for slice_ in slices]
        if ep == 1:
            return [_Shared(whole, *self._groups(stage, 1, size))]
        of_copy = expert_shard_size(size, ep)
        experts = [_size_of_experts(slice_, stage.unit.tp, of_copy) for slice_ in slices]
        others = [_without(every, own, size) for every, own in zip(whole, experts)]
        return [
            _Shared(others, *self._groups(stage, 1, size)),
            _Shared([own for own in experts if own.total], *self._groups(stage, ep, of_copy)),
        ]

    def _groups(self, stage: PlannedStage, ep: int, size: int) -> tuple[list[range], list[range]]:
        """The kinds of groups of ranks of a stage that share a copy, and of those that hold the same share of it.

        ep: how many ranks, one after the other, hold parts of their own. size: ranks that share a copy of a part.
        """
        first, apart, unlike = stage.data_ranks[0], ep * stage.unit.tp, self.plan.cluster.unlike
        ranks = range(first, first + len(stage.data_ranks) * stage.unit.tp)
        num_copies = len(stage.data_ranks) // (ep * size)
        return unlike(ranks, size, apart=apart), unlike(ranks, num_copies, apart=size * apart)

    def _priced(self, stage: PlannedStage) -> CollectiveSeconds:
        """The collectives of a stage."""
        every = (self._priced_of(shared, stage) for shared in self._shared(stage))
        return CollectiveSeconds(*(sum(seconds) for seconds in zip(*every, strict=True)))

    def _priced_of(self, shared: _Shared, stage: PlannedStage) -> CollectiveSeconds:
        """The collectives of some parameters of a stage.

        The sum over copies is a REDUCE of its own in data parallelism, and where gradients are reduced in each
        microbatch; else a REDUCE includes it. Frozen parameters are gathered only if they are sharded: under ZeRO 3,
        and by FSDP.
        """
        colocated = self.plan.schedule == "data_parallel"
        (slices, shards, replicas), cost = shared, self.cost
        # 1. The sum over copies, of the share of one rank.
        replicas_s = 0.0
        if len(replicas[0]) > 1:
            shares = [one.trainable * self.precision.gradient / len(shards[0]) for one in slices]
            replicas_s = max(sum(cost.all_reduce_seconds(share, ranks) for share in shares) for ranks in replicas)
        if len(shards[0]) == 1:
            return CollectiveSeconds(0.0, replicas_s, replicas_s)
        # 2. Within a copy.
        of_compute, of_gradient = self.precision.compute, self.precision.gradient
        gathered = [(one.total if colocated or stage.zero == 3 else one.trainable) * of_compute for one in slices]
        reduced = [one.trainable * of_gradient for one in slices]
        gather_s = max(sum(cost.gather_seconds(size_bytes, ranks) for size_bytes in gathered) for ranks in shards)
        reduce_s = max(
            sum(cost.reduce_scatter_seconds(size_bytes, ranks) for size_bytes in reduced) for ranks in shards
        )
        if not colocated and stage.zero < 2:
            reduce_s += replicas_s
        return CollectiveSeconds(gather_s, reduce_s, replicas_s)


def _size_of(layers: Sequence[Layer], tp: int, shard_size: int) -> _Size:
    total = sum(parameters_of_rank(layer, tp) for layer in layers)
    trainable = sum(updated_of_rank(layer, tp) for layer in layers)
    return _Size(total, trainable, trainable / shard_size, sum(layer.updated_parameters for layer in layers))


def _size_of_experts(layers: Sequence[Layer], tp: int, shard_size: int) -> _Size:
    """Of the experts alone."""
    total = sum(layer.num_experts * layer.expert_weights for layer in layers)
    undivided = sum(layer.learning_experts for layer in layers)
    learning = undivided / tp
    return _Size(total / tp, learning, learning / shard_size, undivided)


def _without(every: _Size, experts: _Size, shard_size: int) -> _Size:
    """All but the experts."""
    trainable = every.trainable - experts.trainable
    undivided = every.undivided - experts.undivided
    return _Size(every.total - experts.total, trainable, trainable / shard_size, undivided)


def fsdp_slices(layers: Sequence[Layer]) -> list[tuple[Layer, ...]]:
    """The slices of a module that have an FSDP message each: every transformer block, and the rest."""
    blocks: list[tuple[Layer, ...]] = []
    for layer in layers:
        if layer.continues and blocks:
            blocks[-1] += (layer,)
        elif layer.in_block:
            blocks.append((layer,))
    return [*blocks, tuple(layer for layer in layers if not layer.in_block)]
