"""What a step of a pipeline takes, in closed form: candidates are put in order by it, and simulated afterwards.

With D of a rank its forward and backward seconds of one microbatch, m microbatches and P ranks:

- 1F1B, along a chain or across modules: (m - 1) * period + the longest way of one microbatch there and back. The period
  is that of the slowest rank; or of a stage from which d stages lead to the end: it holds d + 1 microbatches, so that
  many go round in the time of the way to the end and back, messages included (Cornstarch section 4.1 for equal stages
  and no messages: (m - 1 + stages on the longest way) * D).
- interleaved: the other ranks' D wait once, each for a chunk of it (Narayanan et al. 2021, section 2.2.2). In a chunk
  ranks take turns, so that between ranks that are even and chunks that are, the larger of both is waited for.
- ZB-H1: m * D and, of the other ranks, F + I - W, at least F; ZB-V: a sixth of their D (Qi et al. 2024). With few
  microbatches, at least F + I of all ranks, then of the slowest for each microbatch, then W.

As microbatches differ, the steady state is longer (`uneven.py`). Parameters are gathered and gradients reduced at the
ends of the step, as far as passes of others do not hide it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from motet.core.arrays import Float64Array, Int64Array
from motet.core.plan import ScheduleKind
from motet.planner.job import Job
from motet.planner.stages.stage_costs import Stages
from motet.schedule.generators.dag import distances


@dataclass(frozen=True, eq=False)
class Flow:
    """rank: [num_stages], of each stage. edges: between stages, from lower to higher numbers. uneven: see uneven.py."""

    schedule: ScheduleKind
    num_microbatches: int
    rank: Int64Array
    edges: Sequence[tuple[int, int]]
    uneven: float = 1.0


def pipeline_s(flow: Flow, stages: Stages, send_s: Float64Array) -> float:
    """Of all passes. send_s: [num_edges], of an output, or of its gradient."""
    device = np.bincount(flow.rank, stages.seconds)
    slowest, longest = float(device.max()), _longest(flow, stages.seconds, 2 * send_s)
    others, sent = float(device.sum()) - slowest, 2 * float(send_s[: len(device)].sum())
    steady = flow.num_microbatches * slowest * flow.uneven
    if flow.schedule == "interleaved_1f1b":
        chunk = stages.seconds.reshape(-1, len(device))
        in_turns = flow.num_microbatches * float(chunk.max(axis=1).sum()) * flow.uneven
        return (steady + in_turns) / 2 + others / len(chunk) + sent
    if flow.schedule in ("zb_h1", "zb_v"):
        blocks = stages.blocks
        weight = stages.sums(np.where(blocks.trainable > 0, blocks.backward_s / 2, 0.0))
        first = np.bincount(flow.rank, stages.seconds - weight)
        few = float(first.sum() + weight.max()) + (flow.num_microbatches - 1) * float(first.max()) * flow.uneven
        if flow.schedule == "zb_v":
            return max(steady + others / 6, few) + sent
        waits = np.maximum(stages.seconds - 2 * weight, stages.forward_s)
        return max(steady + float(np.delete(waits, int(np.argmax(device))).sum()), few) + sent
    depth = np.array(distances(len(flow.rank), flow.edges)) + 1
    period = max(slowest, float((longest / depth).max()))
    return (flow.num_microbatches - 1) * period * flow.uneven + float(longest.max())


def _longest(flow: Flow, stage_s: Float64Array, edge_s: Float64Array) -> Float64Array:
    """Per stage, the seconds of the longest way from it to an end, itself included."""
    found = stage_s.copy()
    for number in sorted(range(len(flow.edges)), key=lambda number: -flow.edges[number][0]):
        source, sink = flow.edges[number]
        found[source] = max(found[source], stage_s[source] + edge_s[number] + found[sink])
    return found


def exposed_collectives_s(job: Job, stages: Stages, rank: Int64Array, data_ranks: Sequence[range]) -> float:
    """Gathering before the passes and reducing after them, as far as it is not hidden, and the optimizer.

    data_ranks: per pipeline rank, those of the cluster that share its state (ZeRO 1).
    """
    blocks, precision = stages.blocks, job.mixed_precision(pipeline=True)
    trainable = stages.sums(blocks.trainable)
    gathered = stages.sums(blocks.parameters) * (trainable > 0)
    updated = np.bincount(rank, trainable)
    before = after = forward_s = backward_s = 0.0
    for stage in range(len(updated)):
        ranks = data_ranks[stage]
        gather_s = reduce_s = 0.0
        if len(ranks) > 1:
            gather_s = job.cost.gather_seconds(float(gathered[stage]) * precision.compute, ranks)
            reduce_s = job.cost.reduce_scatter_seconds(float(trainable[stage]) * precision.gradient, ranks)
        reduce_s += job.cost.step_seconds(round(float(updated[rank[stage]]) / len(ranks)))
        before, after = max(before, gather_s - forward_s), max(after, reduce_s - backward_s)
        forward_s += float(stages.forward_s[stage])
        backward_s += float(stages.backward_s[stage])
    return before + after


def work_s(flow: Flow, stages: Stages) -> float:
    """Of the rank with the most to compute: no simulation is faster. Rounded down."""
    return flow.num_microbatches * float(np.bincount(flow.rank, stages.seconds).max()) * (1 - 1e-9)
