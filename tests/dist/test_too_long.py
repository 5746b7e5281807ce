"""An example that needs more memory than a rank has is left out on all ranks alike, with what would hold it."""

import json
import re
from dataclasses import replace

import pytest

from cli.tiny_job import losses, metrics, write_tiny_job
from dist.test_planned import DEEPER, FEW_CUTS, plan_of, said_under
from dist.test_resume import run
from motet.core.plan_file import write_plan
from ranks import run_ranks

MEMORY = ("cluster.device=cpu", "cluster.memory_gbytes=0.0012")


@pytest.fixture
def job(tmp_path):
    """A job of 40 examples, and behind them one of 144 tokens: more than a rank has memory for, but not than two."""
    job = write_tiny_job(tmp_path / "data")
    with (job.parent / "train.jsonl").open("a") as manifest:
        manifest.write(said_of(120))
    return job


def said_of(num_letters):
    """A line of a manifest."""
    turns = [{"from": "human", "value": "say " + "a" * num_letters}, {"from": "gpt", "value": "a"}]
    return json.dumps({"id": "long", "task": "text", "conversations": turns}) + "\n"


def without(job):
    """The manifest without its last line."""
    path, lines = job.parent / "short.jsonl", (job.parent / "train.jsonl").read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:-1]))
    return f"data.train=['{path}']"


@pytest.mark.parametrize("mode", ["index", pytest.param("exchange", marks=pytest.mark.slow)])
def test_it_is_left_out_and_named(job, tmp_path, mode):
    options = (f"balance.mode={mode}", "run.steps=3")
    said = run(job, 2, tmp_path / "a", *MEMORY, *options)
    assert "1 of 41 examples left out: it needs more memory than a rank has." in said[0]
    (sentence,) = [line for line in said[0].splitlines() if line.startswith("Left out")]
    assert re.search(
        r"train\.jsonl, line 41: takes 144 tokens, for which a rank needs [\d.]+ MB and may fill 1\.13 MB; a plan "
        r"with cp = 2 could hold it$",
        sentence,
    )
    assert "Left out" not in said[1]
    run(job, 2, tmp_path / "b", without(job), *options)
    assert losses(tmp_path / "a") == losses(tmp_path / "b")


def test_more_than_are_allowed_end_the_run_on_all_ranks(job, tmp_path):
    said = run(job, 2, tmp_path / "a", *MEMORY, "data.max_bad_fraction=0.01")
    assert said[0] == said[1]
    assert said[0].startswith(
        "1 example needs more memory than a rank has, of 41 for training, more than data.max_bad_fraction = 0.01 "
        "allows; "
        "the largest: "
    )


@pytest.mark.slow
def test_where_sequences_are_cut_it_is_kept_and_cut_however_dear_that_is(job, tmp_path):
    last = job.parent / "last.jsonl"
    last.write_text("".join((job.parent / "train.jsonl").read_text().splitlines(keepends=True)[-2:]))
    exact = ("run.dtype=float64", "model.encoders.audio.config.dropout=0.0", f"data.train=['{last}']")
    slow = "balance.speed={ device_tflops = 1e-6, link_latency_us = 1e9 }"
    options = (*exact, "balance.split=auto", slow, "run.batch_size=2", "run.microbatches=1", "run.steps=2")
    # In float64 all takes twice the bytes.
    said = run(job, 2, tmp_path / "a", MEMORY[0], "cluster.memory_gbytes=0.0024", *options)
    run(job, 2, tmp_path / "b", *options)
    assert "Left out" not in said[0] and losses(tmp_path / "a") == pytest.approx(losses(tmp_path / "b"), rel=1e-10)
    cut = [step["balance"]["cut"] for step in metrics(tmp_path / "a")]
    assert all(of["sequences"] and of["by_memory"] == 1 and of["gained_s"] is None for of in cut)
    assert "in 2 microbatches, 2 of which no rank could hold whole" in said[0]
    assert all(step["balance"]["cut"] is None for step in metrics(tmp_path / "b"))


def held_out(folder, *num_letters):
    (folder / "held.jsonl").write_text("".join(map(said_of, num_letters)))
    return f"data.heldout=['{folder / 'held.jsonl'}']"


@pytest.mark.slow
def test_held_out_examples_that_no_rank_can_evaluate_are_left_out_and_named(job, tmp_path):
    """Nothing of them is kept for a backward pass, so the one that is too long to train on is evaluated."""
    held = held_out(tmp_path, 10, 120, 4000)
    said = run(job, 2, tmp_path / "a", *MEMORY, held, "run.steps=1")
    assert "1 of 3 held-out examples left out: it needs more memory than a rank has." in said[0]
    assert re.search(r"Left out: \S+held\.jsonl, line 3: takes 4,024 tokens, for which a rank needs", said[0])
    assert "4,024" not in said[1]
    heldout = json.loads((tmp_path / "a" / "summary.json").read_text())["num_heldout"]
    assert sum(heldout.values()) == 2
    # With nothing left there is nothing to evaluate.
    both = run(job, 2, tmp_path / "b", *MEMORY, held_out(tmp_path, 4000), "run.steps=1")
    assert both[0] == both[1] and "no example of the manifests can be used" in both[0]


@pytest.mark.slow
def test_a_plan_with_stages_leaves_it_out_by_its_own_memory(job, tmp_path):
    plan = plan_of(job, FEW_CUTS)
    device = replace(plan.cluster.device, memory_bytes=2_500_000)
    write_plan(replace(plan, cluster=replace(plan.cluster, device=device)), tmp_path / "plan.json")
    overrides = [*DEEPER, f"run.dir={tmp_path / 'run'}", "run.steps=1"]
    said = run_ranks(said_under, 2, str(job), overrides, str(tmp_path / "plan.json"))
    assert "train.jsonl, line 41: takes 144 tokens" in said[0] and "no cp up to 2 could hold it" in said[0]


@pytest.mark.slow
def test_where_the_model_alone_does_not_fit_nothing_is_cut_for_it(job, tmp_path):
    little = ("cluster.device=cpu", "cluster.memory_gbytes=0.001", "model.backbone.config.intermediate_size=2048")
    slow = "balance.speed={ device_tflops = 1e-6, link_latency_us = 1e9 }"
    said = run(job, 2, tmp_path / "a", *little, "balance.split=auto", slow, "run.steps=1")
    (step,) = metrics(tmp_path / "a")
    assert "Left out" not in said[0] and step["balance"]["cut"] is None and step["memory"]["lacking_bytes"] == 0
