"""The Plan of the job that a recipe trains today: every module on every rank, data parallel, sharded as `[fsdp]` says.

What a Plan cannot say yet is refused, not rounded: a batch that ranks cannot share alike, and phases of which only some
are balanced.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from motet.core.cluster import Cluster
from motet.core.errors import UserError
from motet.core.plan import Plan, Unit
from motet.core.spec import ModelSpec
from motet.core.workload import Workload
from motet.cost.catalogue import DEVICES, ClusterConfig
from motet.data.text import ChatTokenizer
from motet.models.spec import spec_of_config
from motet.train.plan_sources import workload_at, workload_of
from motet.train.recipe import Recipe, load_recipe
from motet.train.toml_text import read_recipe

PRECISIONS = {"bfloat16": "bf16", "float32": "fp32", "float64": "fp64"}


def plan_of_recipe(recipe: Recipe, spec: ModelSpec, cluster: Cluster) -> Plan:
    """On all ranks of the cluster. spec: of the recipe's model, as `models.spec` makes it.

    Raises UserError for a shard_size or a batch that does not divide, and for a balance that no Plan has.
    """
    run, fsdp, num_ranks = recipe.run, recipe.fsdp, cluster.num_ranks
    microbatch_size, left = divmod(run.batch_size, run.microbatches * num_ranks)
    if left or not microbatch_size:
        raise UserError(
            f"run.batch_size = {run.batch_size} cannot be planned for {num_ranks} ranks and run.microbatches = "
            f"{run.microbatches}: it must be a multiple of {run.microbatches * num_ranks}."
        )
    shard_size = fsdp.shard_size or num_ranks
    if num_ranks % shard_size:
        raise UserError(f"fsdp.shard_size = {shard_size} must divide the number of ranks, which is {num_ranks}.")
    blocks = {module.name: len(module.blocks) for module in spec.modules}
    unit = Unit(
        "all",
        (blocks,),
        dp=num_ranks,
        recompute=(blocks,) if fsdp.recompute else (),
        zero=0 if shard_size == 1 else 3 if fsdp.reshard_after_forward else 2,
        shard_size=fsdp.shard_size or 0,
    )
    return Plan(
        spec,
        cluster,
        (unit,),
        run.batch_size,
        microbatch_size,
        schedule="data_parallel",
        precision=PRECISIONS[fsdp.param_dtype or run.dtype],
        balance=_balance(recipe, spec),
    )


def read_recipe_as_plan(
    file: Path, overrides: Sequence[str], device: str | None, num_ranks: int | None, workload_file: Path | None
) -> tuple[Plan, Workload]:
    """A recipe's Plan, and the lengths of its training data, or of `workload_file` (`plan_sources`).

    device:    of the catalogue; None is what `[cluster]` of the recipe says, or else this machine, "cpu".
    num_ranks: whole nodes, or a part of one; None is all that `[cluster]` says, or else a node.
    Raises UserError for what is wrong with any of them.
    """
    if "data" not in read_recipe(file, overrides).tables:
        raise UserError(
            f"{file} has no [data], so it says nothing of how it trains: `motet plan {file}` finds a plan, "
            "which `motet simulate` takes."
        )
    recipe = load_recipe(file, overrides)
    spec = spec_of_config(recipe.model, ChatTokenizer.from_directory(recipe.data.tokenizer).vocabulary_size, file.stem)
    plan = plan_of_recipe(recipe, spec, _cluster(recipe.cluster, device, num_ranks))
    return plan, workload_of(recipe, str(file)) if workload_file is None else workload_at(workload_file)


def _balance(recipe: Recipe, spec: ModelSpec) -> Literal["off", "joint", "per_phase", "auto"]:
    names = [module.name for module in spec.modules]
    balanced = recipe.balance.balanced(names[:-1])
    if balanced and balanced != set(names):
        given = recipe.balance.phases
        raise UserError(
            f"balance.phases = {json.dumps(given)} balances some phases, which a plan cannot say; "
            'set it to "all" or "off" to simulate the recipe.'
        )
    return recipe.balance.method if balanced else "off"


def _cluster(stated: ClusterConfig | None, device: str | None, num_ranks: int | None) -> Cluster:
    """Whole nodes, or a part of one; all ranks of "cpu" are on this machine."""
    if stated is None or (device is not None and device.lower() != stated.device):
        name = device or "cpu"
        if name.lower() not in DEVICES:
            raise UserError(f"--device: there is no device {name!r} in the catalogue; it has {', '.join(DEVICES)}.")
        stated = ClusterConfig(device=name)
    usual = stated.cluster()
    if num_ranks is None:
        return usual
    if stated.device == "cpu" or num_ranks <= usual.ranks_per_node:
        return stated.model_copy(update={"nodes": 1, "ranks_per_node": num_ranks}).cluster()
    num_nodes, left = divmod(num_ranks, usual.ranks_per_node)
    if left:
        raise UserError(
            f"--ranks {num_ranks}: nodes of {stated.device} have {usual.ranks_per_node} ranks, so it must be a "
            "multiple of that, or less than one node."
        )
    return stated.model_copy(update={"nodes": num_nodes}).cluster()
