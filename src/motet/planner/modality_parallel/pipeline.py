"""A job's modules side by side, each on ranks of its own, in given degrees: cuts, seconds, and the Plan."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import numpy as np

from motet.core.arrays import Float64Array, Int64Array
from motet.core.plan import Plan, Unit
from motet.core.workload import BACKBONE
from motet.planner.job import Job
from motet.planner.stages.blocks import Blocks, blocks_of, join
from motet.planner.stages.partition import partition
from motet.planner.stages.recompute import RecomputeMode
from motet.planner.stages.stage_costs import StageLimits, Stages, settle, stage_numbers
from motet.planner.stages.step_time import StageGraph, exposed_collectives_s, pipeline_s
from motet.planner.stages.unevenness import unevenness
from motet.schedule.generators.dag import distances


@dataclass(frozen=True)
class ModalityDegrees:
    """Degrees of modules side by side. num_stages: of each module, in the model's order."""

    num_stages: tuple[int, ...]
    tp: int
    dp: int
    microbatch_size: int
    num_microbatches: int


@dataclass(frozen=True, eq=False)
class ModalityPipeline:
    """The modules of a job side by side, in given degrees.

    aware: whether cuts count what is frozen; if not, they count forward alone.
    """

    job: Job
    degrees: ModalityDegrees
    mode: RecomputeMode = "least"
    aware: bool = True

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The modules, in the model's order."""
        return tuple(module.name for module in self.job.model.modules)

    @cached_property
    def blocks(self) -> Blocks:
        """The blocks of all modules; at a cut, each module sends its own output alone."""
        degrees = self.degrees
        return join(
            tuple(blocks_of(self.job, (name,), degrees.microbatch_size, degrees.tp, degrees.dp) for name in self.names)
        )

    @cached_property
    def limits(self) -> StageLimits:
        """Memory and schedule of the stages."""
        behind = distances(self.first[-1], self._edges)
        num_held = [min(number + 1, self.degrees.num_microbatches) for number in behind]
        return StageLimits.of_one_stage(num_held, self.job.capacity_bytes, self.mode)

    @cached_property
    def first(self) -> tuple[int, ...]:
        """The first stage of each module, and the number of all stages at the end."""
        return tuple(accumulate(self.degrees.num_stages, initial=0))

    @cached_property
    def graph(self) -> StageGraph:
        """The stages of each module in a row, joined as the model's edges say."""
        degrees, index = self.degrees, {name: number for number, name in enumerate(self.names)}
        before, _ = self._sides
        deepest_encoder = max((degrees.num_stages[index[name]] for name in before), default=0)
        pp = deepest_encoder + degrees.num_stages[index[BACKBONE]]
        uneven = unevenness(self.job, degrees.microbatch_size, degrees.tp, ("1f1b", pp, degrees.dp))
        return StageGraph("1f1b", degrees.num_microbatches, self.limits.rank, self._edges, uneven)

    @cached_property
    def _edges(self) -> tuple[tuple[int, int], ...]:
        """Between stages that feed each other."""
        index = {name: number for number, name in enumerate(self.names)}
        edges = [
            (stage, stage + 1) for first, stop in zip(self.first, self.first[1:]) for stage in range(first, stop - 1)
        ]
        edges += [(self.first[index[source] + 1] - 1, self.first[index[sink]]) for source, sink in self.job.model.edges]
        return tuple(edges)

    @cached_property
    def _sides(self) -> tuple[list[str], list[str]]:
        """The encoders, which feed the backbone alone; and the generators, which the backbone alone feeds."""
        model = self.job.model
        before = [source for source, sink in model.edges if sink == BACKBONE and not model.sources(source)]
        after = [sink for source, sink in model.edges if source == BACKBONE and model.sources(sink) == (BACKBONE,)]
        return before, after

    def send_s(self, stages: Stages) -> Float64Array:
        """[num_edges]: seconds of a message between stages that feed each other."""
        cost, num_ranks = self.job.cost, self.degrees.dp * self.degrees.tp
        seconds = []
        for source, sink in self.graph.edges:
            ends = source * num_ranks, sink * num_ranks
            seconds.append(float(cost.send_seconds(stages.output_bytes[source : source + 1], ends)[0]))
        return np.array(seconds)

    def step_s(self, stages: Stages) -> float:
        """Seconds of a step in closed form."""
        tp, size = self.degrees.tp, self.degrees.dp * self.degrees.tp
        data_ranks = [range(stage * size, (stage + 1) * size, tp) for stage in range(self.first[-1])]
        passes_s = pipeline_s(self.graph, stages, self.send_s(stages))
        return passes_s + exposed_collectives_s(self.job, stages, self.limits.rank, data_ranks)

    def cut(self, block_s: Float64Array) -> Int64Array:
        """The stage of each block: each module in the most even cut (`partition`)."""
        seconds = block_s if self.aware else self.blocks.forward_s
        cuts = [
            first + stage_numbers(partition(seconds[self.blocks.owner == module].tolist(), number))
            for module, (first, number) in enumerate(zip(self.first, self.degrees.num_stages))
        ]
        return np.concatenate(cuts)

    def settled(self) -> Stages:
        """The most even cut, with the recomputation that it needs (`settle`)."""
        return settle(self.blocks, self.limits, self.cut, self.step_s)

    def plan(self, stages: Stages) -> Plan:
        """The Plan with these stages, a unit for each module."""
        job, degrees = self.job, self.degrees
        units, first_rank = [], 0
        for module, (name, number) in enumerate(zip(self.names, degrees.num_stages)):
            span = slice(self.first[module], self.first[module + 1])
            recompute = stages.recompute[span]
            recompute = recompute if any(recompute) else ()
            layers = stages.layers[span]
            units.append(Unit(name, layers, first_rank, degrees.dp, number, degrees.tp, recompute=recompute, zero=1))
            first_rank += units[-1].num_ranks
        return Plan(
            job.model,
            job.cluster,
            tuple(units),
            job.batch_size,
            degrees.microbatch_size,
            "1f1b",
            precision=job.precision,
            moments=job.moments,
        )

    @property
    def words(self) -> str:
        """The degrees in words."""
        degrees = self.degrees
        stages = ", ".join(f"{name} {number}" for name, number in zip(self.names, degrees.num_stages))
        return f"stages {stages}; TP {degrees.tp}, DP {degrees.dp}, 1F1B, microbatches of {degrees.microbatch_size}"
