"""Where a run's scalars go beside metrics.jsonl: `run.report_to` names TensorBoard, Weights & Biases, Trackio.

The last two are packages of their own, and are set up by their own variables, as in `WANDB_MODE=offline` or
`TRACKIO_DIR`. What cannot be reported there does not end a run, as metrics.jsonl has every step.
"""

from __future__ import annotations

import importlib
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from motet.core.errors import UserError

_STEP = "train/step"
"""The axis of all other scalars. Steps of the service itself only grow, and a resumed run goes back to a checkpoint."""
_PROJECT = "motet"


class Tracker(Protocol):
    """What scalars of steps are reported to."""

    def add(self, scalars: Mapping[str, float], step: int) -> None:
        """Report scalars of a step."""

    def flush(self) -> None:
        """Write out what is reported, where that is possible."""

    def close(self) -> None:
        """Write out what is left."""


class TensorBoardEvents:
    """Events in `tensorboard/` of the run's folder. A resumed run hides those of the steps from which it goes on."""

    def __init__(self, run_dir: Path, first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        if first_step == 0:
            shutil.rmtree(run_dir / "tensorboard", ignore_errors=True)
        self._events = SummaryWriter(str(run_dir / "tensorboard"), purge_step=first_step + 1)

    def add(self, scalars: Mapping[str, float], step: int) -> None:
        """As `Tracker.add`."""
        for name, value in scalars.items():
            self._events.add_scalar(name, value, step)

    def flush(self) -> None:
        """As `Tracker.flush`."""
        self._events.flush()

    def close(self) -> None:
        """As `Tracker.close`."""
        self._events.close()


class ServiceRun:
    """A run of Weights & Biases or Trackio, which have one interface. A resumed run is a new one of the same name.

    service: "wandb" or "trackio". config: the recipe, as plain data.
    Raises UserError if the package is not installed, or cannot begin.
    """

    def __init__(self, service: str, run_dir: Path, config: Mapping[str, Any]) -> None:
        package = _imported(service)
        project = os.environ.get(f"{service.upper()}_PROJECT", _PROJECT)
        own = {"dir": str(run_dir)} if service == "wandb" else {}
        try:
            self._run = package.init(project=project, name=run_dir.name, config=dict(config), **own)
            if service == "wandb":
                self._run.define_metric("*", step_metric=_STEP)
        except Exception as error:  # What a service raises is its own.
            raise UserError(f'run.report_to has "{service}", which cannot begin: {_line(error)}.') from error

    def add(self, scalars: Mapping[str, float], step: int) -> None:
        """As `Tracker.add`."""
        self._run.log({_STEP: step, **scalars})

    def flush(self) -> None:
        """Nothing: the service sends what is reported by itself."""

    def close(self) -> None:
        """As `Tracker.close`."""
        self._run.finish()


def open_trackers(
    names: tuple[str, ...], run_dir: Path, first_step: int, config: Mapping[str, Any]
) -> dict[str, Tracker]:
    """What `run.report_to` names. Raises UserError as `ServiceRun` does, and OSError if a file cannot be written."""
    return {
        name: TensorBoardEvents(run_dir, first_step) if name == "tensorboard" else ServiceRun(name, run_dir, config)
        for name in names
    }


def _imported(service: str) -> ModuleType:
    try:
        return importlib.import_module(service)
    except ImportError as error:
        raise UserError(
            f'run.report_to has "{service}", which is not installed ({_line(error)}); run pip install {service}.'
        ) from error


def _line(error: Exception) -> str:
    return str(error).partition("\n")[0].rstrip(".") or type(error).__name__
