"""Dropout on several ranks is that of one process, however items are placed, sharded and recomputed."""

from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest

from cli.tiny_job import losses, metrics
from motet.train.recipe.recipe_file import load_recipe
from motet.train.trainer import train
from ranks import run_ranks

DROPPING = (
    "data.heldout=[]",
    "run.dtype=float64",
    "run.steps=4",
    "model.encoders.audio.config.dropout=0.2",
    "model.encoders.audio.config.attention_dropout=0.2",
    "model.encoders.audio.config.activation_dropout=0.2",
    "model.backbone.config.attention_dropout=0.2",
)


def train_rank(rank, num_ranks, recipe, overrides):
    with redirect_stdout(StringIO()):
        train(load_recipe(Path(recipe), overrides))


@pytest.fixture(scope="module")
def alone(job, tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    run_ranks(train_rank, 1, str(job), [*DROPPING, f"run.dir={folder}"])
    return folder


@pytest.mark.parametrize(
    ("num_ranks", "overrides"),
    [
        (2, ("balance.method=per_phase", "run.microbatches=2", "fsdp.recompute=true")),
        (2, ("balance.mode=exchange", "fsdp.shard_size=1")),
        pytest.param(3, (), marks=pytest.mark.slow),
    ],
)
def test_losses_are_those_of_one_process(job, alone, tmp_path, num_ranks, overrides):
    run_ranks(train_rank, num_ranks, str(job), [*DROPPING, f"run.dir={tmp_path}", *overrides])
    assert losses(tmp_path) == pytest.approx(losses(alone), rel=1e-10)
    norms, expected = ([step["grad_norm"] for step in metrics(folder)] for folder in (tmp_path, alone))
    assert norms == pytest.approx(expected, rel=1e-10)


def test_it_is_repeated_and_has_an_effect(job, alone, tmp_path):
    run_ranks(train_rank, 1, str(job), [*DROPPING, f"run.dir={tmp_path / 'again'}"])
    assert losses(tmp_path / "again") == losses(alone)
    off = [override for override in DROPPING if "dropout" not in override]
    run_ranks(train_rank, 1, str(job), [*off, "model.encoders.audio.config.dropout=0.0", f"run.dir={tmp_path / 'off'}"])
    assert abs(losses(tmp_path / "off")[0] / losses(alone)[0] - 1) > 1e-6
