"""`motet train RECIPE --plan PLAN.json` with encoders in the backbone's bubbles: losses, actions, resuming."""

import sys
from dataclasses import replace

import pytest

from cli.tiny_job import losses, metrics
from dist.test_executed import traced
from dist.test_planned import DEEPER, plan_of, row_of, run_planned, train_under
from motet.cli import main
from motet.core.plan import Unit
from motet.core.plan_file import read_plan
from motet.schedule import coarse_fills, fillable, parse_action, planned
from motet.train.checkpoint.contents import name_of
from ranks import run_ranks

UNITS = (
    Unit("llm", ({"backbone": 1}, {"backbone": 2}), pp=2, zero=0),
    Unit("image", ({"image": 2},), dp=2, zero=0),
    Unit("audio", ({"audio": 1}, {"audio": 1}), pp=2, zero=0),
)


def block_by_block(plan):
    """The plan with the image encoder's passes in two parts, which are blocks."""
    unfilled, encoders = fillable(plan)
    fills = []
    for fill in coarse_fills(unfilled.program, encoders):
        is_image = planned(plan).stages[parse_action(fill.action).stage].unit.name == "image"
        parts = (".0", ".1") if is_image else ("",)
        fills += [replace(fill, action=fill.action + part) for part in parts]
    return replace(plan, fills=tuple(fills))


@pytest.fixture(scope="module")
def alone(job, tmp_path_factory):
    """The run of one process."""
    run_dir = tmp_path_factory.mktemp("alone")
    run_ranks(train_under, 1, str(job), [*DEEPER, f"run.dir={run_dir}"], None)
    return run_dir


def test_encoders_in_bubbles_train_as_one_process_does(job, alone, tmp_path, monkeypatch, capsys):
    """Each pipeline of the image encoder reads the images of its microbatches; a run goes on in one process."""
    resumed = tmp_path / "resumed"
    plan = replace(plan_of(job, ({"image": 2, "audio": 2, "backbone": 1}, {"backbone": 2})), units=UNITS)
    plan = block_by_block(plan)
    run_dir = run_planned(job, tmp_path, plan)
    assert losses(run_dir) == pytest.approx(losses(alone), rel=1e-10)
    norms = [[step["grad_norm"] for step in metrics(each)] for each in (run_dir, alone)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-10)
    found = traced(run_dir)
    for rank in range(2):
        expected = row_of(tmp_path / "plan.json", job, rank, monkeypatch, capsys)
        assert any(name.endswith("F0.1") for name in expected) == (rank == 0)
        assert all([name for name, _, _ in found[rank, step]] == expected for step in range(8))
    resume = str(run_dir / "checkpoints" / name_of(4))
    run_ranks(train_under, 1, str(job), [*DEEPER, f"run.dir={resumed}"], None, resume)
    assert [step["loss"] for step in metrics(resumed)] == pytest.approx(losses(alone)[4:], rel=1e-10)


@pytest.mark.slow
def test_bubbles_beside_ranks_that_share_sequences_train_as_one_process_does(job, alone, tmp_path):
    """Two ranks have the items of each encoder pipeline, and give each other rows; a run goes on under another `cp`."""
    plan = plan_of(job, ({"image": 2, "audio": 2, "backbone": 1}, {"backbone": 2}), left_over=2)
    shared = replace(plan, units=tuple(replace(unit, cp=2) for unit in UNITS))
    run_dir = run_planned(job, tmp_path, shared)
    assert losses(run_dir) == pytest.approx(losses(alone), rel=1e-10)
    (again := tmp_path / "again").mkdir()
    resume = str(run_dir / "checkpoints" / name_of(4))
    resumed = run_planned(job, again, replace(plan, units=UNITS), resume=resume)
    assert [step["loss"] for step in metrics(resumed)] == pytest.approx(losses(alone)[4:], rel=1e-10)


@pytest.mark.slow
def test_bubbles_filled_by_step_train_as_one_process_does(job, alone, tmp_path):
    """What a rank reads, sends and runs changes from step to step."""
    plan = plan_of(job, ({"image": 2, "audio": 2, "backbone": 1}, {"backbone": 2}))
    where = replace(plan.cluster, device=replace(plan.cluster.device, overlaps=True))
    plan = replace(plan, cluster=where, units=UNITS, microbatch_size=1, filling="by_step")
    run_dir = run_planned(job, tmp_path, block_by_block(plan))
    assert losses(run_dir) == pytest.approx(losses(alone), rel=1e-10)
    rows = traced(run_dir)
    for rank in range(2):
        assert len({tuple(name for name, _, _ in rows[rank, step]) for step in range(8)}) > 4
    taken = [{(name, microbatch) for name, _, microbatch in rows[0, step] if "F" in name} for step in range(8)]
    assert any(one != taken[0] for one in taken[1:])


@pytest.mark.slow
def test_what_the_planner_puts_into_bubbles_trains(job, alone, tmp_path, monkeypatch, capsys):
    """Two encoders with pipelines of their own, in blocks, filled by step; float32, for which the device has a peak."""
    file, run_dir, overrides = tmp_path / "plan.json", tmp_path / "run", [*DEEPER, "run.dtype=float32"]
    pins = ["strategy=bubble-filling", "pp=2", "microbatch_size=1", "filling=by_step", "order=given"]
    words = [word for option, of in (("--set", overrides), ("--pin", pins)) for each in of for word in (option, each)]
    where = ["--cluster", "h100", "--nodes", "1", "--ranks-per-node", "2"]
    monkeypatch.setattr(sys, "argv", ["motet", "plan", str(job), *words, *where, "--trainable", "--out", str(file)])
    with pytest.raises(SystemExit) as exit_:
        main()
    assert not exit_.value.code and "Each step decides by its lengths" in " ".join(capsys.readouterr().out.split())
    plan = read_plan(file)
    assert plan.filling == "by_step" and any("." in fill.action for fill in plan.fills)
    assert [unit.name for unit in plan.units] == ["backbone", "image", "audio"]
    run_ranks(train_under, 2, str(job), [*overrides, f"run.dir={run_dir}"], str(file))
    assert losses(run_dir) == pytest.approx(losses(alone), rel=1e-3)
