"""Encoders beside, within and before the stages of an LLM."""

from dataclasses import replace

import pytest

from motet.core.errors import ArgumentError
from motet.schedule import Kind, add_communication, interleaved_1f1b, one_f_one_b, validate, zb_h1
from motet.schedule.generators.modality_parallel import add_replicas, modality_parallel
from unit.schedule.longest_path import ends, makespan


@pytest.mark.parametrize("num_llm_stages", [1, 2, 4])
@pytest.mark.parametrize("encoders", [{"image": 1}, {"image": 2, "audio": 1}, {"image": 1, "audio": 3}])
@pytest.mark.parametrize("m", [1, 2, 5, 24])
@pytest.mark.parametrize(("f", "b"), [(1, 2), (2, 1), (1, 0)])
def test_modality_parallel_takes_as_long_as_a_chain_of_the_longest_encoder(encoders, num_llm_stages, m, f, b):
    program = modality_parallel(encoders, num_llm_stages, m)
    assert makespan(program, f, b) == (m - 1 + num_llm_stages + max(encoders.values())) * (f + b)
    validate(program)
    validate(add_communication(program))


def test_encoders_of_one_depth_run_at_the_same_time():
    program = modality_parallel({"image": 2, "audio": 2}, 2, 4)
    end = ends(program, lambda action: 1)
    assert [stage.module for stage in program.stages] == ["image"] * 2 + ["audio"] * 2 + ["backbone"] * 2
    assert all(end[0, kind, i] == end[2, kind, i] for kind in (Kind.F, Kind.B) for i in range(4))


def test_generators_follow_the_backbone():
    program = modality_parallel({"image": 1}, 2, 4, generators={"speech": 1, "picture": 2})
    assert program.sinks(2) == (3, 4)
    assert program.stages[5].module == "picture"
    validate(add_communication(program))
    assert makespan(program) == (4 - 1 + 1 + 2 + 2) * 3


def test_a_frozen_encoder_has_no_backward_pass():
    program = modality_parallel({"image": 2, "audio": 1}, 1, 3, has_backward=[False, True, False, True])
    validate(add_communication(program))
    assert [any(action.kind is Kind.B for action in row) for row in program.actions] == [False, True, False, True]
    with pytest.raises(ArgumentError, match="has_backward has 1 entries; there are 4"):
        modality_parallel({"image": 2, "audio": 1}, 1, 3, has_backward=[True])


@pytest.mark.parametrize("m", [1, 4, 7])
def test_replicated_encoders_lengthen_every_stage(m):
    program = add_replicas(one_f_one_b(3, m), {"image": True, "audio": False})
    validate(program)
    validate(add_communication(program))
    encoders_s, llm_s = 1 + 1 + 2, 1 + 2
    # Encoders wait for no other rank, so that filling the pipeline takes the LLM's time alone.
    assert makespan(program, 1, 2) == m * (encoders_s + llm_s) + 2 * llm_s
    assert len({stage.group for stage in program.stages if stage.module == "image"}) == 1


def test_replicas_are_computed_just_before_the_stage():
    program = add_replicas(one_f_one_b(2, 2), {"image": True})
    assert str(program).splitlines() == [
        "rank 0: 2F0 0F0 2F1 0F1 0B0 2B0 0B1 2B1",
        "rank 1: 3F0 1F0 1B0 3B0 3F1 1F1 1B1 3B1",
    ]


def test_replicas_go_back_beside_a_stage_that_does_not_and_feed_nothing_there():
    """A frozen part in front: the replicas sum their gradients, and would wait for the one beside it for ever."""
    chain = one_f_one_b(2, 2)
    frozen = replace(chain, actions=(tuple(a for a in chain.actions[0] if a.kind is Kind.F), chain.actions[1]))
    program = add_replicas(frozen, {"image": True, "audio": False})
    validate(program)
    assert str(program).splitlines()[0] == "rank 0: 2F0 4F0 0F0 2B0 2F1 4F1 0F1 2B1"
    assert (program.sinks(2), program.sinks(3), program.sinks(4)) == ((), (1,), (0,))


@pytest.mark.parametrize("program", [interleaved_1f1b(2, 2, 4), zb_h1(3, 5)])
def test_replicas_can_be_added_to_any_schedule(program):
    replicated = add_replicas(program, {"image": True}, [1, 2])
    validate(replicated)
    assert replicated.num_stages == program.num_stages + 2
    assert replicated.sources(2) == (1, program.num_stages + 1)
