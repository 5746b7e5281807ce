"""Dropout on several ranks is that of one process, however items are placed, sharded and recomputed."""

from contextlib import redirect_stdout
from dataclasses import replace
from functools import partial
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from cli.tiny_job import losses, metrics, write_tiny_job
from dist.test_planned import DEEPER, train_under
from dist.test_planned_evaluation import WHOLE, beside
from motet.core.plan import Unit
from motet.core.plan_file import write_plan
from motet.train.job import TrainingJob
from motet.train.recipe.recipe_file import load_recipe
from motet.train.trainer import _Run, train
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


NOISY = """
import torch

def noisy(values, sizes):
    return values + torch.randn_like(values), sizes
"""


def test_ranks_that_share_products_draw_alike_what_is_not_keyed_by_item():
    def drawn(rank, tensor_index, step=3):
        mesh = SimpleNamespace(tensor=SimpleNamespace(index=tensor_index))
        job = SimpleNamespace(noise_rank=partial(TrainingJob.noise_rank, SimpleNamespace(step=None, mesh=mesh)))
        run = SimpleNamespace(seed=0)
        _Run._seed(SimpleNamespace(recipe=SimpleNamespace(run=run), world=SimpleNamespace(rank=rank), job=job), step)
        return float(torch.rand(()))

    assert drawn(0, 0) == drawn(1, 1) != drawn(2, 0) == drawn(3, 1)
    assert drawn(0, 0, step=4) != drawn(0, 0)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"schedule": "data_parallel"}, {}], ids=["data parallelism", "stages"])
def test_noise_of_a_callback_is_one_on_ranks_that_share_products(tmp_path, options):
    """They had noise of their own, and products of one row were made of several rows, with recomputation of others."""
    job, found = write_tiny_job(tmp_path / "data", 12, 0), {}
    job.with_name("own.py").write_text(NOISY)
    overrides = [*DEEPER, "run.steps=2", "run.report_to=[]", "model.encoders.image.before=own.py:noisy"]
    overrides += ["model.encoders.audio.config.dropout=0.0", "model.backbone.config.attention_dropout=0.0"]
    recompute = ({"image": 2, "backbone": 3},)
    plan = beside(job, Unit("all", (WHOLE,), tp=2, zero=0, recompute=recompute), **options)
    write_plan(replace(plan, microbatch_size=6), tmp_path / "plan.json")
    for num_ranks, file in ((1, None), (2, str(tmp_path / "plan.json"))):
        run_dir = tmp_path / str(num_ranks)
        run_ranks(train_under, num_ranks, str(job), [*overrides, f"run.dir={run_dir}"], file)
        found[num_ranks] = losses(run_dir)
    assert found[2] == pytest.approx(found[1], rel=1e-10)
