"""A run of one rank with a few weights, and its checkpoints."""

import torch
from torch import nn

from motet.train.checkpoint.contents import Progress
from motet.train.checkpoint.saving import CheckpointConfig, Checkpointer
from motet.train.optimizer import OptimizerConfig, build_optimizer


def build(name="adamw"):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 3), nn.BatchNorm1d(3))
    return model, build_optimizer(model, OptimizerConfig(name=name, lr=1e-2))


def write_checkpoints(folder, steps, keep=9):
    """As a run writes them that trains a step between two of them; the model that was trained."""
    model, optimizer = build()
    checkpointer = Checkpointer(folder, CheckpointConfig(keep=keep), None)
    for step in steps:
        model(torch.arange(10)).square().mean().backward()
        optimizer.step()
        checkpointer.save(model, optimizer, Progress(step, 6 * step, 1, 7, "some data"))
    checkpointer.wait()
    return model
