"""Checkpoints by torch DCP: written in the background, atomic, and resharded to any number of ranks when they are read.

`checkpoints/step-N.tmp` becomes `checkpoints/step-N` by one rename on rank 0, after every rank's write has reached the
disk: a folder without `.tmp` is whole, and a crash while saving leaves the previous one as it was.

A checkpoint holds weights and AdamW moments (DCP shards) and, readable as `state.json`, the step, the global data
position and the seed. No generator state is stored, because none is carried from step to step: a step's generators are
seeded from (run.seed, step, rank). Resumed on as many ranks, dropout repeats exactly; on another number, the data
order, the schedule and the weights go on exactly, and dropout masks are other draws of the same distribution.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from motet.core.errors import JointUserError, UserError
from motet.core.text_files import read_json

_NAME = re.compile(r"^step-(\d+)$")
_MOMENTS = ("exp_avg", "exp_avg_sq")


class CheckpointConfig(BaseModel):
    """`[checkpoint]` of a recipe."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    every_steps: int = Field(0, ge=0, description="steps between checkpoints; 0 writes only the last one")
    keep: int = Field(2, gt=0, description="how many of the latest checkpoints stay")


@dataclasses.dataclass(frozen=True)
class Progress:
    """What a resumed run must know beside weights: the same on all ranks, whatever their number.

    step: steps done. num_skipped: those of them that changed nothing, as they were not finite. position: examples
    consumed, over all ranks. num_bad: examples dropped as unreadable.
    seed, dataset: what the order of examples follows from (dataset: the identity of the index).
    """

    step: int
    position: int
    num_bad: int
    seed: int
    dataset: str
    num_skipped: int = 0


class Checkpointer:
    """Saves and finds the checkpoints of one run; every method is called by all ranks alike.

    group: a host (gloo) process group that nothing else uses, since saving runs in a thread; None without
    torch.distributed.
    """

    def __init__(self, folder: Path, config: CheckpointConfig, group: dist.ProcessGroup | None) -> None:
        self._folder, self._config, self._group = folder, config, group
        self._rank = dist.get_rank(group) if group is not None else 0
        self._pending: Future[Any] | None = None
        self._save_step: int | None = None
        if self._rank == 0:
            folder.mkdir(parents=True, exist_ok=True)
            for unfinished in folder.glob("step-*.tmp"):
                shutil.rmtree(unfinished)
        self._barrier()

    def save(self, model: nn.Module, optimizer: torch.optim.Optimizer, progress: Progress) -> None:
        """Copy the state aside and write it in the background; waits first if the previous save is not done."""
        self.wait()
        if progress.step == self._save_step:
            return
        self._save_step = progress.step
        temporary = self._folder / f"step-{progress.step:08d}.tmp"
        future = dcp.async_save(
            _state(model, optimizer), storage_writer=dcp.FileSystemWriter(temporary), process_group=self._group
        )
        assert isinstance(future, Future)
        # The coordinator's future is done only when it has heard from every rank, so rank 0 alone may publish.
        self._pending = _then(future, lambda: self._publish(temporary, progress)) if self._rank == 0 else future

    def wait(self) -> None:
        """Return when the save in progress is complete and visible to all ranks. Raises UserError if it failed."""
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        failure = ""
        try:
            pending.result()
        except (Exception, CheckpointException) as error:  # DCP's own is a BaseException.
            failure = _first_line(error)
        if any(failures := self._gather(failure)):
            reason = next(f for f in failures if f)
            raise JointUserError(
                f"The checkpoint of step {self._save_step} could not be written to {self._folder}: {reason}."
            )

    def latest(self) -> Path | None:
        """The newest whole checkpoint, as rank 0 sees it."""
        found = whole_checkpoints(self._folder) if self._rank == 0 else []
        return self._gather(found[-1] if found else None)[0]

    def _publish(self, temporary: Path, progress: Progress) -> None:
        with open(temporary / "state.json", "w", encoding="utf-8") as file:
            json.dump(dataclasses.asdict(progress), file)
            file.flush()
            os.fsync(file.fileno())
        final = temporary.with_suffix("")
        if final.exists():
            shutil.rmtree(final)
        temporary.rename(final)
        _sync_folder(self._folder)
        for old in whole_checkpoints(self._folder)[: -self._config.keep]:
            shutil.rmtree(old)

    def _gather(self, value: Any) -> list[Any]:
        if self._group is None:
            return [value]
        values: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(values, value, group=self._group)
        return values

    def _barrier(self) -> None:
        if self._group is not None:
            dist.barrier(self._group)


def whole_checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints of a run, oldest first."""
    found = [path for path in folder.glob("step-*") if _NAME.match(path.name) and (path / "state.json").exists()]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")))


def read_progress(checkpoint: Path) -> Progress:
    """Raises UserError if the folder is no checkpoint."""
    try:
        return Progress(**read_json(checkpoint / "state.json"))
    except (UserError, TypeError) as error:
        raise UserError(f"{checkpoint} is no complete Motet checkpoint: its state.json cannot be read.") from error


def load(
    checkpoint: Path, model: nn.Module, optimizer: torch.optim.Optimizer, group: dist.ProcessGroup | None
) -> Progress:
    """Read weights and moments in place, resharded to the model's own sharding.

    Raises UserError naming the first parameter that the checkpoint lacks, has in another shape, or has too many.
    """
    progress = read_progress(checkpoint)
    state = _state(model, optimizer)
    reader = dcp.FileSystemReader(checkpoint)
    _check_fit(checkpoint, reader, state)
    dcp.load(state, storage_reader=reader, process_group=group)
    step = torch.tensor(float(progress.step - progress.num_skipped))
    for slots in optimizer.state.values():
        slots["step"].copy_(step)
    return progress


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The tensors of a checkpoint by name, those of the optimizer made where AdamW has not yet been stepped."""
    parameters = dict(model.named_parameters())
    aliases = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    weights = {name: parameter.detach() for name, parameter in parameters.items()}
    weights |= {name: buffer for name, buffer in model.state_dict().items() if name not in aliases}
    moments: dict[str, dict[str, Tensor]] = {moment: {} for moment in _MOMENTS}
    for name, parameter in parameters.items():
        if parameter.requires_grad:
            slots = optimizer.state[parameter]
            if not slots:
                slots["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
                slots |= {moment: torch.zeros_like(parameter).detach() for moment in _MOMENTS}
            for moment in _MOMENTS:
                moments[moment][name] = slots[moment]
    return {"weights": weights, **moments}


def _check_fit(checkpoint: Path, reader: dcp.FileSystemReader, state: dict[str, Any]) -> None:
    stored = reader.read_metadata().state_dict_metadata
    wanted = {f"{part}.{name}": tensor for part, tensors in state.items() for name, tensor in tensors.items()}
    # Weights come before moments in both: it is the weight that tells what is wrong.
    if missing := [key for key in wanted if key not in stored]:
        raise UserError(f"The checkpoint {checkpoint} does not fit the model: it has no {_called(missing[0])}.")
    if surplus := sorted(stored.keys() - wanted.keys(), key=lambda key: (not key.startswith("weights."), key)):
        raise UserError(f"The checkpoint {checkpoint} does not fit the model: the model has no {_called(surplus[0])}.")
    for key, tensor in wanted.items():
        metadata = stored[key]
        if isinstance(metadata, TensorStorageMetadata) and tuple(metadata.size) != tuple(tensor.shape):
            raise UserError(
                f"The checkpoint {checkpoint} does not fit the model: {_called(key)} has the shape "
                f"{tuple(metadata.size)} in the checkpoint and {tuple(tensor.shape)} in the model."
            )


def _called(key: str) -> str:
    part, _, name = key.partition(".")
    return f"weight '{name}'" if part == "weights" else f"optimizer state of '{name}' (was it frozen?)"


def _then(future: Future[Any], action: Any) -> Future[Any]:
    """A future that is done when `action`, run in the thread that completes `future`, is done too."""
    done: Future[Any] = Future()

    def run(completed: Future[Any]) -> None:
        try:
            completed.result()
            action()
            done.set_result(None)
        except BaseException as error:
            done.set_exception(error)

    future.add_done_callback(run)
    return done


def _first_line(error: BaseException) -> str:
    if isinstance(error, CheckpointException):
        error = next(iter(error.failures.values()))[0]
    return f"{type(error).__name__}: {error}".splitlines()[0].rstrip(".")


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
