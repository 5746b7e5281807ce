"""`run.profile_steps`: a trace of each rank and named step, with its operators under its actions."""

import errno
import json

import pytest
from torch.profiler import profile

from cli.tiny_job import losses, write_tiny_job
from dist.test_planned import said_under
from dist.test_resume import run, train_rank
from motet.train.recipe.run_config import RunConfig
from ranks import run_ranks


def test_each_rank_writes_the_operators_of_its_actions(tmp_path):
    job, run_dir = write_tiny_job(tmp_path / "data"), tmp_path / "run"
    overrides = [f"run.dir={run_dir}", "run.steps=2", "run.profile_steps=2", "data.heldout=[]"]
    run_ranks(said_under, 2, str(job), overrides, None)
    names = [f"step-00000002-rank-{rank}.json" for rank in range(2)]
    assert sorted(path.name for path in (run_dir / "profile").iterdir()) == names
    for rank, name in enumerate(names):
        events = [
            event for event in json.loads((run_dir / "profile" / name).read_text())["traceEvents"] if "dur" in event
        ]
        actions = {event["name"]: event for event in events if event["cat"] == "user_annotation"}
        backbone = 3 * rank + 2
        first, last = actions[f"{backbone}F0"], actions[f"{backbone}STEP"]
        assert first["ts"] < actions[f"{backbone}B0"]["ts"] < last["ts"]
        inside = (event for event in events if first["ts"] <= event["ts"] <= first["ts"] + first["dur"])
        assert any(event["name"] == "aten::mm" or event["name"] == "aten::addmm" for event in inside)


@pytest.mark.parametrize("steps", [[0], [1, 9]])
def test_a_step_that_does_not_come_is_refused(steps):
    with pytest.raises(ValueError, match="and the steps are 1 to 8"):
        RunConfig(dir="run", steps=8, batch_size=1, profile_steps=steps)


def train_with_a_full_disk(rank, num_ranks, recipe, overrides):
    def fails(self, path):
        raise OSError(errno.ENOSPC, "No space left on device", path)

    whole, profile.export_chrome_trace = profile.export_chrome_trace, fails
    try:
        return train_rank(rank, num_ranks, recipe, overrides, "auto")
    finally:
        profile.export_chrome_trace = whole


@pytest.mark.slow
def test_a_trace_that_cannot_be_written_loses_no_step(tmp_path):
    """The step has changed the weights, so what is saved then has it, and the run does not take it twice."""
    job, overrides = write_tiny_job(tmp_path / "data"), ["run.steps=4", "optimizer.warmup_steps=0"]
    run(job, 2, tmp_path / "whole", *overrides)
    stopped = [f"run.dir={tmp_path / 'run'}", "data.heldout=[]", *overrides, "run.profile_steps=2"]
    for said in run_ranks(train_with_a_full_disk, 2, str(job), stopped):
        assert "No space left on device; step 2 is saved" in said
    run(job, 2, tmp_path / "run", *overrides)
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")
