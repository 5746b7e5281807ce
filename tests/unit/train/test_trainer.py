"""What is said of a run that ends by an error."""

import errno
from pathlib import Path
from types import SimpleNamespace

import pytest

from motet.core.errors import origin_of
from motet.train.checkpoint.contents import STATE, name_of
from motet.train.checkpoint.saving import CheckpointConfig, Checkpointer
from motet.train.trainer import _Run


def failing(folder):
    """The error that leaves a run that fails behind its 3rd step, whose checkpoints are in this folder."""
    checkpointer = Checkpointer(folder, CheckpointConfig(), None, [name_of(3)])
    run = SimpleNamespace(job=SimpleNamespace(checkpointer=checkpointer))
    with pytest.raises(RuntimeError, match="first") as raised, _Run._saying_what_is_saved(run):
        raise RuntimeError("first")
    return raised.value


def test_an_error_says_the_newest_checkpoint_that_is_there(tmp_path):
    assert origin_of(failing(tmp_path)).saved == "There is no checkpoint."
    (tmp_path / name_of(3)).mkdir()
    (tmp_path / name_of(3) / STATE).touch()
    assert origin_of(failing(tmp_path)).saved == f"The newest checkpoint is {name_of(3)}."


def test_a_folder_out_of_reach_hides_no_error(tmp_path, monkeypatch):
    def stale(path):
        raise OSError(errno.ESTALE, "Stale file handle", str(path))

    monkeypatch.setattr(Path, "is_file", stale)
    assert origin_of(failing(tmp_path)).saved == ""
