"""The degrees of parallelism that a job allows for a chain, ranked by the seconds that each would take at best.

At best means: an even cut, no messages and collectives, and the recomputation that ranks need if all are as full as the
mean. Tensor parallelism stays within a node or takes whole ones, pipelines divide the other ranks unless these are few,
and data parallelism takes as many replicas as ranks and batch allow. Interleaving needs a multiple of the pipeline
ranks as the number of microbatches, as in Megatron-LM.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from heapq import heapify, heappop, heapreplace

import numpy as np

from motet.core.arrays import Float64Array
from motet.core.plan import ScheduleKind
from motet.core.words import size_words
from motet.planner.candidate import CHAIN, Pins, RuledOut
from motet.planner.degrees import SCHEDULE_NAMES, Degrees, allowed_microbatch_sizes, most_replicas
from motet.planner.infeasible import indivisible, nothing_divides, tensor_degrees
from motet.planner.job import Job
from motet.planner.stages.recompute import RecomputeMode
from motet.planner.stages.unevenness import unevenness

CHAIN_CHUNKS = (2, 4, 8, 12)
MAX_STAGES = 96
"""The most stages of an interleaved pipeline. More take long to cut evenly, and send more than they save."""

MAX_CHUNKED = 32
"""The most pipeline ranks that have several chunks each, unless the pipeline ranks are pinned."""

_FEW_RANKS = 16
"""Up to so many ranks, a pipeline may have any number of them, which leaves some over."""

_NUM_PROBES = 64
"""The number of limits that `_slowest_stage_s` tries."""


class FeasibleDegrees:
    """The degrees that the pins allow and whose ranks can hold the model's state.

    ruled_out: the nearest miss if some degrees lack memory for the state; or why there are no degrees at all.
    """

    def __init__(self, job: Job, pins: Pins, names: tuple[str, ...]) -> None:
        self.job, self.mode = job, pins.recompute or "least"
        self.ruled_out: list[RuledOut] = []
        self._whole = cache(lambda size, tp: _Whole.of(job, names, size, tp))
        self._uneven = cache(lambda *shape: unevenness(job, shape[0], shape[1], shape[2:]))
        self._degrees: list[Degrees] = []
        full: list[tuple[float, Degrees]] = []
        num_blocks = sum(len(job.model.module(name).blocks) for name in names)
        for degrees in _allowed(job, pins, num_blocks):
            state_bytes = self.whole(degrees).state_bytes(job, degrees.dp)
            shortfall_bytes = state_bytes / degrees.pp - job.capacity_bytes
            if shortfall_bytes > 0:
                full.append((shortfall_bytes, degrees))
            else:
                self._degrees.append(degrees)
        if full:
            shortfall_bytes, degrees = min(full, key=lambda entry: entry[0])
            why = f"parameters, gradients and optimizer alone lack {size_words(shortfall_bytes)} on each rank."
            self.ruled_out.append(RuledOut(CHAIN, degrees.words, why, shortfall_bytes))
        elif not self._degrees:
            self.ruled_out.append(RuledOut(CHAIN, "", _nothing_allowed(job, pins, num_blocks)))

    def whole(self, degrees: Degrees) -> _Whole:
        """The costs of the whole model. Cached."""
        whole: _Whole = self._whole(degrees.microbatch_size, degrees.tp)
        return whole

    def uneven(self, degrees: Degrees) -> float:
        """Factor of the steady state because microbatches differ (`unevenness`). Cached."""
        factor: float = self._uneven(degrees.microbatch_size, degrees.tp, degrees.schedule, degrees.pp, degrees.dp)
        return factor

    def by_seconds(self) -> Iterator[tuple[float, Degrees]]:
        """(seconds at best, degrees), the fewest seconds first.

        Uneven microbatches and blocks are counted only for degrees that come up to the front: they take long to count,
        and only add seconds.
        """
        at_best = functools.partial(_at_best_s, self.job, mode=self.mode)
        queue = [(at_best(self.whole(degrees), degrees), index, False) for index, degrees in enumerate(self._degrees)]
        heapify(queue)
        while queue:
            at_best_s, index, is_final = queue[0]
            degrees = self._degrees[index]
            if is_final:
                heappop(queue)
                yield at_best_s, degrees
            else:
                uneven_s = at_best(self.whole(degrees), degrees, uneven=self.uneven(degrees))
                heapreplace(queue, (max(at_best_s, uneven_s), index, True))

    def by_memory(self) -> list[Degrees]:
        """The degrees, those that need the least memory with all allowed recomputation first."""

        def needed_bytes(degrees: Degrees) -> float:
            whole, most = self.whole(degrees), float(_in_flight(degrees).max())
            kept_bytes = whole.kept_bytes - whole.saved_bytes * (self.mode != "none")
            return (whole.state_bytes(self.job, degrees.dp) + most * kept_bytes) / degrees.pp

        return sorted(self._degrees, key=needed_bytes)


def _nothing_allowed(job: Job, pins: Pins, num_blocks: int) -> str:
    if pins.schedule not in (None, *SCHEDULE_NAMES):
        return f"a chain runs in {', '.join(SCHEDULE_NAMES.values())}; the schedule is pinned to {pins.schedule!r}."
    return indivisible(job, pins, num_blocks, "model") or nothing_divides(job)


def _allowed(job: Job, pins: Pins, num_blocks: int) -> Iterator[Degrees]:
    # Neighbouring modules may share a pipeline rank, and each may have ranks of its own.
    least = max((pins.of(module.name).pp or 1 for module in job.model.modules), default=1)
    most = sum(pins.of(module.name).pp or len(module.blocks) for module in job.model.modules)
    for tp in tensor_degrees(job):
        if not pins.allow(tp=tp):
            continue
        for pp in _pipeline_degrees(job.cluster.num_ranks // tp, num_blocks) if pins.pp is None else (pins.pp,):
            if not least <= pp <= most:
                continue
            dp = most_replicas(job, tp * pp, pins) if pp <= num_blocks else 0
            for size in allowed_microbatch_sizes(job, dp, pins) if dp else ():
                num = job.batch_size // (dp * size)
                for kind, num_chunks in _schedules(pp, num, num_blocks, pins):
                    yield Degrees(tp, pp, dp, size, num, kind, num_chunks)


def _pipeline_degrees(num_ranks: int, most: int) -> list[int]:
    """Divisors of the ranks; of few ranks every number, as all of them may be more than the batch can use."""
    return [
        degree for degree in range(1, min(num_ranks, most) + 1) if num_ranks <= _FEW_RANKS or num_ranks % degree == 0
    ]


def _schedules(pp: int, num_microbatches: int, num_blocks: int, pins: Pins) -> Iterator[tuple[ScheduleKind, int]]:
    if pins.allow(schedule="1f1b"):
        yield "1f1b", 1
    if pp == 1:
        return
    if pins.allow(schedule="zb_h1"):
        yield "zb_h1", 1
    if pp > MAX_CHUNKED and pins.pp is None:
        return
    if pins.allow(schedule="zb_v") and 2 * pp <= num_blocks:
        yield "zb_v", 2
    if pins.allow(schedule="interleaved_1f1b") and num_microbatches % pp == 0:
        for num_chunks in CHAIN_CHUNKS:
            if pp * num_chunks <= min(num_blocks, MAX_STAGES):
                yield "interleaved_1f1b", num_chunks


@dataclass(frozen=True, eq=False)
class _Whole:
    """Costs of the model on one tensor-parallel rank, for one microbatch.

    input_s: seconds without gradients of weights. block_s, block_recompute_s: [num_blocks].
    """

    forward_s: float
    input_s: float
    total_s: float
    recompute_s: float
    parameters: float
    trainable: float
    kept_bytes: float
    saved_bytes: float
    block_s: Float64Array
    block_recompute_s: Float64Array

    @classmethod
    def of(cls, job: Job, names: tuple[str, ...], num_examples: int, tp: int) -> _Whole:
        """The modules `names` together, for microbatches of num_examples."""
        costs = [job.block_costs(name, num_examples, tp) for name in names]

        def total(column: str) -> float:
            return float(sum(getattr(cost, column).sum() for cost in costs))

        return cls(
            total("forward_s"),
            total("forward_s") + total("backward_s") - total("deferred_s"),
            total("forward_s") + total("backward_s"),
            total("recompute_s"),
            total("parameters"),
            total("trainable"),
            total("kept_bytes"),
            total("saved_bytes"),
            np.concatenate([cost.forward_s + cost.backward_s for cost in costs]),
            np.concatenate([cost.recompute_s for cost in costs]),
        )

    def state_bytes(self, job: Job, dp: int) -> float:
        """Bytes of parameters, gradients and optimizer; the optimizer is sharded over dp replicas."""
        size = job.mixed_precision(pipeline=True)
        return size.stored * self.parameters + (size.gradient + size.optimizer / dp) * self.trainable


def _at_best_s(job: Job, whole: _Whole, degrees: Degrees, mode: RecomputeMode, uneven: float = 0.0) -> float:
    """Seconds of passes that are cut evenly, as in `step_time.pipeline_s`.

    uneven: factor of the steady state; the cut is then as even as whole blocks can be. 0: everything is even.
    """
    share = _recomputed_share(job, whole, degrees, mode)
    total_s = whole.total_s + share * whole.recompute_s
    rank_s = total_s / degrees.pp
    if uneven:
        block_s = whole.block_s + share * whole.block_recompute_s
        rank_s = max(rank_s, (_slowest_stage_s if degrees.num_chunks == 1 else _slowest_rank_s)(block_s, degrees.pp))
    steady_s = degrees.num_microbatches * rank_s * (uneven or 1.0)
    if degrees.schedule == "1f1b":
        return steady_s - rank_s + total_s
    if degrees.schedule == "zb_h1":
        return max(steady_s + whole.forward_s * (degrees.pp - 1) / degrees.pp, whole.input_s)
    num_waits = 6 if degrees.schedule == "zb_v" else degrees.num_chunks
    at_least_s = whole.input_s if degrees.schedule == "zb_v" else 0.0
    return max(steady_s + max(total_s - rank_s, 0.0) / num_waits, at_least_s)


def _recomputed_share(job: Job, whole: _Whole, degrees: Degrees, mode: RecomputeMode) -> float:
    """The share of the model that is recomputed, a mean over the pipeline ranks."""
    if mode != "least":
        return 1.0 if mode == "full" else 0.0
    in_flight = _in_flight(degrees)
    left_bytes = job.capacity_bytes - whole.state_bytes(job, degrees.dp) / degrees.pp
    lacking_bytes = in_flight * whole.kept_bytes / degrees.pp - left_bytes
    savable_bytes = in_flight * whole.saved_bytes / degrees.pp
    return float(np.clip(lacking_bytes / np.maximum(savable_bytes, 1), 0, 1).mean())


def _slowest_stage_s(block_s: Float64Array, num_stages: int) -> float:
    """A lower bound of the slowest stage of any cut.

    It is below the best cut by at most a factor of 1 + 1 / _NUM_PROBES; by a factor of 2 where the best cut is far from
    even. Each probe is a limit on the stages; it is enough if stages that are filled up to it hold all blocks.
    """
    prefix = np.concatenate([[0.0], np.cumsum(block_s)])
    least = max(prefix[-1] / num_stages, float(block_s.max()))
    probes = least * (1 + np.arange(_NUM_PROBES) / _NUM_PROBES)
    stop = np.zeros(_NUM_PROBES, dtype=np.int64)
    for _ in range(num_stages):
        stop = np.searchsorted(prefix, prefix[stop] + probes, side="right") - 1
    holds_all = stop == len(block_s)
    enough = int(np.argmax(holds_all)) if holds_all.any() else _NUM_PROBES
    return float(probes[max(enough - 1, 0)])


def _slowest_rank_s(block_s: Float64Array, num_ranks: int) -> float:
    """A lower bound of the slowest rank if each may hold any blocks: some rank holds ceil(n / num_ranks) of the n
    slowest blocks, for each n."""
    slowest = np.sort(block_s)[::-1]
    return float((np.ceil(np.arange(1, len(slowest) + 1) / num_ranks) * slowest).max())


def _in_flight(degrees: Degrees) -> Float64Array:
    """[pp]: the most microbatches in flight on each pipeline rank, in units of the rank's whole share of the model."""
    rank, pp, num = np.arange(degrees.pp), degrees.pp, degrees.num_microbatches
    if degrees.schedule == "1f1b":
        held = pp - rank.astype(np.float64)
    elif degrees.schedule == "interleaved_1f1b":
        held = ((degrees.num_chunks - 1) * pp + 2 * (pp - 1 - rank) + 1) / degrees.num_chunks
    else:
        held = np.full(pp, float(pp))
    return np.minimum(held, num)
