"""What `--actions RANK` prints is the row that the rank's executor walks, with its times, for every strategy."""

import numpy as np
import pytest

from motet.core.errors import UserError
from motet.cost.source import cost_model
from motet.schedule import Kind, executed_program, parse_action, planned
from motet.schedule.coordinates import coordinates
from motet.schedule.layout import Layout
from motet.simulate.filling.step_filler import StepFiller
from motet.simulate.predict.predict import assign_batch, predict_assigned
from motet.simulate.show.rank_actions import rank_actions
from unit.simulate.filling.filled_steps import FILLED, step_of
from unit.simulate.jobs import PLANS, Linear, colocated, lengths


def predicted(made):
    cost = Linear(made.cluster)
    return predict_assigned(made, planned(made), assign_batch(made, lengths(made.batch_size), cost), cost)


def used(made):
    return sorted({unit.first_rank + rank for unit in made.units for rank in range(unit.num_ranks)})


@pytest.mark.parametrize("name", PLANS)
def test_of_every_strategy_each_rank_prints_its_row(name):
    made = PLANS[name]
    prediction = predicted(made)
    program = executed_program(made, prediction.present)
    for rank in used(made):
        heading, *lines = rank_actions(made, prediction, rank)
        row = program.actions[coordinates(Layout(made), rank).program_rank]
        assert heading.startswith(f"# rank {rank}, {len(row)} actions")
        assert [parse_action(line.split()[0]) for line in lines] == list(row)
        for line in lines:
            _, start_ms, end_ms, module = line.split()
            assert 0 <= float(start_ms) <= float(end_ms) <= 1e3 * prediction.step_s + 1e-3
            assert module in {stage.module for stage in program.stages}


def test_a_rank_without_work_is_refused():
    made = PLANS["chain"]
    with pytest.raises(UserError, match="--actions 99: no unit of the plan is on rank 99: 'all' is on 0 to 5"):
        list(rank_actions(made, predicted(made), 99))


def test_a_pass_under_fsdp_lasts_from_its_first_unit_to_its_last():
    made = colocated(balance="per_phase", unit={"zero": 3})
    prediction = predicted(made)
    timeline = prediction.timeline
    assert {"GATHER", "REDUCE"} < set(timeline.kind)
    _, *lines = rank_actions(made, prediction, 1)
    for line in lines:
        action = parse_action(line.split()[0])
        assert action.kind not in (Kind.GATHER, Kind.GATHER_B, Kind.REDUCE) and action.part < 0
        own = np.array([span.startswith(f"{action}.") or span == str(action) for span in timeline.action])
        assert float(line.split()[1]) == pytest.approx(1e3 * timeline.start_s[own].min(), abs=1e-4)
        assert float(line.split()[2]) == pytest.approx(1e3 * timeline.end_s[own].max(), abs=1e-4)


def test_where_each_step_fills_bubbles_the_rows_are_those_of_the_step():
    made = FILLED["two encoders with pipelines of their own"]
    step, own, cost = step_of(made, np.random.default_rng(0)), planned(made), cost_model(made.cluster, made.precision)
    prediction, decided = predict_assigned(made, own, step, cost), StepFiller(own).program(step, island=0).program
    assert prediction.program == decided != own.program
    for rank in used(made):
        _, *lines = rank_actions(made, prediction, rank)
        assert tuple(parse_action(line.split()[0]) for line in lines) == decided.actions[rank]
