"""Smaller clusters: which are searched, and what is said of a Plan that leaves ranks idle."""

import math
from dataclasses import replace

import pytest

from motet.core.cluster import Link
from motet.core.sampler import Sampler
from motet.core.shapes import Transformer, connect, language_model, multimodal, vit
from motet.core.words import shown_seconds
from motet.cost import catalogue
from motet.cost.analytic import Analytic
from motet.planner.candidate import CHAIN, Candidate, Pins, predict_candidate
from motet.planner.evaluation import NO_QUOTA, CandidateEvaluation
from motet.planner.fewer_ranks import smaller_jobs
from motet.planner.job import Job
from motet.planner.report import winner_in_words
from motet.planner.search import search
from motet.planner.step_bound import ExampleRows, step_bound
from motet.planner.strategies import STRATEGIES
from unit.planner.jobs import job


def on(num_nodes, ranks_per_node, **changed):
    small = job()
    cluster = replace(small.cluster, num_nodes=num_nodes, ranks_per_node=ranks_per_node, **changed)
    return replace(small, cluster=cluster, cost=Analytic(cluster))


@pytest.mark.parametrize(
    ("nodes", "ranks", "smaller"),
    [
        (3, 4, [(2, 4), (1, 4), (1, 3), (1, 2), (1, 1)]),
        (18, 2, [(9, 2), (6, 2), (3, 2), (2, 2), (1, 2), (1, 1)]),
        (1, 1, []),
    ],
)
def test_every_number_up_to_16_and_the_divisors_of_more(nodes, ranks, smaller):
    jobs = list(smaller_jobs(on(nodes, ranks)))
    assert [(job.cluster.num_nodes, job.cluster.ranks_per_node) for job in jobs] == smaller
    assert all(job.cost.cluster == job.cluster for job in jobs)


def test_ranks_that_cannot_hold_the_state_are_not_searched():
    state_bytes = 16 * sum(layer.parameters for module in job().model.modules for layer in module.layers)
    roomy = job(memory_mbytes=state_bytes / 4 / 0.94 / 1e6 * 1.01, num_nodes=1)
    tight = job(memory_mbytes=state_bytes / 4 / 0.94 / 1e6 * 0.99, num_nodes=1)
    assert step_bound(roomy).step_s < math.inf
    assert step_bound(tight) == (math.inf, "memory")


@pytest.fixture(scope="module")
def far_apart():
    """Nodes between which messages take so long that one node alone is faster."""
    planned = on(4, 4, inter_node=Link(1e7, 1e-2))
    return planned, search(planned, STRATEGIES, is_refined=False)


@pytest.mark.slow
def test_fewer_devices_where_they_are_faster(far_apart):
    planned, found = far_apart
    plan = found.best.candidate.plan
    assert found.best.prediction.num_ranks <= 4
    assert plan.cluster == planned.cluster
    assert predict_candidate(planned, found.best.candidate).step_s == found.best.prediction.step_s
    assert found.best.prediction.step_s < min(one.prediction.step_s for one in found.results[1:])


def test_idle_ranks_are_said_and_what_all_of_them_would_take(far_apart):
    _, found = far_apart
    words = winner_in_words(found)
    assert "12 of its 16 ranks are idle." in words[0]
    second_s = found.results[1].prediction.step_s
    (idle,) = [sentence for sentence in words if sentence.startswith("The fastest plan for all 16 ranks")]
    assert f"takes {shown_seconds(second_s)}; --nodes 1 --ranks-per-node" in idle


def test_what_is_pinned_holds_on_fewer_devices(far_apart):
    planned, _ = far_apart
    found = search(planned, STRATEGIES, Pins(strategies=("chain",), tp=2), is_refined=False)
    assert {one.candidate.strategy for one in found.results} == {"chain"}
    assert all(unit.tp == 2 for one in found.results for unit in one.candidate.plan.units)


@pytest.mark.parametrize("num_nodes", [2, 20])
def test_smaller_clusters_have_the_batches_and_the_bounds_of_jobs_of_their_own(num_nodes):
    """On more than 64 ranks less is bounded, of the same rows."""
    given_job = job(batch_size=32, spread=1.0, num_nodes=num_nodes)
    rows = ExampleRows(given_job)
    smaller = list(smaller_jobs(given_job))
    assert smaller and all(fewer.batch is given_job.batch for fewer in smaller)
    for fewer in [given_job, *smaller]:
        assert step_bound(fewer, rows=rows) == step_bound(replace(fewer, seed=fewer.seed))


def test_what_cannot_beat_a_known_step_is_not_simulated():
    evaluations = []
    for to_beat_s in (math.inf, 1e-9):
        one = CandidateEvaluation(job(), Pins(), 12, NO_QUOTA, lambda *_: None, is_refined=False, to_beat_s=to_beat_s)
        one.consider({CHAIN: STRATEGIES[CHAIN]})
        one.vary((CHAIN,))
        evaluations.append(one)
    searched, beaten = evaluations
    assert searched.num_simulated and searched.results
    assert not beaten.num_simulated and not beaten.results and beaten.fastest_s == 1e-9
    assert [one.why for one in beaten.passed_over] == ["bound"] * len(searched.candidates)


def test_facts_are_told_when_they_are_read():
    told = []
    plan = next(one.plan for one in STRATEGIES[CHAIN](job(), Pins()) if isinstance(one, Candidate))
    first = Candidate(CHAIN, "", plan, 1.0, tell=lambda: told.append("read") or ("second",))
    both = replace(first, tell=first.telling("first"))
    assert told == []
    assert both.facts == ("first", "second") and both.facts == ("first", "second")
    assert told == ["read"]


@pytest.mark.slow
def test_the_search_of_a_few_ranks_goes_on_from_what_is_slower_than_all_ranks():
    """On two ranks, refinement begins at a Plan whose bound is above the step of three ranks, and ends below that."""

    def layer(width, heads, kv_heads=None, **changed):
        return Transformer(width, 4 * width, heads, kv_heads, **changed)

    llm = language_model(layer(256, 4, 2, gated=True, norm="rms", biases=(), causal=True), 7, 1000)
    model = multimodal("m", llm, [connect(vit("image", layer(512, 8), 6), 256, "linear")])
    text = {"text": {"value": 1000}}
    large = {"image": {"length": {"value": 256}, "count": {"value": 2}}}
    small = {"image": {"length": {"value": 64}}}
    tasks = [
        {"name": "t0", "share": 5, **text},
        {"name": "t1", "share": 1, **text, "items": small},
        {"name": "t2", "share": 5, **text, "items": large},
    ]
    workload = Sampler.model_validate({"task": tasks}).workload(num_examples=512)
    best_s = []
    for num_ranks in (2, 3):
        devices = catalogue.cluster("a800", num_nodes=1, ranks_per_node=num_ranks)
        planned = Job(model, devices, workload, 7, Analytic(devices))
        best_s.append(search(planned, STRATEGIES).best.prediction.step_s)
    assert best_s[1] <= best_s[0]
