"""Seconds of everything that a Plan's Program does, for the examples of islands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from motet.schedule.program import AlikeItems
from motet.simulate.engine.stage_times import AlikeParts, Part, StageTimes
from motet.simulate.predict.collectives import Collectives
from motet.simulate.predict.stage_pricing import Pricing
from motet.simulate.predict.traffic import Traffic

StageParts = Mapping[int, tuple[Part, ...]]
"""The parts of a pass, by number of the stage."""


def stage_times_of(pricing: Pricing, traffic: Traffic, island: int = 0) -> StageTimes:
    """The StageTimes of the Program, for the examples of one island."""
    return times_in_islands(pricing, traffic, [island])


def times_in_islands(pricing: Pricing, traffic: Traffic, islands: Sequence[int]) -> StageTimes:
    """The StageTimes of several islands: the stages, edges and ranks of the first, then those of the second, ..."""
    num_microbatches = pricing.assignment.num_microbatches
    tables = (table.reshape(-1, num_microbatches) for table in pricing.in_islands(islands)[:-1])
    forward, backward_input, weight, recompute, forward_tensor, backward_tensor = tables
    colocated, none = pricing.plan.schedule == "data_parallel", np.zeros((1, 1))
    if not colocated and traffic.has_calls:
        forward = forward + traffic.calls_s(islands).reshape(forward.shape)
        backward_input = backward_input + traffic.calls_s(islands, gradient=True).reshape(forward.shape)
    forward_parts, backward_parts = parts_of_passes(pricing)
    return replace(
        constant_times(traffic.collectives, len(islands)),
        forward_s=forward,
        input_s=backward_input,
        weight_s=weight,
        recompute_s=recompute,
        forward_tensor_s=forward_tensor,
        backward_tensor_s=backward_tensor,
        send_s=none if colocated else traffic.send_s(islands).reshape(-1, num_microbatches),
        return_s=none if colocated else traffic.send_s(islands, gradient=True).reshape(-1, num_microbatches),
        exchange_s=traffic.exchange_s() if colocated else none,
        forward_parts=forward_parts,
        backward_parts=backward_parts,
    )


def constant_times(collectives: Collectives, num_islands: int = 1) -> StageTimes:
    """The StageTimes of what does not depend on lengths, in each of several islands; all else takes no time."""
    gather_s, reduce_s, replicas_s = np.tile(collectives.of_stages, num_islands)
    none = np.zeros((1, 1))
    return StageTimes(
        none,
        none,
        none,
        gather_s=gather_s,
        reduce_s=reduce_s,
        replicas_s=replicas_s,
        norm_s=collectives.norm_s(),
        step_s=np.tile(collectives.step_s, num_islands),
    )


def parts_of_passes(pricing: Pricing) -> tuple[StageParts, StageParts]:
    """The parts of forward passes, and of backward passes, by stage; of stages whose passes are in parts."""
    forward: dict[int, tuple[Part, ...]] = {}
    backward: dict[int, tuple[Part, ...]] = {}
    stages = pricing.planned.stages
    num_listed = len(stages.first) if isinstance(stages, AlikeItems) else len(stages)
    for kind in pricing.planned.kinds:
        if kind.stage.num_parts > 1:
            numbers = kind.numbers[kind.numbers < num_listed].tolist()
            forward.update(dict.fromkeys(numbers, pricing.parts(kind.stage)))
            if kind.stage.has_backward:
                backward.update(dict.fromkeys(numbers, pricing.parts(kind.stage, backward=True)))
    if isinstance(stages, AlikeItems):
        num_ranks = stages.num_ranks
        return AlikeParts(forward, num_listed, num_ranks), AlikeParts(backward, num_listed, num_ranks)
    return forward, backward
