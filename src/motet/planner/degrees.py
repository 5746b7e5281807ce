"""The degrees of parallelism that a job can be given: what divides, in order of what each would take at best.

At best is cut evenly, without messages and collectives, with the recomputation that the ranks need if they are all as
full as the mean. Tensor parallelism stays within a node, pipelines divide the rest, and data parallelism takes the most
replicas that the batch divides into. Interleaving needs microbatches in multiples of the pipeline ranks, as Megatron-LM
does.
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
from motet.planner.candidate import CHAIN, Pins, RuledOut, size_words
from motet.planner.infeasible import indivisible, nothing_divides, tensor_degrees
from motet.planner.job import Job
from motet.planner.stages.recompute import RecomputeMode
from motet.planner.stages.unevenness import unevenness

MICROBATCH_SIZES = (1, 2, 4, 8, 16, 32, 64)
CHAIN_CHUNKS = (2, 4, 8, 12)
MAX_STAGES = 96
"""Of an interleaved pipeline: more take long to even out, and send more than they save."""

_PROBES = 64

MAX_CHUNKED = 32
"""Pipeline ranks with several chunks."""

NAMES = {"1f1b": "1F1B", "interleaved_1f1b": "interleaved 1F1B", "zb_h1": "ZB-H1", "zb_v": "ZB-V"}


@dataclass(frozen=True)
class Degrees:
    """Of a chain. num_chunks: stages of a pipeline rank."""

    tp: int
    pp: int
    dp: int
    microbatch_size: int
    num_microbatches: int
    schedule: ScheduleKind = "1f1b"
    num_chunks: int = 1

    @property
    def num_stages(self) -> int:
        return self.pp * self.num_chunks

    @property
    def words(self) -> str:
        chunks = f" of {self.num_chunks} chunks" if self.schedule == "interleaved_1f1b" else ""
        return (
            f"TP {self.tp}, PP {self.pp}, DP {self.dp}, {NAMES[self.schedule]}{chunks}, "
            f"microbatches of {self.microbatch_size}"
        )


def most_replicas(job: Job, num_ranks: int, pins: Pins) -> int:
    """The most data-parallel replicas of num_ranks ranks each that the cluster has room and the batch whole examples
    for; 0 for none."""
    room = job.cluster.num_ranks // num_ranks
    if pins.dp is not None:
        return pins.dp if pins.dp <= room and job.batch_size % pins.dp == 0 else 0
    return next((dp for dp in range(min(room, job.batch_size), 0, -1) if job.batch_size % dp == 0), 0)


def allowed_microbatch_sizes(job: Job, dp: int, pins: Pins) -> list[int]:
    sizes = MICROBATCH_SIZES if pins.microbatch_size is None else (pins.microbatch_size,)
    return [size for size in sizes if job.batch_size % (dp * size) == 0]


class Considered:
    """All degrees of a job that the pins allow, and that the state of a model as such fits into."""

    def __init__(self, job: Job, pins: Pins, names: tuple[str, ...]) -> None:
        self.job, self.mode = job, pins.recompute or "least"
        self.ruled_out: list[RuledOut] = []
        self._whole = cache(lambda size, tp: _Whole.of(job, names, size, tp))
        self._uneven = cache(lambda *shape: unevenness(job, shape[0], shape[1], shape[2:]))
        self._found: list[Degrees] = []
        full: list[tuple[float, Degrees]] = []
        num_blocks = sum(len(job.model.module(name).blocks) for name in names)
        for degrees in _allowed(job, pins, num_blocks):
            state_bytes = self.whole(degrees).state_bytes(job, degrees.dp)
            shortfall_bytes = state_bytes / degrees.pp - job.capacity_bytes
            if shortfall_bytes > 0:
                full.append((shortfall_bytes, degrees))
            else:
                self._found.append(degrees)
        if full:
            shortfall_bytes, degrees = min(full, key=lambda entry: entry[0])
            why = f"parameters, gradients and optimizer alone lack {size_words(shortfall_bytes)} on each rank."
            self.ruled_out.append(RuledOut(CHAIN, degrees.words, why, shortfall_bytes))
        elif not self._found:
            self.ruled_out.append(RuledOut(CHAIN, "", _nothing_allowed(job, pins, num_blocks)))

    def whole(self, degrees: Degrees) -> _Whole:
        found: _Whole = self._whole(degrees.microbatch_size, degrees.tp)
        return found

    def uneven(self, degrees: Degrees) -> float:
        """How much longer the steady state is because microbatches differ."""
        own = degrees
        found: float = self._uneven(own.microbatch_size, own.tp, own.schedule, own.pp, own.dp)
        return found

    def by_seconds(self) -> Iterator[tuple[float, Degrees]]:
        """(seconds at best, degrees), the fewest seconds first."""
        at_best = functools.partial(_at_best_s, self.job, mode=self.mode)
        queue = [(at_best(self.whole(own), own), place, False) for place, own in enumerate(self._found)]
        heapify(queue)
        while queue:
            at_best_s, place, exact = queue[0]
            degrees = self._found[place]
            if exact:
                heappop(queue)
                yield at_best_s, degrees
            else:
                even_s = at_best(self.whole(degrees), degrees, uneven=self.uneven(degrees))
                heapreplace(queue, (max(at_best_s, even_s), place, True))

    def by_memory(self) -> list[Degrees]:
        """Those that need the least first, all recomputed that may be."""

        def needed(degrees: Degrees) -> float:
            whole, most = self.whole(degrees), float(_in_flight(degrees).max())
            kept_bytes = whole.kept_bytes - whole.saved_bytes * (self.mode != "none")
            return (whole.state_bytes(self.job, degrees.dp) + most * kept_bytes) / degrees.pp

        return sorted(self._found, key=needed)


def _nothing_allowed(job: Job, pins: Pins, num_blocks: int) -> str:
    if not pins.allow(balance="off"):
        return f"in a pipeline nothing is balanced; balance is pinned to {pins.balance!r}."
    if pins.schedule not in (None, *NAMES):
        return f"a chain runs in {', '.join(NAMES.values())}; the schedule is pinned to {pins.schedule!r}."
    return indivisible(job, pins, num_blocks, "model") or nothing_divides(job)


def _allowed(job: Job, pins: Pins, num_blocks: int) -> Iterator[Degrees]:
    if not pins.allow(balance="off"):
        return
    for tp in tensor_degrees(job):
        if not pins.allow(tp=tp):
            continue
        for pp in _divisors(job.cluster.num_ranks // tp, num_blocks) if pins.pp is None else (pins.pp,):
            dp = most_replicas(job, tp * pp, pins) if pp <= num_blocks else 0
            for size in allowed_microbatch_sizes(job, dp, pins) if dp else ():
                num = job.batch_size // (dp * size)
                for kind, num_chunks in _schedules(pp, num, num_blocks, pins):
                    yield Degrees(tp, pp, dp, size, num, kind, num_chunks)


def _divisors(number: int, most: int) -> list[int]:
    return [divisor for divisor in range(1, min(number, most) + 1) if number % divisor == 0]


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
    """The model on one tensor-parallel rank, for one microbatch. input_s: without gradients of weights."""

    forward_s: float
    input_s: float
    total_s: float
    recompute_s: float
    parameters: float
    trainable: float
    kept_bytes: float
    saved_bytes: float
    block_s: Float64Array
    block_again_s: Float64Array

    @classmethod
    def of(cls, job: Job, names: tuple[str, ...], num_examples: int, tp: int) -> _Whole:
        """Of these modules, for microbatches of num_examples."""
        costs = [job.block_costs(name, num_examples, tp) for name in names]

        def total(column: str) -> float:
            return float(sum(getattr(cost, column).sum() for cost in costs))

        return cls(
            total("forward_s"),
            total("forward_s") + total("backward_s") / 2,
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
        size = job.mixed_precision(pipeline=True)
        return size.stored * self.parameters + (size.gradient + size.optimizer / dp) * self.trainable


def _at_best_s(job: Job, whole: _Whole, degrees: Degrees, mode: RecomputeMode, uneven: float = 0.0) -> float:
    """Of passes that are cut evenly, as `step_time.pipeline_s` has them.

    uneven: of microbatches; and the cut is as even as blocks can be. 0: as if both were as even as can be.
    """
    share = 1.0 if mode == "full" else 0.0
    if mode == "least":
        in_flight = _in_flight(degrees)
        left_bytes = job.capacity_bytes - whole.state_bytes(job, degrees.dp) / degrees.pp
        lacking = in_flight * whole.kept_bytes / degrees.pp - left_bytes
        share = float(np.clip(lacking / np.maximum(in_flight * whole.saved_bytes / degrees.pp, 1), 0, 1).mean())
    total_s = whole.total_s + share * whole.recompute_s
    rank_s = total_s / degrees.pp
    if uneven:
        block_s = whole.block_s + share * whole.block_again_s
        rank_s = max(rank_s, (_slowest_s if degrees.num_chunks == 1 else _fullest_s)(block_s, degrees.pp))
    steady = degrees.num_microbatches * rank_s * (uneven or 1.0)
    if degrees.schedule == "1f1b":
        return steady - rank_s + total_s
    if degrees.schedule == "zb_h1":
        return max(steady + whole.forward_s * (degrees.pp - 1) / degrees.pp, whole.input_s)
    chunks = 6 if degrees.schedule == "zb_v" else degrees.num_chunks
    at_least_s = whole.input_s if degrees.schedule == "zb_v" else 0.0
    return max(steady + max(total_s - rank_s, 0.0) / chunks, at_least_s)


def _slowest_s(block_s: Float64Array, num_stages: int) -> float:
    """Less than the slowest stage of any cut, by a part in _PROBES at most (or in two, where that is far from even)."""
    prefix = np.concatenate([[0.0], np.cumsum(block_s)])
    probes = max(prefix[-1] / num_stages, float(block_s.max())) * (1 + np.arange(_PROBES) / _PROBES)
    place = np.zeros(_PROBES, dtype=np.int64)
    for _ in range(num_stages):
        place = np.searchsorted(prefix, prefix[place] + probes, side="right") - 1
    enough = int(np.argmax(place == len(block_s))) if (place == len(block_s)).any() else _PROBES
    return float(probes[max(enough - 1, 0)])


def _fullest_s(block_s: Float64Array, num_ranks: int) -> float:
    """Less than the slowest of ranks that may hold any blocks: one has its share, rounded up, of the n slowest."""
    slowest = np.sort(block_s)[::-1]
    return float((np.ceil(np.arange(1, len(slowest) + 1) / num_ranks) * slowest).max())


def _in_flight(degrees: Degrees) -> Float64Array:
    """Microbatches that each pipeline rank holds at most, as many of its whole share of the model."""
    rank, pp, num = np.arange(degrees.pp), degrees.pp, degrees.num_microbatches
    if degrees.schedule == "1f1b":
        held = pp - rank.astype(np.float64)
    elif degrees.schedule == "interleaved_1f1b":
        held = ((degrees.num_chunks - 1) * pp + 2 * (pp - 1 - rank) + 1) / degrees.num_chunks
    else:
        held = np.full(pp, float(pp))
    return np.minimum(held, num)
