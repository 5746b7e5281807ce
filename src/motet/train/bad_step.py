"""What a run does about a bad step, one whose loss or gradient is not finite: it finds the cause, then stops or skips.

A bad step has changed nothing. With `run.on_bad_step = "stop"`, the run saves a checkpoint of the state before the step
and ends with a sentence. With "skip", the step counts as done and its examples as seen. Either way the run names the
module and the examples, and writes all examples of the step to `bad_steps.jsonl`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from motet.core.errors import JointUserError
from motet.data.examples import Examples
from motet.data.splits import OwnSplits
from motet.dispatch import RankBatch
from motet.runtime.not_finite import Finding, Moment, first_not_finite, gradient_not_finite, weight_not_finite
from motet.runtime.planned_step import PlannedStep
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
    """A weight is not finite. No later step can be finite, and a checkpoint would be useless, so none is written."""


@dataclass(frozen=True)
class Cause:
    """The cause of a bad step; the same on all ranks.

    what:         in words, what is first not finite.
    more:         in words, what else is known.
    examples:     names of the examples that cause it; if not `is_certain`, of all examples that may.
    is_in_weight: a weight was not finite before the step.
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


def examine(
    step: TrainStep | PlannedStep,
    batches: Sequence[RankBatch],
    fed: StepInput,
    dataset: Examples | OwnSplits,
    world: World,
) -> Cause:
    """Find the cause of a bad step by running it again. A collective.

    Random number generators must be as they were before the step. Under a Plan with stages the step is not run again,
    and the cause is no more than a parameter whose gradient, which the step has left, is not finite.
    """
    # 1. Weights that are not finite explain everything.
    if weights := [name for name in world.gather(weight_not_finite(step)) if name]:
        return Cause(f"the weight {weights[0]} is not finite before the step", is_in_weight=True)
    # 2. The step is run again, which also leaves its gradients.
    if isinstance(step, PlannedStep):
        return _cause_in_gradients(step, world)
    by_rank = world.gather(first_not_finite(step, batches))
    findings = [(rank, finding) for rank, finding in enumerate(by_rank) if finding is not None]
    index, parameter = max(world.gather(gradient_not_finite(step)))
    gradient = "" if index < 0 else f"the first parameter with such a gradient is {parameter}"
    if not findings:
        return Cause(
            f"computed again, all outputs of modules are finite; {gradient}"
            if gradient
            else "computed again, all of it is finite, so an operation, or the device, does not always give the same"
        )
    # 3. The earliest finding of any rank counts, with those of other ranks in the same module of the same action.
    rank, first = min(findings, key=lambda entry: entry[1].moment)
    microbatch = first.moment.microbatch
    alike = [finding for _, finding in findings if _event(finding) == _event(first)]
    ids = sorted({int(fed.examples[microbatch][index]) for finding in alike for index in finding.examples})
    of_output = first.what == "output"
    return Cause(
        f"first in the {'' if of_output else 'gradient of the '}output of {first.module} on rank {rank}, in microbatch "
        f"{microbatch + 1}",
        "" if of_output else f"all outputs are finite; {gradient}",
        tuple(_names(ids, dataset, world)),
        all(finding.is_certain for finding in alike),
    )


def _names(ids: Sequence[int], dataset: Examples | OwnSplits, world: World) -> list[str]:
    """Manifest and line of examples; of an example in a split, only its rank knows them. A collective."""
    by_rank = world.gather([dataset.where(example) for example in ids])
    return [max(names) for names in zip(*by_rank, strict=True)]


def _cause_in_gradients(step: PlannedStep, world: World) -> Cause:
    by_rank = [name for index, name in world.gather(gradient_not_finite(step)) if index >= 0]
    # Later stages run backward first.
    return Cause(f"the gradient of {by_rank[-1]} is not finite" if by_rank else "the loss is not finite")


def _event(finding: Finding) -> tuple[str, str, Moment]:
    """A key that is equal for findings in the same module of the same action."""
    return finding.what, finding.module, finding.moment._replace(call=0)


class BadSteps:
    """Counts and records the bad steps of a run. All ranks call every method alike."""

    def __init__(self, recipe: Recipe, dataset: Examples | OwnSplits, world: World) -> None:
        self._path, self._skips = recipe.run.dir / FILE, recipe.run.on_bad_step == "skip"
        self._dataset, self._world = dataset, world
        self._in_a_row = 0

    def passed(self) -> None:
        """Note that a step was finite."""
        self._in_a_row = 0

    def met(self, result: StepResult, fed: StepInput, cause: Cause) -> str:
        """Record a bad step; returns the sentence for the user if training goes on. A collective.

        Raises JointUserError if training ends here, as BrokenWeights if there is nothing worth saving.
        """
        self._in_a_row += 1
        names = [_names(ids.tolist(), self._dataset, self._world) for ids in fed.examples]
        with self._world.together():
            if self._world.is_first:
                self._write(result, names, cause)
        sentence = (
            f"Step {result.step + 1} is not finite (loss {result.loss:g}, gradient norm {result.grad_norm:g}): {cause}."
        )
        if cause.is_in_weight:
            raise BrokenWeights(
                f"{sentence} Training stops: go back to an earlier checkpoint (--resume PATH) with a smaller "
                "optimizer.lr."
            )
        if not self._skips:
            raise JointUserError(
                f"{sentence} Training stops: mend the examples ({self._path} names all of the step), lower "
                'optimizer.lr, lengthen optimizer.warmup_steps, or set run.on_bad_step = "skip".'
            )
        if self._in_a_row >= MOST_IN_A_ROW:
            raise JointUserError(
                f"{sentence} It is the {self._in_a_row}th in a row, so skipping does not help, and training stops."
            )
        return f"{sentence} It is skipped."

    def _write(self, result: StepResult, examples: list[list[str]], cause: Cause) -> None:
        """examples: names of all examples of the step, by microbatch."""
        line: dict[str, Any] = {
            "step": result.step + 1,
            "loss": result.loss,
            "grad_norm": result.grad_norm,
            "cause": cause.what,
            "more": cause.more,
            "examples_of_cause": cause.examples,
            "is_certain": cause.is_certain,
            "examples": examples,
        }
        with writing(self._path), open(self._path, "a", encoding="utf-8") as file:
            file.write(to_json(line) + "\n")
