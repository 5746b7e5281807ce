"""The native core places messages as the readable reference does, and leaves to it what it does not understand."""

import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from motet.core.errors import ArgumentError
from motet.schedule import (
    Action,
    Kind,
    Program,
    Stage,
    add_communication,
    add_recompute,
    gpipe,
    one_f_one_b,
    split_parts,
)
from motet.schedule.passes.communication import _native_rows, place_messages
from unit.schedule.generated import GENERATED
from unit.schedule.programs import programs

MODES = ({}, {"blocking": True}, {"holds_up": True})


def check(program):
    for mode in MODES:
        wanted = place_messages(program, **mode)
        assert _native_rows(program, mode.get("blocking", False), mode.get("holds_up", False)) == wanted.actions
        assert add_communication(program, **mode) == wanted


@pytest.mark.parametrize("name", GENERATED)
def test_messages_of_every_schedule(name):
    check(GENERATED[name])


@given(program=programs(), num_parts=st.integers(1, 3), data=st.data())
def test_messages_of_any_program(program, num_parts, data):
    stages = st.integers(0, program.num_stages - 1)
    made = {action.stage for row in program.actions for action in row if action.kind in (Kind.B, Kind.I)}
    if made and data.draw(st.booleans()):
        program = add_recompute(program, [data.draw(st.sampled_from(sorted(made)))])
    stage = data.draw(stages)
    check(split_parts(program, stage, num_parts, num_parts if stage in made else 1))


def test_an_exchange_takes_the_place_of_messages_in_the_native_core_too():
    actions = (
        (Action(0, Kind.F, 0), Action(0, Kind.EXCHANGE_F, 0, peer=1), Action(0, Kind.F, 1)),
        (Action(1, Kind.F, 0), Action(1, Kind.F, 1)),
    )
    program = Program((Stage(0), Stage(1)), ((0, 1),), actions, 2)
    check(program)
    assert [action.microbatch for action in add_communication(program).actions[0] if action.kind is Kind.SEND_F] == [1]


def test_new_actions_are_actions():
    sent = add_communication(one_f_one_b(2, 300)).actions[0]
    assert all(type(action) is Action and type(action.kind) is Kind for action in sent)
    assert sent[1] == Action(0, Kind.SEND_F, 0, peer=1) and hash(sent[1]) == hash(Action(0, Kind.SEND_F, 0, peer=1))
    assert str(sent[-2]) == "0RECV_B299<1"


@pytest.mark.parametrize("row", [gpipe(2, 1).actions[0][::-1], (Action(0, Kind.F, 0), Action(0, Kind.F, 0, part=2))])
def test_what_the_native_core_does_not_understand_is_left_to_the_reference(row):
    program = gpipe(2, 1)
    program = replace(program, actions=(row, program.actions[1]))
    assert _native_rows(program, False, False) is None
    with pytest.raises((ArgumentError, KeyError)):
        add_communication(program)


def test_without_the_native_core_the_reference_places_messages():
    code = """
import sys
sys.modules["motet.schedule._communication"] = None
from motet.schedule import add_communication, one_f_one_b
assert str(add_communication(one_f_one_b(2, 1))).startswith("rank 0: 0F0 0SEND_F0>1 0RECV_B0<1 0B0")
"""
    subprocess.run([sys.executable, "-c", code], check=True)
