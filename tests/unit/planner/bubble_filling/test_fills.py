"""Encoders placed in bubbles: as the simulator runs them, and no worse than what is placed by hand."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from motet.core.errors import ArgumentError
from motet.core.timeline import Timeline
from motet.planner.bubble_filling.backbone_bubbles import BubbleRoom, Slices, backbone_of
from motet.planner.bubble_filling.encoder_passes import Encoders
from motet.planner.bubble_filling.fill_search import fastest_step
from motet.planner.bubble_filling.fill_times import FillTimer
from motet.planner.bubble_filling.fills import fill
from motet.schedule import (
    EncoderPipeline,
    add_data_parallel,
    fill_bubbles,
    global_order,
    interleaved_1f1b,
    one_f_one_b,
    split_parts,
    validate,
)
from motet.simulate import simulate
from motet.simulate.engine.stage_times import Part, StageTimes

HALVES = (Part(0.5, "tensor"), Part(0.5)) * 2


class Case:
    """A backbone of num_ranks * num_chunks stages, and encoders with alike pp ranks beside it.

    passes: per encoder, seconds of a pass forward and backward on each pp rank. tensor: share of the backbone's passes.
    """

    def __init__(
        self, *, num_ranks=4, num_chunks=2, size=8, pp=1, passes=((1.0, 2.0),), slices=4, tensor=0.25, data_s=0.5
    ):
        self.num_ranks, self.pp, self.passes, self.slices = num_ranks, pp, passes, slices
        self.num_stages = num_ranks * num_chunks
        program = one_f_one_b(num_ranks, size)
        if num_chunks > 1:
            program = interleaved_1f1b(num_ranks, num_chunks, size, deferred_warmup=True)
        parts = dict.fromkeys(range(self.num_stages), HALVES) if tensor else {}
        for stage in parts:
            program = split_parts(program, stage, len(HALVES), len(HALVES))
        ones = np.ones((self.num_stages, 1))
        self.program = program
        self.times = StageTimes(
            (1 - tensor) * ones,
            (1 - tensor) * ones,
            (1 - tensor) * ones,
            forward_tensor_s=tensor * ones,
            backward_tensor_s=2 * tensor * ones,
            gather_s=np.full(self.num_stages, data_s),
            reduce_s=np.full(self.num_stages, data_s),
            forward_parts=parts,
            backward_parts=parts,
        )
        alone = simulate(self.whole(self.program), self.times)
        self.alone_s = alone.makespan_s
        self.backbone = backbone_of(alone, size)

    @property
    def encoders(self):
        def sliced(direction):
            on_rank = tuple(
                Slices(both[direction] / self.slices, self.slices if both[direction] else 0) for both in self.passes
            )
            return (on_rank,) * self.pp

        return Encoders(sliced(0), sliced(1))

    def whole(self, program):
        return add_data_parallel(program, dict.fromkeys(range(self.num_ranks), 1), range(self.num_stages))

    def filled(self, placed):
        beside = self.num_ranks // self.pp
        has_backward = [(back > 0,) * self.pp for _, back in self.passes]
        pipelines = [
            EncoderPipeline(f"encoder {n}", tuple(range(j, self.num_ranks, beside)), own, has_backward=flags)
            for n, flags in enumerate(has_backward)
            for j, own in enumerate(placed.pipelines)
        ]
        return fill_bubbles(self.program, pipelines, placed.fills)

    def simulated_s(self, placed):
        forward, backward = (np.repeat([both[d] for both in self.passes], self.num_ranks)[:, None] for d in (0, 1))
        none = np.zeros_like(forward)
        times = replace(
            self.times,
            forward_s=np.concatenate([self.times.forward_s, forward]),
            input_s=np.concatenate([self.times.input_s, backward]),
            weight_s=np.concatenate([self.times.weight_s, none]),
            forward_tensor_s=np.concatenate([self.times.forward_tensor_s, none]),
            backward_tensor_s=np.concatenate([self.times.backward_tensor_s, none]),
            gather_s=np.concatenate([self.times.gather_s, none[:, 0]]),
            reduce_s=np.concatenate([self.times.reduce_s, none[:, 0]]),
        )
        return simulate(self.whole(self.filled(placed)), times).makespan_s


@st.composite
def cases(draw):
    num_ranks = draw(st.sampled_from([2, 4]))
    seconds = st.sampled_from([0.25, 0.7, 1.0, 3.0])
    passes = [(draw(seconds), draw(st.sampled_from([0.0, 0.5, 1.4, 4.0]))) for _ in range(draw(st.integers(1, 2)))]
    return Case(
        num_ranks=num_ranks,
        num_chunks=draw(st.sampled_from([1, 2, 3])),
        size=draw(st.integers(num_ranks, 9)),
        pp=draw(st.sampled_from([pp for pp in (1, 2, 4) if num_ranks % pp == 0])),
        passes=tuple(passes),
        slices=draw(st.sampled_from([1, 3, 8])),
        tensor=draw(st.sampled_from([0.0, 0.25])),
        data_s=draw(st.sampled_from([0.0, 2.0])),
    )  # fmt: skip


@pytest.mark.slow
@given(cases())
@settings(max_examples=40, deadline=None)
def test_what_is_placed_can_run_and_takes_no_longer_than_predicted(case):
    filling = fill(case.backbone, case.encoders, case.num_stages)
    for placed in (filling.coarse, filling.fine):
        validate(case.filled(placed))
        assert case.alone_s - 1e-9 <= case.simulated_s(placed) <= placed.step_s + 1e-9
        assert 0 <= placed.hidden <= 1 + 1e-9
    assert filling.fine.step_s <= filling.coarse.step_s + 1e-9
    assert filling.fine.step_s >= case.alone_s - 1e-9


@pytest.mark.parametrize("pp", [1, 2, 4])
@pytest.mark.parametrize("tensor", [0.0, 0.25])
def test_where_every_delay_is_the_steps_the_prediction_is_what_is_simulated(pp, tensor):
    case = Case(num_chunks=3, size=8, pp=pp, tensor=tensor, passes=((2.0 / pp, 4.0 / pp),))
    filling = fill(case.backbone, case.encoders, case.num_stages)
    for placed in (filling.coarse, filling.fine):
        assert case.simulated_s(placed) == pytest.approx(placed.step_s)


@given(cases())
@settings(max_examples=20, deadline=None)
def test_no_partition_in_turn_is_better(case):
    size, num = case.backbone.num_microbatches, case.num_ranks // case.pp
    for fine in (False, True):
        timer = FillTimer(case.backbone, case.encoders, fine=fine)
        best = fastest_step(timer)
        for sizes in product(range(1, size + 1), repeat=num):
            if sum(sizes) == size:
                assert best.key <= timer.step(global_order(sizes)).key


@given(cases())
@settings(max_examples=20, deadline=None)
def test_a_pipeline_ends_where_its_passes_end(case):
    for fine in (False, True):
        timer = FillTimer(case.backbone, case.encoders, fine=fine)
        step = fastest_step(timer)
        for number, (microbatches, times) in enumerate(zip(step.pipelines, step.times)):
            ends = {one.pp_rank: one.end_s for one, _, _ in timer.passes(number, microbatches, times.lead_s)}
            assert tuple(ends[pp_rank] for pp_rank in range(case.pp)) == times.end_s


def test_small_cases_are_as_good_as_every_assignment():
    for size, passes, tensor in product((4, 5, 6), ((1.0, 2.0), (3.0, 4.0), (0.4, 0.9)), (0.0, 0.25)):
        case = Case(num_ranks=2, size=size, passes=(passes,), tensor=tensor)
        timer = FillTimer(case.backbone, case.encoders, fine=True)
        every = [
            tuple(tuple(i for i in range(size) if of[i] == j) for j in (0, 1))
            for of in product((0, 1), repeat=size)
            if 0 < sum(of) < size
        ]
        least_s = min(timer.step(pipelines).step_s for pipelines in every)
        assert fastest_step(timer).step_s == pytest.approx(least_s)


def test_encoders_that_fit_into_bubbles_cost_nothing():
    case = Case(num_chunks=1, passes=((0.1, 0.1),), slices=8)
    placed = fill(case.backbone, case.encoders, case.num_stages).fine
    assert placed.step_s == pytest.approx(case.alone_s)
    assert placed.hidden == pytest.approx(1)


def test_encoders_without_bubbles_cost_all_they_take():
    case = Case(num_ranks=1, num_chunks=1, size=3, tensor=0.0, data_s=0.0)
    placed = fill(case.backbone, case.encoders, case.num_stages).fine
    assert placed.step_s == pytest.approx(case.alone_s + 3 * 3.0)
    assert placed.hidden == pytest.approx(0)


def test_frozen_encoders_have_no_backward_passes_to_place():
    case = Case(passes=((1.0, 0.0),))
    fills = fill(case.backbone, case.encoders, case.num_stages).fine.fills
    assert len(fills) == 8 * case.slices
    assert all("F" in one.action for one in fills)


def test_more_slices_are_never_slower():
    found = []
    for slices in (1, 2, 4, 8):
        case = Case(num_chunks=1, passes=((1.5, 3.0),), slices=slices)
        found.append(fill(case.backbone, case.encoders, case.num_stages).fine.step_s)
    assert found == sorted(found, reverse=True)
    assert found[-1] < found[0]


def test_messages_and_collectives_of_encoders_delay_what_waits_for_them():
    case = Case(pp=2)
    plain = fill(case.backbone, case.encoders, case.num_stages).fine.step_s
    later = replace(case.encoders, gather_s=0.25, finish_s=(0.5, 0.5))
    assert fill(case.backbone, later, case.num_stages).fine.step_s == pytest.approx(plain + 0.75)
    sent = replace(case.encoders, send_s=0.5)
    assert fill(case.backbone, sent, case.num_stages).fine.step_s > plain


def test_no_pipeline_takes_more_than_it_may():
    case = Case(size=9, passes=((3.0, 6.0),))
    unlimited = fill(case.backbone, case.encoders, case.num_stages)
    limited = fill(case.backbone, replace(case.encoders, max_microbatches=3), case.num_stages)
    for placed in (limited.coarse, limited.fine):
        assert max(map(len, placed.pipelines)) <= 3
    assert limited.fine.step_s >= unlimited.fine.step_s
    with pytest.raises(ArgumentError, match="4 encoder pipelines cannot share 9 microbatches, each taking from 1 to 2"):
        fill(case.backbone, replace(case.encoders, max_microbatches=2), case.num_stages)


def test_what_cannot_be_placed_is_refused():
    case = Case(num_ranks=4, size=3)
    with pytest.raises(ArgumentError, match="4 encoder pipelines cannot share 3 microbatches"):
        fill(case.backbone, case.encoders, case.num_stages)
    case = Case()
    with pytest.raises(ArgumentError, match=r"3 pp ranks forward and 3 backward.*divide the 4 ranks"):
        fill(case.backbone, Encoders(case.encoders.forward * 3, case.encoders.backward * 3), case.num_stages)
    frozen = replace(case.backbone, ready_s=np.full(8, np.inf))
    with pytest.raises(ArgumentError, match="the backbone has none"):
        fill(frozen, case.encoders, case.num_stages)
    with pytest.raises(ArgumentError, match="stage 0 has no forward pass of microbatch 0"):
        backbone_of(Timeline.of(), 2)


def test_dependency_points_are_read_off_the_timeline():
    case = Case(num_ranks=2, num_chunks=1, size=2, tensor=0.0, data_s=0.5)
    # rank 0: gathers, F0, F1, waits, B0, B1; a backward pass takes 2.
    assert case.backbone.needed_s.tolist() == [0.5, 1.5]
    assert case.backbone.ready_s.tolist() == [6.5, 9.5]
    assert case.backbone.done_s[0] == 10.0


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 7)), min_size=1, max_size=8), st.data())
def test_slices_run_in_order_each_in_the_first_bubble_with_room(gaps, data):
    ends = np.cumsum([step for gap in gaps for step in gap]).reshape(-1, 2)
    start, stop = ends[:, 0].astype(float), ends[:, 1].astype(float)
    stop[-1] = start[-1] + 2000
    at_s, slice_s = data.draw(st.integers(-3, int(start[-1]) + 1000)), data.draw(st.integers(1, 4))
    expected = float(at_s)
    for _ in range(num := data.draw(st.integers(1, 20))):
        begins = [max(first, expected) for first, last in zip(start, stop) if max(first, expected) + slice_s <= last]
        expected = min(begins) + slice_s
    assert BubbleRoom(start, stop).end(float(at_s), [Slices(float(slice_s), num)]) == pytest.approx(expected)
