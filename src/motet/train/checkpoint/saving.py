"""Saves the checkpoints of a run in the background, with torch DCP.

Rank 0 renames `checkpoints/step-N.tmp` to `checkpoints/step-N` after the files of all ranks and the manifest are on the
disk. So a crash while saving leaves the previous checkpoint as it was.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from pydantic import BaseModel, ConfigDict, Field
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

from motet.core.errors import JointUserError, UserError
from motet.core.limits import MAX_STEPS
from motet.train.checkpoint.contents import (
    Damaged,
    File,
    Progress,
    RunState,
    StoredTensor,
    complete_checkpoint,
    digest_of,
    is_checkpoint,
    name_of,
    step_named,
)
from motet.train.checkpoint.folder import clear_unfinished, publish_checkpoint
from motet.train.checkpoint.remote import RemoteCheckpoints
from motet.train.checkpoint.state import tensors_of
from motet.train.checkpoint.storage import Writer, first_line

_TELL_EVERY_S = 5.0
"""How often a rank that copies a checkpoint says so to those that wait; far below any limit of waiting."""


class CheckpointConfig(BaseModel):
    """`[checkpoint]` of a recipe."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    every_steps: int = Field(0, ge=0, le=MAX_STEPS, description="steps between checkpoints; 0 writes only the last one")
    keep: int = Field(2, gt=0, le=MAX_STEPS, description="how many of the latest checkpoints stay")
    url: Annotated[
        str | None,
        Field(
            pattern=r"^(s3|gs|az|abfs|hf|file|memory)://[^/].*[^/]$|^file:///.*[^/]$",
            description="a folder of the run by URL (s3://, gs://, az://, hf://, file://), to which each checkpoint is "
            "copied; a run whose own folder has none as new goes on from there",
        ),
    ] = None


class Checkpointer:
    """Saves the checkpoints of one run. All ranks call every method alike.

    With `config.url` the first rank copies each checkpoint there in a thread of its own, while training goes on. The
    next save waits for it, and so does the end; ranks tell each other every few seconds that they wait.

    folder: in one that is there.
    group:  a host (gloo) group that nothing else uses, since saving runs in a thread; None without torch.distributed.
    line:   names of the checkpoints in the folder that led to this run, the earliest first.
    launch: as in `World`.
    say:    called with a sentence if a save failed and the next one succeeded.
    """

    def __init__(
        self,
        folder: Path,
        config: CheckpointConfig,
        group: dist.ProcessGroup | None,
        line: Sequence[str] = (),
        launch: str = "",
        say: Callable[[str], None] = print,
    ) -> None:
        self._folder, self._config, self._group, self._line = folder, config, group, list(line)
        self._launch, self._say = launch, say
        self._pending: Future[Any] | None = None
        self._remote = None if config.url is None else RemoteCheckpoints(config.url)
        self._copier = ThreadPoolExecutor(1, "copies-checkpoints")
        self._copying: Future[None] | None = None
        self._save_step: int | None = None
        self._replaced: str | None = None
        self._saved = list(line[-1:])
        # An earlier attempt may have been killed, or the store out of reach, when the last one was to be copied.
        self._is_to_copy = self._remote is not None and bool(self._line)
        if self._is_to_copy and self._is_first:
            self._copying = self._copier.submit(
                self._remote.add, folder / self._line[-1], list(self._line), config.keep
            )

    def save(self, model: nn.Module, optimizer: torch.optim.Optimizer, progress: Progress) -> None:
        """Copy the state and write it in the background, after the previous save is complete.

        If the previous save failed, wait for this one too: training must not go on without a checkpoint. Raises
        UserError if both fail.
        """
        try:
            self.wait()
        except JointUserError as failure:
            self._begin(model, optimizer, progress)
            self.wait()
            self._say(f"{failure} That of step {progress.step} could, and training goes on.")
            return
        if progress.step != self._save_step:
            self._begin(model, optimizer, progress)

    def wait(self) -> None:
        """Wait until the save in progress is complete and visible to all ranks. Raises UserError if it failed."""
        if self._pending is not None:
            self._end_save()
        if not self._is_to_copy:
            return
        self._is_to_copy = False
        if self._remote is not None and (problem := self._copied()):
            name = self._line[-1] if self._save_step is None else name_of(self._save_step)
            raise JointUserError(
                f"The checkpoint of step {step_named(Path(name))} is in {self._folder}, and could not be copied to "
                f"{self._remote.url}: {problem}."
            )

    def _end_save(self) -> None:
        """Wait until the files of all ranks are there. Raises JointUserError if they could not be written."""
        assert self._pending is not None
        pending, self._pending = self._pending, None
        try:
            pending.result()
        except CheckpointException as error:  # Raised by all ranks if any fails; no subclass of Exception.
            if self._is_first:
                shutil.rmtree(self._temporary, ignore_errors=True)  # The unfinished files may fill the disk.
            step, self._save_step = self._save_step, None  # Not saved: who asks for it again gets another attempt.
            raise JointUserError(
                f"The checkpoint of step {step} could not be written to {self._folder}: {first_line(error)}."
            ) from error
        self._saved = [self._temporary.stem]
        self._is_to_copy = self._remote is not None

    @property
    def newest(self) -> str:
        """Name of the newest whole checkpoint of this run, as far as this rank knows; "" if there is none.

        One of the same step that the run had before it went back, and that a save has not replaced yet, is none.
        """
        begun = [] if self._save_step is None else [name_of(self._save_step)]
        if begun and self._pending is not None and self._digest(begun[0]) == self._replaced:
            begun = []
        return next((name for name in [*begun, *self._saved] if is_checkpoint(self._folder / name)), "")

    def _digest(self, name: str) -> str | None:
        """The digest of a checkpoint in the folder; None if none can be read there."""
        try:
            return digest_of(self._folder / name)
        except (Damaged, UserError):
            return None

    @property
    def line(self) -> list[str]:
        """Names of the checkpoints that led to this run, and that are kept; on the first rank with its own ones."""
        return list(self._line)

    @property
    def _is_first(self) -> bool:
        return self._group is None or dist.get_rank(self._group) == 0

    def _copied(self) -> str:
        """Wait until the first rank has copied the last checkpoint; why it could not, or "". A collective."""
        while True:
            said = [self._copy_state()]
            if self._group is not None:
                dist.broadcast_object_list(said, group=self._group, group_src=0)
            if said[0] is not None:
                return said[0]

    def _copy_state(self) -> str | None:
        """Of the first rank: why the last checkpoint was not copied; "": it was; None: it still is, after seconds."""
        if self._copying is None:  # Another rank, which is told.
            return ""
        if not wait([self._copying], timeout=_TELL_EVERY_S).done:
            return None
        copying, self._copying = self._copying, None
        error = copying.exception()
        return "" if error is None else first_line(error)

    def _begin(self, model: nn.Module, optimizer: torch.optim.Optimizer, progress: Progress) -> None:
        """Start a save in the background."""
        self._save_step, self._replaced = progress.step, self._digest(name_of(progress.step))
        num_ranks = dist.get_world_size(self._group) if self._group is not None else 1
        state = RunState(**vars(progress), num_ranks=num_ranks, launch=self._launch, written=datetime.now(UTC))
        temporary = self._temporary

        def start() -> None:
            # Its own folder alone is made anew: the run may have lost its, and another have begun there.
            self._folder.mkdir(exist_ok=True)
            clear_unfinished(self._folder)
            temporary.mkdir()

        def finish(files: dict[str, File], tensors: dict[str, StoredTensor]) -> None:
            complete_checkpoint(temporary, files, tensors, state)
            self._line = publish_checkpoint(temporary, self._line, self._config.keep)
            if self._remote is not None:
                self._copying = self._copier.submit(
                    self._remote.save, temporary.with_suffix(""), list(self._line), self._config.keep
                )

        future = dcp.async_save(
            tensors_of(model, optimizer), storage_writer=Writer(temporary, start, finish), process_group=self._group
        )
        assert isinstance(future, Future)
        self._pending = future

    @property
    def _temporary(self) -> Path:
        return self._folder / f"{name_of(self._save_step or 0)}.tmp"
