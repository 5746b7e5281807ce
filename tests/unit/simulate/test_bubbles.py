"""Bubbles by kind: each cause is told, and with the busy time they make up the step on every rank."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from motet.core.plan import Plan, Unit
from motet.core.shapes import Transformer, connect, language_model, multimodal, vit
from motet.core.timeline import Span, Timeline
from motet.core.workload import BatchLengths, ItemLengths, Workload
from motet.cost.analytic import Analytic
from motet.cost.catalogue import cluster
from motet.schedule import one_f_one_b
from motet.schedule.program import Action, Kind, Program, Stage
from motet.simulate import BUBBLE_KINDS, bubbles, simulate, stage_times
from motet.simulate.bubbles import bubble_shares
from motet.simulate.predict.predict import predict
from unit.simulate.programs import programs, times_of


def idle(timeline):
    """By rank, the kinds of bubbles that are there."""
    return [
        {kind: seconds for kind, seconds in zip(BUBBLE_KINDS, row.tolist()) if seconds}
        for row in bubbles(timeline).idle_s
    ]


def test_pipeline_bubbles_are_warmup_cooldown_and_other():
    timeline = simulate(one_f_one_b(3, 4), stage_times([1] * 3, [2] * 3))
    assert idle(timeline) == [
        {"pp_other": 6.0},
        {"pp_warmup": 1.0, "pp_other": 3.0, "pp_cooldown": 2.0},
        {"pp_warmup": 2.0, "pp_cooldown": 4.0},
    ]
    found = bubbles(timeline)
    assert found.step_s == 18.0
    assert found.mean_s["pp_warmup"] == 1.0
    assert found.share["pp_warmup"] == pytest.approx(1 / 18)
    assert found.total_share == pytest.approx(6 / 18)


def test_data_parallel_bubbles_and_stragglers():
    stages = tuple(Stage(rank, "backbone", 0) for rank in range(2))
    kinds = (Kind.GATHER, Kind.F, Kind.B, Kind.REDUCE, Kind.STEP)
    rows = tuple(
        tuple(Action(rank, kind, 0 if kind in (Kind.F, Kind.B) else -1) for kind in kinds) for rank in range(2)
    )
    times = replace(
        stage_times([1, 3], [1, 1]), gather_s=np.array([0.5]), reduce_s=np.array([0.75]), step_s=np.array([0.25])
    )
    assert idle(simulate(Program(stages, (), rows, 1), times)) == [
        {"dp_gather": 0.5, "dp_reduce": 0.75, "straggler": 2.0},
        {"dp_gather": 0.5, "dp_reduce": 0.75},
    ]


def test_an_exchange_and_tensor_parallel_communication_are_told():
    stages = (Stage(0, "image", 0), Stage(0, "backbone", 1))
    row = (Action(0, Kind.F, 0), Action(0, Kind.EXCHANGE_F, 0, peer=1), Action(1, Kind.F, 0))
    times = replace(
        stage_times([1, 2], [0, 0]), exchange_s=np.array([[0.5]]), forward_tensor_s=np.array([[0.0], [0.125]])
    )
    timeline = simulate(Program(stages, ((0, 1),), (row,), 1), times)
    assert idle(timeline) == [{"exchange": 0.5, "tp": 0.125}]


def test_measured_spans_count_by_their_kind():
    def span(rank, kind, start_s, end_s):
        return Span(rank, kind, 7, 0, start_s, end_s, kind, "image")

    measured = Timeline.of(
        [
            span(0, "F", 10.0, 11.0),
            span(0, "EXCHANGE_F", 11.0, 13.0),
            span(0, "B", 13.5, 14.0),
            span(0, "NORM", 14.0, 14.5),
            span(1, "F", 10.5, 12.0),
            span(1, "EXCHANGE_F", 12.0, 13.0),
            span(1, "B", 13.0, 14.0),
            span(1, "REDUCE", 14.0, 14.25),
            span(1, "NORM", 14.25, 14.5),
        ]
    )
    assert bubbles(measured).busy_s.tolist() == [1.5, 2.5]
    assert idle(measured) == [
        {"exchange": 2.0, "pp_other": 0.5, "norm": 0.5},
        {"exchange": 1.0, "pp_warmup": 0.5, "dp_reduce": 0.25, "norm": 0.25},
    ]


@given(data=st.data(), overlap=st.booleans())
def test_busy_time_and_bubbles_make_up_the_step_on_every_rank(data, overlap):
    program = data.draw(programs())
    timeline = simulate(program, data.draw(times_of(program)), overlap=overlap)
    found = bubbles(timeline)
    assert found.step_s == timeline.makespan_s
    assert np.allclose(found.busy_s + found.idle_s.sum(axis=1), found.step_s)
    assert (found.idle_s >= 0).all()
    took_s = (timeline.end_s - timeline.start_s) * [stream == "compute" for stream in timeline.stream]
    assert np.allclose(found.busy_s, np.bincount(timeline.rank, took_s, minlength=timeline.num_ranks))


def test_an_empty_timeline_has_no_bubbles():
    assert bubbles(Timeline.of()).total_share == 0.0


def test_means_are_over_ranks_of_the_cluster():
    """A row may stand for several ranks, which share its work: four of five are busy all the time here."""
    spans = [Span(0, "0F0", 0, 0, 0.0, 1.0, "F", "image"), Span(1, "1F0", 0, 0, 0.0, 5.0, "F", "backbone")]
    timeline = Timeline.of(spans).named(["rank 0", "ranks 1-4"], [1, 4])
    found = bubbles(timeline)
    assert found.total_share == pytest.approx(0.8 / 5) and sum(found.mean_s.values()) == pytest.approx(4.0 / 5)
    assert bubbles(Timeline.of(spans)).total_share == pytest.approx(0.8 / 2)


def test_a_prediction_says_for_how_many_ranks_its_rows_stand():
    shape = Transformer(256, 512, 4)
    model = multimodal("toy", language_model(shape, 2, 1000), [connect(vit("image", shape, 1), 256)])
    units = Unit("image", ({"image": 1},)), Unit("backbone", ({"backbone": 2},), first_rank=1, tp=4)
    plan = Plan(model, cluster("h100", 1, 5), units, batch_size=4, schedule="1f1b")
    items = ItemLengths(np.arange(4), np.full(4, 64), np.full(4, 64))
    batch = BatchLengths(np.full(4, 100), np.full(4, 50), np.zeros(4, np.int32), {"image": items})
    prediction = predict(plan, Workload("even", batch), Analytic(plan.cluster))
    by_row = bubble_shares(prediction.timeline)
    assert by_row[0] > by_row[1] and prediction.bubble_share == pytest.approx((by_row[0] + 4 * by_row[1]) / 5)
    assert sum(prediction.bubbles.share.values()) == pytest.approx(prediction.bubble_share)
