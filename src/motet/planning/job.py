"""The job that a recipe and the command line describe, to plan or simulate: model, cluster, lengths, batch, costs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from motet.assign.balancing import by_operations
from motet.core.errors import UserError
from motet.core.plan import ADAM_MOMENTS
from motet.core.spec import NOTHING_LEARNS
from motet.cost.source import cost_model
from motet.planner.job import Job
from motet.planning.cluster import ClusterOptions, cluster_of, words_of_another, words_of_unused_peaks
from motet.planning.planned_recipe import check_counted, read_job_recipe
from motet.planning.sources import workload_at, workload_of


@dataclass(frozen=True)
class JobOptions:
    """The options of the command line that change a job; None is as the recipe has it.

    workload: a file of lengths, or a recipe. profile: a file of measured times.
    """

    cluster: ClusterOptions
    workload: Path | None = None
    profile: Path | None = None


def job_of_recipe(
    path: Path,
    options: JobOptions,
    overrides: Sequence[str] = (),
    *,
    as_trained: bool = False,
    searches: bool = True,
) -> Job:
    """The job that a recipe and the command line describe. Torch is imported unless the model is a table of shapes.

    as_trained: as in `read_job_recipe`. searches: whether Plans are searched, which decide what is cut.
    If no cluster is named, a training recipe is planned for the CPU of this machine.
    Raises UserError for what is wrong with either, or missing from both.
    """
    read = read_job_recipe(path, overrides, as_trained=as_trained)
    if read.recipe is not None:
        check_counted(path, read.recipe)
    cluster = cluster_of(path, read.cluster, options.cluster, "cpu" if read.trains else None, overrides)
    read.check_peak(path, cluster)
    for said in (
        words_of_another(path, read.cluster, options.cluster, overrides),
        words_of_unused_peaks(path, read.cluster, options.cluster, overrides, read.precision),
    ):
        if said:
            print(said, file=sys.stderr)
    workload, balancing, policy = read.workload, by_operations, {}
    recipe = read.recipe
    if recipe is not None:
        from motet.train.balancing import balancing_of, stated_policy

        if searches and recipe.balance.cut_by:
            raise UserError(
                f"balance.{recipe.balance.cut_by} is for training without a plan, as a plan says itself whether long "
                "items are cut; remove it here, and let --pin balance=split cut them."
            )
        balancing, policy = balancing_of(recipe, read.model), stated_policy(recipe.balance, read.model)
        if options.workload is None:
            workload = workload_of(recipe, str(path))
    if options.workload is not None:
        workload = workload_at(options.workload)
    if workload is None:
        raise UserError(
            f"{path} has neither [data] nor [workload], so --workload must say which lengths to plan for: a manifest, "
            "a CSV of lengths, a TOML of distributions, or a recipe."
        )
    moments = ADAM_MOMENTS if recipe is None else recipe.optimizer.num_moments
    cost = cost_model(cluster, read.precision, options.profile, moments=moments, any_device=False)
    batch_size = read.batch_size
    if recipe is not None and recipe.data.group is not None:
        from motet.planning.groups import examples_a_group, in_groups

        workload = in_groups(recipe, workload)
        batch_size *= examples_a_group(workload)
    job = Job(
        read.model,
        cluster,
        workload,
        batch_size,
        cost,
        read.precision,
        balancing=balancing,
        policy=policy,
        degrees=read.parallel,
        exchange="auto" if recipe is None else recipe.context.exchange,
        moments=moments,
    )
    job.drawn(0)  # What cannot be drawn is said at once, and not of each strategy.
    return job


def check_job_learns(path: Path, job: Job) -> None:
    """Raise UserError for a recipe of which no weight learns, as training does."""
    if not any(module.trainable for module in job.model.modules):
        raise UserError(f"{path}: {NOTHING_LEARNS}")
