"""A run that is stopped and resumed, on as many ranks or on others, is the run that was not stopped."""

import json
import shutil
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import numpy as np
import pytest

from cli.tiny_job import losses, metrics, write_tiny_job
from motet.core.errors import UserError
from motet.data.order import GlobalOrder
from motet.train.recipe.recipe_file import load_recipe
from motet.train.trainer import train
from ranks import run_ranks


def train_rank(rank, num_ranks, recipe, overrides, resume):
    with redirect_stdout(StringIO()) as printed:
        try:
            train(load_recipe(Path(recipe), overrides), resume=resume)
        except UserError as error:
            return str(error)
    return printed.getvalue()


def run(recipe, num_ranks, run_dir, *overrides, resume="auto"):
    """Train on ranks of a gloo group; what each rank printed, or the sentence with which it ended."""
    overrides = [f"run.dir={run_dir}", "data.heldout=[]", *overrides]
    return run_ranks(train_rank, num_ranks, str(recipe), overrides, resume)


def stop_after(run_dir, step):
    """Make a finished run one that was stopped after `step`: its last checkpoint is that of `step`."""
    (run_dir / "checkpoints" / "step-00000008").rename(run_dir / "step-00000008")
    assert [path.name for path in (run_dir / "checkpoints").iterdir()] == [f"step-{step:08d}"]


@pytest.mark.parametrize("num_ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_resumed_losses_are_those_of_an_uninterrupted_run(job, tmp_path, num_ranks):
    run(job, num_ranks, tmp_path / "a", "checkpoint.every_steps=4")
    whole = losses(tmp_path / "a")
    assert len(whole) == 8
    stop_after(tmp_path / "a", 4)
    run(job, num_ranks, tmp_path / "a")
    # Dropout included: a step's masks follow from the step.
    assert losses(tmp_path / "a") == whole


def test_a_resumed_run_tells_what_was_held_out_before_it(job, tmp_path):
    options = ['data.heldout=["heldout.jsonl"]', "evaluate.every_steps=2", "evaluate.max_new_tokens=1"]
    options += ["checkpoint.every_steps=4", "run.report_to=[]"]

    def by_step():
        return json.loads((tmp_path / "a/summary.json").read_text())["heldout_loss_by_step"]

    run(job, 1, tmp_path / "a", *options)
    whole = by_step()
    assert [*whole] == ["2", "4", "6", "8"]
    stop_after(tmp_path / "a", 4)
    run(job, 1, tmp_path / "a", *options)
    assert by_step() == whole
    run(job, 1, tmp_path / "a", *options, "run.steps=1", resume="never")
    assert [*by_step()] == ["1"]


def train_traced(rank, num_ranks, recipe, overrides):
    with redirect_stdout(StringIO()) as printed:
        train(load_recipe(Path(recipe), overrides), trace=True)
    return printed.getvalue()


def test_a_run_that_has_ended_keeps_its_trace_and_an_evaluation_a_step(job, tmp_path):
    """The same command takes no step, and evaluates the last one again. Its trace was one without a span."""
    overrides = ["run.steps=2", "run.report_to=[]", "evaluate.every_steps=1", "evaluate.max_new_tokens=1"]
    arguments = train_traced, 1, str(job), [f"run.dir={tmp_path}", *overrides]
    run_ranks(*arguments)
    kept = {name: (tmp_path / name).read_text() for name in ("trace.json", "timeline.json", "heldout.jsonl")}
    (said,) = run_ranks(*arguments)
    assert "No step was left to take, so what an earlier --trace wrote stays as it is." in said
    assert {name: (tmp_path / name).read_text() for name in kept} == kept
    assert kept["heldout.jsonl"].count("\n") == 2


@pytest.mark.slow
@pytest.mark.parametrize(("first", "second"), [(4, 2), (2, 3)])
def test_on_another_number_of_ranks_the_same_examples_follow(job, tmp_path, first, second):
    run(job, first, tmp_path / "a", "checkpoint.every_steps=4")
    whole = metrics(tmp_path / "a")
    stop_after(tmp_path / "a", 4)
    run(job, second, tmp_path / "a")
    resumed = metrics(tmp_path / "a")
    assert [step["loss"] for step in resumed] == pytest.approx([step["loss"] for step in whole], rel=1e-4)
    assert [len(step["phases"]["image"]["loads"]) for step in resumed] == [first] * 4 + [second] * 4
    for key in ("position", "num_examples", "num_tokens", "num_targets"):
        assert [step[key] for step in resumed] == [step[key] for step in whole]


def taken_ids(rank, num_ranks, recipe, overrides):
    """Ids of the examples that the feed of this rank has asked for, in order."""
    taken = []
    take = GlobalOrder.take

    def recording(self, position, count):
        ids = take(self, position, count)
        taken.extend(ids.tolist())
        return ids

    GlobalOrder.take = recording
    train(load_recipe(Path(recipe), overrides))
    return taken


@pytest.mark.slow
def test_a_resumed_run_takes_just_the_examples_not_yet_seen(job, tmp_path):
    overrides = [f"run.dir={tmp_path / 'a'}", "checkpoint.every_steps=4", "data.heldout=[]"]
    whole = run_ranks(taken_ids, 2, str(job), overrides)
    assert whole[0] == whole[1]
    assert sorted(whole[0][:40]) == list(range(40))
    stop_after(tmp_path / "a", 4)
    resumed = run_ranks(taken_ids, 3, str(job), overrides)
    assert resumed[0] == whole[0][4 * 6 :]


def test_resume_never_starts_anew_and_a_path_goes_back(job, tmp_path):
    run(job, 1, tmp_path / "a", "checkpoint.every_steps=2", "checkpoint.keep=9")
    whole = losses(tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    run(job, 1, tmp_path / "a", "run.steps=3", resume="never")
    assert losses(tmp_path / "a")[:2] == pytest.approx(whole[:2])
    assert [path.name for path in (tmp_path / "a/checkpoints").iterdir()] == ["step-00000003"]
    back = tmp_path / "b/checkpoints/step-00000004"
    run(job, 1, tmp_path / "b", "checkpoint.keep=9", resume=str(back))
    assert losses(tmp_path / "b") == pytest.approx(whole)
    assert names(back.parent) == [
        "step-00000002",
        "step-00000004",
        "step-00000006.superseded",
        "step-00000008",
        "step-00000008.superseded",
    ]


def test_a_start_that_cannot_be_taken_costs_no_checkpoint(job, tmp_path):
    few = ("run.steps=2", "run.report_to=[]")
    run(job, 1, tmp_path / "a", *few)
    own = tmp_path / "a/checkpoints/step-00000002"
    said = run(job, 2, tmp_path / "a", *few, f"run.start={own}", resume="never")
    assert said[0] == said[1]
    assert said[0].startswith(f"run.start = {own} is one of the checkpoints that --resume never removes: set another")
    said = run(job, 1, tmp_path / "a", *few, f"run.start={tmp_path}/b/step-00000002", resume="never")
    assert "is no complete Motet checkpoint: there is no such folder" in said[0]
    assert names(own.parent) == ["step-00000002"]


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.slow
def test_a_path_changes_nothing_before_there_is_something_new(job, tmp_path):
    run(job, 1, tmp_path / "a", "checkpoint.every_steps=2", "checkpoint.keep=9")
    before, whole = names(tmp_path / "a/checkpoints"), losses(tmp_path / "a")
    (said,) = run(job, 1, tmp_path / "a", "run.steps=4", resume=str(tmp_path / "a/checkpoints/step-00000004"))
    assert "step-00000004, which is the last step" in said
    assert names(tmp_path / "a/checkpoints") == before
    assert losses(tmp_path / "a") == whole[:4]
    (said,) = run(job, 1, tmp_path / "a")
    assert "Resuming after step 8" in said
    assert losses(tmp_path / "a") == whole


@pytest.mark.slow
def test_from_a_damaged_newest_checkpoint_a_run_goes_back_to_the_one_before(job, tmp_path):
    run(job, 2, tmp_path / "a", "checkpoint.every_steps=3")
    whole, folder = losses(tmp_path / "a"), tmp_path / "a" / "checkpoints"
    assert names(folder) == ["step-00000006", "step-00000008"]
    shards = folder / "step-00000008" / "rank-00001.safetensors"
    shards.write_bytes(shards.read_bytes()[:-100])
    said = run(job, 2, tmp_path / "a", "checkpoint.every_steps=3")
    assert "step-00000008 is damaged: rank-00001.safetensors has " in said[0]
    assert "It is kept as step-00000008.damaged." in said[0]
    assert "Resuming after step 6 from " in said[0]
    assert not said[1]
    assert losses(tmp_path / "a") == whole
    assert names(folder) == ["step-00000006", "step-00000008", "step-00000008.damaged"]


def test_a_checkpoint_past_the_last_step_is_no_success(job, tmp_path):
    run(job, 1, tmp_path / "a", "run.steps=3")
    said = run(job, 2, tmp_path / "a", "run.steps=2")
    assert said[0] == said[1]
    assert "is of step 3, and run.steps = 2 ends before it" in said[0]
    assert names(tmp_path / "a/checkpoints") == ["step-00000003"]


def test_a_checkpoint_of_another_job_is_refused(job, tmp_path):
    run(job, 1, tmp_path / "a", "run.steps=1")
    (sentence,) = run(job, 1, tmp_path / "a", "data.seed=5")
    assert "was written with data.seed = 0, not 5" in sentence
    (sentence,) = run(job, 1, tmp_path / "a", "data.shuffle=false", "run.steps=2")
    assert "was written with data.shuffle = true, not false" in sentence
    (sentence,) = run(job, 1, tmp_path / "a", "optimizer.name=adam", "run.steps=2")
    assert 'has the state of optimizer.name = "adamw", not of "adam" as now' in sentence
    (sentence,) = run(job, 1, tmp_path / "a", "data.train=['heldout.jsonl']")
    assert "was written on other training examples" in sentence
    said = run(job, 2, tmp_path / "a", "model.backbone.config.intermediate_size=40")
    assert said[0] == said[1]
    assert "was written with model.backbone.config.intermediate_size = 48, not = 40 as now" in said[0]
    (sentence,) = run(job, 1, tmp_path / "a", "transforms.image.mean=[0.4]", "run.steps=2")
    assert "was written with transforms.image.mean as by default, not = [0.4] as now" in sentence


def damage(folder, count):
    """Spoil the first files of the training set after they have been indexed; returns their names."""
    damaged = sorted((folder / "media").glob("train-*.png"))[:count]
    damaged[0].unlink()
    for path in damaged[1:]:
        path.write_bytes(path.read_bytes()[:45])
    return [path.name for path in damaged]


@pytest.mark.slow
def test_files_that_become_unreadable_are_left_out_on_all_ranks_alike(tmp_path):
    job = write_tiny_job(tmp_path / "data")
    run(job, 1, tmp_path / "whole", "run.steps=1")
    names = damage(job.parent, 2)
    for mode in ("index", "exchange"):
        said = run(job, 2, tmp_path / mode, f"balance.mode={mode}", "run.steps=14")
        assert [said[0].count(name) for name in names] == [1, 1]
        assert "Left out" not in said[1]
        steps = metrics(tmp_path / mode)
        # Two epochs and a bit more: each of the two is met twice, or three times.
        assert steps[-1]["bad_examples"] == sum(6 - step["num_examples"] for step in steps) >= 4
        assert steps[-1]["position"] == 14 * 6
    assert losses(tmp_path / "index") == pytest.approx(losses(tmp_path / "exchange"), rel=0.2)
    summary = json.loads((tmp_path / "index" / "summary.json").read_text())
    assert summary["bad_examples"] >= 4


@pytest.mark.slow
def test_too_many_unreadable_files_stop_all_ranks_with_one_sentence(tmp_path):
    job = write_tiny_job(tmp_path / "data")
    run(job, 1, tmp_path / "a", "run.steps=1")
    damage(job.parent, 10)
    for mode in ("index", "exchange"):
        said = run(job, 2, tmp_path / mode, f"balance.mode={mode}", "data.max_bad_fraction=0.02", "run.steps=40")
        assert said[0] == said[1]
        assert " cannot be used, more than data.max_bad_fraction = 0.02 allows" in said[0]


@pytest.mark.slow
def test_files_that_are_unreadable_from_the_start_are_left_out_or_stop_the_run(tmp_path):
    job = write_tiny_job(tmp_path / "data")
    names = damage(job.parent, 2)
    said = run(job, 2, tmp_path / "a", "run.steps=1")
    # A header can be whole where the rest of a file is not: such a file is found out when it is decoded.
    assert said[0].count(names[0]) == 1
    assert "examples left out" in said[0]
    assert metrics(tmp_path / "a")[0]["bad_examples"] >= 1
    said = run(job, 2, tmp_path / "b", "data.max_bad_fraction=0")
    assert said[0] == said[1]
    assert "files that cannot be used, of 40 for training, more than data.max_bad_fraction = 0" in said[0]


def fail_in_the_feed(rank, num_ranks, recipe, overrides, kind):
    from motet.data.dataset import Dataset

    tokens = Dataset.tokens

    def failing(self, example_id):
        if rank == 1 and np.random.default_rng(example_id).random() < 0.2:
            raise kind("the disk is on fire")
        return tokens(self, example_id)

    Dataset.tokens = failing
    with pytest.raises((kind, RuntimeError)) as error:
        train(load_recipe(Path(recipe), overrides))
    return f"{error.value}"


@pytest.mark.parametrize("kind", [UserError, OSError])
def test_an_error_in_the_feed_of_one_rank_stops_all(job, tmp_path, kind):
    said = run_ranks(fail_in_the_feed, 2, str(job), [f"run.dir={tmp_path}"], kind)
    assert "the disk is on fire" in said[0]
    assert "the disk is on fire" in said[1]
