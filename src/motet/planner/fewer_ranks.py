"""Fewer ranks than the cluster has: where they could be faster than all of them.

They can be: a batch may have too few examples for so many ranks, or divide among none of them, or collectives may take
longer than the ranks save. The search on fewer ranks is the one for a smaller cluster, so that more devices never make
the best step slower; the other ranks are idle, and the report says so.

Smaller clusters are those of fewer nodes, and of fewer ranks of one node: every number up to MAX_COUNTED, and of more
those that divide the cluster's. A lower bound of all of their Plans (`step_bound.py`) rules a search out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from motet.core.cluster import Cluster
from motet.core.words import shown_seconds
from motet.planner.candidate import Candidate
from motet.planner.job import Job

MAX_COUNTED = 16
"""Of up to so many nodes, or ranks of one node, every smaller number is a smaller cluster."""


def smaller_jobs(job: Job) -> Iterator[Job]:
    """The job on smaller clusters: fewer nodes, the most first, then fewer ranks of one node."""
    cluster = job.cluster
    for num_nodes in _fewer(cluster.num_nodes):
        yield job.on(replace(cluster, num_nodes=num_nodes))
    for num_ranks in _fewer(cluster.ranks_per_node):
        yield job.on(replace(cluster, num_nodes=1, ranks_per_node=num_ranks))


def on_cluster(candidate: Candidate, job: Job, all_s: float) -> Candidate:
    """A candidate for a smaller cluster as one for the job's.

    all_s: the fastest step on all of its ranks; infinite for none.
    """
    num_ranks, needed = job.cluster.num_ranks, candidate.plan.cluster
    why = f"takes {shown_seconds(all_s)}" if all_s < math.inf else "does not exist"
    fact = f"The fastest plan for all {num_ranks:,} ranks {why}; {_shape_words(needed)} are enough for this one."
    return replace(candidate, plan=replace(candidate.plan, cluster=job.cluster), tell=candidate.telling(fact))


def _fewer(number: int) -> list[int]:
    every = number <= MAX_COUNTED
    return [fewer for fewer in range(number - 1, 0, -1) if every or number % fewer == 0]


def _shape_words(cluster: Cluster) -> str:
    """Example: "--nodes 2", or "--nodes 1 --ranks-per-node 3"."""
    return f"--nodes {cluster.num_nodes} --ranks-per-node {cluster.ranks_per_node}"
