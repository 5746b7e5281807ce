"""What ranks of data parallelism are priced for where they share long items."""

from dataclasses import replace

import numpy as np
import pytest

from motet.assign.balancing import by_operations
from motet.assign.plan import assign_step
from motet.assign.step import joined
from motet.balance.scoring import scored
from motet.core.cluster import Link
from motet.core.cuts import ItemCuts
from motet.core.errors import UserError
from motet.core.plan import Plan, Unit
from motet.core.shapes import Transformer, connect, language_model, multimodal, vit
from motet.core.workload import BACKBONE, BatchLengths, ItemLengths
from motet.cost.catalogue import cluster
from motet.schedule import check_fit, planned
from motet.simulate.predict.predict import predict_assigned
from motet.simulate.predict.stage_pricing import Pricing
from unit.simulate.jobs import Linear

LENGTHS = np.array([900, 100, 60, 40, 50, 50, 50, 49])
"""Of two microbatches of four ranks: the first has a sequence that is more than a rank's share."""
SHAPE = Transformer(16, 32, 2, causal=True)


def plan_of(balance="split", *, has_images=False, padded=False, **options):
    image = connect(vit("image", Transformer(8, 16, 2), num_layers=1), output_dim=16)
    model = multimodal("tiny", language_model(SHAPE, 2, 100), [replace(image, padded=padded)] if has_images else [])
    unit = Unit("all", ({"image": 1, "backbone": 2} if has_images else {"backbone": 2},), dp=4)
    return Plan(model, cluster("h100"), (unit,), len(LENGTHS), 1, "data_parallel", balance=balance, **options)


def lengths_of(images=None):
    items = {} if images is None else {"image": ItemLengths(np.arange(len(images)), images, images // 4)}
    return BatchLengths(LENGTHS, np.full(len(LENGTHS), 3), np.zeros(len(LENGTHS), np.int32), items)


def cheaply(plan):
    """Costs by which exchanges take no time, and examples stay in their microbatch."""
    costs = by_operations(plan)
    return replace(costs, times=replace(costs.times, link=Link(1e30, 0.0)), defers=False)


def test_a_long_sequence_is_priced_on_the_ranks_that_share_it():
    plan = plan_of()
    step = assign_step(plan, lengths_of(), cheaply)
    assert step.methods[0] == "split" and set(step.modules[BACKBONE].cuts.items.tolist()) <= {0, 1}
    pricing = Pricing(plan, planned(plan), step, Linear(plan.cluster))
    layer = plan.model.module(BACKBONE).layers[1]
    price = pricing.layer_pricing.price(BACKBONE, layer)
    rows = price.work.rows.reshape(4, 2)
    assert rows.sum(axis=0).tolist() == [1100, 199] and rows[:, 0] == pytest.approx([275] * 4, rel=0.05)
    forward, keys = (each.reshape(4, 2) for each in (price.seconds.forward_s, price.context.seconds))
    assert len(set(forward[:, 0])) == 1 < len(set(forward[:, 1])), "those that share wait in each layer"
    assert (keys[:, 0] > 0).all() and not keys[:, 1].any()
    copied = price.context.copied_bytes.reshape(4, 2)
    assert (copied[:, 0] > 0).all() and not copied[:, 1].any()


def test_a_step_with_a_long_sequence_is_shorter_if_ranks_share_it():
    step_s = [
        predict_assigned(plan, planned(plan), assign_step(plan, lengths_of(), cheaply), Linear(plan.cluster)).step_s
        for plan in (plan_of(), plan_of("auto"))
    ]
    assert step_s[0] < 0.6 * step_s[1]


def test_what_costs_more_than_it_gains_is_not_cut():
    def dearly(plan):
        costs = cheaply(plan)
        return replace(costs, times=replace(costs.times, link=Link(1e9, 1.0)))

    step = assign_step(plan_of(), lengths_of(), dearly)
    assert step.methods == assign_step(plan_of("auto"), lengths_of(), dearly).methods
    assert step.modules[BACKBONE].cuts is None


@pytest.mark.parametrize("padded", [False, True])
def test_items_are_padded_only_where_none_is_shared(padded):
    plan = plan_of(has_images=True, padded=padded)
    images = np.array([800, 8, 8, 8, 16, 24, 20, 16])
    step = assign_step(plan, lengths_of(images), cheaply)
    assert step.modules["image"].cuts.items.tolist() == [0]
    pricing = Pricing(plan, planned(plan), step, Linear(plan.cluster))
    layer = plan.model.module("image").layers[1]
    rows = pricing.layer_pricing.price("image", layer).whole.rows.reshape(4, 2)
    assert rows[:, 0].sum() == pytest.approx(images[:4].sum(), abs=8)
    # Each has an item: those beside the longest are as long as any of their rank.
    alone = [images[4:][step.modules["image"].replica[4:] == rank] for rank in range(4)]
    of_second = [len(own) * max(own, default=0) if padded else sum(own) for own in alone]
    assert rows[:, 1] == pytest.approx(np.array(of_second), abs=8)


CUTS = ItemCuts(*(np.array(column) for column in ([0, 0], [2, 0], [0, 1], [1, 4], [4, 4])))
"""Rank 2 has a quarter of the first, and rank 0 the rest."""


def test_rows_go_to_all_ranks_that_share_their_sequence():
    batch = BatchLengths(
        np.array([40, 9]),
        np.ones(2, np.int64),
        np.zeros(2, np.int32),
        {"image": ItemLengths(np.array([0, 0, 1]), np.array([8, 4, 8]), np.array([8, 4, 8]))},
    )
    sequences, images = (scored(np.array(ranks), np.ones(len(ranks), np.int64), 3) for ranks in ([0, 1], [1, 0, 0]))

    def moved(merges=False, **cuts):
        step = joined([batch], [{"image": images, BACKBONE: sequences}], cuts=[cuts])
        return step.moved_rows("image", np.zeros(3, np.int64), merges=merges).inside[0].tolist()

    assert moved() == [[8, 8, 0], [8, 8, 0]]  # Sent, and received.
    # Of 8 rows 2 go to rank 2 and 6 to rank 0; of 4 on rank 0 one goes to rank 2.
    assert moved(backbone=CUTS) == [[1 + 8, 8, 0], [6, 8, 3]]
    assert moved(backbone=CUTS, merges=True) == [[8, 8, 0], [8, 8, 0]], "all go to the rank that merges"
    # Of the first image rank 2 has two rows, and rank 0 six, of which it keeps five.
    assert moved(image=CUTS) == [[8, 0, 2], [2, 8, 0]]
    assert moved(image=CUTS, backbone=CUTS) == [[1 + 1 + 8, 0, 2], [2, 8, 2]]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"microbatch_caps": {BACKBONE: 900}}, "leave microbatch_caps out, or balance by 'auto'"),
        ({"policy": {BACKBONE: "padded"}}, "they are packed, and policy of the backbone is 'padded'"),
        ({"units": (Unit("all", ({"backbone": 2},)),)}, "dp must be 2 or more"),
    ],
)
def test_what_cannot_be_cut_is_refused(change, expected):
    check_fit(plan_of())
    with pytest.raises(UserError, match=expected):
        check_fit(replace(plan_of(), **change))


def test_generators_read_whole_sequences():
    model = multimodal("tiny", language_model(SHAPE, 2, 100), [], [vit("drawing", Transformer(8, 16, 2), num_layers=1)])
    plan = replace(plan_of(), model=model, units=(Unit("all", ({"backbone": 2, "drawing": 1},), dp=4),))
    with pytest.raises(UserError, match="'drawing' reads query tokens of whole sequences"):
        check_fit(plan)
