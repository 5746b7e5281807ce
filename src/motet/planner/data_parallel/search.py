"""The best sharding, microbatch size and recomputation of colocated data parallelism, at a tensor-parallel degree.

1. Estimate all shardings and sizes as if balance were perfect, which needs no assignment (`estimate_all`).
2. Assign a sample of the batch as training and the simulator do for the best of them, and estimate again (`place`).
3. Assign the whole batch for the best of these, until no other can be better.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property

from motet.assign.balancing import recomputed_blocks
from motet.core.plan import MOVES_COLOCATED, BalancingMethod, Plan, Unit
from motet.planner.candidate import Pins
from motet.planner.data_parallel.loads import EvenBatch, Load, ModuleState, assigned_load, sample_of, state_of
from motet.planner.data_parallel.recomputation import fit_recomputation
from motet.planner.data_parallel.zero import ShardedUnit, ZeroSharding, shardings, step_s
from motet.planner.degrees import divisors, most_replicas
from motet.planner.job import Job
from motet.planner.stages.recompute import Fit, RecomputeMode

_MAX_ALIKE = 2
"""The most shardings that are proposed beside the best."""
_MAX_SLOWDOWN = 1.3
"""If a step is slower than the best by more than this factor in perfect balance, it is not the best once placed."""
_ABOUT_EQUAL = 1.03
"""Steps within this factor are about as fast."""
_SAMPLE_ERROR = 1.003
"""The factor by which estimates of a sample may be wrong against each other."""
_MAX_WHOLE = 2
"""The most microbatch sizes for which the whole batch is assigned."""
_MAX_ROUNDS = 5
"""The most assignments for one sharding."""


@dataclass(frozen=True, eq=False)
class ShardingEstimate:
    """A sharding with a microbatch size: the recomputation that it needs, and the estimated seconds of a step."""

    sharding: ZeroSharding
    microbatch_size: int
    fit: Fit
    estimate_s: float


@dataclass(frozen=True, eq=False)
class PlacedSharding:
    """An estimate for a batch that is assigned to ranks, and the load of those ranks."""

    search: DataParallelSearch
    load: Load
    estimate: ShardingEstimate


class DataParallelSearch:
    """The search at one tensor-parallel degree.

    dp: replicas: the pinned number, or as many as the cluster has ranks for and the batch divides among.
    """

    def __init__(self, job: Job, pins: Pins, tp: int, even: EvenBatch) -> None:
        self.job, self.pins, self.tp, self.even = job, pins, tp, even
        self.dp = pins.dp or most_replicas(job, tp, pins)
        self.balance: BalancingMethod = "off" if self.dp == 1 else pins.balance or "auto"
        self.mode: RecomputeMode = pins.recompute or "least"
        self._sharded_unit = cache(lambda sharding: ShardedUnit.of(job, self.unit(sharding)))
        self._state = cache(lambda sharding: state_of(job, self.unit(sharding)))
        self._load, self._unbalanced_load = cache(self._assign), cache(self._assign_unbalanced)

    @cached_property
    def microbatch_sizes(self) -> list[int]:
        """Examples that a rank can take at a time, the most first."""
        per_rank = self.job.batch_size // self.dp
        return [size for size in reversed(divisors(per_rank)) if self.pins.allow(microbatch_size=size)]

    def forget(self) -> None:
        """Let go of the loads that are kept: those that are proposed have theirs."""
        for known in (self._load, self._unbalanced_load):
            known.cache_clear()

    def unit(self, sharding: ZeroSharding, recompute: Mapping[str, int] | None = None) -> Unit:
        """The one unit of a Plan. recompute: recomputed blocks by module, here and below."""
        order = [module.name for module in self.job.model.modules]
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

    def plan(self, unit: Unit, microbatch_size: int) -> Plan:
        """The Plan with this unit."""
        job = self.job
        return Plan(
            job.model,
            job.cluster,
            (unit,),
            job.batch_size,
            microbatch_size,
            "data_parallel",
            precision=job.precision,
            moments=job.moments,
            balance=self.balance,
            policy=job.policy_under(self.balance),
        )

    def sharded(self, sharding: ZeroSharding) -> ShardedUnit:
        """The unit's collectives. Cached."""
        sharded: ShardedUnit = self._sharded_unit(sharding)
        return sharded

    def state(self, sharding: ZeroSharding) -> Mapping[str, ModuleState]:
        """Bytes of each module's state. Cached."""
        state: Mapping[str, ModuleState] = self._state(sharding)
        return state

    def load(self, microbatch_size: int, recompute: Mapping[str, int], *, whole: bool) -> Load:
        """The load of the batch, or of a sample, as the simulator assigns it with this recomputation. Cached."""
        load: Load = self._load(microbatch_size, tuple(recompute.items()), whole)
        return load

    def _assign(self, microbatch_size: int, recompute: tuple[tuple[str, int], ...], whole: bool) -> Load:
        plan = self.plan(self.unit(ZeroSharding(3, 0), dict(recompute)), microbatch_size)
        return assigned_load(self.job, plan if whole else sample_of(plan))

    def num_microbatches(self, microbatch_size: int) -> int:
        """Microbatches of a step."""
        return self.job.batch_size // (self.dp * microbatch_size)

    def unbalanced(self, microbatch_size: int, batch_size: int) -> Load:
        """The load of the first batch_size examples without balancing. Cached."""
        load: Load = self._unbalanced_load(microbatch_size, batch_size)
        return load

    def _assign_unbalanced(self, microbatch_size: int, batch_size: int) -> Load:
        plan = self.plan(self.unit(ZeroSharding(3, 0)), microbatch_size)
        return assigned_load(self.job, replace(plan, batch_size=batch_size, balance="off", policy={}))

    def fit(self, load: Load, sharding: ZeroSharding, mode: RecomputeMode | None = None) -> Fit:
        """The recomputation that makes a load fit; by default in the mode of the search."""
        return fit_recomputation(load, self.state(sharding), self.job.capacity_bytes, mode or self.mode)

    def step_s(
        self, load: Load, sharding: ZeroSharding, recompute: Mapping[str, int], num_microbatches: int = 0
    ) -> float:
        """Seconds of a step in closed form. num_microbatches: as of `zero.step_s`."""
        exchanged = self.balance in MOVES_COLOCATED
        return step_s(load, self.sharded(sharding), recompute, exchanged=exchanged, num_microbatches=num_microbatches)

    def floor_s(self) -> float:
        """Computation with one microbatch and no recomputation: a lower bound of every estimate."""
        return self.even.load(self.dp, 1, self.tp).waiting_s({})

    def least_bound_s(self) -> float:
        """No more than the lower bound of any candidate: whatever is sharded and recomputed."""
        per_rank = self.job.batch_size // self.dp
        loads = (self.even.load(self.dp, per_rank // size, self.tp) for size in self.microbatch_sizes)
        computed_s = min((load.busiest_s({}) for load in loads), default=math.inf)
        return computed_s + min(self.sharded(one).step_s for one in shardings(self.job, self.dp, self.tp))

    def estimate_all(
        self, best_s: float, max_slowdown: float = _MAX_SLOWDOWN
    ) -> tuple[list[ShardingEstimate], list[ShardingEstimate]]:
        """Estimates in perfect balance of all shardings and sizes: those that fit, fastest first, and those that lack
        memory.

        Left out are those that, even without recomputation, take best_s, or max_slowdown times the best that fits.
        """
        per_rank = self.job.batch_size // self.dp
        loads = {size: self.even.load(self.dp, per_rank // size, self.tp) for size in self.microbatch_sizes}
        options = [
            (self.step_s(load, sharding, {}), sharding, size)
            for sharding in shardings(self.job, self.dp, self.tp)
            for size, load in loads.items()
        ]
        fitting: list[ShardingEstimate] = []
        lacking: list[ShardingEstimate] = []
        for floor_s, sharding, size in sorted(options, key=lambda option: option[0]):
            best_fitting_s = min((estimate.estimate_s for estimate in fitting), default=math.inf)
            if floor_s >= min(best_s, max_slowdown * best_fitting_s):
                break
            # `place` looks at no more of a size.
            if sum(one.microbatch_size == size and one.estimate_s <= floor_s for one in fitting) > _MAX_ALIKE:
                continue
            fit = self.fit(loads[size], sharding)
            estimate_s = self.step_s(loads[size], sharding, fit.recompute[0])
            (lacking if fit.shortfall_bytes else fitting).append(ShardingEstimate(sharding, size, fit, estimate_s))
        fitting.sort(key=lambda estimate: estimate.estimate_s)
        lacking.sort(key=lambda estimate: (estimate.fit.shortfall_bytes, estimate.microbatch_size))
        return fitting, lacking

    def place(self, estimates: Sequence[ShardingEstimate], best_s: float) -> Iterator[PlacedSharding]:
        """Assign the batch for those of the estimates that may be faster than best_s. What does not fit is given too.

        1. Assign a sample (`_sampled`).
        2. Assign the whole batch for the fastest of those that fit, as long as it may be faster than the best so far;
           for up to _MAX_WHOLE microbatch sizes.
        """
        sampled = list(self._sampled(estimates, best_s))
        yield from (one for one in sampled if one.estimate.fit.shortfall_bytes)
        fitting = [one for one in sampled if not one.estimate.fit.shortfall_bytes]
        factor = 1.0  # by which a sample misses: the whole batch has longer examples
        sizes: set[int] = set()
        for one in sorted(fitting, key=lambda one: one.estimate.estimate_s):
            sampled_s, recompute = one.estimate.estimate_s, one.estimate.fit.recompute[0]
            if sampled_s * factor >= best_s * _SAMPLE_ERROR:
                break
            if len(sizes | {one.estimate.microbatch_size}) > _MAX_WHOLE:
                continue
            sizes.add(one.estimate.microbatch_size)
            if placed := self._settled(one.estimate, recompute, best_s, whole=True):
                yield placed
                if not placed.estimate.fit.shortfall_bytes:
                    best_s, factor = min(best_s, placed.estimate.estimate_s), placed.estimate.estimate_s / sampled_s

    def _sampled(self, estimates: Sequence[ShardingEstimate], best_s: float) -> Iterator[PlacedSharding]:
        """Estimates of which a sample is assigned.

        1. Each microbatch size with its best sharding, as long as it may be faster than the best so far. Of sizes that
           are about equal, the largest is first: it comes nearest to perfect balance. A smaller one misses its estimate
           by at least as large a factor as any larger one.
        2. The best of all with its next best shardings.
        """
        best: PlacedSharding | None = None
        missed_by: dict[int, float] = {}
        by_size = {estimate.microbatch_size: estimate for estimate in reversed(estimates)}.values()
        about_equal_s = _ABOUT_EQUAL * min((estimate.estimate_s for estimate in by_size), default=0.0)
        for even in sorted(by_size, key=lambda one: (max(one.estimate_s, about_equal_s), -one.microbatch_size)):
            factor = min((missed for size, missed in missed_by.items() if size > even.microbatch_size), default=1.0)
            if even.estimate_s * factor >= best_s:
                continue
            if placed := self._settled(even, even.fit.recompute[0], best_s):
                estimate = placed.estimate
                missed_by[even.microbatch_size] = estimate.estimate_s / even.estimate_s
                yield placed
                if not estimate.fit.shortfall_bytes and estimate.estimate_s < best_s:
                    best, best_s = placed, estimate.estimate_s
        if best is None:
            return
        size, sharding = best.estimate.microbatch_size, best.estimate.sharding
        alike = [other for other in estimates if other.microbatch_size == size and other.sharding != sharding]
        for other in alike[:_MAX_ALIKE]:
            if placed := self._settled(other, self.fit(best.load, other.sharding).recompute[0], math.inf):
                yield placed

    def _settled(
        self, even: ShardingEstimate, recompute: Mapping[str, int], best_s: float, *, whole: bool = False
    ) -> PlacedSharding | None:
        """A sharding with an assignment and a recomputation that suit each other.

        The assignment decides which recomputation is needed, and the recomputation changes the assignment. So both are
        found in turn, starting from `recompute`: more recomputation until it fits; then once less, if that fits too.
        None for a step that takes best_s before it fits. whole: all of the batch is assigned, not a sample.
        """
        fitting: PlacedSharding | None = None
        placed: PlacedSharding | None = None
        for _ in range(_MAX_ROUNDS):
            load = self.load(even.microbatch_size, recompute, whole=whole)
            needed = self.fit(load, even.sharding).recompute[0]
            placed = self._placed(even, load, recompute)
            lacks = placed.estimate.fit.shortfall_bytes > 0
            if needed == recompute or (fitting and not lacks):
                return placed
            if fitting:
                return fitting
            if not lacks:
                fitting, recompute = placed, needed
            elif placed.estimate.estimate_s >= best_s:
                return None
            else:
                recompute = {name: max(count, needed[name]) for name, count in recompute.items()}
        return fitting or placed

    def _placed(self, even: ShardingEstimate, load: Load, recompute: Mapping[str, int]) -> PlacedSharding:
        peak_bytes = load.peak_bytes(recompute, self.state(even.sharding))
        fit = Fit((recompute,), peak_bytes, max(peak_bytes - self.job.capacity_bytes, 0.0))
        estimate_s = self.step_s(load, even.sharding, recompute, self.num_microbatches(even.microbatch_size))
        return PlacedSharding(self, load, replace(even, fit=fit, estimate_s=estimate_s))


def sampled_s(job: Job, plan: Plan) -> float:
    """Seconds of a step of colocated data parallelism in closed form, by a sample of the batch."""
    (unit,) = plan.units
    load, num_microbatches = assigned_load(job, sample_of(plan)), plan.batch_size // (unit.dp * plan.microbatch_size)
    exchanged = plan.balance in MOVES_COLOCATED
    sharded, recompute = ShardedUnit.of(job, unit), recomputed_blocks(plan)
    return step_s(load, sharded, recompute, exchanged=exchanged, num_microbatches=num_microbatches)
