"""Weights that embedding and output layer share are on both stages, whole, and their gradients are summed by themselves
(what ranks really hold: `tests/dist/test_held_bytes.py`)."""

from dataclasses import replace

import pytest

from motet.core.cluster import Cluster, Device, Link
from motet.core.plan import Plan, Unit
from motet.core.sampler import Sampler
from motet.core.shapes import Transformer, language_model, multimodal
from motet.cost.analytic import Analytic
from motet.planner.alone import fixed_bytes, on_ranks
from motet.planner.candidate import Candidate, Pins
from motet.planner.chain.propose import propose_chain
from motet.planner.job import Job
from motet.simulate.predict.predict import predict
from motet.simulate.predict.tied import tied_apart
from unit.planner.jobs import predicted

HIDDEN, VOCABULARY = 256, 10_000
TEXTS = Sampler.model_validate({"task": [{"name": "texts", "text": {"value": 100}}]}).workload(num_examples=8)
LINK = Link(1e10, 1e-6)
CLUSTER = Cluster(Device("test", {"bf16": 1e13}, 10**10, 1e12), 1, 8, LINK, LINK)


def model(*, tied):
    shape = Transformer(HIDDEN, 2 * HIDDEN, 4, causal=True)
    return multimodal("texts", language_model(shape, 4, VOCABULARY, tied=tied), [])


def step(num_stages, schedule, *, tied=True, **unit):
    stages = ({"backbone": 4 // num_stages},) * num_stages
    plan = Plan(model(tied=tied), CLUSTER, (Unit("all", stages, **unit),), 8, 1, schedule)
    return predict(plan, TEXTS, Analytic(CLUSTER))


@pytest.mark.parametrize("unit", [{"zero": 0}, {"zero": 1}, {"zero": 2}, {"zero": 3}, {"zero": 1, "tp": 2}])
def test_both_stages_hold_them_whole(unit):
    held, of_own = (step(2, "1f1b", tied=tied, pp=2, dp=2, **unit).memory_bytes for tied in (True, False))
    weights = HIDDEN * VOCABULARY // unit.get("tp", 1)
    for part, size, sharded_from in (("parameters", 2, 3), ("gradients", 4, 2), ("optimizer", 12, 1)):
        beside_whole = 0 if part == "parameters" else size * weights // 2  # Under ZeRO 3 they are gathered for a pass.
        whole_beside_share = size * weights - beside_whole if unit["zero"] >= sharded_from else 0
        assert (held[part] - of_own[part]).tolist() == [whole_beside_share] * len(held[part])


@pytest.mark.parametrize(("num_stages", "schedule", "pp"), [(4, "zb_v", 2), (4, "interleaved_1f1b", 1)])
def test_a_rank_with_both_stages_holds_them_once(num_stages, schedule, pp):
    tied, own = (step(num_stages, schedule, tied=is_tied, pp=pp, zero=0) for is_tied in (True, False))
    assert own.peak_bytes[0] - tied.peak_bytes[0] == pytest.approx(18 * HIDDEN * VOCABULARY, rel=0.01)


@pytest.mark.parametrize(("num_stages", "schedule", "zero"), [(2, "1f1b", 1), (4, "zb_v", 1), (2, "1f1b", 0)])
def test_what_a_rank_has_whatever_its_examples_are_is_with_them(num_stages, schedule, zero):
    stages = ({"backbone": 4 // num_stages},) * num_stages
    plan = Plan(model(tied=True), CLUSTER, (Unit("all", stages, pp=2, dp=2, zero=zero),), 8, 1, schedule)
    held = predict(plan, TEXTS, Analytic(CLUSTER)).memory_bytes
    state = sum(held[part] for part in ("parameters", "gradients", "optimizer"))
    assert [fixed_bytes(plan, stages) for stages in on_ranks(plan)] == state[:: len(state) // 2].tolist()


def test_on_one_stage_they_are_like_others():
    whole = Plan(model(tied=True), CLUSTER, (Unit("all", ({"backbone": 4},), dp=2),), 8, 1)
    assert tied_apart(whole) is None


def test_their_gradients_are_summed_over_the_ranks_of_both_stages():
    slow = replace(CLUSTER, intra_node=Link(1e9, 0.0))
    unit = Unit("all", ({"backbone": 2},) * 2, pp=2, zero=0)
    steps = [
        predict(Plan(model(tied=tied), slow, (unit,), 8, 8), TEXTS, Analytic(slow)).step_s for tied in (True, False)
    ]
    summed_s = Analytic(slow).all_reduce_seconds(4 * HIDDEN * VOCABULARY, range(2))
    assert steps[0] - steps[1] == pytest.approx(summed_s, rel=0.02)


@pytest.mark.parametrize("memory_mbytes", [60, 75, 100])
def test_chains_are_proposed_that_have_room_for_them(memory_mbytes):
    device = replace(CLUSTER.device, memory_bytes=int(memory_mbytes * 1e6))
    cluster = replace(CLUSTER, device=device, ranks_per_node=4)
    job = Job(model(tied=True), cluster, TEXTS, 8, Analytic(cluster))
    candidates = [each for each in propose_chain(job, Pins(pp=2)) if isinstance(each, Candidate)]
    assert candidates or memory_mbytes == 60
    for each in candidates:
        predicted(job, each, rounding=1e-9)
