"""A recipe with a generator trains: the same losses on any number of ranks, resumed, exported; and what is refused."""

import json
import shutil
from contextlib import redirect_stdout
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from PIL import Image
from safetensors.torch import load_file

from cli.tiny_job import metrics, write_tiny_job
from motet.core.errors import UserError
from motet.core.plan import Plan, Unit
from motet.core.plan_file import write_plan
from motet.cost.catalogue import cluster
from motet.planning.planned_recipe import read_job_recipe
from motet.planning.trainable import obstacle_in
from motet.planning.under_plan import recipe_under_plan
from motet.train.recipe.reading import of_phase
from motet.train.recipe.recipe import load_recipe
from motet.train.trainer import train
from ranks import run_ranks

GENERATOR = """
[model.generators.draw]
makes = "image"
family = "dit"
num_queries = 3
drop_condition = 0.2
config = { row_dim = 16, hidden = 16, num_layers = 2, num_heads = 2 }
noise = { predicts = "v", min_snr = 5.0 }

[transforms.draw]
patch_size = 4
merge_size = 1
channels = 1
"""
EXACT = ("run.dtype=float64", "run.steps=5", "optimizer.warmup_steps=2", "run.report_to=[]")


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """A tiny job in which a third of the examples ask for a picture, one of them after a picture and a picture."""
    recipe = write_tiny_job(tmp_path_factory.mktemp("job") / "data", num_train=20, num_heldout=6)
    folder = recipe.parent
    asked = []
    for number, sides in enumerate(((8, 8), (12, 8), (8, 20), (4, 4), (24, 12))):
        name = f"media/drawn-{number}.png"
        Image.effect_noise(sides, 60.0).save(folder / name)
        turns = [{"from": "human", "value": f"draw {'abcde'[number]}"}, {"from": "gpt", "value": "see: <image>"}]
        images = [name]
        if number == 1:
            turns += [{"from": "human", "value": "and this <image>"}, {"from": "gpt", "value": "<image> and <image>"}]
            images += ["media/drawn-0.png", "media/drawn-0.png", name]
        asked.append(json.dumps({"conversations": turns, "image": images}) + "\n")
    for split in ("train", "heldout"):
        file = folder / f"{split}.jsonl"
        file.write_text(file.read_text() + "".join(asked))
    recipe.write_text(recipe.read_text() + GENERATOR)
    return recipe


def train_rank(rank, num_ranks, recipe, overrides):
    with redirect_stdout(StringIO()) as printed:
        try:
            train(load_recipe(Path(recipe), overrides))
        except UserError as error:
            return str(error)
    return printed.getvalue()


def run(recipe, num_ranks, folder, *overrides):
    return run_ranks(train_rank, num_ranks, str(recipe), [*EXACT, f"run.dir={folder}", *overrides])[0]


@pytest.fixture(scope="module")
def alone(job, tmp_path_factory):
    """The folder of a run of one process: what all others must equal."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    run(job, 1, folder, "export.at_end=true", "fsdp.shard_size=1")
    return folder


def held_out(folder):
    """The held-out losses of tokens and of the generator."""
    summary = json.loads((folder / "summary.json").read_text())
    return [summary["loss_heldout"], summary["losses_heldout"]["draw"]]


def test_any_number_of_ranks_takes_the_same_steps(job, alone, tmp_path):
    run(job, 3, tmp_path / "three", "checkpoint.every_steps=2", "run.microbatches=2")
    one, three = metrics(alone), metrics(tmp_path / "three")
    assert len(one) == len(three) == 5
    for a, b in zip(one, three, strict=True):
        assert b["losses"] == pytest.approx(a["losses"], rel=1e-9)
        assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=1e-8)
        assert a["loss"] == pytest.approx(a["losses"]["backbone"] + a["losses"]["draw"])
    assert {name for line in one for name in line["phases"]} == {"backbone", "image", "audio", "draw"}
    assert len({line["losses"]["draw"] for line in one}) == 5
    assert held_out(tmp_path / "three") == pytest.approx(held_out(alone), rel=1e-9)
    # Another run goes on from a checkpoint on other ranks.
    (tmp_path / "three" / "checkpoints" / "step-00000005").rename(tmp_path / "last")
    said = run(job, 2, tmp_path / "three")
    assert "Resuming after step 4" in said
    assert metrics(tmp_path / "three")[-1]["losses"] == pytest.approx(one[-1]["losses"], rel=1e-9)

    exported = alone / "export" / "generators"
    assert load_file(exported / "queries.safetensors")["draw"].shape == (3, 32)
    assert "entrance.nothing" in load_file(exported / "draw" / "model.safetensors")


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("transforms.draw.patch_size=6", "rows of 36 values, but model.generators.draw.config.row_dim is 16"),
        ("transforms.draw.merge_size=2", "takes patches in raster order"),
        ("model.generators.draw.config.num_heads=3", "config.hidden is 16; it must be a multiple of 4, and of"),
        ("model.generators.draw.config.depth=3", "`config.depth` is wrong"),
        ("model.generators.draw.module=a:B", "needs `family`, or `module`, and not both"),
        ("balance.split=auto", "cannot cut sequences whose query tokens model.generators read whole"),
        ("model.generators.draw.makes=video", "generators.draw.makes"),
    ],
)
def test_what_does_not_fit_is_said(job, tmp_path, override, said):
    with pytest.raises(UserError) as refused:
        train(load_recipe(job, [f"run.dir={tmp_path / 'run'}", *EXACT, override]))
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


def planned(job, *units, **options):
    """A Plan of the job's model on as many H100 as the units have ranks, in float64."""
    where = cluster("h100", 1, max(unit.ranks.stop for unit in units))
    device = replace(where.device, peak_flops={**where.device.peak_flops, "fp64": 1e12}, overlaps=False)
    model = read_job_recipe(job, EXACT).model
    return Plan(model, replace(where, device=device), units, 6, precision="fp64", **options)


def train_planned(rank, num_ranks, recipe, overrides, plan):
    recipe = Path(recipe)
    read, chosen = recipe_under_plan(load_recipe(recipe, overrides), recipe, Path(plan), overrides)
    with redirect_stdout(StringIO()) as printed:
        train(read, chosen=chosen)
    return printed.getvalue()


def run_planned(job, plan, folder, *overrides):
    write_plan(plan, folder.with_suffix(".json"))
    given = [*EXACT, f"run.dir={folder}", *overrides]
    return run_ranks(train_planned, plan.cluster.num_ranks, str(job), given, str(folder.with_suffix(".json")))[0]


def test_a_data_parallel_plan_trains_as_the_recipe_does(job, alone, tmp_path):
    blocks = {"image": 1, "audio": 1, "backbone": 2, "draw": 2}
    unit = Unit("all", (blocks,), dp=2, zero=3, recompute=({"draw": 1},))
    plan = planned(job, unit, microbatch_size=3, schedule="data_parallel", balance="auto")
    run_planned(job, plan, tmp_path / "planned", "data.heldout=[]")
    for a, b in zip(metrics(alone), metrics(tmp_path / "planned"), strict=True):
        assert b["losses"] == pytest.approx(a["losses"], rel=1e-9)
        assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=1e-8)


def test_plans_with_stages_train_resume_and_evaluate_as_one_process_does(job, alone, tmp_path):
    """A generator behind the backbone on a rank of its own; then, from a checkpoint, in the last stage of a chain."""
    before = {"image": 1, "audio": 1}
    behind = planned(
        job, Unit("llm", (before | {"backbone": 2},), zero=0), Unit("draw", ({"draw": 2},), first_rank=1, zero=0)
    )
    chain = planned(job, Unit("all", (before, {"backbone": 2, "draw": 2}), pp=2, recompute=({}, {"draw": 1})))
    folder = tmp_path / "run"
    run_planned(job, behind, folder, "checkpoint.every_steps=3")
    assert held_out(folder) == pytest.approx(held_out(alone), rel=1e-9)
    shutil.rmtree(folder / "checkpoints" / "step-00000005")
    assert "Resuming after step 3" in run_planned(job, chain, folder, "checkpoint.every_steps=3")
    for a, b in zip(metrics(alone), metrics(folder), strict=True):
        assert b["losses"] == pytest.approx(a["losses"], rel=1e-9)
        assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=1e-8)
    assert held_out(folder) == pytest.approx(held_out(alone), rel=1e-9)


@pytest.mark.parametrize(
    ("units", "said"),
    [
        (
            (Unit("all", ({"image": 1, "audio": 1, "backbone": 2, "draw": 1}, {"draw": 1}), pp=2),),
            "computed in one stage",
        ),
        (
            (
                Unit("llm", ({"image": 1, "audio": 1, "backbone": 2},)),
                Unit("draw", ({"draw": 2},), first_rank=1, tp=2),
            ),
            "no way to divide the layers of a generator",
        ),
        ((Unit("all", ({"image": 1, "audio": 1, "backbone": 2, "draw": 2},), cp=2),), "of a backbone that feeds gener"),
    ],
    ids=["cut", "tp", "cp"],
)
def test_a_plan_that_generators_cannot_be_in_is_refused(job, units, said):
    recipe = load_recipe(job, EXACT)
    assert said in obstacle_in(recipe)(planned(job, *units))


def test_a_phase_freezes_generators_too(job):
    phases = '\n[[run.phase]]\nname = "align"\nsteps = 2\nlearns = "projectors"\n'
    phases += '[[run.phase]]\nname = "make"\nsteps = 2\nlearns = ["draw.generator"]\n'
    phased = job.with_name("phased.toml")
    phased.write_text(job.read_text().replace("steps = 8\n", "") + phases)
    align, make = (load_recipe(phased, of_phase([], name)).modules for name in ("align", "make"))
    assert (align.generators["draw"].train_generator, align.generators["draw"].train_projector) == (False, True)
    assert (make.generators["draw"].train_generator, make.generators["draw"].train_projector) == (True, False)
    assert not make.backbone.train
    assert not make.encoders["image"].train_projector
