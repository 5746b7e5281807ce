"""A step whose loss or gradient is not finite: the run finds the cause, and stops, or goes on without the step.

Such a step has changed nothing. `run.on_bad_step` decides: "stop" saves what there was before it and ends the run with
a sentence; "skip" counts it as done, its examples as seen. Both name module and examples, and write all of the step's
examples to `bad_steps.jsonl`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from motet.core.errors import JointUserError
from motet.data.dataset import Dataset
from motet.dispatch import RankBatch
from motet.runtime.not_finite import Finding, Moment, find, gradient_not_finite, weight_not_finite
from motet.runtime.step import StepResult, TrainStep
from motet.train.input.feed import StepInput
from motet.train.recipe.recipe import Recipe
from motet.train.report.step_lines import to_json
from motet.train.run_folder import writing
from motet.train.world import World

FILE = "bad_steps.jsonl"
MOST_IN_A_ROW = 10
_MAX_NAMED = 3


class BrokenWeights(JointUserError):
    """A weight is not finite, so that no later step will be, and a checkpoint of it would be of no use."""


@dataclass(frozen=True)
class Cause:
    """Where a step that is not finite goes wrong; the same on all ranks.

    what, more:   in words: what comes first, and what else is known.
    examples:     names of those that it comes from, as far as rows tell (`is_certain`), else of all that may be it.
    is_in_weight: whether weights were broken already, so that no step will be finite.
    """

    what: str
    more: str = ""
    examples: tuple[str, ...] = ()
    is_certain: bool = True
    is_in_weight: bool = False

    def __str__(self) -> str:
        return self.what + self._examples() + (f" ({self.more})" if self.more else "")

    def _examples(self) -> str:
        if not self.examples:
            return ""
        others = len(self.examples) - _MAX_NAMED
        named = "; ".join(self.examples[:_MAX_NAMED]) + (f" and {others} more" if others > 0 else "")
        return f", {'of' if self.is_certain else 'of one of'} {named}"


def examine(step: TrainStep, batches: Sequence[RankBatch], fed: StepInput, dataset: Dataset, world: World) -> Cause:
    """Find the cause, by running the step again. Random numbers must be as they were before it. A collective."""
    if weights := [name for name in world.gather(weight_not_finite(step)) if name]:
        return Cause(f"the weight {weights[0]} is not finite before the step", is_in_weight=True)
    findings = [(rank, found) for rank, found in enumerate(world.gather(find(step, batches))) if found is not None]
    number, parameter = max(world.gather(gradient_not_finite(step)))
    gradient = "" if number < 0 else f"the first parameter with such a gradient is {parameter}"
    if not findings:
        return Cause(
            f"computed again, all outputs of modules are finite; {gradient}"
            if gradient
            else "computed again, all of it is finite, so an operation, or the device, does not always give the same"
        )
    rank, first = min(findings, key=lambda entry: entry[1].moment)
    microbatch = first.moment.microbatch
    alike = [found for _, found in findings if _event(found) == _event(first)]
    ids = sorted({int(fed.examples[microbatch][place]) for found in alike for place in found.examples})
    of_output = first.what == "output"
    return Cause(
        f"first in the {'' if of_output else 'gradient of the '}output of {first.module} on rank {rank}, in microbatch "
        f"{microbatch + 1}",
        "" if of_output else f"all outputs are finite; {gradient}",
        tuple(dataset.where(number) for number in ids),
        all(found.is_certain for found in alike),
    )


def _event(found: Finding) -> tuple[str, str, Moment]:
    """The same for what ranks met in the same module of the same action."""
    return found.what, found.module, found.moment._replace(call=0)


class BadSteps:
    """The bad steps of a run, on one rank; every method is called by all ranks alike."""

    def __init__(self, recipe: Recipe, dataset: Dataset, world: World) -> None:
        self._path, self._skips = recipe.run.dir / FILE, recipe.run.on_bad_step == "skip"
        self._dataset, self._world = dataset, world
        self._in_a_row = 0

    def passed(self) -> None:
        """A step was finite."""
        self._in_a_row = 0

    def met(self, result: StepResult, fed: StepInput, cause: Cause) -> str:
        """Write a bad step down; what is to be said of it, if training goes on. A collective.

        Raises JointUserError where training ends with it, and BrokenWeights where there is nothing left to save.
        """
        self._in_a_row += 1
        with self._world.together():
            if self._world.is_first:
                self._write(result, fed, cause)
        said = (
            f"Step {result.step + 1} is not finite (loss {result.loss:g}, gradient norm {result.grad_norm:g}): {cause}."
        )
        if cause.is_in_weight:
            raise BrokenWeights(
                f"{said} Training stops: go back to an earlier checkpoint (--resume PATH) with a smaller optimizer.lr."
            )
        if not self._skips:
            raise JointUserError(
                f"{said} Training stops: mend the examples ({self._path} names all of the step), lower optimizer.lr, "
                'lengthen optimizer.warmup_steps, or set run.on_bad_step = "skip".'
            )
        if self._in_a_row >= MOST_IN_A_ROW:
            raise JointUserError(
                f"{said} It is the {self._in_a_row}th in a row, so skipping does not help, and training stops."
            )
        return f"{said} It is skipped."

    def _write(self, result: StepResult, fed: StepInput, cause: Cause) -> None:
        line: dict[str, Any] = {
            "step": result.step + 1,
            "loss": result.loss,
            "grad_norm": result.grad_norm,
            "cause": cause.what,
            "more": cause.more,
            "examples_of_cause": cause.examples,
            "is_certain": cause.is_certain,
            "examples": [[self._dataset.where(int(number)) for number in ids] for ids in fed.examples],
        }
        with writing(self._path), open(self._path, "a", encoding="utf-8") as file:
            file.write(to_json(line) + "\n")
