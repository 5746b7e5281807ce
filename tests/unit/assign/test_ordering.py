"""An ordered step has every example once, is the same on every rank, and is never predicted to be slower."""

from dataclasses import replace
from itertools import permutations

import numpy as np
import pytest

from motet.assign.groups import grouped, groups_under
from motet.assign.ordering import _Step
from motet.assign.pipeline import Batching, assign_batching, batching_as_given
from motet.assign.plan import assign_step
from motet.core.errors import ArgumentError
from motet.core.plan import Unit
from motet.core.workload import total_lengths
from motet.schedule import planned, validate
from motet.simulate.predict.predict import assign_batch, predict_assigned
from motet.simulate.predict.step_seconds import PricedSteps
from motet.simulate.show.plan_words import plan_in_words
from unit.simulate.even_jobs import Free
from unit.simulate.jobs import CHAIN, PLANS, Linear, alike, lengths, plan

ORDERS = ["intra", "inter", "both"]
PIPELINES = [name for name in PLANS if name != "data parallel"]
CAPS = {"image": 500, "backbone": 360}


def uneven(num_examples, seed=0):
    """A few examples are several times as long as most."""
    batch = lengths(num_examples, seed)
    factor = 1 + 4 * (np.random.default_rng(seed).random(num_examples) < 0.2)
    images = batch.items["image"]
    longer = replace(images, length=images.length * factor[images.example])
    return replace(batch, sequence=batch.sequence * factor, items={**batch.items, "image": longer})


def ordered(made, batch, cost):
    return _Step(made, batch, PricedSteps(made, cost)).batching()


def step_s(made, batch, batching, cost):
    return predict_assigned(made, planned(made), assign_batching(made, batch, batching), cost).step_s


def columns(batching):
    return batching.microbatch.tolist(), batching.index.tolist()


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", PIPELINES)
def test_every_example_has_a_place_of_its_own(name, order):
    made = replace(PLANS[name], order=order, batch_size=48)
    batch = uneven(48)
    batching = ordered(made, batch, Linear(made.cluster))
    backbone = made.unit_of("backbone")
    num_taken = backbone.dp * made.microbatch_size
    assert sorted(zip(*columns(batching))) == [(m, p) for m in range(48 // num_taken) for p in range(num_taken)]
    assert columns(batching) == columns(ordered(made, batch, Linear(made.cluster)))
    placed = assign_batching(made, batch, batching)
    given = assign_batch(replace(made, order="given"), batch, Linear(made.cluster))
    for module, items in placed.modules.items():
        np.testing.assert_array_equal(items.length, given.modules[module].length)
        np.testing.assert_array_equal(items.microbatch, batching.microbatch[items.example])
        position = batching.index[items.example]
        np.testing.assert_array_equal(items.replica, position * items.num_replicas // num_taken)


@pytest.mark.parametrize("name", PIPELINES)
def test_a_plan_runs_with_every_order(name):
    for order in ORDERS:
        made = replace(PLANS[name], order=order, batch_size=48)
        validate(planned(made).program)
        assert planned(made).program == planned(replace(made, order="given")).program
        batch, cost = uneven(48), Linear(made.cluster)
        found = predict_assigned(made, planned(made), assign_batch(made, batch, cost), cost)
        assert found.num_examples == 48 and found.num_tokens == batch.sequence.sum()


@pytest.mark.parametrize(
    "order", [pytest.param(order, marks=() if order == "both" else pytest.mark.slow) for order in ORDERS]
)
@pytest.mark.parametrize("name", PIPELINES)
def test_no_step_is_slower_as_it_is_simulated(name, order):
    """Messages, collectives and the schedule's own shape count, whether or not messages hold up compute."""
    for seed, overlaps in ((0, True), (1, False), (2, True)):
        made = replace(PLANS[name], order=order, batch_size=48)
        device = replace(made.cluster.device, overlaps=overlaps)
        made = replace(made, cluster=replace(made.cluster, device=device))
        batch, cost = uneven(48, seed), Linear(made.cluster)
        found = step_s(made, batch, ordered(made, batch, cost), cost)
        assert found <= step_s(made, batch, batching_as_given(made), cost) * (1 + 1e-9)


def test_an_interleaved_pipeline_gains_by_its_own_shape():
    """Four stages on two ranks. An order that was made for 1F1B is slower than the given one in some of these steps."""
    gains = []
    for seed in range(6):
        made = replace(PLANS["interleaved"], order="inter", batch_size=48)
        batch, cost = uneven(48, seed), Linear(made.cluster)
        given_s = step_s(made, batch, batching_as_given(made), cost)
        gains.append(1 - step_s(made, batch, ordered(made, batch, cost), cost) / given_s)
    assert min(gains) >= 0 and np.mean(gains) > 0.02


def test_balancing_and_ordering_gain():
    made = plan(Unit("all", CHAIN, dp=2, pp=3), batch_size=48, microbatch_size=2)
    gains = {order: [] for order in ORDERS}
    for seed in range(6):
        batch, cost = uneven(48, seed), Free(made.cluster)
        given_s = step_s(made, batch, batching_as_given(made), cost)
        for order, found in gains.items():
            batching = ordered(replace(made, order=order), batch, cost)
            found.append(1 - step_s(made, batch, batching, cost) / given_s)
    means = {order: np.mean(found) for order, found in gains.items()}
    assert means["intra"] > 0.04 and means["inter"] > 0.02
    assert means["both"] >= max(means["intra"], means["inter"])


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_the_best_order_of_a_few_examples(seed):
    """The step is within 5 % of the best of all ways to give six examples to two replicas of three microbatches."""
    made = plan(Unit("all", CHAIN, dp=2, pp=3), batch_size=6, order="both")
    batch, cost, given = uneven(6, seed), Free(made.cluster), batching_as_given(made)
    found = step_s(made, batch, ordered(made, batch, cost), cost)

    def ways():
        for order in permutations(range(6)):
            if order.index(0) % 2 == 0:  # Replicas are alike.
                yield Batching(given.microbatch[list(order)], given.index[list(order)])

    best = min(step_s(made, batch, batching, cost) for batching in ways())
    assert best <= found * (1 + 1e-9) and found <= 1.05 * best


@pytest.mark.parametrize("name", ["chain", "dp 2 and 1 to 4", pytest.param("zb_h1", marks=pytest.mark.slow)])
def test_an_order_gains_where_replicas_share_sequences(name):
    """No step is slower as it is simulated, and all replicas take a sequence that they share in one microbatch."""
    found_s = []
    for order in ("given", *ORDERS):
        made = replace(PLANS[name], balance="split", order=order, batch_size=48)
        batch, cost = uneven(48), Linear(made.cluster)
        step = assign_batch(made, batch, cost)
        items = step.modules["backbone"]
        assert items.cuts is not None or order in ("intra", "both")
        in_each = items.batch_index(step.num_microbatches)
        assert len(np.unique(in_each * 48 + items.position)) == 48 == len(items.length)
        found_s.append(predict_assigned(made, planned(made), step, cost).step_s)
    given_s, *ordered_s = found_s
    assert max(ordered_s) <= given_s * (1 + 1e-9) and min(ordered_s) < given_s


def test_examples_that_are_alike_stay_where_they_are():
    for name in ("chain", "dp 2 to 4", "in bubbles"):
        made = replace(PLANS[name], order="both")
        assert columns(ordered(made, alike(), Linear(made.cluster))) == columns(batching_as_given(made))


def test_a_plan_that_orders_examples_needs_their_seconds():
    made = replace(PLANS["chain"], order="both")
    with pytest.raises(
        ArgumentError, match=r"order 'both', which is decided from the seconds of examples; pass `seconds`"
    ):
        assign_step(made, lengths())


def test_groups_as_they_come_need_no_seconds():
    placed = assign_step(capped("given"), lengths(48))
    expected = assign_batch(capped("given"), lengths(48), Linear(capped("given").cluster))
    np.testing.assert_array_equal(placed.modules["image"].microbatch, expected.modules["image"].microbatch)


def capped(order, dp=2):
    return plan(Unit("all", CHAIN, dp=dp, pp=3), batch_size=48, microbatch_size=4, order=order, microbatch_caps=CAPS)


@pytest.mark.parametrize("order", ["given", *ORDERS])
@pytest.mark.parametrize("dp", [1, 2, 3])
def test_groups_keep_to_the_caps(order, dp):
    made, batch = capped(order, dp), lengths(48)
    placed = assign_batch(made, batch, Linear(made.cluster))
    assert placed.num_microbatches == 12 // dp
    totals = {}
    for module in ("image", "backbone"):
        items = placed.modules[module]
        totals[module] = np.bincount(items.microbatch * dp + items.replica, items.length, 12)
        assert totals[module].sum() == items.length.sum() and totals[module].max() <= CAPS[module]
    owner = placed.modules["backbone"]
    images = placed.modules["image"]
    np.testing.assert_array_equal(images.microbatch, owner.microbatch[images.example])
    np.testing.assert_array_equal(images.replica, owner.replica[images.example])
    predict_assigned(made, planned(made), placed, Linear(made.cluster))


@pytest.mark.parametrize("seed", range(3))
def test_ordered_groups_are_no_slower_than_groups_as_they_come(seed):
    batch, cost = uneven(48, seed), Free(capped("both").cluster)
    steps = {}
    for order in ("given", *ORDERS):
        made = capped(order)
        steps[order] = predict_assigned(made, planned(made), assign_batch(made, batch, cost), cost).step_s
    assert max(steps[order] for order in ORDERS) <= steps["given"] * (1 + 1e-9)


def test_caps_that_are_too_small_are_widened():
    batch = uneven(48)
    sizes = {name: total_lengths(batch, name) for name in CAPS}
    assert sizes["backbone"].sum() == batch.sequence.sum()
    for caps in ({"image": 1, "backbone": 1}, {"image": 60, "backbone": 60}, CAPS):
        groups = grouped(batch, caps, 12)
        assert len(groups) == 48 and groups.min() >= 0 and groups.max() < 12
    assert groups_under({"image": 60, "backbone": 60}, sizes, 12) is None
    assert groups_under({"image": 10**6, "backbone": 10**6}, sizes, 12).max() == 0


def test_a_plan_says_how_its_examples_are_ordered():
    made = plan(Unit("all", CHAIN, dp=2, pp=3), batch_size=48, microbatch_size=4)
    words = {order: " ".join(plan_in_words(replace(made, order=order))) for order in ("given", *ORDERS)}
    even = "xamples are dealt out in every step so that microbatches and replicas are even"
    ordered = "icrobatches are taken in the order that leaves the shortest bubbles"
    assert "every step" not in words["given"] and "order" not in words["given"]
    assert f" E{even}." in words["intra"] and "order" not in words["intra"]
    assert f" M{ordered}." in words["inter"] and "even" not in words["inter"]
    assert f" E{even}, and m{ordered}." in words["both"]
    assert "at most 500 of image and 360 of backbone" in " ".join(plan_in_words(capped("both")))


def test_a_plan_says_no_more_of_its_order_than_there_is_to_choose():
    """One microbatch a replica, one replica, and both; then single examples, which no microbatch can be even by."""

    def words(order, dp, batch_size, microbatch_size=4):
        made = plan(Unit("all", CHAIN, dp=dp, pp=3), batch_size=batch_size, microbatch_size=microbatch_size)
        return plan_in_words(replace(made, order=order))[1]

    assert words("both", 2, 8).endswith(" Examples are dealt out in every step so that replicas are even.")
    assert words("inter", 2, 8) == words("given", 2, 8)
    assert "so that microbatches are even, and microbatches are taken in the order" in words("both", 1, 8)
    assert words("both", 1, 4) == words("intra", 1, 4) == words("given", 1, 4)
    assert "so that replicas are even, and microbatches are taken" in words("both", 2, 8, 1)
