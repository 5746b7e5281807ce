"""Colocated data parallelism: every rank has a share of every module (FSDP) and examples of its own (OrchMLLM).

Decided are what is sharded and over how many ranks, how many examples a rank takes at a time, and what is recomputed.
Memory holds the fullest rank's activations, so that balanced lengths let larger microbatches fit (section 8.1): fewer
gathers, and each hidden behind more computation.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from motet.core.errors import UserError
from motet.planner.candidate import DATA_PARALLEL, Candidate, Pins, RuledOut, size_words
from motet.planner.data_parallel.loads import EvenBatch
from motet.planner.data_parallel.search import DataParallelSearch, PlacedSharding, ShardingEstimate
from motet.planner.data_parallel.zero import ZeroSharding
from motet.planner.infeasible import indivisible, tensor_degrees
from motet.planner.job import Job
from motet.planner.stages.recompute import RecomputeMode
from motet.schedule import check_fit
from motet.simulate.show.drawing import shown_seconds

MAX_CANDIDATES = 6


def propose_data_parallel(job: Job, pins: Pins) -> Iterator[Candidate | RuledOut]:
    """A `Strategy`: over all ranks (or those of the dp and tp that are pinned), alone and with tensor parallelism.

    Rules out what no rank has memory for, and batch sizes that do not divide among the ranks.
    """
    if why := _refused(job, pins):
        yield RuledOut(DATA_PARALLEL, "", why)
        return
    found: list[PlacedSharding] = []
    even = EvenBatch(job)
    said: set[str] = set()
    for tp in (pins.tp,) if pins.tp else tensor_degrees(job):
        best_s = min((one.weighed.estimate_s for one in found), default=math.inf)
        for one in _proposals(DataParallelSearch(job, pins, tp, even), best_s):
            if isinstance(one, PlacedSharding):
                found.append(one)
            elif not found and one.why not in said:
                said.add(one.why)
                yield one
    for placed in sorted(found, key=lambda one: one.weighed.estimate_s)[:MAX_CANDIDATES]:
        yield _candidate(placed)


def _refused(job: Job, pins: Pins) -> str | None:
    if not pins.allow(pp=1):
        return f"data parallelism has no pipeline; PP is pinned to {pins.pp}."
    if not pins.allow(schedule="data_parallel"):
        return f"data parallelism has no pipeline; the schedule is pinned to {pins.schedule!r}."
    # What of the batch does not divide is told by ranks, with batches that would.
    return indivisible(job, replace(pins, dp=None, microbatch_size=None), 1)


def _proposals(ranks: DataParallelSearch, best_s: float) -> Iterator[PlacedSharding | RuledOut]:
    """What may be better than best_s, a step that another tensor parallelism gives."""
    if (wrong := _wrong(ranks)) is not None:
        yield wrong
        return
    if ranks.floor_s() >= best_s:
        return
    weighed, lacking = ranks.weigh_evenly(best_s)
    yield from _without_memory(ranks, weighed, lacking)
    placed = list(ranks.place(weighed, best_s))
    if best_s == math.inf and weighed and all(one.weighed.fit.shortfall_bytes for one in placed):
        # Balance is not perfect: what is slower, but takes less memory, is needed.
        weighed, _ = ranks.weigh_evenly(best_s, far=math.inf)
        placed = list(ranks.place(weighed, best_s))
    for one in placed:
        yield _lacks(ranks, one.weighed) if one.weighed.fit.shortfall_bytes else one


def _wrong(ranks: DataParallelSearch) -> RuledOut | None:
    """What does not divide, or cannot be run so."""
    what, size, num_ranks = f"DP {ranks.dp}", ranks.job.batch_size, ranks.job.cluster.num_ranks
    if not 1 <= ranks.dp * ranks.tp <= num_ranks:
        why = f"DP {ranks.dp} with TP {ranks.tp} needs {ranks.dp * ranks.tp} ranks; the cluster has {num_ranks}."
        return RuledOut(DATA_PARALLEL, what, why)
    if size % ranks.dp:
        below = size // ranks.dp * ranks.dp
        fitting = [f"a batch of {near:,}" for near in (below, below + ranks.dp) if near]
        why = f"a batch of {size:,} does not divide among the replicas."
        return RuledOut(DATA_PARALLEL, what, why, remedies=tuple(fitting))
    if not ranks.sizes:
        why = f"{size // ranks.dp} examples a rank are no multiple of {ranks.pins.microbatch_size} at a time."
        return RuledOut(DATA_PARALLEL, what, why)
    try:
        check_fit(ranks.plan(ranks.unit(ZeroSharding(3, 0)), ranks.sizes[-1]))
    except UserError as error:
        return RuledOut(DATA_PARALLEL, what, str(error))
    return None


def _without_memory(
    ranks: DataParallelSearch, fitting: Sequence[ShardingEstimate], lacking: Sequence[ShardingEstimate]
) -> Iterator[RuledOut]:
    """The nearest miss: of each ZeRO stage that never fits, and of larger microbatches than those that fit; where
    nothing fits, of all.
    """
    if not fitting:
        yield from (_lacks(ranks, missed) for missed in lacking[:1])
        return
    for zero in (3, 2, 0):
        missed = [one for one in lacking if one.sharding.zero == zero]
        if missed and all(one.sharding.zero != zero for one in fitting):
            yield _lacks(ranks, missed[0], f"ZeRO {fitting[0].sharding.zero}")
    largest = max(one.size for one in fitting)
    larger = [one for one in lacking if one.size > largest]
    if larger:
        yield _lacks(ranks, larger[0], f"{_examples(largest)} at a time")


def _lacks(ranks: DataParallelSearch, missed: ShardingEstimate, *remedies: str) -> RuledOut:
    recomputed = "nothing" if ranks.mode == "none" else "all layers"
    why = f"a rank lacks {size_words(missed.fit.shortfall_bytes)} with {recomputed} recomputed."
    return RuledOut(DATA_PARALLEL, _what(ranks, missed), why, missed.fit.shortfall_bytes, remedies)


def _candidate(placed: PlacedSharding) -> Candidate:
    ranks, one = placed.ranks, placed.weighed
    recompute = one.fit.recompute[0]
    plan = ranks.plan(ranks.unit(one.sharding, recompute), one.size)
    bound_s = placed.load.busiest_s(recompute) + ranks.sharded(one.sharding).step_s
    facts = (*_balance_facts(placed), *_sharding_facts(ranks, one), *_recompute_facts(placed))
    return Candidate(DATA_PARALLEL, _what(ranks, one), plan, one.estimate_s, bound_s, facts)


def _what(ranks: DataParallelSearch, one: ShardingEstimate) -> str:
    tensor = f"TP {ranks.tp}, " if ranks.tp > 1 else ""
    groups = f" in groups of {one.sharding.shard_size}" if one.sharding.shard_size else ""
    return f"{tensor}DP {ranks.dp}, ZeRO {one.sharding.zero}{groups}, {_examples(one.size)} at a time"


def _balance_facts(placed: PlacedSharding) -> Iterator[str]:
    ranks, one, recompute = placed.ranks, placed.weighed, placed.weighed.fit.recompute[0]
    if ranks.balance == "off":
        return
    most, kept = _most_unbalanced(ranks, one), " with everything recomputed" if any(recompute.values()) else ""
    if most < one.size:
        yield f"Balanced lengths let {_examples(one.size)} a rank fit; unbalanced, {most}{kept}."
    unbalanced = ranks.unbalanced(one.size, ranks.job.batch_size)
    waits_s, longer_s = placed.load.waiting_s(recompute), unbalanced.waiting_s(recompute)
    if longer_s > waits_s:
        how = ", ".join(method.replace("_", " ") for method in dict.fromkeys(placed.load.methods))
        yield (
            f"Balanced ({how}), the busiest ranks compute for {shown_seconds(waits_s)} a step; otherwise, for "
            f"{shown_seconds(longer_s)}."
        )


def _most_unbalanced(ranks: DataParallelSearch, one: ShardingEstimate) -> int:
    """Examples of a rank, at most one.size, that fit where nothing is balanced: with all recomputation there is, if it
    takes any.
    """
    mode: RecomputeMode = ranks.pins.recompute or ("full" if any(one.fit.recompute[0].values()) else "none")
    fits, above = 0, one.size + 1
    while above - fits > 1:
        size = (fits + above) // 2
        shortfall_bytes = ranks.fit(ranks.unbalanced(size, size * ranks.dp), one.sharding, mode).shortfall_bytes
        fits, above = (fits, size) if shortfall_bytes else (size, above)
    return fits


def _sharding_facts(ranks: DataParallelSearch, one: ShardingEstimate) -> Iterator[str]:
    if not one.sharding.shard_size:
        return
    number = ranks.job.batch_size // ranks.dp // one.size
    own_s = ranks.sharded(one.sharding).communication_s(number)
    whole_s = ranks.sharded(ZeroSharding(one.sharding.zero, 0)).communication_s(number)
    if whole_s > own_s:
        yield (
            f"Sharding in groups of {one.sharding.shard_size} communicates for {shown_seconds(own_s)} a step, hidden "
            f"or not; over all {ranks.dp:,} ranks, for {shown_seconds(whole_s)}."
        )


def _recompute_facts(placed: PlacedSharding) -> Iterator[str]:
    recompute, model = placed.weighed.fit.recompute[0], placed.ranks.job.model
    counts = [
        f"{count} of {len(model.module(name).blocks)} layers of {name}" for name, count in recompute.items() if count
    ]
    if counts:
        recompute_s = placed.load.waiting_s(recompute) - placed.load.waiting_s({})
        yield f"Recomputes {', '.join(counts)}: {shown_seconds(recompute_s)} a step."


def _examples(count: int) -> str:
    return f"{count:,} example{'' if count == 1 else 's'}"
