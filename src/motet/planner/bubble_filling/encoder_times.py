"""What the encoders of a plan take beside the backbone: their passes in slices, messages and collectives."""

from __future__ import annotations

import numpy as np

from motet.core.arrays import Float64Array
from motet.core.plan import Unit
from motet.cost.memory import unit_spans
from motet.planner.bubble_filling.backbone_bubbles import Slices
from motet.planner.bubble_filling.encoder_memory import FittedPlan
from motet.planner.bubble_filling.encoder_passes import Encoders
from motet.planner.bubble_filling.encoder_plans import EncoderPlans

_MAX_FILLS = 60_000
"""Slices of encoders in a Plan, above which layers are cut into fewer."""


def encoders_beside(plans: EncoderPlans, fitted: FittedPlan, num_slices: int) -> Encoders:
    """The encoders of a plan as they are placed.

    num_slices: slices of a layer's pass, one where memory lacks for halves; 0: all passes stay whole.
    """
    units = fitted.units[1:]
    costs = [plans.costs(unit) for unit in units]
    most = _max_slices(plans, sum(one.num_blocks for one in costs)) if fitted.has_halves else 1
    num_slices = min(num_slices, most)
    has_backward = plans.has_backward(fitted.plan.pp)
    forward, backward = [], []
    for pp_rank in range(fitted.plan.pp):
        passes = [_slices(plans, unit, pp_rank, num_slices) for unit in units]
        forward.append(tuple(forward for forward, _ in passes))
        backward.append(
            tuple(
                backward if has_backward[unit.name][pp_rank] else backward._replace(num=0)
                for unit, (_, backward) in zip(units, passes)
            )
        )
    shape = plans.shape
    ends = 0, (shape.pp - 1) * shape.dp * shape.tp
    largest_bytes = np.array([max(float(one.output_bytes.max()) for one in costs)])
    send_s = float(plans.job.cost.send_seconds(largest_bytes, ends)[0])
    gather_s, finish_s = _collectives_s(plans, fitted)
    return Encoders(tuple(forward), tuple(backward), send_s, gather_s, finish_s, fitted.max_microbatches)


def _max_slices(plans: EncoderPlans, num_layers: int) -> int:
    """How many slices of a layer's pass keep a Plan below _MAX_FILLS; at least 1."""
    return max(_MAX_FILLS // (2 * plans.shape.num_microbatches * num_layers), 1)


def _slices(plans: EncoderPlans, unit: Unit, pp_rank: int, num_slices: int) -> tuple[Slices, Slices]:
    """A microbatch's forward pass and its backward pass, with what is recomputed, on a pp rank.

    Slices of a pass are placed as if they took equally long; the simulator prices each by itself.
    """
    costs, (first, stop) = plans.costs(unit), unit_spans(plans.job.model, unit, pp_rank)[unit.name]
    num_recomputed = unit.recompute[pp_rank].get(unit.name, 0) if unit.recompute else 0
    forward_s = float(costs.forward_s[first:stop].sum())
    backward_s = float(costs.backward_s[first:stop].sum() + costs.recompute_s[first : first + num_recomputed].sum())
    num_pieces = len(plans.job.model.module(unit.name).pieces(first, stop))
    num = max(min(num_slices * (stop - first), num_pieces), 1)
    return Slices(forward_s / num, num), Slices(backward_s / num, num)


def _collectives_s(plans: EncoderPlans, fitted: FittedPlan) -> tuple[float, tuple[float, ...]]:
    """Gathering the encoders' parameters before their first pass; and per pp rank, after their last pass, reducing
    their gradients and the optimizer for all that a rank updates, the backbone's parameters included."""
    backbone, *encoders = fitted.units
    cost, precision = plans.job.cost, plans.job.mixed_precision(pipeline=True)
    pp = fitted.plan.pp
    # The ranks of a pp rank hold neighbouring stages of the backbone, of each chunk; the fullest of them counts.
    by_rank = _trainable(plans, backbone).reshape(-1, pp, plans.shape.pp // pp).sum(axis=0)
    updated = by_rank.max(axis=1) / plans.shape.dp
    gather_s, finish_s = 0.0, np.zeros(pp)
    for unit in encoders:
        num_copies = unit.dp * unit.cp
        ranks = range(0, num_copies * unit.tp, unit.tp)
        trainable = _trainable(plans, unit)
        updated += trainable / num_copies
        if num_copies > 1:
            gather_s += cost.gather_seconds(float(trainable.max()) * precision.compute, ranks)
            sizes = (trainable * precision.gradient).tolist()
            finish_s += [cost.reduce_scatter_seconds(size, ranks) for size in sizes]
    finish_s += [cost.step_seconds(round(number)) for number in updated.tolist()]
    return gather_s, tuple(finish_s.tolist())


def _trainable(plans: EncoderPlans, unit: Unit) -> Float64Array:
    """Per stage, the trainable parameters of a tensor-parallel rank: others are neither updated nor gathered."""
    first = np.cumsum([0, *(sum(stage.values()) for stage in unit.stages[:-1])])
    trainable: Float64Array = np.add.reduceat(plans.costs(unit).trainable, first)
    return trainable
