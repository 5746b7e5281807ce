"""Units of their own, of which the backbone's ranks interleave several chunks each (MMScale section 4: VPP, which
divides the time until the pipeline is full).

From an allocation for 1F1B (`disaggregated.py`): the same ranks, the backbone cut into chunks, and the least
recomputed that fits, as more microbatches are under way. The estimate is a simulation of mean microbatches, of one
replica of each unit, longer by as much as the allocation's own is because microbatches differ.
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

UNIT_CHUNKS = (2, 4)
_FILLED = 4
"""Microbatches by stages of the longest way that fill a pipeline: with more, it holds no more, nor has more bubbles."""


def virtual_units(placed: PlacedUnits, mode: RecomputeMode) -> Iterator[VirtualUnits]:
    """With each number of chunks that the backbone's blocks allow, where it has several ranks."""
    own, num_blocks = placed.backbone, len(placed.job.model.module(BACKBONE).blocks)
    for num_chunks in UNIT_CHUNKS if own.pp > 1 else ():
        if own.pp * num_chunks <= num_blocks:
            yield VirtualUnits(placed, num_chunks, mode)


class VirtualUnits:
    """An allocation with the backbone in chunks. mode: what is recomputed."""

    def __init__(self, placed: PlacedUnits, num_chunks: int, mode: RecomputeMode) -> None:
        self.placed, self.num_chunks, self.mode = placed, num_chunks, mode
        self.job: Job = placed.job
        self.shares: Sequence[Share] = placed.allocation.shares
        self.num_stages = [share.pp * (num_chunks if share.name == BACKBONE else 1) for share in self.shares]
        self.first = list(accumulate(self.num_stages, initial=0))
        self.num_microbatches = placed.allocation.num_microbatches

    @property
    def what(self) -> str:
        return f"{self.placed.what}; {self.num_chunks} chunks, interleaved"

    @cached_property
    def program(self) -> Program:
        """Of one replica of each unit, with so many microbatches as fill it."""
        place = {share.name: number for number, share in enumerate(self.shares)}
        units = [Pipeline((share.name,) * number) for share, number in zip(self.shares, self.num_stages)]
        feeds = [UnitEdge(place[source], place[sink]) for source, sink in self.job.model.edges]
        reached = accumulate((share.pp for share in self.shares), initial=0)
        ranks = [
            start + stage % share.pp
            for start, share, number in zip(reached, self.shares, self.num_stages)
            for stage in range(number)
        ]
        own = place[BACKBONE]
        num = min(self.num_microbatches, _FILLED * self.placed.depth)
        return virtual_pipeline(island(units, feeds), ranks, [range(self.first[own], self.first[own + 1])], num)

    @cached_property
    def blocks(self) -> Blocks:
        return join(tuple(blocks_of(self.job, (own.name,), own.num_examples, own.tp, own.dp) for own in self.shares))

    @cached_property
    def stages(self) -> Stages:
        room = StageLimits.of(self.program, self.job.capacity_bytes, self.mode)
        return settle(self.blocks, room, self._cut, self._passes_s)

    @property
    def shortfall_bytes(self) -> float:
        return self.stages.shortfall_bytes

    def _cut(self, block_s: Float64Array) -> Int64Array:
        """Each unit by itself."""
        parts = []
        for place, share in enumerate(self.shares):
            own_s = block_s[self.blocks.owner == place].tolist()
            counts = partition(own_s, share.pp, num_chunks=self.num_stages[place] // share.pp)
            parts.append(self.first[place] + stage_numbers(counts))
        return np.concatenate(parts)

    def _passes_s(self, stages: Stages) -> float:
        return simulated_s(self._sent, stages, self._send_s(stages), self.num_microbatches)

    @cached_property
    def _sent(self) -> Program:
        return add_communication(self.program)

    def _send_s(self, stages: Stages) -> Float64Array:
        """[num_edges]: between the first replicas."""
        units = {unit.name: unit for unit in self.placed.plan.units}
        starts = []
        for share, number in zip(self.shares, self.num_stages):
            unit = units[share.name]
            starts += [unit.first_rank + stage % unit.pp * unit.dp * unit.tp for stage in range(number)]
        sent = stages.output_bytes
        return np.array(
            [
                float(self.job.cost.send_seconds(sent[source : source + 1], (starts[source], starts[sink]))[0])
                for source, sink in self.program.edges
            ]
        )

    @cached_property
    def estimate_s(self) -> float:
        return self._passes_s(self.stages) * self.placed.unevenness + self.placed.once_s

    @property
    def bound_s(self) -> float:
        """Every rank computes its stages for all microbatches; of replicas, the slowest takes no less than the mean."""
        rank = [stage.rank for stage in self.program.stages]
        return self.num_microbatches * float(np.bincount(rank, self.stages.seconds).max()) * (1 - 1e-9)

    @cached_property
    def plan(self) -> Plan:
        layers, again = self.stages.layers, self.stages.recompute or ({},) * self.first[-1]
        units = []
        for share, (first, stop) in zip(self.shares, pairwise(self.first)):
            unit, own = self.placed.plan.unit_of(share.name), tuple(again[first:stop])
            units.append(replace(unit, stages=layers[first:stop], recompute=own if any(own) else ()))
        plan = replace(self.placed.plan, units=tuple(units), schedule="interleaved_1f1b")
        check_fit(plan)
        return plan
