"""Each step of a run under a Plan as the simulator predicts it, from the step's own lengths and decisions.

Seconds are those of the run's profile (`motet profile` writes it into the run's folder). Without one they are the
figures of the Plan's cluster, if its device is what the run trains on. Otherwise nothing is predicted, and a sentence
says why.

The first rank predicts, in a thread beside the step: about as long as the step's decisions take.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

import torch

from motet.core.errors import UserError
from motet.core.plan import Plan
from motet.cost.catalogue import device_called
from motet.cost.model import CostModel
from motet.cost.profile import PROFILE_FILE
from motet.cost.source import cost_model
from motet.dispatch import RankBatch
from motet.dispatch.edge_messages import assignment_of
from motet.schedule import planned
from motet.simulate.predict.predict import predict_assigned
from motet.simulate.predict.prediction import Prediction
from motet.train.planned_job import ChosenPlan
from motet.train.recipe.recipe import Recipe


def run_cost(chosen: ChosenPlan, recipe: Recipe, device: torch.device) -> CostModel | str:
    """The cost model by which the steps of a run are predicted; without one, the reason in a sentence."""
    plan, profile = chosen.plan, recipe.run.dir / PROFILE_FILE
    try:
        if profile.exists():
            return cost_model(plan.cluster, plan.precision, profile)
        if plan.cluster.device.name == _name_of(device):
            return cost_model(plan.cluster, plan.precision)
    except UserError as error:
        return f"Steps are not predicted: {error}"
    return (
        f"Steps are not predicted, and predicted_s is null: {chosen.file} has figures of {plan.cluster.device.name}, "
        f"this run is on {_name_of(device) or 'another GPU'}, and there is no {profile}, which motet profile writes."
    )


def _name_of(device: torch.device) -> str:
    """The device by its name in the catalogue; "" for a GPU that is not in it."""
    if device.type == "cpu":
        return "cpu"
    known = device_called(torch.cuda.get_device_name(device))
    return "" if known is None else known.name


class StepPredictor:
    """Predicts steps one after the other; a context manager. why_not: why it has stopped, a sentence; "" if it has not.

    cost: raises UserError for what it does not know, such as a layer that was not measured.
    """

    def __init__(self, plan: Plan, cost: CostModel) -> None:
        self._plan, self._stages, self._cost = plan, planned(plan), cost
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="predict")
        self._future: Future[Prediction] | None = None
        self.why_not = ""

    def start(self, batches: Sequence[RankBatch]) -> None:
        """Start to predict a step from its microbatches."""
        if not self.why_not:
            assignment = assignment_of(batches)
            self._future = self._pool.submit(predict_assigned, self._plan, self._stages, assignment, self._cost)

    def take(self) -> Prediction | None:
        """The prediction of the step that was started last; None if the cost model does not know what it takes."""
        future, self._future = self._future, None
        if future is None:
            return None
        try:
            return future.result()
        except UserError as error:
            self.why_not = f"Steps are not predicted from now on: {error}"
            return None

    def __enter__(self) -> StepPredictor:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
