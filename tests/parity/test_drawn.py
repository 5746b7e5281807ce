"""Training on drawn examples: several ranks, whatever is balanced, against one process, and after a resume."""

from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
import torch

from cli.drawn_job import MADE, RECIPE, write_drawn_job
from cli.tiny_job import losses, metrics
from motet.core.plan import Plan, Unit
from motet.core.plan_file import write_plan
from motet.cost.catalogue import cluster
from motet.data.decode import Decoder
from motet.data.order import GlobalOrder
from motet.dispatch import LoadedExample
from motet.dropout import example_keys
from motet.models.build import build_mllm
from motet.models.spec import spec_of_config
from motet.train.input.datasets import open_dataset
from motet.train.recipe.recipe import load_recipe
from motet.train.trainer import train
from parity.tiny import reference_step
from ranks import run_ranks

EXACT = ("run.dtype=float64", "run.steps=4", "run.seed=3")


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """Encoders and a generator."""
    return write_drawn_job(tmp_path_factory.mktemp("job"), RECIPE + MADE)


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
    assert {phase for example in examples for phase in example.sequence.media} == {"image", "audio", "picture"}
    loss = reference_step(model, examples, keys=example_keys(recipe.run.seed, 0, ids))
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


def drawn_plan(job, units, **options):
    """A Plan of the job's model whose units have these modules, [rank: blocks] of each."""
    recipe = load_recipe(job, [*EXACT, "run.dir=run"])
    spec = spec_of_config(recipe.modules, recipe.vocabulary().vocabulary_size, job.stem)
    num_ranks = max(unit.ranks.stop for unit in units)
    options = {"microbatch_size": 2, "precision": "fp64"} | options
    return Plan(spec, cluster("cpu", 1, num_ranks), tuple(units), recipe.run.batch_size, **options)


READS = {"image": 2, "audio": 1}
LLM = READS | {"backbone": 2}
PLANS = {
    "a unit of its own": (Unit("llm", (LLM,)), Unit("made", ({"picture": 2},), first_rank=1)),
    "a chain": (Unit("all", (LLM | {"picture": 1}, {"picture": 1}), pp=2),),
    "a chain, cut in the backbone": (Unit("all", (READS | {"backbone": 1}, {"backbone": 1, "picture": 2}), pp=2),),
    "shared sequences": (Unit("all", (LLM | {"picture": 2},), cp=2),),
    "shared products": (Unit("all", (LLM | {"picture": 2},), tp=2, zero=0),),
}


@pytest.mark.parametrize(
    "name",
    [each if "own" in each or each == "a chain" else pytest.param(each, marks=pytest.mark.slow) for each in PLANS],
)
def test_losses_under_a_plan_are_those_of_one_process(job, alone, tmp_path, name):
    plan = tmp_path / "plan.json"
    write_plan(drawn_plan(job, PLANS[name]), plan)
    run(job, 2, tmp_path / "run", f"run.plan={plan}")
    assert losses(tmp_path / "run") == pytest.approx(losses(alone), rel=1e-10)
    norms, expected = ([step["grad_norm"] for step in metrics(folder)] for folder in (tmp_path / "run", alone))
    assert norms == pytest.approx(expected, rel=1e-10)


@pytest.mark.slow
def test_a_run_resumes_on_another_number_of_ranks_from_the_recipe_that_it_wrote(job, alone, tmp_path):
    run(job, 2, tmp_path, "run.steps=2", "optimizer.schedule=constant")
    run_ranks(train_rank, 1, str(tmp_path / "recipe.toml"), ["run.steps=4"])
    whole = tmp_path / "whole"
    run(job, 1, whole, "optimizer.schedule=constant")
    assert losses(tmp_path) == pytest.approx(losses(whole), rel=1e-10)
    assert np.ptp(losses(tmp_path)) > 0
