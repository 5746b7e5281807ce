"""A recipe as a Plan, and a Plan as the settings of a recipe by which training runs it.

A recipe trains every module on every rank, data parallel, sharded as `[fsdp]` says. A recipe is refused if no Plan can
express it: its ranks cannot share the batch evenly, or it balances only some phases. A Plan is refused if training
cannot run it yet.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from motet.core.cluster import Cluster
from motet.core.errors import UserError
from motet.core.plan import BalancingMethod, Plan
from motet.core.spec import ModelSpec
from motet.core.words import counted_words
from motet.core.workload import BACKBONE, Workload
from motet.cost.memory import stage_layers
from motet.dispatch import BalanceConfig, SpeedConfig
from motet.planner.job import Job
from motet.planning.groups import caps_of, examples_a_group
from motet.planning.job import JobOptions, job_of_recipe
from motet.planning.sources import training_order
from motet.planning.trainable import obstacle
from motet.simulate.predict.batch import draw_batch
from motet.train.balancing import stated_policy
from motet.train.recipe.reading import read_recipe
from motet.train.recipe.recipe import Recipe
from motet.train.recipe.recipe_file import load_recipe
from motet.train.recompute import (
    AutoRecompute,
    RecomputeRanks,
    auto_recompute,
    memory_bytes,
    recomputed_blocks_of,
    unit_of_recipe,
    with_numbers,
)


def plan_of_recipe(recipe: Recipe, spec: ModelSpec, cluster: Cluster, workload: Workload | None = None) -> Plan:
    """The Plan by which a recipe trains on all ranks of a cluster.

    spec:     the recipe's model, as `models.spec` makes it.
    workload: its data in groups, as `in_groups` makes them; it is needed for a recipe with data.group.
    Raises UserError for a shard_size or a batch that does not divide, and for a balance that no Plan has; and for
    `recompute = "auto"`, which has no numbers yet.
    """
    if recipe.fsdp.recompute == "auto":
        raise UserError('fsdp.recompute = "auto" follows from the lengths of examples, and a Plan has its numbers.')
    fsdp, num_ranks, caps = recipe.fsdp, cluster.num_ranks, {}
    if recipe.data.group is None:
        batch_size, microbatch_size = recipe.run.batch_size, _microbatch_size(recipe, num_ranks)
    else:
        assert workload is not None, "the groups of a recipe are those of its data"
        recipe.microbatches_on(num_ranks)
        caps, microbatch_size = caps_of(recipe, workload), examples_a_group(workload)
        batch_size = recipe.run.batch_size * microbatch_size
    shard_size = fsdp.shard_size or num_ranks
    if num_ranks % shard_size:
        raise UserError(f"fsdp.shard_size = {shard_size} must divide the number of ranks, which is {num_ranks}.")
    recomputed = recomputed_blocks_of(recipe, spec)
    return Plan(
        spec,
        cluster,
        (unit_of_recipe(recipe, spec, num_ranks, recomputed),),
        batch_size,
        microbatch_size,
        schedule="data_parallel",
        precision=recipe.plan_precision,
        moments=recipe.optimizer.num_moments,
        balance=_balance(recipe, spec),
        policy=stated_policy(recipe.balance, spec),
        microbatch_caps=caps,
    )


def _microbatch_size(recipe: Recipe, num_ranks: int) -> int:
    """The examples of a microbatch on one rank, without groups. Raises UserError for a batch that does not divide."""
    run = recipe.run
    microbatch_size, remainder = divmod(run.batch_size, run.microbatches * num_ranks)
    if remainder or not microbatch_size:
        raise UserError(
            f"run.batch_size = {run.batch_size} cannot be planned for {counted_words(num_ranks, 'rank')} and "
            f"run.microbatches = {run.microbatches}: it must be a multiple of {run.microbatches * num_ranks}."
        )
    return microbatch_size


def recipe_of_plan(plan: Plan, recipe: Recipe) -> Recipe:
    """The recipe with the settings by which training runs a Plan of its model. `plan_of_recipe` inverts it, but for
    `tp`, which no recipe says: ranks share products under the Plan itself.

    It changes batch_size and microbatches of `[run]`, group of `[data]`; all of `[fsdp]` but the precision; phases and
    method of `[balance]`, and without balancing also its profile and speed, which then have no effect.
    Raises UserError for what training cannot run yet (`obstacle`), and for a Plan with stages, which no recipe has.
    """
    if plan.schedule != "data_parallel":
        raise UserError(f"The plan has the schedule {plan.schedule!r}, which no recipe can say: train under the plan.")
    if what := obstacle(plan, recipe):
        raise UserError(f"The plan has {what}, which training cannot run yet.")
    (unit,) = plan.units
    run = {"batch_size": plan.batch_size, "microbatches": plan.batch_size // (unit.dp * plan.microbatch_size)}
    if plan.microbatch_caps:
        run = {"batch_size": plan.batch_size // plan.microbatch_size, "microbatches": 1}
    shard_size = (unit.shard_size or unit.dp) if unit.zero else 1
    fsdp = {
        "shard_size": None if shard_size == unit.dp > 1 else shard_size,
        "reshard_after_forward": unit.zero == 3 or shard_size == 1,
        "once_a_step": unit.zero == 1 and shard_size > 1,
        "recompute": _recomputes(plan),
    }
    return recipe.model_copy(
        update={
            "run": recipe.run.model_copy(update=run),
            "data": recipe.data.model_copy(update={"group": dict(plan.microbatch_caps) or None}),
            "fsdp": recipe.fsdp.model_copy(update=fsdp),
            "balance": _balanced_as(plan, recipe.balance),
        }
    )


def read_recipe_as_plan(file: Path, overrides: Sequence[str], options: JobOptions) -> tuple[Plan, Job]:
    """A recipe's Plan, and the job for which `motet plan` searches other Plans.

    Raises UserError for what is wrong with the recipe or the options.
    """
    if not {"data", "workload"} & read_recipe(file, overrides).tables.keys():
        raise UserError(
            f"{file} has neither [data] nor [workload], so it does not train: `motet plan {file}` finds a plan, which "
            "`motet simulate` takes."
        )
    recipe = load_recipe(file, overrides, trains=False)
    if recipe.run.plan is not None:
        raise UserError(f"{file} trains under a plan, run.plan: `motet simulate {recipe.run.plan}` shows what it does.")
    if recipe.parallel:
        raise UserError(
            f"{file} states [parallel], so it trains under a plan: `motet plan {file} --trainable` writes it, and "
            "`motet simulate` takes what it writes."
        )
    job = job_of_recipe(file, options, overrides, as_trained=True, searches=False)
    if auto := _auto_recompute(recipe, job, own_lengths=options.workload is None):
        recipe, job = auto.resolved, replace(job, recomputes=auto.of_assignment)
    return plan_of_recipe(recipe, job.model, job.cluster, job.workload), job


def _auto_recompute(recipe: Recipe, job: Job, *, own_lengths: bool) -> AutoRecompute | None:
    """What training takes for `recompute = "auto"` on the same ranks; None for a recipe that states numbers.

    own_lengths: the job's lengths are those of the recipe's training data, and come in its order.
    """
    if recipe.fsdp.recompute != "auto":
        return None
    cluster, examples = job.cluster, job.workload.examples
    if cluster.device.name == "cpu":
        memory_bytes(recipe, torch.device("cpu"))  # What training would refuse is not simulated.
    plan = plan_of_recipe(with_numbers(recipe, {}), job.model, cluster, job.workload)
    draw_batch(plan, job.workload, np.random.default_rng(0))  # Refuses a workload without lengths of a module.
    names = [module.name for module in job.model.modules if module.name != BACKBONE]
    examples = replace(examples, items={name: examples.items[name] for name in names})
    device_type = "cpu" if cluster.device.name == "cpu" else "cuda"
    ranks = RecomputeRanks(cluster.num_ranks, cluster.ranks_per_node, device_type, cluster.device.memory_bytes)
    order = training_order(recipe, job.workload, is_own=own_lengths)
    chosen = auto_recompute(recipe, job.model, ranks, order, examples.take)
    print(chosen, file=sys.stderr)
    return chosen


def _recomputes(plan: Plan) -> bool | dict[str, int]:
    """True if all is recomputed that can be, False if nothing is, else the number of blocks of each module."""
    whole = plan.model.num_blocks
    spans = {name: (0, count) for name, count in whole.items()}

    def layers(recompute: Mapping[str, int]) -> list[object]:
        return list(stage_layers(plan.model, spans, recompute))

    (counts,) = plan.units[0].recompute or ({},)
    chosen = layers(counts)
    if chosen == layers({}):
        return False
    return chosen == layers(whole) or {name: count for name, count in counts.items() if count}


def _balance(recipe: Recipe, spec: ModelSpec) -> BalancingMethod:
    names = [module.name for module in spec.modules]
    balanced = recipe.balance.balanced([name for name in names if name != BACKBONE])
    if balanced and balanced != set(names):
        phases = recipe.balance.phases
        raise UserError(
            f"balance.phases = {json.dumps(phases)} balances some phases, which a plan cannot say; "
            'set it to "all" or "off" to simulate the recipe.'
        )
    if recipe.balance.method == "split":
        raise UserError(
            'balance.method = "split" cuts wherever it can, and a plan where it is predicted to be faster; set '
            'method = "auto" and split = "auto" to simulate the recipe.'
        )
    return "off" if not balanced else "split" if recipe.balance.cut_by else recipe.balance.method


def _balanced_as(plan: Plan, config: BalanceConfig) -> BalanceConfig:
    if config.cut_by and plan.balance not in ("auto", "split"):
        raise UserError(
            f"balance.{config.cut_by} lets a balance of 'auto' cut sequences, and the plan has {plan.balance!r}: "
            "remove it, or plan with --pin balance=split."
        )
    # Where nothing moves between ranks, no key may say how.
    still: dict[str, Any] = {"communicator": "all_to_all", "node_wise": True}
    if plan.balance != "off":
        moves = config.mode == "exchange" or plan.balance != "joint"
        stated: dict[str, Any] = {"phases": "all", "method": plan.balance, "policy": dict(plan.policy) or "auto"}
        if plan.balance == "split":
            stated |= {"method": "auto", "split": "auto"}
        return config.model_copy(update={**stated, **({} if moves else still)})
    off: dict[str, Any] = {
        "phases": "off",
        "method": "auto",
        "policy": "auto",
        "defer": "off",
        "profile": None,
        "speed": SpeedConfig(),
        **still,
    }
    # A profile serves balancing alone; without it, loads are counted by operations.
    return config.model_copy(update=off if config.cost != "profile" else {**off, "cost": "flops"})
