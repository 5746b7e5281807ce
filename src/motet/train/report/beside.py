"""The measured step beside the predicted one: by kind of action in the log, and on one scale of time in the report."""

from __future__ import annotations

import html
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from motet.core.timeline import Span, Timeline
from motet.core.words import counted_words, shown_seconds
from motet.schedule.program import action_words
from motet.simulate.predict.prediction import Prediction
from motet.simulate.show.page import HINT, framed_page
from motet.simulate.show.report import BUBBLE_NAMES

COMPARED_STEPS = 20
"""Steps after which the log compares. The first of them is left out: it allocates memory."""
LAST_STEP = "last_step.json"
AT_ASSUMED_SPEED = " at a speed that is assumed, as nothing was profiled here"
_MAX_SPANS = 100_000
"""The most spans of each picture."""


def predicted_actions(prediction: Prediction) -> dict[str, float]:
    """Seconds of each kind of action by its name in metrics, mean over the ranks that were simulated."""
    timeline = prediction.timeline
    seconds: Counter[str] = Counter()
    for (kind, module), total_s in timeline.seconds_by_kind().items():
        seconds[action_words(kind, module)] += total_s / max(timeline.num_ranks, 1)
    return dict(seconds)


class MeasuredBeside:
    """Adds up measured and predicted seconds of the first steps of a process.

    replan:      the command that plans anew by measured times.
    is_profiled: whether predictions are of measured times; of an assumed speed, only their sum is said.

    Example:
        >>> compared = MeasuredBeside("motet plan R", is_profiled=True, num_steps=2)
        >>> compared.add(9.0, {"forward image": 8.0}, 1.0, {"forward image": 1.0})
        ''
        >>> said = compared.add(1.2, {"forward image": 0.5, "optimizer": 0.1}, 1.0, {"forward image": 0.4})
        >>> said.split("; ")[1].partition(" Plan anew")[0]
        'on a mean rank, with the waits of receives, forward image 500 ms against 400 ms, optimizer 100 ms against 0 s.'
    """

    def __init__(self, replan: str, is_profiled: bool, num_steps: int = COMPARED_STEPS) -> None:
        self._replan, self._is_profiled, self._num_steps, self._count = replan, is_profiled, num_steps, 0
        self._step_s: Counter[str] = Counter()
        self._measured: Counter[str] = Counter()
        self._predicted: Counter[str] = Counter()

    def add(
        self, measured_s: float, measured: Mapping[str, float], predicted_s: float, predicted: Mapping[str, float]
    ) -> str:
        """Add a step: its seconds, and by action those of a mean rank. Returns a sentence once, after the last step."""
        self._count += 1
        if self._count == 1 or self._count > self._num_steps:
            return ""
        self._step_s.update({"measured": measured_s, "predicted": predicted_s})
        self._measured.update(measured)
        self._predicted.update(predicted)
        return self._sentence() if self._count == self._num_steps else ""

    def _sentence(self) -> str:
        names = sorted(
            self._measured.keys() | self._predicted.keys(),
            key=lambda name: -max(self._measured[name], self._predicted[name]),
        )
        measured_s, predicted_s = self._step_s["measured"], self._step_s["predicted"]
        count, steps = self._num_steps - 1, counted_words(self._num_steps, "step")
        if not self._is_profiled:
            measured = ", ".join(
                f"{name} {_shown(self._measured[name] / count)}" for name in names if self._measured[name]
            )
            return (
                f"After {steps}: a step takes {_shown(measured_s / count)}; on a mean rank, with the waits of "
                f"receives, {measured}. {_shown(predicted_s / count)} was predicted{AT_ASSUMED_SPEED}. "
                f"Plan anew: {self._replan}"
            )
        by_kind = ", ".join(f"{name} {self._both(self._measured[name], self._predicted[name])}" for name in names)
        return (
            f"After {steps}, measured against predicted: a step takes {self._both(measured_s, predicted_s)} "
            f"({measured_s / predicted_s - 1:+.0%}); on a mean rank, with the waits of receives, {by_kind}. Plan anew: "
            f"{self._replan}"
        )

    def _both(self, measured_s: float, predicted_s: float) -> str:
        count = self._num_steps - 1
        return f"{_shown(measured_s / count)} against {_shown(predicted_s / count)}"


def write_last_step(run_dir: Path, step: int, measured: Timeline, predicted: Timeline | None) -> None:
    """Write the Timelines of a step for the report. step: from 1."""
    timelines = {"measured": measured, "predicted": predicted}
    written = {
        name: {"names": list(timeline.rank_names), "spans": [asdict(span) for span in timeline]}
        for name, timeline in timelines.items()
        if timeline is not None
    }
    (run_dir / LAST_STEP).write_text(json.dumps({"step": step} | written), encoding="utf-8")


def beside_sections(run_dir: Path, summary: Mapping[str, Any]) -> list[str]:
    """The part of the report on the last step under a Plan; nothing for a run without one."""
    file = run_dir / LAST_STEP
    if not file.exists():
        return []
    read = json.loads(file.read_text(encoding="utf-8"))
    timelines = {name: _timeline(read[name]) for name in ("measured", "predicted") if name in read}
    longest_s = max(timeline.makespan_s for timeline in timelines.values())
    frames = [
        f'<h3>{name}, {shown_seconds(timeline.makespan_s)}</h3><iframe height="320" title="{name}" '
        f'srcdoc="{html.escape(framed_page(timeline, max_spans=_MAX_SPANS, framed_s=longest_s))}"></iframe>'
        for name, timeline in timelines.items()
    ]
    return [
        f"<h2>Step {read['step']:,}, measured and predicted</h2>",
        f"<p>{_words(timelines, summary)} The wheel with Ctrl {HINT}</p>",
        *frames,
        *_bubble_table(summary),
    ]


def _words(timelines: Mapping[str, Timeline], summary: Mapping[str, Any]) -> str:
    if "predicted" not in timelines:
        return "It was not predicted; the log says why, and what would predict it."
    measured_s, predicted_s = (timelines[name].makespan_s for name in ("measured", "predicted"))
    words = "On one scale of time."
    if summary["is_profiled"]:
        words += f" It took {measured_s / predicted_s:.1%} of the predicted time."
    if summary["makespan_error"] is not None:
        by = f": {summary['makespan_error']:+.1%}" if summary["is_profiled"] else AT_ASSUMED_SPEED
        words += (
            f" The median of the steps behind the first ones took {shown_seconds(summary['measured_s'])}, and was "
            f"predicted to take {shown_seconds(summary['predicted_s'])}{by}."
        )
    return words


def _bubble_table(summary: Mapping[str, Any]) -> list[str]:
    """Bubbles by kind on the busiest rank, measured and predicted, the median of steps."""
    found = summary["bubbles"]
    measured, predicted = found["measured"], found["predicted"] or {}
    kinds = [kind for kind in measured if measured[kind] > 0 or predicted.get(kind, 0) > 0]
    if not kinds:
        return []
    rows = "".join(
        f"<tr><td>{BUBBLE_NAMES[kind]}</td><td>{_shown(measured[kind])}</td>"
        f"<td>{_shown(predicted[kind]) if predicted else 'not predicted'}</td></tr>"
        for kind in kinds
    )
    return [
        "<h3>Bubbles of the busiest rank, median of steps</h3>",
        f"<table><tr><th>kind</th><th>measured</th><th>predicted</th></tr>{rows}</table>",
    ]


def _timeline(read: Mapping[str, Any]) -> Timeline:
    return replace(Timeline.of(Span(**span) for span in read["spans"]), rank_names=read["names"])


def _shown(seconds: float) -> str:
    return shown_seconds(seconds) if seconds else "0 s"
