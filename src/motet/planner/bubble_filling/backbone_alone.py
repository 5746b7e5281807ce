"""A backbone simulated without encoders: the bubbles that they are placed in, and the step that they cannot shorten.

Placements are decided on microbatches that are all as long as the mean, since a Plan is for every step. The *slowdown*
says how much longer the slowest replica takes for the microbatches that there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from motet.core.arrays import Float64Array
from motet.core.plan import Unit
from motet.planner.bubble_filling.backbone_bubbles import BackbonePipeline, backbone_of
from motet.planner.bubble_filling.encoder_plans import EncoderPlans
from motet.schedule import PlannedStage, add_communication, add_data_parallel, split_parts
from motet.schedule.layout import LAYER_PARTS
from motet.schedule.program import Program
from motet.simulate.engine.simulate import Prepared, makespans, simulate
from motet.simulate.engine.stage_times import StageTimes
from motet.simulate.predict.pass_parts import halves_of_layers, share_beside
from motet.simulate.predict.program_times import constant_times, times_in_islands
from motet.simulate.predict.traffic import Traffic

_MAX_PARTS = 200_000
"""Parts of the backbone's passes, above which passes are not taken in parts."""
MAX_TIMED_ISLANDS = 8
"""Seconds are averaged over the microbatches of so many replicas of the backbone."""


class _Backbone(NamedTuple):
    """times: of microbatches that are alike. slowdown: see above.

    beside_forward, beside_backward: per stage, the share of a pass's communication that encoders can run beside.
    """

    stages: Sequence[PlannedStage]
    times: StageTimes
    program: Program
    slowdown: float
    beside_forward: Float64Array
    beside_backward: Float64Array


class BackboneAlone:
    """Simulates the backbone of encoder plans, once for each recomputation of its layers.

    units: the backbone's, then those of the encoders that share its ranks.
    """

    def __init__(self, plans: EncoderPlans) -> None:
        self._plans = plans
        self._backbones: dict[object, _Backbone] = {}
        self._pipelines: dict[object, BackbonePipeline] = {}

    def slowdown(self, units: Sequence[Unit]) -> float:
        """The factor by which the slowest replica takes longer than it would for microbatches that are alike."""
        return self._backbone(units).slowdown

    def pipeline(self, units: Sequence[Unit], *, parted: bool) -> BackbonePipeline:
        """The backbone's passes and the bubbles between them, for microbatches that are alike.

        parted: with passes in parts, if tensor parallelism leaves bubbles between them.
        """
        key = _recompute_key(units), parted
        if key not in self._pipelines:
            whole = self._backbone(units)
            backbone = self._parted(whole) if parted else whole
            timeline = simulate(backbone.program, backbone.times)
            num_microbatches, is_parted = backbone.program.num_microbatches, backbone is not whole
            self._pipelines[key] = backbone_of(timeline, num_microbatches, is_parted=is_parted)
        return self._pipelines[key]

    def _backbone(self, units: Sequence[Unit]) -> _Backbone:
        key = _recompute_key(units)
        if key not in self._backbones:
            self._backbones[key] = self._timed(units)
        return self._backbones[key]

    def _timed(self, units: Sequence[Unit]) -> _Backbone:
        pricing = self._plans.priced(tuple(units))
        traffic, stages = Traffic(pricing), pricing.planned.stages
        # 1. The Program with its messages and collectives.
        zero = {number: stage.zero for number, stage in enumerate(stages) if len(stage.data_ranks) > 1}
        trainable = [number for number, stage in enumerate(stages) if stage.trainable]
        program = add_communication(add_data_parallel(pricing.planned.program, zero, trainable))
        # 2. Seconds of some replicas, once for those whose microbatches are the same, and their mean.
        num_islands = pricing.num_islands
        keys = [pricing.assignment.island_key(n, num_islands) for n in range(min(num_islands, MAX_TIMED_ISLANDS))]
        unlike = list(dict.fromkeys(keys))
        times = times_in_islands(pricing, traffic, [keys.index(key) for key in unlike])
        mean = _mean(times, len(unlike), [unlike.index(key) for key in keys], constant_times(traffic.collectives))
        # 3. The slowest replica.
        prepared = Prepared(program)
        slowest_s = float(makespans(prepared, times, len(unlike)).max())
        beside = (np.array([share_beside(pricing, stage, kind) for stage in stages]) for kind in (False, True))
        return _Backbone(stages, mean, program, slowest_s / simulate(prepared, mean).makespan_s, *beside)

    def _parted(self, backbone: _Backbone) -> _Backbone:
        """The backbone with passes in the parts of `fillable`; unchanged if these are too many or leave no bubbles.

        What encoders cannot run beside is compute here.
        """
        stages, times, program = backbone[:3]
        cluster, num_layers = self._plans.job.cluster, [stage.num_layers for stage in stages]
        num_parts = LAYER_PARTS * sum(num_layers) * self._plans.shape.num_microbatches
        is_beside = cluster.runs_beside_sums and backbone.beside_forward.any()
        if not is_beside or 2 * num_parts > _MAX_PARTS:
            return backbone
        forward = {number: halves_of_layers(num, 1.0) for number, num in enumerate(num_layers)}
        backward = {number: parts for number, parts in forward.items() if stages[number].has_backward}
        for stage, parts in forward.items():
            program = split_parts(program, stage, len(parts), len(backward.get(stage, "1")))
        forward_tensor_s = backbone.beside_forward[:, None] * times.forward_tensor_s
        backward_tensor_s = backbone.beside_backward[:, None] * times.backward_tensor_s
        times = replace(
            times,
            forward_s=times.forward_s + times.forward_tensor_s - forward_tensor_s,
            input_s=times.input_s + times.backward_tensor_s - backward_tensor_s,
            forward_tensor_s=forward_tensor_s,
            backward_tensor_s=backward_tensor_s,
            forward_parts=forward,
            backward_parts=backward,
        )
        return backbone._replace(times=times, program=program)


def _recompute_key(units: Sequence[Unit]) -> tuple[tuple[tuple[str, int], ...], ...]:
    """The backbone's recomputation: all that tells apart what it takes alone."""
    return tuple(tuple(stage.items()) for stage in units[0].recompute)


def _mean(times: StageTimes, num_unlike: int, replicas: Sequence[int], constant: StageTimes) -> StageTimes:
    """The mean over replicas and microbatches, with one column each.

    times: of unlike replicas. replicas: of each replica the one that it is like. constant: what is the same in all.
    """

    def mean(name: str) -> Float64Array:
        of_unlike = getattr(times, name).mean(axis=1).reshape(num_unlike, -1, 1)
        columns: Float64Array = of_unlike[list(replicas)].mean(axis=0)
        return columns

    return StageTimes(
        mean("forward_s"),
        mean("input_s"),
        mean("weight_s"),
        mean("recompute_s"),
        mean("forward_tensor_s"),
        mean("backward_tensor_s"),
        mean("send_s"),
        mean("return_s"),
        gather_s=constant.gather_s,
        reduce_s=constant.reduce_s,
        step_s=constant.step_s,
    )
