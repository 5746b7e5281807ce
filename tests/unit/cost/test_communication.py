"""Alpha-beta times: closed forms by hand, and what must hold for any cluster."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from motet.core.cluster import Cluster, Device, Link
from motet.core.errors import ArgumentError
from motet.core.exchange import Moved
from motet.cost.catalogue import cluster
from motet.cost.communication import all_reduce_s, all_to_all_s, gather_s, send_s

DEVICE = Device("any", {"bf16": 1e15}, 80 * 10**9, 1e12)
INSIDE, BETWEEN = Link(400.0, 1.0), Link(80.0, 5.0)
NODES = Cluster(DEVICE, 4, 8, INSIDE, BETWEEN)
"""Round numbers: 400 and 80 bytes a second, 1 and 5 seconds."""

clusters = st.builds(
    lambda inside, ratio, latency_s, longer, per_node: Cluster(
        DEVICE, 16, per_node, Link(inside, latency_s), Link(inside / ratio, latency_s * longer)
    ),
    st.floats(1e8, 1e12),
    st.floats(1, 100),
    st.floats(0, 1e-4),
    st.floats(1, 20),
    st.integers(1, 8),
)
sizes = st.floats(1, 1e12)


def even_exchange_s(cluster, size_bytes, ranks):
    """The exchange in which each rank sends size_bytes to the others in even shares; all nodes have as many ranks."""
    nodes = [cluster.node_of(rank) for rank in ranks]
    each = np.ones((2, len(ranks))) * np.asarray(size_bytes)[..., None, None] / max(len(ranks) - 1, 1)
    num_beside = nodes.count(nodes[0]) - 1
    return all_to_all_s(cluster, Moved(each * num_beside, each * (len(ranks) - 1 - num_beside)), ranks)


def on(cluster, num_nodes, per_node):
    """The first ranks of the first nodes."""
    return [node * cluster.ranks_per_node + place for node in range(num_nodes) for place in range(per_node)]


def test_send():
    assert send_s(NODES, 800, [0, 7]) == 1 + 800 / 400
    assert send_s(NODES, 800, [7, 8]) == 5 + 800 / 80


def test_ring_in_a_node():
    assert gather_s(NODES, 1600, range(4)) == 3 * 1 + 3 / 4 * 1600 / 400


def test_ring_of_ranks_that_have_a_node_each():
    assert gather_s(NODES, 1600, [0, 8, 16, 24]) == 3 * 5 + 3 / 4 * 1600 / 80


@pytest.mark.parametrize(("per_node", "bytes_per_s"), [(2, 160), (4, 320), (5, 400), (8, 400)])
def test_rings_over_nodes_share_the_cards_of_a_node(per_node, bytes_per_s):
    n = 3 * per_node
    expected = 2 * 5 + (n - 3) * 1 + (n - 1) / n * 2400 / bytes_per_s
    assert gather_s(NODES, 2400, on(NODES, 3, per_node)) == pytest.approx(expected)


def test_the_node_with_fewest_ranks_holds_the_rings_up():
    assert gather_s(NODES, 1200, [0, 1, 8]) == pytest.approx(5 + 1 + 2 / 3 * 1200 / 80)


def test_all_reduce_is_a_ring_for_much_and_a_tree_for_little():
    everyone = range(32)
    much, little = 1e6, 1.0
    assert all_reduce_s(NODES, much, everyone) == 2 * gather_s(NODES, much, everyone)
    assert all_reduce_s(NODES, little, everyone) == 2 * (2 * 5 + 7 * 1) + 2 * 1 / 400


def test_exchange_inside_nodes_and_between_them():
    # A node: all goes straight to the others. A node each: likewise, over the network.
    assert even_exchange_s(NODES, 700, range(8)) == 7 * 1 + 700 / 400
    assert even_exchange_s(NODES, 300, [0, 8, 16, 24]) == 3 * 5 + 300 / 80
    # Two nodes of two, 300 bytes: 100 for the other rank of the node, 200 for those of the other one.
    assert even_exchange_s(NODES, 300, [0, 1, 8, 9]) == pytest.approx((1 + 100 / 400) + (5 + 200 / 80))


def test_the_slowest_rank_is_the_exchange():
    # Rank 0 sends 400 to rank 1, beside it, and rank 8 sends 80 to rank 0, from another node: rank 0 has both.
    inside, crossing = np.zeros((2, 2, 3))
    inside[0, 0] = inside[1, 1] = 400
    crossing[0, 2] = crossing[1, 0] = 80
    assert all_to_all_s(NODES, Moved(inside, crossing), [0, 1, 8]) == 5 + 80 / 80
    crossing[0] = [80, 0, 0]
    assert all_to_all_s(NODES, Moved(inside, crossing), [0, 1, 8]) == (1 + 400 / 400) + (5 + 80 / 80)


@pytest.mark.parametrize("seconds", [send_s, gather_s, all_reduce_s, even_exchange_s])
def test_nothing_is_sent_to_nobody(seconds):
    assert seconds(NODES, 1e9, [3]) == 0
    assert seconds(NODES, np.array([0.0, 1e9]), [0, 1]).tolist() == [0, seconds(NODES, 1e9, [0, 1])]


@pytest.mark.parametrize("seconds", [send_s, gather_s, all_reduce_s, even_exchange_s])
@given(on_cluster=clusters, size=sizes, more=st.floats(1, 100), num_nodes=st.integers(1, 16))
def test_more_bytes_never_take_less(seconds, on_cluster, size, more, num_nodes):
    ranks = on(on_cluster, num_nodes, on_cluster.ranks_per_node)
    assert seconds(on_cluster, size * more, ranks) >= seconds(on_cluster, size, ranks) * (1 - 1e-12)


@pytest.mark.parametrize("seconds", [gather_s, all_reduce_s, even_exchange_s])
@given(on_cluster=clusters, size=sizes, num_nodes=st.integers(1, 15), per_node=st.integers(1, 7))
def test_more_ranks_never_take_less(seconds, on_cluster, size, num_nodes, per_node):
    """More nodes of as many ranks; or, in one node, more ranks. (More ranks in each of several nodes bring cards.)"""
    per_node = min(per_node, on_cluster.ranks_per_node)
    fewer = seconds(on_cluster, size, on(on_cluster, num_nodes, per_node))
    assert seconds(on_cluster, size, on(on_cluster, num_nodes + 1, per_node)) >= fewer * (1 - 1e-12)
    if per_node < on_cluster.ranks_per_node:
        assert seconds(on_cluster, size, range(per_node + 1)) >= seconds(on_cluster, size, range(per_node)) * (
            1 - 1e-12
        )


@pytest.mark.parametrize("seconds", [send_s, gather_s, all_reduce_s, even_exchange_s])
def test_nvlink_then_pcie_then_network(seconds):
    size = 1e9
    nvlink = seconds(cluster("h100"), size, range(2))
    pcie = seconds(cluster("a40"), size, range(2))
    network = seconds(cluster("a40", num_nodes=2), size, [0, 4])
    assert nvlink < pcie < network


@pytest.mark.parametrize("ranks", [[], [0, 0], [-1, 2], [31, 32]])
def test_ranks_must_be_of_the_cluster(ranks):
    with pytest.raises(ArgumentError, match="they must be different ones of 0 to 31"):
        gather_s(NODES, 1.0, ranks)
