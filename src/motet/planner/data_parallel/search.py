"""The best of colocated data parallelism on some ranks: sharding, examples at a time and recomputation together.

Everything is first weighed as if balance were perfect, which takes no placement; the best of it is then placed as
training and the simulator place it, and weighed again.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Literal

from motet.core.plan import Plan, Unit
from motet.core.workload import BACKBONE
from motet.planner.candidate import Pins
from motet.planner.data_parallel.loads import EvenBatch, Load, ModuleState, assigned_load, fit_recomputation, state_of
from motet.planner.data_parallel.zero import ShardedUnit, ZeroSharding, shardings, step_s
from motet.planner.degrees import most_replicas
from motet.planner.job import Job
from motet.planner.stages.recompute import Fit, RecomputeMode

Balance = Literal["off", "joint", "per_phase", "auto"]
_MAX_ALIKE = 2
"""Shardings that are proposed beside the best."""
_FAR = 1.3
"""How much slower than the best a step may be in perfect balance, and still be the best when it is placed."""
_NEAR = 1.03
"""How much slower a step may be and still be about as fast."""
_MAX_ROUNDS = 5
"""Placements of a sharding."""


@dataclass(frozen=True, eq=False)
class ShardingEstimate:
    """A sharding with microbatches of a size: what is recomputed, and what a step is estimated to take."""

    sharding: ZeroSharding
    size: int
    fit: Fit
    estimate_s: float


@dataclass(frozen=True, eq=False)
class PlacedSharding:
    """The same where items are placed, for what is recomputed."""

    ranks: DataParallelSearch
    load: Load
    weighed: ShardingEstimate


class DataParallelSearch:
    """The ranks that share no example: as many of a cluster as the batch divides among, or what is pinned; tp of its
    ranks for each of them."""

    def __init__(self, job: Job, pins: Pins, tp: int, even: EvenBatch) -> None:
        self.job, self.pins, self.tp, self.even = job, pins, tp, even
        self.dp = pins.dp or most_replicas(job, tp, pins)
        self.balance: Balance = "off" if self.dp == 1 else pins.balance or "auto"
        self.mode: RecomputeMode = pins.recompute or "least"
        self._sharded, self._states, self._loads = cache(self._shard), cache(self._hold), cache(self._place)
        self._unbalanced = cache(self._leave)

    @cached_property
    def sizes(self) -> list[int]:
        """Examples that a rank can take at a time, the most first."""
        per_rank = self.job.batch_size // self.dp
        fitting = [size for size in range(per_rank, 0, -1) if per_rank % size == 0]
        return [size for size in fitting if self.pins.allow(microbatch_size=size)]

    def unit(self, sharding: ZeroSharding, recompute: Mapping[str, int] | None = None) -> Unit:
        """The one unit of a Plan. recompute: blocks of each module."""
        order = [module.name for module in self.job.model.modules if module.name != BACKBONE] + [BACKBONE]
        stage = {name: len(self.job.model.module(name).blocks) for name in order}
        chosen = {name: count for name, count in (recompute or {}).items() if count}
        return Unit(
            "all",
            (stage,),
            dp=self.dp,
            tp=self.tp,
            recompute=(chosen,) if chosen else (),
            zero=sharding.zero,
            shard_size=sharding.shard_size,
        )

    def plan(self, unit: Unit, size: int) -> Plan:
        job = self.job
        whole = Plan(job.model, job.cluster, (unit,), job.batch_size, size, "data_parallel", precision=job.precision)
        return replace(whole, balance=self.balance)

    def sharded(self, sharding: ZeroSharding) -> ShardedUnit:
        found: ShardedUnit = self._sharded(sharding)
        return found

    def _shard(self, sharding: ZeroSharding) -> ShardedUnit:
        return ShardedUnit.of(self.job, self.unit(sharding))

    def state(self, sharding: ZeroSharding) -> Mapping[str, ModuleState]:
        found: Mapping[str, ModuleState] = self._states(sharding)
        return found

    def _hold(self, sharding: ZeroSharding) -> Mapping[str, ModuleState]:
        return state_of(self.job, self.unit(sharding))

    def load(self, size: int, recompute: Mapping[str, int]) -> Load:
        """Placed as the simulator does it for this recomputation."""
        found: Load = self._loads(size, tuple(recompute.items()))
        return found

    def _place(self, size: int, recompute: tuple[tuple[str, int], ...]) -> Load:
        return assigned_load(self.job, self.plan(self.unit(ZeroSharding(3, 0), dict(recompute)), size))

    def unbalanced(self, size: int, batch_size: int) -> Load:
        """Examples where they are drawn, of the first batch_size of the batch."""
        found: Load = self._unbalanced(size, batch_size)
        return found

    def _leave(self, size: int, batch_size: int) -> Load:
        plan = self.plan(self.unit(ZeroSharding(3, 0)), size)
        return assigned_load(self.job, replace(plan, batch_size=batch_size, balance="off"))

    def fit(self, load: Load, sharding: ZeroSharding, mode: RecomputeMode | None = None) -> Fit:
        return fit_recomputation(load, self.state(sharding), self.job.capacity_bytes, mode or self.mode)

    def step_s(self, load: Load, sharding: ZeroSharding, recompute: Mapping[str, int]) -> float:
        return step_s(load, self.sharded(sharding), recompute, exchanged=self.balance in ("per_phase", "auto"))

    def floor_s(self) -> float:
        """Computation with all examples at a time and no recomputation: no step is estimated to take less."""
        return self.even.load(self.dp, 1, self.tp).waiting_s({})

    def weigh_evenly(self, best_s: float, far: float = _FAR) -> tuple[list[ShardingEstimate], list[ShardingEstimate]]:
        """All shardings and sizes, as if balance were perfect: those that fit, best first, and the rest. Left out are
        those that, if they recomputed nothing, would not beat best_s, or be behind the best that fits by a factor far.
        """
        per_rank = self.job.batch_size // self.dp
        loads = {size: self.even.load(self.dp, per_rank // size, self.tp) for size in self.sizes}
        every = list(shardings(self.job, self.dp, self.tp))
        pairs = [
            (self.step_s(load, sharding, {}), sharding, size) for sharding in every for size, load in loads.items()
        ]
        fitting: list[ShardingEstimate] = []
        lacking: list[ShardingEstimate] = []
        for floor_s, sharding, size in sorted(pairs, key=lambda pair: pair[0]):
            if floor_s >= min(best_s, far * min((one.estimate_s for one in fitting), default=math.inf)):
                break
            chosen = self.fit(loads[size], sharding)
            one = ShardingEstimate(sharding, size, chosen, self.step_s(loads[size], sharding, chosen.recompute[0]))
            (lacking if chosen.shortfall_bytes else fitting).append(one)
        fitting.sort(key=lambda one: one.estimate_s)
        lacking.sort(key=lambda one: (one.fit.shortfall_bytes, one.size))
        return fitting, lacking

    def place(self, weighed: Sequence[ShardingEstimate], best_s: float) -> Iterator[PlacedSharding]:
        """Sizes as they are balanced, each with its best sharding, if perfect balance would make it better than what
        was found before; and of the best of all the next best shardings. What does not fit is given as well.

        Of sizes that are about as good in perfect balance the largest comes first, which is the nearest to it: fewer
        examples at a time are taken to miss it by as large a factor at least.
        """
        best: PlacedSharding | None = None
        missed_by: dict[int, float] = {}
        firsts = {one.size: one for one in reversed(weighed)}.values()
        about_s = _NEAR * min((one.estimate_s for one in firsts), default=0.0)
        for even in sorted(firsts, key=lambda one: (max(one.estimate_s, about_s), -one.size)):
            factor = min((missed for size, missed in missed_by.items() if size > even.size), default=1.0)
            if even.estimate_s * factor < best_s and (placed := self._settled(even, even.fit.recompute[0], best_s)):
                missed_by[even.size] = placed.weighed.estimate_s / even.estimate_s
                yield placed
                if not placed.weighed.fit.shortfall_bytes and placed.weighed.estimate_s < best_s:
                    best, best_s = placed, placed.weighed.estimate_s
        if best is not None:
            own = best.weighed
            alike = [one for one in weighed if one.size == own.size and one.sharding != own.sharding]
            for one in alike[:_MAX_ALIKE]:
                if placed := self._settled(one, self.fit(best.load, one.sharding).recompute[0], math.inf):
                    yield placed

    def _settled(self, even: ShardingEstimate, recompute: Mapping[str, int], best_s: float) -> PlacedSharding | None:
        """What is recomputed depends on where items are, and that on what is recomputed: more, as long as it does not
        fit; then less, once, if that fits as well. None for what, before it fits, takes best_s already.
        """
        fitting: PlacedSharding | None = None
        here: PlacedSharding | None = None
        for _ in range(_MAX_ROUNDS):
            load = self.load(even.size, recompute)
            chosen = self.fit(load, even.sharding).recompute[0]
            peak_bytes = load.peak_bytes(recompute, self.state(even.sharding))
            own = Fit((recompute,), peak_bytes, max(peak_bytes - self.job.capacity_bytes, 0.0))
            estimate_s = self.step_s(load, even.sharding, recompute)
            here = PlacedSharding(self, load, replace(even, fit=own, estimate_s=estimate_s))
            if chosen == recompute or (fitting and not own.shortfall_bytes):
                return here
            if fitting:
                return fitting
            if own.shortfall_bytes and estimate_s >= best_s:
                return None
            if own.shortfall_bytes:
                recompute = {name: max(count, chosen[name]) for name, count in recompute.items()}
            else:
                fitting, recompute = here, chosen
        return fitting or here
