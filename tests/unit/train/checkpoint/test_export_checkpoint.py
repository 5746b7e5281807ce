"""What `motet export` refuses, before anything is written."""

import shutil

import pytest

from motet.core.errors import UserError
from motet.train.export_checkpoint import export_checkpoint
from unit.train.checkpoint import damages


def complaint(checkpoint, out, recipe=None):
    with pytest.raises(UserError) as caught:
        export_checkpoint(checkpoint, out, recipe, ())
    return str(caught.value)


def test_what_is_no_checkpoint(run, tmp_path):
    out = tmp_path / "out"
    assert complaint(tmp_path / "absent", out).startswith(f"{tmp_path}/absent is no checkpoint; name one")
    newest = run / "step-00000008"
    assert complaint(run, out) == f"{run} holds 2 checkpoints; name one of them, such as {newest}."
    assert complaint(run.parent, out) == f"{run.parent} holds 2 checkpoints; name one of them, such as {newest}."
    assert not out.exists()


def test_a_folder_that_is_not_empty(newest, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("mine")
    assert "is not empty" in complaint(newest, tmp_path / "out")
    assert "is no folder" in complaint(newest, tmp_path / "out" / "mine")
    assert "cannot be written" in complaint(newest, tmp_path / "out" / "mine" / "below")
    assert (tmp_path / "out" / "mine").read_text() == "mine"


def test_a_checkpoint_beside_which_no_recipe_lies(newest, tmp_path):
    alone = shutil.copytree(newest, tmp_path / "moved" / "step-00000008")
    told = complaint(alone, tmp_path / "out")
    assert "does not lie in the folder of its run" in told and told.endswith("name the run's recipe with --recipe.")


def test_a_checkpoint_that_is_damaged_or_of_another_model(newest, tmp_path, tiny_recipe):
    out = tmp_path / "out"
    assert "does not fit the model: it has no weight" in complaint(newest, out, tiny_recipe)
    damages.flip(newest / "rank-00000.safetensors", 0.5)
    assert "is no complete Motet checkpoint: rank-00000.safetensors is not as it was" in complaint(
        newest, out, tiny_recipe
    )
    assert not out.exists()


def test_a_checkpoint_by_url(newest, tmp_path, tiny_recipe):
    out, url = tmp_path / "out", f"file://{newest}"
    assert complaint(url, out).endswith(
        "no recipe lies beside a checkpoint by URL; name the run's recipe with --recipe."
    )
    assert "names no checkpoint" in complaint(f"file://{newest.parent}", out, tiny_recipe)
    # It was copied: its weights are those of another model.
    assert "does not fit the model: it has no weight" in complaint(url, out, tiny_recipe)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith((".motet", "out"))]


def test_on_several_ranks(newest, tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "leave out torchrun" in complaint(newest, tmp_path / "out")


@pytest.fixture
def tiny_recipe(tmp_path):
    from cli.tiny_job import write_tiny_job

    return write_tiny_job(tmp_path / "data", num_train=1, num_heldout=1)
