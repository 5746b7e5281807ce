"""Where a run's metrics go: `metrics.jsonl` (a line a step), TensorBoard events, and the terminal. Rank 0 only.

A resumed run cuts both back to the step that it resumes from, so that every step is there once.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

_PLAIN_LINE_EVERY_S = 5.0


class MetricsLog:
    """Opened at the step from which a run goes on; a context manager, since events and the live line must be closed."""

    def __init__(self, run_dir: Path, first_step: int, num_steps: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._num_steps = num_steps
        self._path = run_dir / "metrics.jsonl"
        cut_metrics(self._path, first_step)
        self._file = open(self._path, "a", encoding="utf-8")  # noqa: SIM115
        if first_step == 0:
            shutil.rmtree(run_dir / "tensorboard", ignore_errors=True)
        self._events = SummaryWriter(str(run_dir / "tensorboard"), purge_step=first_step + 1)
        self._console = Console()
        self._live = _live_line(self._console) if self._console.is_terminal else None
        if self._live:
            self._task = self._live.add_task("training", total=num_steps, completed=first_step, text="")
            self._live.start()
        self._last_line_s = -_PLAIN_LINE_EVERY_S

    def write(self, metrics: dict[str, Any]) -> None:
        """Log one step."""
        self._file.write(json.dumps(metrics) + "\n")
        self._file.flush()
        step = metrics["step"]
        for name, value in _scalars(metrics).items():
            self._events.add_scalar(name, value, step)
        self._show(step, f"loss {metrics['loss']:.4f}  {metrics['tokens_per_s']:,.0f} tokens/s")

    def write_heldout(self, step: int, loss: float, exact_match: dict[str, float]) -> None:
        self._events.add_scalar("heldout/loss", loss, step)
        for task, share in exact_match.items():
            self._events.add_scalar(f"heldout/exact_match/{task}", share, step)

    def say(self, sentence: str) -> None:
        """A line on the terminal, above the live one."""
        (self._live.console if self._live else self._console).print(
            sentence, markup=False, highlight=False, soft_wrap=True
        )

    def close(self) -> None:
        if self._live:
            self._live.stop()
        self._file.close()
        self._events.close()

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _show(self, step: int, text: str) -> None:
        if self._live:
            self._live.update(self._task, completed=step, text=text)
            return
        now_s = time.monotonic()
        if step == self._num_steps or now_s - self._last_line_s >= _PLAIN_LINE_EVERY_S:
            self._last_line_s = now_s
            self.say(f"step {step}/{self._num_steps}  {text}")


def cut_metrics(path: Path, first_step: int) -> None:
    """Drop the lines of steps after `first_step`, and a line that a crash left unfinished."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            if json.loads(line)["step"] <= first_step:
                kept.append(line)
        except (ValueError, KeyError):
            continue
    temporary = path.with_suffix(".tmp")
    temporary.write_text("".join(line + "\n" for line in kept), encoding="utf-8")
    os.replace(temporary, path)


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
            "step_s",
            "data_wait_s",
            "decide_s",
            "bad_examples",
        )
    }
    for phase, values in metrics["phases"].items():
        scalars[f"balance/{phase}/before"] = values["max_over_bound_before"]
        scalars[f"balance/{phase}/after"] = values["max_over_bound"]
    for action, seconds in metrics["actions"].items():
        scalars[f"actions/{action}"] = seconds["max_s"]
    return scalars
