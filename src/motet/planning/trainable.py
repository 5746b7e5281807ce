"""What training can run of the Plans that there are: data parallelism, and stages under every schedule."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from motet.core.cluster import Cluster
from motet.core.errors import UserError
from motet.core.plan import SPLITS_BACKWARD, Plan
from motet.core.workload import BACKBONE
from motet.cost.catalogue import DEVICES
from motet.schedule import PlannedStage, parse_action, pieces_of, planned

if TYPE_CHECKING:
    from motet.models.mllm import MLLM
    from motet.train.recipe.recipe import Recipe


def obstacle(plan: Plan, recipe: Recipe) -> str:
    """What a Plan has that training cannot run yet, in a few words that name the field; "" if training can run it."""
    if what := untrained(plan):
        return what
    if recipe.run.compile and (what := _uncompiled(plan)):
        return what
    if plan.schedule == "data_parallel":
        if plan.microbatch_caps and (what := recipe.why_no_groups("microbatch_caps")):
            return what
        if plan.balance == "split" and (why := recipe.balance.why_whole()):
            return f"balance 'split', which {why}"
    return "another precision than the recipe" if plan.precision != recipe.plan_precision else ""


def _uncompiled(plan: Plan) -> str:
    """What a Plan has that `torch.compile` cannot have beside it; "" if blocks can be compiled."""
    if plan.balance == "split":
        return "balance 'split' beside run.compile, which knows no blocks that ranks share; remove one of them"
    if plan.schedule in SPLITS_BACKWARD:
        # A compiled backward pass is one graph, which computes gradients of weights with all others.
        return f"schedule {plan.schedule!r} beside run.compile, whose backward passes are not split; remove one of them"
    for unit in plan.units:
        for degree in ("tp", "cp", "ep"):
            if getattr(unit, degree) > 1:
                here = f"{degree} = {getattr(unit, degree)} of unit {unit.name!r}"
                return f"{here} beside run.compile, which knows no blocks that ranks share; remove one of them"
    return ""


def untrained(plan: Plan) -> str:
    """What a Plan has that training can run of no recipe yet; "" if it has nothing such."""
    if what := _copied_between_nodes(plan):
        return what
    if plan.schedule == "data_parallel":
        return ""
    return next((what for what, is_there in _in_stages(plan).items() if is_there), "")


def _copied_between_nodes(plan: Plan) -> str:
    """The first ranks that would read each other's memory, and are on several nodes; "" if there are none."""
    if not plan.copies_pieces:
        return ""
    node_of = plan.cluster.node_of
    for unit in plan.units:
        for ranks in plan.cluster.unlike(unit.ranks, unit.tp):
            if node_of(ranks[0]) != node_of(ranks[-1]):
                return (
                    f"tensor_transport {plan.cluster.tensor_transport!r}, which copies inside a node, beside ranks "
                    f"{ranks[0]} to {ranks[-1]} of unit {unit.name!r}, which share products (tp) between nodes"
                )
    return ""


def on_all_ranks(obstacle: Callable[[Plan], str]) -> Callable[[Plan], str]:
    """As `obstacle`, where all ranks of a Plan's cluster have begun: none may be left over."""
    return lambda plan: obstacle(plan) or ("" if len(plan.ranks) == plan.cluster.num_ranks else "ranks left over")


def obstacle_in(recipe: Recipe) -> Callable[[Plan], str]:
    """`obstacle` for Plans of a recipe's model, also where they cut an encoder that cannot be cut there, and where its
    `[context]` or its data do not go with them."""

    @cache
    def model() -> MLLM:
        import torch

        from motet.models.build import build_mllm

        with torch.device("meta"):
            return build_mllm(recipe.modules, recipe.vocabulary().vocabulary_size)

    # Encoders of the families can be cut anywhere, unless a callback prevents it, or the rows that queries read.
    parts = recipe.modules.encoders.values()
    may_refuse = any(part.module or part.before or part.between or part.projector.queries for part in parts)
    may_refuse |= bool(recipe.modules.generators)

    def found(plan: Plan) -> str:
        if what := obstacle(plan, recipe):
            return what
        if recipe.data.is_split and (together := reading_together(plan)):
            return f"{together} beside a data.train of which each rank reads a part of its own"
        if recipe.context.model_dump(exclude_defaults=True) and (what := _context_obstacle(plan, recipe)):
            return what
        asks = may_refuse or any(unit.tp > 1 for unit in plan.units)
        return cut_obstacle(plan, model()) if asks else ""

    return found


def reading_together(plan: Plan) -> str:
    """What makes ranks of a Plan read the same examples, in words; "" if each reads its own."""
    if plan.schedule != "data_parallel":
        return "stages"
    if plan.balance == "split":
        return "sequences that ranks share (balance 'split')"
    return "ranks that share products (tp above 1)" if plan.unit_of(BACKBONE).tp > 1 else ""


def cut_obstacle(plan: Plan, model: MLLM) -> str:
    """Where a Plan cuts an encoder of a model that cannot be cut there, in words; "" if nowhere."""
    from motet.train.planned_job import impossible_cut

    what = impossible_cut(model, plan)
    return f"a cut that cannot be ({what})" if what else ""


def _context_obstacle(plan: Plan, recipe: Recipe) -> str:
    """Why ranks that share sequences cannot exchange rows as `[context]` says, in words; "" if they can."""
    from motet.train.planned_job import check_context

    try:
        check_context(plan, recipe.context)
    except UserError as error:
        return f"another cp than [context] is for ({str(error).rstrip('.')})"
    return ""


def trainable_in(file: Path, overrides: Sequence[str], *, is_asked: bool = False) -> Callable[[Plan], str] | None:
    """`obstacle_in` for a recipe file; None if it cannot be started. Raises UserError.

    is_asked: whether plans that train are asked for: then a recipe of shapes without run.dir or run.steps is refused.
    """
    from motet.train.recipe.reading import read_recipe

    tables = read_recipe(file, overrides).tables
    if "data" not in tables and (
        "workload" not in tables or not (is_asked or {"dir", "steps"} <= tables["run"].keys())
    ):
        return None
    from motet.train.recipe.recipe_file import load_recipe

    return obstacle_in(load_recipe(file, overrides, trains="data" not in tables))


def set_words(overrides: Sequence[str]) -> list[str]:
    """Overrides of a recipe as words of a command line."""
    return [word for override in overrides for word in ("--set", override)]


def train_words(recipe_file: Path, plan_files: Sequence[Path], overrides: Sequence[str] = ()) -> list[str]:
    """What torchrun is to start, as words of a command line. plan_files: one, or one for each training phase."""
    plans = [word for plan_file in plan_files for word in ("--plan", str(plan_file))]
    return ["-m", "motet", "train", str(recipe_file), *set_words(overrides), *plans]


def plan_line(recipe_file: Path, plan_file: Path, overrides: Sequence[str], cluster: Cluster) -> str:
    """The command that writes a plan for a cluster that training can run."""
    device = ["--cluster", cluster.device.name] * (cluster.device.name in DEVICES)
    counts = ["--nodes", str(cluster.num_nodes), "--ranks-per-node", str(cluster.ranks_per_node)]
    words = ["motet", "plan", str(recipe_file), *set_words(overrides), *device, *counts, "--trainable"]
    return shlex.join([*words, "--out", str(plan_file)])


def training_line(recipe_file: Path, plan_file: Path, cluster: Cluster, overrides: Sequence[str] = ()) -> str:
    """The command that trains a recipe under a Plan; on several nodes, what is to be started on each."""
    return f"{torchrun_words(cluster)} {shlex.join(train_words(recipe_file, [plan_file], overrides))}"


def torchrun_words(cluster: Cluster) -> str:
    """How a line begins that starts one process for each device of a cluster, on each of its nodes."""
    nodes = "--standalone" if cluster.num_nodes == 1 else f"--nnodes {cluster.num_nodes} --rdzv-endpoint HOST:PORT"
    return f"torchrun {nodes} --nproc-per-node {cluster.ranks_per_node}"


def _cut_block(plan: Plan) -> str:
    """The first part of a pass that is not made of blocks and halves, such as "9F3.2 of fills"; "" if all are."""
    for action, stage in _stages_of_fills(plan):
        pieces = pieces_of(stage, plan.model)
        if stage.num_parts > len(pieces) and not stage.has_sums:
            whole = (f"; block {block} of {name!r} has no halves" for name, block, half in pieces if half < 0)
            return f"{action} of fills{next(whole, '')}"
    return ""


def _stages_of_fills(plan: Plan) -> Iterator[tuple[str, PlannedStage]]:
    """(action, its stage) of each fill, if any is a part of a pass."""
    if any("." in fill.action for fill in plan.fills):
        stages = planned(plan).stages
        yield from ((fill.action, stages[parse_action(fill.action).stage]) for fill in plan.fills)


def _sum_apart(plan: Plan) -> str:
    """A part of a pass that is an encoder's sum over tensor-parallel ranks; "" if there is none."""
    is_sum = (action for action, stage in _stages_of_fills(plan) if stage.has_sums and parse_action(action).part % 2)
    return next(is_sum, "")


def _in_stages(plan: Plan) -> dict[str, bool]:
    inside, pieces = next((fill.before for fill in plan.fills if "." in fill.before), ""), plan.cluster.tensor_pieces
    return {
        f"fills inside passes ({inside}) beside tensor_pieces {pieces}, in whose place they are; let it be 1": (
            bool(inside) and pieces > 1 and plan.unit_of(BACKBONE).tp > 1
        ),
        f"sums of an encoder apart ({(apart := _sum_apart(plan))}) beside tensor_pieces {pieces}; let it be 1": (
            bool(apart) and pieces > 1
        ),
        f"the order {plan.order!r} in {plan.precision}, of which its device states no peak": (
            plan.order != "given" and plan.precision not in plan.cluster.device.peak_flops
        ),
        f"bubbles filled by step in {plan.precision}, of which its device states no peak": (
            plan.filling == "by_step" and plan.precision not in plan.cluster.device.peak_flops
        ),
        f"parts of passes that are no blocks and no halves of blocks ({(part := _cut_block(plan))})": bool(part),
    }
