"""A pipeline's step from mean microbatches, in microseconds of processor time: which neighbours to simulate first.

Communication is left out, but for that of tensor parallelism; so is recomputation. `busiest_s` is what the busiest rank
computes; few orders of examples make a step shorter than that. `estimate_s` adds the time until all ranks work, and
after: the longest path of one microbatch under 1F1B, a part of it under schedules that hide some.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import numpy as np

from motet.core.arrays import Float64Array
from motet.core.plan import SPLITS_BACKWARD, Plan, Unit
from motet.planner.job import Job
from motet.schedule.layout import num_microbatches
from motet.schedule.plan_units import backbone_unit, rank_of_stage

_ZERO_BUBBLE = 0.4
"""The share of the other ranks' passes of one microbatch that ZB-H1 and ZB-V do not hide."""


class QuickEstimate(NamedTuple):
    """Seconds of a step."""

    busiest_s: float
    estimate_s: float


def quick_estimate(job: Job, plan: Plan) -> QuickEstimate:
    """The estimate of a Plan of a job; 0 under "data_parallel", where the assignment says what ranks compute."""
    if plan.schedule == "data_parallel":
        return QuickEstimate(0.0, 0.0)
    backbone, slowest_s, paths = backbone_unit(plan), 0.0, [0.0]
    for unit in plan.units:
        rank_s = _rank_seconds(job, plan, unit, plan.microbatch_size * backbone.dp / unit.dp)
        slowest_s = max(slowest_s, float(rank_s.max()))
        others_s = float(rank_s.sum() - rank_s.max())
        if unit is backbone:
            own_s = others_s * _exposed(plan, unit)
        else:
            paths.append(float(rank_s.sum()))
    busiest_s = num_microbatches(plan) * slowest_s
    return QuickEstimate(busiest_s, busiest_s + own_s + max(paths))


def _exposed(plan: Plan, unit: Unit) -> float:
    if plan.schedule in SPLITS_BACKWARD:
        return _ZERO_BUBBLE
    return unit.pp / len(unit.stages)


def _rank_seconds(job: Job, plan: Plan, unit: Unit, num_examples: float) -> Float64Array:
    """[pp]: forward and backward of a mean microbatch of num_examples, of which only whole ones are counted."""
    size = max(int(num_examples), 1) if num_examples > 1 else num_examples
    seconds, done = np.zeros(unit.pp), Counter[str]()
    for number, stage in enumerate(unit.stages):
        rank = rank_of_stage(plan, unit, number)
        for name, count in stage.items():
            costs, span = job.block_costs(name, size, unit.tp), slice(done[name], done[name] + count)
            seconds[rank] += float((costs.forward_s[span] + costs.backward_s[span]).sum()) / unit.cp
            done[name] += count
    return seconds
