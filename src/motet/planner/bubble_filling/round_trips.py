"""A lower bound of a backbone's step under 1F1B in closed form: how often microbatches go there and back.

Rank r of a pipeline of p ranks runs p - r microbatches ahead: its forward pass of microbatch k + p - r stands behind
its backward pass of microbatch k, which needs that microbatch to have passed all later ranks, both ways. So of every
p - r microbatches one round trip follows on the other. It binds where messages take about as long as passes do; a step
of hundreds of thousands of actions need not be simulated then. Recomputation is left out: it may run while a rank
waits.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from motet.core.arrays import Float64Array
from motet.core.plan import Unit
from motet.planner.bubble_filling.encoder_plans import EncoderPlans
from motet.schedule.from_plan import unscheduled
from motet.schedule.layout import Layout
from motet.simulate.predict.collectives import Collectives
from motet.simulate.predict.traffic import Traffic

_ROUNDING = 1e-6


def round_trips_s(plans: EncoderPlans, backbone: Unit, num_islands: int) -> float:
    """Seconds that a step takes at least, without the optimizer, however well bubbles are filled. Rounded down.

    It is never above the simulated step of `BackboneAlone`, which scales that of microbatches that are alike by the
    slowest of the first num_islands islands. 0 for interleaved schedules and for stages without backward passes.
    """
    if plans.shape.num_chunks > 1:
        return 0.0
    pricing = plans.pricing_of(backbone)
    layout, stages = pricing.layout, pricing.planned.stages
    if not all(stage.has_backward for stage in stages):
        return 0.0
    # 1. Seconds of passes and messages, [num_islands, num_stages or num_edges, num_microbatches].
    bare = replace(pricing.planned.program, edges=layout.island.edges, actions=((),) * plans.shape.pp)
    pricing.planned = replace(unscheduled(Layout(pricing.plan)), program=bare)
    islands = range(min(pricing.num_islands, num_islands))
    traffic, prices = Traffic(pricing), pricing.in_islands(islands)
    seconds = (
        prices.forward + prices.forward_tensor,
        prices.input + prices.weight + prices.backward_tensor,
        traffic.send_s(islands),
        traffic.send_s(islands, gradient=True),
    )
    # 2. The slowest island over microbatches that are alike, whose step ends before the optimizer.
    slowest_s = _least_s(*seconds)
    alike_s = _least_s(*(np.tile(each.mean(axis=(0, 2), keepdims=True), (1, 1, each.shape[2])) for each in seconds))
    optimizer_s = float(Collectives(pricing).step_s().max(initial=0.0))
    return slowest_s * max(1 - optimizer_s / alike_s, 0.0) * (1 - _ROUNDING)


def _least_s(forward_s: Float64Array, backward_s: Float64Array, send_s: Float64Array, return_s: Float64Array) -> float:
    """The longest chain of round trips in any island, [num_islands, num_stages or num_edges, num_microbatches] each."""
    num_stages = forward_s.shape[1]
    # Seconds of a microbatch from each stage on, to the last one and back; and before it, both ways.
    trip_s = _from_stage_on(forward_s + backward_s) + np.pad(_from_stage_on(send_s + return_s), _ONE_STAGE_MORE)
    arrives_s, returns_s = _before_stage(forward_s, send_s), _before_stage(backward_s, return_s)
    longest_s = 0.0
    for stage in range(num_stages):
        trips_s = trip_s[:, stage, :: num_stages - stage]
        last = (trips_s.shape[1] - 1) * (num_stages - stage)
        chain_s = arrives_s[:, stage, 0] + trips_s.sum(axis=1) + returns_s[:, stage, last]
        longest_s = max(longest_s, float(chain_s.max()))
    return longest_s


_ONE_STAGE_MORE = ((0, 0), (0, 1), (0, 0))


def _from_stage_on(seconds: Float64Array) -> Float64Array:
    """Sums over a stage or edge and all later ones."""
    sums: Float64Array = seconds[:, ::-1].cumsum(axis=1)[:, ::-1]
    return sums


def _before_stage(passes_s: Float64Array, messages_s: Float64Array) -> Float64Array:
    """Sums over the stages before each stage, and the edges up to it."""
    hops_s = (passes_s[:, :-1] + messages_s).cumsum(axis=1)
    return np.pad(hops_s, ((0, 0), (1, 0), (0, 0)))
