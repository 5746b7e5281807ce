"""A lower bound of a backbone's step under 1F1B: its passes and messages in their order, as soon as each can be.

What the bound leaves out are collectives, and messages that wait for one another. It needs no Program: a step of
hundreds of thousands of actions is one graph of arrays here, which the native core runs through.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from motet.balance import island_makespans
from motet.balance.step_graph import StepGraph, one_f_one_b_graph
from motet.core.arrays import Float64Array
from motet.core.plan import Unit
from motet.planner.bubble_filling.encoder_plans import EncoderPlans
from motet.schedule.from_plan import unscheduled
from motet.schedule.layout import Layout
from motet.simulate.predict.collectives import Collectives
from motet.simulate.predict.traffic import Traffic

_ROUNDING = 1e-6
_NS_PER_S = 1_000_000_000


def one_f_one_b_s(plans: EncoderPlans, backbone: Unit, num_islands: int) -> float:
    """Seconds that a step takes at least, without the optimizer, however well bubbles are filled. Rounded down.

    It is never above the simulated step of `BackboneAlone`, which scales that of microbatches that are alike by the
    slowest of the first num_islands islands. 0 for interleaved schedules and for stages without backward passes.
    O(passes of all islands).
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
        prices.recompute,
        traffic.send_s(islands),
        traffic.send_s(islands, gradient=True),
    )
    # 2. The slowest island over microbatches that are alike, whose step ends before the optimizer.
    slowest_s = least_step_s(*seconds)
    alike_s = least_step_s(*(np.tile(each.mean(axis=(0, 2), keepdims=True), (1, 1, each.shape[2])) for each in seconds))
    optimizer_s = float(Collectives(pricing).step_s.max(initial=0.0))
    return slowest_s * max(1 - optimizer_s / alike_s, 0.0) * (1 - _ROUNDING)


def least_step_s(
    forward_s: Float64Array,
    backward_s: Float64Array,
    recompute_s: Float64Array,
    send_s: Float64Array,
    return_s: Float64Array,
) -> float:
    """The slowest island under 1F1B, [num_islands, num_stages, num_microbatches] each; messages have an edge less.

    Recomputation comes behind the pass before it, and may run while its backward pass waits for the gradient. Seconds
    are rounded down to nanoseconds.
    """
    num_islands, num_stages, num_microbatches = forward_s.shape
    edge = np.zeros((num_islands, 1, num_microbatches))
    rows = (forward_s, backward_s, recompute_s, send_s, edge, edge, return_s)
    columns = np.concatenate(rows, axis=1).transpose(0, 2, 1).reshape(-1, 5 * num_stages)
    groups = np.arange(num_islands * num_microbatches).reshape(num_islands, num_microbatches)
    durations = np.floor(columns * _NS_PER_S).astype(np.int64)
    makespans = island_makespans(_with_messages(num_stages, num_microbatches), durations, groups)
    return int(makespans.max()) / _NS_PER_S


def _with_messages(num_stages: int, num_microbatches: int) -> StepGraph:
    """1F1B in which each pass has two operations more: recomputation before it, and the message of it behind it.

    Rows are forward, backward, recomputation, the message to the stage after and that to the stage before, of all
    stages each. What there is not takes no time: recomputation before forward passes, and messages beyond the ends.
    """
    bare = one_f_one_b_graph(num_stages, num_microbatches)
    count, is_backward = len(bare.row), bare.row >= num_stages
    stage = bare.row % num_stages
    pass_of = np.empty((2, num_stages, num_microbatches), dtype=np.int64)
    pass_of[is_backward.astype(np.int64), stage, bare.position] = np.arange(count)
    # 1. Three operations a pass, in the order of the passes.
    nothing_row = 4 * num_stages - 1  # The message behind the last stage.
    recomputation = np.where(is_backward, stage + 2 * num_stages, nothing_row)
    row = np.stack([recomputation, bare.row, stage + np.where(is_backward, 4, 3) * num_stages], axis=1)
    position = np.repeat(bare.position, 3)
    # 2. What each waits for: recomputation for the pass before it on its stage, a pass also for a message.
    on_stage = np.sort(pass_of.transpose(1, 0, 2).reshape(num_stages, -1), axis=1)
    before = np.full(count, -1)
    before[on_stage[:, 1:]] = 3 * on_stage[:, :-1] + 1
    message = np.full(count, -1)
    message[pass_of[0, 1:]] = 3 * pass_of[0, :-1] + 2
    message[pass_of[1, :-1]] = 3 * pass_of[1, 1:] + 2
    own = 3 * np.arange(count)
    nothing = np.full(count, -1)
    needs = np.stack([before, nothing, message, own, nothing, own + 1], axis=1).reshape(-1, 2)
    offsets = np.concatenate([[0], (needs >= 0).sum(axis=1).cumsum()])
    narrow = [column.astype(np.int32) for column in (row.ravel(), position, offsets, needs[needs >= 0])]
    return StepGraph(narrow[0], narrow[1], narrow[2], narrow[3], bare.gaps)
