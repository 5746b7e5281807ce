"""Under a Plan, by `motet train` itself: images that two encoders read, with queries and callbacks; drawn examples."""

import json
import sys
from contextlib import redirect_stdout
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest

from cli.drawn_job import write_drawn_job
from cli.tiny_job import losses
from dist.test_two_readers import job as job_of_readers  # noqa: F401
from dist.test_two_readers import recipe_of
from motet.core.plan import Plan, Unit
from motet.core.plan_file import write_plan
from motet.cost.catalogue import cluster
from motet.planning.planned_recipe import read_job_recipe
from motet.planning.under_plan import recipe_under_plan
from motet.train.recipe.recipe_file import load_recipe
from motet.train.trainer import train
from ranks import run_ranks

EXACT = ("run.dtype=float64", "run.steps=4", "run.seed=3")
FOLDERS = "alone", "planned"
READERS = ("model.encoders.audio.config.dropout=0.0", "evaluate.max_new_tokens=3", "data.num_workers=1")


def train_rank(rank, num_ranks, recipe, overrides, plan=None, resume="auto"):
    path, chosen = Path(recipe), None
    sys.path.insert(0, str(path.parent))  # For callbacks.
    with redirect_stdout(StringIO()):
        read = load_recipe(path, overrides)
        if plan is not None:
            read, chosen = recipe_under_plan(read, path, Path(plan))
        train(read, resume=resume, chosen=chosen)


def run(recipe, run_dir, overrides, plan=None, resume="auto"):
    """Losses of all steps."""
    file = run_dir.parent / f"{run_dir.name}.json"
    if plan is not None:
        write_plan(plan, file)
    num_ranks = 1 if plan is None else plan.cluster.num_ranks
    given = [*EXACT, f"run.dir={run_dir}", *overrides]
    run_ranks(train_rank, num_ranks, str(recipe), given, None if plan is None else str(file), resume)
    return losses(run_dir)


def plan_of(recipe, overrides, *units, batch_size, **options):
    model = read_job_recipe(recipe, [*EXACT, "run.dir=run", *overrides], as_trained=True).model
    where = cluster("h100", 1, max(unit.ranks.stop for unit in units))
    device = replace(where.device, peak_flops={**where.device.peak_flops, "fp64": 1e12}, overlaps=False)
    return Plan(model, replace(where, device=device), units, batch_size, 2, precision="fp64", **options)


@pytest.mark.parametrize("mode", ["rows", pytest.param("sum", marks=pytest.mark.slow)])
def test_images_that_two_encoders_read_train_as_in_one_process(job_of_readers, tmp_path, monkeypatch, mode):  # noqa: F811
    """Both on the first rank, which decodes each image once; the second encoder's queries are on the second."""
    monkeypatch.syspath_prepend(job_of_readers.parent)
    recipe = recipe_of(job_of_readers, mode)
    stages = {"siglip": 2, "dino": 1}, {"dino": 1, "audio": 1, "backbone": 2}
    plan = plan_of(recipe, READERS, Unit("all", stages, pp=2, zero=0), batch_size=6)
    alone = run(recipe, tmp_path / "alone", READERS)
    planned = run(recipe, tmp_path / "planned", READERS, plan)
    assert planned == pytest.approx(alone, rel=1e-10)
    heldout = [json.loads((tmp_path / name / "summary.json").read_text())["loss_heldout"] for name in FOLDERS]
    assert heldout[1] == pytest.approx(heldout[0], rel=1e-10)
    answers = [json.loads((tmp_path / name / "answers.json").read_text()) for name in FOLDERS]
    assert answers[1] == answers[0] and any(answer["media"] for answer in answers[0])


DRAWN = ("model.encoders.audio.num_layers=2", "checkpoint.every_steps=2", "optimizer.schedule=constant")


@pytest.mark.slow
def test_drawn_examples_train_under_a_plan_as_in_one_process_and_go_on_without(tmp_path):
    recipe = write_drawn_job(tmp_path / "job")
    stages = {"image": 1}, {"image": 1, "audio": 2, "backbone": 2}
    plan = plan_of(recipe, DRAWN, Unit("all", stages, pp=2, zero=0), batch_size=8)
    expected = run(recipe, tmp_path / "alone", DRAWN)
    assert run(recipe, tmp_path / "planned", DRAWN, plan) == pytest.approx(expected, rel=1e-10)
    half = tmp_path / "half"
    run(recipe, half, (*DRAWN, "run.steps=2"), plan)
    assert run(recipe, half, DRAWN) == pytest.approx(expected, rel=1e-10)
