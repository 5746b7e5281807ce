"""A job's modules in one chain of stages, in given degrees: cuts, seconds, and the Plan."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from motet.core.arrays import Float64Array, Int64Array
from motet.core.plan import Plan, Unit
from motet.planner.chain.anchored_cut import cuts_near, fastest_cut, greedy_cut
from motet.planner.degrees import Degrees
from motet.planner.job import Job
from motet.planner.stages.blocks import Blocks
from motet.planner.stages.partition import partition
from motet.planner.stages.stage_costs import StageLimits, Stages, settle, stage_numbers, stages_of
from motet.planner.stages.step_time import StageGraph, exposed_collectives_s, pipeline_s
from motet.schedule import (
    Program,
    add_communication,
    interleaved_1f1b,
    one_f_one_b,
    zb_h1,
    zb_v,
)
from motet.simulate import simulate, stage_times

NUM_SIMULATED_CUTS = 12
"""The number of OmniBal's candidates that are simulated (section 5.2: 10 to 15)."""

MICROBATCHES_TO_FILL = 2
"""Microbatches by pipeline rank that fill a pipeline: more change neither its peak memory nor its bubbles."""


@dataclass(frozen=True, eq=False)
class ChainPipeline:
    """The chain of a job's modules in given degrees.

    limits: memory and schedule of its stages. blocks: of all modules. uneven: as in `StageGraph`.
    """

    job: Job
    degrees: Degrees
    limits: StageLimits
    blocks: Blocks
    uneven: float

    @cached_property
    def graph(self) -> StageGraph:
        """The stages in a row."""
        degrees, rank = self.degrees, self.limits.rank
        edges = tuple(pairwise(range(len(rank))))
        return StageGraph(degrees.schedule, degrees.num_microbatches, rank, edges, self.uneven)

    def sends(self) -> Float64Array:
        """[num_edges, num_blocks]: seconds of a message over each edge if the chain is cut there after each block."""
        output_bytes = self.blocks.output_bytes
        num_ranks = self.degrees.dp * self.degrees.tp
        first_rank = [rank * num_ranks for rank in self.limits.rank.tolist()]
        seconds: dict[bool, Float64Array] = {}
        rows = [np.zeros(0)] * (len(first_rank) - 1)
        for edge, ends in enumerate(pairwise(first_rank)):
            if ends[0] == ends[1]:
                rows[edge] = np.zeros(len(output_bytes))
                continue
            in_node = self.job.cluster.node_of(ends[0]) == self.job.cluster.node_of(ends[1])
            if in_node not in seconds:
                seconds[in_node] = self.job.cost.send_seconds(output_bytes, ends)
            rows[edge] = seconds[in_node]
        return np.stack(rows) if rows else np.zeros((0, len(output_bytes)))

    def send_s(self, stages: Stages) -> Float64Array:
        """[num_edges]: seconds of a message between neighbouring stages."""
        last_block = np.searchsorted(stages.stage, np.arange(1, stages.num_stages)) - 1
        seconds: Float64Array = self.sends()[np.arange(len(last_block)), last_block]
        return seconds

    def step_s(self, stages: Stages) -> float:
        """Seconds of a step in closed form."""
        tp, size = self.degrees.tp, self.degrees.dp * self.degrees.tp
        data_ranks = [range(rank * size, (rank + 1) * size, tp) for rank in self.limits.rank.tolist()]
        passes_s = pipeline_s(self.graph, stages, self.send_s(stages))
        return passes_s + exposed_collectives_s(self.job, stages, self.limits.rank, data_ranks)

    def cut(self, block_s: Float64Array) -> Int64Array:
        """The stage of each block in the most even cut (`partition`)."""
        degrees = self.degrees
        counts = partition(
            block_s.tolist(), degrees.pp, num_chunks=degrees.num_chunks, folded=degrees.schedule == "zb_v"
        )
        return stage_numbers(counts)

    def settled(self) -> Stages:
        """The most even cut, with the recomputation that it needs (`settle`)."""
        return settle(self.blocks, self.limits, self.cut, self.step_s)

    def unit(self, stages: Stages) -> Unit:
        """The one unit of the Plan."""
        degrees = self.degrees
        return Unit("all", stages.layers, 0, degrees.dp, degrees.pp, degrees.tp, recompute=stages.recompute, zero=1)

    def plan(self, stages: Stages) -> Plan:
        """The Plan with these stages."""
        degrees, job = self.degrees, self.job
        return Plan(
            job.model,
            job.cluster,
            (self.unit(stages),),
            job.batch_size,
            degrees.microbatch_size,
            degrees.schedule,
            precision=job.precision,
            moments=job.moments,
        )

    def cuts_beside(self, exact: Stages, *, radius: int = 2) -> list[Stages]:
        """The exact cut, and those of OmniBal's candidates that fit, best first.

        Candidates are ranked with the recomputation of the exact cut; then each gets the recomputation that it needs.
        """
        block_s = self.blocks.seconds + self.blocks.recompute_s * exact.recomputed
        anchor = greedy_cut(block_s, self.degrees.num_stages)
        cuts = cuts_near(block_s, self.sends(), anchor, radius=radius, num=NUM_SIMULATED_CUTS)
        candidates = [stages_of(self.blocks, stage_numbers(counts), self.limits) for counts in cuts]
        fitting = [stages for stages in candidates if not stages.shortfall_bytes]
        return [exact, *(stages for stages in fitting if not np.array_equal(stages.stage, exact.stage))]

    def fastest_beside(self, exact: Stages) -> tuple[Stages, int]:
        """The fastest of `cuts_beside` in a simulation of mean microbatches, and the number of cuts simulated."""
        degrees = self.degrees
        num_microbatches = min(degrees.num_microbatches, MICROBATCHES_TO_FILL * degrees.pp)
        program = add_communication(chain_passes(degrees, num_microbatches))

        def step_s(stages: Stages) -> float:
            return simulated_s(program, stages, self.send_s(stages), degrees.num_microbatches)

        cuts = self.cuts_beside(exact)
        return fastest_cut(cuts, step_s), len(cuts)


def chain_passes(degrees: Degrees, num_microbatches: int) -> Program:
    """The forward and backward passes of a pipeline in these degrees."""
    if degrees.schedule == "interleaved_1f1b":
        return interleaved_1f1b(degrees.pp, degrees.num_chunks, num_microbatches)
    generate = {"1f1b": one_f_one_b, "zb_h1": zb_h1, "zb_v": zb_v}[degrees.schedule]
    program: Program = generate(degrees.pp, num_microbatches)
    return program


def simulated_s(program: Program, stages: Stages, send_s: Float64Array, num_microbatches: int) -> float:
    """Seconds of a Program in which every microbatch is a mean one.

    Each of num_microbatches that the Program lacks adds the seconds of the slowest rank.
    """
    times = stage_times(stages.forward_s, stages.backward_s, weight_s=stages.weight_s, send_s=send_s[:, None])
    rank = [stage.rank for stage in program.stages]
    added_s = (num_microbatches - program.num_microbatches) * float(np.bincount(rank, stages.seconds).max())
    return simulate(program, times).makespan_s + added_s
