"""Ranks that have read different recipes, or other files beside them, are refused before they train."""

import shutil
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from cli.tiny_job import write_tiny_job
from dist.test_planned import DEEPER
from dist.test_planned_evaluation import WHOLE, beside
from motet.core.errors import JointUserError
from motet.core.plan import Unit
from motet.core.plan_file import write_plan
from motet.planning.under_plan import recipe_under_plan
from motet.train.job import build_job
from motet.train.recipe.recipe_file import load_recipe
from motet.train.same_recipe import check_same_recipe
from motet.train.world import join_world
from ranks import run_ranks

CALLBACK = "def twice(rows, sizes):\n    return {} * rows\n"


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    """The folders of two machines, with the same files but for the text of a callback, and weights."""
    folder = tmp_path_factory.mktemp("jobs")
    write_tiny_job(folder / "0", 4, 0)
    shutil.copytree(folder / "0", folder / "1")
    for number in (0, 1):
        (folder / f"{number}/own.py").write_text(CALLBACK.format(number))
        (folder / f"{number}/weights").mkdir()
        save_file({"weight": torch.full((3,), number)}, folder / f"{number}/weights/model.safetensors")
    return folder


def refusal(rank, num_ranks, folder, overrides):
    """What is said; "" if nothing is. overrides: of each rank."""
    recipe = load_recipe(Path(folder, str(rank), "recipe.toml"), overrides[rank])
    with join_world("cpu") as world:
        try:
            check_same_recipe(recipe, world)
        except JointUserError as error:
            return str(error)
    return ""


def under_plans(rank, num_ranks, recipe, plan_files):
    """What is said of Plans that ranks have read from files of their own."""
    read, chosen = recipe_under_plan(load_recipe(Path(recipe), DEEPER), Path(recipe), Path(plan_files[rank]))
    with join_world("cpu") as world, ExitStack() as cleanup:
        try:
            build_job(read, world, "never", lambda said: None, cleanup, chosen)
        except JointUserError as error:
            return str(error)
    return ""


def test_all_ranks_read_one_plan_of_data_parallelism(jobs, tmp_path):
    """Where their recipes come to be the same, as here, they waited for each other for ever."""
    job, files = jobs / "0/recipe.toml", [str(tmp_path / f"{number}.json") for number in (0, 1)]
    for file, degrees, size in zip(files, ({"dp": 2}, {"tp": 2}), (3, 6), strict=True):
        plan = beside(job, Unit("all", (WHOLE,), zero=0, **degrees), schedule="data_parallel")
        write_plan(replace(plan, microbatch_size=size), Path(file))
    said = "Rank 1 has read another plan than rank 0: copy one file to all machines."
    assert run_ranks(under_plans, 2, str(job), files) == [said, said]


@pytest.mark.parametrize(
    ("first", "other", "said"),
    [
        ([], [], ""),
        (
            ["optimizer.lr=0.1"],
            ["optimizer.lr=0.2"],
            "Rank 1 has not what rank 0 has: there optimizer.lr is 0.2, and here 0.1; start all ranks with the same "
            "recipe, --set and versions.",
        ),
        (
            ["model.encoders.image.after=own.py:twice"],
            ["model.encoders.image.after=own.py:twice"],
            "Rank 1 has another text of the file of model.encoders.image.after than rank 0: copy the same files to all "
            "machines.",
        ),
        (
            ["model.backbone.path=weights"],
            ["model.backbone.path=weights"],
            "Rank 1 has another content of the weights in the directory of backbone than rank 0: copy the same files "
            "to all machines.",
        ),
    ],
)
def test_all_ranks_read_one_recipe(jobs, first, other, said):
    assert run_ranks(refusal, 2, str(jobs), [first, other]) == [said, said]
