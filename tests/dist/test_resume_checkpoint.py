"""Checkpoints: resharded, atomic, pruned, and refused with a sentence where they do not fit."""

import os
import resource
import signal
import threading
import time
from itertools import count
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from motet.core.errors import UserError
from motet.train.checkpoint import restoring, saving, storage
from motet.train.checkpoint.contents import Damaged, Progress, step_named, verify
from motet.train.checkpoint.folder import checkpoints, publish_checkpoint
from motet.train.checkpoint.restoring import load
from motet.train.checkpoint.saving import CheckpointConfig, Checkpointer
from motet.train.optimizer import OptimizerConfig, build_optimizer
from motet.train.world import join_world
from ranks import run_ranks


def build(num_ranks, width=5, is_sharded=True):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(10, 7), nn.Linear(7, width), nn.LayerNorm(width), nn.Linear(width, 1))
    model[2].requires_grad_(False)
    if is_sharded:
        fully_shard(model, mesh=init_device_mesh("cpu", (num_ranks,)))
    return model, build_optimizer(model, OptimizerConfig(lr=1e-2))


def train(rank, num_ranks, folder, first, last, save_at, is_sharded=True):
    """Losses of steps first..last, resumed from the latest checkpoint unless first is 0."""
    model, optimizer = build(num_ranks, is_sharded=is_sharded)
    group = dist.new_group(backend="gloo")
    line = [path.name for path in checkpoints(Path(folder))]
    checkpointer = Checkpointer(Path(folder), CheckpointConfig(keep=2), group, line)
    if first:
        assert load(Path(folder) / line[-1], model, optimizer, group).step == first
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
    assert [path.name for path in checkpoints(tmp_path / "b")] == ["step-00000008", "step-00000009"]


def test_whole_copies_and_shards_resume_from_each_other(tmp_path):
    whole = run_ranks(train, 2, str(tmp_path / "a"), 0, 9, ())[0]
    parts = run_ranks(train, 2, str(tmp_path / "b"), 0, 3, (3,), False)[0]
    parts += run_ranks(train, 3, str(tmp_path / "b"), 3, 6, (6,), True)[0]
    parts += run_ranks(train, 3, str(tmp_path / "b"), 6, 9, (), False)[2]
    assert parts == pytest.approx(whole, rel=1e-5)


def save_onto_a_full_disk(rank, num_ranks, folder, full_on, last):
    """The disk of one rank is full when steps 5 to `last` are saved; what is said, and the sentence that ends it."""
    model, optimizer = build(num_ranks)
    line, group, said = ["step-00000003"], dist.new_group(backend="gloo"), []
    checkpointer = Checkpointer(Path(folder), CheckpointConfig(), group, line, say=said.append)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        for step in (5, 6, 7):
            if rank == full_on:
                resource.setrlimit(resource.RLIMIT_FSIZE, (256, limit[1]) if step <= last else limit)
            checkpointer.save(model, optimizer, Progress(step, 0, 0, 0, ""))
            if checkpointer._pending is not None:
                checkpointer._pending.exception()  # The limit is of this save.
        checkpointer.wait()
    except UserError as error:
        return said, str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    return said, None


@pytest.mark.parametrize("full_on", [0, 1])
def test_a_full_disk_on_any_rank_leaves_the_last_good_checkpoint_and_all_say_why(tmp_path, full_on):
    run_ranks(train, 2, str(tmp_path), 0, 3, (3,))
    said = run_ranks(save_onto_a_full_disk, 2, str(tmp_path), full_on, 7)
    assert said[0] == said[1]
    assert said[0][1].startswith(f"The checkpoint of step 6 could not be written to {tmp_path}: ")
    assert "File too large" in said[0][1]
    names = [path.name for path in tmp_path.iterdir()]
    assert names == ["step-00000003"], "what was written of others is gone, as it may be what fills the disk"
    assert len(run_ranks(train, 2, str(tmp_path), 3, 4, ())[0]) == 1


def test_a_disk_that_was_full_for_a_while_stops_nothing(tmp_path):
    said = run_ranks(save_onto_a_full_disk, 2, str(tmp_path), 1, 5)
    assert said[0] == said[1]
    assert said[0][1] is None
    (sentence,) = said[0][0]
    assert "The checkpoint of step 5 could not be written" in sentence
    assert sentence.endswith("That of step 6 could, and training goes on.")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000006", "step-00000007"]


def die_while_saving(rank, num_ranks, folder):
    model, optimizer = build(num_ranks)
    checkpointer = Checkpointer(Path(folder), CheckpointConfig(), dist.new_group(backend="gloo"), ["step-00000003"])
    with mock.patch.object(saving, "publish_checkpoint", side_effect=lambda *_: os._exit(9)):
        checkpointer.save(model, optimizer, Progress(5, 0, 0, 0, ""))
        checkpointer.wait()


def test_a_crash_while_saving_leaves_the_last_good_checkpoint(tmp_path):
    run_ranks(train, 2, str(tmp_path), 0, 3, (3,))
    with pytest.raises(AssertionError):
        run_ranks(die_while_saving, 2, str(tmp_path))
    assert (tmp_path / "step-00000005.tmp").exists()
    assert [path.name for path in checkpoints(tmp_path)] == ["step-00000003"]
    run_ranks(train, 2, str(tmp_path), 3, 4, (4,))
    assert not list(tmp_path.glob("*.tmp"))


def newest_while_saving(rank, num_ranks, folder):
    """The newest checkpoint of a run that went back behind step 2 and saves step 3, while it does and behind that."""
    model, optimizer = build(num_ranks)
    group, is_read = dist.new_group(backend="gloo"), threading.Event()
    checkpointer = Checkpointer(Path(folder), CheckpointConfig(), group, ["step-00000002"])

    def publish(*arguments):
        is_read.wait(60)
        return publish_checkpoint(*arguments)

    with mock.patch.object(saving, "publish_checkpoint", side_effect=publish):
        checkpointer.save(model, optimizer, Progress(3, 0, 0, 0, ""))
        newest = [checkpointer.newest]
        is_read.set()
        checkpointer.wait()
    return [*newest, checkpointer.newest]


def test_the_newest_checkpoint_is_none_that_the_run_had_before_it_went_back(tmp_path):
    run_ranks(train, 2, str(tmp_path), 0, 3, (2, 3))
    assert run_ranks(newest_while_saving, 2, str(tmp_path)) == [["step-00000002", "step-00000003"]] * 2


def save_until_killed(rank, num_ranks, folder, after_s):
    def kill():
        while not checkpoints(folder):
            time.sleep(0.001)
        time.sleep(after_s)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=kill, daemon=True).start()
    model, optimizer = build(num_ranks, width=20_000)
    checkpointer = Checkpointer(folder, CheckpointConfig(keep=1), dist.new_group(backend="gloo"))
    for step in count(1):
        checkpointer.save(model, optimizer, Progress(step, 0, 0, 0, ""))


@pytest.mark.parametrize("after_s", [0, 0.02, 0.05])
def test_killed_at_any_moment_a_run_leaves_a_whole_checkpoint(tmp_path, after_s):
    """With none but the last kept, there is always one to lose. benchmarks/checkpoints.py does this often."""
    with pytest.raises(AssertionError):
        run_ranks(save_until_killed, 2, tmp_path, after_s)
    left = checkpoints(tmp_path)
    assert [verify(path).step for path in left] == [step_named(path) for path in left] != []


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


def load_where_one_rank_cannot(rank, num_ranks, folder, what):
    model, optimizer = build(num_ranks)
    if rank == 1:

        def fail(*_):
            raise {"tensors": Damaged("tensors.json is missing"), "shards": OSError(5, "Input/output error")}[what]

        target, name = (restoring, "read_tensors") if what == "tensors" else (storage, "_read")
        setattr(target, name, fail)
    with join_world("cpu") as world, pytest.raises(UserError) as error:
        load(Path(folder) / "step-00000001", model, optimizer, world.control, world.together)
    return str(error.value)


@pytest.mark.parametrize(("what", "said"), [("tensors", "tensors.json is missing"), ("shards", "Input/output error")])
def test_what_one_rank_cannot_read_stops_all(tmp_path, what, said):
    run_ranks(train, 2, str(tmp_path), 0, 1, (1,))
    sentences = run_ranks(load_where_one_rank_cannot, 2, str(tmp_path), what)
    assert sentences[0] == sentences[1]
    assert said in sentences[0]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("wider", "weight '1.weight' has the shape (5, 7) in the checkpoint and (6, 7) in the model"),
        ("more", "it has no weight '4.weight'"),
        ("fewer", "the model has no weight '3.bias'"),
        ("thawed", "it has no optimizer state step of '2.weight' (was it frozen, or is optimizer.name another?)"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused_with_the_first_name(tmp_path, change, said):
    run_ranks(train, 1, str(tmp_path), 0, 1, (1,))
    assert said in run_ranks(load_into_another_model, 1, str(tmp_path), change)[0]
