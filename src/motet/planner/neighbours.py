"""Plans that differ from a given one by one decision: sharding, cut, schedule, recomputation, order, or degrees.

Strategies propose by closed forms, which leave out what only simulation shows, and give all units one ZeRO stage, no
context parallelism, and degrees that divide each other. `refinement.py` goes from a proposed Plan to faster neighbours.

In a neighbour, modules that share a unit stay together; data parallelism may become a chain of one pipeline rank, and
no pipeline data parallelism. It may be no Plan that fits: callers check it (`check_fit`), simulate it, and compare its
memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, combinations, pairwise, product
from math import comb, gcd
from typing import get_args

import numpy as np

from motet.core.plan import (
    ORDERED_BALANCES,
    PROPOSED_BALANCES,
    BalancingMethod,
    Order,
    Plan,
    ScheduleKind,
    Unit,
    Zero,
)
from motet.planner.degrees import divisors, prime_divisors
from motet.planner.infeasible import tensor_degrees
from motet.planner.job import Job
from motet.planner.order import is_even
from motet.planner.stages.partition import partition
from motet.schedule.plan_units import backbone_unit, rank_of_stage, recomputed_in, units_in_bubbles

_SAME_STAGES: Mapping[ScheduleKind, ScheduleKind] = {
    "1f1b": "zb_h1",
    "zb_h1": "1f1b",
    "interleaved_1f1b": "zb_v",
    "zb_v": "interleaved_1f1b",
}
_MAX_CUTS = 40
"""All cuts of a unit into its stages are tried up to this number."""
_MAX_COUNTED, _NUM_EVENEST = 1_000, 12
"""Up to the first number of cuts, the second number of them counts as the evenest: those with the least busy ranks."""
_NEAREST = 2
"""So many microbatch sizes on either side of a Plan's are tried."""


def neighbours(job: Job, plan: Plan, *, is_recut: bool = False) -> Iterator[Plan]:
    """The neighbours of a Plan, what gains most often first. None of a Plan with encoders in bubbles, whose fills name
    its actions.

    is_recut: whether units of several stages a rank are also cut anew where there are many cuts, in the evenest ways.
    """
    if units_in_bubbles(plan):
        return
    # Caps are of groups of a number, for the microbatches and replicas that there are.
    without_caps = replace(plan, microbatch_caps={})
    # What takes less memory may need no recomputation. What lacks memory without any is given some (`refinement.py`).
    starts = (
        [_without_recomputation(without_caps), without_caps] if any(recomputed_in(plan).values()) else [without_caps]
    )
    for start in starts:
        yield from _microbatches(start)
    yield from _schedules(job, plan)
    yield from _chunks(job, plan)
    yield from _shardings(plan)
    yield from _experts(plan)
    if plan.schedule == "data_parallel":
        yield from _replicas(without_caps)
        yield from as_pipelines(job, without_caps)
    else:
        yield from _cuts(plan)
        if is_recut:
            yield from _evenest_cuts(job, plan)
        for start in starts:
            yield from _degrees(job, start)
    yield from _less_recomputed(plan)
    yield from _dealt(job, plan)


def _without_recomputation(plan: Plan) -> Plan:
    return replace(plan, units=tuple(replace(unit, recompute=()) for unit in plan.units))


def _microbatches(plan: Plan) -> Iterator[Plan]:
    per_replica = plan.batch_size // backbone_unit(plan).dp
    sizes = divisors(per_replica)
    at = sizes.index(plan.microbatch_size) if plan.microbatch_size in sizes else 0
    for size in (*sizes[at + 1 : at + 1 + _NEAREST], *reversed(sizes[max(at - _NEAREST, 0) : at])):
        yield replace(plan, microbatch_size=size)


def _schedules(job: Job, plan: Plan) -> Iterator[Plan]:
    """Schedules with the same stages: 1F1B and ZB-H1; interleaved 1F1B in two chunks and ZB-V. And those with two
    chunks in place of one, and with one in place of two, cut anew.

    ZB schedules are of one pipeline. On one pipeline rank, chunks let the gradients of one be reduced beside the
    passes of another.
    """
    if plan.schedule not in _SAME_STAGES:
        return
    unit, is_whole = backbone_unit(plan), plan.schedule in ("1f1b", "zb_h1")
    is_alone = len(plan.units) == 1
    if is_alone and not (is_whole and unit.pp == 1):
        yield replace(plan, schedule=_SAME_STAGES[plan.schedule])
    if recut := evenly_cut(job, unit, plan.microbatch_size, 2 if is_whole else 1):
        changed = _with_unit(plan, plan.units.index(unit), recut)
        if not is_whole:
            yield replace(changed, schedule="1f1b")
        elif is_alone and unit.pp > 1:
            yield from _in_a_v(changed)
        else:
            yield replace(changed, schedule="interleaved_1f1b")


def _chunks(job: Job, plan: Plan) -> Iterator[Plan]:
    """Interleaved 1F1B, and ZB-V, with other numbers of chunks of the backbone's unit, cut anew."""
    if plan.schedule not in ("interleaved_1f1b", "zb_v"):
        return
    unit = backbone_unit(plan)
    chunks = len(unit.stages) // unit.pp
    for other in sorted({chunks // 2, chunks - 1, chunks + 1, 2 * chunks} - {0, 1, chunks}):
        if recut := evenly_cut(job, unit, plan.microbatch_size, other):
            changed = replace(_with_unit(plan, plan.units.index(unit), recut), schedule="interleaved_1f1b")
            yield changed
            if other == 2 and len(plan.units) == 1 and unit.pp > 1:
                yield from _in_a_v(changed)


def _in_a_v(plan: Plan) -> Iterator[Plan]:
    """A Plan of two chunks a rank under ZB-V, in its own cut and in others."""
    in_a_v = replace(plan, schedule="zb_v")
    yield from [in_a_v, *_cuts(in_a_v)]


def _shardings(plan: Plan) -> Iterator[Plan]:
    """Every ZeRO stage of each unit that has several copies of its parameters; in data parallelism also smaller groups.

    A pipeline's unit shards over all of its copies.
    """
    for index, unit in enumerate(plan.units):
        if unit.dp * unit.cp == 1:
            continue
        colocated = plan.schedule == "data_parallel"
        groups = divisors(unit.dp)[1:-1] if colocated else ()
        for zero in get_args(Zero):
            for size in (0, *groups) if zero else (0,):
                if (zero, size) != (unit.zero, unit.shard_size):
                    yield _with_unit(plan, index, replace(unit, zero=zero, shard_size=size))


def _experts(plan: Plan) -> Iterator[Plan]:
    """Experts shared by the next smaller and larger numbers of ranks that divide the experts and the ranks."""
    for index, unit in enumerate(plan.units):
        layers = (layer for name in unit.modules for layer in plan.model.module(name).layers)
        if numbers := {layer.num_experts for layer in layers if layer.num_experts}:
            degrees = divisors(gcd(unit.dp * unit.cp, *(number // unit.tp for number in numbers)))
            at = degrees.index(unit.ep) if unit.ep in degrees else 0
            for ep in {*degrees[at + 1 : at + 2], *degrees[max(at - 1, 0) : at]}:
                yield _with_unit(plan, index, replace(unit, ep=ep))


def _replicas(plan: Plan) -> Iterator[Plan]:
    """Data parallelism over the next smaller and larger numbers of replicas that divide the batch."""
    (unit,) = plan.units
    most = min(plan.cluster.num_ranks // unit.tp, plan.batch_size)
    sizes = [dp for dp in divisors(plan.batch_size) if dp <= most]
    for dp in (max([size for size in sizes if size < unit.dp], default=0), *[s for s in sizes if s > unit.dp][:1]):
        if dp:
            zero = unit.zero if dp > 1 else 0
            changed = replace(plan, units=(replace(unit, dp=dp, zero=zero, shard_size=0),))
            yield from with_microbatches(changed, plan)


def as_pipelines(job: Job, plan: Plan) -> Iterator[Plan]:
    """Data parallelism as replicas of one pipeline rank, whole and in two chunks: items stay with their examples, which
    come in an order of their own, and no parameters are gathered for a pass. Then as fewer replicas, each of as many
    context-parallel ranks as the cluster has for it."""
    (unit,) = plan.units
    whole = replace(unit, zero=min(unit.zero, 1), shard_size=0)
    changed = replace(plan, schedule="1f1b", balance="off", policy={})
    yield _with_unit(changed, 0, whole)
    if recut := evenly_cut(job, whole, plan.microbatch_size, 2):
        yield replace(_with_unit(changed, 0, recut), schedule="interleaved_1f1b")
    for dp in divisors(plan.batch_size):
        cp = plan.cluster.num_ranks // (unit.tp * dp)
        if dp < unit.dp and cp > 1:
            yield from _resized(changed, 0, replace(whole, dp=dp, cp=cp, zero=1))


def _cuts(plan: Plan) -> Iterator[Plan]:
    """One block moves from a stage to the one before or after it. A unit whose ranks have several stages is cut anew in
    every way, if these are few: what is even for its ranks may take several moves that are not.
    """
    for index, unit in enumerate(plan.units):
        blocks = [name for stage in unit.stages for name, count in stage.items() for _ in range(count)]
        bounds = list(accumulate((sum(stage.values()) for stage in unit.stages), initial=0))
        if is_virtual(unit) and comb(len(blocks) - 1, len(unit.stages) - 1) <= _MAX_CUTS:
            for inner in combinations(range(1, len(blocks)), len(unit.stages) - 1):
                yield _with_unit(plan, index, _recut(unit, blocks, [0, *inner, len(blocks)]))
            continue
        for edge in range(1, len(bounds) - 1):
            for shift in (-1, 1):
                moved = [*bounds[:edge], bounds[edge] + shift, *bounds[edge + 1 :]]
                if all(start < stop for start, stop in pairwise(moved)):
                    yield _with_unit(plan, index, _recut(unit, blocks, moved))


def is_virtual(unit: Unit) -> bool:
    """Whether the ranks of a unit have several stages each."""
    return len(unit.stages) > unit.pp > 1


def _evenest_cuts(job: Job, plan: Plan) -> Iterator[Plan]:
    """Units whose ranks have several stages cut anew, so that the busiest rank is the least busy."""
    for index, unit in enumerate(plan.units):
        blocks = [name for stage in unit.stages for name, count in stage.items() for _ in range(count)]
        num_stages = len(unit.stages)
        if not is_virtual(unit) or not _MAX_CUTS < comb(len(blocks) - 1, num_stages - 1) <= _MAX_COUNTED:
            continue
        bounds = np.array([(0, *inner, len(blocks)) for inner in combinations(range(1, len(blocks)), num_stages - 1)])
        seconds = np.cumsum([0.0, *_block_seconds(job, unit, plan.microbatch_size)])
        rank_of = np.array([rank_of_stage(plan, unit, stage) for stage in range(num_stages)])
        of_stage = np.diff(seconds[bounds], axis=1)
        busiest = np.max([of_stage[:, rank_of == rank].sum(axis=1) for rank in range(unit.pp)], axis=0)
        for chosen in bounds[np.argsort(busiest, kind="stable")[:_NUM_EVENEST]].tolist():
            yield _with_unit(plan, index, _recut(unit, blocks, chosen))


def _less_recomputed(plan: Plan) -> Iterator[Plan]:
    """A stage recomputes nothing of a module, half of it, or a block less."""
    for index, unit in enumerate(plan.units):
        for stage, counts in enumerate(unit.recompute):
            for name, count in counts.items():
                for fewer in sorted({0, count // 2, count - 1} - {count, -1}):
                    changed = {**counts, name: fewer}
                    recompute = (*unit.recompute[:stage], changed, *unit.recompute[stage + 1 :])
                    yield _with_unit(plan, index, replace(unit, recompute=recompute))


def _dealt(job: Job, plan: Plan) -> Iterator[Plan]:
    """Other orders of examples and ways of balancing."""
    if is_even(job.batch) or plan.microbatch_caps:
        return
    for balance in PROPOSED_BALANCES:
        if plan.schedule == "data_parallel":
            yield replace(plan, balance=balance, policy=job.policy_under(balance))
        elif balance != "auto":  # In pipelines, "per_phase" is the same.
            yield replace(plan, balance=balance, order="given")
    beside: BalancingMethod = plan.balance if plan.balance in ORDERED_BALANCES else "off"
    for order in get_args(Order) if plan.schedule != "data_parallel" else ():
        yield replace(plan, balance=beside, order=order)


def _degrees(job: Job, plan: Plan) -> Iterator[Plan]:
    """Other degrees of one unit on its ranks, and replicas that it takes from another unit or of ranks left over, which
    may share the sequences of its replicas, too."""
    left = plan.cluster.num_ranks - sum(unit.num_ranks for unit in plan.units)
    for index, unit in enumerate(plan.units):
        for changed in _reshaped(job, plan, unit):
            yield from _resized(plan, index, changed)
        for giver, other in enumerate(plan.units):
            if giver != index and other.dp > 1 and _of_replica(other) + left >= _of_replica(unit):
                fewer = _with_unit(plan, giver, replace(other, dp=other.dp - 1))
                yield from _resized(fewer, index, replace(unit, dp=unit.dp + 1))
        if left >= _of_replica(unit):
            yield from _resized(plan, index, replace(unit, dp=unit.dp + 1))
        if left * unit.cp >= unit.num_ranks:
            yield from _resized(plan, index, replace(unit, cp=unit.cp + 1))
        for dp in {1, *(unit.dp // factor for factor in prime_divisors(unit.dp))} - {unit.dp}:
            # More than the factor that `_reshaped` moves, where ranks left over are enough for it.
            cp = (unit.num_ranks + left) // (unit.tp * unit.pp * dp)
            if cp * dp > unit.cp * unit.dp:
                yield from _resized(plan, index, replace(unit, cp=cp, dp=dp))


def _reshaped(job: Job, plan: Plan, unit: Unit) -> Iterator[Unit]:
    """A unit with the same ranks, in which one degree takes a prime factor from another."""
    sizes = {"tp": unit.tp, "cp": unit.cp, "pp": unit.pp, "dp": unit.dp}
    known = tensor_degrees(job, *unit.modules)
    for giver, given in sizes.items():
        for taker, factor in product(sizes, prime_divisors(given)):
            taken = factor * sizes[taker]
            if giver == taker or (taker == "tp" and taken not in known):
                continue
            degrees: dict[str, int] = {giver: given // factor, taker: taken}
            changed = replace(unit, **degrees)  # type: ignore[arg-type]
            if changed.pp != unit.pp:
                recut = evenly_cut(job, changed, plan.microbatch_size, len(unit.stages) // unit.pp)
                if recut is None:
                    continue
                changed = recut
            yield changed


def evenly_cut(job: Job, unit: Unit, num_examples: int, num_chunks: int = 1) -> Unit | None:
    """The unit with its blocks in an even cut for its PP, without recomputation; None if there are too few blocks."""
    seconds = _block_seconds(job, unit, num_examples)
    if len(seconds) < unit.pp * num_chunks:
        return None
    counts = partition(seconds, unit.pp, num_chunks=num_chunks)
    names = (name for name in unit.modules if name not in unit.replicated)
    blocks = [name for name in names for _ in job.model.module(name).blocks]
    return _recut(replace(unit, recompute=()), blocks, list(accumulate(counts, initial=0)))


def _block_seconds(job: Job, unit: Unit, num_examples: int) -> list[float]:
    """Seconds of each block of a unit's stages, in order, forward and backward."""
    names = (name for name in unit.modules if name not in unit.replicated)
    costs = [job.block_costs(name, num_examples, unit.tp) for name in names]
    seconds: list[float] = np.concatenate([cost.forward_s + cost.backward_s for cost in costs]).tolist()
    return seconds


def _resized(plan: Plan, index: int, unit: Unit) -> Iterator[Plan]:
    """The Plan with a unit of other degrees: placed anew and, for another DP of the backbone, with microbatches that
    divide the batch."""
    placed = replace(unit, ep=gcd(unit.ep, unit.dp * unit.cp))
    yield from with_microbatches(on_first_ranks(_with_unit(plan, index, placed)), plan)


def with_microbatches(plan: Plan, before: Plan) -> Iterator[Plan]:
    """A Plan with as many examples in a microbatch, over all replicas of the backbone, as another one has; where its
    replicas do not divide them, with those numbers that come nearest."""
    dp, old = backbone_unit(plan).dp, backbone_unit(before)
    if plan.batch_size % dp:
        return
    per_replica = plan.batch_size // dp
    sizes = divisors(per_replica)
    as_many = old.dp * before.microbatch_size / dp
    for size in sorted(sizes, key=lambda size: (abs(size - as_many), size))[: 1 if dp == old.dp else _NEAREST]:
        yield replace(plan, microbatch_size=size)


def on_first_ranks(plan: Plan) -> Plan:
    """The Plan with its units on the first ranks: those of larger TP first, so that no group crosses nodes."""
    first_rank, next_rank = {}, 0
    for unit in sorted(plan.units, key=lambda unit: -unit.tp):
        first_rank[unit.name] = next_rank
        next_rank += unit.num_ranks
    return replace(plan, units=tuple(replace(unit, first_rank=first_rank[unit.name]) for unit in plan.units))


def _of_replica(unit: Unit) -> int:
    return unit.num_ranks // unit.dp


def _recut(unit: Unit, blocks: Sequence[str], bounds: Sequence[int]) -> Unit:
    """The unit with other stages. A stage that recomputed all blocks of a module still does."""
    stages: list[Mapping[str, int]] = [dict(Counter(blocks[start:stop])) for start, stop in pairwise(bounds)]
    recompute = []
    for before, stage, counts in zip(unit.stages, stages, unit.recompute):
        whole = {name for name, count in counts.items() if count and count == before[name]}
        some = any(counts.values())
        recompute.append(
            {
                name: num if name in whole or (some and name not in before) else min(counts.get(name, 0), num)
                for name, num in stage.items()
            }
        )
    return replace(unit, stages=tuple(stages), recompute=tuple(recompute))


def _with_unit(plan: Plan, index: int, unit: Unit) -> Plan:
    return replace(plan, units=(*plan.units[:index], unit, *plan.units[index + 1 :]))
