"""Fills inside passes of the backbone run while the rows of its tensor-parallel ranks are on their way."""

from dataclasses import replace

import pytest
import torch

from cli.tiny_job import losses, metrics
from dist.test_bubbles import UNITS, alone  # noqa: F401
from dist.test_executed import traced
from dist.test_planned import DEEPER, plan_of, row_of, run_planned, train_under
from motet.runtime.clock import ActionClock
from motet.schedule import coarse_fills, fillable, parse_action
from motet.schedule.program import Kind
from motet.tensor_parallel import RowParts
from motet.train.checkpoint.contents import name_of
from parity.planned import SAME_TYPES, run_of
from parity.test_tensor_parallel_plans import inside
from ranks import run_ranks

CASE = inside(0, recomputes=True)


def hear(rank, num_ranks):
    """(action, whether rows were on their way as it began) of a step on a rank."""
    run = run_of(CASE, torch.float64, SAME_TYPES)
    batches = run.batches(0, CASE.model())
    heard, on_their_way = [], []
    begin, move = ActionClock.begin, RowParts._move

    def begun(self, action):
        heard.append((str(action), bool(on_their_way)))
        begin(self, action)

    def moved(self, collective, *tensors, is_sum):
        on_their_way.append(collective)
        move(self, collective, *tensors, is_sum=is_sum)
        on_their_way.pop()

    ActionClock.begin, RowParts._move = begun, moved
    run.step.run(batches)
    return heard


def test_fills_inside_passes_run_beside_sums_and_gathers():
    fills = CASE.plan().fills
    before = {fill.action: parse_action(fill.before) for fill in fills if "." in fill.before}
    beside = {name for name, action in before.items() if action.part > 0 and action.kind in (Kind.F, Kind.B)}
    assert len(beside) > 10
    heard = run_ranks(hear, 4)
    for of_rank in heard:
        found = {name: is_beside for name, is_beside in of_rank if name in {fill.action for fill in fills}}
        assert found and found == {name: name in beside for name in found}
    assert {name for of_rank in heard for name, is_beside in of_rank if is_beside and name in beside} == beside


@pytest.mark.slow
def test_a_run_with_fills_inside_passes_trains_as_one_process_does(job, alone, tmp_path, monkeypatch, capsys):  # noqa: F811
    """Its trace and its simulation have the same rows, with parts of passes; it goes on in one process."""
    plan = plan_of(job, ({"image": 2, "audio": 2, "backbone": 1}, {"backbone": 2}), left_over=2)
    plan = replace(plan, units=tuple(replace(unit, tp=2) for unit in UNITS), microbatch_size=1)
    unfilled, encoders = fillable(plan, split=True)
    fills = list(coarse_fills(unfilled.program, encoders))
    # All images of the first rank but those of the first microbatch run inside its first pass.
    fills = [
        replace(fill, before="0F0.1") if fill.action.startswith("2F") and fill.action != "2F0" else fill
        for fill in fills
    ]
    plan = replace(plan, fills=tuple(fills))
    assert sum(fill.before == "0F0.1" for fill in fills) > 1
    run_dir = run_planned(job, tmp_path, plan)
    assert losses(run_dir) == pytest.approx(losses(alone), rel=1e-10)
    found = traced(run_dir)
    for rank in range(4):
        expected = row_of(tmp_path / "plan.json", job, rank, monkeypatch, capsys)
        assert any("F0.3" in name for name in expected)
        assert all([name for name, _, _ in found[rank, step]] == expected for step in range(8))
    resume, resumed = str(run_dir / "checkpoints" / name_of(4)), tmp_path / "resumed"
    train_in_one = [*DEEPER, f"run.dir={resumed}"]
    run_ranks(train_under, 1, str(job), train_in_one, None, resume)
    assert [step["loss"] for step in metrics(resumed)] == pytest.approx(losses(alone)[4:], rel=1e-10)
