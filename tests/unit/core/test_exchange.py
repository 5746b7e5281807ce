"""The bytes that each rank moves inside its node and between nodes, and their seconds."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from motet.core.cluster import Link
from motet.core.exchange import (
    Moved,
    Network,
    exchange_s,
    hop_of_all_gather,
    moved,
    sent_in_all_gather,
    starts_in_all_gather,
)


@given(st.integers(1, 6), st.integers(1, 4), st.integers(1, 3), st.integers(0, 99))
def test_every_byte_is_sent_and_received_inside_or_between(num_ranks, per_node, num_groups, seed):
    rng = np.random.default_rng(seed)
    source, sink = rng.integers(0, num_ranks, (2, 40))
    amount, group = rng.integers(0, 1000, 40), rng.integers(0, num_groups, 40)
    node = np.arange(num_ranks) // per_node
    found = moved(source, sink, amount, node, group, num_groups)
    inside, crossing = np.zeros((2, num_groups, 2, num_ranks))
    for a, b, size, number in zip(source, sink, amount, group):
        if a != b:
            into = inside if node[a] == node[b] else crossing
            into[number, 0, a] += size
            into[number, 1, b] += size
    np.testing.assert_array_equal(found.inside, inside)
    np.testing.assert_array_equal(found.crossing, crossing)
    np.testing.assert_array_equal(found.busiest, (inside + crossing).max(axis=(1, 2)))


def test_rows_become_bytes_of_one_tensor_parallel_rank():
    rows = Moved(np.array([[3.0], [0.0]]), np.array([[0.0], [5.0]]))
    assert rows.in_bytes(4, num_shares=2).whole.tolist() == [[6.0], [10.0]]


def test_the_slowest_rank_counts_not_the_busiest():
    # Rank 0 moves 90 bytes inside its node, rank 1 moves 20 between nodes, which takes longer.
    some = Moved(np.array([[90.0, 0.0], [0.0, 0.0]]), np.array([[0.0, 20.0], [0.0, 0.0]]))
    assert exchange_s(some, lambda size: size, lambda size: 10 * size) == 200
    assert Network(Link(1.0, 0.5), Link(0.1, 0.25), 1).exchange_s(some) == 200.25
    assert Network(Link(1.0, 0.5), Link(1.0, 0.5), 1).exchange_s(some) == 90.5


def test_nothing_takes_no_time():
    none = Moved(np.zeros((2, 3)), np.zeros((2, 3)))
    assert Network(Link(1.0, 5.0), Link(0.1, 9.0), 1).exchange_s(none) == 0
    assert Link(1.0, 5.0).seconds(np.array([0.0, 2.0])).tolist() == [0.0, 7.0]


def test_a_network_without_nodes_is_one_node():
    assert Network.of(Link(1.0, 0.0)).nodes(4).tolist() == [0, 0, 0, 0]
    assert Network(Link(1.0, 0.0), Link(1.0, 0.0), 2).nodes(5).tolist() == [0, 0, 1, 1, 2]
    assert Network.of(Link(1.0, 0.0)).nodes(0).tolist() == []


def test_a_ring_passes_on_shares_as_long_as_the_longest():
    # Ranks hold 5, 0, 7 and 2; nodes are (0, 1, 2) and (3), so rank 2 and rank 3 send to another node.
    holder, amount, node = np.array([0, 2, 2, 3]), np.array([5, 3, 4, 2]), np.array([0, 0, 0, 1])
    hop = hop_of_all_gather(holder, amount, node)
    assert hop.whole.tolist() == [[[7, 7, 7, 7], [7, 7, 7, 7]]]
    assert hop.crossing.tolist() == [[[0, 0, 7, 7], [7, 0, 0, 7]]]
    assert sent_in_all_gather(holder, amount, node) == (3 * 4 * 7, 3 * 2 * 7)
    assert sent_in_all_gather(holder, amount, np.zeros(4, np.int64)) == (3 * 4 * 7, 0)
    share, starts = starts_in_all_gather(np.array([0, 2, 1, 3]), holder, amount, 4)
    # Rank 2 holds item 2 before item 1.
    assert share == 7 and starts.tolist() == [0, 2 * 7 + 4, 2 * 7, 3 * 7]
