"""`motet simulate`: a Prediction as tables, and, where asked for, as a trace, a page and a picture."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from motet.core.errors import UserError
from motet.core.plan import Plan
from motet.cost.analytic import Analytic
from motet.cost.model import CostModel
from motet.cost.profile import read_profile
from motet.cost.profiled import Profiled
from motet.simulate.drawing import shown_seconds
from motet.simulate.prediction import Prediction
from motet.simulate.report import print_prediction

_MEASURED_IN = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}


def cost_model_of(plan: Plan, profile_file: Path | None) -> CostModel:
    """What a profile measured, or, without one, the analytic model.

    Raises UserError for a file that is no profile, or is one in another precision than the plan's.
    """
    if profile_file is None:
        return Analytic(plan.cluster, plan.precision)
    profile = read_profile(profile_file)
    if profile.precision != _MEASURED_IN.get(plan.precision):
        raise UserError(
            f"{profile_file} was measured in {profile.precision} and the plan computes in {plan.precision}: profile a "
            "recipe that computes as the plan does, or change the plan's precision."
        )
    return Profiled(profile, plan.cluster)


@dataclass(frozen=True)
class Outputs:
    """Files to write. trace: JSON for Perfetto. html: the page. png: the picture."""

    trace: Path | None = None
    html: Path | None = None
    png: Path | None = None


def show_predictions(plan: Plan, predictions: Iterable[Prediction], outputs: Outputs, title: str) -> None:
    """Print the tables and write the files, of the slowest of one or more predictions.

    title: of page and picture. Raises UserError for a file that cannot be written.
    """
    steps_s: list[float] = []
    for each in predictions:
        # One at a time: a timeline of thousands of ranks is large.
        if not steps_s or each.step_s > max(steps_s):
            prediction = each
        steps_s.append(each.step_s)
    print_prediction(plan, prediction)
    if len(steps_s) > 1:
        mean, most = shown_seconds(sum(steps_s) / len(steps_s)), shown_seconds(prediction.step_s)
        print(f"\nOf {len(steps_s)} batches, a step takes {mean} in the mean, and {most} in the slowest, shown here.")
    if outputs.trace is not None:
        try:
            prediction.timeline.write_chrome_trace(outputs.trace)
        except OSError as error:
            raise UserError(f"the trace cannot be written to {outputs.trace}: {error.strerror}.") from error
    if outputs.html is not None:
        from motet.simulate.page import write_html

        write_html(prediction.timeline, outputs.html, title=title)
    if outputs.png is not None:
        # Imported here: matplotlib takes half a second, which the tables need not wait for.
        from motet.simulate.picture import write_png

        write_png(prediction.timeline, outputs.png, title=title)
    for written in (outputs.trace, outputs.html, outputs.png):
        if written is not None:
            print(f"Wrote {written}.")
