"""Recomputation by which a Plan that lacks memory fits: of every block, or of the share that its ranks lack."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import ceil

import numpy as np

from motet.core.arrays import Float64Array
from motet.core.plan import Plan, Unit
from motet.planner.job import Job
from motet.schedule.plan_units import backbone_unit, rank_of_stage
from motet.simulate.predict.prediction import Prediction


def all_recomputed(plan: Plan) -> Plan:
    """The Plan with every block recomputed."""
    units = (replace(unit, recompute=tuple(dict(stage) for stage in unit.stages)) for unit in plan.units)
    return replace(plan, units=tuple(units))


def share_recomputed(job: Job, plan: Plan, lacking: Prediction, least: Prediction) -> Plan:
    """The Plan with the share of each pipeline rank's blocks recomputed that it lacks of what all of them save.

    It fits where a rank's blocks save alike. Else it may still lack memory, or recompute more than it must. O(ranks).
    lacking, least: the Plan's steps with its own recomputation, which lacks memory, and with every block recomputed.
    """
    saved = (lacking.peak_bytes - least.peak_bytes).astype(np.float64)
    over = np.maximum(lacking.peak_bytes - job.capacity_bytes, 0).astype(np.float64)
    units = []
    for unit in plan.units:
        ranks = np.searchsorted(lacking.ranks, unit.ranks)
        # While a recomputed block runs backward, what it saves of one microbatch is there, whatever else is recomputed.
        running = _largest_saved_bytes(job, plan, unit)
        share = np.minimum((over[ranks] + running) / np.maximum(saved[ranks] + running, 1.0), 1.0)
        share[(over[ranks] == 0) | (saved[ranks] <= 0)] = 0.0
        units.append(_recomputed(plan, unit, share))
    return replace(plan, units=tuple(units))


def _largest_saved_bytes(job: Job, plan: Plan, unit: Unit) -> float:
    """What recomputing a block of the unit saves of one microbatch, at most."""
    num_examples = plan.microbatch_size * backbone_unit(plan).dp / unit.dp
    blocks = (job.block_costs(name, num_examples, unit.tp).saved_bytes for name in unit.modules)
    return max(float(saved_bytes.max(initial=0.0)) for saved_bytes in blocks) / unit.cp


def _recomputed(plan: Plan, unit: Unit, share: Float64Array) -> Unit:
    """The unit with a share of its blocks recomputed. share: [num_ranks of the unit]; replicas have the largest."""
    by_pipeline_rank = share.reshape(unit.pp, -1).max(axis=1)
    before = unit.recompute or ({},) * len(unit.stages)
    recompute: list[Mapping[str, int]] = []
    for number, (stage, own) in enumerate(zip(unit.stages, before, strict=True)):
        part = by_pipeline_rank[rank_of_stage(plan, unit, number)]
        rest = {name: count - own.get(name, 0) for name, count in stage.items()}
        recompute.append({name: own.get(name, 0) + ceil(part * count) for name, count in rest.items()})
    return replace(unit, recompute=tuple(recompute))
