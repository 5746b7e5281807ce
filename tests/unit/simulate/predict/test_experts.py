"""What ranks that share experts are predicted to take: less memory, fewer weights read, and rows that move."""

from dataclasses import replace
from functools import cache

import pytest

from motet.core.plan import Plan, Unit
from motet.core.sampler import Sampler
from motet.core.shapes import Transformer, language_model, multimodal
from motet.cost.analytic import Analytic
from motet.cost.catalogue import cluster
from motet.planner.job import Job
from motet.planner.neighbours import neighbours
from motet.planner.step_bound import step_bound
from motet.simulate.predict.predict import predict

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
