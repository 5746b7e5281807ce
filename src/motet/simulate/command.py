"""`motet simulate`: a Prediction as tables, and, where asked for, as a trace, a page and a picture."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from motet.core.errors import UserError
from motet.core.files import check_output
from motet.core.plan import Plan
from motet.simulate.drawing import shown_seconds
from motet.simulate.plan_words import rows_in_words
from motet.simulate.prediction import Prediction
from motet.simulate.report import print_prediction


@dataclass(frozen=True)
class Outputs:
    """Files to write. trace: JSON for Perfetto. html: the page. png: the picture."""

    trace: Path | None = None
    html: Path | None = None
    png: Path | None = None

    def check(self) -> None:
        """Raises UserError for what cannot be written."""
        for path in (self.trace, self.html, self.png):
            if path is not None:
                check_output(path)


def show_predictions(plan: Plan, predictions: Iterable[Prediction], outputs: Outputs, title: str) -> None:
    """Write the files and print the tables, of the slowest of one or more predictions.

    title: of page and picture. Raises UserError for a file that cannot be written.
    """
    steps_s: list[float] = []
    for each in predictions:
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
        from motet.simulate.page import write_html

        write_html(prediction.timeline, outputs.html, title=title, note=rows_in_words(plan))
    if outputs.png is not None:
        from motet.simulate.picture import write_png

        write_png(prediction.timeline, outputs.png, title=title, note=rows_in_words(plan))
    print_prediction(plan, prediction)
    if len(steps_s) > 1:
        mean, most = shown_seconds(sum(steps_s) / len(steps_s)), shown_seconds(prediction.step_s)
        print(f"\nOf {len(steps_s)} batches, a step takes {mean} in the mean, and {most} in the slowest, shown here.")
    for written in (outputs.trace, outputs.html, outputs.png):
        if written is not None:
            print(f"Wrote {written}.")
