"""Makespans and bubbles that are known exactly, from the papers of the schedules."""

import numpy as np
import pytest

from motet.schedule import gpipe, interleaved_1f1b, one_f_one_b, split_parts, zb_h1
from motet.schedule.generators.modality_parallel import modality_parallel
from motet.schedule.program import Action, Kind, Program, Stage
from motet.simulate import bubbles, simulate, stage_times

BACKENDS = pytest.mark.parametrize("backend", ["native", "reference"])
SIZES = pytest.mark.parametrize(("p", "m"), [(1, 1), (2, 1), (4, 8), (8, 5), (3, 20)])


@BACKENDS
@SIZES
@pytest.mark.parametrize("schedule", [gpipe, one_f_one_b])
def test_gpipe_and_1f1b_take_m_plus_p_minus_1_rounds(schedule, p, m, backend):
    timeline = simulate(schedule(p, m), stage_times([1] * p, [2] * p), backend=backend)
    assert timeline.makespan_s == (m + p - 1) * 3.0


@BACKENDS
@pytest.mark.parametrize(("p", "v", "m"), [(2, 1, 2), (4, 2, 8), (3, 4, 12)])
def test_interleaved_bubbles_are_p_minus_1_over_v_m_of_the_work(p, v, m, backend):
    timeline = simulate(interleaved_1f1b(p, v, m), stage_times([1] * p * v, [2] * p * v), backend=backend)
    work_s = 3.0 * v * m
    assert timeline.makespan_s - work_s == (p - 1) / (v * m) * work_s
    assert bubbles(timeline).busy_s.tolist() == [work_s] * p


@BACKENDS
@pytest.mark.parametrize(("f", "i", "w"), [(2, 2, 1), (1, 1, 1), (3, 4, 2)])
def test_zb_h1_bubble_is_p_minus_1_times_f_plus_i_minus_w(f, i, w, backend):
    p, m = 4, 12
    timeline = simulate(zb_h1(p, m), stage_times([f] * p, [i + w] * p, weight_s=[w] * p), backend=backend)
    assert timeline.makespan_s == m * (f + i + w) + (p - 1) * max(f + i - w, f)


@BACKENDS
def test_a_send_adds_to_every_hop_of_the_fill_and_the_drain(backend):
    timeline = simulate(gpipe(3, 1), stage_times([1] * 3, [2] * 3, send_s=0.25), backend=backend)
    assert timeline.makespan_s == 3 * 3 + 4 * 0.25
    sends = [span for span in timeline if span.kind == "SEND_F"]
    assert [(span.action, span.start_s, span.end_s) for span in sends] == [
        ("0SEND_F0>1", 1.0, 1.25),
        ("1SEND_F0>2", 2.25, 3.5 - 1.0),
    ]


@BACKENDS
def test_microbatches_have_times_of_their_own(backend):
    forward, backward = np.array([[1.0, 5.0, 2.0]] * 2), np.array([[2.0, 3.0, 4.0]] * 2)
    timeline = simulate(gpipe(2, 3), stage_times(forward, backward), backend=backend)
    # Forward: 1, 6, 8 on rank 0; 2, 11, 13 on rank 1. Backward in GPipe's order, from the one that is behind.
    rows = {span.action: (span.start_s, span.end_s) for span in timeline}
    assert [rows[f"1F{microbatch}"] for microbatch in range(3)] == [(1.0, 2.0), (6.0, 11.0), (11.0, 13.0)]
    order = [int(action[2:]) for action in timeline.action if action.startswith("1B")]
    taken = np.cumsum(backward[0][order])
    assert [rows[f"1B{microbatch}"][1] for microbatch in order] == (13.0 + taken).tolist()
    start_s = 13.0 + taken[0]
    for microbatch, ready_s in zip(order, 13.0 + taken):
        start_s = max(start_s, ready_s)
        assert rows[f"0B{microbatch}"][0] == start_s
        start_s += backward[0][microbatch]


@BACKENDS
@pytest.mark.parametrize("parts", [2, 4])
def test_parts_of_a_pass_take_as_long_as_the_pass(parts, backend):
    program = one_f_one_b(4, 6)
    times = stage_times([1] * 4, [2] * 4)
    split = split_parts(split_parts(program, 1, parts, parts), 2, 1, parts)
    whole = simulate(program, times, backend=backend)
    assert simulate(split, times, backend=backend).makespan_s == whole.makespan_s


@BACKENDS
def test_encoders_in_parallel_feed_one_backbone(backend):
    stages = (Stage(0, "image"), Stage(1, "audio"), Stage(2, "backbone"))
    rows = (
        (Action(0, Kind.F, 0), Action(0, Kind.B, 0)),
        (Action(1, Kind.F, 0),),
        (Action(2, Kind.F, 0), Action(2, Kind.B, 0)),
    )
    program = Program(stages, ((0, 2), (1, 2)), rows, 1)
    timeline = simulate(program, stage_times([3, 5, 2], [6, 0, 4]), backend=backend)
    assert [(span.action, span.start_s) for span in timeline] == [
        ("0F0", 0.0),
        ("0B0", 11.0),
        ("1F0", 0.0),
        ("2F0", 5.0),
        ("2B0", 7.0),
    ]
    assert timeline.makespan_s == 17.0
    assert list(timeline.module) == ["image", "image", "audio", "backbone", "backbone"]


@BACKENDS
@pytest.mark.parametrize(("image", "audio", "llm", "m"), [(1, 2, 3, 8), (3, 1, 2, 5)])
def test_encoders_in_parallel_fill_the_pipeline_as_long_as_the_longest(image, audio, llm, m, backend):
    program = modality_parallel({"image": image, "audio": audio}, llm, m)
    times = stage_times([1] * program.num_stages, [2] * program.num_stages)
    assert simulate(program, times, backend=backend).makespan_s == (m - 1 + llm + max(image, audio)) * 3.0
