"""Colocated data parallelism: the order of the runtime's step, and of FSDP within a module."""

from dataclasses import replace

import numpy as np
import pytest

from motet.core.errors import ArgumentError
from motet.core.workload import BACKBONE
from motet.runtime.actions import microbatch_actions
from motet.schedule import Kind, high_water, validate
from motet.schedule.data_parallel import ShardedModule, Sharding, data_parallel
from work import num_calls

NAMES = {
    Kind.F: "forward",
    Kind.B: "backward",
    Kind.EXCHANGE_F: "exchange",
    Kind.EXCHANGE_B: "exchange gradients",
}


def modules(image=True, audio=True, backbone=True, num_units=3):
    flags = {"image": image, "audio": audio, BACKBONE: backbone}
    return [ShardedModule(name, (trained,) * num_units) for name, trained in flags.items()]


def kinds(program, rank=0):
    return [action.kind for action in program.actions[rank]]


@pytest.mark.parametrize("image", [False, True])
@pytest.mark.parametrize("audio", [False, True])
@pytest.mark.parametrize("backbone", [False, True])
def test_the_order_is_the_runtimes(image, audio, backbone):
    program = data_parallel(modules(image, audio, backbone), 2, 1)
    names = [f"{NAMES[a.kind]} {program.stages[a.stage].module}" for a in program.actions[0] if a.kind in NAMES]
    flags = {"image": image, "audio": audio, BACKBONE: backbone}
    learns = [name for name, trained in flags.items() if trained]
    expected = microbatch_actions(["image", "audio"], flags, learns)
    assert list(dict.fromkeys(names)) == [str(action) for action in expected]
    validate(program)


@pytest.mark.parametrize("shard_size", [0, 1, 2, 4])
@pytest.mark.parametrize("num_microbatches", [1, 3])
@pytest.mark.parametrize("exchanged", [None, (), ("audio",)])
@pytest.mark.parametrize("reshard", [False, True])
def test_every_way_of_sharding_is_a_proper_program(shard_size, num_microbatches, exchanged, reshard):
    sharding = Sharding(shard_size, reshard)
    program = data_parallel(modules(image=False), 4, num_microbatches, exchanged=exchanged, sharding=sharding)
    validate(program)
    assert (Kind.GATHER in kinds(program)) == (shard_size != 1)
    assert (Kind.GATHER_B in kinds(program)) == (reshard and shard_size != 1)
    assert (Kind.EXCHANGE_F in kinds(program)) == (exchanged != ())


def test_parameters_are_gathered_a_unit_ahead():
    program = data_parallel([ShardedModule(BACKBONE, (True,) * 3)], 2, 1)
    assert str(program).splitlines()[1] == (
        "rank 1: 1GATHER0.0 1GATHER0.1 1F0.0 1GATHER0.2 1F0.1 1F0.2 1GATHER_B0.2 1GATHER_B0.1 1B0.0 1REDUCE0.2 "
        "1GATHER_B0.0 1B0.1 1REDUCE0.1 1B0.2 1REDUCE0.0 1STEP"
    )


def test_unsharded_gradients_are_summed_once_on_the_last_microbatch():
    program = data_parallel(modules(), 4, 2, sharding=Sharding(1))
    reductions = [action for action in program.actions[0] if action.kind is Kind.REDUCE]
    assert len(reductions) == 3 * 3
    assert {action.microbatch for action in reductions} == {-1}
    first = program.actions[0].index(reductions[0])
    assert not any(a.kind is Kind.F for a in program.actions[0][first:])


def test_hybrid_sharding_reduces_each_microbatch_and_sums_over_replicas_once():
    program = data_parallel(modules(), 4, 3, sharding=Sharding(2))
    found = [action.microbatch for action in program.actions[0] if action.kind is Kind.REDUCE]
    assert [found.count(i) for i in (-1, 0, 1, 2)] == [9] * 4


def test_frozen_modules_are_gathered_for_forward_only():
    program = data_parallel(modules(image=False), 2, 1)
    assert {a.kind for a in program.actions[0] if a.stage == 0} == {Kind.GATHER, Kind.F, Kind.EXCHANGE_F}


def test_a_frozen_backbone_passes_gradients_on_but_is_not_reduced():
    program = data_parallel(modules(backbone=False), 2, 1, sharding=Sharding(reshard_after_forward=False))
    own = {a.kind for a in program.actions[0] if a.stage == 2}
    assert own == {Kind.GATHER, Kind.F, Kind.GATHER_B, Kind.B}


def test_backward_gathers_no_unit_before_the_first_that_learns():
    program = data_parallel([ShardedModule("image", (False, False, True)), *modules()[2:]], 2, 1)
    gathered = [a.part for a in program.actions[0] if a.stage == 0 and a.kind is Kind.GATHER_B]
    reduced = [a.part for a in program.actions[0] if a.stage == 0 and a.kind is Kind.REDUCE]
    assert gathered == reduced == [2]


def test_one_rank_has_no_collective():
    assert set(kinds(data_parallel(modules(), 1, 2))) == {Kind.F, Kind.B, Kind.STEP}


def test_where_nothing_learns_there_is_no_step():
    assert set(kinds(data_parallel(modules(False, False, False), 1, 1))) == {Kind.F}


def test_of_thousands_of_ranks_the_actions_of_one_are_made():
    made = []
    calls = num_calls(lambda: made.append(data_parallel(modules(num_units=16), 2560, 1)))
    (program,) = made
    assert program.num_actions == 2560 * len(program.actions[0])
    assert program.actions[2559][0].stage == 2559 * 3
    assert calls < 10 * (len(program.stages) + len(program.actions[0])) < program.num_actions


def test_rows_of_alike_ranks_are_those_of_the_first_on_their_own_stages():
    program = data_parallel(modules(), 4, 2)
    rows = tuple(program.actions)
    assert program.actions == rows and program.actions[1:3] == rows[1:3] and program.actions[-1] == rows[3]
    assert [action.stage - 9 for action in rows[3]] == [action.stage for action in rows[0]]
    listed = replace(program, actions=rows)
    assert listed == program and hash(listed) == hash(program) and listed.num_actions == program.num_actions
    held = np.arange(24.0).reshape(12, 2)
    assert high_water(listed, held).tolist() == high_water(program, held).tolist()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"sharding": Sharding(3)}, "shard_size is 3; it must divide num_ranks, 4"),
        ({"exchanged": ("backbone",)}, "exchanged names 'backbone'; the encoders are image, audio"),
    ],
)
def test_wrong_options_are_refused(options, words):
    with pytest.raises(ArgumentError, match=words):
        data_parallel(modules(), 4, 1, **options)


def test_wrong_counts_are_refused():
    with pytest.raises(ArgumentError, match="num_ranks is 0"):
        data_parallel(modules(), 0, 1)
    with pytest.raises(ArgumentError, match="at least one unit"):
        data_parallel([ShardedModule(BACKBONE, ())], 1, 1)
