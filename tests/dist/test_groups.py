"""Training on groups of examples: the same losses on any number of ranks, and after a resume."""

import json

import numpy as np
import pytest

from cli.tiny_job import losses, metrics, write_tiny_job
from dist.test_bad_media import spoil_clips
from dist.test_resume import run, stop_after

EXACT = ("run.dtype=float64", "run.batch_size=4", "model.encoders.audio.config.dropout=0.0", "data.group=auto")
TOTALS = ("num_examples", "num_targets", "num_tokens", "position")


@pytest.fixture(scope="module")
def alone(job, tmp_path_factory):
    """The steps of one process, which has four microbatches."""
    folder = tmp_path_factory.mktemp("alone")
    run(job, 1, folder, *EXACT, "balance.phases=off")
    return metrics(folder)


@pytest.mark.parametrize("phases", [pytest.param("off", marks=pytest.mark.slow), "all"])
def test_two_ranks_have_the_losses_of_one(job, alone, tmp_path, phases):
    (said, silent) = run(job, 2, tmp_path / "a", *EXACT, f"balance.phases={phases}")
    assert "Groups of data.group: at most " in said and "No microbatch of a rank is larger than " in said
    assert "Groups" not in silent
    steps = metrics(tmp_path / "a")
    for key in ("loss", "grad_norm"):
        assert [step[key] for step in steps] == pytest.approx([step[key] for step in alone], rel=1e-10)
    assert [[step[key] for key in TOTALS] for step in steps] == [[step[key] for key in TOTALS] for step in alone]
    assert all(sum(step["balance"]["methods"].values()) == 2 for step in steps)
    assert len({step["num_examples"] for step in steps}) > 1, "a step is a number of groups, not of examples"


@pytest.mark.slow
@pytest.mark.parametrize(("first", "second"), [(2, 2), (1, 2)])
def test_a_run_stopped_inside_an_epoch_goes_on_with_the_same_examples(job, alone, tmp_path, first, second):
    run(job, first, tmp_path / "a", *EXACT, "checkpoint.every_steps=4")
    stop_after(tmp_path / "a", 4)
    assert 0 < metrics(tmp_path / "a")[3]["position"] % 40 < 40
    run(job, second, tmp_path / "a", *EXACT)
    assert losses(tmp_path / "a") == pytest.approx([step["loss"] for step in alone], rel=1e-9)
    assert [step["position"] for step in metrics(tmp_path / "a")] == [step["position"] for step in alone]


def test_other_caps_and_ranks_that_cannot_share_the_groups_are_refused(job, tmp_path):
    run(job, 1, tmp_path / "a", *EXACT, "run.steps=1")
    caps = json.loads(next((tmp_path / "a/checkpoints").glob("*/state.json")).read_text())["group"]
    assert list(caps) == ["image", "audio", "backbone"]
    stated = "{ image = 40, audio = 90, backbone = 120 }"
    (sentence,) = run(job, 1, tmp_path / "a", *EXACT, f"data.group={stated}")
    assert f"was written with data.group = {{ image = {caps['image']}," in sentence
    assert f"and this run is with data.group = {stated}, which orders the examples anew" in sentence
    (sentence,) = run(job, 1, tmp_path / "a", *EXACT[:-1], "run.steps=2")
    assert "and this run is without data.group" in sentence
    said = run(job, 3, tmp_path / "a", *EXACT)
    assert said[0] == said[1] and "is a number of groups with data.group, and each of the 3 ranks takes as m" in said[0]


def test_an_example_above_a_cap_is_a_group_alone_and_named(job, tmp_path):
    (said,) = run(job, 1, tmp_path / "a", *EXACT[:-1], "data.group={image=20,audio=70,backbone=60}", "run.steps=1")
    assert "Above a cap of data.group, each a group of its own: " in said
    assert "train.jsonl, line " in said and "larger than 36 of image, 70 of audio and 60 of backbone" in said


@pytest.mark.slow
def test_bad_examples_leave_their_group_on_all_ranks_alike(tmp_path):
    job = write_tiny_job(tmp_path / "data")
    names = spoil_clips(job.parent, "train-*.wav", 3)
    for count in (1, 2):
        said = run(job, count, tmp_path / str(count), *EXACT)
        assert [said[0].count(name) for name in names] == [1] * len(names)
    assert losses(tmp_path / "2") == pytest.approx(losses(tmp_path / "1"), rel=1e-10)


@pytest.mark.slow
def test_what_is_logged_of_padding_and_of_waiting(job, tmp_path):
    run(job, 2, tmp_path / "a", *EXACT, "balance.phases=off", "fsdp.recompute=true", "run.steps=3")
    for step in metrics(tmp_path / "a"):
        assert 0 < step["mfu"] < step["hfu"]
        assert 0 <= step["padding"] < 1
        for name, phase in step["phases"].items():
            assert 0 <= phase["dist_ratio"] == phase["dist_ratio_before"] < 1
            assert phase["pad_ratio"] == 0 or name == "audio"
        assert (step["padding"] > 0) == (step["phases"]["audio"]["pad_ratio"] > 0)
    summary = json.loads((tmp_path / "a" / "summary.json").read_text())
    assert 0 < summary["mfu"] < summary["hfu"]
    times = np.array([[step["step_s"], step["step_s"] * step["hfu"]] for step in metrics(tmp_path / "a")]).sum(axis=0)
    assert summary["hfu"] == pytest.approx(times[1] / times[0])
    assert "HFU, with recomputation and padding" in (tmp_path / "a" / "report.html").read_text()
