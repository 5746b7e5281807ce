"""`motet simulate`: a Prediction as tables or as the actions of a rank, and if asked for a trace, a page, a picture."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from motet.core.errors import UserError
from motet.core.files import check_output
from motet.core.plan import Plan
from motet.core.words import shown_seconds
from motet.simulate.predict.beyond_profile import extrapolated, guesses
from motet.simulate.predict.prediction import Prediction
from motet.simulate.show.plan_words import rows_in_words
from motet.simulate.show.prediction_json import STDOUT, prediction_tables, write_prediction
from motet.simulate.show.rank_actions import program_rank_of, rank_actions
from motet.simulate.show.report import out_of_memory, print_prediction


@dataclass(frozen=True)
class PredictionOutputs:
    """Files to write. trace: JSON for Perfetto. html: the page. png: the picture.

    actions: a rank, whose actions are printed instead of the tables. json: the figures; "-": they alone are printed.
    """

    trace: Path | None = None
    html: Path | None = None
    png: Path | None = None
    actions: int | None = None
    json: Path | None = None

    def check(self) -> None:
        """Refuse a file that cannot be written, and two kinds of output where there is one: raises UserError."""
        for path in (self.trace, self.html, self.png, self.json):
            if path not in (None, STDOUT):
                check_output(path)
        if self.json == STDOUT and self.actions is not None:
            raise UserError(
                "--json - and --actions both say what is printed; name a file for --json, or leave one out."
            )


def show_predictions(
    plan: Plan,
    predictions: Iterable[Prediction],
    outputs: PredictionOutputs,
    title: str,
    *,
    strategy: str = "",
    obstacle: str = "",
) -> None:
    """Write the files of the slowest of one or more predictions, and print its tables or the actions of a rank.

    title:    of page and picture.
    strategy: its name, for JSON. obstacle: what of the Plan training cannot run, in words, for JSON.
    Raises UserError for a file that cannot be written, for a rank that the Plan does not use, and for what would be a
    guess by the profile.
    """
    if outputs.actions is not None:
        program_rank_of(plan, outputs.actions)  # A wrong rank is refused before anything is simulated.
    steps_s: list[float] = []
    for each in predictions:
        if guess := guesses(each.beyond):
            raise UserError(guess)
        # One at a time: a timeline of thousands of ranks is large.
        if not steps_s or each.step_s > max(steps_s):
            prediction = each
        steps_s.append(each.step_s)
    if outputs.trace is not None:
        try:
            prediction.timeline.write_chrome_trace(outputs.trace)
        except OSError as error:
            raise UserError(f"the trace cannot be written to {outputs.trace}: {error.strerror}.") from error
    if outputs.html is not None:
        from motet.simulate.show.page import write_timeline_html

        write_timeline_html(prediction.timeline, outputs.html, title=title, note=rows_in_words(plan))
    if outputs.png is not None:
        from motet.simulate.show.picture import write_png

        write_png(prediction.timeline, outputs.png, title=title, note=rows_in_words(plan))
    if outputs.json is not None:
        why_not = obstacle or out_of_memory(plan, prediction)
        write_prediction(prediction_tables(strategy, prediction, why_not), outputs.json)
        if outputs.json == STDOUT:
            return
    if outputs.actions is not None:
        for line in rank_actions(plan, prediction, outputs.actions):
            print(line)
    else:
        _print_tables(plan, prediction, steps_s)
    for written in (outputs.trace, outputs.html, outputs.png, outputs.json):
        if written is not None:
            print(f"Wrote {written}.")


def _print_tables(plan: Plan, prediction: Prediction, steps_s: list[float]) -> None:
    """prediction: of the slowest step. steps_s: seconds of all steps."""
    print_prediction(plan, prediction)
    for sentence in extrapolated(prediction.beyond):
        print(f"\n{sentence}")
    if len(steps_s) > 1:
        mean, most = shown_seconds(sum(steps_s) / len(steps_s)), shown_seconds(prediction.step_s)
        print(f"\nOf {len(steps_s)} batches, a step takes {mean} in the mean, and {most} in the slowest, shown here.")
