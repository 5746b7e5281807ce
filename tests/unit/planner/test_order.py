"""A Plan keeps the order of examples with the fastest simulated step, never a slower one than as they come."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings

from motet.assign.groups import groups_under
from motet.core.errors import UserError
from motet.core.sampler import Sampler
from motet.core.shapes import Transformer, connect, language_model, multimodal, vit
from motet.core.workload import total_lengths
from motet.planner.bubble_filling.propose import propose_bubble_filling
from motet.planner.candidate import Candidate, Pins, RuledOut, predict_candidate
from motet.planner.chain.propose import propose_chain
from motet.planner.data_parallel.propose import propose_data_parallel
from motet.planner.disaggregated.propose import propose_disaggregated
from motet.planner.modality_parallel.propose import propose_modality_parallel
from motet.planner.order import (
    CAP_GROWTH,
    NUM_BATCHES,
    can_win,
    caps_for,
    share_left,
    with_best_order,
    with_pinned_deal,
)
from motet.planner.pins import parse_pins
from motet.planner.report import winner_in_words
from motet.planner.search import search
from motet.simulate.predict.predict import assign_batch
from unit.planner.jobs import job, jobs

PIPELINES = {
    "chain": propose_chain,
    "modality parallel": propose_modality_parallel,
    "disaggregated": propose_disaggregated,
    "bubble filling": propose_bubble_filling,
}


def leader(given_job, strategy, **pins):
    return next(one for one in strategy(given_job, Pins(**pins)) if isinstance(one, Candidate))


@pytest.mark.parametrize("name", PIPELINES)
@pytest.mark.parametrize("spread", [0.6, 1.0])
def test_a_pipeline_is_as_fast_or_faster_and_fits(name, spread):
    given_job = job(batch_size=64, spread=spread)
    candidate = leader(given_job, PIPELINES[name])
    given = predict_candidate(given_job, candidate)
    found, prediction = with_best_order(given_job, candidate, given, Pins())
    assert prediction.step_s <= given.step_s
    assert prediction.step_s == predict_candidate(given_job, found).step_s
    assert prediction.peak_bytes.max() <= given_job.capacity_bytes
    assert (prediction.step_s < given.step_s) == (found.plan != candidate.plan)
    assert replace(found.plan, order="given", microbatch_caps={}) == candidate.plan
    if found.plan != candidate.plan:
        percent = f"{1 - prediction.step_s / given.step_s:.1%}"
        assert percent in found.facts[0] and found.facts[1:] == candidate.facts
    again, _ = with_best_order(given_job, candidate, given, Pins())
    assert again.plan == found.plan


def test_uneven_lengths_gain():
    given_job = job(batch_size=64, spread=1.0)
    for strategy in (propose_chain, propose_modality_parallel):
        candidate = leader(
            given_job, strategy, microbatch_size=2, schedule="1f1b", pp=2 if strategy is propose_chain else None
        )
        given = predict_candidate(given_job, candidate)
        found, prediction = with_best_order(given_job, candidate, given, Pins())
        assert found.plan.order == "both" and prediction.step_s < 0.95 * given.step_s


def test_the_bound_holds_where_caps_leave_fewer_microbatches():
    items = {"image": {"length": {"value": 600}, "length_per_token": 4}}
    task = {"name": "all", "text": {"median": 300, "spread": 0.8, "max": 4000}, "items": items}
    shape, llm = Transformer(256, 2048, 4), Transformer(512, 2048, 8, causal=True)
    spec = multimodal("small", language_model(llm, 4, 4000), [connect(vit("image", shape, 3), 512, "linear")])
    workload = Sampler.model_validate({"task": [task]}).workload(num_examples=64)
    given_job = replace(job(spec, memory_mbytes=400, num_nodes=1, batch_size=24), workload=workload)
    given_job = replace(given_job, cluster=replace(given_job.cluster, ranks_per_node=2))
    candidate = leader(given_job, propose_chain, schedule="zb_v", microbatch_size=2)
    found, prediction = with_best_order(given_job, candidate, predict_candidate(given_job, candidate), Pins())
    assert found.plan.microbatch_caps and candidate.bound_s > prediction.step_s >= found.bound_s
    assert found.bound_s > 0.9 * prediction.step_s
    # Such a candidate may win, though its bound as its examples come says that it cannot.
    assert can_win(given_job, candidate, Pins(), candidate.bound_s)
    assert not can_win(given_job, candidate, Pins(), found.bound_s)
    assert not can_win(given_job, candidate, Pins(order="given"), candidate.bound_s)


@pytest.mark.slow
@given(any_job=jobs())
@settings(max_examples=10)
def test_no_bound_is_above_the_step_of_an_order(any_job):
    for strategy in (propose_chain, propose_modality_parallel):
        proposed = [one for one in strategy(any_job, Pins()) if not isinstance(one, RuledOut)]
        for candidate in [one for one in proposed if one.plan.microbatch_size > 1][:2]:
            plans = [replace(candidate.plan, order=order) for order in ("given", "both", "intra", "inter")]
            plans.append(replace(plans[1], microbatch_caps=caps_for(any_job, candidate.plan)))
            as_they_come = any_job.assignment(candidate.plan)
            for plan in plans:
                step_s = predict_candidate(any_job, replace(candidate, plan=plan)).step_s
                share = share_left(any_job, plan, as_they_come, any_job.assignment(plan))
                assert candidate.bound_s * share <= step_s


def test_what_is_even_or_pinned_or_no_pipeline_stays_as_it_is():
    for given_job, strategy, pins in (
        (job(batch_size=64), propose_chain, Pins()),
        (job(batch_size=64, spread=1.0), propose_chain, Pins(order="given")),
        (job(batch_size=64, spread=1.0), propose_data_parallel, Pins()),
    ):
        candidate = leader(given_job, strategy)
        given = predict_candidate(given_job, candidate)
        assert with_best_order(given_job, candidate, given, pins) == (candidate, given)


@pytest.mark.parametrize("microbatch_size", [2, 4])
def test_caps_are_the_least_that_hold_every_batch(microbatch_size):
    given_job = job(batch_size=64, spread=0.8)
    plan = leader(given_job, propose_chain, microbatch_size=microbatch_size).plan
    caps = caps_for(given_job, plan)
    assert set(caps) == {"image", "backbone"} or set(caps) == {"audio", "backbone"}
    batches = [given_job.workload.draw(64, np.random.default_rng(number)) for number in range(NUM_BATCHES)]
    sizes = [{name: total_lengths(batch, name) for name in caps} for batch in batches]
    most = 64 // microbatch_size
    assert all(groups_under(caps, of, most) is not None for of in sizes)
    less = {name: round(cap / CAP_GROWTH) for name, cap in caps.items()}
    assert any(groups_under(less, of, most) is None for of in sizes)
    mean = {name: sum(of[name].sum() for of in sizes) / NUM_BATCHES / most for name in caps}
    assert all(mean[name] < cap < 2.5 * mean[name] for name, cap in caps.items())
    capped = replace(plan, microbatch_caps=caps)
    placed = assign_batch(capped, given_job.batch, given_job.cost)
    owner = placed.modules["backbone"]
    slot = owner.microbatch * owner.num_replicas + owner.replica
    single = np.bincount(slot, minlength=most) == 1
    assert (np.bincount(slot, owner.length, most)[~single] <= caps["backbone"]).all()


def test_single_examples_and_uneven_replicas_have_no_caps():
    given_job = job(batch_size=64, spread=0.8)
    assert caps_for(given_job, leader(given_job, propose_chain, microbatch_size=1).plan) == {}
    plan = leader(given_job, propose_disaggregated, microbatch_size=4).plan
    units = (replace(plan.units[0], dp=plan.units[-1].dp * 2), *plan.units[1:])
    assert caps_for(given_job, replace(plan, units=units)) == {}


def test_a_pinned_order_is_that_of_every_pipeline():
    given_job = job(batch_size=32, spread=1.0)
    strategies = {"data parallel": propose_data_parallel, "chain": propose_chain}
    found = search(given_job, strategies, parse_pins(["order=inter"], strategies), is_refined=False)
    assert {result.candidate.plan.order for result in found.results} == {"inter"}
    assert any("order is pinned to 'inter'" in ruled.why for ruled in found.ruled_out)
    as_given = search(given_job, strategies, Pins(order="given"), is_refined=False)
    assert {result.candidate.plan.order for result in as_given.results} == {"given"}
    assert any(result.candidate.plan.schedule == "data_parallel" for result in as_given.results)
    with pytest.raises(UserError, match="order=outer: must be one of given, intra, inter, both"):
        parse_pins(["order=outer"], strategies)
    candidate = leader(given_job, propose_data_parallel)
    assert isinstance(with_pinned_deal(candidate, Pins(order="both")), RuledOut)
    assert with_pinned_deal(candidate, Pins(order="given")) is candidate


def test_the_search_orders_the_best_of_a_strategy_and_says_so():
    given_job = job(batch_size=64, spread=1.0)
    free, as_given = (
        search(given_job, {"chain": propose_chain}, Pins(order=order), is_refined=False) for order in (None, "given")
    )
    assert free.best.prediction.step_s < as_given.best.prediction.step_s
    assert free.best.candidate.plan.order != "given"
    words = " ".join(winner_in_words(free))
    assert "in every step" in words or "of every step" in words
    assert "less than as they come" in words
