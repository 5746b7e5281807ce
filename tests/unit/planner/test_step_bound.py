"""A lower bound of every Plan's step: each term binds in some job, and no Plan of any kind is below it."""

import math
from dataclasses import replace
from functools import partial
from random import Random

import numpy as np
import pytest

from motet.core.cluster import Cluster, Device, Link
from motet.core.errors import ArgumentError, UserError
from motet.core.plan import Plan, Unit
from motet.core.sampler import Sampler
from motet.core.shapes import Transformer, connect, language_model, multimodal, vit
from motet.core.workload import BACKBONE
from motet.cost.analytic import Analytic
from motet.planner.bound_passes import PassSeconds
from motet.planner.bound_seconds import BlockSeconds, ExampleRows, LayerRows
from motet.planner.bound_shapes import Shape
from motet.planner.bound_terms import ShapeTerms
from motet.planner.job import Job
from motet.planner.report import winner_in_words
from motet.planner.search import search
from motet.planner.step_bound import step_bound
from motet.planner.strategies import STRATEGIES
from motet.schedule import check_fit, planned
from motet.schedule.plan_units import backbone_unit, units_in_bubbles
from motet.simulate.predict.predict import assign_batch, predict, step_s_of
from unit.planner.drawn_plans import drawn_job, drawn_plan
from unit.planner.jobs import ENCODER, LLM, job, model


def on_links(small, link):
    cluster = replace(small.cluster, intra_node=link, inter_node=link)
    return replace(small, cluster=cluster, cost=Analytic(cluster))


def shape_of(plan):
    unit, in_bubbles = backbone_unit(plan), units_in_bubbles(plan)
    here = (*unit.modules, *(name for other in in_bubbles for name in other.modules))
    apart = tuple(name for name in plan.model.num_blocks if name not in here)
    kind = "data_parallel" if plan.schedule == "data_parallel" else "bubbles" if in_bubbles else "chain"
    return Shape(unit.tp, unit.cp, unit.pp, unit.dp, apart, kind)


JOBS = {
    "work": lambda: job(batch_size=32),
    "item": lambda: job(batch_size=6, spread=1.2, num_nodes=2),
    "memory": lambda: job(batch_size=2, memory_mbytes=95),
    "bubbles": lambda: job(batch_size=32),
    "communication": lambda: on_links(job(batch_size=32), Link(5e7, 1e-3)),
}


@pytest.mark.parametrize("term", ["item", "memory", "bubbles", "communication"])
def test_each_term_binds_in_some_job(term):
    planned = JOBS[term]()
    assert step_bound(planned, without=(term,)).step_s < step_bound(planned).step_s


def test_the_term_that_binds_is_named():
    assert [step_bound(JOBS[term]()).term for term in ("work", "memory", "communication")] == [
        "work",
        "memory",
        "communication",
    ]


def test_the_bound_is_the_work_of_ranks_that_all_compute():
    one, eight = (step_bound(job(num_nodes=2, batch_size=size)).step_s for size in (8, 64))
    assert 6 < eight / one < 8.5


def test_of_a_job_that_no_cluster_memory_holds_there_is_no_bound():
    assert step_bound(job(memory_mbytes=50)).step_s == math.inf
    assert step_bound(job(memory_mbytes=50), without=("memory",)).step_s < math.inf


@pytest.mark.parametrize("units", ["one", "apart", "replicated", "context", "bubbles"])
def test_no_plan_made_by_hand_is_below_the_bound(units):
    planned = job(batch_size=8, spread=0.6, memory_mbytes=1e5)
    image, audio, llm = {"image": 6}, {"audio": 4}, {"backbone": 8}
    half = {"backbone": 4}
    plans = {
        "one": (Unit("all", ({**image, **audio, **llm},), dp=8, zero=0),),
        "apart": (
            Unit("image", (image,), 0, dp=2),
            Unit("audio", (audio,), 2, dp=2),
            Unit("backbone", (half, half), 4, dp=2, pp=2),
        ),
        "replicated": (Unit("all", (half, half), dp=4, pp=2, replicated=("image", "audio")),),
        "context": (Unit("all", ({**image, **audio, "backbone": 3}, {"backbone": 5}), dp=2, pp=2, cp=2),),
        "bubbles": (
            Unit("backbone", (half, half), dp=4, pp=2),
            Unit("image", (image,), dp=8),
            Unit("audio", (audio,), dp=8),
        ),
    }
    schedule = "data_parallel" if units == "one" else "1f1b"
    plan = Plan(planned.model, planned.cluster, plans[units], 8, 1, schedule)
    assert step_bound(planned).step_s <= predict(plan, planned.workload, planned.cost, seed=planned.seed).step_s


@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(4, 60))])
def test_no_drawn_plan_that_cuts_examples_is_below_the_bound(seed):
    """On links that cost little, so that much is cut. A bound of whole examples would be above many of them."""
    rng, num_cut = Random(seed), 0
    while num_cut < 4:
        drawn = on_links(drawn_job(rng), Link(1e13, 0.0))
        drawn = replace(drawn, balancing=partial(cheap_links, drawn.balancing))
        terms, least_s = ShapeTerms(drawn, ExampleRows(drawn), cuts=True), step_bound(drawn, cuts=True).step_s
        for plan in filter(None, (drawn_plan(rng, drawn) for _ in range(12))):
            plan = replace(plan, balance="split")
            try:
                check_fit(plan)
                assignment = drawn.assignment(plan)
                step_s = step_s_of(plan, planned(plan), assignment, drawn.cost)
            except (UserError, ArgumentError):  # It does not fit, or its Program does not run.
                continue
            of_shape = terms.of(shape_of(plan))
            assert max(least_s, float(np.max(list(of_shape.values()), axis=0).min())) <= step_s * (1 + 1e-9)
            num_cut += any(items.cuts is not None for items in assignment.modules.values())


def cheap_links(balancing, plan):
    costs = balancing(plan)
    return replace(costs, times=replace(costs.times, link=Link(1e13, 0.0)))


SLOW = [pytest.param(number, marks=pytest.mark.slow) for number in range(12, 150, 3)]


@pytest.mark.parametrize("first", [*range(0, 12, 3), *SLOW])
def test_no_drawn_plan_is_below_the_bound_of_its_shape_or_its_job(first):
    """Padded clips, generators, tied weights, examples without items, caps, and links of any speed among them."""
    num_plans = 0
    for seed in range(first, first + 3):
        rng = Random(seed)
        drawn = drawn_job(rng)
        terms, least_s = ShapeTerms(drawn, ExampleRows(drawn)), step_bound(drawn).step_s
        for plan in filter(None, (drawn_plan(rng, drawn) for _ in range(12))):
            try:
                check_fit(plan)
                step_s = step_s_of(plan, planned(plan), assign_batch(plan, drawn.batch, drawn.cost), drawn.cost)
            except (UserError, ArgumentError):  # It does not fit, or its Program does not run.
                continue
            shape = shape_of(plan)
            of_shape = np.max(list(terms.of(shape, ()).values()), axis=0).min()
            assert max(least_s, of_shape) <= step_s * (1 + 1e-9), (seed, plan)
            assert terms.floor_s(shape) <= of_shape * (1 + 1e-9)
            num_plans += 1
    assert num_plans > 5


def test_ranks_that_share_gradients_may_be_on_nodes_that_are_joined_by_faster_links_than_their_own():
    small = job(model(frozen=True), batch_size=12, memory_mbytes=1e5)
    cluster = replace(small.cluster, ranks_per_node=3, intra_node=Link(1e6, 1e-4), inter_node=Link(1e13, 0.0))
    planned_job = replace(small, cluster=cluster, cost=Analytic(cluster))
    # Only projectors learn: ranks 2 and 3, of different nodes, have them.
    stages = ({"image": 5}, {"image": 1, "audio": 4, "backbone": 4}, {"backbone": 4})
    plan = Plan(planned_job.model, cluster, (Unit("all", stages, dp=2, pp=3),), 12, 2)
    terms = ShapeTerms(planned_job, ExampleRows(planned_job)).of(shape_of(plan))
    step_s = predict(plan, planned_job.workload, planned_job.cost, seed=planned_job.seed).step_s
    assert np.max(list(terms.values()), axis=0).min() <= step_s


def test_two_microbatches_do_not_keep_three_ranks_busy():
    """Both take turns in the last block, behind the first one's way there and before the last one's way back."""
    spec = multimodal("texts", language_model(LLM, 9, 4000), [])
    texts = Sampler.model_validate({"task": [{"name": "texts", "text": {"value": 2000}}]}).workload(num_examples=8)
    cluster = Cluster(Device("test", {"bf16": 1e14}, 10**12, 1e12), 1, 3, Link(1e12, 0.0), Link(1e12, 0.0))
    given = Job(spec, cluster, texts, 2, Analytic(cluster))
    terms = ShapeTerms(given, ExampleRows(given)).of(Shape(1, 1, 3, 1))
    stages = ({"backbone": 3}, {"backbone": 3}, {"backbone": 3})
    plan = Plan(spec, cluster, (Unit("all", stages, pp=3),), 2, 1, "zb_h1")
    step_s = predict(plan, texts, given.cost, seed=given.seed).step_s
    assert 1.05 * terms["work"][1] < terms["bubbles"][1] <= step_s


def test_a_rank_updates_whole_blocks():
    """Of three blocks, some rank of two updates two."""
    spec = multimodal("texts", language_model(LLM, 3, 10), [])
    texts = Sampler.model_validate({"task": [{"name": "texts", "text": {"value": 8}}]}).workload(num_examples=8)
    cluster = Cluster(Device("test", {"bf16": 1e15}, 10**12, 1e10), 1, 2, Link(1e12, 0.0), Link(1e12, 0.0))
    given = Job(spec, cluster, texts, 4, Analytic(cluster))
    terms = ShapeTerms(given, ExampleRows(given)).of(Shape(1, 1, 2, 1))
    assert terms["bubbles"].min() > 1.3 * terms["work"].min()


def test_reductions_that_texts_behind_them_hide_are_not_in_the_bound():
    """Nothing learns from the second microbatch: it has no backward pass, and comes while gradients are reduced."""
    lengths = {"length": {"value": 400}, "length_per_token": 4}
    tasks = [
        {"name": "images", "text": {"value": 8}, "items": {"image": lengths}},
        {"name": "texts", "text": {"value": 6000}},
    ]
    mixed = Sampler.model_validate({"task": tasks}).workload(num_examples=64)
    image = connect(vit("image", ENCODER, 2, trainable=False), 512)
    spec = multimodal("frozen", language_model(LLM, 4, 4000, trainable=False), [image])
    small = replace(job(spec, batch_size=4, memory_mbytes=1e5), workload=mixed)
    of_seeds = (on_links(replace(small, seed=seed), Link(1e8, 1e-6)) for seed in range(1000))
    given = next(one for one in of_seeds if one.batch.has_any(["image"]).tolist() == [True, True, False, False])
    unit = Unit("all", (given.model.num_blocks,), dp=2, zero=0)
    plan = Plan(given.model, given.cluster, (unit,), 4, 1, "data_parallel", balance="off")
    terms = ShapeTerms(given, ExampleRows(given)).of(shape_of(plan))
    step_s = step_s_of(plan, planned(plan), assign_batch(plan, given.batch, given.cost), given.cost)
    assert np.max(list(terms.values()), axis=0).min() <= step_s


@pytest.mark.parametrize("seed", [*range(2), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 40))])
def test_no_plan_whose_ranks_share_all_sequences_in_a_few_cells_is_below_the_bound_of_its_shape(seed):
    """Links are slow, so that exchanges of keys, and of encoders' rows, are much of a step: of one cell they count."""
    rng, num_plans, num_alone = Random(seed), 0, 0
    while num_alone < 6:
        drawn = drawn_job(rng)
        cluster = replace(drawn.cluster, intra_node=Link(rng.choice([1e8, 1e10]), rng.choice([0.0, 1e-4])))
        drawn = replace(drawn, cluster=cluster, cost=Analytic(cluster))
        terms, size = ShapeTerms(drawn, ExampleRows(drawn)), drawn.batch_size
        for plan in filter(None, (drawn_plan(rng, drawn) for _ in range(12))):
            first, *others = plan.units
            cps = [cp for cp in (2, 3, 4, 5) if cp * first.tp * first.pp <= cluster.num_ranks]
            if plan.schedule == "data_parallel" or others or not cps:
                continue
            unit = replace(first, cp=rng.choice(cps), dp=1)
            caps = {BACKBONE: 10**6} if rng.random() < 0.3 else {}
            microbatch = rng.choice([size, size, max(size // 2, 1)])
            plan = replace(plan, units=(unit,), microbatch_size=microbatch, microbatch_caps=caps)
            try:
                check_fit(plan)
                assignment = assign_batch(plan, drawn.batch, drawn.cost)
                step_s = step_s_of(plan, planned(plan), assignment, drawn.cost)
            except (UserError, ArgumentError):  # It does not fit, or its Program does not run.
                continue
            of_shape = np.max(list(terms.of(shape_of(plan)).values()), axis=0)
            cells = len(np.unique(assignment.modules[BACKBONE].microbatch))
            assert of_shape[cells - 1] <= step_s * (1 + 1e-9), plan
            num_plans, num_alone = num_plans + 1, num_alone + (cells == 1)
    assert num_plans >= num_alone


def test_keys_that_ranks_exchange_in_one_cell_are_in_the_bound():
    """On slow links a bound without them would be far below; in several cells, ranks may have whole sequences."""
    small = on_links(job(model(frozen=True), batch_size=4, memory_mbytes=1e5), Link(1e10, 1e-5))
    seconds, free = (ShapeTerms(each, ExampleRows(each)) for each in (small, on_links(small, Link(1e15, 0.0))))
    shape = Shape(1, 4, 1, 1)
    one, two = (seconds.of(shape)["work"] - free.of(shape)["work"])[:2]
    plan = Plan(small.model, small.cluster, (Unit("all", (small.model.num_blocks,), cp=4),), 4, 4)
    step_s = step_s_of(plan, planned(plan), assign_batch(plan, small.batch, small.cost), small.cost)
    assert 0 < two < one / 2
    assert 0.8 * step_s < seconds.of(shape)["communication"][0] <= step_s


def test_rows_of_encoders_go_to_their_places_in_any_number_of_cells():
    """Their seconds on two ranks are exact: half of each rank's half goes to the other, and its gradient comes back."""
    bytes_per_s = 1e9
    small, free = (on_links(job(batch_size=8, memory_mbytes=1e5), Link(speed, 0.0)) for speed in (bytes_per_s, 1e15))
    of_cells = [ShapeTerms(each, ExampleRows(each)).of(Shape(1, 2, 1, 2))["work"][0] for each in (small, free)]
    rows = sum(int(small.batch.of(name).num_tokens.sum()) for name in ("image", "audio"))
    width = small.model.moved("image")[0].output_width
    reached = bytes_per_s * small.cost.efficiency.links
    assert of_cells[0] - of_cells[1] == pytest.approx(2 * rows * width * 2 / 4 / reached / 2, rel=1e-3)


def test_items_of_an_example_are_on_the_ranks_of_its_sequence_unless_phases_are_colocated():
    """One example has by far the most images: its replica computes all of them."""
    few, many = ({"length": {"value": length}, "length_per_token": 4} for length in (40, 40000))
    texts = {"value": 400}
    tasks = [{"name": name, "text": texts, "items": {"image": each}} for name, each in (("few", few), ("many", many))]
    mixed = Sampler.model_validate({"task": tasks}).workload(num_examples=64)
    image = connect(vit("image", ENCODER, 4), 512)
    spec = multimodal("uneven", language_model(LLM, 2, 4000), [image])
    of_seeds = (replace(job(spec, batch_size=4, memory_mbytes=1e5), workload=mixed, seed=seed) for seed in range(1000))
    given = next(one for one in of_seeds if (one.batch.of("image").length > 1000).sum() == 1)
    terms = ShapeTerms(given, ExampleRows(given))
    chain, colocated = (terms.of(Shape(1, 1, 1, 4, (), kind)) for kind in ("chain", "data_parallel"))
    assert chain["item"].min() > 2 * chain["work"].min()
    assert chain["item"].min() > 2 * colocated["item"].min()
    plan = Plan(given.model, given.cluster, (Unit("all", (given.model.num_blocks,), dp=4),), 4, 1)
    step_s = step_s_of(plan, planned(plan), assign_batch(plan, given.batch, given.cost), given.cost)
    assert 0.8 * step_s < np.max(list(chain.values()), axis=0).min() <= step_s


@pytest.mark.parametrize(("num_ranks", "window"), [(3, 0), (4, 0), (4, 128)])
def test_sequences_that_any_number_of_ranks_share_in_any_way_are_not_below_the_bound(num_ranks, window):
    shape = Transformer(768, 3072, 12, causal=True, window=window)  # As many heads of keys: Ulysses moves the least.
    spec = multimodal("texts", language_model(shape, 4, 4000), [])
    texts = Sampler.model_validate({"task": [{"name": "texts", "text": {"value": 20000}}]}).workload(num_examples=8)
    slow = Link(1e10, 1e-6)
    cluster = Cluster(Device("test", {"bf16": 1e14}, 10**11, 1e12), 1, num_ranks, slow, slow)
    planned = Job(spec, cluster, texts, 1, Analytic(cluster))
    unit = Unit("all", ({"backbone": 1}, {"backbone": 2}, {"backbone": 1}), cp=num_ranks)
    plan = Plan(spec, cluster, (unit,), 1, 1, "interleaved_1f1b")
    assert step_bound(planned).step_s <= predict(plan, texts, planned.cost, seed=planned.seed).step_s


def test_a_plan_on_some_ranks_of_a_node_is_not_below_the_bound():
    """Short sequences: products that two ranks share take less than rows that three share."""
    spec = multimodal("texts", language_model(Transformer(768, 3072, 12, causal=True), 4, 4000), [])
    texts = Sampler.model_validate({"task": [{"name": "texts", "text": {"value": 50}}]}).workload(num_examples=8)
    free = Link(1e15, 0.0)
    cluster = Cluster(Device("test", {"bf16": 1e12}, 10**11, 1e12), 1, 3, free, free)
    planned = Job(spec, cluster, texts, 1, Analytic(cluster))
    plan = Plan(spec, cluster, (Unit("all", ({"backbone": 4},), tp=2),), 1, 1)
    assert step_bound(planned).step_s <= predict(plan, texts, planned.cost, seed=planned.seed).step_s


def test_padding_is_the_least_in_the_best_groups_of_items():
    """Of clips of 2, 2, 3 and 9 rows: together 4 * 9, in two cells 3 * 3 + 9, and in three 2 * 2 + 3 + 9."""
    every, of_items = np.ones(4, dtype=bool), np.array([[9.0, 2.0, 3.0, 2.0], [81.0, 4.0, 9.0, 4.0]])
    padded = LayerRows(of_items, every, every, of_items).padded
    assert padded.tolist() == [[36, 18, 16, 16], [324, 108, 98, 98]]


def test_clips_that_are_padded_to_a_long_one_take_longer_together_than_apart():
    drawn = job(spread=1.0)
    of_cells = BlockSeconds(drawn, ExampleRows(drawn)).padded("audio", 1)[0].sum(axis=0)
    even = BlockSeconds(drawn, ExampleRows(drawn)).even("audio", 1, 1, np.ones(1))[0].sum()
    assert of_cells[0] > 1.5 * even and of_cells[:4].argmin() == 3


@pytest.mark.slow
def test_the_report_says_how_far_the_answer_can_be_from_the_best():
    found = search(job(spread=0.5), STRATEGIES)
    gap = found.best.prediction.step_s / found.bound.step_s - 1
    assert 0 < gap < 1
    assert any(f"at most {gap:.0%} above the best possible" in words for words in winner_in_words(found))


class CheaperRuns(Analytic):
    """Runs of items that ranks share take half of what whole items do, but for those that are many."""

    def layer_seconds(self, module, layer, work, tp=1):
        plain = super().layer_seconds(module, layer, work, tp)
        share = 1.0 if work.runs is None else np.where(work.runs.number > 9, 1.0, 0.5)
        return plain._replace(forward_s=plain.forward_s * share)


def test_what_ranks_share_counts_as_its_cheapest_runs():
    """A bound of shapes in which ranks share items is one whatever their runs are; of others it is as before."""
    drawn = job(batch_size=8)
    cheaper = replace(drawn, cost=CheaperRuns(drawn.cluster))

    def forward_s(given_job, cp, **how):
        return BlockSeconds(given_job, ExampleRows(given_job), **how).even("backbone", 1, cp, np.ones(1))[0].sum()

    assert forward_s(cheaper, 1) == forward_s(drawn, 1)
    assert forward_s(cheaper, 2) == pytest.approx(forward_s(drawn, 2) / 2)
    assert forward_s(cheaper, 1, cuts=True) == pytest.approx(forward_s(drawn, 1) / 2)


def test_all_of_a_module_on_one_rank_is_no_more_than_ranks_that_share_it_take():
    """Encoders apart are priced on one rank, and the floor of a shape too, which stand for ranks that share items."""
    drawn = job(batch_size=8)
    cheaper = replace(drawn, cost=CheaperRuns(drawn.cluster))
    many, few = (PassSeconds(each, ExampleRows(each)) for each in (drawn, cheaper))
    shape = Shape(1, 1, 1, 1, ("audio",), "chain")
    forward_s = [[each.alone("audio", shape, left)[0].sum() for left in (1, 2)] for each in (many, few)]
    assert forward_s[1] == pytest.approx([forward_s[0][0], forward_s[0][1] / 2])
    on_two = Shape(1, 2, 1, 1, ("audio",), "chain")
    assert few.floor_s(on_two) < many.floor_s(on_two)


def test_encoders_in_bubbles_may_run_beside_sums_of_products():
    """Of the backbone's sums half may be hidden, and those of encoders whole: a bound that adds both is not proven."""
    small, shape = on_links(job(batch_size=16), Link(1e9, 1e-5)), Shape(2, 1, 1, 2, (), "bubbles")
    device = replace(small.cluster.device, overlaps=False)
    alone = replace(small.cluster, device=device)
    others = [replace(small, cluster=cluster, cost=Analytic(cluster)) for cluster in (small.cluster, alone)]
    beside, waiting = (ShapeTerms(each, ExampleRows(each)).of(shape)["work"].min() for each in others)
    seconds = BlockSeconds(small, ExampleRows(small))
    free = on_links(small, Link(1e15, 0.0))
    without = BlockSeconds(free, ExampleRows(free))
    cells = np.full(1, 2.0)
    sums = [each.even("backbone", 2, 1, cells)[[0, 2]].sum() / 2 for each in (seconds, without)]
    assert beside < waiting
    assert waiting - beside >= 0.5 * (sums[0] - sums[1]) * (1 - 1e-6)
