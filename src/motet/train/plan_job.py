"""The job that a recipe and the command line of `motet plan` describe: model, cluster, lengths, batch size, costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from motet.core.cluster import Cluster
from motet.core.errors import UserError
from motet.cost.catalogue import ClusterConfig
from motet.cost.source import cost_model
from motet.planner.job import Job
from motet.train.plan_recipe import read_job_recipe
from motet.train.plan_sources import workload_at, workload_of


@dataclass(frozen=True)
class Given:
    """What the command line says of a job; None is as the recipe has it.

    device, num_nodes, ranks_per_node: the cluster. workload: a file of lengths, or a recipe. profile: measured times.
    """

    device: str | None = None
    num_nodes: int | None = None
    ranks_per_node: int | None = None
    workload: Path | None = None
    profile: Path | None = None


def job_of_recipe(path: Path, given: Given, overrides: Sequence[str] = ()) -> Job:
    """The job that a recipe and the command line describe. Torch is imported for what is no table of shapes.

    Raises UserError for what is wrong with either, or missing from both.
    """
    read = read_job_recipe(path, overrides)
    cluster = _cluster(path, read.cluster, given)
    workload = read.workload
    if given.workload is not None:
        workload = workload_at(given.workload)
    elif read.has_data:
        from motet.train.recipe import load_recipe

        workload = workload_of(load_recipe(path, overrides), str(path))
    if workload is None:
        raise UserError(
            f"{path} has neither [data] nor [workload], so --workload must say which lengths to plan for: a manifest, "
            "a CSV of lengths, a TOML of distributions, or a recipe."
        )
    cost = cost_model(cluster, read.precision, given.profile)
    return Job(read.model, cluster, workload, read.batch_size, cost, read.precision)


def _cluster(path: Path, stated: ClusterConfig | None, given: Given) -> Cluster:
    if stated is None and given.device is None:
        raise UserError(
            f"{path} has no [cluster], so --cluster must name the device to plan for, and --nodes how many."
        )
    kept: dict[str, Any] = {} if stated is None else stated.model_dump(exclude_unset=True)
    if given.device is not None and stated is not None and given.device.lower() != stated.device:
        # Of another device, what the recipe says of one does not hold.
        kept = {"nodes": stated.nodes}
    changed = {"device": given.device, "nodes": given.num_nodes, "ranks_per_node": given.ranks_per_node}
    try:
        return ClusterConfig(**kept | {key: value for key, value in changed.items() if value is not None}).cluster()
    except ValidationError as error:
        raise UserError(
            f"--cluster {given.device}: {error.errors()[0]['msg'].removeprefix('Value error, ')}"
        ) from error
