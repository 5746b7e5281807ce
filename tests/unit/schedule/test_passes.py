"""Communication matches and cannot deadlock, recomputation precedes backward, parts are whole passes in order."""

import pytest
from hypothesis import given

from motet.core.errors import ArgumentError
from motet.schedule import (
    Action,
    Kind,
    Program,
    ScheduleError,
    Stage,
    add_communication,
    add_recompute,
    gpipe,
    interleaved_1f1b,
    one_f_one_b,
    split_parts,
    validate,
    zb_h1,
)
from unit.schedule.executor import execute, makespan, seconds_of
from unit.schedule.programs import dag, programs


@given(programs())
def test_communication_is_complete_and_costs_nothing_by_itself(program):
    sent = add_communication(program)
    validate(sent)
    assert execute(sent) == execute(program)
    assert add_communication(sent) == sent
    num_crossing = sum(program.stages[a].rank != program.stages[b].rank for a, b in program.edges)
    num_sends = sum(action.kind is Kind.SEND_F for row in sent.actions for action in row)
    assert num_sends == num_crossing * program.num_microbatches
    for row, bare in zip(sent.actions, program.actions):
        assert [action for action in row if "_" not in action.kind] == list(bare)


@given(programs())
def test_ranks_that_block_do_not_deadlock(program):
    sent = add_communication(program, blocking=True)
    validate(sent)
    validate(sent, blocking=True)
    assert add_communication(sent, blocking=True) == sent


@given(programs())
def test_ranks_whose_collectives_hold_up_compute_do_not_deadlock(program):
    sent = add_communication(program, holds_up=True)
    validate(sent)
    validate(sent, holds_up=True)
    assert add_communication(sent, holds_up=True) == sent


def test_1f1b_with_sends_that_block_needs_its_own_order():
    with pytest.raises(ScheduleError, match="Deadlock"):
        validate(add_communication(one_f_one_b(2, 4)), blocking=True)


def test_sends_follow_passes_and_receives_precede_them():
    program = add_communication(one_f_one_b(2, 2))
    assert str(program).split("\n") == [
        "rank 0: 0F0 0SEND_F0>1 0F1 0SEND_F1>1 0RECV_B0<1 0B0 0RECV_B1<1 0B1",
        "rank 1: 1RECV_F0<0 1F0 1B0 1SEND_B0>0 1RECV_F1<0 1F1 1B1 1SEND_B1>0",
    ]


def test_two_encoders_send_to_one_stage_and_a_frozen_one_gets_no_gradient():
    program = add_communication(dag([0, 1, 2], [(0, 2), (1, 2)], 1, frozen=(0,)))
    assert str(program).split("\n") == [
        "rank 0: 0F0 0SEND_F0>2",
        "rank 1: 1F0 1SEND_F0>2 1RECV_B0<2 1B0",
        "rank 2: 2RECV_F0<0 2RECV_F0<1 2F0 2B0 2SEND_B0>1",
    ]


def test_an_exchange_takes_the_place_of_sends():
    actions = (
        (Action(0, Kind.F, 0), Action(0, Kind.EXCHANGE_F, 0, peer=1)),
        (Action(1, Kind.F, 0), Action(1, Kind.B, 0)),
    )
    program = Program((Stage(0), Stage(1)), ((0, 1),), actions, 1)
    assert add_communication(program) == program


def test_communication_of_a_program_that_deadlocks_is_refused():
    program = gpipe(2, 1)
    swapped = Program(program.stages, program.edges, (program.actions[0][::-1], program.actions[1]), 1)
    with pytest.raises(ArgumentError, match="can never start"):
        add_communication(swapped)


def test_recomputation_stands_before_backward_and_its_receive():
    program = add_recompute(add_communication(one_f_one_b(2, 2)), [0])
    assert str(program).split("\n")[0].endswith("0R0 0RECV_B0<1 0B0 0R1 0RECV_B1<1 0B1")
    assert program == add_communication(add_recompute(one_f_one_b(2, 2), [0]))
    assert add_recompute(program, [0]) == program
    validate(program)


def test_recomputation_adds_a_forward_pass():
    for schedule in (one_f_one_b, zb_h1):
        program = add_recompute(schedule(3, 5), range(3))
        validate(program)
        execute(program)
    assert makespan(add_recompute(gpipe(2, 4), [0, 1]), seconds_of(1, 2)) == (1 + 4) + 4 * 3 + 2


def test_recomputation_where_there_is_no_backward_is_refused():
    for stage in (0, 7):
        with pytest.raises(ArgumentError, match=f"stage {stage} has no backward"):
            add_recompute(gpipe(2, 2, has_backward=[False, True]), [1, stage])


def test_parts_are_whole_passes_in_order():
    program = split_parts(add_recompute(zb_h1(2, 2), [1]), 1, 2, 3)
    assert program.actions[0] == zb_h1(2, 2).actions[0]
    row = str(program).split("\n")[1]
    assert row.startswith("rank 1: 1F0.0 1F0.1 1R0.0 1R0.1 1I0.0 1I0.1 1I0.2 1F1.0 1F1.1 1R1.0")
    assert row.endswith("1W0.0 1W0.1 1W0.2 1W1.0 1W1.1 1W1.2")
    validate(program)
    assert split_parts(program, 1, 2, 3) == program
    assert split_parts(gpipe(2, 2), 0, 1, 1) == gpipe(2, 2)
    sent = add_communication(program)
    validate(sent)
    assert "1RECV_F0<0 1F0.0 1F0.1 1R0.0" in str(sent) and "1I0.2 1SEND_B0>0" in str(sent)


def test_wrong_parts_are_refused():
    halves = split_parts(interleaved_1f1b(2, 2, 2), 3, 2, 2)
    for call, named in [
        (lambda: split_parts(halves, 3, 4, 2), "3F0 is in 2 parts already, not 4"),
        (lambda: split_parts(halves, 3, 2, 1), "3B0 is in 2 parts already, not 1"),
        (lambda: split_parts(halves, 4, 1, 1), "no stage 4"),
        (lambda: split_parts(halves, 0, 0, 1), "the least is 1"),
        (lambda: split_parts(gpipe(2, 2, has_backward=[False, True]), 0, 2, 2), "stage 0 has no backward"),
    ]:
        with pytest.raises(ArgumentError, match=named):
            call()
