"""`motet plan RECIPE`: the best Plan of a recipe, or of each of its training phases, and the command that trains it."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from motet.core.cluster import Cluster
from motet.core.errors import UserError
from motet.core.files import check_output, check_outputs
from motet.planner.candidate import Pins
from motet.planner.command import PlanOutputs, plan_command
from motet.planner.module_pins import unmet_degrees
from motet.planner.search_result import SimulatedCandidate
from motet.planning.job import JobOptions, check_job_learns, job_of_recipe
from motet.planning.trainable import (
    torchrun_words,
    train_words,
    trainable_in,
    training_line,
    untrained,
)
from motet.train.recipe.reading import of_phase, phase_names


@dataclass(frozen=True)
class PlanRequest:
    """What is to be planned, and what is to be written.

    is_trainable, says_what_if: as of `plan_command`.
    launch:       the launcher for which the file that starts the job is written; None: there is no such file.
    num_measured: how many plans run real steps, of which the fastest is the best; None: predictions decide.
    """

    recipe: Path
    overrides: tuple[str, ...]
    options: JobOptions
    pins: Pins
    outputs: PlanOutputs
    is_trainable: bool = False
    says_what_if: bool | None = None
    launch: Literal["slurm", "k8s"] | None = None
    num_measured: int | None = None

    def check(self, phases: Sequence[str]) -> None:
        """Raise UserError for options that exclude each other, and for files that cannot be written.

        phases: the names of the recipe's training phases.
        """
        self._check_measuring()
        self._check_phases(phases)
        self._check_files()

    def _check_measuring(self) -> None:
        if self.num_measured is None:
            return
        if self.is_trainable:
            raise UserError("--measure runs plans that can be trained, and no others; leave --trainable out.")
        if self.says_what_if:
            raise UserError("--what-if compares predictions, and --measure runs real steps; leave one of them out.")
        if self.launch is not None:
            raise UserError(
                "--launch writes a job for another place, and --measure runs plans here; leave one of them out."
            )

    def _check_phases(self, phases: Sequence[str]) -> None:
        of_one_plan = {
            "--measure": self.num_measured is not None,
            "--launch": self.launch is not None,
            "--json -": self.outputs.is_json_alone,
        }
        wrong = next((option for option, is_given in of_one_plan.items() if is_given), "")
        if phases and wrong:
            raise UserError(
                f"{wrong} is of one plan, and {self.recipe} trains in phases ({', '.join(phases)}): choose one with "
                f"--set run.phase={phases[0]}."
            )

    def _check_files(self) -> None:
        written = [*dict.fromkeys(self.outputs.paths)]
        if self.launch is not None:
            from motet.planning.launch import launch_file

            script = launch_file(self.outputs.plan, self.launch)
            check_output(script)
            written.append(script)
        check_outputs(written, [self.recipe, self.options.workload, self.options.profile])

    def of_phase(self, name: str) -> PlanRequest:
        """The request of one training phase, whose files have its name in theirs."""
        outputs = self.outputs.named(name)
        return replace(self, overrides=tuple(of_phase(self.overrides, name)), outputs=outputs)


@dataclass(frozen=True)
class Planned:
    """The answer of a request.

    trains: whether `motet train` can run it.
    first:  what the recipe must not say then.
    pinned: overrides by which the recipe states the degrees of this Plan, where pins have outweighed its own.
    """

    best: SimulatedCandidate
    trains: bool
    first: str = ""
    pinned: tuple[str, ...] = ()

    @property
    def cluster(self) -> Cluster:
        """What is started to train the Plan: its cluster, without nodes that it leaves over."""
        return self.best.candidate.plan.needed_cluster


def plan_requested(request: PlanRequest) -> None:
    """`motet plan`: plan a run, each of its training phases, or measured plans; print and write what was found.

    Raises UserError: for what is wrong with the request before anything is planned, and where nothing fits.
    """
    phases = phase_names(request.recipe, request.overrides)
    request.check(phases)
    if request.num_measured is not None:
        from motet.planning.measure import MeasureRequest, plan_measured

        asked = MeasureRequest(request.recipe, request.overrides, request.options, request.pins, request.num_measured)
        plan_measured(asked, request.outputs)
    elif phases:
        plan_phases(request, phases)
    else:
        for line in plan_recipe_file(request):
            print(line)


def plan_recipe_file(request: PlanRequest) -> list[str]:
    """Plan one run; returns the lines that say how it is trained, none where it cannot be. Raises UserError."""
    planned = _planned(request)
    if not planned.trains:
        return []
    recipe, out = request.recipe, request.outputs.plan
    lines = [planned.first] * bool(planned.first)
    overrides = (*request.overrides, *planned.pinned)
    lines.append(f"Train it: {training_line(recipe, out, planned.cluster, overrides)}")
    if request.launch is not None:
        from motet.planning.launch import Launch, write_launch

        launch = Launch(recipe, overrides, out, planned.cluster, Path.cwd())
        lines.append(f"Start the job: {write_launch(launch, request.launch)}")
    return [] if request.outputs.is_json_alone else lines


def plan_phases(request: PlanRequest, names: Sequence[str]) -> None:
    """Plan each training phase of a recipe, and print the command that trains all of them under these Plans.

    Raises UserError as `plan_command` does, with the phase, and for files that cannot be written before any is planned.
    """
    requests = [request.of_phase(name) for name in names]
    for each in requests:
        each.outputs.check()
    planned = []
    for name, each in zip(names, requests):
        print(f"Phase {name}\n")
        try:
            planned.append(_planned(each))
        except UserError as error:
            raise UserError(f"Phase {name}: {error}") from error
        print()
    for one in planned:
        if one.first:
            print(one.first)
    if all(one.trains for one in planned):
        files = [each.outputs.plan for each in requests]
        pinned = dict.fromkeys(override for one in planned for override in one.pinned)
        words = train_words(request.recipe, files, [*request.overrides, *pinned])
        started = max((one.cluster for one in planned), key=lambda where: (where.num_nodes, where.ranks_per_node))
        print(f"Train them: {torchrun_words(started)} {shlex.join(words)}")


def _planned(request: PlanRequest) -> Planned:
    """Plan one run, print and write the result."""
    recipe, overrides, outputs = request.recipe, request.overrides, request.outputs
    asks = request.is_trainable or request.launch is not None
    job = job_of_recipe(recipe, request.options, overrides)
    check_job_learns(recipe, job)
    obstacle = trainable_in(recipe, overrides, is_asked=asks)
    need = None
    if (profile := request.options.profile) is not None:
        from motet.planning.decoding import decoding_need

        need = decoding_need(recipe, overrides, profile)
    figures = None if need is None else need.figures
    asked = {"is_trainable": asks, "says_what_if": request.says_what_if}
    best = plan_command(job, request.pins, outputs, obstacle, untrained, decoding=figures, **asked)
    if request.pins.balance not in (None, "off") and all(unit.dp == 1 for unit in best.candidate.plan.units):
        print(
            f"--pin balance={request.pins.balance} has no effect on this plan: it has one replica of each module, and "
            "nothing can be balanced.",
            file=sys.stderr,
        )
    if need is not None and not outputs.is_json_alone:
        print(need.words(best.step_s, best.candidate.plan))
    if obstacle is None or best.obstacle:
        return Planned(best, trains=False)
    from motet.planning.too_long import say_too_long
    from motet.planning.under_plan import to_remove
    from motet.train.recipe.recipe_file import load_recipe

    own = load_recipe(recipe, overrides, trains=False) if request.options.workload is None else None
    say_too_long(best.candidate.plan, job, own)
    plan = best.candidate.plan
    # Training refuses a Plan without the degrees that the recipe states.
    pinned = tuple(f"parallel.{name}.{degree}={has}" for name, degree, has, _ in unmet_degrees(plan, job.degrees))
    return Planned(best, trains=True, first=to_remove(recipe, overrides, plan), pinned=pinned)
