"""Colocated data parallelism: what is proposed fits, takes what was estimated, and is no worse than all there is."""

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from motet.assign.balancing import operation_costs, recomputed_blocks
from motet.balance import Speed
from motet.core.cluster import Cluster, Device, Link
from motet.core.plan import Plan, Unit
from motet.core.sampler import Sampler
from motet.core.shapes import Transformer, audio_encoder, connect, language_model, multimodal, vit
from motet.core.spec import ModelSpec
from motet.core.words import size_words
from motet.cost.analytic import Analytic
from motet.planner.candidate import Candidate, Pins, RuledOut, predict_candidate
from motet.planner.data_parallel.loads import EvenBatch, assigned_load, state_of
from motet.planner.data_parallel.propose import propose_data_parallel
from motet.planner.data_parallel.search import DataParallelSearch
from motet.planner.data_parallel.zero import ShardedUnit, shardings, step_s
from motet.planner.job import Job
from motet.schedule import planned
from motet.simulate.predict.predict import assign_batch, predict
from motet.simulate.predict.stage_pricing import Pricing
from motet.simulate.predict.traffic import Traffic
from unit.planner import jobs
from unit.planner.jobs import predicted

LLM = Transformer(512, 2048, 8, 2, gated=True, norm="rms", biases=(), causal=True)


def model(trainable=True):
    return multimodal(
        "small",
        language_model(LLM, 6, 4000),
        [
            connect(vit("image", Transformer(256, 1024, 4), 5, trainable=trainable), 512, downsample=4),
            connect(audio_encoder("audio", Transformer(256, 1024, 4), 4), 512, downsample=4),
        ],
    )


WORKLOAD = Sampler.model_validate(
    {
        "task": [
            {"name": "text", "text": {"median": 300, "spread": 1.0, "min": 16, "max": 2000}},
            {
                "name": "images",
                "text": {"median": 60, "spread": 0.5},
                "items": {
                    "image": {
                        "count": {"choices": [1, 3]},
                        "length": {"median": 500, "spread": 0.5, "max": 2000},
                        "length_per_token": 4,
                    }
                },
            },
            {
                "name": "speech",
                "text": {"median": 40},
                "items": {"audio": {"length": {"median": 800, "spread": 0.4, "max": 1500}, "length_per_token": 4}},
            },
        ]
    }
).workload(num_examples=2000)


def job(memory_mbytes=2000, num_nodes=2, batch_size=64, trainable=True, made: ModelSpec | None = None):
    device = Device("test", {"bf16": 2e13}, int(memory_mbytes * 1e6), 1e12)
    cluster = Cluster(device, num_nodes, 4, Link(1e11, 3e-6), Link(1e10, 1e-5))
    return Job(made or model(trainable), cluster, WORKLOAD, batch_size, Analytic(cluster))


def proposed(given_job, pins=None):
    found = list(propose_data_parallel(given_job, pins or Pins()))
    return [one for one in found if isinstance(one, Candidate)], [one for one in found if isinstance(one, RuledOut)]


def simulated(given_job, plan):
    return predict(plan, given_job.workload, given_job.cost, seed=given_job.seed)


@pytest.mark.slow
@given(
    memory=st.sampled_from([500, 700, 1000, 2000, 8000]),
    num_nodes=st.sampled_from([1, 2, 3]),
    each=st.sampled_from([1, 4, 6]),
    trainable=st.booleans(),
    pins=st.sampled_from(
        [
            Pins(),
            Pins(balance="off"),
            Pins(tp=2),
            Pins(dp=2),
            Pins(recompute="full"),
            Pins(balance="per_phase"),
            Pins(balance="split"),
        ]
    ),
)
@settings(max_examples=25)
def test_what_is_proposed_fits_and_takes_what_was_estimated(memory, num_nodes, each, trainable, pins):
    given_job = job(memory, num_nodes, 12 * num_nodes * each, trainable)
    candidates, ruled_out = proposed(given_job, pins)
    assert candidates or ruled_out
    assert len(candidates) <= 6
    estimates = [one.estimate_s for one in candidates]
    assert estimates == sorted(estimates)
    for one in candidates:
        prediction = predicted(given_job, one, rounding=1e-9)
        assert one.estimate_s == pytest.approx(prediction.step_s, rel=0.25)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_texts_that_teach_a_frozen_backbone_nothing_have_no_backward_pass(seed):
    encoders = [connect(each, 512) for each in (vit("image", LLM, 2, trainable=False),)]
    made = multimodal("pretraining", language_model(LLM, 4, 4000, trainable=False), encoders)
    given_job = replace(job(num_nodes=1, batch_size=16, made=made), seed=seed)
    one_at_a_time = Pins(microbatch_size=1, dp=2, balance="auto")
    for candidate in proposed(given_job, one_at_a_time)[0]:
        step = predicted(given_job, candidate)
        assert candidate.estimate_s == pytest.approx(step.step_s, rel=0.15)


def test_it_proposes_the_same_every_time():
    first, second = ([(one.what, one.estimate_s, one.facts, one.plan) for one in proposed(job())[0]] for _ in range(2))
    assert first == second


@pytest.mark.parametrize("memory", [600, *(pytest.param(memory, marks=pytest.mark.slow) for memory in (1200, 4000))])
def test_no_plan_without_or_with_all_recomputation_is_faster(memory):
    """Every sharding and size, simulated: the best that is proposed is as good, or within what estimates are off."""
    given_job = job(memory)
    dp, (stage,) = 8, [{module.name: len(module.blocks) for module in given_job.model.modules}]
    fastest = np.inf
    for zero, shard_size in shardings(given_job, dp, 1):
        for size in (1, 2, 4, 8):
            for recompute in ((), (stage,)):
                unit = Unit("all", (stage,), dp=dp, zero=zero, shard_size=shard_size, recompute=recompute)
                plan = Plan(given_job.model, given_job.cluster, (unit,), 64, size, "data_parallel", balance="auto")
                prediction = simulated(given_job, plan)
                if prediction.peak_bytes.max() <= given_job.capacity_bytes:
                    fastest = min(fastest, prediction.step_s)
    candidates, _ = proposed(given_job)
    assert np.isfinite(fastest)
    assert min(simulated(given_job, one.plan).step_s for one in candidates) <= fastest * 1.02


def test_nothing_is_assigned_where_no_bound_is_below_a_step_to_beat(monkeypatch):
    given = job()
    bounds = [one.bound_s for one in proposed(given)[0]]
    below = [one for one in propose_data_parallel(given, Pins(), 1.01 * max(bounds)) if isinstance(one, Candidate)]
    assert [one.bound_s for one in below] == bounds
    least_s = min(DataParallelSearch(given, Pins(), tp, EvenBatch(given)).least_bound_s() for tp in (1, 2, 4))
    assert 0 < least_s <= min(bounds)
    monkeypatch.setattr("motet.planner.data_parallel.search.assigned_load", None)
    assert list(propose_data_parallel(given, Pins(), least_s / 2)) == []


@pytest.mark.slow
def test_more_memory_is_never_slower():
    steps = []
    for memory in (500, 600, 800, 1100, 1500, 3000, 8000):
        candidates, _ = proposed(job(memory))
        given_job = job(memory)
        steps.append(min((simulated(given_job, one.plan).step_s for one in candidates), default=np.inf))
    assert np.isfinite(steps[-1]) and steps[0] > steps[-1]
    assert all(after <= before * 1.005 for before, after in pairwise(steps))


def test_more_nodes_are_never_slower():
    steps = []
    for num_nodes in (1, 2, 4, 8):
        given_job = job(500, num_nodes)
        steps.append(min(simulated(given_job, one.plan).step_s for one in proposed(given_job)[0]))
    assert all(after < before for before, after in pairwise(steps))


def test_no_less_recomputation_would_fit():
    """A block less does not fit where items are, or not where they would be with a block less: what is recomputed is
    weighed when they are placed."""
    given_job = job(700)
    for one in proposed(given_job, Pins(tp=1))[0]:
        (unit,) = one.plan.units
        (recompute,) = unit.recompute
        load, state = assigned_load(given_job, one.plan), state_of(given_job, unit)
        assert load.peak_bytes(recompute, state) == pytest.approx(simulated(given_job, one.plan).peak_bytes.max())
        for name, count in recompute.items():
            less = {**recompute, name: count - 1}
            shorter = replace(unit, recompute=({each: blocks for each, blocks in less.items() if blocks},))
            anew = assigned_load(given_job, replace(one.plan, units=(shorter,)))
            assert max(own.peak_bytes(less, state) for own in (load, anew)) > given_job.capacity_bytes


def test_a_batch_that_does_not_divide_is_ruled_out_with_sizes_that_do():
    candidates, (ruled_out,) = proposed(job(batch_size=30), Pins(tp=1, dp=8))
    assert not candidates
    assert ruled_out.why == "a batch of 30 does not divide among the replicas."
    assert ruled_out.batches == (24, 32)
    assert proposed(job(batch_size=24))[0] and proposed(job(batch_size=32))[0]
    _, (ruled_out,) = proposed(job(batch_size=3), Pins(tp=1, dp=8))
    assert ruled_out.batches == (8,)


def test_what_fits_in_perfect_balance_alone_is_no_remedy():
    given_job = jobs.job(memory_mbytes=195, batch_size=16, spread=0.7)
    search = DataParallelSearch(given_job, Pins(tp=1), 1, EvenBatch(given_job))
    assert search.estimate_all(math.inf)[0], "in perfect balance some fit"
    candidates, ruled_out = proposed(given_job, Pins(tp=1))
    assert not candidates and ruled_out and not [one.remedies for one in ruled_out if one.remedies]


def test_as_many_ranks_as_the_batch_divides_among():
    candidates, _ = proposed(job(batch_size=30), Pins(tp=1))
    assert candidates and all(one.plan.units[0].dp == 6 for one in candidates)


def test_what_lacks_is_what_a_device_would_need_more():
    candidates, ruled_out = proposed(job(200), Pins(tp=1))
    assert not candidates
    (nearest,) = ruled_out
    assert "with all layers recomputed" in nearest.why and size_words(nearest.shortfall_bytes) in nearest.why
    enough = 200 + nearest.shortfall_bytes / 1e6 / 0.94
    assert proposed(job(enough * 1.15), Pins(tp=1))[0]
    assert not proposed(job(enough * 0.98), Pins(tp=1))[0]


@pytest.mark.parametrize(
    "pins", [Pins(pp=2), Pins(schedule="1f1b"), Pins(tp=3), Pins(dp=16), Pins(microbatch_size=3), Pins(tp=4, dp=4)]
)
def test_what_goes_against_a_pin_is_not_proposed(pins):
    candidates, ruled_out = proposed(job(), pins)
    assert not candidates
    assert ruled_out and all(one.why for one in ruled_out)


def test_groups_are_whole_nodes_in_powers_of_two():
    given_job = job(num_nodes=12)
    assert {size for _, size in shardings(given_job, 48, 1)} == {0, 4, 8, 16}
    assert {size for _, size in shardings(given_job, 12, 4)} == {0, 2, 4}
    assert list(shardings(given_job, 1, 1)) == [(0, 0)]


@pytest.mark.parametrize(("zero", "shard_size"), [(3, 0), (3, 16), (2, 32), (0, 0)])
@pytest.mark.parametrize("trainable", [True, False])
def test_collectives_are_those_of_the_simulation(zero, shard_size, trainable):
    """A message a layer: in large groups latencies are most of it."""
    given_job = job(num_nodes=16, trainable=trainable)
    unit = Unit("all", ({"image": 5, "audio": 4, "backbone": 6},), dp=64, zero=zero, shard_size=shard_size)
    plan = Plan(given_job.model, given_job.cluster, (unit,), given_job.batch_size, 1, "data_parallel")
    stages = planned(plan)
    assignment = assign_batch(plan, given_job.batch, given_job.cost)
    traffic = Traffic(Pricing(plan, stages, assignment, given_job.cost))
    found = ShardedUnit.of(given_job, unit).collectives
    for stage in stages.stages[:3]:
        own, counted = found[stage.modules[0]], traffic.collectives.seconds(stage)
        assert own.gather_s == pytest.approx(counted.gather_s)
        assert own.replicas_s == pytest.approx(counted.replicas_s)
        assert own.reduce_s == pytest.approx(counted.reduce_s if zero else 0.0)


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_memory_is_that_of_the_prediction(tp):
    given_job = job(1000)
    for one in proposed(given_job, Pins(tp=tp))[0]:
        (unit,) = one.plan.units
        recompute = unit.recompute[0] if unit.recompute else {}
        peak_bytes = assigned_load(given_job, one.plan).peak_bytes(recompute, state_of(given_job, unit))
        assert peak_bytes == simulated(given_job, one.plan).peak_bytes.max()


def test_pins_hold():
    given_job = job(900)
    for mode in ("none", "full"):
        for one in proposed(given_job, Pins(recompute=mode, tp=1))[0]:
            (unit,) = one.plan.units
            whole = {name: count for stage in unit.stages for name, count in stage.items()}
            assert unit.recompute == (() if mode == "none" else (whole,))
    for one in proposed(given_job, Pins(balance="off", microbatch_size=2, dp=4, tp=2))[0]:
        assert (one.plan.balance, one.plan.microbatch_size, one.plan.units[0].dp) == ("off", 2, 4)
        assert one.plan.units[0].tp == 2
        assert not any("alanc" in fact for fact in one.facts)


def test_long_items_are_cut_where_that_is_pinned():
    """On eight ranks with two examples each, of which some have several images."""

    def slow_devices(plan):
        speed = Speed(2e13, Link(1e11, 3e-6), Link(1e11, 3e-6))
        return operation_costs(plan.model, recomputed_blocks(plan), speed, element_bytes=2)

    given_job = replace(job(8000, batch_size=16), balancing=slow_devices)
    whole, cut = (proposed(given_job, Pins(balance=balance, tp=1))[0][0] for balance in ("auto", "split"))
    assert cut.plan.balance == "split" and any(items.cuts for items in given_job.assignment(cut.plan).modules.values())
    cut_s, whole_s = (predict_candidate(given_job, one).step_s for one in (cut, whole))
    assert cut.bound_s <= cut_s < 0.95 * whole_s


def test_one_rank_balances_nothing():
    candidates, _ = proposed(job(8000, batch_size=4), Pins(dp=1, tp=1))
    assert candidates and all(one.plan.balance == "off" and one.plan.units[0].zero == 0 for one in candidates)


def test_a_module_that_feeds_a_generator_is_said_to_be_none_of_it():
    spec = model()
    generator = replace(spec.module("image"), name="generator")
    made = ModelSpec("with a generator", (*spec.modules, generator), (*spec.edges, ("image", "generator")))
    candidates, ruled_out = proposed(job(made=made))
    assert not candidates
    assert ruled_out[0].why.startswith("module 'image' must feed the backbone and nothing else, or be fed by it alone")


@pytest.mark.parametrize("memory", [500, 1030])
def test_the_unbalanced_batch_that_is_named_fits_and_a_larger_one_does_not(memory):
    given_job = job(memory, batch_size=128 if memory == 500 else 64)
    said = 0
    for one in proposed(given_job, Pins(tp=1))[0]:
        for fact in (fact for fact in one.facts if "unbalanced" in fact):
            said += 1
            (unit,) = one.plan.units
            if "with everything recomputed" in fact:
                unit = replace(unit, recompute=unit.stages)
            most = int(fact.split("unbalanced, ")[1].split()[0].strip("."))
            for size in (most, most + 1):
                plan = replace(one.plan, units=(unit,), balance="off", microbatch_size=size, batch_size=8 * size)
                assert (simulated_first(given_job, plan) <= given_job.capacity_bytes) == (size == most)
    assert said


def simulated_first(given_job, plan):
    """The peak of a plan of the first examples of the job's batch."""
    from motet.schedule import planned
    from motet.simulate.predict.predict import assign_batch, predict_assigned

    batch = given_job.batch.take(np.arange(plan.batch_size))
    assignment = assign_batch(plan, batch, given_job.cost)
    return predict_assigned(plan, planned(plan), assignment, given_job.cost).peak_bytes.max()


def test_perfect_balance_is_no_slower_than_any_placement():
    given_job = job()
    candidates, _ = proposed(given_job, Pins(tp=1))
    for one in candidates:
        (unit,) = one.plan.units
        sharded, number = ShardedUnit.of(given_job, unit), 8 // one.plan.microbatch_size
        even = EvenBatch(given_job).load(8, number, 1)
        for balance in ("off", "auto"):
            load = assigned_load(given_job, replace(one.plan, balance=balance))
            for recompute in ({}, unit.stages[0]):
                least = step_s(even, sharded, recompute, exchanged=True)
                assert least <= step_s(load, sharded, recompute, exchanged=True) * (1 + 1e-9)
