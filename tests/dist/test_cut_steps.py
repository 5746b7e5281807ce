"""Training that cuts sequences over ranks has the losses of one that keeps them whole, also where examples are bad."""

import re
from dataclasses import replace

import pytest

from cli.tiny_job import losses, metrics, write_tiny_job
from dist.test_bad_media import spoil_clips
from dist.test_planned import train_under
from dist.test_resume import run, stop_after
from motet.core.errors import UserError
from motet.core.plan_file import write_plan
from motet.planning.cluster import ClusterOptions
from motet.planning.job import JobOptions
from motet.planning.plan_of_recipe import read_recipe_as_plan, recipe_of_plan
from motet.train.recipe.recipe_file import load_recipe
from ranks import run_ranks

# On a slow device, so that exchanges cost little beside what is computed.
EXACT = (
    "run.dtype=float64", "model.encoders.audio.config.dropout=0.0",
    "balance.speed={ device_tflops = 1e-6, link_latency_us = 0.0 }",
)  # fmt: skip
FEW = ("run.batch_size=3", "run.microbatches=1")
"""On three ranks an example each, of which one is the longest."""


READ = (
    "model.encoders.image.projector={ kind = 'resampler', queries = 4, config = { resampler_depth = 1, "
    "resampler_n_heads = 2, resampler_head_dim = 8, num_key_value_heads = 1 } }",
)
MERGING = ("model.merge=unit.models.callbacks_of_tests:averaging",)
BOTH_WAYS = ("model.backbone.prefix=true", 'model.backbone.bidirectional=["image"]')


@pytest.mark.slow
@pytest.mark.parametrize(("bad", "options"), [(0, ()), (3, BOTH_WAYS), (0, READ), (3, MERGING)])
def test_losses_are_those_of_whole_sequences(tmp_path, bad, options):
    job = write_tiny_job(tmp_path / "data")
    if bad:
        spoil_clips(job.parent, "train-*.wav", bad)
    for way in ("method=split", "method=joint"):
        run(job, 3, tmp_path / way, *EXACT, *FEW, *options, f"balance.{way}")
    cut, whole = metrics(tmp_path / "method=split"), metrics(tmp_path / "method=joint")
    assert losses(tmp_path / "method=split") == pytest.approx(losses(tmp_path / "method=joint"), rel=1e-10)
    assert [step["grad_norm"] for step in cut] == pytest.approx([step["grad_norm"] for step in whole], rel=1e-10)
    assert [step["left_out"] for step in cut] == [step["left_out"] for step in whole]
    assert all(step["balance"]["cut"] is None for step in whole)
    assert all(step["phases"]["backbone"]["pad_ratio"] == 0 for step in cut), "packed rows have no padding"
    told = [step["balance"]["cut"] for step in cut if step["balance"]["cut"]]
    assert len(told) >= 3
    for step in told:
        assert sum(step["degrees"].values()) == step["sequences"] and step["microbatches"] == 1
        assert set(step["degrees"]) <= {"2", "3"} and bool(step["rows"]) == bool(step["sequences"])
    images = [step["items"]["image"] for step in told if "image" in step["items"]]
    assert all(step["cuts"] == [] for step in whole)
    for step in cut:  # Each by itself, and in sum.
        of_images = [item for item in step["cuts"] if item["module"] == "image"]
        told_of = (step["balance"]["cut"] or {"items": {}})["items"].get("image", {"cut": 0, "length": 0})
        assert (len(of_images), sum(item["length"] for item in of_images)) == (told_of["cut"], told_of["length"])
        assert all(item["ranks"] in (2, 3) for item in step["cuts"])
    assert len(images) >= 2 and all(of["cut"] == sum(of["degrees"].values()) and of["length"] > 0 for of in images)


@pytest.mark.slow
def test_auto_cuts_where_it_is_predicted_to_be_faster_and_says_what_it_gains(tmp_path):
    job = write_tiny_job(tmp_path / "data")
    said = run(job, 3, tmp_path / "auto", *EXACT, *FEW, "balance.split=auto")
    run(job, 3, tmp_path / "off", *EXACT, *FEW)
    assert losses(tmp_path / "auto") == pytest.approx(losses(tmp_path / "off"), rel=1e-10)
    steps = [step["balance"] for step in metrics(tmp_path / "auto")]
    cut = [step for step in steps if step["methods"] == {"split": 1}]
    assert len(cut) >= 3 and all(step["cut"]["gained_s"] > 0 for step in cut)
    assert all("cut (" in step["why"]["split"] and "rows over" in step["why"]["split"] for step in cut)
    items = [item for step in metrics(tmp_path / "auto") for item in step["cuts"]]
    assert len(items) >= 3 and all(item["gain_s"] > 0 and "rows over" in item["why"] for item in items)
    assert any(" cut over ranks" in line for line in said[0].splitlines())
    # A link that takes as long as the step leaves sequences whole.
    slow = ("balance.speed={ device_tflops = 1e-6, link_latency_us = 1e9 }",)
    run(job, 3, tmp_path / "slow", *EXACT, *FEW, "balance.split=auto", *slow, "run.steps=2")
    assert all(step["balance"]["cut"] is None for step in metrics(tmp_path / "slow"))


@pytest.mark.slow
def test_a_run_goes_on_with_other_ranks_and_with_dropout(tmp_path):
    job = write_tiny_job(tmp_path / "data")
    options = (*EXACT, *FEW, "model.encoders.audio.config.dropout=0.1", "model.backbone.config.attention_dropout=0.2")
    run(job, 3, tmp_path / "a", *options, "balance.method=split", "checkpoint.every_steps=4")
    whole = losses(tmp_path / "a")
    stop_after(tmp_path / "a", 4)
    run(job, 1, tmp_path / "a", *options, "balance.method=split")
    assert losses(tmp_path / "a") == pytest.approx(whole, rel=1e-9)


@pytest.mark.slow
def test_held_out_examples_are_whole(tmp_path):
    job = write_tiny_job(tmp_path / "data")
    held = f"data.heldout=['{job.parent}/heldout.jsonl']"
    for way in ("split", "joint"):
        run(job, 3, tmp_path / way, *EXACT, *FEW, f"balance.method={way}", "run.steps=2", held)
    told = [(tmp_path / way / "metrics.jsonl").parent for way in ("split", "joint")]
    assert all((folder / "report.html").exists() for folder in told)


MIXTRAL = ("model.backbone.family=mixtral", "model.backbone.config.num_local_experts=3")


@pytest.mark.parametrize(
    ("degrees", "options"),
    [
        ({}, ()),
        pytest.param({"tp": 2}, (), marks=pytest.mark.slow),
        pytest.param({"ep": 3}, MIXTRAL, marks=pytest.mark.slow),
    ],
    ids=["alone", "shared products", "shared experts"],
)
@pytest.mark.parametrize("by_plan", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["plan", "recipe"])
def test_under_a_plan_of_data_parallelism_long_items_are_cut_too(tmp_path, by_plan, degrees, options):
    """By the plan's balance, or by the recipe beside a plan that balances by "auto"."""
    job = write_tiny_job(tmp_path / "data")
    options = [*EXACT, *options, "run.batch_size=3", "data.heldout=[]"]
    here = "cluster={ device = 'cpu', peak_tflops = { fp64 = 0.05 }, ranks_per_node = 3 }"
    plan, _ = read_recipe_as_plan(job, [*options, "fsdp.shard_size=1", here], JobOptions(ClusterOptions()))
    unit = replace(plan.units[0], **degrees)
    plan = replace(plan, units=(unit,), cluster=replace(plan.cluster, ranks_per_node=unit.num_ranks))
    for way in ("auto", "off"):
        balance, said = ("split", []) if by_plan and way == "auto" else ("auto", [f"balance.split={way}"])
        write_plan(replace(plan, balance=balance), tmp_path / f"{way}.json")
        overrides = [*options, *said, f"run.dir={tmp_path / way}"]
        run_ranks(train_under, unit.num_ranks, str(job), overrides, str(tmp_path / f"{way}.json"))
    assert losses(tmp_path / "auto") == pytest.approx(losses(tmp_path / "off"), rel=1e-10)
    cut = [step for step in metrics(tmp_path / "auto") if step["balance"]["cut"]]
    whole = {step["step"]: step["predicted_s"] for step in metrics(tmp_path / "off")}
    assert cut and all(0 < step["predicted_s"] != whole[step["step"]] for step in cut)


def test_a_plan_that_balances_otherwise_is_not_cut(tmp_path):
    job = write_tiny_job(tmp_path / "data")
    plan, _ = read_recipe_as_plan(job, ["run.batch_size=3"], JobOptions(ClusterOptions("h100", 1, 3)))
    recipe = load_recipe(job, ["run.batch_size=3", "balance.split=auto"])
    with pytest.raises(UserError, match="lets a balance of 'auto' cut sequences, and the plan has 'joint': remove it"):
        recipe_of_plan(replace(plan, balance="joint"), recipe)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("balance.mode=exchange", "balance.method=split"), 'and mode = "exchange" moves each to one rank'),
        (("balance.method=joint", "balance.split=auto"), 'is for method = "auto"'),
        (("balance.method=split", "fsdp.recompute=auto"), "takes the same recomputation on all ranks"),
        (("balance.method=split", "balance.communicator=all_gather"), "sends each rank its rows alone"),
        (("balance.method=split", "balance.policy={ backbone = 'padded' }"), "cuts packed sequences"),
        (("balance.method=split", "data.group='auto'"), "gives a sequence to several ranks"),
        (("balance.method=split", "data.train=['a.{rank}.jsonl']"), "takes examples that every rank can read"),
    ],
)
def test_what_cannot_be_cut_is_refused_in_a_sentence(tmp_path, options, expected):
    job = write_tiny_job(tmp_path / "data")
    with pytest.raises(UserError, match=re.escape(expected)):
        load_recipe(job, list(options))


def test_a_plan_cuts_where_that_is_faster_alone(tmp_path):
    job, options = write_tiny_job(tmp_path), JobOptions(ClusterOptions("h100", 1, 3))
    plan, _ = read_recipe_as_plan(job, ["run.batch_size=3", "balance.split=auto"], options)
    assert plan.balance == "split"
    with pytest.raises(UserError, match="cuts wherever it can, and a plan where it is predicted to be faster"):
        read_recipe_as_plan(job, ["run.batch_size=3", "balance.method=split"], options)


def test_how_rows_are_exchanged_is_no_choice_there(tmp_path):
    job, split = write_tiny_job(tmp_path / "data"), ("balance.method=split", "context.exchange=all_gather")
    said = run(job, 1, tmp_path / "run", *split)
    assert "by balance.method = \"split\" exchange keys by 'group_cast', all heads at once: leave it out" in said[0]


def test_phases_that_are_not_all_balanced_are_refused(tmp_path):
    job = write_tiny_job(tmp_path / "data")
    said = run(job, 1, tmp_path / "run", "balance.split=auto", "balance.phases=backbone", "balance.defer=off")
    assert said == [
        'balance.split = "auto" compares times of all phases: balance.phases must be "all", not "backbone".'
    ]
