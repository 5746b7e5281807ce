"""`motet plan`: searches, prints what was found, and writes the best Plan and a picture of its step."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from motet.core.errors import UserError
from motet.core.files import check_output
from motet.core.plan_file import write_plan
from motet.planner.candidate import Pins
from motet.planner.job import Job
from motet.planner.report import print_found
from motet.planner.search import NOTHING_MORE, Found, Wanted, search
from motet.planner.strategies import STRATEGIES
from motet.simulate.show.picture import write_png
from motet.simulate.show.plan_words import rows_in_words

_MAX_ROWS = 24
"""Of the picture: drawing takes longer than searching otherwise."""


@dataclass(frozen=True)
class PlanOutputs:
    """Files to write. plan: JSON, for `motet simulate`. png: a picture of its step. html: a page of it to zoom in.
    explanation: a page of all plans that were simulated.
    """

    plan: Path
    png: Path
    html: Path | None = None
    explanation: Path | None = None

    @property
    def paths(self) -> list[Path]:
        """Of those that are to be written."""
        return [path for path in (self.plan, self.png, self.html, self.explanation) if path is not None]

    def check(self) -> None:
        """Raises UserError for what cannot be written, and for two files at one place."""
        for path in self.paths:
            check_output(path)
            if self.paths.count(path) > 1:
                raise UserError(f"{path} cannot be written: two of --out, --png, --html and --explain name it.")


def plan_command(job: Job, pins: Pins, outputs: PlanOutputs) -> None:
    """Raises UserError if nothing fits, naming the nearest miss, and for a file that cannot be written: what can be
    known of that, before anything is searched.
    """
    outputs.check()
    show_found(find_plans(job, pins), outputs)


def show_found(found: Found, outputs: PlanOutputs) -> None:
    """Write the best of what was found, and print all: a search is not lost where nobody reads standard output.

    Raises UserError as `plan_command` does.
    """
    best = found.best
    title = f"{found.job.model.name}: {best.candidate.strategy}, {best.candidate.what}, predicted"
    timeline = best.prediction.timeline
    write_plan(best.candidate.plan, outputs.plan)
    note = rows_in_words(best.candidate.plan)
    write_png(timeline, outputs.png, title=title, note=note, max_rows=_MAX_ROWS)
    if outputs.html is not None:
        from motet.simulate.show.page import write_timeline_html

        write_timeline_html(timeline, outputs.html, title=title, note=note)
    if outputs.explanation is not None:
        from motet.planner.explain import write_explanation

        write_explanation(found, outputs.explanation)
    print_found(found)
    print(f"\nWrote {', '.join(map(str, outputs.paths))}.")


def find_plans(job: Job, pins: Pins, wanted: Wanted = NOTHING_MORE) -> Found:
    """All strategies searched, with a bar of how far that is."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task("considering", total=None)

        def show(what: str, done: int, total: int) -> None:
            bars.update(task, description=what, completed=done, total=total)

        return search(job, STRATEGIES, pins, wanted=wanted, progress=show)
