"""An allocation as a Plan: the stages of its units, their ranks, and what a step takes, in closed form.

MMScale section 4.2, with what it leaves out: what is recomputed, messages, collectives of the ranks that really share
a stage, and microbatches that are not alike. Of as many as are under way at once, all wait for the longest.
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
    """-1 for what feeds the backbone and nothing else, 1 for what it alone feeds; 0 for the backbone and for others."""
    edges = [edge for edge in model.edges if name in edge]
    if edges == [(name, BACKBONE)]:
        return -1
    return 1 if edges == [(BACKBONE, name)] else 0


class PlacedUnits:
    """An allocation with its stages, its ranks and what is recomputed."""

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
        return max(cut.shortfall_bytes for cut in self.cuts.values())

    @property
    def backbone(self) -> Share:
        return self.cuts[BACKBONE].share

    @cached_property
    def what(self) -> str:
        own = self.backbone
        first = f"TP {own.tp}, PP {own.pp}, DP {own.dp}, microbatch {own.num_examples}"
        others = [
            f"{share.name} TP {share.tp}, PP {share.pp}, DP {share.dp}"
            for share in self.allocation.shares
            if share.name != BACKBONE
        ]
        return "; ".join([first, *others])

    @cached_property
    def plan(self) -> Plan:
        """Units start at multiples of their TP, as those of larger TP come first: none crosses nodes in a group."""
        first_rank, reached = {}, 0
        for share in sorted(self.allocation.shares, key=lambda share: -share.tp):
            first_rank[share.name] = reached
            reached += share.num_ranks
        units = tuple(cut.unit(first_rank[name]) for name, cut in self.cuts.items())
        job = self.job
        plan = Plan(job.model, job.cluster, units, job.batch_size, self.backbone.num_examples, precision=job.precision)
        check_fit(plan)
        return plan

    @cached_property
    def estimate_s(self) -> float:
        """Section 4.2 with what is recomputed, messages, collectives of the fullest stage, and unlike microbatches."""
        return self._passes_s(uneven=True) + self.once_s

    @property
    def unevenness(self) -> float:
        """By how much passes take longer because microbatches are not alike."""
        return self._passes_s(uneven=True) / self._passes_s(uneven=False)

    @cached_property
    def once_s(self) -> float:
        return max(self._once_s(cut) for cut in self.cuts.values())

    def _passes_s(self, *, uneven: bool) -> float:
        pass_s, slowest_s = {-1: 0.0, 0: 0.0, 1: 0.0}, 0.0
        for name, cut in self.cuts.items():
            side = side_of(self.job.model, name)
            longer = [self._unevenness(cut.share, number) if uneven else 1.0 for number in (1, self.depth)]
            own_s = sum(cut.stage_s) * longer[0] + self._messages_s(cut)
            pass_s[side] = max(pass_s[side], own_s)
            slowest_s = max(slowest_s, cut.slowest_s * longer[1])
        steady_s = (self.allocation.num_microbatches - 1) * slowest_s
        return sum(pass_s.values()) + steady_s

    def _unevenness(self, share: Share, under_way: int) -> float:
        """What the longest of so many microbatches takes over the mean one, in the mean, on the slowest island."""
        num_islands = gcd(*(own.dp for own in self.allocation.shares))
        seconds = self.job.unevenness(share.name, share.num_examples)
        slowest = seconds.reshape(-1, num_islands, share.dp // num_islands).max(axis=2)
        starts = np.arange(0, len(slowest), under_way)
        lengths = np.diff(starts, append=len(slowest))
        return float((np.maximum.reduceat(slowest, starts) * lengths[:, None]).sum(axis=0).max()) / len(slowest)

    @property
    def bound_s(self) -> float:
        """Every rank runs its stage for all microbatches; of replicas, the slowest takes no less than the mean."""
        slowest_s = max(cut.slowest_s for cut in self.cuts.values())
        return self.allocation.num_microbatches * slowest_s * (1 - 1e-9)

    def _messages_s(self, cut: UnitStages) -> float:
        """From stage to stage and, of what is not the last unit, to the next; and of gradients back."""
        job, unit = self.job, self.plan.unit_of(cut.share.name)
        sent = job.block_costs(cut.share.name, cut.share.num_examples, cut.share.tp).output_bytes
        backbone = self.plan.unit_of(BACKBONE)
        firsts = [unit.first_rank + stage * unit.dp * unit.tp for stage in range(unit.pp)]
        if unit is not backbone:
            firsts.append(backbone.first_rank)
        ends = list(accumulate(cut.counts))
        return 2 * sum(
            float(job.cost.send_seconds(sent[end - 1 : end], ranks)[0]) for end, ranks in zip(ends, pairwise(firsts))
        )

    def _once_s(self, cut: UnitStages) -> float:
        """Of the slowest stage: parameters gathered, gradients reduced, the optimizer (ZeRO-1)."""
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
