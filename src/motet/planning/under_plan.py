"""`motet train RECIPE --plan PLAN.json`: whether a recipe and a Plan agree, and whether training can run the Plan.

The Plan decides microbatches, sharding, recomputation and balancing, so a recipe must not set these. The recipe decides
all else, and must agree in batch size and precision.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from motet.core.errors import UserError
from motet.core.plan import Plan
from motet.cost.source import cost_model
from motet.planner.job import Job
from motet.planner.module_pins import unmet_pin
from motet.planning.groups import in_groups
from motet.planning.plan_of_recipe import recipe_of_plan
from motet.planning.planned_recipe import read_job_recipe
from motet.planning.sources import plan_at, workload_of
from motet.planning.trainable import obstacle, plan_line, reading_together
from motet.train.balancing import balancing_of
from motet.train.planned_job import ChosenPlan
from motet.train.recipe.recipe import Recipe
from motet.train.recipe.recipe_file import load_recipe

_PRECISION_KEYS = {"param_dtype", "reduce_dtype", "loss_scale", "loss_scale_steps"}
_BALANCE_KEYS = {"method", "phases", "policy"}


def recipe_under_plan(
    recipe: Recipe, recipe_file: Path, plan_file: Path, overrides: Sequence[str] = ()
) -> tuple[Recipe, ChosenPlan]:
    """The recipe as it trains under a Plan, and the Plan. overrides: those by which the recipe was read.

    Raises UserError for a Plan that training cannot run, and for the first thing in which recipe and Plan do not agree.
    """
    replan = partial(plan_line, recipe_file, plan_file, overrides)
    return agreed(recipe, recipe_file, ChosenPlan(plan_at(plan_file), plan_file, replan))


def agreed(recipe: Recipe, recipe_file: Path, chosen: ChosenPlan) -> tuple[Recipe, ChosenPlan]:
    """As `recipe_under_plan`, for a Plan that has been read."""
    plan, plan_file = chosen.plan, chosen.file
    recipe = recipe.model_copy(update={"run": recipe.run.model_copy(update={"plan": plan_file})})
    if key := next(_decided_twice(recipe, plan), None):
        raise UserError(
            f"{recipe_file} sets {key}, which the plan {plan_file} decides; remove it{_instead(key, recipe, plan)}."
        )
    for what, theirs, ours in (
        ("run.batch_size", plan.batch_size, recipe.run.batch_size),
        ("precision", plan.precision, recipe.plan_precision),
        ("moments of the optimizer", plan.moments, recipe.optimizer.num_moments),
        ("cluster.tensor_pieces", plan.cluster.tensor_pieces, _asked(recipe, plan, "tensor_pieces")),
        ("cluster.tensor_transport", plan.cluster.tensor_transport, _asked(recipe, plan, "tensor_transport")),
    ):
        if theirs != ours:
            raise UserError(
                f"{plan_file} is for {what} = {theirs}, and the recipe has {ours}; plan anew: {chosen.replan}."
            )
    known = {module.name for module in plan.model.modules}  # A plan for another model is refused by `check_fits`.
    if what := unmet_pin(plan, {name: stated for name, stated in recipe.parallel.items() if name in known}):
        raise UserError(f"{plan_file}: {what} as in [parallel] of {recipe_file}; plan anew: {chosen.replan}.")
    if what := obstacle(plan, recipe):
        raise UserError(f"{plan_file} has {what}, which training cannot run yet; plan anew: {chosen.replan}.")
    if recipe.data.is_split and (together := reading_together(plan)):
        raise UserError(
            f"{recipe_file}: data.train names splits that only some ranks can read, and under a plan with {together} "
            "every rank must know all lengths; give all machines all manifests."
        )
    return recipe_of_plan(plan, recipe) if plan.schedule == "data_parallel" else recipe, chosen


def job_under_plan(
    recipe: Recipe, recipe_file: Path, overrides: Sequence[str], plan_file: Path
) -> tuple[Plan, Job, Recipe]:
    """A Plan, the job of its recipe on the Plan's cluster, and the recipe as it trains under the Plan.

    Raises UserError as `recipe_under_plan` does, and for a Plan of another model.
    """
    recipe, chosen = recipe_under_plan(recipe, recipe_file, plan_file, overrides)
    plan = chosen.plan
    chosen.check_model(read_job_recipe(recipe_file, overrides, as_trained=True).model)
    workload = workload_of(recipe, str(recipe_file))
    if recipe.data.group is not None:
        workload = in_groups(recipe, workload)
    cost, balancing = cost_model(plan.cluster, plan.precision, moments=plan.moments), balancing_of(recipe, plan.model)
    job = Job(
        plan.model,
        plan.cluster,
        workload,
        plan.batch_size,
        cost,
        plan.precision,
        balancing=balancing,
        exchange=recipe.context.exchange,
        moments=plan.moments,
    )
    return plan, job, recipe


def to_remove(recipe_file: Path, overrides: Sequence[str], plan: Plan) -> str:
    """The sentence that names what a recipe must not set to train under a Plan; "" if it sets nothing of that kind."""
    recipe = load_recipe(recipe_file, overrides, trains=False)
    keys = list(_decided_twice(recipe, plan))
    what = "it" if len(keys) == 1 else "them"
    instead = "".join(_instead(key, recipe, plan) for key in keys)
    return f"Remove {', '.join(keys)} from {recipe_file} first, as the plan decides {what}{instead}." if keys else ""


def _instead(key: str, recipe: Recipe, plan: Plan) -> str:
    """How a Plan says what a key of the recipe asks for, where that cuts long items; "" of other keys."""
    if not recipe.balance.cut_by or key != f"balance.{recipe.balance.cut_by.split()[0]}":
        return ""
    if plan.schedule == "data_parallel":
        return "; a plan of data parallelism cuts long items by balance 'split', as one that --pin balance=split makes"
    return (
        "; a plan with stages cuts long sequences, and items of encoders on ranks of their own, over replicas by "
        "balance 'split', as one that --pin balance=split makes, and ranks of a unit with cp share long items, as in "
        "a plan that --pin cp=2 makes"
    )


def _decided_twice(recipe: Recipe, plan: Plan) -> Iterator[str]:
    """Keys of the recipe that set what the Plan decides."""
    if "microbatches" in recipe.run.model_fields_set:
        yield "run.microbatches"
    if recipe.data.group is not None:
        yield "data.group"
    yield from (f"fsdp.{key}" for key in sorted(recipe.fsdp.model_fields_set - _PRECISION_KEYS))
    balance = recipe.balance.model_fields_set
    decided = balance & _BALANCE_KEYS if plan.schedule == "data_parallel" else balance
    yield from (f"balance.{key}" for key in sorted(decided))


def _asked(recipe: Recipe, plan: Plan, key: str) -> int | str:
    """What `[cluster]` of a recipe asks of products that ranks of the Plan share; what the Plan has if it asks none."""
    is_shared = recipe.cluster is not None and any(unit.tp > 1 for unit in plan.units)
    asked = recipe.cluster.model_dump(exclude_defaults=True) if is_shared else {}
    return asked.get(key, getattr(plan.cluster, key))
