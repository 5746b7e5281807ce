"""What cannot be used is left out on all ranks alike, and named with the reason; a run of nothing else ends."""

import base64
import json

import numpy as np
import pytest
import soundfile

from cli.tiny_job import losses, metrics, write_tiny_job
from dist.test_resume import run, train_rank
from ranks import run_ranks


def spoil_clips(folder, pattern: str, count: int | None = None) -> list[str]:
    """Put a sample that is not finite into clips, which their headers say nothing of; the names of the clips."""
    paths = sorted((folder / "media").glob(pattern))[:count]
    for path in paths:
        samples, rate = soundfile.read(path, dtype="float32")
        samples[len(samples) // 2] = np.nan
        soundfile.write(path, samples, rate, subtype="FLOAT")
    return [path.name for path in paths]


@pytest.mark.parametrize("mode", [pytest.param("index", marks=pytest.mark.slow), "exchange"])
def test_clips_that_are_not_finite_are_left_out_on_all_ranks_alike(tmp_path, mode):
    job = write_tiny_job(tmp_path / "data")
    names = spoil_clips(job.parent, "train-*.wav", 2)
    said = run(job, 2, tmp_path / "a", f"balance.mode={mode}")
    for name in names:
        (sentence,) = [line for line in said[0].splitlines() if line.startswith("Left out") and name in line]
        assert "train.jsonl, line " in sentence
        assert sentence.rpartition(": ")[2].startswith("holds samples that are not finite, the first at ")
    assert "Left out" not in said[1]
    steps = metrics(tmp_path / "a")
    assert np.isfinite(losses(tmp_path / "a")).all()
    assert [len(step["left_out"]) for step in steps] == [6 - step["num_examples"] for step in steps]
    left_out = [entry for step in steps for entry in step["left_out"]]
    assert {entry["file"].rpartition("/")[2] for entry in left_out} == set(names)
    assert all("not finite" in entry["why"] and "train.jsonl, line " in entry["line"] for entry in left_out)


@pytest.mark.slow
def test_each_item_that_a_record_holds_is_named_by_its_line(tmp_path):
    job = write_tiny_job(tmp_path / "data")
    spoil_clips(job.parent, "train-*.wav")
    records = [json.loads(line) for line in (job.parent / "train.jsonl").read_text().splitlines()]
    for record in (record for record in records if "audio" in record):
        clip = base64.b64encode((job.parent / record["audio"]).read_bytes()).decode()
        record["audio"] = f"data:audio/wav;base64,{clip}"
    (job.parent / "train.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (said,) = run(job, 1, tmp_path / "a", "run.steps=1", "run.batch_size=40", "data.max_bad_fraction=1")
    held = [number for number, record in enumerate(records, start=1) if "audio" in record]
    named = [line for line in said.splitlines() if line.startswith("Left out")]
    assert len(named) == len(held) > 3
    assert all(any(f"line {number}: audio " in line for line in named) for number in held)


def only(job, task: str) -> str:
    """A manifest of the training examples of one task."""
    lines = (job.parent / "train.jsonl").read_text().splitlines()
    path = job.with_name(f"{task}.jsonl")
    path.write_text("".join(line + "\n" for line in lines if json.loads(line)["task"] == task))
    return f"data.train=['{path}']"


@pytest.mark.parametrize("mode", [pytest.param("index", marks=pytest.mark.slow), "exchange"])
def test_where_all_are_bad_the_first_are_named_whatever_is_allowed(tmp_path, mode):
    job = write_tiny_job(tmp_path / "data")
    spoil_clips(job.parent, "train-*.wav")
    said = run(job, 2, tmp_path / "a", only(job, "audio"), f"balance.mode={mode}", "data.max_bad_fraction=1")
    assert said[0] == said[1]
    assert said[0].startswith("No example of the first 48 can be used, so there is nothing to learn: ")
    assert said[0].count("holds samples that are not finite, the first at ") == 3


def test_where_all_are_bad_from_the_start_the_first_are_named(tmp_path):
    job = write_tiny_job(tmp_path / "data")
    for path in (job.parent / "media").glob("train-*.wav"):
        path.write_bytes(b"no sound at all")
    said = run(job, 2, tmp_path / "a", only(job, "audio"), "data.max_bad_fraction=1")
    assert said[0] == said[1]
    assert "no example of the manifests can be used: 10 of 10 examples left out" in said[0]
    assert said[0].count("is no audio that soundfile knows") == 3


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["index", "exchange"])
def test_microbatches_and_steps_without_an_example_are_passed(tmp_path, mode):
    job = write_tiny_job(tmp_path / "data")
    spoil_clips(job.parent, "train-*.wav", 8)
    options = ("data.max_bad_fraction=1", only(job, "audio"), "run.steps=10", f"balance.mode={mode}")
    for folder, more in (("a", ("run.batch_size=2", "run.microbatches=2")), ("b", ("run.batch_size=1",))):
        said = run(job, 2, tmp_path / folder, *options, *more)
        steps = metrics(tmp_path / folder)
        assert [step["num_examples"] + len(step["left_out"]) for step in steps] == [1 if folder == "b" else 2] * 10
        assert any(step["num_examples"] == 0 for step in steps), said[0]
        assert all((step["loss"] is None) == (step["num_examples"] == 0) for step in steps)
        assert np.isfinite([step["loss"] for step in steps if step["num_examples"]]).all()


@pytest.mark.slow
def test_held_out_examples_that_are_bad_are_named(tmp_path):
    job = write_tiny_job(tmp_path / "data")
    names = spoil_clips(job.parent, "heldout-*.wav")
    heldout = f"data.heldout=['{job.parent}/heldout.jsonl']"
    said = run(job, 2, tmp_path / "a", heldout, "run.steps=2", "evaluate.every_steps=1")
    assert [said[0].count(name) for name in names] == [1] * len(names)
    assert said[0].count("Left out of the evaluation: ") == len(names)
    lines = [line for line in (job.parent / "heldout.jsonl").read_text().splitlines() if '"audio": ' in line]
    (job.parent / "heldout.jsonl").write_text("".join(line + "\n" for line in lines))
    said = run(job, 2, tmp_path / "b", heldout, "run.steps=1")
    assert said[0] == said[1]
    assert said[0].startswith(f"None of {len(lines)} held-out examples can be used, so there is no loss to tell: ")


def train_on_its_own(rank, num_ranks, recipes, overrides):
    return train_rank(rank, num_ranks, recipes[rank], overrides, "auto")


def test_ranks_that_see_other_files_say_so_and_do_not_hang(tmp_path):
    jobs = [write_tiny_job(tmp_path / f"node{rank}") for rank in range(2)]
    (jobs[1].parent / "media/train-1.png").unlink()
    overrides = [f"run.dir={tmp_path}/run", "run.steps=1"]
    said = run_ranks(train_on_its_own, 2, [str(job) for job in jobs], overrides)
    assert said[0] == said[1]
    assert said[0] == (
        "data.train is not the same everywhere: rank 0 finds 40 examples that can be used, rank 1 finds 39, or others; "
        "give all machines the same files."
    )
