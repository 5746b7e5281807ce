"""All modules in one chain of stages, encoders first, cut where the stages are even.

This is Megatron-LM balanced (Optimus appendix B, corrected in `partition.py`) and OmniBal (section 4.2,
`anchored_cut.py`): tensor parallelism within a node, pipelines, data parallelism over the rest, microbatches and
schedules. The seconds of a block are those of forward, of backward, which depends on what is frozen, and of
recomputation (`stage_costs.py`).

1. Cut: degrees are cut by `partition`, those that are fastest at best first (`feasible_degrees.py`), until no others
   can be among the best.
2. Choose: the best of each schedule and tensor-parallel degree, and all that are about as good as the best.
3. Refine: where each rank has one stage, OmniBal's candidates are simulated too, and the fastest cut is taken.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import cache, lru_cache
from typing import NamedTuple

import numpy as np

from motet.core.arrays import Float64Array, Int64Array
from motet.core.plan import ScheduleKind
from motet.core.words import size_words
from motet.planner.candidate import CHAIN, Candidate, Pins, RuledOut
from motet.planner.chain.anchored_cut import by_layers, by_parameters
from motet.planner.chain.feasible_degrees import FeasibleDegrees
from motet.planner.chain.pipeline import MICROBATCHES_TO_FILL, ChainPipeline, chain_passes
from motet.planner.degrees import Degrees
from motet.planner.job import Job
from motet.planner.module_pins import common_pins, unmet_pin
from motet.planner.stages.blocks import blocks_of
from motet.planner.stages.stage_costs import StageLimits, Stages
from motet.planner.stages.step_time import work_s
from motet.schedule import Program

MAX_CHAINS, MAX_RIVALS = 6, 6
_MAX_RULED_OUT = 4
_MAX_CUTS = 40
MAX_CUTS_PER_KIND = 5
"""The most degrees that are cut: _MAX_CUTS in all, MAX_CUTS_PER_KIND of a schedule and tensor-parallel degree. If none
of them fits, _MAX_CUTS more are cut: those that need the least memory."""
_NUM_PROGRAMS = 32
"""Programs that are kept."""
RIVAL_RATIO = 1.03
"""The factor by which estimates of two cuts may be wrong against each other. What is within it of the best is proposed
beside the best."""


def propose_chain(job: Job, pins: Pins) -> Iterator[Candidate | RuledOut]:
    """The best chains that fit, least estimate first; then the nearest of those that do not."""
    candidates, ruled_out = ChainSearch(job, common_pins(pins)).run()
    yield from candidates
    yield from ruled_out


class _CutChain(NamedTuple):
    """Degrees and their cut. rank_by: seconds of a step if it fits; bytes that it lacks if not."""

    rank_by: float
    degrees: Degrees
    stages: Stages


class ChainSearch:
    """A search over the degrees of a job's chain, under pins.

    best, nearest: by tensor-parallel degree and schedule, the best that fits, and the nearest of what does not.
    unpinned:      even cuts in which a module does not have the degrees that are pinned.
    """

    def __init__(self, job: Job, pins: Pins) -> None:
        self.job, self.pins = job, pins
        # Ranks of chains share no items by themselves: `field_pins.py` takes those of a pinned cp from replicas.
        self.pinned = {name: replace(degrees, cp=None) for name, degrees in pins.modules.items()}
        self.names = tuple(module.name for module in job.model.modules)
        self.feasible = FeasibleDegrees(job, pins, self.names)
        self.best: dict[tuple[int, ScheduleKind], _CutChain] = {}
        self.nearest: dict[tuple[int, ScheduleKind], _CutChain] = {}
        self.fitting: list[_CutChain] = []
        self.unpinned: list[RuledOut] = []
        self._limits = cache(self._limits_of)

    def run(self) -> tuple[list[Candidate], list[RuledOut]]:
        """The best chains, least estimate first, and what does not fit."""
        self._cut_fastest()
        if not self.best:
            self._cut_smallest()
        candidates = sorted(map(self._candidate, self._chosen()), key=lambda candidate: candidate.estimate_s)
        nearest = sorted(self.nearest.values(), key=lambda chain: chain.rank_by)[:_MAX_RULED_OUT]
        return candidates, [*map(self._ruled_out, nearest), *self.feasible.ruled_out, *self.unpinned[:_MAX_RULED_OUT]]

    def _cut_fastest(self) -> None:
        """Cut degrees, those that are fastest at best first, until no others can be among the best."""
        num_cuts: Counter[tuple[int, ScheduleKind]] = Counter()
        for at_best_s, degrees in self.feasible.by_seconds():
            best_s = sorted(chain.rank_by for chain in self.best.values())[:MAX_CHAINS]
            if num_cuts.total() == _MAX_CUTS or (len(best_s) == MAX_CHAINS and at_best_s >= best_s[-1]):
                break
            kind = (degrees.tp, degrees.schedule)
            can_win = kind not in self.best or at_best_s < self.best[kind].rank_by
            if num_cuts[kind] < MAX_CUTS_PER_KIND and can_win:
                num_cuts[kind] += 1
                self._cut(degrees)

    def _cut_smallest(self) -> None:
        """Cut degrees, those that need the least memory first, until one fits."""
        for degrees in self.feasible.by_memory()[:_MAX_CUTS]:
            if self.best:
                break
            self._cut(degrees)

    def _cut(self, degrees: Degrees) -> None:
        pipeline = self.pipeline(degrees)
        stages = pipeline.settled()
        if why := unmet_pin(pipeline.plan(stages), self.pinned):
            self.unpinned.append(RuledOut(CHAIN, degrees.words, f"cut evenly, {why}, as is pinned."))
            return
        chain = _CutChain(stages.shortfall_bytes or pipeline.step_s(stages), degrees, stages)
        by_kind = self.nearest if stages.shortfall_bytes else self.best
        if not stages.shortfall_bytes:
            self.fitting.append(chain)
        kind = (degrees.tp, degrees.schedule)
        if kind not in by_kind or chain.rank_by < by_kind[kind].rank_by:
            by_kind[kind] = chain

    def _chosen(self) -> list[_CutChain]:
        """The best of each kind, and all that are about as good as the best of all."""
        best = sorted(self.best.values(), key=lambda chain: chain.rank_by)[:MAX_CHAINS]
        chosen = {chain.degrees for chain in best}
        others = sorted(self.fitting, key=lambda chain: chain.rank_by)
        rivals = [
            chain for chain in others if chain.degrees not in chosen and chain.rank_by <= RIVAL_RATIO * best[0].rank_by
        ]
        return best + rivals[:MAX_RIVALS]

    def pipeline(self, degrees: Degrees) -> ChainPipeline:
        """The chain in these degrees."""
        num_microbatches = min(degrees.num_microbatches, MICROBATCHES_TO_FILL * degrees.pp)
        limits = self._limits(replace(degrees, dp=1, tp=1, microbatch_size=1, num_microbatches=num_microbatches))
        blocks = blocks_of(self.job, self.names, degrees.microbatch_size, degrees.tp, degrees.dp)
        return ChainPipeline(self.job, degrees, limits, blocks, self.feasible.uneven(degrees))

    def _limits_of(self, degrees: Degrees) -> StageLimits:
        capacity_bytes, mode = self.job.capacity_bytes, self.pins.recompute or "least"
        if degrees.schedule in ("1f1b", "zb_h1"):
            from_end = range(degrees.pp, 0, -1) if degrees.schedule == "1f1b" else [degrees.pp] * degrees.pp
            num_held = [min(number, degrees.num_microbatches) for number in from_end]
            return StageLimits.of_one_stage(num_held, capacity_bytes, mode)
        return StageLimits.of(_passes(degrees), capacity_bytes, mode)

    def _candidate(self, chain: _CutChain) -> Candidate:
        degrees, exact = chain.degrees, chain.stages
        pipeline = self.pipeline(degrees)
        has_one_stage = 1 < degrees.num_stages == degrees.pp
        stages, num_simulated = pipeline.fastest_beside(exact) if has_one_stage else (exact, 1)
        if unmet_pin(pipeline.plan(stages), self.pinned):
            stages = exact
        return Candidate(
            CHAIN,
            degrees.words,
            pipeline.plan(stages),
            pipeline.step_s(stages),
            work_s(pipeline.graph, stages),
            lambda: _facts(pipeline, exact, stages, num_simulated),
        )

    def _ruled_out(self, chain: _CutChain) -> RuledOut:
        degrees, stages = chain.degrees, chain.stages
        rank = int(np.argmax(stages.fullness))
        recomputed = "with nothing recomputed" if self.pins.recompute == "none" else "with all layers recomputed"
        why = f"pipeline rank {rank} of {degrees.pp} lacks {size_words(stages.shortfall_bytes)} {recomputed}."
        return RuledOut(CHAIN, degrees.words, why, stages.shortfall_bytes)


@lru_cache(_NUM_PROGRAMS)
def _passes(degrees: Degrees) -> Program:
    """The passes of all microbatches of a chain; searches of smaller clusters ask for the same."""
    return chain_passes(degrees, degrees.num_microbatches)


def _facts(pipeline: ChainPipeline, exact: Stages, stages: Stages, num_simulated: int) -> Iterator[str]:
    blocks, limits, num_stages = pipeline.blocks, pipeline.limits, stages.num_stages
    if num_stages > 1:
        cut = _busiest_share(blocks.seconds + blocks.recompute_s * stages.recomputed, stages.stage, limits)
        layers = _busiest_share(blocks.seconds, by_layers(blocks, num_stages), limits)
        parameters = _busiest_share(blocks.seconds, by_parameters(blocks, num_stages), limits)
        yield (
            f"Cut by the seconds of forward and backward, the slowest rank takes {cut:.2f} times the mean; "
            f"cut into equal layers {layers:.2f} times, into equal parameters {parameters:.2f}."
        )
    if (stages.stage != exact.stage).any():
        yield f"Of {num_simulated} cuts that were simulated, the fastest is not the most even one."


def _busiest_share(block_s: Float64Array, stage: Int64Array, limits: StageLimits) -> float:
    """Seconds of the slowest pipeline rank / mean over pipeline ranks."""
    rank_s = np.bincount(limits.rank[stage], block_s, len(limits.moments))
    return float(rank_s.max() / rank_s.mean())
