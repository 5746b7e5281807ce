"""Wrong Programs are refused, with a sentence and the place; what is not refused can be executed."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from motet.core.errors import ArgumentError, UserError
from motet.schedule import (
    Action,
    Kind,
    Program,
    ScheduleError,
    Stage,
    add_communication,
    add_recompute,
    data_parallel,
    gpipe,
    high_water,
    loads,
    one_f_one_b,
    split_parts,
    validate,
    zb_h1,
)
from unit.schedule.executor import execute
from unit.schedule.programs import dag, programs


def changed(program, rank, row):
    return replace(program, actions=(*program.actions[:rank], tuple(row), *program.actions[rank + 1 :]))


def edited(program, *edits):
    """The Program whose text has each `old` replaced by `new`."""
    lines = str(program)
    for old, new in edits:
        assert old in lines
        lines = lines.replace(old, new, 1)
    header = f"microbatches {program.num_microbatches}\n"
    return replace(program, actions=loads(header + lines).actions)


@st.composite
def mutants(draw):
    """A valid Program with one action dropped, doubled, moved, swapped with another, or changed."""
    program = draw(programs())
    if draw(st.booleans()):
        program = add_communication(program)
    if draw(st.booleans()):
        program = add_recompute(program, [program.num_stages - 1])
    rank = draw(st.sampled_from([rank for rank, row in enumerate(program.actions) if row]))
    row = list(program.actions[rank])
    places = st.integers(0, len(row) - 1)
    place, other = draw(places), draw(places)
    match draw(st.sampled_from(["drop", "double", "move", "swap", "rank", "field"])):
        case "drop":
            del row[place]
        case "double":
            row.insert(other, row[place])
        case "move":
            row.insert(other, row.pop(place))
        case "swap":
            row[place], row[other] = row[other], row[place]
        case "rank":
            moved, to = row.pop(place), draw(st.integers(0, program.num_ranks - 1))
            target = row if to == rank else [*program.actions[to]]
            target.append(moved)
            program = changed(program, to, target)
        case "field":
            name = draw(st.sampled_from(["stage", "microbatch", "part", "peer"]))
            row[place] = row[place]._replace(**{name: draw(st.integers(-1, 7))})
    return changed(program, rank, row)


@given(mutants())
def test_a_wrong_program_is_refused_or_still_right(program):
    if error := refusal(program):
        assert ">>" in error.grid and str(error) == f"{error.sentence}\n{error.grid}"
        assert error.sentence.endswith(".") and "\n" not in error.sentence
    else:
        _, end = execute(whole(program))
        assert {action[:3] for action in end if action.kind is Kind.F} == {
            (stage, Kind.F, m) for stage in range(program.num_stages) for m in range(program.num_microbatches)
        }


def whole(program):
    """A pass in a single part is as good as one that is whole."""
    rows = (tuple(action._replace(part=-1) for action in row) for row in program.actions)
    return replace(program, actions=tuple(rows))


def refusal(program):
    try:
        validate(program)
    except ScheduleError as error:
        return error


PLAIN = one_f_one_b(2, 2)
SENT = add_communication(PLAIN)


@pytest.mark.parametrize(
    ("program", "sentence", "mark"),
    [
        (edited(PLAIN, ("1F1 ", "")), "1F1 is missing on rank 1", ">>end<<"),
        (edited(PLAIN, (" 0B1", "")), "0B1 is missing on rank 0", ">>0F1<<"),
        (edited(PLAIN, (" 1B0", " 1I0")), "1W0 is missing on rank 1", ">>1F0<<"),
        (edited(PLAIN, (" 1B0", " 1B0 1I0")), "1B0 on rank 1 has no place beside", ">>1B0<<"),
        (edited(PLAIN, (" 0B1", " 0B1 0B1")), "0B1 on rank 0 is there twice", ">>0B1<<"),
        (edited(PLAIN, (" 0B1", " 0B1 0B2")), "0B2 on rank 0 is of a microbatch that", ">>0B2<<"),
        (edited(PLAIN, (" 0B1", " 0B1 3F0")), "3F0 on rank 0 is of a stage that", ">>3F0<<"),
        (edited(PLAIN, (" 0B1", " 0B1 1F0")), "1F0 on rank 0 is out of place: stage 1 is on rank 1", ">>1F0<<"),
        (edited(zb_h1(2, 2), ("1I0 ", "")), "1I0 is missing on rank 1", ">>1F0<<"),
        (edited(PLAIN, ("1F0 1B0", "1B0 1F0")), "1B0 on rank 1 stands before 1F0, which it needs", ">>1B0<<"),
        (edited(PLAIN, ("1B0", "1B0.1")), "1B0 on rank 1 is in parts .1.; it must be whole", ">>1B0.1<<"),
        (edited(PLAIN, ("1B0", "1B0>0")), "1B0>0 on rank 1 has a peer", ">>1B0>0<<"),
        (edited(PLAIN, (" 1B0", ""), (" 1B1", "")), "Stage 0 has a backward pass, but gets no", ">>0B0<<"),
        (edited(SENT, ("1RECV_F1<0 ", "")), "1RECV_F1<0 is missing on rank 1", ">>1F1<<"),
        (edited(SENT, ("0RECV_B1<1 ", "")), "0RECV_B1<1 is missing on rank 0", ">>0B1<<"),
        (edited(SENT, ("0SEND_F1>1 ", "")), "1RECV_F1<0 on rank 1 has no 0SEND_F1>1 on rank 0", ">>1RECV_F1<0<<"),
        (
            edited(SENT, ("0F0 0SEND_F0>1 0F1 0SEND_F1>1", "0F0 0F1 0SEND_F1>1 0SEND_F0>1")),
            "1RECV_F0<0 on rank 1 comes where rank 0 has sent for 1RECV_F1<0",
            ">>1RECV_F0<0<<",
        ),
        (edited(SENT, ("0F0 0SEND_F0>1", "0SEND_F0>1 0F0")), "rank 0 stands before 0F0", ">>0SEND_F0>1<<"),
        (edited(SENT, ("0SEND_F0>1", "0SEND_F0>0")), "edge that the Program does not have", ">>0SEND_F0>0<<"),
        (edited(SENT, ("0SEND_F0>1", "0SEND_F0.1>1")), "is a part, which", ">>0SEND_F0.1>1<<"),
        (
            Program((Stage(0), Stage(0)), ((0, 1),), ((Action(0, Kind.SEND_F, 0, peer=1),),), 1),
            "from a rank to itself",
            ">>0SEND_F0>1<<",
        ),
        (replace(PLAIN, stages=(Stage(0), Stage(5))), "Stage 1 is on rank 5; there are 2", ">>0F0<<"),
        (replace(PLAIN, edges=((0, 1), (0, 1))), "Edge 0>1 is there 2 times", ">>0F0<<"),
        (replace(PLAIN, edges=((0, 4),)), "Edge 0>4 names a stage", ">>0F0<<"),
    ],
)
def test_the_place_is_named_and_marked(program, sentence, mark):
    with pytest.raises(ScheduleError, match=sentence) as caught:
        validate(program)
    assert caught.value.grid.count(">>") == 1 and mark in caught.value.grid


def test_a_deadlock_is_told_as_a_ring():
    with pytest.raises(ScheduleError) as caught:
        validate(edited(gpipe(2, 2), ("1F0 1F1 1B0 1B1", "1F0 1B0 1F1 1B1"), ("0F0 0F1 0B0 0B1", "0F0 0B0 0B1 0F1")))
    assert caught.value.sentence == "0B1 on rank 0 stands before 0F1, which it needs."
    with pytest.raises(ScheduleError) as caught:
        validate(edited(gpipe(2, 2), ("0F0 0F1 0B0", "0F0 0B0 0F1"), ("1F0 1F1 1B0", "1F0 1F1 1B0")))
    assert str(caught.value).split("\n") == [
        "Deadlock on rank 0: 0B0 waits for 1B0, which waits for 1F1, which waits for 0F1, which waits for 0B0.",
        "rank 0: 0F0 >>0B0<< 0F1 0B1",
        "rank 1: 1F0 1F1 1B0 1B1",
    ]


def test_a_deadlock_of_streams_alone():
    """Three ranks, each of which receives from one while it must send to the other first."""
    program = dag([0, 1, 2], [(0, 1), (0, 2), (1, 2)], 1)
    sent = add_communication(program)
    validate(sent)
    received = ("2RECV_F0<0 2RECV_F0<1", "2RECV_F0<1 2RECV_F0<0")
    wrong = edited(sent, received, ("0SEND_F0>1 0SEND_F0>2", "0SEND_F0>2 0SEND_F0>1"))
    with pytest.raises(ScheduleError, match="Deadlock"):
        validate(wrong)


def test_a_send_that_stands_behind_a_pass_that_waits_for_it_is_a_deadlock():
    late = ("0SEND_F1>1 0RECV_B0<1 0B0", "0RECV_B0<1 0B0 0SEND_F1>1")
    wrong = edited(SENT, late, ("1B0 1SEND_B0>0 1RECV_F1<0 1F1", "1RECV_F1<0 1F1 1B0 1SEND_B0>0"))
    with pytest.raises(ScheduleError, match="Deadlock"):
        validate(wrong)


def test_a_ring_of_edges_is_a_deadlock():
    with pytest.raises(ScheduleError, match="Deadlock"):
        validate(replace(gpipe(2, 1), edges=((0, 1), (1, 0))))


def test_long_grids_are_cut_around_the_place():
    program = changed(gpipe(40, 50), 20, [*gpipe(40, 50).actions[20], Action(20, Kind.B, 49)])
    with pytest.raises(ScheduleError) as caught:
        validate(program)
    lines = caught.value.grid.split("\n")
    assert [line[:8] for line in lines] == [f"rank {rank}:" for rank in range(18, 23)]
    assert lines[2].startswith("rank 20: ... 20B42") and lines[2].endswith("20B49 >>20B49<<")


def grouped(*rows, group=7):
    """Stages 0 and 1 of one group, one a rank, that make F of microbatch 0 and enter collectives."""
    text = "microbatches 1\n" + "".join(f'stage {r} rank {r} "llm" group {group}\n' for r in range(len(rows)))
    return loads(text + "".join(f"rank {rank}: {row}\n" for rank, row in enumerate(rows)))


def test_collectives_are_entered_in_the_same_order():
    validate(grouped("0GATHER 0F0 0B0 0REDUCE0", "1GATHER 1F0 1B0 1REDUCE0"))
    for rows, sentence in [
        (("0GATHER 0F0 0B0 0REDUCE0", "1GATHER 1F0 1B0"), "Stage 1 enters no collective where stage 0 .* 0REDUCE0"),
        (("0GATHER 0F0 0B0", "1F0 1B0 1GATHER"), "1F0 on rank 1 stands before 1GATHER"),
        (("0GATHER.0 0GATHER.1 0F0 0B0", "1GATHER.1 1GATHER.0 1F0 1B0"), "Stage 1 enters 1GATHER.1 where .* 0GATHER.0"),
        (("0F0 0B0", "1F0 1B0 1REDUCE"), "Stage 1 enters 1REDUCE where stage 0 of its group enters none"),
    ]:
        with pytest.raises(ScheduleError, match=sentence):
            validate(grouped(*rows))


def test_two_ranks_enter_the_collectives_of_all_their_groups_in_one_order():
    stages = "".join(f'stage {n} rank {n % 2} "llm" group {n // 2}\n' for n in range(4))
    passes = ["0F0 2F0 2B0 0B0", "1F0 3F0 3B0 1B0"]
    right, wrong = (
        loads(f"microbatches 1\n{stages}rank 0: {passes[0]} 0REDUCE 2REDUCE\nrank 1: {passes[1]} {order}\n")
        for order in ("1REDUCE 3REDUCE", "3REDUCE 1REDUCE")
    )
    validate(right)
    with pytest.raises(ScheduleError, match="3REDUCE on rank 1 comes where rank 0 enters 0REDUCE") as caught:
        validate(wrong)
    assert ">>3REDUCE<<" in caught.value.grid


def test_passes_of_stages_that_meet_take_place_together():
    """Each of two replicas that share sequences waits in its pass for the other."""

    def of_replicas(row, others, meets):
        stages = "".join(f'stage {n} rank {n} "llm" group 0{meets}\n' for n in range(2))
        return loads(f"microbatches 2\n{stages}rank 0: {row}\nrank 1: {others}\n")

    validate(of_replicas("0F0 0F1", "1F0 1F1", " meets"), host_waits=True)
    validate(of_replicas("0F0 0F1", "1F1 1F0", ""), host_waits=True)
    with pytest.raises(ScheduleError, match="0F0 waits for 0F1, which waits for 0F0"):
        validate(of_replicas("0F0 0F1", "1F1 1F0", " meets"))


def test_a_host_that_waits_in_a_receive_starts_no_collective_behind_it():
    """Devices that overlap gather beside the receive; a thread on a CPU does not."""
    stages = 'stage 0 rank 0 "image" group 0\nstage 1 rank 1 "image" group 0\nstage 2 rank 0 "llm"\nedge 1>2\n'
    row = "rank 1: 1GATHER 1F0 1SEND_F0>2\n"
    early, late = (
        loads(f"microbatches 1\n{stages}rank 0: {own}\n{row}")
        for own in ("0GATHER 2RECV_F0<1 2F0 0F0", "2RECV_F0<1 2F0 0GATHER 0F0")
    )
    validate(early, host_waits=True)
    validate(late)
    with pytest.raises(ScheduleError, match="Deadlock on rank 0: 2RECV_F0<1 waits for 1SEND_F0>2, which waits for 1F0"):
        validate(late, host_waits=True)


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ("1NORM 1STEP", "1STEP 1NORM", "1STEP on rank 0 stands before 1NORM, which it needs."),
        ("0B0 1NORM", "1NORM 0B0", "1NORM on rank 0 stands before 0B0, which it needs."),
        ("1STEP", "1STEP 0NORM", "0NORM on rank 0 is a second NORM of its rank; one is for all its stages."),
        ("1STEP", "1STEP 0STEP", "0STEP on rank 0 is a second STEP of its rank; one is for all its stages."),
        (" 1NORM", "", "Stage 1 enters no collective where stage 3|Stage 3 enters 3NORM where stage 1"),
    ],
)
def test_the_norm_is_taken_once_by_all_ranks_between_gradients_and_optimizer(old, new, sentence):
    program = data_parallel({"image": True, "backbone": True}, 2, 1)
    validate(program)
    with pytest.raises(ScheduleError, match=sentence):
        validate(edited(program, (old, new)))


def test_gathers_may_stand_ahead_of_the_parts_that_free_memory_for_them():
    parts = range(4)
    row = " ".join([*(f"0GATHER.{part}" for part in parts), *(f"0F0.{part}" for part in parts)])
    validate(grouped(row))


def test_memory_is_kept_under_the_cap():
    program = split_parts(one_f_one_b(3, 4), 0, 2, 2)
    held = [[5] * 4, [3, 3, 3, 9], [1] * 4]
    assert high_water(program, held).tolist() == [15, 12, 1]
    validate(program, held_bytes=held, cap_bytes=15)
    validate(program, held_bytes=held, cap_bytes=[15, 12, 1])
    with pytest.raises(ScheduleError) as caught:
        validate(program, held_bytes=held, cap_bytes=[15, 11, 1])
    assert caught.value.sentence == "With 1F3, rank 1 holds 12 bytes of activations; it may hold 11."
    assert ">>1F3<<" in caught.value.grid
    assert high_water(zb_h1(2, 2), [1, 10]).tolist() == [2, 20]


@pytest.mark.parametrize("program", [zb_h1(3, 4), split_parts(one_f_one_b(3, 4), 0, 2, 2)])
def test_many_islands_hold_what_each_holds_by_itself(program):
    held = np.random.default_rng(0).random((300, 3, 4))
    assert high_water(program, held).tolist() == [high_water(program, each).tolist() for each in held]


def test_wrong_arguments_are_named():
    for arguments, named in [
        ({"held_bytes": [1, 1]}, "belong together"),
        ({"cap_bytes": 3}, "belong together"),
        ({"held_bytes": [1], "cap_bytes": 3}, "held_bytes has shape"),
        ({"held_bytes": [1, -1], "cap_bytes": 3}, "below 0"),
        ({"held_bytes": [1, 1], "cap_bytes": [3, 3, 3]}, "cap_bytes has shape"),
    ]:
        with pytest.raises(ArgumentError, match=named):
            validate(PLAIN, **arguments)
    assert issubclass(ScheduleError, UserError)
