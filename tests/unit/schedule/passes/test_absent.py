"""What a microbatch does not have is left out, and nothing else, on all ranks alike."""

from itertools import chain, combinations, product

import pytest

from motet.core.errors import ArgumentError
from motet.schedule import Presence, add_exchanges, add_fsdp, data_parallel, without_absent

NAMES = ("image", "audio", "backbone")
EVERYTHING = Presence(frozenset(NAMES), frozenset(NAMES[:2]))


def has(*modules, exchanged=("image", "audio")):
    return Presence(frozenset(modules), frozenset(exchanged) & frozenset(modules))


def left(present, learns=NAMES, num_ranks=2):
    """The row of rank 0, of one microbatch."""
    trainable = {name: name in learns for name in NAMES}
    program = add_exchanges(data_parallel(trainable, num_ranks, 1))
    program = without_absent(program, [present], [n for n, name in enumerate(NAMES) if name in learns])
    return " ".join(map(str, program.actions[0])).split(" 2NORM")[0]


def test_nothing_is_left_out_where_everything_is_there():
    program = add_exchanges(data_parallel(dict.fromkeys(NAMES, True), 2, 3))
    assert without_absent(program, [EVERYTHING] * 3, range(3)) == program


def test_an_absent_module_is_left_out_of_its_microbatch_alone():
    assert left(has("audio", "backbone")) == "1F0 1EXCHANGE_F0>2 2F0 2B0 1EXCHANGE_B0>2 1B0"
    assert left(has("backbone")) == "2F0 2B0"
    program = data_parallel(dict.fromkeys(NAMES, True), 1, 2)
    found = without_absent(program, [has("backbone"), EVERYTHING], range(3))
    assert str(found) == "rank 0: 2F0 2B0 0F1 1F1 2F1 2B1 1B1 0B1 2NORM 2STEP"


def test_of_a_microbatch_without_examples_nothing_is_left():
    program = data_parallel(dict.fromkeys(NAMES, True), 2, 1)
    assert str(without_absent(program, [has()], range(3))).splitlines()[1] == "rank 1: 5NORM 5STEP"


def test_an_exchange_that_moves_nothing_is_left_out_both_ways():
    assert left(has(*NAMES, exchanged=["audio"])) == "0F0 1F0 1EXCHANGE_F0>2 2F0 2B0 1EXCHANGE_B0>2 1B0 0B0"


def test_a_frozen_backbone_has_a_backward_pass_for_encoders_that_are_present_alone():
    assert left(has(*NAMES), learns=["image"]).endswith("2F0 2B0 0EXCHANGE_B0>2 0B0")
    assert left(has("audio", "backbone"), learns=["image"]).endswith("2F0")


def test_all_ranks_leave_out_the_same():
    trainable = dict.fromkeys(NAMES, True)
    present = [has("image", "backbone"), has("backbone"), has("audio", "backbone", exchanged=())]
    program = without_absent(add_exchanges(data_parallel(trainable, 3, 3)), present, range(3))
    first, *others = ([a._replace(stage=a.stage % 3, peer=-(a.peer < 0)) for a in row] for row in program.actions)
    assert all(row == first for row in others)


def test_every_backward_pass_has_its_forward_pass_and_its_gradient():
    subsets = list(chain.from_iterable(combinations(NAMES, size) for size in range(4)))
    for there, learns in product(subsets, subsets):
        if there and "backbone" not in there:
            continue
        row = left(has(*there), learns).split()
        for action in row:
            if action.endswith("B0"):
                assert action.replace("B", "F") in row
                assert "2B0" in row and row.index("2B0") <= row.index(action)


def test_a_presence_for_each_microbatch_is_needed():
    with pytest.raises(ArgumentError, match="present is of 1 microbatches; the Program has 2"):
        without_absent(data_parallel({"backbone": True}, 1, 2), [has("backbone")], [0])


def test_collectives_of_parameters_are_added_afterwards():
    program = add_fsdp(data_parallel({"backbone": True}, 2, 1), {0: [True]})
    with pytest.raises(ArgumentError, match="the Program has 0GATHER0; leave out passes before"):
        without_absent(program, [has("backbone")], [0])
