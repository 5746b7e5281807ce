"""Whole models under Plans: what stages and ranks share equals one process."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from benchmark import benchmark
from motet.assign import planned_step
from motet.assign.dealt_items import dealt_items
from motet.planning.plan_first import plan_first
from motet.train.recipe.recipe_file import load_recipe
from motet.train.trainer import train
from ranks import run_ranks

with benchmark("whole_models") as whole_models:
    pass
RUN = ["run.dtype=float64", "run.steps=2", "run.batch_size=8", "optimizer.lr=1e-2", "data.num_workers=0"]
TWO_AT_ONCE = ["run.batch_size=2"]
"""One sequence a replica, of which the longer one is more than its share."""
WAYS = {
    "stages": ["parallel.backbone.pp=2"],
    "shared sequences": ["parallel.backbone.cp=2"],
    "shared experts": ["parallel.backbone.ep=2"],
    "divided layers": ["parallel.backbone.tp=2"],
    "divided tower": [f"parallel.{name}.tp=2" for name in ("backbone", "image")],
    "divided towers": [f"parallel.{name}.tp=2" for name in ("backbone", "image", "audio")],
}


def trained(rank, num_ranks, recipe, runs):
    """Train a recipe in each way: name of the folder -> overrides."""
    for folder, overrides in runs.items():
        overrides = [*RUN, *overrides, f"run.dir={folder}"]
        read = load_recipe(Path(recipe), overrides)
        train(read, plan=partial(plan_first, read, Path(recipe), overrides) if read.parallel else None)


def trained_by_example(rank, num_ranks, recipe, folder):
    """Train a recipe under a Plan whose ranks share each example, with its items. Returns whether any was cut."""
    overrides = [*RUN, "run.batch_size=4", *WAYS["shared sequences"], f"run.dir={folder}"]
    read = load_recipe(Path(recipe), overrides)

    def plan(world, say):
        planned, chosen = plan_first(read, Path(recipe), overrides, world, say)
        return planned, replace(chosen, plan=replace(chosen.plan, schedule="1f1b", microbatch_size=1))

    found = []

    def seen(*arguments):
        found.append(dealt_items(*arguments))
        return found[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planned_step, "dealt_items", seen)
        train(read, plan=plan)
    return any(len(dealt.item) for dealt in found)


def trained_in_replicas(rank, num_ranks, recipe, folder):
    """Train a recipe under a Plan whose replicas share long sequences. Returns how many were cut."""
    overrides = [*RUN, *WAYS["shared sequences"], *TWO_AT_ONCE, f"run.dir={folder}"]
    read = load_recipe(Path(recipe), overrides)

    def plan(world, say):
        planned, chosen = plan_first(read, Path(recipe), overrides, world, say)
        units = tuple(replace(unit, cp=1, dp=unit.dp * unit.cp) for unit in chosen.plan.units)
        options = {"schedule": "1f1b", "microbatch_size": 1, "balance": "split"}
        return planned, replace(chosen, plan=replace(chosen.plan, units=units, **options))

    train(read, plan=plan)
    lines = map(json.loads, (Path(folder) / "metrics.jsonl").read_text().splitlines())
    return sum(line["balance"]["cut"]["sequences"] for line in lines if line["balance"]["cut"])


def trained_beside(rank, num_ranks, recipe, folder):
    """Train a recipe under a Plan whose encoders have two replicas on ranks of their own, which share items. Returns
    how many were cut.
    """
    encoders = load_recipe(Path(recipe), RUN).modules.encoders
    degrees = ["parallel.backbone.dp=1", *(f"parallel.{name}.dp=2" for name in encoders)]
    overrides = [*RUN, *degrees, f"run.dir={folder}"]
    read = load_recipe(Path(recipe), overrides)

    def plan(world, say):
        planned, chosen = plan_first(read, Path(recipe), overrides, world, say)
        options = {"balance": "split", "order": "given", "microbatch_caps": {}, "microbatch_size": 2}
        return planned, replace(chosen, plan=replace(chosen.plan, **options))

    train(read, plan=plan)
    lines = map(json.loads, (Path(folder) / "metrics.jsonl").read_text().splitlines())
    return sum(len(line["cuts"]) for line in lines)


def figures(folder):
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [[line["loss"], line["grad_norm"]] for line in lines]


@pytest.mark.parametrize(
    ("family", "ways"),
    [
        pytest.param("qwen2_5_vl", ["shared sequences", "divided layers"], marks=pytest.mark.slow),
        pytest.param("qwen3_vl", ["stages", "shared sequences", "divided tower"], marks=pytest.mark.slow),
        pytest.param("qwen3_vl_moe", ["stages", "shared experts"], marks=pytest.mark.slow),
        pytest.param("qwen2_5_omni", ["stages", "divided towers"], marks=pytest.mark.slow),
        pytest.param("qwen2_5_omni_sound", ["stages", "shared sequences", "divided towers"], marks=pytest.mark.slow),
        ("idefics3", ["shared sequences"]),
        pytest.param(
            "mllama", ["stages", "shared sequences", "divided layers", "divided tower"], marks=pytest.mark.slow
        ),
        pytest.param("granite_vision", ["stages", "shared sequences"], marks=pytest.mark.slow),
        ("vipllava", ["stages"]),
    ],
)
def test_what_ranks_share_is_one_process(family, ways, tmp_path):
    """Windows, grids and a merger as projector; rows for several blocks, also beside experts; two towers; items in
    several pieces; and a class that Motet does not know, whose encoder is not cut.

    The latter two have one head of keys, which two ranks cannot divide.
    """
    check(family, 2, {name: WAYS[name] for name in ways}, tmp_path)


@pytest.mark.slow
def test_a_cut_tower_of_whose_layers_several_are_taken_is_one_process(tmp_path):
    """Rows of the layers so far go from stage to stage."""
    check("granite_vision", 3, {"cut tower": ["parallel.image.pp=2", "parallel.backbone.dp=1"]}, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["internvl", "smolvlm"])
def test_a_divided_tower_beside_replicas_of_the_backbone_is_one_process(family, tmp_path):
    """Towers of tiles, one with a norm in its projector; the backbone has one head of keys."""
    tower = ["parallel.image.tp=2", "parallel.image.dp=1", "parallel.backbone.dp=2"]
    check(family, 4, {"divided tower": tower}, tmp_path)


@pytest.mark.slow
def test_divided_experts_beside_a_tower_on_ranks_of_its_own_are_one_process(tmp_path):
    """Rows for several blocks go to tensor-parallel ranks, each of which has some of the experts."""
    tower, llm = ["parallel.image.tp=1", "parallel.image.dp=2"], ["parallel.backbone.tp=2", "parallel.backbone.dp=1"]
    check("qwen3_vl_moe", 4, {"divided experts": tower + llm}, tmp_path)


@pytest.mark.parametrize(
    "family",
    [
        "idefics3",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in (
                "mllama",
                "qwen3_vl",
                "smolvlm",
                "internvl",
                "gemma3_crops",
                "llava_next",
                "llava_onevision",
                "qwen2_audio",
                "qwen2_5_omni",
                "qwen2_5_omni_sound",
            )
        ),
    ],
)
def test_items_that_ranks_share_are_one_process(family, tmp_path):
    """Images of several tiles; videos and images of Qwen3-VL, whose frames stand in several pieces; videos of tiles.

    Of the last family videos and their sound alternate, and ranks share both.
    """
    whole_models.write_job(tmp_path / "job", family)
    recipe = str(tmp_path / "job" / "recipe.toml")
    run_ranks(trained, 1, recipe, {str(tmp_path / "alone"): ["run.batch_size=4"]})
    assert run_ranks(trained_by_example, 2, recipe, str(tmp_path / "shared")) == [True] * 2
    for found, expected in zip(figures(tmp_path / "shared"), figures(tmp_path / "alone"), strict=True):
        assert found == pytest.approx(expected, rel=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "num_ranks"), [("qwen2_5_vl", 3), ("qwen3_vl", 3), ("smolvlm", 3), ("qwen2_5_omni", 5)]
)
def test_items_that_replicas_of_their_own_share_are_one_process(family, num_ranks, tmp_path):
    """Windows; grids, and rows that enter again; videos of tiles; two towers, each with replicas of its own."""
    whole_models.write_job(tmp_path / "job", family)
    recipe = str(tmp_path / "job" / "recipe.toml")
    run_ranks(trained, 1, recipe, {str(tmp_path / "alone"): []})
    assert run_ranks(trained_beside, num_ranks, recipe, str(tmp_path / "shared"))[0] > 0
    for found, expected in zip(figures(tmp_path / "shared"), figures(tmp_path / "alone"), strict=True):
        assert found == pytest.approx(expected, rel=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["mllama", "qwen3_vl", "gemma3_crops", "qwen2_5_omni_sound"])
def test_sequences_that_replicas_share_are_one_process(family, tmp_path):
    """Images that rows attend to; grids, and rows that enter again; rows that see each other; sound between frames."""
    whole_models.write_job(tmp_path / "job", family)
    recipe = str(tmp_path / "job" / "recipe.toml")
    run_ranks(trained, 1, recipe, {str(tmp_path / "alone"): TWO_AT_ONCE})
    assert run_ranks(trained_in_replicas, 2, recipe, str(tmp_path / "shared"))[0] > 0
    for found, expected in zip(figures(tmp_path / "shared"), figures(tmp_path / "alone"), strict=True):
        assert found == pytest.approx(expected, rel=1e-10)


@pytest.mark.slow
def test_cut_sequences_that_attend_to_images_are_one_process(tmp_path):
    """Three ranks share some sequences, beside whole ones; images are copied to those that see them."""
    split = "balance.method=split"
    ways = {
        "one": ["run.steps=3", "run.batch_size=1"],
        "recomputed": ["run.steps=3", "run.batch_size=2", "fsdp.recompute=true"],
        "copies": ["run.steps=3", "run.batch_size=3", "fsdp.shard_size=1"],
    }

    def drop(stored):
        stored["text_config"]["dropout"] = 0.2

    recipe = written(tmp_path / "job", "mllama", drop)
    run_ranks(trained, 1, recipe, {str(tmp_path / f"{name} alone"): overrides for name, overrides in ways.items()})
    run_ranks(trained, 3, recipe, {str(tmp_path / name): [*overrides, split] for name, overrides in ways.items()})
    for name in ways:
        for found, expected in zip(figures(tmp_path / name), figures(tmp_path / f"{name} alone"), strict=True):
            assert found == pytest.approx(expected, rel=1e-10), name
        steps = map(json.loads, (tmp_path / name / "metrics.jsonl").read_text().splitlines())
        assert any(step["balance"]["cut"]["microbatches"] for step in steps), name


@pytest.mark.slow
def test_cut_sequences_in_which_videos_and_their_sound_alternate_are_one_process(tmp_path):
    """Two ranks share each step's one example, and its longest videos."""
    recipe = str(whole_models.write_job(tmp_path / "job", "qwen2_5_omni_sound", num_examples=3))
    overrides = ["run.batch_size=1", "run.steps=3", "data.shuffle=false"]
    run_ranks(trained, 1, recipe, {str(tmp_path / "alone"): overrides})
    run_ranks(trained, 2, recipe, {str(tmp_path / "cut"): [*overrides, "balance.method=split"]})
    for found, expected in zip(figures(tmp_path / "cut"), figures(tmp_path / "alone"), strict=True):
        assert found == pytest.approx(expected, rel=1e-10)
    steps = map(json.loads, (tmp_path / "cut" / "metrics.jsonl").read_text().splitlines())
    assert all(step["balance"]["cut"]["sequences"] for step in steps)


@pytest.mark.slow
def test_dropout_beside_rows_of_images_is_that_of_one_process(tmp_path):
    """Of layers that attend to images each rank has some rows, or some heads of all rows."""

    def drop(stored):
        stored["text_config"]["dropout"] = 0.3

    check("mllama", 2, {name: WAYS[name] for name in ("stages", "shared sequences", "divided layers")}, tmp_path, drop)


def written(folder, family, change=lambda stored: None):
    """The recipe of a tiny whole model. change: of its config."""
    whole_models.write_job(folder, family)
    config = folder / "model" / "config.json"
    change(stored := json.loads(config.read_text()))
    config.write_text(json.dumps(stored))
    return str(folder / "recipe.toml")


def check(family, num_ranks, ways, tmp_path, change=lambda stored: None):
    """Train a whole model in each way, and hold it to one process. change: of its config."""
    recipe = written(tmp_path / "job", family, change)
    run_ranks(trained, 1, recipe, {str(tmp_path / "alone"): []})
    run_ranks(trained, num_ranks, recipe, {str(tmp_path / name): overrides for name, overrides in ways.items()})
    alone = figures(tmp_path / "alone")
    assert len(alone) == 2
    for name in ways:
        for found, expected in zip(figures(tmp_path / name), alone, strict=True):
            assert found == pytest.approx(expected, rel=1e-10), name
