"""A Program's text gives back the Program, and what is malformed is named by its line."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from motet.core.errors import UserError
from motet.schedule import (
    Action,
    Kind,
    Program,
    Stage,
    add_communication,
    data_parallel,
    dumps,
    loads,
    one_f_one_b,
    parse_action,
)
from unit.schedule.programs import programs

numbers = st.integers(-1, 12)
actions = st.builds(Action, st.integers(0, 12), st.sampled_from(Kind), numbers, numbers, numbers)
stages = st.builds(Stage, st.integers(0, 12), st.text(), st.integers(-1, 5), meets=st.booleans())
any_program = st.builds(
    Program,
    st.lists(stages).map(tuple),
    st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12))).map(tuple),
    st.lists(st.lists(actions).map(tuple)).map(tuple),
    st.integers(0, 9),
)


@given(any_program)
def test_round_trip(program):
    assert loads(dumps(program)) == program


@given(programs())
def test_round_trip_of_schedules(program):
    assert loads(dumps(add_communication(program))) == add_communication(program)


@given(actions)
def test_an_action_is_what_it_prints(action):
    assert parse_action(str(action)) == action


def test_text_is_readable():
    assert dumps(one_f_one_b(2, 1)) == (
        'microbatches 1\nstage 0 rank 0 "stage"\nstage 1 rank 1 "stage"\nedge 0>1\nrank 0: 0F0 0B0\nrank 1: 1F0 1B0\n'
    )


def test_data_parallel_text_has_the_norm():
    program = data_parallel({"image": True, "backbone": True}, 2, 1)
    assert "rank 1: 2F0 3F0 3B0 2B0 3NORM 3STEP\n" in dumps(program)
    assert loads(dumps(program)) == program


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("0F0", "9" * 5000 + "F0", "Line 5 .*has a number that is too long"),
        ("0F0", "0X0", 'Line 5 .*"0X0" is no action; one is as "2F0"'),
        ("1B0", "1B0<3", 'Line 6 .*"1B0<3" must be written "1B0>3"'),
        ("0F0", "00F0", 'Line 5 .*"00F0" must be written "0F0"'),
        ("stage 1", "stage 2", "Line 3 .*stage 2 stands where stage 1 must"),
        ("rank 1:", "rank 0:", "Line 6 .*rank 0 stands where rank 1 must"),
        ("edge 0>1", "edge 0-1", 'Line 4 .*"edge 0-1" is not understood'),
        ('"stage"\nedge', '"st"age"\nedge', "Line 3 .*is no JSON string"),
        ("microbatches 1\n", "", "how many microbatches"),
        ("microbatches 1\n", "microbatches 1\nmicrobatches 2\n", "Line 2 .*a second time"),
    ],
)
def test_malformed_text_is_named_by_its_line(old, new, named):
    text = dumps(one_f_one_b(2, 1))
    assert old in text
    with pytest.raises(UserError, match=named):
        loads(text.replace(old, new, 1))
