"""What ranks that share experts are predicted to take: less memory, fewer weights read, and rows that move."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from motet.assign.plan import assign_step
from motet.core.plan import Plan, Unit
from motet.core.sampler import Sampler
from motet.core.shapes import Transformer, language_model, multimodal
from motet.core.spec import Attention, Module
from motet.core.workload import BACKBONE, ItemLengths
from motet.cost.analytic import Analytic
from motet.cost.catalogue import cluster
from motet.planner.job import Job
from motet.planner.neighbours import neighbours
from motet.planner.step_bound import step_bound
from motet.schedule import planned
from motet.schedule.program import Kind
from motet.simulate.engine import simulate as engine
from motet.simulate.predict import predict as predicting
from motet.simulate.predict.predict import predict, predict_assigned
from motet.simulate.predict.stage_pricing import Pricing
from unit.simulate import jobs
from unit.simulate.even_jobs import EVEN, LAYER_B, LAYER_F, ROWS, Free, even

LAYER = Transformer(1024, 2048, 16, causal=True, gated=True, num_experts=8, experts_per_token=2)
MODEL = multimodal("mixture", language_model(LAYER, 4, vocab_size=1000), [])
H100 = cluster("h100")


@cache
def workload():
    task = {"name": "text", "text": {"median": 700, "spread": 0.4, "max": 2000}, "items": {}}
    return Sampler.model_validate({"task": [task]}).workload(num_examples=128)


def plan(schedule="gpipe", **degrees):
    unit = Unit("llm", ({"backbone": 4},), **degrees)
    return Plan(MODEL, H100, (unit,), batch_size=32, microbatch_size=2, schedule=schedule)


def predicted(given, cost=None):
    return predict(given, workload(), cost or Analytic(given.cluster))


def test_each_rank_holds_its_experts_alone():
    whole, shared = (predicted(plan(dp=8, ep=ep, zero=0)) for ep in (1, 8))
    of_experts = 4 * 8 * 3 * 1024 * 2048
    precision = 2 + 4 + 12  # Of Megatron, whose master copy is part of the optimizer's state.
    assert (whole.peak_bytes - shared.peak_bytes).max() == pytest.approx(7 / 8 * of_experts * precision, rel=0.02)


def test_ranks_of_data_parallelism_hold_and_gather_less_of_experts():
    """Of 8 ranks that share one copy, each holds the same 8th of all, and 8 that share experts gather none."""
    alone, shared = (plan("data_parallel", dp=8, ep=ep, zero=3) for ep in (1, 8))
    assert predicted(shared).peak_bytes.max() < predicted(alone).peak_bytes.max()
    here = replace(H100, intra_node=replace(H100.intra_node, latency_s=0.0))
    left = 1 - 4 * 8 * 3 * 1024 * 2048 / MODEL.num_parameters
    gathered_s, others_s = (seconds_of(replace(each, cluster=here), "GATHER") for each in (alone, shared))
    assert others_s == pytest.approx(left * gathered_s)
    copies = (plan("data_parallel", dp=8, ep=ep, zero=0) for ep in (1, 8))
    summed_s, own_s = (seconds_of(replace(each, cluster=here), "REDUCE") for each in copies)
    assert own_s == pytest.approx(left * summed_s)


def seconds_of(given, kind):
    found = predicted(given).timeline.seconds_by_kind()
    return sum(seconds for (of, _), seconds in found.items() if of == kind)


def forward_s(given):
    return seconds_of(given, "F")


def test_rows_that_move_take_time_by_the_links():
    """Without links to wait for, a rank that reads fewer experts' weights is faster."""
    fast = replace(H100, intra_node=replace(H100.intra_node, bytes_per_s=1e15, latency_s=0.0))
    slow = replace(H100, intra_node=replace(H100.intra_node, bytes_per_s=1e10))
    alone, shared = plan(dp=8, zero=0), plan(dp=8, ep=8, zero=0)
    assert forward_s(replace(shared, cluster=fast)) < forward_s(replace(alone, cluster=fast))
    added_s = forward_s(replace(shared, cluster=slow)) - forward_s(replace(shared, cluster=fast))
    # Each row goes to two experts and back, in each of 4 layers, 7 of 8 to other ranks; the busiest rank waits longest.
    moved_bytes = 4 * 2 * 2 * 7 / 8 * 1024 * 2
    rows, mean = added_s * 1e10 * Analytic(slow).efficiency.links / moved_bytes, predicted(shared).num_tokens / 8
    assert mean <= rows < 2 * mean


def test_the_planner_tries_to_share_experts_and_its_bound_holds():
    given = Job(MODEL, H100, workload(), 32, Analytic(H100))
    tried = {unit.ep for each in neighbours(given, plan(dp=8, ep=2)) for unit in each.units}
    assert {1, 2, 4} <= tried
    bound_s = step_bound(given).step_s
    for degrees in ({"dp": 8}, {"dp": 8, "ep": 8}, {"dp": 4, "cp": 2, "ep": 4}):
        assert bound_s <= predicted(plan(**degrees)).step_s


SEQUENCES, IMAGES = np.array([[20, 60], [80, 20]]), np.array([[20, 30], [40, 10]])
"""Rows of two replicas in two microbatches."""


def skewed(made):
    """A step of `SEQUENCES` and `IMAGES`, an example each."""
    dealt = assign_step(made, even(SEQUENCES.size)).modules[BACKBONE]
    rows, patches = (table[dealt.replica, dealt.microbatch] for table in (SEQUENCES, IMAGES))
    items = {"image": ItemLengths(np.arange(SEQUENCES.size), patches, patches)}
    return assign_step(made, replace(even(SEQUENCES.size), sequence=rows, num_targets=rows, items=items))


def half_in_experts(spec):
    """The model with a backbone of layers that have half of what a row takes in two of four experts, and nothing in
    pairs of rows.
    """
    experts = {"num_experts": 4, "expert_weights": 250, "idle_weights": 500}
    layer = replace(spec.module(BACKBONE).layers[0], parameters=2000, attention=Attention(0, 0), **experts)
    return replace(spec, modules=(spec.module("image"), Module.of(BACKBONE, [layer] * 12)))


@pytest.mark.parametrize("backend", ["native", "reference"])
@pytest.mark.parametrize("fed_in_common", [False, True])
def test_replicas_run_layers_whose_experts_they_share_together(backend, fed_in_common, monkeypatch):
    """Of half of each layer both replicas compute as much, and of the rest what they have; images before are theirs."""
    units = (Unit("all", ({"image": 4, BACKBONE: 12},), dp=2, ep=2),)
    if fed_in_common:
        units = Unit("llm", ({BACKBONE: 12},), dp=2, ep=2), Unit("image", ({"image": 4},), first_rank=2)
    made = jobs.plan(*units, spec=half_in_experts(EVEN), batch_size=4, schedule="gpipe")
    if backend == "reference":
        monkeypatch.setattr(engine, "engine", lambda _: None)
    found = predict_assigned(made, planned(made), skewed(made), Free(made.cluster))
    together, row_f, row_b = 12 * (65 + 50), LAYER_F / ROWS, LAYER_B / ROWS
    assert (SEQUENCES.mean(axis=0) / 2 + SEQUENCES.max(axis=0) / 2).tolist() == [65, 50]
    if fed_in_common:  # One encoder has the images of both replicas, the others of which run beside the backbone.
        expected = (4 * (20 + 40) + together) * row_f + (together + 4 * (30 + 10)) * row_b
    else:
        expected = (4 * (40 + 30) + together) * (row_f + row_b)
    assert found.step_s == pytest.approx(expected)


def test_replicas_that_have_all_experts_run_by_themselves():
    made = jobs.plan(Unit("all", ({"image": 4, BACKBONE: 12},), dp=2), spec=half_in_experts(EVEN), batch_size=4)
    made = replace(made, schedule="gpipe")
    row_s = (LAYER_F + LAYER_B) / ROWS
    found = predict_assigned(made, planned(made), skewed(made), Free(made.cluster))
    assert found.step_s == pytest.approx((12 * SEQUENCES + 4 * IMAGES).sum(axis=1).max() * row_s)


def test_replicas_of_data_parallelism_wait_in_each_layer_whose_experts_they_share():
    unit = Unit("all", ({"image": 4, BACKBONE: 12},), dp=2, ep=2, zero=0)
    made = jobs.plan(unit, spec=half_in_experts(EVEN), batch_size=4, schedule="data_parallel", balance="off")
    step = skewed(made)
    prices = Pricing(made, planned(made), step, Free(made.cluster))
    backbones = [stage for stage in prices.planned.stages if stage.modules == (BACKBONE,)]
    rows = step.modules[BACKBONE]
    own = np.bincount(rows.batch_index(2), rows.length, 4).reshape(2, 2)
    slowest = own.mean(axis=0) / 2 + own.max(axis=0) / 2
    for stage in backbones:
        assert prices.stage(stage, 0).forward == pytest.approx(12 * slowest * LAYER_F / ROWS)


def test_of_many_islands_those_that_share_experts_are_simulated_with_the_busiest(monkeypatch):
    """The busiest island waits for none but the other of its two; what the others have is alike."""
    monkeypatch.setattr(predicting, "MAX_ISLANDS", 2)
    made = jobs.plan(
        Unit("all", ({"image": 4, BACKBONE: 12},), dp=6, ep=2),
        spec=half_in_experts(EVEN),
        batch_size=6,
        schedule="gpipe",
    )
    dealt = assign_step(made, even(6)).modules[BACKBONE]
    rows = np.array([20, 20, 10, 90, 30, 30])[dealt.replica]
    step = assign_step(made, replace(even(6), sequence=rows, num_targets=rows))
    pricing = Pricing(made, planned(made), step, Free(made.cluster))
    assert sorted(predicting._simulated(pricing, 0.0)) == [2, 3]


def layer_by_layer(program, rows, images, ep):
    """Seconds of a step of two stages of 6 layers behind 4 of an encoder, in which replicas meet before and behind the
    experts of each layer. rows, images: [num_replicas, num_microbatches].
    """
    num_replicas, ends, at_s = len(rows), {}, np.zeros((2, len(rows)))
    waiting = [[one for one in row if one.kind in (Kind.F, Kind.B)] for row in program.actions]

    def through(start_s, own, row_s):
        for _ in range(6):
            start_s = (start_s + own / 2 * row_s).reshape(-1, ep)
            start_s = start_s.max(axis=1, keepdims=True) + own.reshape(-1, ep).mean(axis=1, keepdims=True) / 2 * row_s
            start_s = np.repeat(start_s, ep)
        return start_s

    while any(waiting):
        for stage, row in enumerate(waiting):
            while row:
                kind, microbatch = row[0].kind, row[0].microbatch
                is_first = stage == (0 if kind == Kind.F else 1)
                before = (Kind.F, stage, microbatch) if is_first else (kind, 1 - stage, microbatch)
                if (kind == Kind.B or not is_first) and before not in ends:
                    break
                start_s = np.maximum(at_s[stage], ends.get(before, np.zeros(num_replicas)))
                row_s = (LAYER_F if kind == Kind.F else LAYER_B) / ROWS
                image_s = 4 * images[:, microbatch] * row_s * (stage == 0)
                start_s = start_s + image_s * (kind == Kind.F)
                ended_s = through(start_s, rows[:, microbatch], row_s) + image_s * (kind == Kind.B)
                at_s[stage] = ends[kind, stage, microbatch] = ended_s
                row.pop(0)
    return at_s.max()


@pytest.mark.parametrize("ep", [2, 4])
def test_skewed_steps_are_as_long_as_where_each_layer_waits(ep):
    """Within 2 %: a pass waits once, where each of its layers does. Apart, replicas were off by up to a quarter."""
    unit = Unit("all", ({"image": 4, BACKBONE: 6}, {BACKBONE: 6}), dp=4, pp=2, ep=ep, zero=0)
    made = jobs.plan(unit, spec=half_in_experts(EVEN), batch_size=32)
    dealt, program = assign_step(made, even(32)).modules[BACKBONE], planned(made)
    for seed in range(5):
        rng = np.random.default_rng(seed)
        rows, images = (np.rint(mean * rng.lognormal(0, 0.8, (4, 8))).astype(int) + 1 for mean in (100, 50))
        length, patches = (table[dealt.replica, dealt.microbatch] for table in (rows, images))
        items = {"image": ItemLengths(np.arange(32), patches, patches)}
        step = assign_step(made, replace(even(32), sequence=length, num_targets=length, items=items))
        found_s = predict_assigned(made, program, step, Free(made.cluster)).step_s
        expected_s = layer_by_layer(program.program, rows, images, ep)
        assert expected_s * (1 - 1e-9) <= found_s < 1.02 * expected_s
