"""Whether half of a cluster could be faster than all of it.

It can be: a batch may have too few examples for so many ranks, or divide among none of them, or collectives may take
longer than the ranks save. The search on fewer ranks is the one for a smaller cluster, so twice the devices never make
the best step slower; the other ranks are idle, and the report says so.

Two bounds rule a search out, for n ranks:

- memory: n ranks must hold the state of the model once;
- time: a step takes at least (all computation, in one microbatch, without padding and recomputation) / n. So if the
  ranks of a step compute for more than half of the time, no half of them is faster.
"""

from __future__ import annotations

import math
from dataclasses import replace

from motet.core.errors import UserError
from motet.planner.candidate import Candidate
from motet.planner.data_parallel.loads import EvenBatch
from motet.planner.job import Job


def half_of(job: Job) -> Job | None:
    """The job on the first half of the nodes or, if there is one node, of its ranks; rounded down.

    None where no rank would be left, or where the half cannot hold the state of the model.
    """
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
    """A lower bound of the step of every Plan on the job's ranks. 0 where a profile lacks times without TP.

    It is a bound because layers take least for all rows at once, and tensor parallelism at best divides their time.
    """
    try:
        return EvenBatch(job).load(1, 1, 1).waiting_s({}) / job.cluster.num_ranks
    except UserError:
        return 0.0


def on_cluster(candidate: Candidate, job: Job, all_s: float) -> Candidate:
    """A candidate for fewer ranks as one for the job's cluster.

    all_s: the fastest step on all of its ranks; infinite for none.
    """
    num_ranks = job.cluster.num_ranks
    why = f"takes {all_s:.4g} s" if all_s < math.inf else "does not exist"
    fact = f"The fastest plan for all {num_ranks:,} ranks {why}."
    others = [known for known in candidate.facts if not known.startswith("The fastest plan for all")]
    return replace(candidate, plan=replace(candidate.plan, cluster=job.cluster), facts=(fact, *others))


def _state_bytes(job: Job) -> float:
    """Bytes of parameters, gradients and optimizer, once: with a pipeline or without, the fewer of both."""
    layers = [layer for module in job.model.modules for layer in module.layers]
    total = sum(layer.parameters for layer in layers)
    trainable = sum(layer.parameters for layer in layers if layer.trainable)
    sizes = [job.mixed_precision(pipeline=pipeline) for pipeline in (False, True)]
    return min(size.stored * total + (size.gradient + size.optimizer) * trainable for size in sizes)
