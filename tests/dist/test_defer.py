"""A step that is decided as a whole has the losses of one that is taken as it comes, also where examples are bad."""

import numpy as np
import pytest

from cli.tiny_job import losses, metrics, write_tiny_job
from dist.test_bad_media import spoil_clips
from dist.test_resume import run, stop_after

# On a slow device, so that exchanges cost little beside what is computed.
EXACT = (
    "run.dtype=float64", "run.batch_size=8", "run.microbatches=4", "model.encoders.audio.config.dropout=0.0",
    "balance.speed={ device_tflops = 1e-6, link_latency_us = 0.0 }",
)  # fmt: skip


@pytest.mark.parametrize(
    ("bad", "mode"),
    [
        pytest.param(bad, mode, marks=() if (bad, mode) == (3, "index") else pytest.mark.slow)
        for mode in ("index", "exchange")
        for bad in (0, 3)
    ],
)
def test_losses_are_those_of_the_steps_as_they_come(tmp_path, bad, mode):
    job = write_tiny_job(tmp_path / "data")
    names = spoil_clips(job.parent, "train-*.wav", bad) if bad else []
    for defer in ("auto", "off"):
        said = run(job, 2, tmp_path / defer, *EXACT, f"balance.mode={mode}", f"balance.defer={defer}")
        assert sum("Left out" in line for line in said[0].splitlines()) == len(names)
    deferred, given = metrics(tmp_path / "auto"), metrics(tmp_path / "off")
    assert losses(tmp_path / "auto") == pytest.approx(losses(tmp_path / "off"), rel=1e-10)
    for key in ("num_examples", "num_targets", "num_tokens", "position", "bad_examples"):
        assert [step[key] for step in deferred] == [step[key] for step in given]
    assert [step["grad_norm"] for step in deferred] == pytest.approx([step["grad_norm"] for step in given], rel=1e-10)
    assert all(step["defer"] is None for step in given)
    for step in deferred:
        decided = step["defer"]
        assert decided["why"].startswith(decided["method"])
        assert min(decided["predicted_s"], key=decided["predicted_s"].get) == decided["method"]
    assert sum(step["defer"]["method"] == "defer" for step in deferred) >= 4
    assert [len(step["left_out"]) for step in deferred] == [len(step["left_out"]) for step in given]


@pytest.mark.slow
def test_a_run_resumed_on_other_ranks_takes_the_same_examples(tmp_path):
    job = write_tiny_job(tmp_path / "data")
    run(job, 2, tmp_path / "a", *EXACT, "checkpoint.every_steps=4")
    whole = metrics(tmp_path / "a")
    stop_after(tmp_path / "a", 4)
    run(job, 1, tmp_path / "a", *EXACT)
    assert losses(tmp_path / "a") == pytest.approx([step["loss"] for step in whole], rel=1e-9)
    assert [step["position"] for step in metrics(tmp_path / "a")] == list(np.arange(8, 72, 8))


@pytest.mark.slow
def test_nothing_is_compared_where_there_is_one_microbatch_or_it_is_not_asked_for(tmp_path):
    job = write_tiny_job(tmp_path / "data")
    for folder, options in (("one", ("run.microbatches=1",)), ("exchange", ("balance.mode=exchange",))):
        run(job, 2, tmp_path / folder, *EXACT, "run.steps=1", *options)
        assert [step["defer"] for step in metrics(tmp_path / folder)] == [None]
