"""Gathers and reductions around the passes of a pipeline."""

from dataclasses import replace

import pytest

from motet.core.errors import ArgumentError
from motet.schedule import Kind, add_communication, interleaved_1f1b, one_f_one_b, split_parts, validate, zb_h1
from motet.schedule.generators.bubble_filling import EncoderPipeline, coarse_fills, fill_bubbles
from motet.schedule.generators.disaggregated import Pipeline, UnitEdge, disaggregated
from motet.schedule.passes.data_parallel import add_data_parallel


def row(program, rank=0):
    return " ".join(map(str, program.actions[rank]))


def test_the_levels_differ_in_what_is_gathered_and_how_often_reduced():
    program = one_f_one_b(2, 2)
    made = {level: row(add_data_parallel(program, {0: level}, [0, 1])) for level in range(4)}
    assert made == {
        0: "0F0 0F1 0B0 0B1 0REDUCE 0STEP",
        1: "0GATHER 0F0 0F1 0B0 0B1 0REDUCE 0STEP",
        2: "0GATHER 0F0 0F1 0B0 0REDUCE0 0B1 0REDUCE1 0STEP",
        3: "0GATHER0 0F0 0GATHER1 0F1 0GATHER_B0 0B0 0REDUCE0 0GATHER_B1 0B1 0REDUCE1 0STEP",
    }


@pytest.mark.parametrize(
    ("level", "reductions"),
    [
        (0, ["0REDUCE"]),
        (1, ["0REDUCE"]),
        (2, ["0REDUCE0", "0REDUCE1", "0REDUCE"]),
        (3, ["0REDUCE0", "0REDUCE1", "0REDUCE"]),
    ],
)
def test_copies_are_summed_once_a_step(level, reductions):
    found = row(add_data_parallel(one_f_one_b(2, 2), {0: level}, [0, 1], copied=[0])).split()
    assert [text for text in found if "REDUCE" in text] == reductions
    assert found[-2:] == ["0REDUCE", "0STEP"]


def test_what_is_frozen_is_only_gathered_where_it_is_sharded():
    program = one_f_one_b(2, 1)
    assert row(add_data_parallel(program, {0: 1}, [])) == "0F0 0B0"
    assert row(add_data_parallel(program, {0: 3}, [])) == "0GATHER0 0F0 0GATHER_B0 0B0"


def test_a_stage_without_replicas_has_a_step_alone():
    assert row(add_data_parallel(one_f_one_b(2, 1), {}, [0])) == "0F0 0B0 0STEP"


def test_gradients_are_complete_after_the_last_weights_pass():
    last = add_data_parallel(zb_h1(3, 4), {2: 1}, [0, 1, 2]).actions[2][-3:]
    assert [str(action) for action in last] == ["2W3", "2REDUCE", "2STEP"]


def test_parts_of_a_pass_are_gathered_for_and_reduced_once():
    program = split_parts(one_f_one_b(1, 1), 0, 2, 2)
    assert row(add_data_parallel(program, {0: 3}, [0])) == (
        "0GATHER0 0F0.0 0F0.1 0GATHER_B0 0B0.0 0B0.1 0REDUCE0 0STEP"
    )


@pytest.mark.parametrize(
    ("level", "islands_differ", "reductions"),
    [(1, False, "2REDUCE 0REDUCE"), (1, True, "0REDUCE 2REDUCE"), (3, False, "0REDUCE0 0REDUCE1 2REDUCE")],
)
def test_reductions_of_a_group_may_stand_behind_what_joins_ranks_of_other_islands(level, islands_differ, reductions):
    """Encoders in bubbles are such groups; stages without a group have their replicas in other islands."""
    backbone = one_f_one_b(2, 2)
    encoders = [EncoderPipeline("image", ranks=(rank,), microbatches=(rank,)) for rank in (0, 1)]
    fills = coarse_fills(backbone, encoders)
    early = [replace(fill, before="0B1") if fill.action == "2B0" else fill for fill in fills]
    program, zero = fill_bubbles(backbone, encoders, early), {0: level, 1: level, 2: 1, 3: 1}
    added = row(add_data_parallel(program, zero, range(4), gathers_first=True, islands_differ=islands_differ)).split()
    assert (added.index("2REDUCE") < added.index("0B1")) == (level == 1 and not islands_differ)
    assert [text for text in added if "REDUCE" in text] == reductions.split()


def test_gathers_of_the_step_may_stand_before_all_passes():
    program = interleaved_1f1b(1, 2, 2)
    plain, first = (add_data_parallel(program, {0: 1, 1: 1}, [0, 1], gathers_first=flag) for flag in (False, True))
    assert row(plain).split().index("1GATHER") > row(plain).split().index("0F0")
    assert row(first).split()[:3] == ["0GATHER", "1GATHER", "0F0"]
    # Reductions stay where they were.
    assert [text for text in row(first).split() if "GATHER" not in text] == [
        text for text in row(plain).split() if "GATHER" not in text
    ]


@pytest.mark.parametrize("level", range(4))
@pytest.mark.parametrize("program", [one_f_one_b(3, 4), interleaved_1f1b(2, 2, 4), zb_h1(3, 5)])
def test_programs_stay_proper(program, level):
    zero = dict.fromkeys(range(program.num_stages), level)
    added = add_data_parallel(program, zero, range(1, program.num_stages))
    validate(added)
    validate(add_communication(added))
    assert sum(action.kind is Kind.STEP for actions in added.actions for action in actions) >= program.num_ranks - 1


def test_wrong_arguments_are_refused():
    program = one_f_one_b(2, 1)
    for zero in ({5: 1}, {0: 4}):
        with pytest.raises(ArgumentError, match="levels from 0 to 3"):
            add_data_parallel(program, zero, [0])
    with pytest.raises(ArgumentError, match="already"):
        add_data_parallel(add_data_parallel(program, {0: 1}, [0]), {0: 1}, [0])


@pytest.mark.parametrize("level", [1, 2, 3])
def test_groups_are_entered_in_one_order_whatever_the_order_of_passes(level):
    """Two replicas of a backbone with two encoders, of which one replica runs the one first, the other the other."""
    program = disaggregated([Pipeline(("backbone",), 2), Pipeline(("generator",))], [UnitEdge(0, 1)], 3)
    encoders = [EncoderPipeline(name, (j,), (0, 1, 2), sink=j) for name in ("image", "audio") for j in range(2)]
    fills = coarse_fills(program, encoders)
    swapped = [fill for fill in fills if fill.rank == 0] + [fill for fill in reversed(fills) if fill.rank == 1]
    swapped = [replace(fill, before="1B1") if fill.action in ("4B0", "6B0") else fill for fill in swapped]
    filled = fill_bubbles(program, encoders, swapped)
    added = add_data_parallel(filled, {0: level, 1: level} | dict.fromkeys(range(3, 7), 1), range(7))
    validate(added)
    validate(add_communication(added))
