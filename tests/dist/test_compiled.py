"""`run.compile`: blocks in graphs for all lengths, equal to blocks as they are."""

from dataclasses import replace
from functools import partial

import pytest
from torch._dynamo.utils import counters

import motet.train.job
from benchmark import benchmark
from cli.tiny_job import losses, write_tiny_job
from dist.test_planned import said_under, train_under
from motet.core.errors import UserError
from motet.core.plan import Plan, Unit
from motet.core.plan_file import write_plan
from motet.cost.catalogue import cluster
from motet.models.compiling import compile_blocks
from motet.planning.planned_recipe import read_job_recipe
from motet.schedule import coarse_fills, fillable, parse_action, planned
from motet.train.recipe.recipe_file import load_recipe
from motet.train.trainer import train
from ranks import run_ranks

with benchmark("whole_models") as whole_models:
    pass

NO_DROPOUT = "model.encoders.audio.config.dropout=0.0"
TEXT = 'data.train=["text.jsonl"]'
PICTURES = 'data.train=["pictures.jsonl"]'


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """Its text.jsonl has text alone: compiling is slow, so one kind of block is."""
    recipe = write_tiny_job(tmp_path_factory.mktemp("job") / "data")
    lines = (recipe.parent / "train.jsonl").read_text().splitlines()
    text = [line for line in lines if "<audio>" not in line and "<image>" not in line]
    (recipe.parent / "text.jsonl").write_text("\n".join(text))
    pictures = [line for line in lines if "<audio>" not in line]
    (recipe.parent / "pictures.jsonl").write_text("\n".join(pictures))
    return recipe


def graphs_of(rank, num_ranks, recipe, overrides):
    """The number of graphs after each step of a run. Graphs run as they are traced: no code is made for them."""
    step_type, seen = motet.train.job.TrainStep, []
    motet.train.job.compile_blocks = partial(compile_blocks, backend="eager")

    class Counted(step_type):
        def run(self, batches, step=0):
            result = super().run(batches, step)
            seen.append(counters["stats"]["unique_graphs"])
            return result

    motet.train.job.TrainStep = Counted
    train(load_recipe(recipe, overrides))
    return seen


def test_no_length_is_compiled_anew_and_losses_are_equal(job, tmp_path):
    overrides = [
        NO_DROPOUT,
        TEXT,
        "data.heldout=[]",
        "model.backbone.config.num_hidden_layers=1",
        "run.steps=6",
    ]
    (graphs,) = run_ranks(graphs_of, 1, job, [f"run.dir={tmp_path / 'own'}", "run.compile=true", *overrides])
    run_ranks(said_under, 1, str(job), [f"run.dir={tmp_path / 'plain'}", *overrides], None)
    assert losses(tmp_path / "own") == losses(tmp_path / "plain")
    assert 2 <= graphs[2] == graphs[-1] <= 12, "three steps with packs of their own lengths have no graph of their own"


@pytest.mark.slow
def test_blocks_of_a_whole_model_are_compiled_too(tmp_path):
    job = whole_models.write_job(tmp_path, "llava")
    own, plain = (tmp_path / name for name in ("own", "plain"))
    (graphs,) = run_ranks(graphs_of, 1, job, [f"run.dir={own}", "run.compile=true", "run.steps=2"])
    run_ranks(said_under, 1, str(job), [f"run.dir={plain}", "run.steps=2"], None)
    assert graphs[-1] >= 2 and losses(own) == losses(plain)


def compiled_under(rank, num_ranks, recipe, overrides, plan):
    """The number of graphs of a run under a Plan. Backward passes are graphs, too; no code is made for them."""
    motet.train.job.compile_blocks = partial(compile_blocks, backend="aot_eager")
    train_under(rank, num_ranks, recipe, overrides, plan)
    return counters["stats"]["unique_graphs"]


CHAIN = (
    Unit("all", ({"image": 1, "audio": 1, "backbone": 1}, {"backbone": 1}), pp=2, recompute=({"backbone": 1}, {})),
)
BESIDE = Unit("image", ({"image": 1},)), Unit("llm", ({"audio": 1, "backbone": 2},), first_rank=1)
IN_BUBBLES = (
    Unit("llm", ({"backbone": 1},) * 2, pp=2),
    Unit("image", ({"image": 2},), dp=2, recompute=({"image": 1},)),
    Unit("audio", ({"audio": 1},), dp=2),
)


def in_pieces(plan):
    """The plan with passes of images in three parts: halves of one block, and the other one whole."""
    unfilled, encoders = fillable(plan)
    fills = []
    for fill in coarse_fills(unfilled.program, encoders):
        is_image = planned(plan).stages[parse_action(fill.action).stage].unit.name == "image"
        fills += [replace(fill, action=fill.action + part) for part in ((".0", ".1", ".2") if is_image else ("",))]
    return replace(plan, fills=tuple(fills))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("units", "schedule"),
    [(CHAIN, "1f1b"), (BESIDE, "gpipe"), (IN_BUBBLES, "1f1b")],
    ids=["chain", "beside", "halves in bubbles"],
)
def test_blocks_are_compiled_in_stages(job, tmp_path, units, schedule):
    """A chain with a recomputed block, an encoder on a rank of its own, and one whose blocks are in bubbles, one of
    them in halves: as one process without graphs.
    """
    given = [NO_DROPOUT, PICTURES, "data.heldout=[]", "run.dtype=float64", "run.steps=2", "run.batch_size=4"]
    given += ["model.encoders.image.config.depth=2"] if units is IN_BUBBLES else []
    where = cluster("h100", 1, 2)
    device = replace(where.device, peak_flops={**where.device.peak_flops, "fp64": 1e12}, overlaps=False)
    model = read_job_recipe(job, given).model
    plan = Plan(model, replace(where, device=device), units, 4, 2, schedule, precision="fp64")
    write_plan(in_pieces(plan) if units is IN_BUBBLES else plan, tmp_path / "plan")
    compiled = [*given, f"run.dir={tmp_path / 'own'}", "run.compile=true"]
    assert all(run_ranks(compiled_under, 2, str(job), compiled, str(tmp_path / "plan")))
    run_ranks(train_under, 1, str(job), [*given, f"run.dir={tmp_path / 'plain'}"], None)
    assert losses(tmp_path / "own") == pytest.approx(losses(tmp_path / "plain"), rel=1e-10)


def test_what_does_not_compile_is_refused(job, tmp_path, monkeypatch):
    given = [f"run.dir={tmp_path}", "run.compile=true", "data.heldout=[]"]
    with pytest.raises(UserError, match="dropout, whose masks are drawn by item"):
        train(load_recipe(job, given))
    monkeypatch.setattr("motet.models.compiling.shutil.which", lambda name: None)
    with pytest.raises(UserError, match=r"needs a C\+\+ compiler"):
        train(load_recipe(job, [*given, NO_DROPOUT]))
