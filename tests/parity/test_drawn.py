"""Training on drawn examples: several ranks, whatever is balanced, against one process, and after a resume."""

from contextlib import redirect_stdout
from dataclasses import replace
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
from motet.planning.planned_recipe import read_job_recipe
from motet.planning.under_plan import recipe_under_plan
from motet.train.input.datasets import open_dataset
from motet.train.recipe.recipe_file import load_recipe
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


def train_planned_rank(rank, num_ranks, recipe, overrides, plan):
    recipe = Path(recipe)
    read, chosen = recipe_under_plan(load_recipe(recipe, overrides), recipe, Path(plan), overrides)
    with redirect_stdout(StringIO()):
        train(read, chosen=chosen)


def run_planned(job, plan, run_dir):
    file = run_dir.with_suffix(".json")
    write_plan(plan, file)
    given = [*EXACT, f"run.dir={run_dir}"]
    run_ranks(train_planned_rank, plan.cluster.num_ranks, str(job), given, str(file))


def drawn_plan(job, *units, **options):
    """A Plan of the job's model on as many ranks as the units have, in float64."""
    where = cluster("h100", 1, max(unit.ranks.stop for unit in units))
    device = replace(where.device, peak_flops={**where.device.peak_flops, "fp64": 1e12}, overlaps=False)
    read = read_job_recipe(job, [*EXACT, "run.dir=run"])
    return Plan(read.model, replace(where, device=device), units, read.batch_size, precision="fp64", **options)


READS = {"image": 2, "audio": 1}
LLM = READS | {"backbone": 2}
MADE_BEHIND = READS | {"backbone": 1}, {"backbone": 1, "picture": 2}
PLANS = {
    "a unit of its own": ((Unit("llm", (LLM,)), Unit("made", ({"picture": 2},), first_rank=1)), {"microbatch_size": 2}),
    "a chain that cuts it": ((Unit("all", (LLM | {"picture": 1}, {"picture": 1}), pp=2),), {"microbatch_size": 4}),
    "a chain": ((Unit("all", MADE_BEHIND, pp=2),), {"schedule": "zb_h1"}),
    "shared sequences": ((Unit("all", (LLM | {"picture": 2},), cp=2),), {"microbatch_size": 4}),
    "shared products": ((Unit("all", (LLM | {"picture": 2},), tp=2),), {"schedule": "data_parallel"}),
}


QUICK = ("a unit of its own", "a chain that cuts it")


@pytest.mark.parametrize(
    "name", [each if each in QUICK else pytest.param(each, marks=pytest.mark.slow) for each in PLANS]
)
def test_losses_under_a_plan_are_those_of_one_process(job, alone, tmp_path, name):
    units, options = PLANS[name]
    run_planned(job, drawn_plan(job, *units, **options), tmp_path / "run")
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
