"""Chains that are cut without seconds, as Megatron-LM and Megatron-DeepSpeed cut them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from motet.core.arrays import Int64Array
from motet.core.plan import Plan
from motet.core.workload import BACKBONE
from motet.planner.candidate import Pins
from motet.planner.chain.propose import ChainSearch
from motet.planner.degrees import Degrees
from motet.planner.job import Job
from motet.planner.stages.blocks import Blocks
from motet.planner.stages.partition import partition
from motet.planner.stages.stage_costs import stage_numbers, stages_of

Cut = Callable[[Blocks, int], Int64Array]
"""(blocks, number of stages) -> stage of each block: `anchored_cut.by_layers`, `by_parameters`, `encoders_first`."""


def chain_plan(job: Job, degrees: Degrees, cut: Cut | None = None, pins: Pins | None = None) -> Plan:
    """A chain in these degrees, cut by `cut`, or exactly, as the planner cuts it.

    Recomputation is pinned, or the least that fits, or all of it where even that does not fit.
    """
    pipeline = ChainSearch(job, pins or Pins()).pipeline(degrees)
    if cut is None:
        return pipeline.plan(pipeline.settled())
    return pipeline.plan(stages_of(pipeline.blocks, cut(pipeline.blocks, degrees.num_stages), pipeline.limits))


def encoders_first(blocks: Blocks, num_stages: int) -> Int64Array:
    """The stage of each block: the first stage has all encoders, every stage equally many blocks of the backbone, and
    the last what follows the backbone (Megatron-LM; Optimus section 5.1).
    """
    backbone = blocks.names.index(BACKBONE)
    stage = np.where(blocks.owner < backbone, 0, num_stages - 1)
    is_backbone = blocks.owner == backbone
    stage[is_backbone] = stage_numbers(partition([1.0] * int(is_backbone.sum()), num_stages))
    return stage
