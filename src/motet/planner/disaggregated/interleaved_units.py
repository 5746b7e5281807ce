"""An allocation in which each rank of the backbone interleaves several chunks (MMScale section 4: VPP).

Chunks divide the time until the pipeline is full. Ranks are those of an allocation for 1F1B (`propose.py`).
The backbone is cut into chunks. More is recomputed where that is needed, because more microbatches are in flight. The
estimate is a simulation of mean microbatches through one replica of each unit, times the allocation's unevenness.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import accumulate, pairwise

import numpy as np

from motet.core.arrays import Float64Array, Int64Array
from motet.core.plan import Plan
from motet.core.workload import BACKBONE
from motet.planner.chain.pipeline import simulated_s
from motet.planner.disaggregated.allocation import Share
from motet.planner.disaggregated.placed_units import PlacedUnits
from motet.planner.job import Job
from motet.planner.stages.blocks import Blocks, blocks_of, join
from motet.planner.stages.partition import partition
from motet.planner.stages.recompute import RecomputeMode
from motet.planner.stages.stage_costs import StageLimits, Stages, settle, stage_numbers
from motet.schedule import Pipeline, Program, UnitEdge, add_communication, check_fit
from motet.schedule.generators.disaggregated import island
from motet.schedule.generators.virtual_pipeline import virtual_pipeline

_NUM_CHUNKS = (2, 4)
"""Chunks of each rank of the backbone that are tried."""
_FILLING_MICROBATCHES = 4
"""Microbatches by stages of the longest way that fill a pipeline: with more, it holds no more, nor has more bubbles."""


def interleaved_units(placed: PlacedUnits, mode: RecomputeMode) -> Iterator[InterleavedUnits]:
    """The allocation with each number of chunks that the backbone's blocks allow; none where it has one stage."""
    pp, num_blocks = placed.backbone.pp, len(placed.job.model.module(BACKBONE).blocks)
    for num_chunks in _NUM_CHUNKS if pp > 1 else ():
        if pp * num_chunks <= num_blocks:
            yield InterleavedUnits(placed, num_chunks, mode)


class InterleavedUnits:
    """An allocation whose backbone is cut into num_chunks chunks a rank. mode: what is recomputed."""

    def __init__(self, placed: PlacedUnits, num_chunks: int, mode: RecomputeMode) -> None:
        self.placed, self.num_chunks, self.mode = placed, num_chunks, mode
        self.job: Job = placed.job
        self.shares: Sequence[Share] = placed.allocation.shares
        self.num_stages = [share.pp * (num_chunks if share.name == BACKBONE else 1) for share in self.shares]
        self.first_stage = list(accumulate(self.num_stages, initial=0))
        self.num_microbatches = placed.allocation.num_microbatches

    @property
    def what(self) -> str:
        """The degrees, in words."""
        return f"{self.placed.what}; {self.num_chunks} chunks, interleaved"

    @cached_property
    def program(self) -> Program:
        """The Program of one replica of each unit, with as many microbatches as fill it."""
        index = {share.name: number for number, share in enumerate(self.shares)}
        units = [Pipeline((share.name,) * num_stages) for share, num_stages in zip(self.shares, self.num_stages)]
        feeds = [UnitEdge(index[source], index[sink]) for source, sink in self.job.model.edges]
        first_ranks = accumulate((share.pp for share in self.shares), initial=0)
        ranks = [
            first_rank + stage % share.pp
            for first_rank, share, num_stages in zip(first_ranks, self.shares, self.num_stages)
            for stage in range(num_stages)
        ]
        backbone = index[BACKBONE]
        chunked = range(self.first_stage[backbone], self.first_stage[backbone + 1])
        num_microbatches = min(self.num_microbatches, _FILLING_MICROBATCHES * self.placed.depth)
        return virtual_pipeline(island(units, feeds), ranks, [chunked], num_microbatches)

    @cached_property
    def blocks(self) -> Blocks:
        """The blocks of all units, one unit after the other."""
        return join(
            tuple(blocks_of(self.job, (unit.name,), unit.num_examples, unit.tp, unit.dp) for unit in self.shares)
        )

    @cached_property
    def stages(self) -> Stages:
        """The blocks cut into stages that recompute the least with which they fit."""
        limits = StageLimits.of(self.program, self.job.capacity_bytes, self.mode)
        return settle(self.blocks, limits, self._cut, self._passes_s)

    @property
    def shortfall_bytes(self) -> float:
        """What the fullest rank lacks; 0 if all fit."""
        return self.stages.shortfall_bytes

    def _cut(self, block_s: Float64Array) -> Int64Array:
        """The stage of each block; each unit is cut by itself."""
        parts = []
        for index, share in enumerate(self.shares):
            unit_s = block_s[self.blocks.owner == index].tolist()
            counts = partition(unit_s, share.pp, num_chunks=self.num_stages[index] // share.pp)
            parts.append(self.first_stage[index] + stage_numbers(counts))
        return np.concatenate(parts)

    def _passes_s(self, stages: Stages) -> float:
        return simulated_s(self._with_sends, stages, self._send_s(stages), self.num_microbatches)

    @cached_property
    def _with_sends(self) -> Program:
        return add_communication(self.program)

    def _send_s(self, stages: Stages) -> Float64Array:
        """Seconds of a message on each edge, between the first replicas: [num_edges]."""
        units = {unit.name: unit for unit in self.placed.plan.units}
        first_rank = []
        for share, num_stages in zip(self.shares, self.num_stages):
            unit = units[share.name]
            first_rank += [unit.first_rank + stage % unit.pp * unit.dp * unit.tp for stage in range(num_stages)]
        sent = stages.output_bytes
        return np.array(
            [
                float(self.job.cost.send_seconds(sent[source : source + 1], (first_rank[source], first_rank[sink]))[0])
                for source, sink in self.program.edges
            ]
        )

    @cached_property
    def estimate_s(self) -> float:
        """Estimate of a step."""
        return self._passes_s(self.stages) * self.placed.unevenness + self.placed.once_s

    @property
    def bound_s(self) -> float:
        """A lower bound of a step: the busiest rank computes its stages for all microbatches. The slowest replica takes
        no less than the mean."""
        rank = [stage.rank for stage in self.program.stages]
        filled = np.repeat([share.filled for share in self.shares], self.num_stages)
        return self.num_microbatches * float(np.bincount(rank, self.stages.seconds * filled).max()) * (1 - 1e-9)

    @cached_property
    def plan(self) -> Plan:
        """The Plan of the allocation with these stages."""
        layers, recompute = self.stages.layers, self.stages.recompute or ({},) * self.first_stage[-1]
        units = []
        for share, (first, stop) in zip(self.shares, pairwise(self.first_stage)):
            unit, recomputed = self.placed.plan.unit_of(share.name), tuple(recompute[first:stop])
            units.append(replace(unit, stages=layers[first:stop], recompute=recomputed if any(recomputed) else ()))
        plan = replace(self.placed.plan, units=tuple(units), schedule="interleaved_1f1b")
        check_fit(plan)
        return plan
