"""`motet train` of a recipe with [parallel.NAME] and no plan, on two ranks: one plans, all train what it finds."""

from functools import partial
from pathlib import Path

import pytest

from cli.tiny_job import losses, metrics, write_tiny_job
from dist.test_planned import DEEPER, check_reloads, train_under
from motet.core.plan_file import plan_digest
from motet.planning.plan_first import plan_first
from motet.planning.sources import plan_at
from motet.train.recipe.recipe_file import load_recipe
from motet.train.trainer import train
from ranks import run_ranks

STATED = (*DEEPER, "run.steps=3", "parallel.backbone.dp=1", "parallel.image.tp=1")


def train_as_stated(rank, num_ranks, recipe, overrides):
    path = Path(recipe)
    read = load_recipe(path, overrides)
    train(read, plan=partial(plan_first, read, path, overrides))


def test_the_first_rank_plans_and_all_train_what_it_found(tmp_path):
    job, planned, alone = write_tiny_job(tmp_path / "data"), tmp_path / "planned", tmp_path / "alone"
    run_ranks(train_as_stated, 2, str(job), [*STATED, f"run.dir={planned}"])
    run_ranks(train_under, 1, str(job), [*DEEPER, "run.steps=3", f"run.dir={alone}"], None)
    assert losses(planned) == pytest.approx(losses(alone), rel=1e-10)
    plan = plan_at(planned / "plan.json")
    assert plan.unit_of("backbone").dp == 1 and sum(unit.num_ranks for unit in plan.units) == 2
    assert {step["plan"] for step in metrics(planned)} == {plan_digest(plan)}
    check_reloads(planned, planned / "plan.json")


def test_degrees_that_no_plan_has_are_refused_on_all_ranks(tmp_path):
    job = write_tiny_job(tmp_path / "data")
    overrides = [*STATED, f"run.dir={tmp_path / 'run'}", "parallel.image.pp=2", "parallel.image.dp=2"]
    with pytest.raises(Exception, match=r"image is pinned to tp = 1, pp = 2, dp = 2, 4 ranks, and the cluster has 2"):
        run_ranks(train_as_stated, 2, str(job), overrides)
