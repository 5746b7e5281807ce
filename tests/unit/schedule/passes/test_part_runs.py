"""Neighbouring parts of a pass as one action, and back."""

from itertools import pairwise

import pytest

from motet.schedule import Action, Kind, one_f_one_b, parse_action, planned, split_parts
from motet.schedule.passes.part_runs import PartRun, in_parts, joined_parts, with_runs
from unit.schedule.plans import PLANS
from unit.simulate.filling.filled_steps import FILLED


@pytest.mark.parametrize("plan", [*PLANS.values(), *FILLED.values()])
def test_what_is_joined_is_taken_apart_again(plan):
    program = planned(plan).program
    joined, parts = joined_parts(program)
    assert in_parts(joined, parts).actions == tuple(program.actions)
    for row in joined.actions:
        assert all(first[:3] != second[:3] or first.part < second.part - 1 for first, second in pairwise(row))


def test_parts_of_a_pass_that_are_apart_keep_their_order():
    program = split_parts(one_f_one_b(1, 2), 0, 3, 1)
    row = [parse_action(text) for text in ["0F0.0", "0F0.1", "0F1.0", "0F0.2", "0F1.1", "0F1.2", "0B0", "0B1"]]
    joined, parts = joined_parts(program.with_rows(lambda _: row))
    assert " ".join(map(str, joined.actions[0])) == "0F0.0 0F1.0 0F0.1 0F1.1 0B0 0B1"
    assert parts[Action(0, Kind.F, 0, 0)] == (row[0], row[1])


def test_runs_stand_where_they_are_put():
    runs = [
        PartRun(0, (Action(1, Kind.F, 0, 0), Action(1, Kind.F, 0, 1))),
        PartRun(1, (Action(1, Kind.F, 0, 2),)),
        PartRun(2, (Action(1, Kind.B, 0),)),
    ]
    microbatches, rows, parts = with_runs(one_f_one_b(1, 1), [runs])
    assert " ".join(map(str, rows[0])) == "1F0.0 0F0 1F0.1 0B0 1B0"
    assert microbatches == {1: {0}}
    assert [len(parts[action]) for action in rows[0] if action.stage == 1] == [2, 1, 1]
