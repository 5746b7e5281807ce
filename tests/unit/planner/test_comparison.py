"""What wins is compared like for like: every leader has its fastest variant, and a gain is one of several batches."""

from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
from hypothesis import given, settings

from motet.core.errors import UserError
from motet.core.plan import PROPOSED_BALANCES, Order, Unit
from motet.planner import comparison as comparing
from motet.planner.candidate import Pins, candidate_step_s, predict_candidate
from motet.planner.comparison import NUM_COMPARED, compare, fewer_replicas, rivals
from motet.planner.report import winner_in_words
from motet.planner.search import search
from motet.planner.strategies import STRATEGIES
from motet.schedule import check_fit
from unit.planner.jobs import job, jobs
from unit.schedule.plans import VLM, plan

BUBBLES, DATA = "bubble filling", "data parallel"


def pinned(name):
    return Pins(strategies=(name,))


@pytest.mark.slow
@settings(max_examples=8)
@given(jobs())
def test_no_way_of_balancing_makes_the_answer_faster(given_job):
    found = search(given_job, {DATA: STRATEGIES[DATA]})
    if found.results:
        best = found.best
        for method in PROPOSED_BALANCES:
            other = replace(best.candidate, plan=replace(best.candidate.plan, balance=method))
            prediction = predict_candidate(given_job, other)
            fits = prediction.peak_bytes.max() <= given_job.capacity_bytes
            assert prediction.step_s >= best.prediction.step_s or not fits


@pytest.mark.parametrize("spread", [0.0, pytest.param(1.0, marks=pytest.mark.slow)])
def test_the_answer_in_bubbles_is_not_faster_without_its_fills_in_any_order(spread):
    given_job = job(batch_size=32, spread=spread)
    best = search(given_job, STRATEGIES, pinned(BUBBLES)).best
    for order in get_args(Order):
        plan = replace(best.candidate.plan, fills=(), filling="static", order=order, microbatch_caps={}, balance="off")
        prediction = predict_candidate(given_job, replace(best.candidate, plan=plan))
        assert prediction.step_s >= best.prediction.step_s


@pytest.mark.parametrize("balance", [pytest.param("off", marks=pytest.mark.slow), "joint"])
def test_a_pinned_way_of_balancing_stays(balance):
    for strategy in (DATA, "chain"):
        found = search(job(batch_size=32, spread=1.0), STRATEGIES, Pins(strategies=(strategy,), balance=balance))
        assert {result.candidate.plan.balance for result in found.results} == {balance}


def test_a_pipelines_leader_is_balanced_where_that_is_faster():
    """Its microbatches are of very different work, and replicas of a chain get even sums of them."""
    given_job = job(batch_size=32, spread=1.0)
    found = search(
        given_job, STRATEGIES, Pins(strategies=("chain",), dp=4, order="given", microbatch_size=1), is_refined=False
    )
    plan, best_s = found.best.candidate.plan, found.best.prediction.step_s
    assert plan.balance == "joint" and "less than with balance" in found.best.candidate.facts[0]
    unbalanced = replace(found.best.candidate, plan=replace(plan, balance="off"))
    assert best_s < predict_candidate(given_job, unbalanced).step_s


@pytest.mark.parametrize(
    ("pins", "said"),
    [
        (Pins(strategies=("chain",), balance="joint", order="both"), "both deal out microbatches; leave one of them"),
        (Pins(strategies=(DATA,), order="intra"), "order is pinned to 'intra', which is of pipelines"),
        (Pins(schedule="data_parallel", order="intra"), "which is of pipelines, and data parallelism is pinned too"),
        (
            Pins(strategies=(DATA, "chain"), filling="by_step"),
            "is of bubble filling, and a pin leaves bubble filling out",
        ),
        (
            Pins(schedule="data_parallel", filling="by_step"),
            "is of bubble filling, and a pin leaves bubble filling out",
        ),
    ],
)
def test_ways_to_deal_out_that_no_plan_has_together_are_refused(pins, said):
    with pytest.raises(UserError, match=said):
        search(job(batch_size=32), STRATEGIES, pins)


@pytest.mark.parametrize("strategies", [pytest.param((), marks=pytest.mark.slow), ("chain",)])
def test_gains_are_of_the_same_batches_and_their_median_is_said(strategies):
    given_job = job(batch_size=32, spread=1.0)
    found = search(given_job, STRATEGIES, Pins(strategies=strategies))
    compared = compare(found)
    assert [comparison.rival for comparison in compared] == list(rivals(found.results))
    words = " ".join(winner_in_words(found))
    for comparison in compared:
        seconds = [
            [predict_candidate(given_job, one.candidate, number).step_s for number in range(NUM_COMPARED)]
            for one in (comparison.rival, found.best)
        ]
        gains = np.divide(*seconds) - 1
        assert np.allclose(comparison.gains, gains) and len(set(gains)) == NUM_COMPARED
        digits = 0 if comparison.gain >= 0.02 else 1
        least, most = (f"{gain:.{digits}%}" for gain in (gains.min(), gains.max()))
        assert f"{np.median(gains):.{digits}%}" in words
        assert f"the median of {NUM_COMPARED} batches with {least} to {most}" in words


def test_seconds_alone_are_those_of_the_prediction():
    given_job = job(batch_size=32, spread=1.0)
    found = search(given_job, STRATEGIES, is_refined=False)
    assert len({one.candidate.strategy for one in found.results}) >= 3
    for one in found.results:
        for filling in ("static", "by_step") if one.candidate.plan.fills else ("static",):
            candidate = replace(one.candidate, plan=replace(one.candidate.plan, filling=filling))
            assert candidate_step_s(given_job, candidate, 1) == predict_candidate(given_job, candidate, 1).step_s


@pytest.mark.slow
def test_where_all_batches_are_alike_one_is_enough():
    found = search(job(batch_size=32), STRATEGIES)
    assert all(len(comparison.gains) == 1 for comparison in compare(found))
    assert "the median of" not in " ".join(winner_in_words(found))


@pytest.mark.slow
def test_gains_of_large_batches_are_those_of_parts_of_them(monkeypatch):
    monkeypatch.setattr(comparing, "MAX_COMPARED", 8)
    given_job = job(batch_size=32, spread=1.0)
    found = search(given_job, STRATEGIES)
    whole = found.best.prediction.step_s
    for one in compare(found):
        assert len(set(one.gains)) == NUM_COMPARED
        assert one.gains[0] == pytest.approx(one.rival.prediction.step_s / whole - 1)
    pipelines = [one.candidate for one in found.results if one.candidate.plan.schedule != "data_parallel"]
    for candidate in pipelines:
        part = fewer_replicas(candidate.plan, 8)
        check_fit(part)
        assert part.batch_size <= 8 or any(unit.dp == 1 for unit in part.units)
        assert part.microbatch_size == candidate.plan.microbatch_size
    assert pipelines


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_fewer_replicas_of_encoders_in_bubbles_can_be_executed(zero):
    """ZeRO 3 of theirs is over replicas that take the same microbatches, of which there are fewer."""
    units = Unit("llm", ({"backbone": 2},) * 4, pp=4, dp=4), Unit("image", ({"image": 4},), dp=16, zero=zero)
    audio = Unit("audio", ({"audio": 2},), dp=16)
    made = plan(VLM, *units, audio, batch_size=32)
    made = replace(made, units=(units[0], replace(units[1], shard_size=4 if zero > 1 else 0), audio))
    part = fewer_replicas(made, 8)
    check_fit(part)
    assert [unit.dp for unit in part.units] == [1, 4, 4]
