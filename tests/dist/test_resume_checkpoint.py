"""Checkpoints: resharded, atomic, pruned, and refused with a sentence where they do not fit."""

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from motet.core.errors import UserError
from motet.train.checkpoint import CheckpointConfig, Checkpointer, Progress, load, whole_checkpoints
from motet.train.optimizer import OptimizerConfig, build_optimizer
from ranks import run_ranks


def build(num_ranks, width=5):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(10, 7), nn.Linear(7, width), nn.LayerNorm(width), nn.Linear(width, 1))
    model[2].requires_grad_(False)
    fully_shard(model, mesh=init_device_mesh("cpu", (num_ranks,)))
    return model, build_optimizer(model, OptimizerConfig(lr=1e-2))


def train(rank, num_ranks, folder, first, last, save_at):
    """Losses of steps first..last, resumed from the latest checkpoint unless first is 0."""
    model, optimizer = build(num_ranks)
    group = dist.new_group(backend="gloo")
    checkpointer = Checkpointer(Path(folder), CheckpointConfig(keep=2), group)
    if first:
        assert load(checkpointer.latest(), model, optimizer, group).step == first
    losses = []
    for step in range(first, last):
        loss = (model(torch.arange(10)) - step).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step + 1 in save_at:
            checkpointer.save(model, optimizer, Progress(step + 1, 0, 0, 0, ""))
    checkpointer.wait()
    return losses


def test_resume_on_other_numbers_of_ranks_gives_the_losses_of_an_uninterrupted_run(tmp_path):
    whole = run_ranks(train, 2, str(tmp_path / "a"), 0, 9, ())[0]
    parts = run_ranks(train, 2, str(tmp_path / "b"), 0, 4, (2, 3))[0][:3]
    parts += run_ranks(train, 3, str(tmp_path / "b"), 3, 7, (6,))[0][:3]
    parts += run_ranks(train, 1, str(tmp_path / "b"), 6, 9, (7, 8, 9))[0]
    assert parts == pytest.approx(whole, rel=1e-5)
    assert [path.name for path in whole_checkpoints(tmp_path / "b")] == ["step-00000008", "step-00000009"]


class DiskFull(dcp.FileSystemWriter):
    def write_data(self, *args, **kwargs):
        if dist.get_rank() == 1:
            raise OSError(28, "No space left on device")
        return super().write_data(*args, **kwargs)


def save_onto_a_full_disk(rank, num_ranks, folder):
    dcp.FileSystemWriter = DiskFull
    model, optimizer = build(num_ranks)
    checkpointer = Checkpointer(Path(folder), CheckpointConfig(), dist.new_group(backend="gloo"))
    checkpointer.save(model, optimizer, Progress(5, 0, 0, 0, ""))
    try:
        checkpointer.wait()
    except UserError as error:
        return str(error)


def test_a_failed_write_leaves_the_last_good_checkpoint_and_every_rank_says_why(tmp_path):
    run_ranks(train, 2, str(tmp_path), 0, 3, (3,))
    sentences = run_ranks(save_onto_a_full_disk, 2, str(tmp_path))
    assert all("No space left on device" in sentence and "step 5" in sentence for sentence in sentences)
    assert [path.name for path in whole_checkpoints(tmp_path)] == ["step-00000003"]
    assert len(run_ranks(train, 2, str(tmp_path), 3, 4, ())[0]) == 1
    assert not list(tmp_path.glob("*.tmp"))


def die_while_saving(rank, num_ranks, folder):
    model, optimizer = build(num_ranks)
    checkpointer = Checkpointer(Path(folder), CheckpointConfig(), dist.new_group(backend="gloo"))
    checkpointer._publish = lambda *_: os._exit(9)
    checkpointer.save(model, optimizer, Progress(5, 0, 0, 0, ""))
    checkpointer.wait()


def test_a_crash_while_saving_leaves_the_last_good_checkpoint(tmp_path):
    run_ranks(train, 2, str(tmp_path), 0, 3, (3,))
    with pytest.raises(AssertionError):
        run_ranks(die_while_saving, 2, str(tmp_path))
    assert (tmp_path / "step-00000005.tmp").exists()
    assert [path.name for path in whole_checkpoints(tmp_path)] == ["step-00000003"]


def load_into_another_model(rank, num_ranks, folder, change):
    model, optimizer = build(num_ranks, width=6 if change == "wider" else 5)
    if change == "more":
        model.append(nn.Linear(1, 1))
    if change == "fewer":
        del model[3]
    if change == "thawed":
        model[2].requires_grad_(True)
    optimizer = build_optimizer(model, OptimizerConfig(lr=1e-2)) if change == "thawed" else optimizer
    with pytest.raises(UserError) as error:
        load(Path(folder) / "step-00000001", model, optimizer, None)
    return str(error.value)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("wider", "weight '1.weight' has the shape (5, 7) in the checkpoint and (6, 7) in the model"),
        ("more", "it has no weight '4.weight'"),
        ("fewer", "the model has no weight '3.bias'"),
        ("thawed", "it has no optimizer state of '2.weight'"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused_with_the_first_name(tmp_path, change, said):
    run_ranks(train, 1, str(tmp_path), 0, 1, (1,))
    assert said in run_ranks(load_into_another_model, 1, str(tmp_path), change)[0]
