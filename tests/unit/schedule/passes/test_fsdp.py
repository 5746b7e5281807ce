"""What FSDP gathers and reduces within passes, unit by unit."""

import pytest

from motet.core.errors import ArgumentError
from motet.core.workload import BACKBONE
from motet.schedule import Kind, Presence, Sharding, add_fsdp, data_parallel, split_parts, validate, without_absent

FULLY = Sharding()


def sharded(units, num_ranks, num_microbatches, sharding=FULLY, present=None):
    """units: by module, whether each learns."""
    learns = {name: any(own) for name, own in units.items()}
    program = data_parallel(learns, num_ranks, num_microbatches)
    if present is not None:
        program = without_absent(program, present, [n for n, own in enumerate(learns.values()) if own])
    for stage, own in enumerate(units.values()):
        backward = any(a.stage == stage and a.kind is Kind.B for a in program.actions[0])
        program = split_parts(program, stage, len(own), len(own) if backward else 1)
    return add_fsdp(program, dict(enumerate(units.values())), sharding)


def modules(image=True, backbone=True, num_units=3):
    return {"image": (image,) * num_units, BACKBONE: (backbone,) * num_units}


def reductions(program):
    return [action for action in program.actions[0] if action.kind is Kind.REDUCE]


def test_parameters_are_gathered_a_unit_ahead():
    program = sharded({BACKBONE: (True,) * 3}, 2, 1)
    assert str(program).splitlines()[1] == (
        "rank 1: 1GATHER0.0 1GATHER0.1 1F0.0 1GATHER0.2 1F0.1 1F0.2 1GATHER_B0.2 1GATHER_B0.1 1B0.0 1REDUCE0.2 "
        "1GATHER_B0.0 1B0.1 1REDUCE0.1 1B0.2 1REDUCE0.0 1NORM 1STEP"
    )


def test_what_is_gathered_and_reduced_once_a_step_is_whole_in_between():
    units = {"image": (False, False), BACKBONE: (True, True)}
    row = sharded(units, 2, 2, Sharding(reshard_after_forward=False, once_a_step=True)).actions[0]
    collectives = {kind: [str(a) for a in row if a.kind is kind] for kind in (Kind.GATHER, Kind.GATHER_B, Kind.REDUCE)}
    # A frozen module is freed after each forward pass.
    assert collectives == {
        Kind.GATHER: ["0GATHER0.0", "0GATHER0.1", "1GATHER0.0", "1GATHER0.1", "0GATHER1.0", "0GATHER1.1"],
        Kind.GATHER_B: [],
        Kind.REDUCE: ["1REDUCE1.1", "1REDUCE1.0"],
    }


def test_whole_passes_are_gathered_and_reduced_whole():
    program = add_fsdp(data_parallel({BACKBONE: True}, 2, 1), {0: (False, True)})
    assert str(program).splitlines()[0] == "rank 0: 0GATHER0 0F0 0GATHER_B0 0B0 0REDUCE0 0NORM 0STEP"
    validate(program)


def test_unsharded_gradients_are_summed_once_on_the_last_microbatch():
    program = sharded(modules(), 4, 2, Sharding(1))
    found = reductions(program)
    assert len(found) == 2 * 3
    assert {action.microbatch for action in found} == {-1}
    first = program.actions[0].index(found[0])
    assert not any(a.kind is Kind.F for a in program.actions[0][first:])


def test_hybrid_sharding_reduces_each_microbatch_and_sums_over_replicas_once():
    found = [action.microbatch for action in reductions(sharded(modules(), 4, 3, Sharding(2)))]
    assert [found.count(i) for i in (-1, 0, 1, 2)] == [6] * 4


def test_replicas_are_summed_after_the_last_microbatch_that_has_the_module():
    both, text = frozenset({"image", BACKBONE}), frozenset({BACKBONE})
    present = [Presence(names, frozenset()) for names in (both, both, text)]
    row = sharded(modules(num_units=1), 4, 3, Sharding(1), present).actions[0]
    kept = " ".join(str(a) for a in row if a.kind in (Kind.B, Kind.REDUCE))
    assert kept == "1B0 0B0 1B1 0B1 0REDUCE 1B2 1REDUCE"


def test_frozen_modules_are_gathered_for_forward_only():
    program = sharded(modules(image=False), 2, 1)
    assert {a.kind for a in program.actions[0] if a.stage == 0} == {Kind.GATHER, Kind.F}


def test_a_frozen_backbone_passes_gradients_on_but_is_not_reduced():
    program = sharded(modules(backbone=False), 2, 1, Sharding(reshard_after_forward=False))
    own = {a.kind for a in program.actions[0] if a.stage == 1}
    assert own == {Kind.GATHER, Kind.F, Kind.GATHER_B, Kind.B, Kind.NORM}


def test_backward_gathers_no_unit_before_the_first_that_learns():
    program = sharded({"image": (False, False, True), BACKBONE: (True,) * 3}, 2, 1)
    gathered = [a.part for a in program.actions[0] if a.stage == 0 and a.kind is Kind.GATHER_B]
    reduced = [a.part for a in program.actions[0] if a.stage == 0 and a.kind is Kind.REDUCE]
    assert gathered == reduced == [2]


def test_without_images_the_backbones_backward_pass_ends_where_its_own_learning_does():
    units = {"image": (True,), BACKBONE: (False, True)}
    text = [Presence(frozenset({BACKBONE}), frozenset())]
    gathered = [
        [a.part for a in sharded(units, 2, 1, present=present).actions[0] if a.stage == 1 and a.kind is Kind.GATHER_B]
        for present in (None, text)
    ]
    assert gathered == [[1, 0], [1]]


def test_wrong_arguments_are_refused():
    with pytest.raises(ArgumentError, match="shard_size is 3; it must divide num_ranks, 4"):
        add_fsdp(data_parallel({BACKBONE: True}, 4, 1), {0: (True,)}, Sharding(3))
    halves = split_parts(data_parallel({BACKBONE: True}, 4, 1), 0, 2, 2)
    with pytest.raises(ArgumentError, match="0F0 is in 2 parts; stage 0 has 3 slices"):
        add_fsdp(halves, {0: (True,) * 3})
