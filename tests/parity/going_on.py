"""A run that stops under one Plan and goes on under another, by the checkpoint that training writes and reads."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch.distributed as dist

from motet.runtime.planned_step import PlannedStep
from motet.runtime.step import TrainStep
from motet.train.checkpoint.contents import Progress
from motet.train.checkpoint.restoring import load
from motet.train.checkpoint.saving import CheckpointConfig, Checkpointer


def gone_on(before: PlannedStep | TrainStep, after: PlannedStep | TrainStep) -> None:
    """Give the step `after` the weights and the optimizer's state that `before` has left behind. A collective."""
    group = before.mesh.host_everyone
    with tempfile.TemporaryDirectory(prefix="motet-going-on-") as folder:
        folders = [folder]
        dist.broadcast_object_list(folders)
        checkpointer = Checkpointer(Path(folders[0]), CheckpointConfig(), group)
        checkpointer.save(before.model, before.optimizer, Progress(1, 0, 0, 0, ""))
        checkpointer.wait()
        dist.barrier()
        (checkpoint,) = Path(folders[0]).glob("step-*")
        load(checkpoint, after.model, after.optimizer, group)
        dist.barrier()
