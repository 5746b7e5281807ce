"""Refinement: never slower, within memory, as pinned, the same every time; and the classes that proposals leave out."""

from dataclasses import replace

import pytest

from motet.core.cluster import Cluster, Device, Link
from motet.core.plan import Plan, Unit
from motet.core.sampler import Sampler
from motet.core.shapes import Transformer, connect, language_model, multimodal, vit
from motet.core.spec import ModelSpec
from motet.cost.analytic import Analytic
from motet.planner.candidate import (
    BUBBLE_FILLING,
    CHAIN,
    DATA_PARALLEL,
    MODALITY_PARALLEL,
    Candidate,
    Pins,
    predict_candidate,
)
from motet.planner.evaluation import Quota
from motet.planner.infeasible import possible_tensor_degrees
from motet.planner.job import Job
from motet.planner.refinement import NEAR, Refinement, _Shape, strategy_of
from motet.planner.search import search
from motet.planner.search_result import SimulatedCandidate
from motet.planner.strategies import STRATEGIES
from motet.schedule import program_of, validate
from unit.planner.jobs import LLM, job

SMALL = job(batch_size=8, num_nodes=1, spread=0.7)


def on_ranks(num_ranks, batch_size):
    """The same job on some ranks of one node."""
    cluster = replace(SMALL.cluster, ranks_per_node=num_ranks)
    return replace(SMALL, cluster=cluster, cost=Analytic(cluster), batch_size=batch_size)


TINY, SHARED = on_ranks(2, batch_size=8), on_ranks(4, batch_size=8)


def long_job(num_nodes, ranks_per_node, patches=8000):
    """Long sequences, a batch of one: only tensor or context parallelism uses several ranks well."""
    block = Transformer(2048, 8192, 16, 4, norm="rms", biases=(), causal=True)
    model = multimodal("long", language_model(block, 2, 1000), [connect(vit("image", block, 1), 2048, "linear")])
    items = {"image": {"length": {"value": patches}, "length_per_token": 4}}
    tasks = [{"name": "all", "text": {"value": 6000}, "items": items}]
    workload = Sampler.model_validate({"task": tasks}).workload(num_examples=4)
    device, link = Device("test", {"bf16": 2e13}, 80 * 10**9, 1e12), Link(1e11, 3e-6)
    cluster = Cluster(device, num_nodes, ranks_per_node, link, link)
    return Job(model, cluster, workload, 1, Analytic(cluster))


@pytest.fixture(scope="module")
def descended():
    """The search, and what each descent went on from, where it found nothing faster."""
    least_slower, left = Refinement._least_slower, []

    def counted(self, *arguments):
        left.append(least_slower(self, *arguments))
        return left[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Refinement, "_least_slower", counted)
        return search(TINY, STRATEGIES), left


@pytest.fixture
def found(descended):
    return descended[0]


def test_it_is_never_slower_and_what_it_finds_runs(found):
    plain = search(TINY, STRATEGIES, is_refined=False)
    assert found.best.prediction.step_s <= plain.best.prediction.step_s
    for one in found.results:
        validate(program_of(one.candidate.plan))
        simulated = predict_candidate(TINY, one.candidate)
        assert simulated.step_s == one.prediction.step_s
        assert simulated.peak_bytes.max() <= TINY.capacity_bytes
        assert one.candidate.bound_s <= simulated.step_s
        assert one.candidate.strategy == strategy_of(one.candidate.plan)


@pytest.mark.slow
def test_a_neighbour_that_lacks_memory_recomputes(monkeypatch):
    """So a step with little memory is refined too: other cuts and microbatches begin with everything recomputed."""
    tight = job(batch_size=16, num_nodes=1, spread=0.7, memory_mbytes=430)
    pins = Pins(strategies=(CHAIN,), tp=1, pp=2, dp=2, schedule="1f1b")
    refined = search(tight, STRATEGIES, pins).best
    monkeypatch.setattr("motet.planner.refinement.all_recomputed", lambda plan: plan)
    assert refined.prediction.step_s < 0.99 * search(tight, STRATEGIES, pins).best.prediction.step_s
    assert any(any(stage.values()) for unit in refined.candidate.plan.units for stage in unit.recompute)


def test_what_lacks_memory_is_tried_in_other_orders():
    """In the best order of its examples a chain holds more than as they come, and memory is between the two."""
    given_job = replace(on_ranks(2, batch_size=16), seed=1)
    unit = Unit("all", ({"image": 6, "audio": 2}, {"audio": 2, "backbone": 8}), pp=2)
    made = Plan(given_job.model, given_job.cluster, (unit,), 16, 2, "zb_h1")
    starts = {}
    for order in ("given", "both"):
        candidate = Candidate(CHAIN, order, replace(made, order=order), 1.0)
        starts[order] = SimulatedCandidate(candidate, predict_candidate(given_job, candidate))
    peaks = {order: int(one.prediction.peak_bytes.max()) for order, one in starts.items()}
    assert peaks["given"] < peaks["both"] and starts["both"].prediction.step_s < starts["given"].prediction.step_s
    device = given_job.cluster.device
    memory = device.memory_bytes / given_job.capacity_bytes * sum(peaks.values()) / 2
    tight = given_job.on(replace(given_job.cluster, device=replace(device, memory_bytes=int(memory))))
    refinement = Refinement(tight, Pins(), STRATEGIES, lambda plan: True, to_beat_s=10.0)
    assert refinement._predicted(starts["both"], starts["both"].candidate.plan)
    (found,) = refinement._in_other_orders([])
    assert found.candidate.plan.order in ("given", "intra")
    assert found.prediction.peak_bytes.max() <= tight.capacity_bytes


@pytest.mark.parametrize(
    ("pins", "is_found"), [(Pins(), True), (Pins(microbatch_size=2), False), (Pins(order="both"), False)]
)
def test_what_a_descent_passed_gets_groups_under_caps(pins, is_found):
    """Of two sizes of microbatches in their best order, one is faster than both in groups under caps."""
    given_job = replace(on_ranks(2, batch_size=16), seed=5)
    unit = Unit("all", ({"image": 6, "audio": 2}, {"audio": 2, "backbone": 8}), pp=2)
    starts = []
    for size in (2, 4):
        plan = Plan(given_job.model, given_job.cluster, (unit,), 16, size, "1f1b", order="both")
        candidate = Candidate(CHAIN, "as made", plan, 1.0)
        starts.append(SimulatedCandidate(candidate, predict_candidate(given_job, candidate)))
    refinement = Refinement(given_job, pins, STRATEGIES, lambda plan: True)
    for start in starts:
        assert refinement._predicted(start, start.candidate.plan)
    improved = refinement._under_caps(starts)
    assert improved[:2] == starts and len(improved) == 2 + is_found
    if is_found:
        assert improved[2].candidate.plan.microbatch_caps
        assert improved[2].prediction.step_s < min(start.prediction.step_s for start in starts)
        again = predict_candidate(given_job, improved[2].candidate)
        assert again.step_s == improved[2].prediction.step_s


@pytest.mark.slow
def test_every_shape_that_is_passed_near_the_best_has_a_descent_of_its_own(monkeypatch):
    """Also one that is neither proposed nor the end of a descent."""
    within_shapes, within, passed, kept, ended = Refinement._within_shapes, Refinement._within, set(), [], set()

    def noted(self, improved):
        limit_s = NEAR * self._fastest_s(improved)
        near = (one.candidate.plan for one in self._passed() if one.prediction.step_s <= limit_s)
        passed.update(_Shape.of(plan) for plan in near if plan.schedule != "data_parallel")
        ended.update(_Shape.of(one.candidate.plan) for one in improved)
        return within_shapes(self, improved)

    def counted(self, shape, *arguments):
        kept.append(shape)
        return within(self, shape, *arguments)

    monkeypatch.setattr(Refinement, "_within_shapes", noted)
    monkeypatch.setattr(Refinement, "_within", counted)
    monkeypatch.setattr(Refinement, "_within_virtual_pipelines", lambda self, improved: improved)
    search(SHARED, STRATEGIES, Pins(strategies=(DATA_PARALLEL, CHAIN)))
    assert passed <= set(kept) and passed - ended


@pytest.mark.slow
def test_the_same_every_time(found):
    again = search(replace(TINY), STRATEGIES)
    assert [one.candidate.plan for one in again.results] == [one.candidate.plan for one in found.results]


@pytest.mark.parametrize(
    "pins",
    [
        pytest.param(Pins(tp=1, dp=2), marks=pytest.mark.slow),
        Pins(strategies=(CHAIN,), order="given"),
        Pins(microbatch_size=1, schedule="1f1b"),
        pytest.param(Pins(strategies=(CHAIN,), recompute="none", balance="off"), marks=pytest.mark.slow),
    ],
)
def test_what_is_pinned_stays(pins):
    for one in search(SMALL, STRATEGIES, pins).results:
        plan = one.candidate.plan
        unit = plan.unit_of("backbone")
        assert pins.allow(tp=unit.tp, dp=unit.dp, order=plan.order, balance=plan.balance, schedule=plan.schedule)
        assert pins.allow(microbatch_size=plan.microbatch_size)
        assert not pins.strategies or one.candidate.strategy in pins.strategies
        assert pins.recompute is None or not any(any(stage.values()) for each in plan.units for stage in each.recompute)


@pytest.mark.slow
def test_a_suitable_plan_becomes_only_a_suitable_one():
    def suitable(plan):
        return all(unit.tp == unit.cp == 1 for unit in plan.units)

    result = search(TINY, STRATEGIES, quota=Quota(1, suitable))
    plain = search(TINY, STRATEGIES, quota=Quota(1, suitable), is_refined=False)
    best, before = (
        min(one.prediction.step_s for one in each.results if suitable(one.candidate.plan)) for each in (result, plain)
    )
    assert best <= before


@pytest.mark.parametrize("learns", [True, False])
def test_one_rank_needs_no_pipeline(learns):
    """Its chunks take as long as the whole, but for the order in which seconds are added up. A step without backward
    passes is one action.
    """
    one = on_ranks(1, batch_size=1)
    text = Sampler.model_validate({"task": [{"name": "all", "text": {"median": 300, "spread": 0.5, "max": 999}}]})
    spec = ModelSpec("small", (language_model(LLM, 5, 4000, trainable=learns),), ())
    result = search(replace(one, model=spec, workload=text.workload(num_examples=64)), STRATEGIES)
    assert [one.candidate.strategy for one in result.results][:2] == [DATA_PARALLEL, CHAIN]


def test_what_one_rank_lacks():
    pins = Pins(strategies=(MODALITY_PARALLEL, BUBBLE_FILLING))
    why = {ruled.strategy: ruled.why for ruled in search(on_ranks(1, batch_size=1), STRATEGIES, pins).ruled_out}
    assert why[MODALITY_PARALLEL] == "image, audio, backbone need 3 ranks, one each; the cluster has 1."
    assert why[BUBBLE_FILLING] == "a pipeline has bubbles from 2 ranks on; the cluster has one."


@pytest.mark.parametrize(("nodes", "per_node"), [(4, 1), (1, 4), (2, 2)])
def test_one_long_example_is_shared_by_all_ranks(nodes, per_node):
    """Over nodes of one device as well as in a node."""
    best = search(long_job(nodes, per_node), STRATEGIES).best.candidate.plan
    unit = best.unit_of("backbone")
    assert unit.tp * unit.cp == 4


def test_context_parallelism_is_found_where_it_moves_less():
    """Keys and values of four heads of sixteen are a quarter as wide as the rows that tensor parallelism gathers.

    The image is small: its encoder runs whole on one of the ranks.
    """
    plan = search(long_job(1, 4, patches=80), STRATEGIES).best.candidate.plan
    assert any(unit.cp > 1 for unit in plan.units)


def test_tensor_parallel_groups_divide_a_node_or_are_whole_nodes():
    def degrees(nodes, per_node):
        return possible_tensor_degrees(Cluster(SMALL.cluster.device, nodes, per_node, *(Link(1e11, 0.0),) * 2))

    assert degrees(1, 8) == [1, 2, 4, 8] and degrees(320, 8) == [1, 2, 4, 8]
    assert degrees(4, 1) == [1, 2, 4] and degrees(4, 2) == [1, 2, 4, 8]
    assert degrees(3, 3) == [1] and degrees(2, 6) == [1, 2]


@pytest.mark.slow
def test_ranks_that_divide_no_batch_share_sequences():
    """Three ranks and a batch of two: all three have both sequences in common, which is faster than two replicas."""
    three, two = (search(on_ranks(count, batch_size=2), STRATEGIES, Pins(strategies=(CHAIN,))) for count in (3, 2))
    assert three.best.prediction.step_s < two.best.prediction.step_s
    assert three.best.candidate.plan.unit_of("backbone").cp == 3


def test_a_descent_goes_on_from_a_slower_plan_that_is_near(descended, monkeypatch):
    """It is how a Plan is left that has no faster neighbour: more Plans are simulated, and none is slower for it."""
    found, left = descended
    assert any(one is not None for one in left)
    monkeypatch.setattr(Refinement, "_least_slower", lambda self, *arguments: None)
    assert found.best.prediction.step_s <= search(TINY, STRATEGIES).best.prediction.step_s
