"""Colocated data parallelism: who computes what, in which order, on every rank."""

from dataclasses import replace

import numpy as np
import pytest

from motet.core.errors import ArgumentError
from motet.core.workload import BACKBONE
from motet.schedule import (
    Kind,
    Sharding,
    add_exchanges,
    add_fsdp,
    add_recompute,
    data_parallel,
    high_water,
    split_parts,
    validate,
)
from work import num_calls

NUM_UNITS = 3
FULLY = Sharding()


def trainable(image=True, audio=True, backbone=True):
    return {"image": image, "audio": audio, BACKBONE: backbone}


def words(program, rank=0):
    """Kind and module of a rank's actions."""
    return [f"{action.kind} {program.stages[action.stage].module}" for action in program.actions[rank]]


def sharded(learns, num_ranks, num_microbatches, *, exchanged=None, sharding=FULLY):
    """With all passes."""
    program = add_exchanges(data_parallel(learns, num_ranks, num_microbatches), exchanged)
    has_backward = {action.stage for action in program.actions[0] if action.kind is Kind.B}
    for stage in range(len(learns)):
        program = split_parts(program, stage, NUM_UNITS, NUM_UNITS if stage in has_backward else 1)
    return add_fsdp(program, {n: (own,) * NUM_UNITS for n, own in enumerate(learns.values())}, sharding)


def test_encoders_come_before_the_backbone_and_backward_is_the_reverse():
    assert words(data_parallel(trainable(), 1, 1)) == [
        "F image", "F audio", "F backbone", "B backbone", "B audio", "B image", "NORM backbone", "STEP backbone",
    ]  # fmt: skip


def test_microbatches_come_one_after_the_other_and_the_norm_after_all():
    assert str(data_parallel({BACKBONE: True}, 2, 2)).splitlines()[1] == "rank 1: 1F0 1B0 1F1 1B1 1NORM 1STEP"


def test_gradients_pass_a_frozen_backbone_to_what_learns_before_it():
    found = words(data_parallel(trainable(audio=False, backbone=False), 1, 1))
    assert found[3:] == ["B backbone", "B image", "NORM backbone", "STEP image"]


def test_a_frozen_encoder_has_no_backward_pass():
    assert "B image" not in words(data_parallel(trainable(image=False), 1, 1))


def test_where_nothing_learns_the_loss_is_summed_all_the_same():
    assert words(data_parallel(trainable(False, False, False), 1, 1)) == [
        "F image", "F audio", "F backbone", "NORM backbone",
    ]  # fmt: skip


@pytest.mark.parametrize("image", [False, True])
@pytest.mark.parametrize("audio", [False, True])
@pytest.mark.parametrize("backbone", [False, True])
def test_every_mixture_of_frozen_modules_is_a_proper_program(image, audio, backbone):
    validate(data_parallel(trainable(image, audio, backbone), 2, 2))
    validate(sharded(trainable(image, audio, backbone), 2, 2))


@pytest.mark.parametrize("shard_size", [0, 1, 2, 4])
@pytest.mark.parametrize("num_microbatches", [1, 3])
@pytest.mark.parametrize("exchanged", [None, (), ("audio",)])
@pytest.mark.parametrize("reshard", [False, True])
def test_every_way_of_sharding_is_a_proper_program(shard_size, num_microbatches, exchanged, reshard):
    sharding = Sharding(shard_size, reshard)
    program = sharded(trainable(image=False), 4, num_microbatches, exchanged=exchanged, sharding=sharding)
    validate(program)
    kinds = {action.kind for action in program.actions[0]}
    assert (Kind.GATHER in kinds) == (shard_size != 1)
    assert (Kind.GATHER_B in kinds) == (reshard and shard_size != 1)
    assert (Kind.EXCHANGE_F in kinds) == (exchanged != ())


def test_one_rank_has_no_collective_but_the_norm():
    kinds = {action.kind for action in sharded(trainable(), 1, 2).actions[0]}
    assert kinds == {Kind.F, Kind.B, Kind.NORM, Kind.STEP}


def test_of_thousands_of_ranks_the_actions_of_one_are_made():
    made = []
    calls = num_calls(lambda: made.append(sharded(trainable(), 2560, 1)))
    (program,) = made
    assert program.num_actions == 2560 * len(program.actions[0])
    assert program.actions[2559][0].stage == 2559 * 3
    assert calls < 20 * len(program.actions[0]) < program.num_actions
    assert program.stages[-1] == replace(program.stages[2], rank=2559) and len(program.edges) == 2 * 2560
    assert program.edges[2 * 2559 + 1] == (3 * 2559 + 1, 3 * 2559 + 2)


def test_rows_of_alike_ranks_are_those_of_the_first_on_their_own_stages():
    program = sharded(trainable(), 4, 2)
    rows = tuple(program.actions)
    assert program.actions == rows and program.actions[1:3] == rows[1:3] and program.actions[-1] == rows[3]
    assert [action.stage - 9 for action in rows[3]] == [action.stage for action in rows[0]]
    listed = replace(program, actions=rows, stages=tuple(program.stages), edges=tuple(program.edges))
    assert listed.stages_on(2) == program.stages_on(2) and set(program.edges_near(2)) < set(listed.edges_near(2))
    assert all(sink in program.stages_on(2) for _, sink in program.edges_near(2))
    assert listed == program and hash(listed) == hash(program) and listed.num_actions == program.num_actions
    held = np.arange(24.0).reshape(12, 2)
    assert high_water(listed, held).tolist() == high_water(program, held).tolist()


def test_passes_change_rows_that_are_listed_as_those_that_are_alike():
    program = data_parallel(trainable(image=False), 3, 2)
    listed = replace(program, actions=tuple(program.actions))
    assert add_exchanges(listed) == add_exchanges(program)
    assert words(add_recompute(program, [1]), 2)[3:6] == ["B backbone", "R audio", "B audio"]
    assert add_recompute(listed, [1, 4, 7]) == add_recompute(program, [1])
    assert words(split_parts(program, 2, 2, 2), 2).count("F backbone") == 4


def test_wrong_counts_are_refused():
    with pytest.raises(ArgumentError, match="num_ranks is 0"):
        data_parallel(trainable(), 0, 1)
    with pytest.raises(ArgumentError, match="num_microbatches 0"):
        data_parallel(trainable(), 1, 0)
    with pytest.raises(ArgumentError, match="there must be a backbone"):
        data_parallel({}, 1, 1)
