"""Training on drawn examples: several ranks, whatever is balanced, against one process, and after a resume."""

from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
import torch

from cli.drawn_job import write_drawn_job
from cli.tiny_job import losses, metrics
from motet.data.decode import Decoder
from motet.data.order import GlobalOrder
from motet.dispatch import LoadedExample
from motet.models.build import build_mllm
from motet.train.input.datasets import open_dataset
from motet.train.recipe.recipe import load_recipe
from motet.train.trainer import train
from parity.tiny import reference_step
from ranks import run_ranks

EXACT = ("run.dtype=float64", "run.steps=4", "run.seed=3")


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    return write_drawn_job(tmp_path_factory.mktemp("job"))


@pytest.fixture(scope="module")
def alone(job, tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    run(job, 1, folder)
    return folder


def train_rank(rank, num_ranks, recipe, overrides):
    with redirect_stdout(StringIO()):
        train(load_recipe(Path(recipe), overrides))


def run(job, num_ranks, run_dir, *overrides):
    run_ranks(train_rank, num_ranks, str(job), [*EXACT, f"run.dir={run_dir}", *overrides])


def test_the_first_step_is_that_of_the_whole_model_in_one_process(job, alone):
    recipe = load_recipe(job, [*EXACT, f"run.dir={alone}"])
    vocabulary = recipe.vocabulary()
    model = build_mllm(recipe.modules, vocabulary.vocabulary_size, torch.float64, recipe.run.seed).train()
    dataset = open_dataset(recipe, (), vocabulary, model, print)
    ids = GlobalOrder(dataset.num_examples, recipe.data.seed).take(0, recipe.run.batch_size)
    with Decoder(dataset.transforms) as decoder:
        examples = [LoadedExample(dataset.tokens(i), tuple(decoder.load(dataset.media_refs(i)))) for i in ids.tolist()]
    assert {phase for example in examples for phase in example.sequence.media} == {"image", "audio"}
    loss = reference_step(model, examples)
    norm = torch.stack([each.grad.square().sum() for each in model.parameters() if each.grad is not None]).sum().sqrt()
    first = metrics(alone)[0]
    assert first["loss"] == pytest.approx(loss, rel=1e-10)
    assert first["grad_norm"] == pytest.approx(norm.item(), rel=1e-10)


@pytest.mark.parametrize(
    ("num_ranks", "overrides"),
    [
        pytest.param(2, (), marks=pytest.mark.slow),
        (2, ("balance.mode=exchange", "fsdp.shard_size=1")),
        pytest.param(
            2, ("balance.method=per_phase", "run.microbatches=2", "fsdp.recompute=true"), marks=pytest.mark.slow
        ),
        pytest.param(3, ("balance.phases=off", "data.num_workers=1"), marks=pytest.mark.slow),
    ],
)
def test_losses_are_those_of_one_process(job, alone, tmp_path, num_ranks, overrides):
    run(job, num_ranks, tmp_path, *overrides)
    assert losses(tmp_path) == pytest.approx(losses(alone), rel=1e-10)
    norms, expected = ([step["grad_norm"] for step in metrics(folder)] for folder in (tmp_path, alone))
    assert norms == pytest.approx(expected, rel=1e-10)


@pytest.mark.slow
def test_a_run_resumes_on_another_number_of_ranks_from_the_recipe_that_it_wrote(job, alone, tmp_path):
    run(job, 2, tmp_path, "run.steps=2", "optimizer.schedule=constant")
    run_ranks(train_rank, 1, str(tmp_path / "recipe.toml"), ["run.steps=4"])
    whole = tmp_path / "whole"
    run(job, 1, whole, "optimizer.schedule=constant")
    assert losses(tmp_path) == pytest.approx(losses(whole), rel=1e-10)
    assert np.ptp(losses(tmp_path)) > 0
