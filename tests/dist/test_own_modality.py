"""A modality of the user's own, `examples/points`, by `motet train`: any number of ranks, any way, the same losses."""

import re
import sys
from contextlib import redirect_stdout
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest

from cli.on_ranks import motet_under_agent
from cli.tiny_job import losses, metrics
from motet.core.plan import Plan, Unit
from motet.core.plan_file import write_plan
from motet.cost.catalogue import cluster
from motet.planning.planned_recipe import read_job_recipe
from motet.planning.under_plan import recipe_under_plan
from motet.train.recipe.recipe_file import load_recipe
from motet.train.trainer import train
from ranks import run_ranks

EXAMPLE = Path(__file__).parents[2] / "examples" / "points"
SMALL = (
    "data.heldout=[]",
    "data.num_workers=0",
    "run.dtype=float64",
    "run.steps=5",
    "run.batch_size=4",
    "data.max_bad_fraction=0.2",
    "model.encoders.points.args={width=16}",
    "model.backbone.config.hidden_size=16",
    "model.backbone.config.intermediate_size=16",
)


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """The example with few clouds. One that is cut short is left out; the last eight examples have no cloud."""
    sys.path.insert(0, str(EXAMPLE))
    try:
        from make_clouds import write_all
    finally:
        sys.path.remove(str(EXAMPLE))
    folder = tmp_path_factory.mktemp("points")
    recipe = write_all(folder, num_train=16, num_heldout=4)
    lines = (folder / "train.jsonl").read_text().splitlines(keepends=True)
    (folder / "train.jsonl").write_text("".join([*lines, *(lines[3::4] * 2)]))
    cut = folder / "clouds" / "train-5-0.ply"
    cut.write_bytes(cut.read_bytes()[:30])
    return recipe


def train_rank(rank, num_ranks, recipe, overrides, plan):
    path = Path(recipe)
    with redirect_stdout(StringIO()):
        read, chosen = load_recipe(path, overrides), None
        if plan is not None:
            read, chosen = recipe_under_plan(read, path, Path(plan))
        train(read, resume="never", chosen=chosen)


def run(job, num_ranks, run_dir, *overrides, plan=None):
    given = [*SMALL, "data.shuffle=false", f"run.dir={run_dir}", *overrides]
    run_ranks(train_rank, num_ranks, str(job), given, plan)
    return losses(run_dir)


@pytest.fixture(scope="module")
def alone(job, tmp_path_factory):
    """One process. With the examples in order, the last steps have no cloud at all."""
    run_dir = tmp_path_factory.mktemp("alone")
    run(job, 1, run_dir)
    return run_dir


def test_clouds_are_a_phase_that_steps_may_lack(alone):
    steps = metrics(alone)
    assert [bool(step["phases"]["points"]["bound"]) for step in steps] == [True, True, True, True, False]
    assert steps[-1]["bad_examples"] == 1


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param(("balance.method=per_phase", "data.num_workers=1"), marks=pytest.mark.slow),
        ("balance.mode=exchange", "fsdp.shard_size=1"),
        ("run.microbatches=2",),
    ],
    ids=["per phase, a worker", "exchange", "microbatches"],
)
def test_two_ranks_train_as_one(job, alone, tmp_path, overrides):
    assert run(job, 2, tmp_path / "run", *overrides) == pytest.approx(losses(alone), rel=1e-10)


def test_clouds_train_under_a_plan_in_stages(job, alone, tmp_path):
    where = cluster("h100", 1, 2)
    device = replace(where.device, peak_flops={**where.device.peak_flops, "fp64": 1e12}, overlaps=False)
    model = read_job_recipe(job, [*SMALL, f"run.dir={tmp_path}"]).model
    blocks = {module.name: len(module.blocks) for module in model.modules}
    unit = Unit("all", ({"points": blocks["points"], "backbone": 1}, {"backbone": blocks["backbone"] - 1}), pp=2)
    write_plan(Plan(model, replace(where, device=device), (unit,), 4, 2, precision="fp64"), tmp_path / "plan.json")
    planned = run(job, 2, tmp_path / "run", plan=str(tmp_path / "plan.json"))
    assert planned == pytest.approx(losses(alone), rel=1e-10)


HANGS = """

_load = load


def load(file):
    points = _load(file)
    if len(points) == {rows}:
        import time

        time.sleep(500)
    return points
"""


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_file_whose_decode_never_ends_is_named_before_others_have_waited_in_vain(tmp_path, num_workers):
    """By one sentence, of the rank that decodes it."""
    sys.path.insert(0, str(EXAMPLE))
    try:
        from make_clouds import write_all
    finally:
        sys.path.remove(str(EXAMPLE))
    recipe = write_all(tmp_path, num_train=16, num_heldout=4)
    cloud = tmp_path / "clouds" / "train-5-0.ply"
    rows = int(cloud.read_bytes().partition(b"element vertex ")[2].split()[0])
    with (tmp_path / "points.py").open("a") as file:
        file.write(HANGS.format(rows=rows))
    options = [*SMALL, "data.shuffle=false", f"data.num_workers={num_workers}", "run.wait_limit_s=20"]
    ended = motet_under_agent(2, "train", recipe, *[word for each in options for word in ("--set", each)])
    said = [line for line in ended.stderr.splitlines() if line.startswith("motet")]
    assert ended.returncode == 3 and len(said) == 1, (said, ended)
    assert re.match(
        r"motet train, rank \d: cannot go on at the loading of step 2: \S*train.jsonl, line 6: "
        rf"{re.escape(str(cloud))}: decoding it has not ended in 15 s, three quarters of run.wait_limit_s; mend or "
        "remove it, or raise that. There is no checkpoint. The traceback is in ",
        said[0],
    ), said
