"""What is loaded is what was saved, from files that anyone can read and that can run nothing."""

import io
import pickle
import stat

import pytest
import torch
from safetensors.torch import load_file, save
from torch import nn

from motet.core.errors import UserError
from motet.train.checkpoint import saving
from motet.train.checkpoint.contents import Progress
from motet.train.checkpoint.restoring import load
from motet.train.checkpoint.saving import CheckpointConfig, Checkpointer
from motet.train.checkpoint.state import tensors_of, without_steps
from motet.train.optimizer import OptimizerConfig, build_optimizer
from motet.train.optimizers import OPTIMIZERS
from unit.train.checkpoint import damages
from unit.train.checkpoint.small_run import build, write_checkpoints

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def test_weights_buffers_and_moments_come_back_to_the_bit(tmp_path):
    saved = write_checkpoints(tmp_path, (1, 2))
    model, optimizer = build()
    assert load(tmp_path / "step-00000002", model, optimizer, None) == Progress(2, 12, 1, 7, "some data")
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, saved.state_dict()[name]), name
    slots = optimizer.state[model[1].weight]
    assert slots["step"] == 2
    assert slots["exp_avg"].any() and slots["exp_avg_sq"].any()
    assert model[2].num_batches_tracked == 2, "a scalar of whole numbers"


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_the_state_of_each_optimizer_comes_back_to_the_bit(tmp_path, name):
    model, optimizer = stepped(*build(name), 3)
    write(tmp_path, model, optimizer, Progress(3, 0, 0, 7, ""))
    other_model, other = build(name)
    load(tmp_path / "step-00000003", other_model, other, None)
    for ours, theirs in zip(model.parameters(), other_model.parameters(), strict=True):
        state, loaded = optimizer.state[ours], other.state[theirs]
        assert state.keys() == loaded.keys() and all(torch.equal(state[field], loaded[field]) for field in state)
    stepped(model, optimizer, 2), stepped(other_model, other, 2)
    assert all(map(torch.equal, model.state_dict().values(), other_model.state_dict().values()))


@pytest.mark.parametrize(
    ("make", "switch"),
    [(torch.optim.AdamW, "amsgrad"), (torch.optim.Adam, "amsgrad"), (torch.optim.RMSprop, "centered")],
)
def test_moments_of_options_that_recipes_have_not_come_back(tmp_path, make, switch):
    """A loop of one's own may have them."""
    (model, _), (other_model, _) = build(), build()
    optimizer, other = (make(each.parameters(), 0.1, **{switch: True}) for each in (model, other_model))
    write(tmp_path, *stepped(model, optimizer, 3), Progress(3, 0, 0, 7, ""))
    load(tmp_path / "step-00000003", other_model, other, None)
    stepped(model, optimizer, 2), stepped(other_model, other, 2)
    assert all(map(torch.equal, model.state_dict().values(), other_model.state_dict().values()))


@pytest.mark.parametrize(
    ("saved", "asked", "said"),
    [
        ("adamw", "sgd", "it has no optimizer state momentum_buffer of"),
        ("sgd", "rmsprop", "it has no optimizer state square_avg of"),
    ],
)
def test_the_state_of_another_optimizer_is_refused(tmp_path, saved, asked, said):
    write(tmp_path, *stepped(*build(saved), 1), Progress(1, 0, 0, 7, ""))
    with pytest.raises(UserError, match=rf"{said} '.*' \(was it frozen, or is optimizer.name another\?\)"):
        load(tmp_path / "step-00000001", *build(asked), None)


def stepped(model, optimizer, num_steps):
    for _ in range(num_steps):
        optimizer.zero_grad()
        model(torch.arange(10)).square().mean().backward()
        optimizer.step()
    return model, optimizer


def test_steps_of_each_parameter_come_back(tmp_path):
    """A module that no example needed has taken fewer steps than the run."""
    model, optimizer = build()
    tensors_of(model, optimizer)
    optimizer.state[model[1].weight]["step"] += 3
    write(tmp_path, model, optimizer, Progress(5, 0, 0, 7, ""))
    model, optimizer = build()
    load(tmp_path / "step-00000005", model, optimizer, None)
    assert optimizer.state[model[1].weight]["step"] == 3
    assert optimizer.state[model[2].weight]["step"] == 0


def test_a_checkpoint_without_steps_of_parameters_has_those_of_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(saving, "tensors_of", lambda *parts: without_steps(tensors_of(*parts)))
    write(tmp_path, *build(), Progress(5, 0, 0, 7, "", num_skipped=1))
    model, optimizer = build()
    load(tmp_path / "step-00000005", model, optimizer, None)
    assert {float(state["step"]) for state in optimizer.state.values()} == {4}


def write(folder, model, optimizer, progress):
    checkpointer = Checkpointer(folder, CheckpointConfig(), None)
    checkpointer.save(model, optimizer, progress)
    checkpointer.wait()


def test_the_files_are_plain_safetensors_for_whoever_may_read_the_folder(newest):
    tensors = load_file(newest / "rank-00000.safetensors")
    assert tensors["model.1.weight"].shape == tensors["optim.1.weight.exp_avg_sq"].shape == (3, 4)
    modes = {stat.S_IMODE(path.stat().st_mode) for path in newest.iterdir()}
    assert len(modes) == 1 and modes.pop() & 0o400


def test_loading_opens_no_pickle(newest, monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("a pickle was opened")

    for name in ("load", "loads", "Unpickler", "_Unpickler"):
        monkeypatch.setattr(pickle, name, refuse)
    monkeypatch.setattr(torch, "load", refuse)
    with pytest.raises(AssertionError):
        torch.load(io.BytesIO())
    model, optimizer = build()
    assert load(newest, model, optimizer, None).step == 8


@pytest.mark.parametrize("file", ["rank-00000.safetensors", "tensors.json", "state.json"])
def test_a_pickle_with_the_right_checksum_runs_nothing(newest, bomb, file):
    (newest / file).write_bytes(bomb.pickle)
    damages.forge(newest)
    with pytest.raises(UserError, match=f"The checkpoint {newest} cannot be read: "):
        load(newest, *build(), None)
    assert not bomb.has_gone_off()


def test_a_file_with_another_tensor_than_is_said_of_it_is_refused(newest):
    (newest / "rank-00000.safetensors").write_bytes(save({"model.1.weight": torch.zeros(2, 2)}))
    damages.forge(newest)
    with pytest.raises(UserError, match=f"The checkpoint {newest} cannot be read: "):
        load(newest, *build(), None)


@pytest.mark.parametrize("other", [torch.ones(3, 4, dtype=torch.int32), torch.ones(1), torch.ones(3, 1)])
def test_numbers_of_another_kind_are_neither_converted_nor_repeated(newest, other):
    tensors = load_file(newest / "rank-00000.safetensors")
    (newest / "rank-00000.safetensors").write_bytes(save(tensors | {"model.1.weight": other}))
    damages.forge(newest)
    with pytest.raises(UserError, match=f"The checkpoint {newest} cannot be read: "):
        load(newest, *build(), None)


def test_another_dtype_is_refused(newest):
    model, _ = build()
    model.double()
    optimizer = build_optimizer(model, OptimizerConfig(lr=1e-2))
    with pytest.raises(UserError, match=r"weight '0.weight' is float32 in the checkpoint and float64 in the model"):
        load(newest, model, optimizer, None)


class Sharing(nn.Module):
    """Buffers that are views of one memory, and one without elements."""

    def __init__(self, value):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([value]))
        table = torch.full((3, 4), value)
        self.register_buffer("table", table)
        self.register_buffer("column", table[:, 1])
        self.register_buffer("again", table)
        self.register_buffer("nothing", torch.zeros(0, 4))


def test_tensors_that_share_memory_are_saved_each(tmp_path):
    model = Sharing(2.0)
    checkpointer = Checkpointer(tmp_path, CheckpointConfig(), None)
    checkpointer.save(model, build_optimizer(model, OptimizerConfig(lr=1e-2)), Progress(1, 0, 0, 0, ""))
    checkpointer.wait()
    model = Sharing(0.0)
    load(tmp_path / "step-00000001", model, build_optimizer(model, OptimizerConfig(lr=1e-2)), None)
    for tensor in (model.weight, model.table, model.column, model.again):
        assert (tensor == 2).all()


def test_names_are_those_of_the_whole_model():
    names = list(tensors_of(*build()))
    assert names[:2] == ["model.0.weight", "model.1.weight"]
    assert "model.2.running_mean" in names
    assert names[-1] == "optim.2.bias.exp_avg_sq"
