"""`run.profile_steps`: a trace of each rank and named step, with its operators under its actions."""

import json

import pytest

from cli.tiny_job import write_tiny_job
from dist.test_planned import said_under
from motet.train.recipe.recipe import RunConfig
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
