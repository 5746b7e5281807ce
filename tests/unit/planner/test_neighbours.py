"""Neighbours of a Plan: they hold the same blocks, differ from it, and reach every degree, cut and grouping."""

from collections import Counter
from dataclasses import replace
from itertools import combinations, pairwise

import numpy as np
import pytest

from motet.core.errors import UserError
from motet.core.plan import Plan, Unit
from motet.core.shapes import connect, language_model, multimodal, vit
from motet.planner.neighbours import neighbours
from motet.planner.quick_estimate import quick_estimate
from motet.planner.regrouping import regrouped
from motet.schedule import check_fit, planned
from motet.simulate.predict.predict import predict
from unit.planner.jobs import ENCODER, LLM, job

JOB = job(spread=0.5, batch_size=8)
ALL = ({"image": 6, "audio": 2}, {"audio": 2, "backbone": 8})


def plan(*units, schedule="1f1b", microbatch_size=2, **options):
    return Plan(JOB.model, JOB.cluster, units, JOB.batch_size, microbatch_size, schedule, **options)


PLANS = {
    "chain": plan(Unit("all", ALL, dp=2, pp=2), schedule="zb_h1"),
    "recomputed": plan(Unit("all", ALL, dp=2, pp=2, recompute=({"image": 6}, {"audio": 1, "backbone": 3}))),
    "interleaved": plan(
        Unit("all", ({"image": 6}, {"audio": 4}, {"backbone": 5}, {"backbone": 3}), pp=2), schedule="interleaved_1f1b"
    ),
    "side by side": plan(
        Unit("image", ({"image": 3}, {"image": 3}), 0, pp=2),
        Unit("audio", ({"audio": 4},), 2, dp=2),
        Unit("backbone", ({"backbone": 8},), 4, dp=2),
    ),
    "in caps": plan(Unit("all", ALL, dp=2, pp=2), order="both", microbatch_caps={"image": 4000, "backbone": 4000}),
    "colocated": plan(
        Unit("all", ({"image": 6, "audio": 4, "backbone": 8},), dp=8, zero=3),
        schedule="data_parallel",
        microbatch_size=1,
    ),
}


def fitting(made):
    for other in (*neighbours(JOB, made), *regrouped(JOB, made)):
        try:
            check_fit(other)
        except UserError:
            continue
        yield other


def key(made):
    fields = made.units, made.microbatch_size, made.schedule, made.balance, made.order, made.microbatch_caps
    return repr(fields)


def blocks(made):
    held = Counter()
    for unit in made.units:
        for stage in unit.stages:
            held.update(stage)
    return held


@pytest.mark.parametrize("name", PLANS)
def test_neighbours_hold_the_same_blocks_and_can_be_executed(name):
    found = list(fitting(PLANS[name]))
    assert len(found) > 8
    for other in found:
        assert blocks(other) == blocks(PLANS[name])
        assert (other.model, other.cluster, other.batch_size) == (JOB.model, JOB.cluster, JOB.batch_size)
    for other in found[::7]:
        planned(other)


def test_what_differs_is_one_decision():
    """Every field has a neighbour in which it, and of units nothing else, is another one."""
    found = list(fitting(PLANS["side by side"]))
    assert {unit.zero for other in found for unit in other.units} == {0, 1, 2, 3}
    assert {other.microbatch_size for other in found} == {1, 2, 4}
    assert {(other.order, other.balance) for other in found} >= {
        ("both", "off"), ("intra", "off"), ("inter", "off"), ("given", "joint"), ("given", "per_phase")
    }  # fmt: skip
    image = [next(unit for unit in other.units if "image" in unit.modules) for other in found]
    assert {(unit.tp, unit.cp, unit.pp, unit.dp) for unit in image if unit.modules == ("image",)} >= {
        (2, 1, 1, 1), (1, 2, 1, 1), (1, 1, 1, 2), (1, 1, 2, 2)
    }  # fmt: skip
    assert {unit.modules for unit in image} >= {("image", "audio"), ("image", "backbone")}
    assert any(sum(unit.num_ranks for unit in other.units) > 6 for other in found), "ranks left over are taken"


def test_replicas_of_an_encoder_need_not_divide_the_examples():
    found = fitting(PLANS["side by side"])
    sizes = {(unit.dp, 4 % unit.dp) for other in found for unit in other.units if unit.modules == ("audio",)}
    assert (3, 1) in sizes


def test_a_chain_gives_an_encoder_ranks_of_its_own():
    found = [{unit.modules for unit in other.units} for other in fitting(PLANS["chain"])]
    assert {("image",), ("audio", "backbone")} in found and {("audio",), ("image", "backbone")} in found


def test_cuts_move_by_one_block_and_what_recomputes_all_still_does():
    found = [other.units[0] for other in fitting(PLANS["recomputed"])]
    moved = [unit for unit in found if unit.pp == unit.dp == 2 and unit.stages[0] == {"image": 6, "audio": 1}]
    assert {repr(unit.recompute) for unit in moved} >= {repr(({"image": 6, "audio": 0}, {"audio": 1, "backbone": 3}))}


def test_smaller_microbatches_and_other_degrees_are_tried_without_recomputation():
    """With it, each would be slower than a Plan that needs it, and no way would lead to what needs none."""
    found = [other for other in fitting(PLANS["recomputed"]) if not any(unit.recompute for unit in other.units)]
    assert {other.microbatch_size for other in found} >= {1, 4}
    assert {(other.units[0].tp, other.units[0].cp, other.units[0].dp) for other in found} >= {(1, 2, 1), (2, 1, 1)}


def test_degrees_take_any_prime_factor_and_ranks_left_over():
    """Three stages become three ranks that share sequences, and four replicas' ranks one more of those left over."""
    stages = ({"image": 6, "audio": 4}, {"backbone": 4}, {"backbone": 4})
    of_three = {(other.units[0].cp, other.units[0].pp) for other in fitting(plan(Unit("all", stages, pp=3)))}
    assert (3, 1) in of_three
    four = plan(Unit("all", ({"image": 6, "audio": 4, "backbone": 8},), cp=4))
    assert {other.units[0].cp for other in fitting(four)} >= {2, 4, 5}


def test_fewer_replicas_take_all_ranks_that_are_left():
    """Of 7 ranks, 6 in pairs or alone have all 7 on one sequence as a neighbour, which no factor of 6 leads to."""
    cluster = replace(JOB.cluster, num_nodes=1, ranks_per_node=7)
    whole = {"image": 6, "audio": 4, "backbone": 8}
    pairs = replace(plan(Unit("all", (whole,), cp=3, dp=2)), cluster=cluster)
    colocated = plan(Unit("all", (whole,), dp=4), schedule="data_parallel", microbatch_size=1)
    for before in (pairs, replace(colocated, cluster=cluster)):
        shapes = {(other.units[0].cp, other.units[0].dp) for other in fitting(before)}
        assert (7, 1) in shapes
        assert all(cp * dp <= 7 for cp, dp in shapes)


def test_few_blocks_are_cut_anew_in_every_way_where_ranks_have_several_stages():
    """From 3 images, one with a layer of the backbone, ... no single block moves to what is even for both ranks."""
    small = multimodal("small", language_model(LLM, 3, 1000), [connect(vit("image", ENCODER, 4), 512, "linear")])
    folded = Unit("all", ({"image": 3}, {"image": 1, "backbone": 1}, {"backbone": 1}, {"backbone": 1}), pp=2)
    made = Plan(small, JOB.cluster, (folded,), 8, 2, "zb_v")
    given = replace(JOB, model=small)

    def cuts(of):
        found = [other for other in neighbours(given, of) if other.schedule == "zb_v" and other.units[0].pp == 2]
        return {repr(other.units[0].stages) for other in found if other.units[0].dp == 1}

    assert len(cuts(made)) == 20  # The ways to cut seven blocks into four.
    assert repr(({"image": 1}, {"image": 3}, {"backbone": 1}, {"backbone": 2})) in cuts(made)
    unfolded = replace(made, units=(replace(folded, stages=({"image": 4}, {"backbone": 3})),), schedule="zb_h1")
    assert cuts(unfolded) == cuts(made)


def test_chunks_become_fewer_and_more():
    chain = PLANS["chain"]
    halves = replace(chain.units[0], stages=({"image": 6}, {"audio": 4}, {"backbone": 4}, {"backbone": 4}), pp=2)
    interleaved = replace(chain, units=(replace(halves, recompute=()),), schedule="interleaved_1f1b")
    found = [other for other in fitting(interleaved) if other.schedule == "interleaved_1f1b"]
    assert {len(other.units[0].stages) // 2 for other in found if other.units[0].pp == 2} >= {2, 3, 4}
    thirds = ({"image": 6}, {"audio": 4}, *[{"backbone": 2}] * 4)
    more = replace(interleaved, units=(replace(halves, stages=thirds, recompute=()),))
    assert ("zb_v", 4) in {(other.schedule, len(other.units[0].stages)) for other in fitting(more)}


def test_chunks_are_found_on_one_pipeline_rank_and_beside_other_units():
    """One rank's chunks let gradients be reduced beside passes: a search with the schedule pinned found 11 % by it."""
    whole = plan(Unit("all", ({"image": 6, "audio": 4, "backbone": 8},), cp=4))
    assert {(other.schedule, len(other.units[0].stages)) for other in fitting(whole)} >= {("interleaved_1f1b", 2)}
    folded = replace(whole, units=(replace(whole.units[0], stages=ALL),), schedule="zb_v")
    found = {(other.schedule, len(other.units[0].stages)) for other in fitting(folded) if other.units[0].pp == 1}
    assert found >= {("1f1b", 1), ("interleaved_1f1b", 2), ("interleaved_1f1b", 3), ("interleaved_1f1b", 4)}
    units = plan(*PLANS["side by side"].units[:2], Unit("backbone", ({"backbone": 5}, {"backbone": 3}), 4, pp=2))
    found = {(other.schedule, len(other.units[2].stages)) for other in fitting(units) if len(other.units) == 3}
    assert ("interleaved_1f1b", 4) in found


def test_data_parallelism_becomes_replicas_of_one_pipeline_rank():
    found = {(other.schedule, len(other.units[0].stages)) for other in fitting(PLANS["colocated"])}
    assert found >= {("data_parallel", 1), ("1f1b", 1), ("interleaved_1f1b", 2)}


def test_tensor_parallel_groups_keep_to_nodes():
    for other in fitting(PLANS["side by side"]):
        assert all(unit.first_rank % unit.tp == 0 for unit in other.units)


@pytest.mark.parametrize("name", [name for name in PLANS if name != "colocated"])
def test_few_orders_take_less_than_the_busiest_rank_computes(name):
    made = replace(PLANS[name], order="given", microbatch_caps={})
    estimate = quick_estimate(JOB, made)
    step_s = predict(made, JOB.workload, JOB.cost, seed=JOB.seed).step_s
    assert estimate.busiest_s * (1 - 1e-9) <= step_s
    assert estimate.busiest_s <= estimate.estimate_s <= 1.2 * step_s


def test_encoders_in_bubbles_have_no_neighbours():
    made = plan(Unit("backbone", ({"backbone": 4},) * 2, pp=2), Unit("image", ({"image": 6},), dp=2))
    assert not list(neighbours(JOB, made)) and not list(regrouped(JOB, made))


def test_of_many_cuts_the_evenest_are_tried_where_a_descent_asks_for_them():
    """18 blocks into four stages of two ranks: no single move leads to the cut with the least busy rank."""
    unit = PLANS["interleaved"].units[0]
    costs = [JOB.block_costs(name, 2, 1) for name in ("image", "audio", "backbone")]
    seconds = np.concatenate([cost.forward_s + cost.backward_s for cost in costs])

    def busiest_s(stages):
        of_stage = [part.sum() for part in np.split(seconds, np.cumsum([sum(stage.values()) for stage in stages])[:-1])]
        return max(of_stage[0] + of_stage[2], of_stage[1] + of_stage[3])

    def least_s(**options):
        found = [other.units[0] for other in neighbours(JOB, PLANS["interleaved"], **options)]
        return min(busiest_s(other.stages) for other in found if (other.pp, len(other.stages)) == (2, 4))

    every = combinations(range(1, len(seconds)), 3)
    best_s = min(busiest_s([{"": stop - start} for start, stop in pairwise((0, *cut, len(seconds)))]) for cut in every)
    assert least_s(is_recut=True) == pytest.approx(best_s, rel=1e-9)
    assert best_s < 0.99 * least_s() < 0.99 * busiest_s(unit.stages)
