"""Messages are priced over the nodes that their ranks are on, wherever units begin: by the slowest of what is alike."""

from dataclasses import replace

import numpy as np
import pytest

from motet.assign.balancing import by_operations
from motet.core.cluster import Link
from motet.core.exchange import moved
from motet.core.plan import Unit
from motet.cost.analytic import Analytic, Efficiency
from motet.schedule import planned
from motet.simulate.predict.predict import assign_batch
from motet.simulate.predict.stage_pricing import Pricing
from motet.simulate.predict.traffic import Traffic
from unit.simulate.jobs import WHOLE, lengths, plan

INSIDE, BETWEEN = Link(4e6, 1e-3), Link(1e6, 5e-3)
COLOCATED = {"schedule": "data_parallel", "balance": "per_phase"}


def on_nodes(made, num_nodes, ranks_per_node):
    nodes = {"num_nodes": num_nodes, "ranks_per_node": ranks_per_node, "intra_node": INSIDE, "inter_node": BETWEEN}
    return replace(made, cluster=replace(made.cluster, **nodes))


def traffic(made):
    cost = Analytic(made.cluster, efficiency=Efficiency(links=1))
    return Traffic(Pricing(made, planned(made), assign_batch(made, lengths(made.batch_size), cost), cost))


def unlike(unit, num_nodes, ranks_per_node):
    return on_nodes(plan(Unit("all", (WHOLE,), **unit), batch_size=unit["dp"], **COLOCATED), num_nodes, ranks_per_node)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize(("first_rank", "by_node"), [(0, (4, 1)), (3, (1, 4)), (2, (2, 3))])
def test_items_are_exchanged_and_balanced_over_the_nodes_of_their_ranks(first_rank, by_node, tp):
    made = unlike({"dp": 5, "tp": tp, "first_rank": first_rank * tp}, 2, 4 * tp)
    costs = by_operations(made)
    node = costs.times.network.nodes(5)
    assert np.bincount(node).tolist() == list(by_node) == list(made.replicas_by_node)
    found = traffic(made)
    for (source, _), seconds in zip(found.planned.program.edges, found.exchange_s()):
        name = found.planned.stages[source].modules[0]
        if name == "backbone":
            continue
        items, home = found.assignment.modules[name], found.assignment.modules["backbone"].replica
        row_bytes = made.model.moved(name)[0].output_width * found.precision.compute / tp
        sent = moved(items.replica, home[items.example], items.num_tokens, node).in_bytes(row_bytes)
        ranks = made.units[0].ranks[::tp]
        assert seconds == pytest.approx(found.cost.exchange_seconds(sent, ranks))


@pytest.mark.parametrize(
    ("unit", "ranks_per_node", "copies", "shares"),
    [
        ({"dp": 4, "shard_size": 2, "first_rank": 1}, 4, [(1, 2), (3, 4)], [(1, 3), (2, 4)]),
        ({"dp": 4, "shard_size": 2, "first_rank": 3}, 4, [(3, 4), (5, 6)], [(3, 5), (4, 6)]),
        ({"dp": 6, "shard_size": 3, "first_rank": 0}, 4, [(0, 1, 2), (3, 4, 5)], [(0, 3), (1, 4), (2, 5)]),
        ({"dp": 2, "tp": 2, "first_rank": 1}, 4, [(1, 3), (2, 4)], [(1,)]),
        ({"dp": 2, "tp": 2, "first_rank": 1}, 3, [(1, 3), (2, 4)], [(1,)]),
    ],
)
def test_what_is_sharded_takes_as_long_as_in_the_slowest_copy(unit, ranks_per_node, copies, shares):
    made = unlike({"zero": 3, **unit}, 3, ranks_per_node)
    found = traffic(made)
    stage = next(stage for stage in found.planned.stages if stage.modules == ("image",))
    (shared,), collectives, cost = found.collectives._shared(stage), found.collectives.seconds(stage), found.cost

    def slowest(seconds, groups, part=1):
        return max(sum(seconds(size * 2 / part, ranks) for size in sizes) for ranks in groups)

    sizes = [one.total for one in shared.slices]
    assert collectives.gather_s == slowest(cost.gather_seconds, copies)
    sizes = [one.trainable * found.precision.gradient / 2 for one in shared.slices]
    assert collectives.replicas_s == pytest.approx(slowest(cost.all_reduce_seconds, shares, len(copies[0])))


@pytest.mark.parametrize(("first_rank", "ranks_per_node", "crosses"), [(1, 4, True), (2, 4, False), (0, 3, True)])
def test_ranks_that_share_products_sum_over_the_link_of_the_slowest(first_rank, ranks_per_node, crosses):
    made = unlike({"dp": 3, "tp": 2, "first_rank": first_rank}, 3, ranks_per_node)
    pricing = traffic(made).pricing.layer_pricing
    layer = made.model.module("image").layers[1]
    price = pricing.price("image", layer)
    one_node, two_nodes = (0, 1), (0, ranks_per_node)
    expected = pricing.cost.tensor_seconds(layer, price.work, two_nodes if crosses else one_node)
    np.testing.assert_allclose(price.tensor_s, expected)


def test_stages_send_over_the_link_of_the_island_whose_ranks_are_furthest_apart():
    """Ranks 0 to 2 send to ranks 3 to 5, of which rank 3 alone is on their node."""
    units = (Unit("llm", ({"image": 4, "audio": 3, "backbone": 4}, {"backbone": 4}), pp=2, dp=3),)
    far, near = (traffic(on_nodes(plan(*units, batch_size=6), 2, size)) for size in (4, 6))
    for islands in ([0], [0, 1, 2]):
        sent_bytes = far._sent_bytes(0, islands, gradient=False)
        np.testing.assert_allclose(far.send_s(islands)[:, 0], far.cost.send_seconds(sent_bytes, (0, 4)))
        np.testing.assert_allclose(near.send_s(islands)[:, 0], near.cost.send_seconds(sent_bytes, (0, 1)))
