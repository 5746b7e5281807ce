"""What `motet simulate` predicts a step of: a Plan from its file, or a recipe as it trains."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from motet.core.plan import Plan
from motet.core.workload import BACKBONE, Workload
from motet.cost.model import CostModel
from motet.cost.source import cost_model
from motet.planning.sources import read_plan_and_workload
from motet.schedule.plan_units import cuts_sequences

if TYPE_CHECKING:
    from motet.planning.job import JobOptions


@dataclass(frozen=True)
class SimulatedJob:
    """A Plan, the lengths of its examples, and what its layers cost.

    decided: what training decides in each step of a recipe, as arguments of `predictions`.
    """

    plan: Plan
    lengths: Workload
    cost: CostModel
    decided: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of_recipe(cls, file: Path, overrides: Sequence[str], options: JobOptions) -> SimulatedJob:
        """A recipe as it trains. Raises UserError for what is wrong with it, and where no Plan can express it."""
        from motet.planning.plan_of_recipe import read_recipe_as_plan

        plan, job = read_recipe_as_plan(file, overrides, options)
        decided = {"balancing": job.balancing, "recomputes": job.recomputes, "exchange": job.exchange}
        return cls(plan, job.workload, job.cost, decided)

    @classmethod
    def of_plan(
        cls, file: Path, workload: Path | None, profile: Path | None, overrides: Sequence[str] = ()
    ) -> SimulatedJob:
        """A Plan from its file, on given lengths, or on those of the recipe that it names. Raises UserError.

        overrides: of the recipe that has the lengths, or else of the plan's model: its `[context]` says how ranks that
                   share sequences exchange rows.
        """
        plan, lengths, recipe = read_plan_and_workload(file, workload, overrides)
        cost = cost_model(plan.cluster, plan.precision, profile, moments=plan.moments, any_device=False)
        if recipe is None or (plan.unit_of(BACKBONE).cp == 1 and not cuts_sequences(plan)):
            return cls(plan, lengths, cost)
        from motet.train.planned_job import check_context

        check_context(plan, recipe.context)
        return cls(plan, lengths, cost, {"exchange": recipe.context.exchange})
