"""Colocated data parallelism: every rank has a share of every module (FSDP) and examples of its own (OrchMLLM).

The strategy decides what is sharded and over how many ranks, how many examples a rank takes at a time, and what is
recomputed. The fullest rank must hold its activations. So balanced lengths let larger microbatches fit (section 8.1):
there are fewer gathers, and each is hidden behind more computation.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

from motet.core.errors import UserError
from motet.core.words import counted_words, shown_seconds, size_words
from motet.planner.candidate import DATA_PARALLEL, Candidate, Pins, RuledOut
from motet.planner.data_parallel.loads import EvenBatch
from motet.planner.data_parallel.search import DataParallelSearch, PlacedSharding, ShardingEstimate
from motet.planner.data_parallel.zero import ZeroSharding
from motet.planner.infeasible import indivisible, tensor_degrees
from motet.planner.job import Job
from motet.planner.module_pins import common_pins
from motet.planner.stages.recompute import RecomputeMode
from motet.schedule import check_fit

MAX_CANDIDATES = 6


def propose_data_parallel(job: Job, pins: Pins, to_beat_s: float = math.inf) -> Iterator[Candidate | RuledOut]:
    """A `Strategy` over all ranks, or the pinned dp and tp; with each tensor-parallel degree.

    It rules out shardings that lack memory, and batch sizes that do not divide among the ranks.
    to_beat_s: no batch is assigned, and nothing said, where the bounds of all candidates are at least that.
    """
    pins = common_pins(pins)
    if why := _refused(job, pins):
        yield RuledOut(DATA_PARALLEL, "", why)
        return
    placed: list[PlacedSharding] = []
    even = EvenBatch(job)
    reasons: set[str] = set()
    searches = [DataParallelSearch(job, pins, tp, even) for tp in ((pins.tp,) if pins.tp else tensor_degrees(job))]
    if to_beat_s < math.inf and all(_wrong(one) or one.least_bound_s() >= to_beat_s for one in searches):
        return
    for search in searches:
        best_s = min((one.estimate.estimate_s for one in placed), default=math.inf)
        for proposal in _proposals(search, best_s):
            if isinstance(proposal, PlacedSharding):
                placed.append(proposal)
            elif not placed and proposal.why not in reasons:
                reasons.add(proposal.why)
                yield proposal
    candidates = [_candidate(one) for one in sorted(placed, key=lambda one: one.estimate.estimate_s)[:MAX_CANDIDATES]]
    even.forget()
    for one in placed:
        one.search.forget()
    yield from candidates


def _refused(job: Job, pins: Pins) -> str | None:
    if not pins.allow(pp=1):
        return f"data parallelism has no pipeline; PP is pinned to {pins.pp}."
    if cut := next(
        (f"{name} is pinned to {stated}" for name, stated in pins.modules.items() if stated.pp not in (None, 1)), ""
    ):
        return f"data parallelism has no pipeline; {cut}."
    if not pins.allow(schedule="data_parallel"):
        return f"data parallelism has no pipeline; the schedule is pinned to {pins.schedule!r}."
    # `_wrong` rules out what does not divide the batch, and names batches that would.
    return indivisible(job, replace(pins, dp=None, microbatch_size=None), 1)


def _proposals(search: DataParallelSearch, best_s: float) -> Iterator[PlacedSharding | RuledOut]:
    """Shardings that may be faster than best_s, the best step of other tensor-parallel degrees."""
    if (wrong := _wrong(search)) is not None:
        yield wrong
        return
    if search.floor_s() >= best_s:
        return
    estimates, lacking = search.estimate_all(best_s)
    placed = list(search.place(estimates, best_s))
    if best_s == math.inf and estimates and all(one.estimate.fit.shortfall_bytes for one in placed):
        # Real balance is not perfect, and nothing fits: slower shardings that take less memory are needed.
        slower, _ = search.estimate_all(best_s, max_slowdown=math.inf)
        placed = list(search.place(slower, best_s))
    found = [one.estimate for one in placed if not one.estimate.fit.shortfall_bytes]
    yield from _without_memory(search, estimates, lacking, sorted(found, key=lambda one: one.estimate_s))
    for one in placed:
        yield _lacks(search, one.estimate) if one.estimate.fit.shortfall_bytes else one


def _wrong(search: DataParallelSearch) -> RuledOut | None:
    """Why no sharding can run with these degrees; None if one can."""
    what, size, num_ranks = f"DP {search.dp}", search.job.batch_size, search.job.cluster.num_ranks
    if not 1 <= search.dp * search.tp <= num_ranks:
        why = (
            f"DP {search.dp} with TP {search.tp} needs {counted_words(search.dp * search.tp, 'rank')}; the cluster has "
            f"{num_ranks}."
        )
        return RuledOut(DATA_PARALLEL, what, why)
    if size % search.dp:
        below = size // search.dp * search.dp
        batches = tuple(near for near in (below, below + search.dp) if near)
        why = f"a batch of {size:,} does not divide among the replicas."
        return RuledOut(DATA_PARALLEL, what, why, batches=batches)
    if not search.microbatch_sizes:
        why = (
            f"a rank has {counted_words(size // search.dp, 'example')}, no multiple of {search.pins.microbatch_size} "
            "at a time."
        )
        return RuledOut(DATA_PARALLEL, what, why)
    try:
        check_fit(search.plan(search.unit(ZeroSharding(3, 0)), search.microbatch_sizes[-1]))
    except UserError as error:
        return RuledOut(DATA_PARALLEL, what, str(error))
    return None


def _without_memory(
    search: DataParallelSearch,
    fitting: Sequence[ShardingEstimate],
    lacking: Sequence[ShardingEstimate],
    found: Sequence[ShardingEstimate],
) -> Iterator[RuledOut]:
    """The nearest misses: of each ZeRO stage that never fits, and of microbatches larger than those that fit.

    If nothing fits, the nearest of all. fitting: in perfect balance. found: those that fit as the batch is balanced,
    fastest first; they alone are remedies.
    """
    if not fitting:
        yield from (_lacks(search, missed) for missed in lacking[:1])
        return
    for zero in (3, 2, 0):
        missed = [one for one in lacking if one.sharding.zero == zero]
        if missed and all(one.sharding.zero != zero for one in fitting):
            yield _lacks(search, missed[0], *(f"ZeRO {one.sharding.zero}" for one in found[:1]))
    largest = max(one.microbatch_size for one in fitting)
    larger = [one for one in lacking if one.microbatch_size > largest]
    if larger:
        smaller = max((one.microbatch_size for one in found), default=0)
        yield _lacks(search, larger[0], *([f"{_examples(smaller)} at a time"] if smaller else []))


def _lacks(search: DataParallelSearch, missed: ShardingEstimate, *remedies: str) -> RuledOut:
    recomputed = "nothing" if search.mode == "none" else "all layers"
    why = f"a rank lacks {size_words(missed.fit.shortfall_bytes)} with {recomputed} recomputed."
    return RuledOut(DATA_PARALLEL, _what(search, missed), why, missed.fit.shortfall_bytes, remedies)


def _candidate(placed: PlacedSharding) -> Candidate:
    search, estimate = placed.search, placed.estimate
    recompute = estimate.fit.recompute[0]
    plan = search.plan(search.unit(estimate.sharding, recompute), estimate.microbatch_size)
    # Of a perfect balance: variants are balanced otherwise, and may be faster than this one's busiest rank.
    even = search.even.load(search.dp, plan.batch_size // (search.dp * plan.microbatch_size), search.tp)
    bound_s = even.busiest_s(recompute) + search.sharded(estimate.sharding).step_s
    return Candidate(
        DATA_PARALLEL, _what(search, estimate), plan, estimate.estimate_s, bound_s, partial(_facts, placed)
    )


def _facts(placed: PlacedSharding) -> Iterator[str]:
    yield from _balance_facts(placed)
    yield from _sharding_facts(placed.search, placed.estimate)
    yield from _recompute_facts(placed)


def _what(search: DataParallelSearch, estimate: ShardingEstimate) -> str:
    zero, shard_size = estimate.sharding
    tensor = f"TP {search.tp}, " if search.tp > 1 else ""
    groups = f" in groups of {shard_size}" if shard_size else ""
    return f"{tensor}DP {search.dp}, ZeRO {zero}{groups}, {_examples(estimate.microbatch_size)} at a time"


def _balance_facts(placed: PlacedSharding) -> Iterator[str]:
    search, estimate, recompute = placed.search, placed.estimate, placed.estimate.fit.recompute[0]
    if search.balance == "off":
        return
    most, kept = _most_unbalanced(search, estimate), " with everything recomputed" if any(recompute.values()) else ""
    if most < estimate.microbatch_size:
        yield f"Balanced lengths let {_examples(estimate.microbatch_size)} a rank fit; unbalanced, {most}{kept}."
    unbalanced = search.unbalanced(estimate.microbatch_size, search.job.batch_size)
    waits_s, longer_s = placed.load.waiting_s(recompute), unbalanced.waiting_s(recompute)
    if longer_s > waits_s:
        how = ", ".join(method.replace("_", " ") for method in dict.fromkeys(placed.load.methods))
        yield (
            f"Balanced ({how}), the busiest ranks compute for {shown_seconds(waits_s)} a step; otherwise, for "
            f"{shown_seconds(longer_s)}."
        )


def _most_unbalanced(search: DataParallelSearch, estimate: ShardingEstimate) -> int:
    """The most examples that fit on a rank without balancing, up to the balanced number.

    Everything is recomputed if the balanced step recomputes anything.
    """
    mode: RecomputeMode = search.pins.recompute or ("full" if any(estimate.fit.recompute[0].values()) else "none")
    fits, above = 0, estimate.microbatch_size + 1
    while above - fits > 1:
        size = (fits + above) // 2
        shortfall_bytes = search.fit(search.unbalanced(size, size * search.dp), estimate.sharding, mode).shortfall_bytes
        fits, above = (fits, size) if shortfall_bytes else (size, above)
    return fits


def _sharding_facts(search: DataParallelSearch, estimate: ShardingEstimate) -> Iterator[str]:
    zero, shard_size = estimate.sharding
    if not shard_size:
        return
    number = search.job.batch_size // search.dp // estimate.microbatch_size
    own_s = search.sharded(estimate.sharding).communication_s(number)
    whole_s = search.sharded(ZeroSharding(zero, 0)).communication_s(number)
    if whole_s > own_s:
        yield (
            f"Sharding in groups of {shard_size} communicates for {shown_seconds(own_s)} a step, hidden "
            f"or not; over all {search.dp:,} ranks, for {shown_seconds(whole_s)}."
        )


def _recompute_facts(placed: PlacedSharding) -> Iterator[str]:
    recompute, model = placed.estimate.fit.recompute[0], placed.search.job.model
    counts = [
        f"{count} of {counted_words(len(model.module(name).blocks), 'layer')} of {name}"
        for name, count in recompute.items()
        if count
    ]
    if counts:
        recompute_s = placed.load.waiting_s(recompute) - placed.load.waiting_s({})
        yield f"Recomputes {', '.join(counts)}: {shown_seconds(recompute_s)} a step."


def _examples(count: int) -> str:
    return f"{count:,} example{'' if count == 1 else 's'}"
