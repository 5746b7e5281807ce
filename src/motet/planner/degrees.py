"""The degrees of parallelism that a job can be given: what divides, in order of what each would take at best.

At best is cut evenly, without recomputation, messages and collectives. Tensor parallelism stays within a node, data
parallelism takes the rest: the most replicas that the batch divides into. Interleaving needs microbatches in multiples
of the pipeline ranks, as Megatron-LM does.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from motet.core.plan import ScheduleKind
from motet.planner.candidate import Pins, RuledOut
from motet.planner.job import Job

TENSOR = (1, 2, 4, 8)
MICROBATCH_SIZES = (1, 2, 4, 8, 16, 32, 64)
CHUNKS = (2, 4, 8, 12)
MAX_STAGES = 128
"""Of an interleaved pipeline: more take long to even out, and send more than they save."""

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

    def mends(self, job: Job, *, can_recompute: bool) -> Iterator[str]:
        """What would leave more room."""
        if can_recompute:
            yield "recomputation"
        if self.microbatch_size > 1:
            yield f"microbatches of {self.microbatch_size // 2}"
        if self.tp * 2 in tensor_degrees(job):
            yield f"TP {self.tp * 2}"
        yield f"more than {self.pp} pipeline ranks"


def tensor_degrees(job: Job) -> list[int]:
    return [tp for tp in TENSOR if job.cluster.ranks_per_node % tp == 0]


def most_replicas(job: Job, num_ranks: int, pins: Pins) -> int:
    """The most data-parallel replicas of num_ranks ranks each that the cluster has room and the batch whole examples
    for; 0 for none."""
    room = job.cluster.num_ranks // num_ranks
    if pins.dp is not None:
        return pins.dp if pins.dp <= room and job.batch_size % pins.dp == 0 else 0
    return next((dp for dp in range(min(room, job.batch_size), 0, -1) if job.batch_size % dp == 0), 0)


def microbatch_sizes(job: Job, dp: int, pins: Pins) -> list[int]:
    sizes = MICROBATCH_SIZES if pins.microbatch_size is None else (pins.microbatch_size,)
    return [size for size in sizes if job.batch_size % (dp * size) == 0]


def all_degrees(job: Job, pins: Pins, names: tuple[str, ...]) -> tuple[list[tuple[float, Degrees]], list[RuledOut]]:
    """(seconds at best, degrees), the fewest seconds first; and what the pins rule out."""
    if not pins.allow(balance="off"):
        why = f"Balance {pins.balance!r} is of data parallelism; in a pipeline it is 'off'."
        return [], [RuledOut("chain", "any", why, mends=("balance 'off'",))]
    num_blocks = sum(len(job.model.module(name).blocks) for name in names)
    found = []
    for tp in tensor_degrees(job):
        if not pins.allow(tp=tp):
            continue
        for pp in range(1, min(num_blocks, job.cluster.num_ranks // tp) + 1):
            dp = most_replicas(job, tp * pp, pins) if pins.allow(pp=pp) else 0
            for size in microbatch_sizes(job, dp, pins) if dp else ():
                num = job.batch_size // (dp * size)
                for kind, num_chunks in _schedules(pp, num, num_blocks, pins):
                    degrees = Degrees(tp, pp, dp, size, num, kind, num_chunks)
                    found.append((_at_best_s(job, names, degrees), degrees))
    if not found:
        ranks = f"{job.cluster.num_ranks} ranks and a batch of {job.batch_size}"
        why = f"No degrees that are allowed divide {ranks}; TP must divide {job.cluster.ranks_per_node} ranks of a node."
        return [], [RuledOut("chain", "any", why)]
    return sorted(found, key=lambda entry: entry[0]), []


def _schedules(pp: int, num_microbatches: int, num_blocks: int, pins: Pins) -> Iterator[tuple[ScheduleKind, int]]:
    if pins.allow(schedule="1f1b"):
        yield "1f1b", 1
    if pp == 1:
        return
    if pins.allow(schedule="zb_h1"):
        yield "zb_h1", 1
    if pins.allow(schedule="zb_v") and 2 * pp <= num_blocks:
        yield "zb_v", 2
    if pins.allow(schedule="interleaved_1f1b") and num_microbatches % pp == 0:
        for num_chunks in CHUNKS:
            if pp * num_chunks <= min(num_blocks, MAX_STAGES):
                yield "interleaved_1f1b", num_chunks


def _at_best_s(job: Job, names: tuple[str, ...], degrees: Degrees) -> float:
    """Of passes that are cut evenly: no cut takes less, as `step_time.pipeline_s` has it."""
    costs = [job.block_costs(name, degrees.microbatch_size, degrees.tp) for name in names]
    forward_s = sum(float(cost.forward_s.sum()) for cost in costs)
    total_s = forward_s + sum(float(cost.backward_s.sum()) for cost in costs)
    largest = max(float((cost.forward_s + cost.backward_s).max()) for cost in costs)
    rank_s, others = max(total_s / degrees.pp, largest), degrees.pp - 1
    steady = degrees.num_microbatches * rank_s
    if degrees.schedule == "1f1b":
        return (degrees.num_microbatches - 1) * rank_s + total_s
    share = {"interleaved_1f1b": 1 / degrees.num_chunks, "zb_v": 1 / 6, "zb_h1": 0.0}[degrees.schedule]
    waits = share * (total_s - rank_s) if share else forward_s * others / degrees.pp
    return steady + float(np.maximum(waits, 0.0))
