"""Each step of a run under a Plan as the simulator predicts it, from the step's own lengths and decisions.

Seconds are those of the run's profile (`motet profile` writes it into the run's folder). Without one they are the
figures of the Plan's cluster, if its device is what the run trains on. Otherwise nothing is predicted, and a sentence
says why.

The first rank predicts, in a thread beside the step. Of a Plan with many actions it predicts every n-th step, so that
steps need not wait for it. A step that cuts sequences is predicted with whole ones, too, and counts twice.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from motet.core.errors import UserError
from motet.cost.model import CostModel
from motet.cost.profile import PROFILE_FILE
from motet.cost.profiled import Profiled
from motet.cost.source import cost_model, is_measured_elsewhere
from motet.runtime.step import StepResult
from motet.schedule import planned
from motet.simulate.predict.predict import MAX_ISLANDS
from motet.simulate.predict.prediction import Prediction
from motet.train.checkpoint.choice import Say
from motet.train.device import device_name
from motet.train.input.feed import StepInput
from motet.train.planned_job import ChosenPlan
from motet.train.recipe.recipe import Recipe
from motet.train.report.beside import MeasuredBeside, predicted_actions, write_last_step
from motet.train.report.rank_time import aligned
from motet.train.step_predictor import PredictedStep, StepPredictor
from motet.train.world import World

_MAX_ACTIONS = 20_000
"""Actions that are simulated a step. 10^5 to 10^6 a second are."""


def run_cost(chosen: ChosenPlan, recipe: Recipe, device: torch.device) -> CostModel | str:
    """The cost model by which the steps of a run are predicted; without one, the reason in a sentence."""
    plan, profile = chosen.plan, recipe.run.dir / PROFILE_FILE
    try:
        if profile.exists():
            cost = cost_model(plan.cluster, plan.precision, profile, moments=plan.moments)
            assert isinstance(cost, Profiled), "the cost model of a profile"
            measured, here = cost.profile.device, device_name(device)
            if not is_measured_elsewhere(measured, here):
                return cost
            return (
                f"Steps are not predicted, and predicted_s is null: {profile} was measured on {measured}, and this run "
                f"is on {here}, which motet profile would measure."
            )
        if plan.cluster.device.name == device_name(device):
            return cost_model(plan.cluster, plan.precision, moments=plan.moments)
    except UserError as error:
        return f"Steps are not predicted: {error}"
    return (
        f"Steps are not predicted, and predicted_s is null: {chosen.file} has figures of {plan.cluster.device.name}, "
        f"this run is on {device_name(device) or 'another GPU'}, and there is no {profile}, which motet profile writes."
    )


class PredictedRun:
    """The steps of a run under a Plan, predicted beside what is measured; a context manager.

    say: prints a sentence; called on all ranks, as every method.
    """

    def __init__(self, recipe: Recipe, chosen: ChosenPlan, world: World, say: Say) -> None:
        self._world, stages = world, planned(chosen.plan)
        is_profiled = (recipe.run.dir / PROFILE_FILE).exists()
        self._beside = MeasuredBeside(_replan(chosen, recipe), is_profiled=is_profiled)
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="predict")
        self._future: Future[PredictedStep] | None = None
        self._last: tuple[StepResult, Prediction | None] | None = None
        cost = run_cost(chosen, recipe, world.device) if world.is_first else ""
        if isinstance(cost, str) and cost:
            say(cost)
        self._steps = None if isinstance(cost, str) else StepPredictor(stages, cost, recipe.context.exchange)
        self._num_actions = stages.program.num_actions * min(stages.layout.num_islands, MAX_ISLANDS)
        self._next, self._number = 0, -1

    def start(self, fed: StepInput) -> None:
        """Start to predict a step from its input, if it is the turn of one."""
        self._number += 1
        if self._steps is not None and self._number >= self._next:
            self._future = self._pool.submit(self._steps.of, fed.batches, fed.decided, fed.kept)

    def of(self, result: StepResult, measured: Mapping[str, Any], say: Say) -> tuple[Prediction | None, float | None]:
        """The prediction of the step that was started last, and what cuts gain in it, as of `PredictedStep`; None on
        other ranks, and for a step that is not predicted.

        measured: the metrics of the step. say: told once how the first steps compare.
        """
        step = self._take(say)
        prediction, gained_s = (None, None) if step is None else (step.prediction, step.gained_s)
        self._last = result, prediction
        if prediction is not None:
            means = {name: seconds["mean_s"] for name, seconds in measured["actions"].items()}
            predicted = prediction.step_s, predicted_actions(prediction)
            if said := self._beside.add(measured["makespan_s"], means, *predicted):
                say(said)
        return prediction, gained_s

    def write_last_step(self, folder: Path) -> None:
        """Write the last step of this process for the report, measured on all ranks and predicted. A collective."""
        if self._last is None:
            return
        result, prediction = self._last
        timelines = self._world.gather((result.timeline, result.met_s))
        if self._world.is_first:
            predicted = None if prediction is None else prediction.timeline
            write_last_step(folder, result.step + 1, aligned(timelines), predicted)

    def _take(self, say: Say) -> PredictedStep | None:
        future, self._future = self._future, None
        if future is None:
            return None
        try:
            step = future.result()
        except UserError as error:  # A profile may lack a layer or a message.
            self._steps = None
            say(f"Steps are not predicted from now on: {error}")
            return None
        num_actions = self._num_actions * (1 if step.gained_s is None else 2)
        self._next = self._number + math.ceil(num_actions / _MAX_ACTIONS)
        return step

    def __enter__(self) -> PredictedRun:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


def _replan(chosen: ChosenPlan, recipe: Recipe) -> str:
    """The command that plans anew by measured times, and what it takes if they are not measured yet."""
    profile = recipe.run.dir / PROFILE_FILE
    first = "" if profile.exists() else "measure by motet profile, as every rank of torchrun, then "
    return f"{first}{chosen.replan} --profile {profile}"
