"""Seconds of everything that a Plan's Program does, for the examples of islands."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from motet.simulate.engine.stage_times import StageTimes
from motet.simulate.predict.stage_pricing import Pricing
from motet.simulate.predict.traffic import Traffic


def stage_times_of(pricing: Pricing, traffic: Traffic, island: int = 0) -> StageTimes:
    """The StageTimes of the Program, for the examples of one island."""
    return times_in_islands(pricing, traffic, [island])


def times_in_islands(pricing: Pricing, traffic: Traffic, islands: Sequence[int]) -> StageTimes:
    """The StageTimes of several islands: the stages, edges and ranks of the first, then those of the second, ..."""
    stages, colocated = pricing.planned.stages, pricing.plan.schedule == "data_parallel"
    num_microbatches = pricing.assignment.num_microbatches
    tables = (table.reshape(-1, num_microbatches) for table in pricing.in_islands(islands)[:-1])
    forward, backward_input, weight, recompute, forward_tensor, backward_tensor = tables
    none = np.zeros((1, 1))
    gather_s, reduce_s, replicas_s = np.tile(traffic.collectives.of_stages(), len(islands))
    in_parts = [(number, stage) for number, stage in enumerate(stages) if stage.num_parts > 1]
    return StageTimes(
        forward,
        backward_input,
        weight,
        recompute,
        forward_tensor,
        backward_tensor,
        send_s=none if colocated else traffic.send_s(islands).reshape(-1, num_microbatches),
        return_s=none if colocated else traffic.send_s(islands, gradient=True).reshape(-1, num_microbatches),
        exchange_s=traffic.exchange_s() if colocated else none,
        gather_s=gather_s,
        reduce_s=reduce_s,
        replicas_s=replicas_s,
        norm_s=traffic.collectives.norm_s(),
        step_s=np.tile(traffic.collectives.step_s(), len(islands)),
        forward_parts={number: pricing.parts(stage) for number, stage in in_parts},
        backward_parts={
            number: pricing.parts(stage, backward=True) for number, stage in in_parts if stage.has_backward
        },
    )
