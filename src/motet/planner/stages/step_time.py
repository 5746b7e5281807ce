"""The step of a pipeline in closed form. Candidates are ranked by it, and simulated afterwards.

Let D be a rank's seconds of forward and backward of one microbatch, and m the number of microbatches.

- 1F1B, of a chain or of modules beside each other: (m - 1) * period + longest path. The longest path is that of one
  microbatch to the end and back, messages included. The period is D of the slowest rank or, if that is longer, path /
  (d + 1) of some stage from which d stages lead to the end: it holds d + 1 microbatches, which all pass while one goes
  to the end and back. For equal stages without messages this is (m - 1 + stages of the longest path) * D (Cornstarch
  section 4.1).
- Interleaved 1F1B: m * D of the slowest rank, and a chunk's share of D of each other rank (Narayanan et al. 2021,
  section 2.2.2). Ranks take turns in a chunk, so that m * (sum over chunks of the slowest rank in it) is a second
  estimate of the first term; the mean of both is taken.
- ZB-H1: m * D of the slowest rank, and of each other rank F + I - W, at least F. ZB-V: m * D, and a sixth of the other
  ranks' D (Qi et al. 2024). With few microbatches both take at least: F + I of all ranks, then F + I of the slowest
  rank for each further microbatch, then the largest W.

Microbatches differ, which makes the steady state longer (`unevenness.py`). Gathers of parameters and reductions of
gradients come at the ends of the step, as far as passes of other stages do not hide them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from motet.core.arrays import Float64Array, Int64Array
from motet.core.plan import SPLITS_BACKWARD, ScheduleKind
from motet.planner.job import Job
from motet.planner.stages.stage_costs import Stages
from motet.schedule.generators.dag import distances


@dataclass(frozen=True, eq=False)
class StageGraph:
    """The stages of a pipeline, and who feeds whom.

    rank:   [num_stages], the pipeline rank of each stage.
    edges:  between stages, from lower to higher numbers.
    uneven: factor of the steady state because microbatches differ (`unevenness.py`).
    """

    schedule: ScheduleKind
    num_microbatches: int
    rank: Int64Array
    edges: Sequence[tuple[int, int]]
    uneven: float = 1.0


def pipeline_s(graph: StageGraph, stages: Stages, send_s: Float64Array) -> float:
    """Seconds of all passes. send_s: [num_edges], seconds of one message, an output or its gradient."""
    rank_s = np.bincount(graph.rank, stages.seconds).astype(np.float64)
    sent_s = 2 * float(send_s[: len(rank_s)].sum())
    if graph.schedule == "interleaved_1f1b":
        return _interleaved_s(graph, stages, rank_s) + sent_s
    if graph.schedule in SPLITS_BACKWARD:
        return _zero_bubble_s(graph, stages, rank_s) + sent_s
    return _one_f_one_b_s(graph, stages, rank_s, send_s)


def _one_f_one_b_s(graph: StageGraph, stages: Stages, rank_s: Float64Array, send_s: Float64Array) -> float:
    path_s = _longest_paths(graph, stages.seconds, 2 * send_s)
    num_held = np.array(distances(len(graph.rank), graph.edges)) + 1
    period_s = max(float(rank_s.max()), float((path_s / num_held).max()))
    return (graph.num_microbatches - 1) * period_s * graph.uneven + float(path_s.max())


def _interleaved_s(graph: StageGraph, stages: Stages, rank_s: Float64Array) -> float:
    slowest_s, others_s = _slowest_and_others(rank_s)
    chunk_s = stages.seconds.reshape(-1, len(rank_s))
    steady_s = graph.num_microbatches * slowest_s * graph.uneven
    in_turns_s = graph.num_microbatches * float(chunk_s.max(axis=1).sum()) * graph.uneven
    return (steady_s + in_turns_s) / 2 + others_s / len(chunk_s)


def _zero_bubble_s(graph: StageGraph, stages: Stages, rank_s: Float64Array) -> float:
    slowest_s, others_s = _slowest_and_others(rank_s)
    steady_s = graph.num_microbatches * slowest_s * graph.uneven
    weight_s = stages.weight_s
    input_s = np.bincount(graph.rank, stages.seconds - weight_s)  # F + I
    further_s = (graph.num_microbatches - 1) * float(input_s.max()) * graph.uneven
    at_least_s = float(input_s.sum() + weight_s.max()) + further_s
    if graph.schedule == "zb_v":
        return max(steady_s + others_s / 6, at_least_s)
    waits_s = np.maximum(stages.seconds - 2 * weight_s, stages.forward_s)
    return max(steady_s + float(np.delete(waits_s, int(np.argmax(rank_s))).sum()), at_least_s)


def _slowest_and_others(rank_s: Float64Array) -> tuple[float, float]:
    """The seconds of the slowest rank, and of all other ranks together."""
    slowest_s = float(rank_s.max())
    return slowest_s, float(rank_s.sum()) - slowest_s


def _longest_paths(graph: StageGraph, stage_s: Float64Array, edge_s: Float64Array) -> Float64Array:
    """[num_stages]: seconds of the longest path from each stage to an end, the stage included."""
    path_s = stage_s.copy()
    for number in sorted(range(len(graph.edges)), key=lambda number: -graph.edges[number][0]):
        source, sink = graph.edges[number]
        path_s[source] = max(path_s[source], stage_s[source] + edge_s[number] + path_s[sink])
    return path_s


def exposed_collectives_s(job: Job, stages: Stages, rank: Int64Array, data_ranks: Sequence[range]) -> float:
    """Seconds of gathers before the passes and reductions after them, as far as nothing hides them, and the optimizer.

    rank:       [num_stages], the pipeline rank of each stage.
    data_ranks: by stage, the ranks of the cluster that share its state (ZeRO 1).
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
        # The passes of earlier stages hide a stage's gather and its reduction.
        before, after = max(before, gather_s - forward_s), max(after, reduce_s - backward_s)
        forward_s += float(stages.forward_s[stage])
        backward_s += float(stages.backward_s[stage])
    return before + after


def work_s(graph: StageGraph, stages: Stages) -> float:
    """A lower bound of any simulated step: the computation of the busiest rank, rounded down."""
    return graph.num_microbatches * float(np.bincount(graph.rank, stages.seconds).max()) * (1 - 1e-9)
