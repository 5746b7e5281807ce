"""Where a run's metrics go: `metrics.jsonl` (a line a step), trackers, and the terminal. Rank 0 only.

A resumed run cuts off the lines after the step from which it resumes, so that the file has every step once. If a file
cannot be written, nothing is raised: `failure` says why, and all ranks stop together (`trainer.py`). A run goes on if
its terminal has gone, or a service that it reports to.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from motet.core.errors import UserError
from motet.crash import silence
from motet.train.report.step_lines import (
    HELDOUT,
    HELDOUT_FILE,
    Lines,
    cut_lines,
    forget_aside,
    go_on_behind,
    to_json,
)
from motet.train.report.trackers import Tracker, open_trackers
from motet.train.run_folder import writing

_PLAIN_LINE_EVERY_S = 5.0


class MetricsLog:
    """Logs the metrics of a run; a context manager, which closes its files and the live line.

    first_step: the step from which the run goes on.
    report_to:  as of `run.report_to`. config: the recipe, as plain data, which services are given.
    failure:    why metrics could not be written, a sentence without full stop; "" if they could.
    Raises UserError if the files cannot be written at the start, metrics.jsonl is no file of a run, or a service cannot
    be reported to.
    """

    def __init__(
        self, run_dir: Path, first_step: int, num_steps: int, report_to: tuple[str, ...], config: Mapping[str, Any]
    ) -> None:
        self.failure = ""
        self._num_steps = num_steps
        self._path = run_dir / "metrics.jsonl"
        with writing(run_dir):
            go_on_behind(run_dir, first_step)
            self._file = Lines(self._path)
            self._trackers = open_trackers(report_to, run_dir, first_step, config)
        self._console = Console(file=Terminal())
        self._live = _live_line(self._console) if self._console.is_terminal else None
        if self._live:
            self._task = self._live.add_task("training", total=num_steps, completed=first_step, text="")
            self._live.start()
        self._last_line_s = -_PLAIN_LINE_EVERY_S

    def write(self, metrics: dict[str, Any]) -> None:
        """Log one step."""
        step = metrics["step"]
        with self._noting_failure():
            self._file.write(to_json(metrics))
        scalars = _scalars(metrics)
        self._to_trackers(lambda tracker: tracker.add(scalars, step))
        loss = "no targets" if metrics["loss"] is None else f"loss {metrics['loss']:.4f}"
        self._show(step, f"{loss}  {metrics['tokens_per_s']:,.0f} tokens/s")

    def write_heldout(self, step: int, loss: float, exact_match: dict[str, float], made: dict[str, float]) -> None:
        """Log an evaluation after a step, and print it. exact_match: by task, the share of answers that match.

        made: generator -> its loss.
        """
        with self._noting_failure():
            # The last step is evaluated again by a run that goes on behind it.
            cut_lines(self._path.with_name(HELDOUT_FILE), step - 1, HELDOUT)
            lines = Lines(self._path.with_name(HELDOUT_FILE))
            lines.write(to_json({"step": step, "loss": loss, "exact_match": exact_match, "losses_made": made}))
            lines.close()
        exact = "".join(f", {task}: {share:.1%} exact" for task, share in exact_match.items())
        self.say(f"step {step}/{self._num_steps}  {loss:.4f} held out{exact}")
        scalars = {f"heldout/exact_match/{task}": share for task, share in exact_match.items()}
        scalars |= {f"heldout/losses/{name}": of_generator for name, of_generator in made.items()}
        self._to_trackers(lambda tracker: tracker.add({"heldout/loss": loss, **scalars}, step))

    def begin_checkpoint(self) -> None:
        """Flush events to the disk before a checkpoint, which counts their steps as done."""
        self.flush()
        with self._noting_failure():
            forget_aside(self._path.parent)

    def flush(self) -> None:
        """Flush events to the disk."""
        self._to_trackers(lambda tracker: tracker.flush())

    def check(self) -> None:
        """Flush, and raise UserError if anything could not be written."""
        self.flush()
        if self.failure:
            raise UserError(f"{self.failure}.")

    def say(self, sentence: str) -> None:
        """Print a line on the terminal, above the live line."""
        self._console.print(sentence, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        """End the live line, and write what is left."""
        if self._live:
            self._live.stop()
        with self._noting_failure():
            self._file.close()
        self._to_trackers(lambda tracker: tracker.close())

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def _noting_failure(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.failure = (
                self.failure or f"{error.filename or self._path} cannot be written: {error.strerror or error}"
            )

    def _to_trackers(self, do: Callable[[Tracker], None]) -> None:
        """A tracker that fails is told of once, and left."""
        for name, tracker in list(self._trackers.items()):
            try:
                do(tracker)
            except Exception as error:  # What a service raises is its own.
                del self._trackers[name]
                self.say(f"{name} is not reported to any more ({error}); metrics.jsonl has every step.")

    def _show(self, step: int, text: str) -> None:
        if self._live:
            self._live.update(self._task, completed=step, text=text)
            return
        now_s = time.monotonic()
        if step == self._num_steps or now_s - self._last_line_s >= _PLAIN_LINE_EVERY_S:
            self._last_line_s = now_s
            self.say(f"step {step}/{self._num_steps}  {text}")


class Terminal:
    """Standard output as a stream that never fails: if it cannot be written, the text is dropped."""

    def __init__(self) -> None:
        self._stream = sys.stdout

    def write(self, text: str) -> int:
        """Write a text; returns its number of characters, also where it is dropped."""
        try:
            self._stream.write(text)
        except (OSError, ValueError):
            silence(self._stream)
        return len(text)

    def flush(self) -> None:
        """Flush the stream, if it can still be written."""
        try:
            self._stream.flush()
        except (OSError, ValueError):
            silence(self._stream)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _live_line(console: Console) -> Progress:
    return Progress(
        TextColumn("step"),
        MofNCompleteColumn(),
        BarColumn(),
        TextColumn("{task.fields[text]}"),
        TimeRemainingColumn(),
        console=console,
        refresh_per_second=4,
    )


def _scalars(metrics: dict[str, Any]) -> dict[str, float]:
    scalars = {
        f"train/{name}": metrics[name]
        for name in (
            "loss",
            "grad_norm",
            "lr",
            "tokens_per_s",
            "mfu",
            "hfu",
            "padding",
            "step_s",
            "data_wait_s",
            "decide_s",
            "core_wait_s",
            "bad_examples",
        )
        if metrics[name] is not None and math.isfinite(metrics[name])
    }
    if metrics["loss_scale"] is not None:
        scalars["train/loss_scale"] = metrics["loss_scale"]
    for phase, values in metrics["phases"].items():
        scalars[f"balance/{phase}/before"] = values["max_over_bound_before"]
        scalars[f"balance/{phase}/after"] = values["max_over_bound"]
        scalars[f"balance/{phase}/dist_ratio"] = values["dist_ratio"]
        scalars[f"balance/{phase}/pad_ratio"] = values["pad_ratio"]
    for action, seconds in metrics["actions"].items():
        scalars[f"actions/{action}"] = seconds["max_s"]
    return scalars
