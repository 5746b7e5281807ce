"""Predicts the steps of a Plan as training has decided them, and what cutting sequences gains in them.

A Plan with stages and balance "split" compares no ways in seconds. So a step in which it cuts sequences, or items, is
predicted once more with whole ones: as its `order` deals them out, or where it has none as "joint" does, or as
"per_phase" where items go to any replica of an encoder's unit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from motet.assign.planned_step import by_replica, decided_otherwise
from motet.assign.step import StepAssignment
from motet.assign.whole_step import DecidedStep
from motet.core.arrays import BoolArray
from motet.core.plan import Plan
from motet.cost.model import CostModel
from motet.dispatch import RankBatch
from motet.dispatch.edge_messages import assignment_of
from motet.schedule import PlannedProgram, planned
from motet.schedule.plan_units import joins_all_replicas
from motet.simulate.predict.predict import filler_of, predict_assigned
from motet.simulate.predict.prediction import Prediction
from motet.train.input.planned import step_seconds


@dataclass(frozen=True)
class PredictedStep:
    """A step as it is predicted.

    gained_s: seconds of the step with whole sequences, whether they fit memory or not, less its own. Less than 0 where
              whole ones are faster; None where it cut none, or where its microbatches compared ways themselves.
    """

    prediction: Prediction
    gained_s: float | None = None


class StepPredictor:
    """Predicts the steps of one Plan by a cost model.

    stages: of the Plan. exchange: as of `Pricing`.
    """

    def __init__(self, stages: PlannedProgram, cost: CostModel, exchange: str) -> None:
        self._plan, self._cost, self._exchange = stages.layout.plan, cost, exchange
        self._simulated = self._simulator(stages)

    def of(self, batches: Sequence[RankBatch], decided: DecidedStep | None, kept: Sequence[BoolArray]) -> PredictedStep:
        """A step from its microbatches. decided: it as a whole, before examples were left out. kept: as of
        `decided_otherwise`. Raises UserError if the cost model cannot price the step.
        """
        assignment = by_replica(self._plan, assignment_of(batches))
        prediction = self._simulated(assignment)
        # Of a context-parallel encoder ranks share items in any case. Replicas do where the Plan cuts.
        is_cut = any(items.cuts is not None for items in assignment.modules.values())
        if not is_cut or decided is None or self._of_whole is None:
            return PredictedStep(prediction)
        return PredictedStep(prediction, self._of_whole(decided, kept).step_s - prediction.step_s)

    @cached_property
    def _of_whole(self) -> Callable[[DecidedStep, Sequence[BoolArray]], Prediction] | None:
        """Predicts a step with whole sequences; None under a Plan that cuts none, or compares ways in each microbatch.

        Made when a step first cuts some.
        """
        if self._plan.balance != "split" or self._plan.schedule == "data_parallel":
            return None
        plan = with_whole_sequences(self._plan)
        stages = planned(plan)
        seconds, simulated = step_seconds(stages), self._simulator(stages)
        return lambda decided, kept: simulated(decided_otherwise(plan, decided, kept, seconds))

    def _simulator(self, stages: PlannedProgram) -> Callable[[StepAssignment], Prediction]:
        plan, filler = stages.layout.plan, filler_of(stages)
        return lambda step: predict_assigned(plan, stages, step, self._cost, filler=filler, exchange=self._exchange)


def with_whole_sequences(plan: Plan) -> Plan:
    """A Plan with stages that cuts sequences, as it would deal out whole ones."""
    if plan.order == "given":
        return replace(plan, balance="per_phase" if joins_all_replicas(plan) else "joint")
    return replace(plan, balance="off", policy={})  # Its order alone deals them out.
