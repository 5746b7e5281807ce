"""Node-wise renaming: the rank that sends most to other nodes sends little."""

from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from motet.balance import place_on_nodes
from motet.core.errors import ArgumentError
from motet.core.nodes import node_of_ranks
from unit.balance.contract import BACKENDS, nodes_of


def most_sent(volume, ranks, ranks_per_node):
    """Equation 5: the largest volume that a source sends to other nodes."""
    node = node_of_ranks(ranks_per_node, len(volume))
    stays = node[:, None] == node[np.asarray(ranks, dtype=np.int64)][None, :]
    return int(np.where(stays, 0, volume).sum(axis=1).max(initial=0))


@st.composite
def volumes(draw, max_ranks=10):
    num_ranks = draw(st.integers(0, max_ranks))
    largest = draw(st.sampled_from([1, 9, 2**40]))
    part = st.just(0) | st.integers(0, largest)
    row = st.lists(part, min_size=num_ranks, max_size=num_ranks)
    rows = draw(st.lists(row, min_size=num_ranks, max_size=num_ranks))
    return np.array(rows, dtype=np.int64).reshape(num_ranks, num_ranks)


@settings(max_examples=40)
@given(volume=volumes(), data=st.data())
def test_permutation_and_equal_backends(volume, data):
    ranks_per_node = data.draw(nodes_of(len(volume)))
    native, reference = (place_on_nodes(volume, ranks_per_node, backend=backend) for backend in BACKENDS)
    assert native.dtype == np.int64
    assert sorted(native.tolist()) == list(range(len(volume)))
    np.testing.assert_array_equal(native, reference)


@settings(max_examples=40)
@given(volume=volumes(max_ranks=6), data=st.data())
def test_exact_is_the_optimum(volume, data):
    ranks_per_node = data.draw(nodes_of(len(volume)))
    every = permutations(range(len(volume)))
    best = min(most_sent(volume, ranks, ranks_per_node) for ranks in every)
    exact = place_on_nodes(volume, ranks_per_node, exact=True)
    assert sorted(exact.tolist()) == list(range(len(volume)))
    assert most_sent(volume, exact, ranks_per_node) <= best * (1 + 1e-5)
    assert most_sent(volume, place_on_nodes(volume, ranks_per_node), ranks_per_node) >= best


def balanced_volume(num_ranks, items_a_rank, seed):
    """What sources hold of batches that were balanced without regard to where items are."""
    rng = np.random.default_rng(seed)
    lengths = np.clip(rng.lognormal(7, 1, num_ranks * items_a_rank), 12, 16_000).astype(np.int64)
    home = np.repeat(np.arange(num_ranks), items_a_rank)
    volume = np.zeros((num_ranks, num_ranks), dtype=np.int64)
    np.add.at(volume, (home, rng.permutation(home)), lengths)
    return volume


@pytest.mark.parametrize(("num_ranks", "ranks_per_node"), [(8, 2), (16, 4), (12, 8), (12, (1, 8, 3)), (9, (3, 5, 1))])
def test_near_the_optimum(num_ranks, ranks_per_node):
    ratios = []
    for seed in range(4):
        volume = balanced_volume(num_ranks, 20, seed)
        exact = most_sent(volume, place_on_nodes(volume, ranks_per_node, exact=True), ranks_per_node)
        ratios.append(most_sent(volume, place_on_nodes(volume, ranks_per_node), ranks_per_node) / exact)
    assert max(ratios) <= 1.01


@pytest.mark.parametrize(("seed", "best"), [(0, 107969), (1, 100661), (2, 103375), (3, 99095), (4, 101374)])
def test_within_one_percent_at_128_ranks(seed, best):
    """HiGHS proves the first; of the others these are the best known, below what it finds in 150 s."""
    volume = balanced_volume(128, 60, seed)
    assert most_sent(volume, place_on_nodes(volume, 8), 8) <= 1.01 * best


def test_a_node_of_all_ranks_sends_nothing():
    volume = balanced_volume(8, 4, 0)
    assert most_sent(volume, place_on_nodes(volume, 8), 8) == 0
    assert sorted(place_on_nodes(volume, 100).tolist()) == list(range(8))


def test_batches_return_to_where_they_came_from():
    home = np.array([3, 1, 0, 2, 5, 4])
    volume = np.zeros((6, 6), dtype=np.int64)
    volume[home, np.arange(6)] = 2**50
    assert (place_on_nodes(volume, 2) // 2 == home // 2).all()


@pytest.mark.parametrize(
    ("volume", "ranks_per_node", "sentence"),
    [
        ([[1, 2]], 1, r"volume has shape \(1, 2\)"),
        ([1, 2], 1, r"volume has shape \(2,\)"),
        ([[1, -2], [0, 0]], 1, r"volume\[0, 1\] is -2"),
        ([[0.5]], 1, r"volume\[0, 0\] is 0.5"),
        ([[2**62, 2**62], [0, 0]], 1, "volume adds up to 9223372036854775808"),
        ([[1]], 0, "ranks_per_node is 0"),
        (
            [[1, 0], [0, 1]],
            (1, 2),
            r"ranks_per_node is \(1, 2\); it must be numbers .* add up to num_ranks, which is 2",
        ),
        ([[1, 0], [0, 1]], (0, 2), r"ranks_per_node is \(0, 2\); it must be numbers of at least 1 "),
    ],
)
def test_wrong_input(volume, ranks_per_node, sentence):
    with pytest.raises(ArgumentError, match=sentence):
        place_on_nodes(volume, ranks_per_node)
