"""Colocated data parallelism: every rank has a share of every module (FSDP) and examples of its own (OrchMLLM).

Decided are what is sharded and over how many ranks, how many examples a rank takes at a time, and what is recomputed.
Memory holds the fullest rank's activations, so that balanced lengths let larger microbatches fit (section 8.1): fewer
gathers, and each hidden behind more computation. Everything is first weighed as if balance were perfect, which takes no
placement; the best of it is then placed as training and the simulator place it, and weighed again.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from motet.core.errors import UserError
from motet.core.plan import Plan, Unit
from motet.core.workload import BACKBONE
from motet.planner.candidate import Candidate, Pins, RuledOut
from motet.planner.colocated import EvenBatch, Load, State, fit, placed_load, state_of
from motet.planner.job import Job
from motet.planner.recompute import Fit, Mode
from motet.planner.sharding import Sharded, Zero, shardings, step_s
from motet.schedule import check_fit

NAME = "data parallel"
Balance = Literal["off", "joint", "per_phase", "auto"]
MAX_CANDIDATES = 6
_MAX_ALIKE = 2
"""Shardings that are proposed beside the best."""
_FAR = 1.3
"""How much slower than the best a step may be in perfect balance, and still be the best when it is placed."""
_MAX_ROUNDS = 5
"""Placements of one of them."""
_TENSOR = (1, 2, 4, 8)


def data_parallel(job: Job, pins: Pins) -> Iterator[Candidate | RuledOut]:
    """A `Strategy`: over all ranks (or those of the dp and tp that are pinned), alone and with tensor parallelism.

    Rules out what no rank has memory for, and batch sizes that do not divide among the ranks.
    """
    if not pins.allow(pp=1, schedule="data_parallel"):
        return
    found: list[_Placed] = []
    even = EvenBatch(job)
    said: set[str] = set()
    for tp in (pins.tp,) if pins.tp else _TENSOR:
        if not pins.tp and job.cluster.ranks_per_node % tp:
            continue
        best_s = min((one.weighed.estimate_s for one in found), default=math.inf)
        for one in _Ranks(job, pins, tp, even).proposals(best_s):
            if isinstance(one, _Placed):
                found.append(one)
            elif not found and one.why not in said:
                said.add(one.why)
                yield one
    for placed in sorted(found, key=lambda one: one.weighed.estimate_s)[:MAX_CANDIDATES]:
        yield placed.ranks.candidate(placed.load, placed.weighed)


@dataclass(frozen=True, eq=False)
class _Weighed:
    """A sharding with microbatches of a size: what is recomputed, and what a step is estimated to take."""

    unit: Unit
    size: int
    fit: Fit
    estimate_s: float


@dataclass(frozen=True, eq=False)
class _Placed:
    """What fits when it is placed."""

    ranks: _Ranks
    load: Load
    weighed: _Weighed


@dataclass(frozen=True, eq=False)
class _Ranks:
    """The search over the ranks that share no example: num_ranks // tp of them."""

    job: Job
    pins: Pins
    tp: int
    even: EvenBatch

    @property
    def dp(self) -> int:
        return self.pins.dp or self.job.cluster.num_ranks // self.tp

    @property
    def balance(self) -> Balance:
        return "off" if self.dp == 1 else self.pins.balance or "auto"

    def proposals(self, best_s: float) -> Iterator[_Placed | RuledOut]:
        """What may be better than best_s, a step that another tensor parallelism gives."""
        if (wrong := self._wrong()) is not None:
            yield wrong
        elif self._floor_s() < best_s:
            weighed, lacking = self._weigh_evenly(best_s)
            yield from self._without_memory(weighed, lacking)
            yield from self._placed(weighed, best_s)

    def _floor_s(self) -> float:
        """Computation with all examples at a time and no recomputation: no step is estimated to take less."""
        return self.even.load(self.dp, 1, self.tp).waiting_s({})

    def _wrong(self) -> RuledOut | None:
        """What does not divide, or cannot be run so."""
        what, size = f"DP {self.dp}", self.job.batch_size
        if not 1 <= self.dp * self.tp <= self.job.cluster.num_ranks:
            num_ranks = self.job.cluster.num_ranks
            why = f"DP {self.dp} with TP {self.tp} needs {self.dp * self.tp} ranks; the cluster has {num_ranks}."
            return RuledOut(NAME, what, why)
        if size % self.dp:
            below = size // self.dp * self.dp
            fitting = [f"a batch of {near:,}" for near in (below, below + self.dp) if near]
            why = f"{size:,} examples do not divide among {self.dp:,} ranks."
            return RuledOut(NAME, what, why, mends=tuple(fitting))
        if not self._sizes:
            why = f"{size // self.dp} examples a rank are no multiple of {self.pins.microbatch_size} at a time."
            return RuledOut(NAME, what, why)
        try:
            check_fit(self._plan(self._unit(3, 0), self._sizes[-1]))
        except UserError as error:
            return RuledOut(NAME, what, str(error))
        return None

    @cached_property
    def _sizes(self) -> list[int]:
        """Examples that a rank can take at a time, the most first."""
        per_rank = self.job.batch_size // self.dp
        fitting = [size for size in range(per_rank, 0, -1) if per_rank % size == 0]
        return [size for size in fitting if self.pins.allow(microbatch_size=size)]

    def _unit(self, zero: Zero, shard_size: int, recompute: Mapping[str, int] | None = None) -> Unit:
        order = [module.name for module in self.job.model.modules if module.name != BACKBONE] + [BACKBONE]
        stage = {name: len(self.job.model.module(name).blocks) for name in order}
        chosen = {name: count for name, count in (recompute or {}).items() if count}
        recomputed = (chosen,) if chosen else ()
        return Unit("all", (stage,), 0, self.dp, 1, self.tp, recompute=recomputed, zero=zero, shard_size=shard_size)

    def _plan(self, unit: Unit, size: int) -> Plan:
        job = self.job
        return Plan(
            job.model,
            job.cluster,
            (unit,),
            job.batch_size,
            size,
            "data_parallel",
            precision=job.precision,
            balance=self.balance,
        )

    def _fit(self, load: Load, state: Mapping[str, State]) -> Fit:
        return fit(load, state, self.job.capacity_bytes, self.pins.recompute or "least")

    def _step_s(self, load: Load, unit: Unit, recompute: Mapping[str, int]) -> float:
        return step_s(load, self._sharded(unit), recompute, exchanged=self.balance in ("per_phase", "auto"))

    def _sharded(self, unit: Unit) -> Sharded:
        key = unit.zero, unit.shard_size
        if key not in self._known:
            self._known[key] = Sharded.of(self.job, unit)
        return self._known[key]

    def _state(self, unit: Unit) -> Mapping[str, State]:
        key = unit.zero, unit.shard_size
        if key not in self._states:
            self._states[key] = state_of(self.job, unit)
        return self._states[key]

    @cached_property
    def _known(self) -> dict[tuple[int, int], Sharded]:
        return {}

    @cached_property
    def _states(self) -> dict[tuple[int, int], Mapping[str, State]]:
        return {}

    def _weigh_evenly(self, best_s: float) -> tuple[list[_Weighed], list[_Weighed]]:
        """All shardings and sizes, as if balance were perfect: those that fit, best first, and the rest. Left out are
        those that, if they recomputed nothing, would not beat best_s, or be far behind the best that fits.
        """
        per_rank = self.job.batch_size // self.dp
        loads = {size: self.even.load(self.dp, per_rank // size, self.tp) for size in self._sizes}
        units = [self._unit(zero, shard_size) for zero, shard_size in shardings(self.job, self.dp, self.tp)]
        pairs = [(self._step_s(load, unit, {}), unit, size) for unit in units for size, load in loads.items()]
        fitting: list[_Weighed] = []
        lacking: list[_Weighed] = []
        for floor_s, unit, size in sorted(pairs, key=lambda pair: pair[0]):
            far_s = _FAR * min((one.estimate_s for one in fitting), default=math.inf)
            if floor_s >= min(best_s, far_s):
                break
            chosen = self._fit(loads[size], self._state(unit))
            one = _Weighed(unit, size, chosen, self._step_s(loads[size], unit, chosen.recompute[0]))
            (lacking if chosen.lacks_bytes else fitting).append(one)
        fitting.sort(key=lambda one: one.estimate_s)
        lacking.sort(key=lambda one: (one.fit.lacks_bytes, one.size))
        return fitting, lacking

    def _without_memory(self, fitting: Sequence[_Weighed], lacking: Sequence[_Weighed]) -> Iterator[RuledOut]:
        """The nearest miss: of each ZeRO stage that never fits, and of larger microbatches than those that fit; where
        nothing fits, of all.
        """
        if not fitting:
            yield from (self._lacks(missed, self._mends(missed)) for missed in lacking[:1])
            return
        for zero in (3, 2, 0):
            missed = [one for one in lacking if one.unit.zero == zero]
            if missed and all(one.unit.zero != zero for one in fitting):
                yield self._lacks(missed[0], [f"ZeRO {fitting[0].unit.zero}"])
        largest = max(one.size for one in fitting)
        larger = [one for one in lacking if one.size > largest]
        if larger:
            yield self._lacks(larger[0], [f"{_examples(largest)} at a time"])

    def _mends(self, missed: _Weighed) -> list[str]:
        """Nodes over which the state would be small enough, and the least tensor parallelism with which a rank fits."""
        mends, cluster = [], self.job.cluster
        held = sum(own.held_bytes for own in self._state(missed.unit).values())
        if missed.unit.zero == 3 and held > missed.fit.lacks_bytes:
            needed = cluster.num_ranks * held / (held - missed.fit.lacks_bytes)
            mends.append(f"{math.ceil(needed / cluster.ranks_per_node):,} nodes")
        for tp in _TENSOR:
            ranks = replace(self, pins=replace(self.pins, dp=None), tp=tp)
            if tp > self.tp and cluster.ranks_per_node % tp == 0:
                load = self.even.load(ranks.dp, max(self.job.batch_size // ranks.dp, 1), tp)
                if not fit(load, ranks._state(ranks._unit(3, 0)), self.job.capacity_bytes, "full").lacks_bytes:
                    return [*mends, f"TP {tp}"]
        return mends

    def _lacks(self, missed: _Weighed, mends: Sequence[str]) -> RuledOut:
        recomputed = "no" if self.pins.recompute == "none" else "full"
        why = (
            f"A rank lacks {_gbytes(missed.fit.lacks_bytes)} of {_gbytes(self.job.capacity_bytes)} with {recomputed} "
            f"recomputation and {_examples(missed.size)} at a time."
        )
        return RuledOut(NAME, self._what(missed), why, missed.fit.lacks_bytes, tuple(mends))

    def _placed(self, weighed: Sequence[_Weighed], best_s: float) -> Iterator[_Placed | RuledOut]:
        """Sizes as they are balanced, each with its best sharding, as long as perfect balance would make the next one
        better than what was found; and of the best of all the next best shardings.
        """
        best: _Placed | None = None
        for size in dict.fromkeys(one.size for one in weighed):
            even = next(one for one in weighed if one.size == size)
            if best_s <= even.estimate_s:
                break
            placed = self._settled(even, even.fit.recompute[0])
            if placed.weighed.fit.lacks_bytes:
                yield self._lacks(placed.weighed, ["fewer examples at a time"])
                continue
            yield placed
            if placed.weighed.estimate_s < best_s:
                best, best_s = placed, placed.weighed.estimate_s
        if best is not None:
            alike = [one for one in weighed if one.size == best.weighed.size and one.unit != best.weighed.unit]
            others = [self._settled(one, self._guess(best, one)) for one in alike[:_MAX_ALIKE]]
            yield from (one for one in others if not one.weighed.fit.lacks_bytes)

    def _guess(self, placed: _Placed, other: _Weighed) -> Mapping[str, int]:
        """What another sharding recomputes, as it would where items are placed for this one."""
        return self._fit(placed.load, self._state(other.unit)).recompute[0]

    def _settled(self, even: _Weighed, recompute: Mapping[str, int]) -> _Placed:
        """What is recomputed depends on where items are, and that on what is recomputed: more, as long as it does not
        fit; then less, once, if that fits as well.
        """
        unit, size, state = even.unit, even.size, self._state(even.unit)
        fitting = None
        for _ in range(_MAX_ROUNDS):
            load = self._load(size, recompute)
            chosen = self._fit(load, state).recompute[0]
            peak_bytes = load.peak_bytes(recompute, state)
            lacks_bytes = max(peak_bytes - self.job.capacity_bytes, 0.0)
            own = Fit((recompute,), peak_bytes, lacks_bytes)
            here = _Placed(self, load, _Weighed(unit, size, own, self._step_s(load, unit, recompute)))
            if chosen == recompute or (fitting and not lacks_bytes):
                return here
            if fitting:
                return fitting
            if lacks_bytes:
                recompute = {name: max(count, chosen[name]) for name, count in recompute.items()}
            else:
                fitting, recompute = here, chosen
        return fitting or here

    def _load(self, size: int, recompute: Mapping[str, int]) -> Load:
        """Placed as the simulator does it for this recomputation."""
        key = size, tuple(sorted(recompute.items()))
        if key not in self._loads:
            self._loads[key] = placed_load(self.job, self._plan(self._unit(3, 0, recompute), size))
        return self._loads[key]

    @cached_property
    def _loads(self) -> dict[tuple[int, tuple[tuple[str, int], ...]], Load]:
        return {}

    def candidate(self, load: Load, one: _Weighed) -> Candidate:
        recompute = one.fit.recompute[0]
        unit = self._unit(one.unit.zero, one.unit.shard_size, recompute)
        bound_s = load.busiest_s(recompute) + self._sharded(one.unit).step_s
        plan = self._plan(unit, one.size)
        return Candidate(NAME, self._what(one), plan, one.estimate_s, bound_s, tuple(self._facts(load, one)))

    def _what(self, one: _Weighed) -> str:
        tensor = f"TP {self.tp}, " if self.tp > 1 else ""
        groups = f" in groups of {one.unit.shard_size}" if one.unit.shard_size else ""
        return f"{tensor}DP {self.dp}, ZeRO {one.unit.zero}{groups}, {_examples(one.size)} at a time"

    def _facts(self, load: Load, one: _Weighed) -> Iterator[str]:
        recompute, sharded = one.fit.recompute[0], self._sharded(one.unit)
        again_s = load.waiting_s(recompute) - load.waiting_s({})
        if self.balance != "off":
            most, kept = self._most_unbalanced(one), " with everything recomputed" if again_s else ""
            if most < one.size:
                yield f"Balanced lengths let {_examples(one.size)} a rank fit; unbalanced, {most}{kept}."
            waits, longer = load.waiting_s(recompute), self._unbalanced(one.size, None).waiting_s(recompute)
            if longer > waits:
                yield f"The busiest ranks compute for {waits:.3g} s a step; without balancing, for {longer:.3g} s."
        number = self.job.batch_size // self.dp // one.size
        if one.unit.shard_size:
            own_s = sharded.communication_s(number)
            whole_s = self._sharded(replace(one.unit, shard_size=0)).communication_s(number)
            if whole_s > own_s:
                yield (
                    f"Sharding in groups of {one.unit.shard_size} communicates for {own_s:.3g} s a step, hidden or "
                    f"not; over all {self.dp:,} ranks, for {whole_s:.3g} s."
                )
        if again_s:
            counts = [
                f"{count} of {len(self.job.model.module(name).blocks)} layers of {name}"
                for name, count in recompute.items()
                if count
            ]
            yield f"Recomputes {', '.join(counts)}: {again_s:.3g} s a step."

    def _unbalanced(self, size: int, batch_size: int | None) -> Load:
        """Examples where they are drawn: of the whole batch, or the first batch_size of it."""
        key = size, batch_size
        if key not in self._unbalanced_loads:
            plan = self._plan(self._unit(3, 0), size)
            plan = replace(plan, batch_size=batch_size or plan.batch_size, balance="off")
            self._unbalanced_loads[key] = placed_load(self.job, plan)
        return self._unbalanced_loads[key]

    @cached_property
    def _unbalanced_loads(self) -> dict[tuple[int, int | None], Load]:
        return {}

    def _most_unbalanced(self, one: _Weighed) -> int:
        """Examples of a rank, at most one.size, that fit where nothing is balanced: with all recomputation there is, if
        it takes any.
        """
        mode: Mode = self.pins.recompute or ("full" if any(one.fit.recompute[0].values()) else "none")
        state, fits, above = self._state(one.unit), 0, one.size + 1
        while above - fits > 1:
            size = (fits + above) // 2
            load = self._unbalanced(size, size * self.dp)
            enough = not fit(load, state, self.job.capacity_bytes, mode).lacks_bytes
            fits, above = (size, above) if enough else (fits, size)
        return fits


def _examples(count: int) -> str:
    return f"{count:,} example{'' if count == 1 else 's'}"


def _gbytes(size_bytes: float) -> str:
    return f"{size_bytes / 1e9:.1f} GB" if size_bytes >= 1e9 else f"{size_bytes / 1e6:.1f} MB"
