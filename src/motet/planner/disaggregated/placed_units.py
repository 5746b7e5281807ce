"""An allocation as a Plan: the stages of its units, their ranks, and an estimate of a step in closed form.

The estimate is that of MMScale section 4.2, with what the paper leaves out: recomputation, messages, collectives of the
ranks that really share a stage, and microbatches that differ. All microbatches that are in flight at once wait for the
longest of them.
"""

from __future__ import annotations

from functools import cached_property
from itertools import accumulate, pairwise
from math import gcd
from typing import Literal

import numpy as np

from motet.core.plan import Plan
from motet.core.spec import ModelSpec
from motet.core.workload import BACKBONE
from motet.planner.disaggregated.allocation import Allocation, Share
from motet.planner.disaggregated.unit_stages import UnitStages, cut_unit
from motet.planner.job import Job
from motet.planner.stages.recompute import RecomputeMode
from motet.schedule.check.fit import check_fit


def side_of(model: ModelSpec, name: str) -> Literal[-1, 0, 1]:
    """-1 for a module that feeds the backbone alone, 1 for one that the backbone alone feeds, 0 for all others and for
    the backbone itself."""
    edges = [edge for edge in model.edges if name in edge]
    if edges == [(name, BACKBONE)]:
        return -1
    return 1 if edges == [(BACKBONE, name)] else 0


class PlacedUnits:
    """An allocation with its stages, its ranks and what is recomputed.

    depth: stages on the longest way through all units. cuts: by name, the stages of each unit.
    """

    def __init__(self, job: Job, allocation: Allocation, mode: RecomputeMode) -> None:
        self.job, self.allocation = job, allocation
        depth = dict.fromkeys((-1, 0, 1), 0)
        for share in allocation.shares:
            side = side_of(job.model, share.name)
            depth[side] = max(depth[side], share.pp)
        self.depth = sum(depth.values())
        self.cuts: dict[str, UnitStages] = {}
        for share in allocation.shares:
            side = side_of(job.model, share.name)
            num_after = sum(depth[later] for later in (0, 1) if later > side)
            self.cuts[share.name] = cut_unit(job, share, num_after, allocation.num_microbatches, mode)

    @property
    def shortfall_bytes(self) -> float:
        """What the stage lacks that lacks most; 0 if all fit."""
        return max(cut.shortfall_bytes for cut in self.cuts.values())

    @property
    def backbone(self) -> Share:
        """What the backbone gets."""
        return self.cuts[BACKBONE].share

    @cached_property
    def what(self) -> str:
        """The degrees of all units, in words."""
        share = self.backbone
        first = f"backbone TP {share.tp}, PP {share.pp}, DP {share.dp}, microbatch {share.num_examples}"
        others = [
            f"{share.name} TP {share.tp}, PP {share.pp}, DP {share.dp}"
            for share in self.allocation.shares
            if share.name != BACKBONE
        ]
        return "; ".join([first, *others])

    @cached_property
    def plan(self) -> Plan:
        """The Plan. Units of larger TP have the first ranks, so each unit starts at a multiple of its TP, and no
        tensor-parallel group crosses nodes."""
        first_rank, next_rank = {}, 0
        for share in sorted(self.allocation.shares, key=lambda share: -share.tp):
            first_rank[share.name] = next_rank
            next_rank += share.num_ranks
        units = tuple(cut.unit(first_rank[name]) for name, cut in self.cuts.items())
        job = self.job
        plan = Plan(
            job.model,
            job.cluster,
            units,
            job.batch_size,
            self.backbone.num_examples,
            precision=job.precision,
            moments=job.moments,
        )
        check_fit(plan)
        return plan

    @cached_property
    def estimate_s(self) -> float:
        """Estimate of a step, with the unevenness of microbatches."""
        return self._passes_s(uneven=True) + self.once_s

    @property
    def unevenness(self) -> float:
        """The factor by which passes take longer because microbatches differ."""
        return self._passes_s(uneven=True) / self._passes_s(uneven=False)

    @cached_property
    def once_s(self) -> float:
        """Seconds of a step beside passes, in the slowest unit: collectives of data parallelism and the optimizer."""
        return max(self._once_s(cut) for cut in self.cuts.values())

    def _passes_s(self, *, uneven: bool) -> float:
        """W + (M - 1) * max S, as `allocate.py` has it."""
        pass_s, slowest_s = {-1: 0.0, 0: 0.0, 1: 0.0}, 0.0
        for name, cut in self.cuts.items():
            side = side_of(self.job.model, name)
            first, steady = (self._unevenness(cut.share, number) if uneven else 1.0 for number in (1, self.depth))
            pass_s[side] = max(pass_s[side], sum(cut.stage_s) * first + self._messages_s(cut))
            slowest_s = max(slowest_s, cut.slowest_s * steady)
        steady_s = (self.allocation.num_microbatches - 1) * slowest_s
        return sum(pass_s.values()) + steady_s

    def _unevenness(self, share: Share, in_flight: int) -> float:
        """The longest of in_flight microbatches over the mean one: averaged over the step, on the slowest island."""
        num_islands = gcd(*(each.dp for each in self.allocation.shares))
        # Replicas that share examples unevenly have more microbatches than there are of so many examples.
        num_microbatches = self.allocation.num_microbatches * share.dp
        seconds = np.resize(self.job.unevenness(share.name, share.num_examples), num_microbatches)
        slowest = seconds.reshape(-1, num_islands, share.dp // num_islands).max(axis=2)
        starts = np.arange(0, len(slowest), in_flight)
        lengths = np.diff(starts, append=len(slowest))
        return float((np.maximum.reduceat(slowest, starts) * lengths[:, None]).sum(axis=0).max()) / len(slowest)

    @property
    def bound_s(self) -> float:
        """A lower bound of a step: the slowest stage runs for all microbatches. The slowest replica takes no less than
        the mean."""
        slowest_s = max(cut.slowest_s * cut.share.filled for cut in self.cuts.values())
        return self.allocation.num_microbatches * slowest_s * (1 - 1e-9)

    def _messages_s(self, cut: UnitStages) -> float:
        """Seconds of one microbatch's messages from stage to stage, between the unit and the backbone, and of their
        gradients back."""
        job, unit = self.job, self.plan.unit_of(cut.share.name)
        sent = job.block_costs(cut.share.name, cut.share.num_examples, cut.share.tp).output_bytes
        backbone = self.plan.unit_of(BACKBONE)
        first_ranks = [unit.first_rank + stage * unit.dp * unit.tp for stage in range(unit.pp)]
        if unit is not backbone:
            first_ranks.append(backbone.first_rank)
        ends = list(accumulate(cut.counts))
        return 2 * sum(
            float(job.cost.send_seconds(sent[end - 1 : end], ranks)[0])
            for end, ranks in zip(ends, pairwise(first_ranks))
        )

    def _once_s(self, cut: UnitStages) -> float:
        """Gathering parameters, reducing gradients and the optimizer (ZeRO-1), in the slowest stage of a unit."""
        job, unit = self.job, self.plan.unit_of(cut.share.name)
        costs = job.block_costs(cut.share.name, cut.share.num_examples, unit.tp)
        precision = job.mixed_precision(pipeline=True)
        slowest_s = 0.0
        for stage, (first, stop) in enumerate(pairwise(accumulate(cut.counts, initial=0))):
            start = unit.first_rank + stage * unit.dp * unit.tp
            ranks = range(start, start + unit.dp * unit.tp, unit.tp)
            held, trainable = float(costs.parameters[first:stop].sum()), float(costs.trainable[first:stop].sum())
            once_s = job.cost.step_seconds(round(trainable / unit.dp))
            if unit.dp > 1:
                once_s += job.cost.gather_seconds(held * precision.compute, ranks)
                once_s += job.cost.reduce_scatter_seconds(trainable * precision.gradient, ranks)
            slowest_s = max(slowest_s, once_s)
        return slowest_s
