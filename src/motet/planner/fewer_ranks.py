"""Whether half of a cluster could be faster than all of it: where a batch has too few examples for so many ranks, or
divides among none of them, or collectives take longer than they save.

Searched with fewer ranks is what a user would get for a smaller cluster. So twice the devices never make the best step
slower; the ranks that are left over are idle, and said to be. No step on n ranks takes less than all that must be
computed, in one microbatch, without padding and recomputation, divided by n; and no n ranks hold less than the state of
the model once. What that rules out is not searched: of a step that keeps its ranks busy for more than half of the time,
no half can be faster.
"""

from __future__ import annotations

import math
from dataclasses import replace

from motet.core.errors import UserError
from motet.planner.candidate import Candidate
from motet.planner.data_parallel.loads import EvenBatch
from motet.planner.job import Job


def half_of(job: Job) -> Job | None:
    """The same job on the first half of the nodes, of one node on the first half of its ranks, rounded down; None where
    that would be none, or where the state of the model alone is larger than its memory."""
    cluster = job.cluster
    if cluster.num_ranks == 1:
        return None
    if cluster.num_nodes > 1:
        half = replace(cluster, num_nodes=cluster.num_nodes // 2)
    else:
        half = replace(cluster, ranks_per_node=cluster.ranks_per_node // 2)
    fewer = replace(job, cluster=half)
    return fewer if _state_bytes(job) <= half.num_ranks * fewer.capacity_bytes else None


def least_step_s(job: Job) -> float:
    """No Plan on these ranks takes less. 0 where a profile does not say what a layer takes without tensor parallelism.

    Layers take less for all rows at once than for some at a time, and tensor parallelism divides them at best.
    """
    try:
        return EvenBatch(job).load(1, 1, 1).waiting_s({}) / job.cluster.num_ranks
    except UserError:
        return 0.0


def on_cluster(candidate: Candidate, job: Job, all_s: float) -> Candidate:
    """A candidate for fewer ranks as one of the whole cluster. all_s: the fastest step on all of it; inf for none."""
    num_ranks = job.cluster.num_ranks
    why = f"takes {all_s:.4g} s" if all_s < math.inf else "does not exist"
    fact = f"The fastest plan for all {num_ranks:,} ranks {why}."
    known = [own for own in candidate.facts if not own.startswith("The fastest plan for all")]
    return replace(candidate, plan=replace(candidate.plan, cluster=job.cluster), facts=(fact, *known))


def _state_bytes(job: Job) -> float:
    """Parameters, gradients and optimizer, once."""
    layers = [layer for module in job.model.modules for layer in module.layers]
    total = sum(layer.parameters for layer in layers)
    trainable = sum(layer.parameters for layer in layers if layer.trainable)
    sizes = [job.mixed_precision(pipeline=pipeline) for pipeline in (False, True)]
    return min(own.stored * total + (own.gradient + own.optimizer) * trainable for own in sizes)
