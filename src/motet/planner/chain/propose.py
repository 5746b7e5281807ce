"""All modules in one chain of stages, encoders first, cut where the stages are even.

Megatron-LM balanced (Optimus appendix B, corrected in `partition.py`) and OmniBal (section 4.2, `anchor.py`): tensor
parallelism within a node, pipelines, data parallelism over the rest, microbatches and schedules. What a block takes is
forward and backward under what is frozen, and where, and what of it is recomputed (`stages.py`).

Degrees are taken by what they would take at best (`degrees.py`), until no other can be among the best, and cut by
`partition`. The best of each schedule and tensor-parallel degree are proposed, and what is about as good as the best of
all. If a rank has one stage, OmniBal's candidates are cut too, and a simulation of mean microbatches decides.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise

import numpy as np

from motet.core.arrays import Float64Array, Int64Array
from motet.core.plan import Plan, ScheduleKind, Unit
from motet.planner.candidate import CHAIN, Candidate, Pins, RuledOut, size_words
from motet.planner.chain import anchored_cut
from motet.planner.degrees import Degrees, FeasibleDegrees
from motet.planner.job import Job
from motet.planner.stages.blocks import Blocks, blocks_of
from motet.planner.stages.partition import partition
from motet.planner.stages.stage_costs import StageLimits, Stages, settle, stage_numbers, stages_of
from motet.planner.stages.step_time import StageGraph, exposed_collectives_s, pipeline_s, work_s
from motet.schedule import (
    Program,
    add_communication,
    interleaved_1f1b,
    one_f_one_b,
    zb_h1,
    zb_v,
)
from motet.simulate import simulate, stage_times

NUM_CANDIDATES, NUM_RIVALS = 6, 6
_NUM_RULED_OUT = 4
_NUM_CUT = 40
MAX_CUTS_PER_KIND = 5
"""Degrees that are cut: in all, and of a schedule and tensor-parallel degree. Where none of them fits, as many more of
those that need the least memory."""
RIVAL_RATIO = 1.03
"""By which estimates of two cuts can be wrong against each other: what is so near to the best is proposed beside it."""
NUM_SIMULATED_CUTS = 12
"""Of OmniBal's candidates that are simulated (section 5.2: 10 to 15)."""

_FILLED = 2
"""Microbatches by pipeline rank that fill a pipeline: with more, neither what it holds nor its bubbles change."""


def propose_chain(job: Job, pins: Pins) -> Iterator[Candidate | RuledOut]:
    """The best chains that fit, best estimate first; then the nearest of those that do not."""
    found, ruled_out = ChainSearch(job, pins).run()
    yield from found
    yield from ruled_out


@dataclass(frozen=True, eq=False)
class ChainPipeline:
    """A job's chain of modules in some degrees."""

    job: Job
    degrees: Degrees
    room: StageLimits
    blocks: Blocks
    uneven: float

    @property
    def flow(self) -> StageGraph:
        own, num_stages = self.degrees, len(self.room.rank)
        return StageGraph(
            own.schedule, own.num_microbatches, self.room.rank, tuple(pairwise(range(num_stages))), self.uneven
        )

    def sends(self) -> Float64Array:
        """Seconds of a message at each edge if the chain is cut there after each block, [num_edges, num_blocks]."""
        own, size_bytes = self.degrees, self.blocks.output_bytes
        first = [rank * own.dp * own.tp for rank in self.room.rank.tolist()]
        by_node: dict[bool, Float64Array] = {}
        rows = [np.zeros(0)] * (len(first) - 1)
        for number, ends in enumerate(pairwise(first)):
            near = self.job.cluster.node_of(ends[0]) == self.job.cluster.node_of(ends[1])
            if near not in by_node and ends[0] != ends[1]:
                by_node[near] = self.job.cost.send_seconds(size_bytes, ends)
            rows[number] = by_node[near] if ends[0] != ends[1] else np.zeros(len(size_bytes))
        return np.stack(rows) if rows else np.zeros((0, len(size_bytes)))

    def send_s(self, stages: Stages) -> Float64Array:
        """[num_edges]"""
        last = np.searchsorted(stages.stage, np.arange(1, stages.num_stages)) - 1
        found: Float64Array = self.sends()[np.arange(len(last)), last]
        return found

    def step_s(self, stages: Stages) -> float:
        own = self.degrees
        data_ranks = [
            range(rank * own.dp * own.tp, (rank + 1) * own.dp * own.tp, own.tp) for rank in self.room.rank.tolist()
        ]
        passes_s = pipeline_s(self.flow, stages, self.send_s(stages))
        return passes_s + exposed_collectives_s(self.job, stages, self.room.rank, data_ranks)

    def cut(self, block_s: Float64Array) -> Int64Array:
        """The stage of each block: the exact optimum."""
        own = self.degrees
        counts = partition(block_s.tolist(), own.pp, num_chunks=own.num_chunks, folded=own.schedule == "zb_v")
        return stage_numbers(counts)

    def settled(self) -> Stages:
        return settle(self.blocks, self.room, self.cut, self.step_s)

    def unit(self, stages: Stages) -> Unit:
        own = self.degrees
        return Unit("all", stages.layers, 0, own.dp, own.pp, own.tp, recompute=stages.recompute, zero=1)

    def plan(self, stages: Stages) -> Plan:
        """Of these stages in the chain's degrees."""
        own, job = self.degrees, self.job
        return Plan(
            job.model,
            job.cluster,
            (self.unit(stages),),
            job.batch_size,
            own.microbatch_size,
            own.schedule,
            precision=job.precision,
        )

    def near(self, exact: Stages, *, radius: int = 2) -> list[Stages]:
        """The exact cut, and OmniBal's candidates that fit, best first. Candidates are ranked with the recomputation of
        the exact cut, and each gets its own then."""
        own = self.degrees
        block_s = self.blocks.seconds + self.blocks.recompute_s * exact.recomputed
        start = anchored_cut.greedy_cut(block_s, own.num_stages)
        cuts = anchored_cut.cuts_near(block_s, self.sends(), start, radius=radius, num=NUM_SIMULATED_CUTS)
        settled = [stages_of(self.blocks, stage_numbers(counts), self.room) for counts in cuts]
        other = [
            stages for stages in settled if not stages.shortfall_bytes and not np.array_equal(stages.stage, exact.stage)
        ]
        return [exact, *other]

    def decided(self, exact: Stages) -> tuple[Stages, int]:
        """Of those, the one that is fastest in a simulation of mean microbatches; and how many were simulated."""
        own = self.degrees
        program = add_communication(passes(own, num_microbatches=min(own.num_microbatches, _FILLED * own.pp)))

        def step_s(stages: Stages) -> float:
            return simulated_s(program, stages, self.send_s(stages), own.num_microbatches)

        near = self.near(exact)
        return anchored_cut.fastest_cut(near, step_s), len(near)


def passes(degrees: Degrees, num_microbatches: int) -> Program:
    """Of a pipeline of these degrees."""
    if degrees.schedule == "interleaved_1f1b":
        return interleaved_1f1b(degrees.pp, degrees.num_chunks, num_microbatches)
    generate = {"1f1b": one_f_one_b, "zb_h1": zb_h1, "zb_v": zb_v}[degrees.schedule]
    program: Program = generate(degrees.pp, num_microbatches)
    return program


def simulated_s(program: Program, stages: Stages, send_s: Float64Array, num_microbatches: int) -> float:
    """Of passes that all take what a mean microbatch takes; those that the Program has not, at the slowest rank's."""
    weight = np.where(stages.blocks.trainable > 0, stages.blocks.backward_s / 2, 0.0)
    times = stage_times(stages.forward_s, stages.backward_s, weight_s=stages.sums(weight), send_s=send_s[:, None])
    rank = [stage.rank for stage in program.stages]
    more = (num_microbatches - program.num_microbatches) * float(np.bincount(rank, stages.seconds).max())
    return simulate(program, times).makespan_s + more


class ChainSearch:
    """Over degrees. Of one job, under pins."""

    def __init__(self, job: Job, pins: Pins) -> None:
        self.job, self.pins = job, pins
        self.names = tuple(module.name for module in job.model.modules)
        self.considered = FeasibleDegrees(job, pins, self.names)
        self.room = cache(self._room)
        self.best: dict[tuple[int, ScheduleKind], tuple[float, Degrees, Stages]] = {}
        self.full: dict[tuple[int, ScheduleKind], tuple[float, Degrees, Stages]] = {}
        self.fitting: list[tuple[float, Degrees, Stages]] = []

    def run(self) -> tuple[list[Candidate], list[RuledOut]]:
        """The best few of all degrees, and what does not fit."""
        num_cut: Counter[tuple[int, ScheduleKind]] = Counter()
        for at_best_s, degrees in self.considered.by_seconds():
            limit = sorted(step_s for step_s, _, _ in self.best.values())[:NUM_CANDIDATES]
            if num_cut.total() == _NUM_CUT or (len(limit) == NUM_CANDIDATES and at_best_s >= limit[-1]):
                break
            key = (degrees.tp, degrees.schedule)
            if num_cut[key] < MAX_CUTS_PER_KIND and (key not in self.best or at_best_s < self.best[key][0]):
                num_cut[key] += 1
                self._cut(degrees)
        for degrees in self.considered.by_memory()[:_NUM_CUT]:
            if self.best:
                break
            self._cut(degrees)
        ranked = sorted(self.best.values(), key=lambda entry: entry[0])[:NUM_CANDIDATES]
        chosen = {degrees for _, degrees, _ in ranked}
        others = sorted(self.fitting, key=lambda entry: entry[0])
        near = [entry for entry in others if entry[1] not in chosen and entry[0] <= RIVAL_RATIO * ranked[0][0]]
        ranked += near[:NUM_RIVALS]
        candidates = sorted(
            (self._candidate(degrees, stages) for _, degrees, stages in ranked), key=lambda found: found.estimate_s
        )
        nearest = sorted(self.full.values(), key=lambda entry: entry[0])[:_NUM_RULED_OUT]
        ruled_out = [self._ruled_out(degrees, stages) for _, degrees, stages in nearest]
        return candidates, [*ruled_out, *self.considered.ruled_out]

    def _cut(self, degrees: Degrees) -> None:
        """Cut, and keep what is best of the schedule and tensor-parallel degree: of what fits, and of what does not."""
        pipeline = self.pipeline(degrees)
        stages = pipeline.settled()
        entry = (stages.shortfall_bytes or pipeline.step_s(stages), degrees, stages)
        of_kind = self.full if stages.shortfall_bytes else self.best
        if not stages.shortfall_bytes:
            self.fitting.append(entry)
        key = (degrees.tp, degrees.schedule)
        if key not in of_kind or entry[0] < of_kind[key][0]:
            of_kind[key] = entry

    def pipeline(self, degrees: Degrees) -> ChainPipeline:
        own = degrees
        num = min(own.num_microbatches, _FILLED * own.pp)
        room = self.room(replace(own, dp=1, tp=1, microbatch_size=1, num_microbatches=num))
        blocks = blocks_of(self.job, self.names, own.microbatch_size, own.tp, own.dp)
        return ChainPipeline(self.job, own, room, blocks, self.considered.uneven(own))

    def _room(self, degrees: Degrees) -> StageLimits:
        program = passes(degrees, degrees.num_microbatches)
        return StageLimits.of(program, self.job.capacity_bytes, self.pins.recompute or "least")

    def _candidate(self, degrees: Degrees, exact: Stages) -> Candidate:
        pipeline = self.pipeline(degrees)
        stages, num_simulated = pipeline.decided(exact) if 1 < degrees.num_stages == degrees.pp else (exact, 1)
        return Candidate(
            CHAIN,
            degrees.words,
            pipeline.plan(stages),
            pipeline.step_s(stages),
            work_s(pipeline.flow, stages),
            tuple(_facts(pipeline, exact, stages, num_simulated)),
        )

    def _ruled_out(self, degrees: Degrees, stages: Stages) -> RuledOut:
        rank = int(np.argmax(stages.fullness))
        recomputed = "with nothing recomputed" if self.pins.recompute == "none" else "with all layers recomputed"
        why = f"pipeline rank {rank} of {degrees.pp} lacks {size_words(stages.shortfall_bytes)} {recomputed}."
        return RuledOut(CHAIN, degrees.words, why, stages.shortfall_bytes)


def _facts(pipeline: ChainPipeline, exact: Stages, stages: Stages, num_simulated: int) -> Iterator[str]:
    blocks, room, num_stages = pipeline.blocks, pipeline.room, stages.num_stages
    if num_stages > 1:
        others = {
            "layers": anchored_cut.by_layers(blocks, num_stages),
            "parameters": anchored_cut.by_parameters(blocks, num_stages),
        }
        ratios: Mapping[str, float] = {name: _unevenness(blocks.seconds, cut, room) for name, cut in others.items()}
        own = _unevenness(blocks.seconds + blocks.recompute_s * stages.recomputed, stages.stage, room)
        yield (
            f"Cut by the seconds of forward and backward, the slowest rank takes {own:.2f} times the mean; "
            f"cut into equal layers {ratios['layers']:.2f} times, into equal parameters {ratios['parameters']:.2f}."
        )
    if (stages.stage != exact.stage).any():
        yield f"Of {num_simulated} cuts that were simulated, the fastest is not the most even one."


def _unevenness(block_s: Float64Array, stage: Int64Array, room: StageLimits) -> float:
    """The slowest rank by the mean one."""
    device = np.bincount(room.rank[stage], block_s, len(room.moments))
    return float(device.max() / device.mean())
