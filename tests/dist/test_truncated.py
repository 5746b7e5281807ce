"""Training on examples that are cut to data.max_sequence_length: the same on any ranks."""

import json
import re

import pytest

from cli.tiny_job import losses, metrics, write_tiny_job
from dist.test_resume import train_rank
from ranks import run_ranks

QUIET = ("data.heldout=[]", "run.dtype=float64", "run.steps=3", "model.encoders.audio.config.dropout=0.0")


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """Conversations of two questions, with all items of both."""
    job = write_tiny_job(tmp_path_factory.mktemp("truncated") / "data", num_train=16)
    manifest = job.parent / "train.jsonl"
    records = [json.loads(line) for line in manifest.read_text().splitlines()]
    pairs = []
    for first, second in zip(records[::2], records[1::2]):
        pair = {"conversations": first["conversations"] + second["conversations"]}
        for kind in ("image", "audio"):
            if named := [record[kind] for record in (first, second) if kind in record]:
                pair[kind] = named
        pairs.append(pair)
    manifest.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    return job


def run(job, num_ranks, run_dir, *overrides):
    return run_ranks(train_rank, num_ranks, str(job), [f"run.dir={run_dir}", *QUIET, *overrides], "auto")


def test_truncated_examples_train_alike_on_any_ranks(job, tmp_path):
    bound = ("data.max_sequence_length=54", "data.too_long=truncate")
    alone, both = run(job, 1, tmp_path / "a", *bound), run(job, 2, tmp_path / "b", *bound)
    (sentence,) = [line for line in both[0].splitlines() if "truncated to max_sequence_length" in line]
    assert sentence in alone[0] and sentence not in both[1] and "would cut" not in both[0]
    assert losses(tmp_path / "b") == pytest.approx(losses(tmp_path / "a"), rel=1e-10)
    run(job, 1, tmp_path / "c")
    whole, cut = (sum(step["num_targets"] for step in metrics(tmp_path / name)) for name in "ca")
    assert cut < whole


@pytest.mark.slow
def test_examples_that_are_too_long_are_dropped_and_named_whatever_their_share(job, tmp_path):
    said = run(job, 2, tmp_path / "a", "data.max_sequence_length=54", "data.max_bad_fraction=0.0")
    assert re.search(r"[1-7] of 8 examples left out: .* too long|[1-7] of 8 examples left out", said[0])
    assert re.search(r"train.jsonl, line \d: takes \d+ tokens, more than", said[0])
    assert len(losses(tmp_path / "a")) == 3


def test_too_long_as_an_error_ends_all_ranks_before_the_first_step(job, tmp_path):
    said = run(job, 2, tmp_path / "a", "data.max_sequence_length=54", 'data.too_long="error"')
    assert said[0] == said[1]
    assert 'more than max_sequence_length = 54 (data.too_long = "error"; ' in said[0]
    assert not (tmp_path / "a" / "metrics.jsonl").exists()
