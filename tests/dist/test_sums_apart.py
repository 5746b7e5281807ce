"""Sums of encoders in bubbles, in parts of their own, travel while the row goes on."""

from dataclasses import replace

import pytest
import torch

from cli.tiny_job import losses
from dist.test_bubbles import UNITS, alone  # noqa: F401
from dist.test_executed import traced
from dist.test_planned import plan_of, row_of, run_planned
from motet.runtime.clock import ActionClock
from motet.schedule import coarse_fills, fillable, parse_action, planned
from motet.schedule.layout import parts_with_sums
from motet.schedule.program import Kind
from motet.tensor_parallel import RowParts
from parity.planned import SAME_TYPES, run_of
from parity.test_tensor_parallel_plans import inside
from ranks import run_ranks

CASE = inside(38, contents=("image",), batch_size=4)


def hear(rank, num_ranks):
    """(action, how many sums of images were on their way as it began) of a step on a rank, and whose images it has."""
    run = run_of(CASE, torch.float64, SAME_TYPES)
    batches, rows = run.batches(0, CASE.model()), run.step.model.encoders["image"].row_parts
    heard, on_their_way = [], []
    begin, move = ActionClock.begin, RowParts._move

    def begun(self, action):
        heard.append((action, len(on_their_way)))
        begin(self, action)

    def moved(self, collective, *tensors, is_sum):
        on_their_way.extend([collective] * (self is rows))
        move(self, collective, *tensors, is_sum=is_sum)
        del on_their_way[len(on_their_way) - (self is rows) :]

    ActionClock.begin, RowParts._move = begun, moved
    run.step.run(batches)
    has_images = {number for number, batch in enumerate(batches) if len(batch.media.get("image", ((), ()))[1])}
    return [(str(action), count) for action, count in heard], has_images


def counts_of(row, stages, has_images):
    """How many sums are on their way as each action of a row begins: from the part before a sum to the part behind."""
    on_their_way = set()
    for action in row:
        yield len(on_their_way)  # A part waits for the sum before it once it has begun.
        stage, key = stages[action.stage], action[:3]
        if stage.has_sums and "image" in stage.layers and action.part >= 0 and action.part % 2 == 0:
            on_their_way.discard(key)
            if action.part < stage.num_parts - 1 and action.microbatch in has_images:
                on_their_way.add(key)


def test_the_row_goes_on_while_sums_are_on_their_way():
    program = planned(CASE.plan())
    heard = run_ranks(hear, 4)
    num_beside = 0
    for rank, (of_rank, has_images) in enumerate(heard):
        row = [parse_action(name) for name, _ in of_rank]
        assert [count for _, count in of_rank] == list(counts_of(row, program.stages, has_images)), rank
        num_beside += sum(count > 0 and action.stage < 2 for action, (_, count) in zip(row, of_rank))
    assert num_beside > 4, "passes of the backbone run beside sums"


@pytest.mark.slow
def test_a_run_with_sums_apart_trains_as_one_process_does(job, alone, tmp_path, monkeypatch, capsys):  # noqa: F811
    """Its trace and its simulation have the same rows, with sums in them."""
    plan = plan_of(job, ({"image": 2, "audio": 2, "backbone": 1}, {"backbone": 2}), left_over=2)
    plan = replace(plan, units=tuple(replace(unit, tp=2) for unit in UNITS), microbatch_size=1)
    unfilled, encoders = fillable(plan)
    stages, fills = planned(plan).stages, []
    for fill in coarse_fills(unfilled.program, encoders):
        action = parse_action(fill.action)
        num_parts = parts_with_sums(stages[action.stage], plan.model)
        assert num_parts > 2
        # Forward passes of the first encoder on the first rank wait with their end until the backbone has begun.
        is_late = action.stage == 2 and action.kind is Kind.F and action.microbatch > 0
        for part in range(num_parts):
            before = "0F1" if is_late and part == num_parts - 1 and fill.before == "0F0" else fill.before
            fills.append(replace(fill, action=str(action._replace(part=part)), before=before))
    plan = replace(plan, fills=tuple(fills))
    run_dir = run_planned(job, tmp_path, plan)
    assert losses(run_dir) == pytest.approx(losses(alone), rel=1e-10)
    found = traced(run_dir)
    for rank in range(4):
        expected = row_of(tmp_path / "plan.json", job, rank, monkeypatch, capsys)
        assert any("F0.1" in name for name in expected)
        assert all([name for name, _, _ in found[rank, step]] == expected for step in range(8))
