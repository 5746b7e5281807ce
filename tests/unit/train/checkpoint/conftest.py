"""The checkpoints of a small run, written once and copied for each test."""

import shutil

import pytest

from unit.train.checkpoint.small_run import write_checkpoints


@pytest.fixture(scope="session")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("written")
    write_checkpoints(folder, (4, 8))
    return folder


@pytest.fixture
def run(written, tmp_path):
    """The folder of a run's checkpoints, step-00000004 and step-00000008."""
    return shutil.copytree(written, tmp_path / "checkpoints")


@pytest.fixture
def newest(run):
    return run / "step-00000008"
