"""`motet plan`: searches, prints the result, and writes the best Plan and a picture of its step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from motet.core.errors import UserError
from motet.core.files import check_output
from motet.core.plan import Plan
from motet.core.plan_file import write_plan
from motet.planner.candidate import Pins
from motet.planner.evaluation import NO_QUOTA, Quota
from motet.planner.field_pins import pins_of
from motet.planner.job import Job
from motet.planner.pins import pin_texts
from motet.planner.report import print_result, winner_in_words
from motet.planner.search import search
from motet.planner.search_result import SearchResult, SimulatedCandidate
from motet.planner.strategies import STRATEGIES
from motet.planner.what_if import is_quick, what_if
from motet.simulate.show.picture import write_png
from motet.simulate.show.plan_words import rows_in_words
from motet.simulate.show.prediction_json import STDOUT, prediction_tables, write_prediction

_MAX_ROWS = 24
"""The most rows of the picture. More would take longer to draw than the search takes."""
_NOT_TRIED = ("--what-if tries what more memory, a node more and larger batches would change.",)


@dataclass(frozen=True)
class PlanOutputs:
    """Files to write.

    plan: the Plan as JSON, for `motet simulate`. png: a picture of its step. html: a page of its step, to zoom in.
    explanation: a page of all plans that were simulated. json: their figures; "-": what is printed is JSON alone.
    """

    plan: Path
    png: Path
    html: Path | None = None
    explanation: Path | None = None
    json: Path | None = None

    @property
    def paths(self) -> list[Path]:
        """The files that are written."""
        files = self.plan, self.png, self.html, self.explanation, None if self.is_json_alone else self.json
        return [path for path in files if path is not None]

    @property
    def is_json_alone(self) -> bool:
        """Whether JSON is all that is printed."""
        return self.json == STDOUT

    def named(self, name: str) -> PlanOutputs:
        """The files with a name in theirs: plan.json becomes plan-NAME.json."""
        optional = self.html, self.explanation, None if self.is_json_alone else self.json
        html, explanation, json = (None if path is None else _named(path, name) for path in optional)
        return PlanOutputs(_named(self.plan, name), _named(self.png, name), html, explanation, json)

    def check(self) -> None:
        """Raises UserError for a file that cannot be written, and for one path that is named twice."""
        for path in self.paths:
            check_output(path)
            if self.paths.count(path) > 1:
                raise UserError(f"{path} cannot be written: two of --out, --png, --html, --explain and --json name it.")


def _named(path: Path, name: str) -> Path:
    return path.with_name(f"{path.stem}-{name}{path.suffix}")


Decoding: TypeAlias = Callable[[float, Plan], dict[str, float]]
"""Figures of decoding, of (seconds of a step, its Plan)."""


def plan_command(
    job: Job,
    pins: Pins,
    outputs: PlanOutputs,
    obstacle: Callable[[Plan], str] | None = None,
    untrained: Callable[[Plan], str] = lambda plan: "",
    *,
    decoding: Decoding | None = None,
    is_trainable: bool = False,
    says_what_if: bool | None = None,
) -> SimulatedCandidate:
    """Search, print the result, and write it. Returns the best.

    obstacle:     what of a Plan training cannot run yet, in words; "" if it can run the Plan. None: the job is none
                  that trains. Plans that cannot be trained are marked as such.
    untrained:    what of a Plan no job can train yet, in words, for JSON.
    decoding:     what the media of a Plan's step ask of CPU cores, for JSON; None: nobody knows.
    is_trainable: only Plans that training can run count.
    says_what_if: whether the job is planned anew with more memory, a node more and larger batches; None: if that is
                  quick.
    Raises UserError, which names the nearest miss, if nothing fits; and for a file that cannot be written, before the
    search where that can be known.
    """
    outputs.check()
    if obstacle is None and is_trainable:
        raise UserError(
            "--trainable and --launch ask for plans that the recipe can be trained by, and it has neither [data] nor "
            "[workload]; leave them out."
        )
    quota = Quota(1, lambda plan: not obstacle(plan)) if obstacle is not None and is_trainable else NO_QUOTA
    result = find_plans(job, pins, quota)
    if obstacle is not None:
        result = result.with_obstacles(obstacle, is_trainable=is_trainable)
    if result.results and says_what_if is not False:
        sentences = map(str, what_if(result, STRATEGIES, quota)) if says_what_if or is_quick(job) else _NOT_TRIED
        result = replace(result, what_if=tuple(sentences))
    write_outputs(result, outputs, untrained, decoding)
    return result.best


def write_outputs(
    result: SearchResult,
    outputs: PlanOutputs,
    untrained: Callable[[Plan], str] = lambda plan: "",
    decoding: Decoding | None = None,
) -> None:
    """Write the best Plan, then print the result: files are written even where nobody reads standard output.

    untrained, decoding: as of `plan_command`. Raises UserError as `plan_command` does.
    """
    best = result.best
    title = f"{result.job.model.name}: {best.candidate.strategy}, {best.candidate.what}, predicted"
    timeline = best.prediction.timeline
    write_plan(best.candidate.plan, outputs.plan)
    note = rows_in_words(best.candidate.plan)
    write_png(timeline, outputs.png, title=title, note=note, max_rows=_MAX_ROWS)
    if outputs.html is not None:
        from motet.simulate.show.page import write_timeline_html

        write_timeline_html(timeline, outputs.html, title=title, note=note)
    words = [] if outputs.explanation is None and outputs.is_json_alone else winner_in_words(result)
    if outputs.explanation is not None:
        from motet.planner.explain import write_explanation

        write_explanation(result, outputs.explanation, words)
    if outputs.json is not None:
        write_prediction(list(_tables(result, untrained, decoding)), outputs.json)
    if not outputs.is_json_alone:
        print_result(result, words=words)
        print(f"\nWrote {', '.join(map(str, outputs.paths))}.")


def _tables(
    result: SearchResult, untrained: Callable[[Plan], str], decoding: Decoding | None
) -> Iterator[dict[str, Any]]:
    """The figures of each Plan, best first.

    bound_s: of every Plan of the job (`step_bound.py`), by the predicted seconds; bound_by: the term that binds.
    measured_s: seconds of a real step; null where none was run. pins: of every field, as `--pin` takes them.
    decoding: what the media of its step ask of CPU cores; null where nobody knows.
    """
    for one in result.results:
        candidate = one.candidate
        why_not = one.obstacle or untrained(candidate.plan)
        figures = prediction_tables(candidate.strategy, one.prediction, why_not)
        bound = {"bound_s": result.bound.step_s, "bound_by": result.bound.term}
        yield {
            "strategy": candidate.strategy,
            "what": candidate.what,
            "measured_s": one.measured_s,
            **figures,
            **bound,
            "decoding": None if decoding is None else decoding(one.step_s, candidate.plan),
            "pins": pin_texts(pins_of(candidate.plan)),
        }


def find_plans(job: Job, pins: Pins, quota: Quota = NO_QUOTA) -> SearchResult:
    """`search` over all strategies, with a progress bar on standard error.

    pins: outweigh the degrees that the job's recipe states.
    """
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task("considering", total=None)

        def show(what: str, done: int, total: int) -> None:
            bars.update(task, description=what, completed=done, total=total)

        return search(job, STRATEGIES, pins.beside(job.degrees), quota=quota, progress=show)
