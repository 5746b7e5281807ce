"""Encoders in the bubbles of a backbone."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from motet.core.errors import ArgumentError
from motet.core.plan import Fill
from motet.schedule import (
    ScheduleError,
    add_communication,
    dumps,
    interleaved_1f1b,
    loads,
    one_f_one_b,
    split_parts,
    validate,
)
from motet.schedule.check.dry_run import dry_run
from motet.schedule.generators.bubble_filling import (
    EncoderPipeline,
    coarse_fills,
    encoder_stages,
    fill_bubbles,
    global_order,
)
from unit.schedule.longest_path import ends


def pipelines(num_ranks, num_stages, counts, module="image", **options):
    """Pipelines of num_stages over num_ranks ranks, side by side; pipeline j encodes counts[j] microbatches."""
    beside = num_ranks // num_stages
    assert beside == len(counts)
    return [
        EncoderPipeline(module, tuple(range(j, num_ranks, beside)), taken, **options)
        for j, taken in enumerate(global_order(counts))
    ]


def test_microbatches_are_ordered_by_when_pipelines_end():
    assert global_order([3, 5]) == ((0, 2, 4), (1, 3, 5, 6, 7))
    assert global_order([4, 4]) == ((0, 2, 4, 6), (1, 3, 5, 7))


@given(st.lists(st.integers(1, 6), min_size=1, max_size=4))
def test_every_microbatch_is_encoded_once(counts):
    found = global_order(counts)
    assert sorted(sum(found, ())) == list(range(sum(counts)))
    assert [len(own) for own in found] == counts
    assert all(list(own) == sorted(own) for own in found)


def test_coarse_fills_are_before_and_after_all_work():
    program = one_f_one_b(2, 3)
    encoders = pipelines(2, 1, [1, 2])
    filled = fill_bubbles(program, encoders, coarse_fills(program, encoders))
    assert str(filled).splitlines() == [
        "rank 0: 2F0 0F0 0F1 0B0 0F2 0B1 0B2 2B0",
        "rank 1: 3F1 3F2 1F0 1B0 1F1 1B1 1F2 1B2 3B1 3B2",
    ]
    assert filled.edges == ((0, 1), (2, 0), (3, 0))
    assert [stage.microbatches for stage in filled.stages[2:]] == [(0,), (1, 2)]


@pytest.mark.parametrize("num_stages", [1, 2, 4])
@pytest.mark.parametrize("num_parts", [1, 3])
@pytest.mark.parametrize("deferred", [False, True])
def test_coarse_fills_can_be_executed(num_stages, num_parts, deferred):
    program = interleaved_1f1b(4, 2, 8, deferred_warmup=deferred)
    encoders = pipelines(4, num_stages, [8 * num_stages // 4] * (4 // num_stages))
    encoders += pipelines(4, 4, [8], module="audio", has_backward=(False, False, True, True))
    filled = fill_bubbles(program, encoders, coarse_fills(program, encoders, num_parts))
    validate(filled)
    placed = add_communication(filled)
    validate(placed)
    assert loads(dumps(placed)) == placed


def test_the_backbone_waits_for_what_it_is_given():
    program = one_f_one_b(2, 2)
    encoders = pipelines(2, 1, [1, 1])
    end = ends(fill_bubbles(program, encoders, coarse_fills(program, encoders)), lambda action: 1)
    # Both encode at once; the gradient of the first microbatch waits until its rank's own work is over, at 7.
    assert [end[0, "F", 0], end[0, "F", 1], end[1, "F", 0], end[2, "B", 0]] == [2, 3, 3, 8]


@pytest.mark.parametrize("num_stages", [1, 2, 4])
def test_encoders_do_not_change_when_the_backbone_sends(num_stages):
    """In the nominal times by which transfers are ordered."""
    program = interleaved_1f1b(4, 3, 8, deferred_warmup=True)
    encoders = pipelines(4, num_stages, [8 * num_stages // 4] * (4 // num_stages))
    filled = dry_run(add_communication(fill_bubbles(program, encoders, coarse_fills(program, encoders))))
    for action, start in dry_run(add_communication(program)).start.items():
        assert start <= filled.start[action] < start + 0.1


def test_slices_fill_the_bubbles_of_parts():
    program = split_parts(one_f_one_b(1, 2), 0, 2, 2)
    encoders = [EncoderPipeline("image", (0,), (0, 1))]
    early = [Fill(0, "1F0", "0F0.0"), Fill(0, "1F1", "0F0.1")]
    late = [Fill(0, "1B0", "0B1.1"), Fill(0, "1B1")]
    filled = fill_bubbles(program, encoders, early + late)
    assert str(filled) == "rank 0: 1F0 0F0.0 1F1 0F0.1 0B0.0 0B0.1 0F1.0 0F1.1 0B1.0 1B0 0B1.1 1B1"
    validate(filled)


WRONG = {
    "stage 0 is no encoder's; they are 2 to 3": Fill(0, "0F0"),
    "there are 2 ranks|is on rank 1; stage 2 is on rank 0": Fill(1, "2F0", "0F0"),
    "no action": Fill(0, "what", "0F0"),
    "fill 2F1 is no pass of its stage": Fill(0, "2F1", "0F0"),
    "fill 2F0 runs before '1F0', which rank 0 does not do": Fill(0, "2F0", "1F0"),
    "fill 2F0 can never run at the end: .*0F0": Fill(0, "2F0"),
    "no fill says where 2F0 runs": None,
    "fill 2F0.1 is no pass|no fill says where 2F0.0 runs": Fill(0, "2F0.1", "0F0"),
}


@pytest.mark.parametrize("words", WRONG)
def test_wrong_fills_are_refused(words):
    program = one_f_one_b(2, 2)
    encoders = pipelines(2, 1, [1, 1])
    first, *rest = coarse_fills(program, encoders)
    assert first == Fill(0, "2F0", "0F0")
    with pytest.raises(Exception, match=words) as caught:
        fill_bubbles(program, encoders, [*([WRONG[words]] if WRONG[words] else []), *rest])
    assert "\n" not in str(caught.value)


def test_a_fill_that_comes_twice_is_refused():
    program = one_f_one_b(2, 2)
    encoders = pipelines(2, 1, [1, 1])
    fills = coarse_fills(program, encoders)
    with pytest.raises(ArgumentError, match="fill 2F0 comes twice"):
        fill_bubbles(program, encoders, [*fills, fills[0]])


def test_passes_in_other_parts_backward_than_forward_are_refused():
    program = one_f_one_b(2, 2)
    encoders = pipelines(2, 1, [1, 1])
    backward = {fill for fill in coarse_fills(program, encoders, 2) if "B" in fill.action}
    fills = [*(fill for fill in coarse_fills(program, encoders, 3) if "F" in fill.action), *backward]
    with pytest.raises(ArgumentError, match="stage 2 has forward passes in 3 parts and backward passes in 2; "):
        fill_bubbles(program, encoders, fills)


def test_a_backward_pass_before_its_gradient_is_refused():
    program = one_f_one_b(2, 2)
    encoders = pipelines(2, 1, [1, 1])
    fills = [replace(fill, before="0B0") if fill.action == "2B0" else fill for fill in coarse_fills(program, encoders)]
    with pytest.raises(ArgumentError, match="fill 2B0 can never run before 0B0: 2B0, 0B0 wait for each other"):
        fill_bubbles(program, encoders, fills)


def test_wrong_encoders_are_refused():
    program = one_f_one_b(2, 2)
    for encoders, words in (
        ([EncoderPipeline("image", (0,), (0,))], r"encode microbatches \[0\]"),
        ([EncoderPipeline("image", (2,), (0, 1))], "there are 2"),
        ([EncoderPipeline("image", (0,), (0, 1), sink=9)], "feeds stage 9; there are 2"),
        ([EncoderPipeline("image", (0,), (0, 1), has_backward=(True, True))], "has 2 flags; it must have one a stage"),
    ):
        with pytest.raises(ArgumentError, match=words):
            fill_bubbles(program, encoders, ())
    with pytest.raises(ArgumentError, match="before communication"):
        fill_bubbles(add_communication(program), [], ())


def test_stages_are_numbered_after_the_backbones():
    assert encoder_stages(one_f_one_b(4, 4), pipelines(4, 2, [2, 2])) == (range(4, 6), range(6, 8))


@pytest.mark.parametrize("dropped", ["2F0", "3F1", "3B1", "3SEND_F1>0", "0RECV_F1<3"])
def test_a_proof_holds_stages_to_the_microbatches_that_they_take(dropped):
    program = one_f_one_b(2, 3)
    encoders = pipelines(2, 1, [1, 2])
    placed = add_communication(fill_bubbles(program, encoders, coarse_fills(program, encoders)))
    rows = tuple(tuple(action for action in row if str(action) != dropped) for row in placed.actions)
    assert rows != placed.actions
    with pytest.raises(ScheduleError):
        validate(replace(placed, actions=rows))


def test_a_stage_cannot_take_microbatches_that_are_not_there():
    program = one_f_one_b(1, 2)
    with pytest.raises(ScheduleError, match=r"Stage 0 takes microbatches \(0, 2\); there are 2"):
        validate(replace(program, stages=(replace(program.stages[0], microbatches=(0, 2)),)))
